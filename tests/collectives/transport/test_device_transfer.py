"""Work on devices, watched: who is late is named at the deadline, which is the earliest of all."""

from __future__ import annotations

import threading

import pytest

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.transport import device_transfer as module
from shoal.collectives.transport.device_transfer import DeviceTransfer
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


def waits_of(client):
    """Return the time limits of all waits of a job client from now on."""
    limits, arrive = [], client.arrive

    def note(point, payload=b"", *, timeout_s):
        limits.append(timeout_s)
        return arrive(point, payload, timeout_s=timeout_s)

    client.arrive = note
    return limits


@pytest.mark.parametrize("limits_s", [(0.3, PATIENCE_S), (PATIENCE_S, 0.3), (0.3, 0.3)])
def test_the_earliest_deadline_ends_the_work_of_all(limits_s, never):
    """Process 1 works for ever; it must hear of the deadline of process 0, and process 0 of what
    process 1 is busy with. If it waited for its own deadline, `run_all` would not end in time."""
    job = LocalJob(2)
    waits = [waits_of(client) for client in job.clients]

    def go(client):
        me = client.process
        transfer = DeviceTransfer(client, CALL, limits_s[me])
        transfer.together("the devices", never if me == 1 else int, lambda: "cpu:2 not finished")

    for me, error in enumerate(run_all(job, go)):
        assert isinstance(error, DeadlineError), error
        assert error.missing == (1,)
        assert "process 1 late: cpu:2 not finished" in str(error)
        assert error.last_words == {1: "late: cpu:2 not finished"}
        first = limits_s.index(0.3)
        whose = "its deadline" if me == first else f"the deadline of process {first}"
        assert f"{whose} (0.3 s)" in str(error) or limits_s == (0.3, 0.3)
        assert max(waits[me][1:]) <= 0.3 + module._TURN_S


def test_process_frozen_in_a_transfer_is_named_with_its_last_report():
    job = LocalJob(2)

    def go(client):
        transfer = DeviceTransfer(client, CALL, 0.3)
        transfer.settle()
        if client.process == 1:
            return client.report("doing", "late: cpu:2 not finished")
        return transfer.together("the devices", int, lambda: "")

    error, _ = run_all(job, go)
    assert isinstance(error, DeadlineError), error
    assert error.missing == (1,)
    assert "process 1 late: cpu:2 not finished" in str(error)


def test_runtime_error_is_raised_if_no_process_reports_more():
    job = LocalJob(2)
    waits = waits_of(job.clients[0])

    def fail():
        raise RuntimeError("peer closed")

    def go(client):
        transfer = DeviceTransfer(client, CALL, 0.3)
        transfer.settle()
        if client.process == 0:
            transfer.together("the devices", fail, lambda: "")

    error, _ = run_all(job, go)
    assert (type(error), str(error)) == (RuntimeError, "peer closed")
    assert max(waits) <= 0.3 + module._TURN_S
