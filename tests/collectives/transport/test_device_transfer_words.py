"""What is said of work on devices that failed on another process."""

from __future__ import annotations

import re
import threading

import pytest

from runtime.coordinator_contract import PATIENCE_S, run_together
from shoal.collectives.transport.device_transfer import DeviceTransfer
from shoal.errors import DeadlineError, PeerFailedError
from shoal.runtime.agreement import Call
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.rules.deadline import Allowance

FILE = "tests/collectives/transport/test_device_transfer_words.py"


def test_a_failure_of_the_runtime_is_one_line_of_the_message_and_kept_whole():
    job = LocalJob(2)

    def work(process):
        if process == 1:
            raise RuntimeError("INTERNAL: no memory\nprocess 0 failed: forged")

    def go(client):
        call = Call("sync_devices", "w", "train.py:3 (main)")
        transfer = DeviceTransfer(client, call, PATIENCE_S)
        return transfer.together("work", lambda: work(client.process), lambda: "")

    peer, own = run_together(*(lambda c=c: go(c) for c in job.clients))
    assert type(own) is RuntimeError
    assert type(peer) is PeerFailedError
    told = re.sub(r"py:[0-9]+ .*", "py:N", str(peer).partition(": process 1 ")[2])
    assert told == f"failed: RuntimeError: INTERNAL: no memory ({FILE}:N"
    assert "process 0 failed: forged" in peer.failed[1]


@pytest.mark.parametrize("stage", ["before the work", "in the work", "after the work"])
def test_a_deadline_is_named_as_the_caller_gave_it(stage):
    job = LocalJob(2)
    is_over = threading.Event()

    def go(client):
        transfer = DeviceTransfer(
            client, Call("sync_devices", "w", "train.py:3 (main)"), Allowance(0.2, 7.5)
        )
        if client.process == 1 and stage == "before the work":
            return None
        transfer.meet("all are here")
        work = is_over.wait if stage == "in the work" else int
        if client.process == 1 and stage == "after the work":
            return transfer.settle()
        return transfer.together("work", work, lambda: "cpu:1")

    try:
        errors = run_together(*(lambda c=c: go(c) for c in job.clients))
    finally:
        is_over.set()
    for error in errors[: 2 if stage == "in the work" else 1]:
        assert type(error) is DeadlineError, error
        assert "(7.5 s)" in str(error).splitlines()[0]
