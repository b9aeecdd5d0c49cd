"""The pages on how shoal works are about the code as it is, and each check of that can fail."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from meta import tours
from meta.source import ROOT, package_tree
from shoal.runtime.rules import meeting_answers
from shoal.runtime.rules.joining import PROTOCOL, Hello
from shoal.runtime.server.callers import ProcessCaller
from shoal.runtime.wire.frames import MAX_HEADER_BYTES, MAX_HELLO_BYTES, MAX_PAYLOAD_BYTES
from shoal.runtime.wire.proof import CHALLENGE
from shoal.runtime.wire.server_sockets import STRANGER_S

TOURS, WIRE, MEETING = (
    (ROOT / "docs" / "how-it-works" / name).read_text(encoding="utf-8")
    for name in ("tours.md", "wire.md", "meeting.md")
)
TO, FROM = "Messages to the coordinator", "Messages from the coordinator"

TREE = {
    "barrier.py": "def barrier(): ...",
    "rules/meeting.py": "class Meeting:\n    def tick(self): ...",
    "client.py": "send({'do': 'beat', **more})\nhello['do'] = 'hello'\nsend({'is': text})",
    "launch/nodes/leader.py": "send({'do': 'node'})",
}
PAGE = """\
[barrier.py](../../src/shoal/barrier.py), `barrier` and
[meeting.py](../../src/shoal/rules/meeting.py), `Meeting`,
`Meeting.tick`.

## Sent
| `beat` | often |
| `end lane` | at last |

## Received
| `gone` | |
"""


def test_every_stop_of_the_tours_exists():
    assert tours.wrong_stops(package_tree(), TOURS, needs_name=True) == []
    assert len(tours.STOP.findall(TOURS)) > 50


def test_every_file_and_function_on_the_other_pages_exists():
    assert tours.wrong_stops(package_tree(), WIRE + MEETING, needs_name=False) == []


def test_the_table_has_the_messages_that_the_code_sends_to_the_coordinator():
    assert tours.rows_below(WIRE, TO) == tours.messages(package_tree(), "do")


def test_the_table_has_the_messages_that_the_coordinator_sends():
    kinds = (answer._field_defaults.get("kind") for answer in get_args(meeting_answers.Answer))
    answers = {kind for kind in kinds if kind} | {"lost", "failed"}  # those of ProcessesGone
    sent = tours.messages(package_tree(), "is") | answers | {CHALLENGE}
    assert tours.rows_below(WIRE, FROM) == sent


def test_the_numbers_on_the_page_are_those_of_the_code():
    header, own = f"{MAX_HEADER_BYTES >> 20} MiB", f"{ProcessCaller.max_body_bytes >> 20} MiB"
    assert f"`PROTOCOL`, now {PROTOCOL})" in WIRE
    assert f"speaks protocol\n{PROTOCOL - 1}, the coordinator {PROTOCOL}:" in WIRE
    assert f"before its proof | {MAX_HELLO_BYTES >> 10} KiB | none |" in WIRE
    assert f"lifetime connection | {header} | {own}:" in WIRE
    assert f"call connection | {header} | {MAX_PAYLOAD_BYTES >> 20} MiB:" in WIRE
    assert f"| a connection proves itself | {STRANGER_S:g} |" in WIRE


def test_the_row_of_hello_has_its_fields():
    row = next(line for line in WIRE.splitlines() if line.startswith("| `hello` | any |"))
    fields = {*Hello._fields, "nonce", "processes"} - {"num_processes"}
    assert {*re.findall(r"`(\w+)`", row.split("|")[3])} == fields


def test_a_good_page_passes():
    assert tours.wrong_stops(TREE, PAGE, needs_name=True) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("barrier.py)", "fence.py)"), "fence.py: does not exist"),
        (("[barrier.py]", "[fence.py]"), "barrier.py: the link calls it fence.py"),
        (("`barrier`", "`fence`"), "barrier.py:fence: does not exist"),
        (("Meeting.tick", "Meeting.tock"), "rules/meeting.py:Meeting.tock: does not exist"),
        ((", `barrier`", ""), "barrier.py: no function is named"),
    ],
)
def test_a_stale_stop_is_found(change, words):
    assert tours.wrong_stops(TREE, PAGE.replace(*change), needs_name=True) == [words]


def test_messages_are_read_from_tables_and_from_code():
    assert tours.rows_below(PAGE, "Sent") == {"beat", "end lane"}
    assert tours.rows_below(PAGE, "Received") == {"gone"}
    assert tours.messages(TREE, "do") == {"beat", "hello"}
    assert tours.messages(TREE, "is") == set()
