"""A launch never waits for ever without a word: what is lost is ended, what is slow is named."""

from __future__ import annotations

import os
import re
import signal

import pytest

HEAD = """
import os, pathlib, signal, sys, threading, time
me, go = int(os.environ["RANK"]), pathlib.Path("go")
def await_go():
    while not go.exists(): time.sleep(0.01)
"""
JOIN = "import shoal; shoal.initialize(); shoal.barrier('here')\n"
CATCH = """
try:
    shoal.barrier("never", timeout_s=60)
except shoal.errors.ProcessLostError:
    sys.exit(0)
"""


@pytest.mark.usefixtures("forks")
def test_a_frozen_process_is_ended_though_the_others_end_well(launch):
    launch.env |= {"SHOAL_LOST_AFTER_S": "1", "SHOAL_GRACE_S": "0.5", "SHOAL_FAILURE_GRACE_S": "30"}
    freeze = "if me == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
    finished = launch.run("-n", "3", "--devices", "1", script=HEAD + JOIN + freeze + CATCH)
    assert finished.code == 71, finished.err
    assert finished.verdict.endswith(": process 1 of 3 was lost")
    assert "  It was stopped by a signal (SIGSTOP), and was ended by shoal run with" in finished.err
    assert "  Processes 0, 2 ended with exit code 0.\n" in finished.err
    assert launch.leaves_nobody()


@pytest.mark.usefixtures("forks")
def test_a_process_that_cut_its_own_connection_is_ended_though_it_lives(launch):
    launch.env |= {"SHOAL_LOST_AFTER_S": "1", "SHOAL_GRACE_S": "0.5"}
    cut = """
import socket
if me == 1:
    port = int(os.environ["SHOAL_COORDINATOR"].rpartition(":")[2])
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = socket.socket(fileno=os.dup(int(fd)))
            if link.getpeername()[1] == port: link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    while True: signal.pause()
"""
    finished = launch.run("-n", "2", "--devices", "1", script=HEAD + JOIN + cut + CATCH)
    assert finished.code == 71, finished.err
    assert finished.verdict.endswith(": process 1 of 2 was lost")
    words = "Its connection closed, but it lived on; it was ended by shoal run with SIGTERM."
    assert f"  {words}\n" in finished.err
    assert launch.leaves_nobody()


def test_processes_that_run_longer_are_named_and_not_ended(launch):
    """Two are done; one hangs at its end, and one was stopped, before they ever joined."""
    launch.env |= {"SHOAL_WARN_AFTER_S": "0.3", "SHOAL_FAILURE_GRACE_S": "0.1"}
    launch.start(
        *("-n", "4"),
        script=HEAD
        + "pid = pathlib.Path('stopped.txt')\n"
        + "def is_stopped():\n"
        + "    return pid.exists() and ') T ' in open(f'/proc/{pid.read_text()}/stat').read()\n"
        + "if me == 2: threading.Thread(target=await_go).start()\n"
        + "elif me == 3:\n"
        + "    pathlib.Path('new').write_text(str(os.getpid())); os.rename('new', pid)\n"
        + "    os.kill(os.getpid(), signal.SIGSTOP); await_go()\n"
        + "else:\n"
        + "    while not is_stopped(): time.sleep(0.01)\n",
    )
    lines = [launch.popen.stderr.readline() for _ in range(2)]
    stopped = int((launch.folder / "stopped.txt").read_text())
    late = r"still runs, \d+ s after the others ended: "
    assert re.fullmatch(rf"shoal run: process 2 \(pid \d+\) {late}it has not joined .*\n", lines[0])
    told = rf"it is stopped by a signal; `kill -CONT {stopped}` resumes it\n"
    assert re.fullmatch(rf"shoal run: process 3 \(pid {stopped}\) {late}{told}", lines[1])
    os.kill(stopped, signal.SIGCONT)
    (launch.folder / "go").touch()
    finished = launch.finish()
    assert finished.code == 0, finished.err
    assert "no process has joined the job" in finished.verdict


@pytest.mark.usefixtures("forks")
def test_a_process_that_never_comes_is_named_at_once(launch):
    launch.start("-n", "2", "--devices", "1", script=HEAD + "if me == 0: " + JOIN)
    said = launch.popen.stderr.readline()
    told = "ended with exit code 0 without joining the job; process 0 waits for it"
    assert said == f"shoal run: process 1 {told}\n"
    launch.popen.send_signal(signal.SIGTERM)
    assert launch.finish().code == 128 + signal.SIGTERM
    assert launch.leaves_nobody()


def test_services_that_do_not_end_do_not_hold_up_the_end(launch):
    finished = launch.run(
        *("-n", "2", "--log-dir", "logs"),
        script=HEAD
        + "import json\n"
        + "posted = pathlib.Path('logs/job.json')\n"
        + "while not posted.exists(): time.sleep(0.01)\n"
        + "for pid in json.loads(posted.read_text())['services'].values():\n"
        + "    os.kill(pid, signal.SIGSTOP)\n",
    )
    assert finished.code == 0, finished.err
    assert launch.leaves_nobody()


def test_frozen_jax_service_ends_the_job_even_without_synchronization(launch):
    launch.env |= {"SHOAL_LOST_AFTER_S": "1"}
    launch.start("-n", "2", script=HEAD + "print('ready'); time.sleep(600)")
    launch.await_words("ready", 2)
    (service,) = launch.pids("shoal.runtime.jax_service.jax_runtime")
    os.kill(service, signal.SIGSTOP)
    finished = launch.finish()
    assert finished.code == 71
    assert finished.verdict.startswith("shoal run: failed: JAX's service is lost (silent for ")
    assert launch.leaves_nobody()


def test_stopped_supervisor_is_reported_and_continues(launch):
    launch.start("-n", "2", script=HEAD + "print('ready'); await_go()")
    launch.await_words("ready", 2)
    (supervisor,) = launch.pids("shoal-supervise")
    os.kill(supervisor, signal.SIGSTOP)
    line = launch.popen.stderr.readline()
    assert line.startswith(
        f"shoal run: the supervisor of the job (pid {supervisor}) is stopped by a signal"
    )
    os.kill(supervisor, signal.SIGCONT)
    (launch.folder / "go").touch()
    assert launch.finish().code == 0
