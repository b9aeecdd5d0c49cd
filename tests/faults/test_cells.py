"""The matrix sees what it is there to see: a good outcome, and each way in which one can be bad."""

from __future__ import annotations

import pytest

from faults.cells import PLACE, Cell, Told, problems
from shoal.testing.ended import Ended

REPORT = (
    "shoal: process 1 of 3 (h) has not called shoal for 2 s, and process 0 (h) is lost: it "
    "hangs, and is ended with exit code 71\n  process 0 (h) is lost (known for 1 s): killed\n"
)
ERROR = {"at": 100.1, "kind": "ProcessLostError", "words": "x", "lost": [0], "failed": []}


def ended(process, code, err="", at=100.2):
    return Ended(process, code, "", err, 1.0, at)


def outcome(*, learned=None, left=(), launcher="", **changed):
    """Return what comes of SIGKILL to process 0, with process 1 as given."""
    rows = {0: ended(0, -9), 1: ended(1, **{"code": 71} | changed), 2: ended(2, 71, REPORT)}
    told = {0: {}, 1: ERROR if learned is None else learned, 2: ERROR}
    return Told(100.0, rows, told, left, launcher)


@pytest.mark.parametrize(
    ("where", "told", "words"),
    [
        ("barrier", outcome(), []),
        ("barrier", outcome(code=-6), ["exit code -6, not 71"]),
        ("barrier", outcome(code=1), ["exit code 1, not 71"]),
        ("barrier", outcome(left=("keeper",)), ["left running: keeper"]),
        ("barrier", outcome(launcher="p1: killed by SIGABRT"), ["ended by a signal"]),
        ("step", outcome(learned={}), ["no exception of shoal"]),
        ("step", outcome(learned=ERROR | {"kind": "ValueError"}), ["no exception of shoal"]),
        ("step", outcome(learned=ERROR | {"kind": "PeerFailedError"}), ["not a ProcessLostError"]),
        ("step", outcome(learned=ERROR | {"lost": [2]}), ["lost does not hold 0"]),
        ("step", outcome(learned=ERROR | {"at": 101.1}), ["learned after 1.10 s, not within 1 s"]),
        ("step", outcome(learned=ERROR | {"at": 99.9}), ["learned after -0.10 s"]),
        ("collective", outcome(learned={}, err=REPORT), []),
        ("collective", outcome(learned={}), ["no report that", "not say why", "not name exit"]),
        ("collective", outcome(learned={}, err=REPORT, at=104.1), ["ended after 4.10 s, not"]),
    ],
)
def test_problems_of_a_fault_cell_are_found(where, told, words):
    found = problems(Cell(1, "stand-alone", where, "kill", 0), told)
    assert len(found) == len(words), found
    for one, word in zip(found, words, strict=True):
        assert word in one.partition("\n")[0]


def test_a_service_must_be_named():
    told = outcome()
    rows = dict(told.ended) | {0: ended(0, 71)}
    learned = dict.fromkeys(rows, ERROR | {"lost": [], "words": f"{PLACE} at :1 is lost"})
    good = told._replace(ended=rows, learned=learned)
    cell = Cell(1, "stand-alone", "barrier", "kill", PLACE)
    assert problems(cell, good) == []
    nameless = good._replace(learned=dict.fromkeys(rows, ERROR | {"lost": []}))
    assert len(problems(cell, nameless)) == 3


def test_a_victim_that_wakes_or_is_cut_off_must_know():
    told = outcome(learned=ERROR | {"at": 102.0})
    for fault, words in (("stop", "declared lost"), ("cut", "who is lost to it")):
        rows = dict(told.ended) | {0: ended(0, 71, "KeyError: 0")}
        cell = Cell(1, "stand-alone", "step", fault, 0)
        (found,) = problems(cell, told._replace(ended=rows))
        assert words in found
