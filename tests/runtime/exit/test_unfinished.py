"""The end of a process whose devices still compute."""

from __future__ import annotations

import itertools
import threading

import pytest

from runtime.coordinator_contract import meet
from shoal.errors import DeadlineError, PeerFailedError
from shoal.runtime.barrier import barrier
from shoal.runtime.exit import unfinished as module
from shoal.runtime.exit.causes import gone_members
from shoal.runtime.exit.unfinished import HAS_ENDED, await_devices


def never():
    return False


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    monkeypatch.setattr(module, "_ALONE_S", 0.1)
    monkeypatch.setattr(module, "pause_s", lambda client: 0.0)


def test_devices_that_are_done_need_no_query(make_job, monkeypatch):
    job = make_job(2)
    monkeypatch.setattr(module, "peers_of", None)
    assert await_devices(job.clients[0], lambda: True) == {}


def test_wait_for_devices_lasts_while_another_process_runs(make_job, capsys, monkeypatch):
    monkeypatch.setattr(module, "_REPORT_S", 0.05)
    job = make_job(2)
    looks = itertools.count()
    assert await_devices(job.clients[0], lambda: next(looks) > 100) == {}
    assert next(looks) == 102
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal: process 0 of 2 (")
    assert f") {HAS_ENDED}: they still compute" in line


def test_a_process_that_has_left_takes_no_other_one_for_lost(make_job):
    job = make_job(2)
    assert gone_members(job.clients[0]) == {}
    job.clients[0].close()
    assert gone_members(job.clients[0]) == {}


def test_processes_that_are_gone_are_named(make_job):
    job = make_job(3)
    job.kill(1)
    assert [*await_devices(job.clients[0], never)] == [1]


def test_work_that_needs_none_of_those_that_are_gone_is_finished(make_job, monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 60.0)
    job = make_job(2)
    job.kill(1)
    job.until_known(0, [1])
    looks = itertools.count()
    assert await_devices(job.clients[0], lambda: next(looks) > 20) == {}


def survive(job, run_all):
    """Let the others agree that the last process is gone."""
    job.kill(len(job.clients) - 1)
    alive = (lambda client=client: meet(client, survivors=True) for client in job.clients[:-1])
    assert [sorted(met) for met in run_all(*alive)] == [[0, 1], [0, 1]]


def test_survivors_finish_what_they_have_started_since(make_job, run_all):
    job, looks = make_job(3), itertools.count()
    survive(job, run_all)
    assert await_devices(job.clients[0], lambda: next(looks) > 200) == {}
    assert next(looks) == 202


def test_survivors_do_not_wait_for_ever_for_what_they_had_started_before(
    make_job, run_all, monkeypatch
):
    monkeypatch.setenv("SHOAL_HANG_TIMEOUT_S", "0.1")
    job = make_job(3)
    survive(job, run_all)
    assert [*await_devices(job.clients[0], never)] == [2]


def test_devices_are_not_awaited_once_the_other_processes_have_left(make_job):
    job = make_job(3)
    for other in job.clients[1:]:
        other.close()
    assert await_devices(job.clients[0], never) is None


def test_devices_are_awaited_while_one_other_process_still_runs(make_job):
    job = make_job(3)
    job.clients[1].close()
    looks = itertools.count()
    assert await_devices(job.clients[0], lambda: next(looks) > 200) == {}
    assert next(looks) == 202


def test_wait_for_devices_ends_if_another_process_waits_for_this_one(make_job, run_all):
    """Which ends that wait: it would last until its deadline."""
    ended, waiting = make_job(2).clients

    def end():
        assert await_devices(ended, never) is None
        ended.close()

    _, error = run_all(end, lambda: barrier.on(waiting, "after", timeout_s=60))
    assert isinstance(error, PeerFailedError), error


def test_a_process_that_waits_for_another_one_keeps_it(make_job, run_all):
    ended, waiting, busy = make_job(3).clients
    looks = itertools.count()

    def end():
        assert await_devices(ended, lambda: next(looks) > 200) == {}
        assert next(looks) == 202
        barrier.on(busy, "after", processes=[1, 2], timeout_s=60)

    assert run_all(end, lambda: barrier.on(waiting, "after", processes=[1, 2], timeout_s=60)) == [
        None,
        None,
    ]


def test_a_lane_of_another_thread_is_not_its_main_program(make_job, run_all):
    ended, other = make_job(2).clients
    looks = itertools.count()

    def end():
        assert await_devices(ended, lambda: next(looks) > 200) == {}
        assert next(looks) == 202
        barrier.on(ended, "after", lane="saves", timeout_s=60)

    wait = lambda: barrier.on(other, "after", lane="saves", timeout_s=60)  # noqa: E731
    assert run_all(end, wait) == [None, None]


def test_all_that_have_ended_wait_for_what_they_started_but_not_for_ever(
    make_job, run_all, monkeypatch
):
    monkeypatch.setenv("SHOAL_TIMEOUT_S", "0.3")
    job = make_job(2)
    ends = (lambda client=client: await_devices(client, never) for client in job.clients)
    errors = run_all(*ends)
    assert [type(error) for error in errors] == [DeadlineError] * 2, errors
    assert HAS_ENDED in str(errors[0]).splitlines()[0]
    assert f"process 1 ({job.clients[0].hosts[1]}): {HAS_ENDED}" in str(errors[0])


def test_calls_of_shoal_are_progress(make_job, run_all, monkeypatch):
    monkeypatch.setenv("SHOAL_TIMEOUT_S", "0.3")
    ended, *others = make_job(3).clients
    is_done = threading.Event()

    def run(client):
        for index in range(40):
            client.report("doing", f"round {index}")
            is_done.wait(0.02)
        is_done.set()

    end = lambda: await_devices(ended, is_done.is_set)  # noqa: E731
    assert run_all(end, lambda: run(others[0])) == [{}, None]
