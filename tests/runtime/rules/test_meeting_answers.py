"""What travels of an answer is the JSON that it was, and the answer comes back from it."""

from __future__ import annotations

import json

import pytest

from shoal.runtime.rules.meeting_answers import (
    CallLeft,
    CycleSide,
    FailingSince,
    MeetingSide,
    ProcessesGone,
    RecordsApart,
    ServicesLost,
    SidesDiffer,
    StillMissing,
    SurvivorsMet,
    TooLate,
    WaitCycle,
    outcome_of,
)
from shoal.runtime.rules.point import Departure, Fingerprint
from shoal.runtime.rules.record_marks import RecordVersion, RecordVersions
from shoal.runtime.wire.frames import FrameError

VERSIONS = [RecordVersion("3:ab", "w", "t.py:1", [0]), RecordVersion("", "", "", [1, 2])]
TRAVELS = [
    (
        SurvivorsMet([0, 2], [(1, "lost", "killed")], [("JAX's service", "cut off")]),
        '{"alive": [0, 2], "gone": [[1, "lost", "killed"]], '
        '"services": [["JAX\'s service", "cut off"]]}',
    ),
    (
        SidesDiffer(
            [
                MeetingSide("a", "f", "t.py:1", [0], Fingerprint("t.py:1", "", "x: int")),
                MeetingSide("b", "", "", [1, 2]),
            ]
        ),
        '{"sides": [["a", "f", "t.py:1", [0], ["t.py:1", "", "x: int"]], '
        '["b", "", "", [1, 2], null]]}',
    ),
    (
        SidesDiffer([MeetingSide("a", "f", "", [0])], FailingSince(3, "barrier 'a' (t.py:7)")),
        '{"sides": [["a", "f", "", [0], null]], "since": [3, "barrier \'a\' (t.py:7)"]}',
    ),
    (
        TooLate(StillMissing([1], []), 0, 5.0, stacks=[], since=FailingSince(1, "barrier 'a'")),
        '{"missing": [1], "words": [], "by": 0, "timeout_s": 5.0, "at": "", "stacks": [], '
        '"since": [1, "barrier \'a\'"]}',
    ),
    (
        RecordsApart(RecordVersions(VERSIONS)),
        '{"trails": [["3:ab", "w", "t.py:1", [0]], ["", "", "", [1, 2]]]}',
    ),
    (
        RecordsApart(RecordVersions(VERSIONS, "data")),
        '{"trails": [["3:ab", "w", "t.py:1", [0]], ["", "", "", [1, 2]]], "lane": "data"}',
    ),
    (
        WaitCycle(
            [
                CycleSide(MeetingSide("a", "b", "a.py:1 (f)", [0]), "processes=[0, 1]", [1]),
                CycleSide(MeetingSide("c", "b", "a.py:2 (f)", [1]), "all 2 processes", [0]),
            ]
        ),
        '{"circle": [[["a", "b", "a.py:1 (f)", [0], null], "processes=[0, 1]", [1]], '
        '[["c", "b", "a.py:2 (f)", [1], null], "all 2 processes", [0]]]}',
    ),
    (
        TooLate(StillMissing([1, 2], [(1, "joined")]), 0, 5.0, "'a'", [(1, "in fit")]),
        '{"missing": [1, 2], "words": [[1, "joined"]], "by": 0, "timeout_s": 5.0, '
        '"at": "\'a\'", "stacks": [[1, "in fit"]]}',
    ),
    (
        ProcessesGone("lost", [(1, Departure("killed", "lost"))]),
        '{"gone": [[1, ["killed", "lost", "", "", false]]]}',
    ),
    (
        ProcessesGone("failed", [(1, Departure("E")), (2, Departure("E", how="exited"))]),
        '{"gone": [[1, ["E", "failed", "", "", false]], '
        '[2, ["E", "failed", "exited", "", false]]]}',
    ),
    (ServicesLost([("JAX", "cut off")]), '{"gone": [], "services": [["JAX", "cut off"]]}'),
    (CallLeft(2, "KeyboardInterrupt"), '{"process": 2, "words": "KeyboardInterrupt"}'),
]


@pytest.mark.parametrize(("answer", "text"), TRAVELS)
def test_an_outcome_travels_and_comes_back(answer, text):
    assert json.dumps(answer.facts) == text
    again = outcome_of(answer.kind, json.loads(text))
    assert (type(again), again) == (type(answer), answer)
    assert again.is_success is isinstance(answer, SurvivorsMet)


def test_missing_processes_survive_serialization():
    waiting = StillMissing([1], [(1, "joined")])
    assert json.dumps(waiting.facts) == '{"missing": [1], "words": [[1, "joined"]]}'
    assert StillMissing.of(json.loads(json.dumps(waiting.facts))) == waiting


def test_unknown_answer_is_refused():
    with pytest.raises(FrameError, match="unknown answer 'fine'"):
        outcome_of("fine", {})
