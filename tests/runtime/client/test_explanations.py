"""What those that found a difference leave for those that arrive later, over each coordinator."""

from __future__ import annotations

import threading
import time

import pytest

from shoal.runtime.client.trail_search import fetch, key_of, publish
from shoal.runtime.rules.point import Point

POINT, LONG_S = Point("go"), 30.0


def test_a_process_that_fetches_too_early_waits_for_it(make_job):
    job = make_job(3)
    first, _, late = job.coordinators
    threading.Timer(0.05, publish, (first, "key", POINT, (0, 1), {"0": "a\nü"})).start()
    assert fetch(late, "key", (0, 1), LONG_S) == {"0": "a\nü"}
    assert fetch(late, "key", (0, 1), LONG_S) == {"0": "a\nü"}, "and any number of times"


def test_what_is_not_found_or_not_told_in_time_is_none(make_job):
    job = make_job(3)
    first, second, late = job.coordinators
    publish(first, "nothing", POINT, (0, 1), None)
    first.explain("broken", "{")
    assert fetch(late, "nothing", (0, 1), LONG_S) is None
    assert fetch(late, "broken", (0, 1), LONG_S) is None
    began = time.monotonic()
    publish(second, "by another", POINT, (0, 1), 1)  # the lowest publishes
    publish(first, "to nobody", POINT, (0, 1, 2), 1)
    publish(first, "to nobody of the group", Point("go", (1, 0)), (0, 1), 1)
    for key in ("by another", "to nobody", "to nobody of the group"):
        assert fetch(late, key, (0, 1), 0.05) is None
    assert time.monotonic() - began < LONG_S / 2


def test_who_is_gone_tells_nothing_more(make_job):
    job = make_job(3)
    first, _, late = job.coordinators
    publish(first, "before", POINT, (0, 1), 1)
    assert fetch(late, "before", (0, 1), LONG_S) == 1
    first.report("failed", "ValueError: no data")
    assert fetch(late, "after", (0, 1), LONG_S) is None
    assert fetch(late, "before", (0, 1), LONG_S) == 1


def test_a_few_short_ones_are_kept(make_job):
    job = make_job(2)
    first, late = job.coordinators
    first.explain("long", "1" * 100_000)
    for number in range(8):
        assert fetch(late, "long", (0,), LONG_S) is None
        first.explain(f"{number}", f"{number}")
    assert [fetch(late, f"{number}", (0,), LONG_S) for number in range(8)] == [*range(8)]
    assert fetch(late, "long", (0,), 0.05) is None


@pytest.mark.parametrize("other", [[["a", [0]]], [["b", [0, 1]]], []])
def test_a_key_is_that_of_the_sides(other):
    assert key_of([("a", [0, 1])]) == key_of([["a", (0, 1)]]) != key_of(other)
