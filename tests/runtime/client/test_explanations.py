"""The explanation of a difference, left for processes that arrive later, by each job client."""

from __future__ import annotations

import threading
import time

import pytest

from shoal.runtime.client.record_search import fetch, key_of, publish
from shoal.runtime.rules.point import Point

POINT, LONG_S = Point("go"), 30.0


def test_a_process_that_fetches_too_early_waits_for_it(make_job):
    job = make_job(3)
    first, _, late = job.clients
    threading.Timer(0.05, publish, (first, "key", POINT, (0, 1), {"0": "a\nü"})).start()
    assert fetch(late, "key", (0, 1), LONG_S) == {"0": "a\nü"}
    assert fetch(late, "key", (0, 1), LONG_S) == {"0": "a\nü"}, "and any number of times"


def test_explanation_that_is_missing_malformed_or_late_is_none(make_job):
    job = make_job(3)
    first, second, late = job.clients
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


def test_failed_process_publishes_no_further_explanations(make_job):
    job = make_job(3)
    first, _, late = job.clients
    publish(first, "before", POINT, (0, 1), 1)
    assert fetch(late, "before", (0, 1), LONG_S) == 1
    first.report("failed", "ValueError: no data")
    assert fetch(late, "after", (0, 1), LONG_S) is None
    assert fetch(late, "before", (0, 1), LONG_S) == 1


def test_a_few_short_explanations_are_kept(make_job):
    job = make_job(2)
    first, late = job.clients
    first.explain("long", "1" * 100_000)
    for index in range(8):
        assert fetch(late, "long", (0,), LONG_S) is None
        first.explain(f"{index}", f"{index}")
    assert [fetch(late, f"{index}", (0,), LONG_S) for index in range(8)] == [*range(8)]
    assert fetch(late, "long", (0,), 0.05) is None


@pytest.mark.parametrize("other", [[["a", [0]]], [["b", [0, 1]]], []])
def test_a_key_is_that_of_the_sides(other):
    assert key_of([("a", [0, 1])]) == key_of([["a", (0, 1)]]) != key_of(other)
