"""Work on devices, watched: who is late is named at the deadline, which is the earliest of all."""

from __future__ import annotations

import threading

import pytest

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.transport import flow as module
from shoal.collectives.transport.flow import Flow
from shoal.errors import DeadlineError
from shoal.runtime.agreement import Call
from shoal.runtime.client.in_process import LocalJob

CALL = Call("sync_devices", "epoch", "train.py:31 (main)")


@pytest.fixture
def never():
    """Return work that ends with the test."""
    is_over = threading.Event()
    yield lambda: is_over.wait(PATIENCE_S)
    is_over.set()


def waits_of(coordinator):
    """Return the time limits of all waits of a coordinator from now on."""
    limits, arrive = [], coordinator.arrive

    def note(point, payload=b"", *, timeout_s):
        limits.append(timeout_s)
        return arrive(point, payload, timeout_s=timeout_s)

    coordinator.arrive = note
    return limits


@pytest.mark.parametrize("limits_s", [(0.3, PATIENCE_S), (PATIENCE_S, 0.3), (0.3, 0.3)])
def test_the_earliest_deadline_ends_the_work_of_all(limits_s, never):
    """Process 1 works for ever; it must hear of the deadline of process 0, and process 0 of what
    process 1 is busy with. If it waited for its own deadline, `run_all` would not end in time."""
    job = LocalJob(2)
    waits = [waits_of(coordinator) for coordinator in job.coordinators]

    def go(coordinator):
        me = coordinator.process
        flow = Flow(coordinator, CALL, limits_s[me])
        flow.together("the devices", never if me == 1 else int, lambda: "cpu:2 not finished")

    for me, error in enumerate(run_all(job, go)):
        assert isinstance(error, DeadlineError), error
        assert error.missing == (1,)
        assert "process 1 late: cpu:2 not finished" in str(error)
        assert error.last_words == {1: "late: cpu:2 not finished"}
        first = limits_s.index(0.3)
        whose = "its deadline" if me == first else f"the deadline of process {first}"
        assert f"{whose} (0.3 s)" in str(error) or limits_s == (0.3, 0.3)
        assert max(waits[me][1:]) <= 0.3 + module._TURN_S


def test_who_is_frozen_in_the_work_is_named_with_what_it_said_before():
    job = LocalJob(2)

    def go(coordinator):
        flow = Flow(coordinator, CALL, 0.3)
        flow.settle()
        if coordinator.process == 1:
            return coordinator.report("doing", "late: cpu:2 not finished")
        return flow.together("the devices", int, lambda: "")

    error, _ = run_all(job, go)
    assert isinstance(error, DeadlineError), error
    assert error.missing == (1,)
    assert "process 1 late: cpu:2 not finished" in str(error)


def test_what_the_runtime_says_counts_if_nobody_says_more():
    job = LocalJob(2)
    waits = waits_of(job.coordinators[0])

    def fail():
        raise RuntimeError("peer closed")

    def go(coordinator):
        flow = Flow(coordinator, CALL, 0.3)
        flow.settle()
        if coordinator.process == 0:
            flow.together("the devices", fail, lambda: "")

    error, _ = run_all(job, go)
    assert (type(error), str(error)) == (RuntimeError, "peer closed")
    assert max(waits) <= 0.3 + module._TURN_S
