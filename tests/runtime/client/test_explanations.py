"""What those that found a difference leave for those that arrive later, over each coordinator."""

from __future__ import annotations

import threading
import time

import pytest

from shoal.runtime.client.explanations import ask, key_of, tell
from shoal.runtime.rules.point import Point

POINT, LONG_S = Point("go"), 30.0


def test_whoever_asks_before_it_is_told_waits_for_it(make_job):
    job = make_job(3)
    first, _, late = job.coordinators
    threading.Timer(0.05, tell, (first, "key", POINT, (0, 1), {"0": "a\nü"})).start()
    assert ask(late, "key", (0, 1), LONG_S) == {"0": "a\nü"}
    assert ask(late, "key", (0, 1), LONG_S) == {"0": "a\nü"}, "and any number of times"


def test_what_is_not_found_or_not_told_in_time_is_none(make_job):
    job = make_job(3)
    first, second, late = job.coordinators
    tell(first, "nothing", POINT, (0, 1), None)
    first.explain("broken", "{")
    assert ask(late, "nothing", (0, 1), LONG_S) is None
    assert ask(late, "broken", (0, 1), LONG_S) is None
    began = time.monotonic()
    tell(second, "by another", POINT, (0, 1), 1)  # the lowest tells
    tell(first, "to nobody", POINT, (0, 1, 2), 1)
    tell(first, "to nobody of the group", Point("go", (1, 0)), (0, 1), 1)
    for key in ("by another", "to nobody", "to nobody of the group"):
        assert ask(late, key, (0, 1), 0.05) is None
    assert time.monotonic() - began < LONG_S / 2


def test_who_is_gone_tells_nothing_more(make_job):
    job = make_job(3)
    first, _, late = job.coordinators
    tell(first, "before", POINT, (0, 1), 1)
    assert ask(late, "before", (0, 1), LONG_S) == 1
    first.report("failed", "ValueError: no data")
    assert ask(late, "after", (0, 1), LONG_S) is None
    assert ask(late, "before", (0, 1), LONG_S) == 1


def test_a_few_short_ones_are_kept(make_job):
    job = make_job(2)
    first, late = job.coordinators
    first.explain("long", "1" * 100_000)
    for number in range(8):
        assert ask(late, "long", (0,), LONG_S) is None
        first.explain(f"{number}", f"{number}")
    assert [ask(late, f"{number}", (0,), LONG_S) for number in range(8)] == [*range(8)]
    assert ask(late, "long", (0,), 0.05) is None


@pytest.mark.parametrize("other", [[["a", [0]]], [["b", [0, 1]]], []])
def test_a_key_is_that_of_the_sides(other):
    assert key_of([("a", [0, 1])]) == key_of([["a", (0, 1)]]) != key_of(other)
