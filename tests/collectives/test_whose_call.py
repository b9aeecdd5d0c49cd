"""A call that fails before it meets other processes fails for those that make it, and no others."""

import numpy as np
import pytest

import shoal
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.broadcast import broadcast
from shoal.collectives.live_processes import live_processes
from shoal.colour import colour_of
from shoal.errors import PeerFailedError, UsageError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob

LIMIT_S = PATIENCE_S / 2


def barrier_of(kind, processes):
    def call(client, timeout_s):
        barrier.on(client, "x", processes=kind(processes), timeout_s=timeout_s)

    return call


def broadcast_of(client, timeout_s):
    broadcast.on(client, 1, 0, processes=iter([0, 1]), name="x", timeout_s=timeout_s)


class Broken:
    """An iterable that cannot be read: of any kind, or only once."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        raise self.kind("the list of processes cannot be read")


class BrokenList(Broken):
    """It counts as a list."""

    def __len__(self):
        return 2

    def __contains__(self, process):
        return True


class BrokenIndex:
    """The index of a process that is none."""

    def __index__(self):
        raise OSError("no index")


def broken_iterator():
    raise OSError("the list of processes cannot be read")
    yield


def goes_on(client):
    """The next calls of all are the same on all."""
    for name in "ab":
        barrier.on(client, name, timeout_s=LIMIT_S)
    return "goes on"


@pytest.mark.parametrize(
    "call",
    [barrier_of(iter, [0, 1]), barrier_of(np.array, [0, 1]), barrier_of(set, [0, 1]), broadcast_of],
    ids=["iterator", "array", "set", "broadcast"],
)
def test_a_wrong_argument_ends_the_call_of_its_processes_alone(call):
    def go(client):
        if client.process < 2:
            with pytest.raises(PeerFailedError if client.process else UsageError):
                call(client, LIMIT_S if client.process else -1.0)
        return goes_on(client)

    assert run_all(LocalJob(3), go) == ["goes on"] * 3


@pytest.mark.parametrize("process", [0, 2])
def test_call_by_a_process_outside_the_group_does_not_disturb_the_group(process):
    members = [p for p in range(3) if p != process]

    def go(client):
        call = barrier_of(tuple, members)
        if client.process == process:
            with pytest.raises(UsageError, match="is not among the processes"):
                call(client, LIMIT_S)
        else:
            call(client, LIMIT_S)
        return goes_on(client)

    assert run_all(LocalJob(3), go) == ["goes on"] * 3


CALLS = {
    "barrier": lambda client, **more: barrier.on(client, "x", timeout_s=LIMIT_S, **more),
    "broadcast": lambda client, **more: broadcast.on(client, 1, 0, timeout_s=LIMIT_S, **more),
    "live_processes": lambda client, **more: live_processes.on(client, timeout_s=LIMIT_S, **more),
}
UNREADABLE = {
    "iterable": lambda: Broken(OSError),
    "interrupted": lambda: Broken(KeyboardInterrupt),
    "list": lambda: BrokenList(OSError),
    "interrupted list": lambda: BrokenList(KeyboardInterrupt),
    "iterator": broken_iterator,
    "index": lambda: [0, BrokenIndex()],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [*UNREADABLE, "unknown keyword"])
def test_any_exception_in_a_call_fails_it_for_the_others(name, kind):
    def go(client):
        if client.process != 1:
            with pytest.raises(PeerFailedError):
                CALLS[name](client)
        else:
            wrong = {"nmae": 1} if kind == "unknown keyword" else {"processes": UNREADABLE[kind]()}
            with pytest.raises((TypeError, OSError, KeyboardInterrupt)):
                CALLS[name](client, **wrong)
        return goes_on(client)

    assert run_all(LocalJob(3), go) == ["goes on"] * 3


@pytest.mark.parametrize("given", [iter, tuple])
def test_a_wrong_argument_of_live_ends_the_call_of_its_processes_alone(given):
    def go(client):
        if client.process < 2:
            with pytest.raises(PeerFailedError if client.process else UsageError):
                live_processes.on(
                    client, processes=given([0, 1]), timeout_s=LIMIT_S if client.process else -1.0
                )
        return goes_on(client)

    assert run_all(LocalJob(3), go) == ["goes on"] * 3


# What joins or leaves a job, and what meets no other process in its lane.
BESIDE = {"initialize", "shutdown", "preempted", "create", "wait", "close"}


def test_every_call_that_meets_others_fails_for_all_from_its_first_line_on():
    owners = [shoal, shoal.Checkpoints]
    names = {
        name: getattr(owner, name)
        for owner in owners
        for name in dir(owner)
        if colour_of(getattr(owner, name, None)).startswith("Collective")
    }
    names["Checkpoints"] = shoal.Checkpoints.__init__
    assert {
        name for name, function in names.items() if not hasattr(function, "fails_for_all")
    } == BESIDE
