"""What every job client promises about who is gone; over threads and a real coordinator."""

import re
import time

import pytest

from shoal.collectives.live_processes import live_processes
from shoal.errors import DeadlineError, PeerFailedError, ProcessLostError, UsageError
from shoal.runtime.barrier import barrier
from shoal.runtime.jax_service import device_work
from shoal.runtime.job_status import job_status
from shoal.runtime.rules.point import Point
from shoal.runtime.startup.membership import wait_until_idle
from shoal.runtime.step import step

LONG_S = 60.0  # a deadline that no test here waits for


def meet(client, name="x", timeout_s=LONG_S, **more):
    return client.arrive(Point(name, **more), timeout_s=timeout_s)


def test_a_loss_is_known_without_asking_and_raised_at_the_next_step(make_job):
    job = make_job(3)
    first = job.clients[0]
    first.check("nothing happened")
    job.kill(1)
    job.until_known(0, [1])
    for _ in range(2):
        with pytest.raises(ProcessLostError) as caught, step.on(first, 7):
            pytest.fail("the block runs")
        assert set(caught.value.lost) == {1}
        assert str(caught.value).startswith("process 0 of 3 (")
        assert "step 7 (" in str(caught.value)


def test_a_failure_is_known_with_its_traceback_and_a_peaceful_end_is_none(make_job):
    job = make_job(3)
    job.clients[2].close()
    job.clients[1].report("failed", "Traceback\nValueError: no data")
    job.until_known(0, [1])
    with pytest.raises(PeerFailedError, match="ValueError: no data") as caught:
        job.clients[0].check("going on")
    assert caught.value.failed == {1: "Traceback\nValueError: no data"}


def test_survivors_agree_and_go_on_and_do_so_again(make_job):
    job = make_job(4)
    left = (0, 1, 2, 3)
    for victim in (2, 0):
        job.kill(victim)
        left = tuple(p for p in left if p != victim)
        results = [
            job.start(lambda c=job.clients[p]: live_processes.on(c, timeout_s=LONG_S)) for p in left
        ]
        assert [result() for result in results] == [left] * len(left)
        for process in left:
            job.clients[process].check("acknowledged")
        rest = [job.start(lambda c=job.clients[p], g=left: len(meet(c, group=g))) for p in left]
        assert [wait() for wait in rest] == [len(left)] * len(left)
    with pytest.raises(ProcessLostError):
        meet(job.clients[1], "all of the job")


def test_survivors_meet_from_wherever_the_loss_met_them(make_job):
    job = make_job(3)
    first, _, third = job.clients
    waits = job.start(lambda: meet(first, "of the main line"))
    job.until_reported(0, "waits at")
    job.kill(1)
    assert type(waits()) is ProcessLostError  # its point is owed by process 2, which never comes
    job.until_known(2, [1])
    both = [job.start(lambda c=c: live_processes.on(c, timeout_s=LONG_S)) for c in (first, third)]
    assert [wait() for wait in both] == [(0, 2)] * 2
    both = [job.start(lambda c=c: barrier.on(c, "on", processes=[0, 2])) for c in (first, third)]
    assert [wait() for wait in both] == [None] * 2


def test_a_living_one_that_does_not_come_to_live_is_a_deadline(make_job):
    job = make_job(3)
    job.kill(2)
    job.until_known(0, [2])
    with pytest.raises(DeadlineError) as caught:
        live_processes.on(job.clients[0], timeout_s=0.1)
    assert caught.value.missing == (1,)


def test_members_say_the_step_the_place_and_the_memory(make_job):
    job = make_job(2)
    with step.on(job.clients[1], 41):
        waits = job.start(lambda: len(meet(job.clients[1], "epoch", site="t.py:3 (f)")))
        member = job.until_reported(1, "step 41, waits at 'epoch' (t.py:3) for")
        assert (member.step, member.is_waiting, member.state) == (41, True, "here")
        assert "'epoch'" in member.place
        assert len(meet(job.clients[0], "epoch")) == waits() == 2
    call = job_status.on(job.clients[0], timeout_s=LONG_S)
    assert str(call).startswith("2 of 2 processes are here")
    assert "process 1 (" in str(call)


def test_stacks_show_where_the_threads_of_each_are(make_job):
    job = make_job(3)
    waits = job.start(lambda: len(meet(job.clients[1], "epoch")))
    job.until_reported(1, "waits at")
    stacks = job.clients[0].stacks(timeout_s=LONG_S)
    assert set(stacks) == {0, 1, 2}
    assert "Thread 'MainThread' (most recent call first):" in stacks[1]
    assert re.search(r" in meet(: .*)?\n", stacks[1])
    assert set(job.clients[2].stacks([0, 2], timeout_s=LONG_S)) == {0, 2}
    job.kill(2)
    job.until_known(0, [2])
    assert set(job.clients[0].stacks([0, 2], timeout_s=LONG_S)) == {0}
    with pytest.raises(UsageError, match=r"not \[9\]"):
        job.clients[0].stacks([0, 9], timeout_s=LONG_S)
    assert type(waits()) is ProcessLostError


def test_unfinished_computation_raises_the_loss_that_blocks_it(make_job, monkeypatch):
    monkeypatch.setattr(device_work, "issued_work", lambda: lambda: False)
    job = make_job(2)
    job.kill(1)
    job.until_known(0, [1])
    first = job.clients[0]
    assert first.peer_losses.unreported() != []
    with pytest.raises(ProcessLostError, match="finishing its computations"):
        wait_until_idle(first, time.monotonic() + LONG_S)
    assert first.peer_losses.unreported() == []  # it is left alone to save its work
