"""A directory in which processes find each other: threads are the processes."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import InitializeError
from shoal.runtime.rules.deadline import ends_at
from shoal.runtime.startup.launcher_table import launcher_of
from shoal.runtime.startup.rendezvous import Rendezvous, Visit, own_host

PLACE = {"address": "10.0.0.7:4321", "token": "secret"}


@pytest.fixture
def where(tmp_path):
    return Rendezvous(str(tmp_path), "shoal-job", on_one_host=False)


def meet(where, process, count, timeout_s=30.0, leaves=None):
    """Come, meet and leave, as `initialize` does; return what process 0 told."""
    visit, deadline = Visit(where, process, count), ends_at(timeout_s)
    told = None
    try:
        visit.announce()
        if process == 0:
            visit.lead(PLACE, deadline)
            told = PLACE
        else:
            told = visit.follow(deadline)
        if leaves is not None:
            leaves.wait(30)  # in a job: all have joined
    finally:
        visit.leave(has_begun=told is not None)
    return {name: told[name] for name in PLACE}


def outcomes(where, processes, count, *, first_s=30.0, leaves=None):
    """Return what each process got; process 0 waits for at most `first_s`."""
    with ThreadPoolExecutor(len(processes)) as pool:
        started = [
            pool.submit(meet, where, process, count, 30.0 if process else first_s, leaves)
            for process in processes
        ]
        return [future.exception() or future.result() for future in started]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_every_process_gets_the_address_and_no_file_remains(where, tmp_path, order):
    told = outcomes(where, order, 4, leaves=threading.Barrier(4))
    assert told == [PLACE] * 4
    assert os.listdir(tmp_path) == []


def test_files_of_an_earlier_job_are_ignored(where, tmp_path):
    directory = tmp_path / where.name
    directory.mkdir()
    old = [f"process-{index}-{'0' * 15}{index}" for index in range(4)]
    for name in old:
        (directory / name).touch()
    stale = {"address": "10.9.9.9:1", "token": "old", "to": [name[-16:] for name in old]}
    (directory / "address").write_text(json.dumps(stale))
    (directory / "address.0123").write_text('{"addr')  # died while it wrote
    (directory / "notes.txt").touch()  # not ours
    follower = Visit(where, 1, 2)
    follower.announce()
    with pytest.raises(InitializeError, match="another job uses this directory"):
        follower.follow(ends_at(0.05))
    follower.leave(has_begun=False)
    assert outcomes(where, [1, 0], 2, leaves=threading.Barrier(2)) == [PLACE] * 2
    assert os.listdir(directory) == ["notes.txt"]


def test_missing_processes_are_named_on_every_process(where, tmp_path):
    failed = outcomes(where, [2, 0, 1], 5, first_s=1.0)
    assert all(isinstance(error, InitializeError) for error in failed)
    assert [error.missing for error in failed] == [(3, 4)] * 3
    assert "processes 3-4 did not arrive within 1 s" in str(failed[1])
    assert str(failed[0]) == f"process 0 gave up: {failed[1]}"
    assert os.listdir(tmp_path) == []


def test_a_missing_process_0_is_named(where, tmp_path):
    with pytest.raises(
        InitializeError, match=r"process 0 published no address within 0.05 s"
    ) as caught:
        meet(where, 1, 2, timeout_s=0.05)
    assert caught.value.missing == (0,)
    assert "process 1 of 2 arrived" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_an_index_that_comes_twice_is_refused_on_all(where, tmp_path):
    first = Visit(where, 0, 2)
    first.announce()
    for drawn in ("a" * 16, "b" * 16):
        (tmp_path / where.name / f"process-1-{drawn}").touch()
    with pytest.raises(InitializeError, match="process 1 arrived more than once"):
        first.lead(PLACE, ends_at(30))
    answer = json.loads((tmp_path / where.name / "address").read_text())
    assert {"a" * 16, "b" * 16} < set(answer["to"])
    assert "more than once" in answer["error"]


def test_two_jobs_in_one_directory_do_not_mix(where):
    first, second = Visit(where, 0, 3), Visit(where, 0, 3)
    first.announce()
    second.announce()
    with pytest.raises(InitializeError, match="another process 0 is here"):
        first.lead(PLACE, ends_at(30))


def test_wait_logs_which_processes_are_missing(where, caplog, monkeypatch):
    monkeypatch.setenv("SHOAL_WARN_AFTER_S", "0.01")
    with pytest.raises(InitializeError):
        meet(where, 0, 2, timeout_s=0.2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(f"joins in {where.base}/shoal-job: waiting for process 1")


def test_a_directory_that_is_not_there(tmp_path):
    visit = Visit(Rendezvous(f"{tmp_path}/nowhere", "shoal-job", False), 0, 2)
    with pytest.raises(InitializeError, match="pass a directory that exists"):
        visit.announce()


@pytest.mark.parametrize("wrong", ["open to others", "a link"])
def test_on_one_host_the_directory_is_this_users_alone(tmp_path, wrong):
    base = tmp_path / "shoal-0"
    if wrong == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(tmp_path / "elsewhere")
    else:
        base.mkdir()
        base.chmod(0o755)
    visit = Visit(Rendezvous(str(base), "shoal-job", on_one_host=True), 0, 2)
    with pytest.raises(InitializeError, match="not a directory of this user alone"):
        visit.announce()


def test_the_answer_is_for_this_user_alone(where, tmp_path):
    visit = Visit(where, 0, 1)
    visit.announce()
    visit.lead(PLACE, ends_at(30))
    modes = {(tmp_path / where.name / name).stat().st_mode & 0o077 for name in ("", "address")}
    assert modes == {0}


def test_processes_of_one_launcher_know_it():
    assert launcher_of(["SHOAL_NO_SUCH_VARIABLE=1"]) == launcher_of(["SHOAL_NO_OTHER=1"])
    assert launcher_of([f"PATH={os.environ['PATH']}"]) != ""


def test_this_host_has_an_address():
    assert own_host()
