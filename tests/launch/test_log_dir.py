"""A directory of logs belongs to one job at a time, and to nobody once that has ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from shoal.errors import UsageError
from shoal.launch import log_dir
from shoal.launch.log_dir import open_log_dir, shown_path

COMMAND = ["shoal", "run", "-n", "2", "my train.py"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_second_is_refused_and_the_next_is_not(folder):
    with open_log_dir("logs", COMMAND) as path:
        assert path == str(folder / "logs")
        os.symlink(path, "same")
        for name in ("logs", "same"):
            with pytest.raises(UsageError) as refused, open_log_dir(name, ["shoal"]):
                pass
            told = f"`shoal run -n 2 'my train.py'` (pid {os.getpid()}), running since 20"
            assert str(refused.value).startswith(
                f"run: --log-dir {name!r} holds the logs of {told}"
            )
            assert re.search(
                r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\nuse a separate", str(refused.value)
            )
    assert os.listdir("logs") == []
    with open_log_dir("logs", COMMAND):
        pass


def test_one_of_many_simultaneous_jobs_gets_the_log_dir():
    together, done = threading.Barrier(8), threading.Barrier(8)
    ways = []

    def come(number):
        together.wait()
        try:
            with open_log_dir("logs", [f"job-{number}"]):
                ways.append(number)
                done.wait()
        except UsageError as error:
            ways.append(str(error))
            done.wait()

    threads = [threading.Thread(target=come, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [way for way in ways if isinstance(way, int)]
    refusals = [way for way in ways if isinstance(way, str)]
    assert len(refusals) == 7
    assert all(f"`job-{winner}`" in words for words in refusals)


def test_the_lock_of_a_killed_job_is_gone_with_it(folder, child_env):
    script = (
        "import sys, time; from shoal.launch.log_dir import open_log_dir\n"
        "with open_log_dir('logs', ['first']): print('has it', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=child_env, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "has it\n"
        with pytest.raises(UsageError, match=f"`first` \\(pid {first.pid}\\)"):
            open_log_dir("logs", COMMAND).__enter__()
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert os.listdir("logs") == ["job.lock"]
    with open_log_dir("logs", COMMAND):
        owner = json.loads((folder / "logs/job.lock").read_text())
        assert owner["pid"] == os.getpid()


def test_a_folder_that_goes_while_the_job_runs_is_no_error(folder):
    with open_log_dir("logs", COMMAND):
        os.unlink("logs/job.lock")
        os.rmdir("logs")
    assert os.listdir(folder) == []


def test_job_runs_on_a_file_system_without_locks(monkeypatch):
    def flock(_fd, _operation):
        raise OSError(log_dir._NO_LOCKS[0], "No locks available")

    monkeypatch.setattr(log_dir.fcntl, "flock", flock)
    with open_log_dir("logs", COMMAND) as path:
        assert os.listdir(path) == ["job.lock"]


@pytest.mark.parametrize("is_left_behind", [False, True])
def test_only_this_user_reads_the_command_line_in_the_lock(folder, is_left_behind):
    if is_left_behind:
        os.mkdir("logs")
        (folder / "logs/job.lock").touch(0o644)
    with open_log_dir("logs", COMMAND):
        assert os.stat("logs/job.lock").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["job.lock", "job.node1.lock"])
def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(folder, name):
    (folder / "mine").write_text("precious")
    os.mkdir("logs")
    os.symlink(folder / "mine", f"logs/{name}")
    with pytest.raises(UsageError) as refused:
        open_log_dir("logs", COMMAND, 1 if "node" in name else None).__enter__()
    assert f"'logs': {name}: it is a symbolic link to {folder / 'mine'}, which" in str(
        refused.value
    )
    assert str(refused.value).endswith("would be overwritten: remove the link")
    assert (folder / "mine").read_text() == "precious"


WRITTEN = ["p0000.log", "p0003.log", "p12345.log", ".p0003.progress", ".p0003.record"]
WRITTEN += [".p0003.record.fault", "coordinator.log", "jax_service.log", "failure.json", "job.json"]
OWN = [
    "p0.log",
    "p0003.log.gz",
    "my p0003.log",
    "metrics.json",
    "record",
    "attempt",
    "job.json.bak",
]


def filled(folder):
    folder.mkdir(parents=True)
    for name in (*WRITTEN, *OWN):
        (folder / name).write_text("Error")
    (folder / "p0009.log").symlink_to(folder / "metrics.json")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_of_an_earlier_job_are_removed_and_other_files_stay(folder):
    logs = folder / "logs"
    for place in (logs, logs / "attempt0", logs / "attempt12", logs / "attempts", logs / "more"):
        filled(place)
    for name in OWN:
        (logs / "attempt12" / name).unlink()
    (logs / "attempt12" / "p0009.log").unlink()
    with open_log_dir("logs", COMMAND):
        stays = [*OWN, "p0009.log"]
        assert names_in(logs) == sorted([*stays, "attempt0", "attempts", "job.lock", "more"])
        assert names_in(logs / "attempt0") == sorted(stays)
        assert len(names_in(logs / "attempts")) == len(names_in(logs / "more")) == len(WRITTEN) + 8


def test_a_directory_of_several_launchers_is_cleared_by_that_of_node_0_alone(folder):
    logs = folder / "logs"
    filled(logs)
    with open_log_dir("logs", COMMAND, 0):
        assert not (logs / "p0000.log").exists()
        (logs / "p0000.log").write_text("of node 0")
        with open_log_dir("logs", COMMAND, 1):
            assert (logs / "p0000.log").exists()


def test_the_own_directory_of_a_launcher_is_cleared_by_it(folder):
    filled(folder / "logs")
    with open_log_dir("logs", COMMAND, 1):
        assert names_in(folder / "logs") == sorted([*OWN, "job.node1.lock", "p0009.log"])


def test_a_directory_is_shown_relative_only_where_it_is_within_this_one(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(str(tmp_path / "here" / "logs")) == "logs"
    for elsewhere in (str(tmp_path / "logs"), "/shoal-run-1"):
        assert shown_path(elsewhere) == elsewhere
