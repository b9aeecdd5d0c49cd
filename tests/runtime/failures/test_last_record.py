"""What a process records of its end, and what its launcher reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import DeadlineError, DivergenceError, PeerFailedError, ProcessLostError
from shoal.runtime.failures.facts import MESSAGE_CHARACTERS, CallPlace, ProcessSet, of_json, to_json
from shoal.runtime.failures.last_record import (
    BEGIN,
    END,
    LastRecord,
    cause_of,
    place_of,
    record,
    record_in,
    record_of,
    take,
)
from shoal.runtime.rules.messages import MOST_END
from shoal.runtime.rules.point import Point
from shoal.tracebacks import mark_as_bug


def raised(error_of):
    try:
        error_of()
    except BaseException as error:  # noqa: BLE001 (any)
        return error
    raise AssertionError


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_RECORD_FILE", f"{os.getpid()}:{tmp_path / 'record'}")
    return str(tmp_path / "record")


def test_the_last_record_of_the_process_is_read_and_the_file_removed(path):
    assert record(ValueError("first"))
    assert record(KeyError("second"), process=2, step=7, because_of={0: "it failed"})
    with open(path, "ab") as file:
        file.write(b'{"pid": 1, "at_s": 0, "cause": {"processes": [], "kind": "exception"}}\n')
        file.write(b'{"pid": ')  # torn
    assert oct(os.stat(path).st_mode & 0o777) == "0o600"
    last = take(path, os.getpid()).last
    assert last is not None
    assert (last.cause.error.type, last.cause.error.message) == ("KeyError", "'second'")
    assert (last.cause.processes, last.cause.step) == ((2,), 7)
    assert last.because_of == (0,)
    assert not os.path.exists(path)
    assert take(path, os.getpid()).last is None


def test_nothing_is_recorded_without_a_launcher_or_through_a_link(path, tmp_path, monkeypatch):
    os.symlink(tmp_path / "target", path)
    assert not record(ValueError("x"))
    assert not os.path.exists(tmp_path / "target")
    monkeypatch.setenv("SHOAL_RECORD_FILE", f"{os.getppid()}:{tmp_path / 'other'}")
    assert not record(ValueError("x"))  # a child of the process
    monkeypatch.delenv("SHOAL_RECORD_FILE")
    assert not record(ValueError("x"))
    assert not os.path.exists(tmp_path / "other")


class Hostile(Exception):
    def __str__(self):
        raise RuntimeError("no")


def test_an_exception_that_cannot_be_shown_is_recorded(path):
    assert record(raised(lambda: (_ for _ in ()).throw(Hostile())))
    assert take(path, os.getpid()).last.cause.error.type == "Hostile"


def test_the_frames_are_the_programs_and_the_rest_is_counted():
    cause = cause_of(raised(lambda: np.load("no-such-file")))
    assert cause.frames[-1].file.endswith("test_last_record.py")
    assert cause.frames[-1].source.startswith("cause = cause_of(raised(lambda: np.load(")
    assert cause.left_out == {"numpy": 1}
    assert (cause.kind, cause.exit_code, cause.is_bug) == ("exception", 1, False)


def test_a_refused_call_of_shoal_shows_no_frame_of_it():
    cause = cause_of(raised(lambda: shoal.make_mesh({"data": -7})))
    assert all("shoal/" not in frame.file for frame in cause.frames)
    assert cause.exit_code == 2
    assert cause.left_out == {}


def test_a_bug_shows_all_frames():
    error = raised(lambda: json.loads("{"))
    mark_as_bug(error)
    cause = cause_of(error)
    assert cause.is_bug
    assert cause.frames[-1].file.endswith("json/decoder.py")


def test_recursion_and_long_messages_are_bounded(path):
    def deep(n):
        if n == 0:
            raise ValueError("x" * 100_000)
        deep(n - 1)

    cause = cause_of(raised(lambda: deep(500)))
    assert len(cause.frames) <= 40
    assert len(cause.error.message) == MESSAGE_CHARACTERS
    assert cause.error.message_characters == 100_000
    assert record(raised(lambda: deep(500)))
    assert take(path, os.getpid()).last is not None


def test_causes_and_groups_are_kept():
    def chained():
        try:
            {}["lr"]
        except KeyError as error:
            raise ValueError("no rate") from error

    (inner,) = cause_of(raised(chained)).error.caused_by
    assert (inner.type, inner.message) == ("KeyError", "'lr'")
    line = chained.__code__.co_firstlineno + 2
    assert inner.place.endswith(f"test_last_record.py:{line}")
    group = ExceptionGroup("shards", [OSError("a"), ValueError("b")])
    assert [leaf.type for leaf in cause_of(group).error.leaves] == ["OSError", "ValueError"]


@pytest.mark.parametrize(
    ("error", "kind", "because_of"),
    [
        (PeerFailedError("b", failed={1: "KeyError"}), "exception", (1,)),
        (ProcessLostError("b", lost={2: "silent"}), "lost", (2,)),
        (DivergenceError("b"), "diverged", None),
        (SystemExit(3), "exit", None),
        (ValueError("b"), "exception", None),
    ],
)
def test_processes_that_caused_the_failure_are_recorded(path, error, kind, because_of):
    assert record(error)
    taken = take(path, os.getpid()).last
    assert (taken.cause.kind, taken.because_of) == (kind, because_of)
    wrapped = RuntimeError("in the loop")
    wrapped.__context__ = error
    assert record(wrapped)
    assert take(path, os.getpid()).last.because_of == because_of


STACK = """Thread 'MainThread' (most recent call first):
  File "/x/t.py", line 2 in f: sleep(6)
  File "t.py", line 3 in <module>: f()
"""


def test_deadline_record_has_missing_processes_and_their_places():
    error = DeadlineError(
        "late",
        name="ready",
        waited_s=6.0,
        missing=[1],
        last_words={1: "step 3, last at initialize (train.py:1), 5.5 s ago"},
        stacks={1: STACK},
        places={1: {"call": "initialize", "name": "initialize", "site": "train.py:1 (main)",
                    "age_s": 5.52, "met": True}},
    )  # fmt: skip
    (missing,) = cause_of(error).wait.missing
    assert missing.processes == (1,)
    assert [(frame.line, frame.source) for frame in missing.frames] == [(3, "f()"), (2, "sleep(6)")]
    assert missing.last_met == CallPlace(call="initialize", file="train.py", line=1, age_s=5.5)
    assert missing.words == ""
    error.places[1]["met"] = False  # it waits somewhere else, or is stopped
    (missing,) = cause_of(error).wait.missing
    assert (missing.last_met, missing.words) == (None, error.last_words[1])


def test_a_place_is_the_call_and_its_name():
    assert place_of(Point("b", operation="broadcast", site="a.py:3 (f)")) == CallPlace(
        call="broadcast", name="b", file="a.py", line=3
    )
    assert place_of(Point("initialize")) == CallPlace(call="initialize")


def test_a_record_survives_json():
    last = LastRecord(pid=3, at_s=1.5, cause=cause_of(ValueError("x")), because_of=ProcessSet([]))
    assert of_json(LastRecord, json.loads(json.dumps(to_json(last)))) == last


CHILD = """
import sys, threading
from shoal.runtime.failures.last_record import for_the_log
print("before", file=sys.stderr)
with for_the_log(True):
    print("within", file=sys.stderr)
with for_the_log(False):
    print("after", file=sys.stderr)
"""


def test_what_is_for_the_log_stands_between_two_marks(child_env):
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=child_env, capture_output=True, check=True
    )
    assert done.stderr == b"before\n" + BEGIN + b"within\n" + END + b"after\n"


def test_a_record_that_is_too_long_is_made_shorter(path):
    leaves = [ValueError(f"shard {index}: " + "日本" * 9000) for index in range(8)]
    assert record(ExceptionGroup("shards failed", leaves))
    error = take(path, os.getpid()).last.cause.error
    assert [leaf.message[:7] for leaf in error.leaves] == [f"shard {n}" for n in range(8)]
    assert error.leaves[0].message_characters > len(error.leaves[0].message)


def test_frames_and_leaves_that_are_left_out_are_counted():
    def deep(n):
        return deep(n - 1) if n else {}["end"]

    cause = cause_of(raised(lambda: deep(99)))
    assert cause.error.repeats == 99
    group = cause_of(ExceptionGroup("g", [ValueError(n) for n in range(1000)])).error
    assert len(group.leaves) + group.more_leaves == 1000


def test_a_process_that_can_open_no_file_writes_through_the_one_it_has(path, monkeypatch):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    other = os.open(os.devnull, os.O_WRONLY)

    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("shoal.runtime.failures.last_record.open_no_link", refuse)
    assert not record(ValueError("x"), record_file=(path, other)), "another file has its number"
    assert record(ValueError("x"), record_file=(path, file))
    monkeypatch.undo()
    assert take(path, os.getpid()).last.cause.error.message == "x"
    os.close(file)
    os.close(other)


def test_hostile_records_are_none(path):
    for line in ('{"pid": 1e999}', "[" * 100_000, '{"processes": [[0, 1000000000]]}', "\0", "7"):
        with open(path, "w") as file:
            file.write(line + "\n")
        assert take(path, os.getpid()).last is None
    with pytest.raises(ValueError, match="too long"):
        ProcessSet.of_ranges([(0, 1 << 40)])
    os.mkfifo(path)
    assert take(path, os.getpid()).last is None  # and waits for no writer


def test_exceptions_of_threads_are_kept_beside_the_end_of_the_process(path):
    for name in ("loader", "writer"):
        assert record(OSError(name), thread=name)
    assert record(KeyError("end"))
    taken = take(path, os.getpid())
    assert [(failure.cause.thread, failure.cause.error.message) for failure in taken.threads] == [
        ("loader", "loader"),
        ("writer", "writer"),
    ]
    assert taken.last.cause.error.type == "KeyError"


def test_what_is_sent_to_the_coordinator_is_bounded_and_comes_back():
    error = raised(lambda: exec("raise ValueError('x' * 100_000)"))
    error.__cause__ = OSError("y" * 100_000)
    sent = record_of(error, process=1, step=7, because_of=[3], most_bytes=MOST_END)
    text = json.dumps(to_json(sent))
    assert len(text) <= MOST_END
    assert record_in(text) == sent


FIELDS = st.sampled_from([
    "pid", "at_s", "cause", "because_of", "processes", "kind", "error", "frames", "wait", "place",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=6),
    max_leaves=20,
)


@given(st.text() | JSON.map(json.dumps))
def test_any_text_is_a_record_or_none(text):
    assert isinstance(record_in(text), LastRecord | None)
