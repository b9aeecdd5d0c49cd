"""A clock that tests advance."""

import math

import pytest

from shoal.errors import DeadlineError, UsageError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.rules.point import Point
from shoal.testing.clock import Clock


def test_clock_moves_only_when_advanced():
    clock = Clock(10.0)
    assert clock() == clock() == 10.0
    clock.advance(2)
    clock.sleep(0.5)
    clock.advance(0)
    assert clock() == 12.5


@pytest.mark.parametrize("by_s", [-1, math.nan, math.inf])
def test_clock_does_not_go_back(by_s):
    clock = Clock()
    with pytest.raises(UsageError, match="moves forward"):
        clock.advance(by_s)
    assert clock() == 0.0


def test_a_wait_of_ten_minutes_ends_at_once():
    import threading

    clock = Clock()
    job = LocalJob(2, clock=clock)
    errors = []
    begun = threading.Event()

    def wait():
        begun.set()
        try:
            job.clients[0].arrive(Point("x"), timeout_s=600)
        except DeadlineError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    begun.wait(30)
    asker = job.clients[1]
    while not asker.members(timeout_s=30)[0].last_words.startswith("waits"):
        pass
    clock.advance(601)
    job.tick()
    thread.join(30)
    assert errors[0].missing == (1,)
