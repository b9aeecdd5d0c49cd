"""The end of a process whose devices still compute."""

from __future__ import annotations

import itertools

import pytest

from shoal.runtime.exit import unfinished as module
from shoal.runtime.exit.unfinished import await_devices


def never():
    return False


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    monkeypatch.setattr(module, "_ALONE_S", 0.1)
    monkeypatch.setattr(module, "pause_s", lambda coordinator: 0.0)


def test_devices_that_are_done_need_no_query(make_job, monkeypatch):
    job = make_job(2)
    monkeypatch.setattr(module, "peers_of", None)
    assert await_devices(job.coordinators[0], lambda: True) == {}


def test_it_waits_while_another_process_runs(make_job, capsys, monkeypatch):
    monkeypatch.setattr(module, "_REPORT_S", 0.05)
    job = make_job(2)
    looks = itertools.count()
    assert await_devices(job.coordinators[0], lambda: next(looks) > 100) == {}
    assert next(looks) == 102
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal: process 0 of 2 has ended its program, and waits for its devices")


def test_processes_that_are_gone_are_named(make_job):
    job = make_job(3)
    job.kill(1)
    assert [*await_devices(job.coordinators[0], never)] == [1]


def test_work_that_needs_none_of_those_that_are_gone_is_finished(make_job, monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 60.0)
    job = make_job(2)
    job.kill(1)
    job.until_known(0, [1])
    looks = itertools.count()
    assert await_devices(job.coordinators[0], lambda: next(looks) > 20) == {}


def test_it_does_not_wait_for_processes_that_have_left(make_job):
    job = make_job(3)
    for other in job.coordinators[1:]:
        other.close()
    assert await_devices(job.coordinators[0], never) == {}


def test_one_that_still_runs_may_take_part(make_job):
    job = make_job(3)
    job.coordinators[1].close()
    looks = itertools.count()
    assert await_devices(job.coordinators[0], lambda: next(looks) > 200) == {}
    assert next(looks) == 202
