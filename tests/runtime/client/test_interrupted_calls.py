"""Interrupts in the few lines between the end of a call and the word that it was left."""

import itertools
import sys

import pytest

from checkpoint.interrupts import Interrupt
from shoal.runtime.client import lanes
from shoal.runtime.client.lanes import Lanes
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.rules.point import Point

POINT = Point("x", site="train.py:1 (main)")


class Told(list):
    """What the coordinator received; this many interrupts come first."""

    interrupts = 0

    def __call__(self, left, place=""):
        self.append(left)
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def process(told):
    return Lanes(ThisProcess(0, ("host0", "host1")), told, lambda lane: None)


def leave(process):
    with process.call("x", "main", None):
        raise ValueError("a wrong argument")


def arrive(process):
    with process.arrival(POINT) as call:
        point, after = call.enter(POINT)
        call.leave()
        return point.follows, after


def test_a_lane_is_free_after_interrupts_of_the_word_that_a_call_was_left(process, told):
    told.interrupts = 3
    for act in (leave, arrive):
        with pytest.raises(KeyboardInterrupt):
            act(process)
    told.clear()
    assert arrive(process) == (False, 2)
    assert [(left.number, left.arrivals, left.sent) for left in told] == [(1, 0, 0), (2, 0, 0)]


def test_a_call_whose_end_is_interrupted_is_left_where_the_next_begins(process, told, monkeypatch):
    told.interrupts = 1
    with monkeypatch.context() as patched:
        patched.setattr(lanes, "failure_of", told)
        with pytest.raises(KeyboardInterrupt):
            leave(process)
    told.clear()
    assert arrive(process) == (False, 1)
    assert [(left.number, left.arrivals) for left in told] == [(1, 0)]
    assert arrive(process) == (False, 1)


def call_of_the_caller(process):
    return process.call("x", "main", None)


def test_an_interrupt_at_any_place_of_a_call_leaves_it_once_and_its_lane_free():
    """Places before the call is known are none of it: the program has not come to it."""
    for place in itertools.count(1):
        told = Told()
        process = Lanes(ThisProcess(0, ("host0", "host1")), told, lambda lane: None)
        interrupt = Interrupt(place, (lanes,))

        def call(process=process, interrupt=interrupt):
            scope = call_of_the_caller(process)
            scope.__enter__()
            with interrupt.on():
                try:
                    arrive(process)
                    raise ValueError("a full disk")
                finally:
                    scope.__exit__(*sys.exc_info())

        with pytest.raises((KeyboardInterrupt, ValueError)) as raised:
            call()
        assert arrive(process) == (False, 1), place
        assert {left.number for left in told} == {1}, place
        if raised.type is ValueError:
            break
    assert place > 20
