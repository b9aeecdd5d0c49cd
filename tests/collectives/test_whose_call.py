"""A call that fails before it met anybody fails for those who make it, and for nobody else."""

import numpy as np
import pytest

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.broadcast import broadcast
from shoal.errors import PeerFailedError, UsageError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob

LIMIT_S = PATIENCE_S / 2


def barrier_of(kind, processes):
    def call(one, timeout_s):
        barrier.on(one, "x", processes=kind(processes), timeout_s=timeout_s)

    return call


def broadcast_of(one, timeout_s):
    broadcast.on(one, 1, 0, processes=iter([0, 1]), name="x", timeout_s=timeout_s)


def goes_on(one):
    """The next calls of all are the same on all."""
    for name in "ab":
        barrier.on(one, name, timeout_s=LIMIT_S)
    return "goes on"


@pytest.mark.parametrize(
    "call",
    [barrier_of(iter, [0, 1]), barrier_of(np.array, [0, 1]), barrier_of(set, [0, 1]), broadcast_of],
    ids=["iterator", "array", "set", "broadcast"],
)
def test_a_wrong_argument_ends_the_call_of_its_processes_alone(call):
    def go(one):
        if one.process < 2:
            with pytest.raises(PeerFailedError if one.process else UsageError):
                call(one, LIMIT_S if one.process else -1.0)
        return goes_on(one)

    assert run_all(LocalJob(3), go) == ["goes on"] * 3


@pytest.mark.parametrize("process", [0, 2])
def test_who_calls_what_others_alone_may_call_disturbs_nobody(process):
    members = [p for p in range(3) if p != process]

    def go(one):
        call = barrier_of(tuple, members)
        if one.process == process:
            with pytest.raises(UsageError, match="is not among the processes"):
                call(one, LIMIT_S)
        else:
            call(one, LIMIT_S)
        return goes_on(one)

    assert run_all(LocalJob(3), go) == ["goes on"] * 3
