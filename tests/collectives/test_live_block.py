"""`LiveBlock`: the living leave it in one way, whatever happened to whom inside."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.live_processes import LiveBlock, live_processes
from shoal.errors import (
    DeadlineError,
    DivergenceError,
    PeerFailedError,
    ProcessLostError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob


class Mishap(Exception):
    """What the code of one process raises."""


def block_in(client, processes=None, timeout_s=PATIENCE_S):
    return LiveBlock(client, "the block", processes, timeout_s=timeout_s)


@given(st.lists(st.sampled_from(["ends", "raises", "dies"]), min_size=1, max_size=4))
@example(["ends", "raises"])
@example(["ends", "dies", "raises"])
def test_live_processes_leave_the_block_with_the_same_outcome(fates):
    job = LocalJob(len(fates))
    everyone = tuple(range(len(fates)))

    def go(client):
        fate = fates[client.process]
        with block_in(client) as living:
            assert living == everyone
            if fate == "dies":
                job.lose(client.process, "killed")
            if fate == "raises":
                raise Mishap("by itself")
        return "well"

    dead = [process for process, fate in enumerate(fates) if fate == "dies"]
    raised = [process for process, fate in enumerate(fates) if fate == "raises"]
    for process, result in enumerate(run_all(job, go)):
        if process in dead:
            continue
        if dead:
            assert isinstance(result, ProcessLostError)
            assert sorted(result.lost) == dead
            assert isinstance(result.__cause__, Mishap) == (process in raised)
        elif process in raised:
            assert isinstance(result, Mishap)
        elif raised:
            assert isinstance(result, PeerFailedError)
            assert sorted(result.failed) == raised
            assert "Mishap: by itself" in str(result)
        else:
            assert result == "well"


def test_process_that_waits_inside_leaves_the_block_when_another_raised():
    def go(client):
        with block_in(client):
            if client.process == 0:
                raise Mishap("before the barrier")
            barrier.on(client, "inside", timeout_s=PATIENCE_S)

    def twice(client):
        for _ in range(2):
            with pytest.raises((Mishap, DivergenceError, PeerFailedError)):
                go(client)
        with block_in(client) as living:  # and the next block is one block again
            return living

    assert run_all(LocalJob(3), twice) == [(0, 1, 2)] * 3


def test_process_lost_between_the_two_synchronizations_at_the_end_is_reported():
    job = LocalJob(3)

    def go(client):
        if client.process == 1:
            living = block_in(client).__enter__()
            alive = live_processes.on(client, processes=living, timeout_s=PATIENCE_S)
            assert alive == (0, 1, 2)
            job.lose(1, "killed")
        else:
            with block_in(client):
                pass

    first, _, last = run_all(job, go)
    for error in (first, last):
        assert isinstance(error, ProcessLostError)
        assert [*error.lost] == [1]
        assert "process 1 died or left inside" in str(error)


def test_live_block_excludes_dead_processes_and_ignores_those_outside_it():
    job = LocalJob(4)
    job.lose(1, "killed")

    def go(client):
        if client.process not in (0, 2):
            return None
        with block_in(client, iter([2, 0, 1])) as living:
            barrier.on(client, "a", processes=living, timeout_s=PATIENCE_S)
            if client.process == 0:
                job.lose(3, "killed, and of no concern here")
            return living

    assert run_all(job, go) == [(0, 2), None, (0, 2), None]


def test_living_process_that_does_not_leave_the_block_causes_a_deadline():
    job = LocalJob(2)

    def go(client):
        block = block_in(client, timeout_s=0.2 if client.process else PATIENCE_S)
        living = block.__enter__()
        if client.process:
            block.__exit__(None, None, None)
        return living

    assert [type(result) for result in run_all(job, go)] == [tuple, DeadlineError]


def test_a_wrong_deadline_is_refused():
    with pytest.raises(UsageTypeError, match="the block: timeout_s='1' must be a number"):
        block_in(LocalJob(1).clients[0], timeout_s="1")
    with (
        pytest.raises(UsageError, match="timeout_s"),
        block_in(LocalJob(1).clients[0], timeout_s=-1),
    ):
        pytest.fail("entered")
