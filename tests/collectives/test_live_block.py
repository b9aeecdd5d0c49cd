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


def block_in(coordinator, processes=None, timeout_s=PATIENCE_S):
    return LiveBlock(coordinator, "the block", processes, timeout_s=timeout_s)


@given(st.lists(st.sampled_from(["ends", "raises", "dies"]), min_size=1, max_size=4))
@example(["ends", "raises"])
@example(["ends", "dies", "raises"])
def test_all_that_live_leave_it_in_one_way(fates):
    job = LocalJob(len(fates))
    everybody = tuple(range(len(fates)))

    def go(coordinator):
        fate = fates[coordinator.process]
        with block_in(coordinator) as living:
            assert living == everybody
            if fate == "dies":
                job.lose(coordinator.process, "killed")
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


def test_one_that_waits_inside_for_one_that_has_raised_comes_too():
    def go(coordinator):
        with block_in(coordinator):
            if coordinator.process == 0:
                raise Mishap("before the barrier")
            barrier.on(coordinator, "inside", timeout_s=PATIENCE_S)

    def twice(coordinator):
        for _ in range(2):
            with pytest.raises((Mishap, DivergenceError, PeerFailedError)):
                go(coordinator)
        with block_in(coordinator) as living:  # and the next block is one block again
            return living

    assert run_all(LocalJob(3), twice) == [(0, 1, 2)] * 3


def test_one_that_dies_between_the_two_meetings_of_the_end_is_lost():
    job = LocalJob(3)

    def go(coordinator):
        if coordinator.process == 1:
            living = block_in(coordinator).__enter__()
            alive = live_processes.on(coordinator, processes=living, timeout_s=PATIENCE_S)
            assert alive == (0, 1, 2)
            job.lose(1, "killed")
        else:
            with block_in(coordinator):
                pass

    first, _, last = run_all(job, go)
    for error in (first, last):
        assert isinstance(error, ProcessLostError)
        assert [*error.lost] == [1]
        assert "process 1 died or left inside" in str(error)


def test_who_died_before_is_not_in_it_and_who_was_not_asked_about_is_not_looked_at():
    job = LocalJob(4)
    job.lose(1, "killed")

    def go(coordinator):
        if coordinator.process not in (0, 2):
            return None
        with block_in(coordinator, iter([2, 0, 1])) as living:
            barrier.on(coordinator, "a", processes=living, timeout_s=PATIENCE_S)
            if coordinator.process == 0:
                job.lose(3, "killed, and of no concern here")
            return living

    assert run_all(job, go) == [(0, 2), None, (0, 2), None]


def test_one_that_lives_and_does_not_come_is_a_deadline():
    job = LocalJob(2)

    def go(coordinator):
        block = block_in(coordinator, timeout_s=0.2 if coordinator.process else PATIENCE_S)
        living = block.__enter__()
        if coordinator.process:
            block.__exit__(None, None, None)
        return living

    assert [type(result) for result in run_all(job, go)] == [tuple, DeadlineError]


def test_a_wrong_deadline_is_refused():
    with pytest.raises(UsageTypeError, match="the block: timeout_s='1' must be a number"):
        block_in(LocalJob(1).coordinators[0], timeout_s="1")
    with (
        pytest.raises(UsageError, match="timeout_s"),
        block_in(LocalJob(1).coordinators[0], timeout_s=-1),
    ):
        pytest.fail("entered")
