"""`shoal coordinator`: with it no process is special."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

COUNT = 3
SCRIPT = """
process.initialize(virtual_devices=2, timeout_s=30)
say(global_sum())
barrier("ready")
say("ready")
"""


class CoordinatorCommand:
    """The command at work, and what it said."""

    def __init__(self, env, *options, before=()):
        self.popen = subprocess.Popen(
            [*before, sys.executable, "-m", "shoal", "coordinator", "-n", str(COUNT), *options],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self):
        return json.loads(self.popen.stdout.readline())

    def variables(self):
        """What people are told to export."""
        lines = [self.popen.stderr.readline() for _ in range(4)]
        assert lines.pop().startswith(f"and for each process SHOAL_NUM_PROCESSES={COUNT} and ")
        pairs = [line.removeprefix("export ").rstrip().split("=", 1) for line in lines]
        return dict(pairs)

    def finish(self):
        out, err = self.popen.communicate(timeout=60)
        return self.popen.returncode, out, err


@pytest.fixture
def start(job):
    """Return a function that starts the command; the job's fixture ends what is left of it."""
    started = []

    def start(*options, before=(), **env):
        started.append(CoordinatorCommand({**job.env, **env}, *options, before=before))
        return started[-1]

    yield start
    for command in started:
        command.popen.kill()
        command.finish() if not command.popen.stdout.closed else None


def start_all(job, variables, script=SCRIPT):
    numbers = {"SHOAL_NUM_PROCESSES": str(COUNT), **variables}
    return [
        job.start(index, COUNT, script, SHOAL_PROCESS_ID=str(index), **numbers)
        for index in range(COUNT)
    ]


def await_words(words, *processes):
    for process in processes:
        assert f"> {words}\n" in process.stdout


def test_a_job_meets_there_and_both_end_with_it(job, said, start):
    command = start()
    told, variables = command.told(), command.variables()
    assert told["coordinator"] == variables["SHOAL_COORDINATOR"]
    assert told["jax_service"] == variables["SHOAL_JAX_SERVICE"]
    assert told["token"] == variables["SHOAL_TOKEN"]
    assert set(told["pids"].values()) <= set(job.descendants())
    start_all(job, variables)
    for one in job.wait():
        assert (one.code, one.err) == (0, ""), one
        assert said(one).splitlines() == ["15.0", "ready"]
    assert command.finish() == (0, "", "")
    assert job.leaves_no_orphan()


def test_process_0_is_not_special(job, said, start):
    script = """
import threading
try:
    while True:
        barrier("again")
except ProcessLostError as error:
    say("lost", *error.lost)
barrier("the others", processes=[1, 2])
say("met")
"""
    command = start(SHOAL_TOKEN="ours")
    told = command.told()
    assert "token" not in told
    variables = {
        "SHOAL_COORDINATOR": told["coordinator"],
        "SHOAL_JAX_SERVICE": told["jax_service"],
        "SHOAL_TOKEN": "ours",
    }
    zero, *others = start_all(job, variables, SCRIPT + script)
    await_words("ready", zero, *others)
    zero.kill()
    for one in job.wait()[1:]:
        assert (one.code, one.err) == (0, ""), one
        assert said(one).splitlines()[-2:] == ["lost 0", "met"]
    assert command.finish()[0] == 0
    assert job.leaves_no_orphan()


def test_keep_serves_one_job_after_another(job, start):
    command = start("--keep", before=["nohup"])
    first, variables = command.told(), command.variables()
    for _ in range(2):
        start_all(job, variables)
        assert {one.code for one in job.wait()} == {0}
        command.popen.send_signal(signal.SIGHUP)  # as at the end of the terminal
    second = command.told()
    assert {**second, "pids": first["pids"]} == first
    command.popen.send_signal(signal.SIGTERM)
    assert command.finish()[0] == 128 + signal.SIGTERM
    assert job.leaves_no_orphan()


def test_end_of_a_service_is_printed(job, start):
    command = start()
    told, variables = command.told(), command.variables()
    processes = start_all(job, variables, SCRIPT + "while True:\n    barrier('again')\n")
    await_words("ready", *processes)
    os.kill(told["pids"]["jax_service"], signal.SIGKILL)
    for one in job.wait():
        assert one.code == 71, one
        assert "JAX's service" in one.err.splitlines()[0], one
    code, _, err = command.finish()
    assert code == 71
    assert "JAX's service ended, code -9" in err
    assert job.leaves_no_orphan()


def test_its_own_death_ends_both(job, start):
    command = start()
    command.told()
    command.popen.kill()
    assert job.leaves_no_orphan()


def test_taken_port_and_invalid_options_are_printed(job, start):
    command = start()
    port = command.told()["coordinator"].rpartition(":")[2]
    taken = start("--port", port)
    code, out, err = taken.finish()
    assert (code, out) == (74, "")
    assert f"the coordinator cannot start at 127.0.0.1:{port}" in err
    assert "in use" in err
    wrong = start("--port", "x", "--jax-port", "70000")
    code, out, err = wrong.finish()
    assert (code, out) == (2, "")
    assert "--port x" in err
    assert "--jax-port 70000" in err


def test_a_signal_that_hits_a_destructor_is_not_lost(child_env):
    """An exception there would be printed, and lost."""
    script = """
import os, signal
from shoal.cli import coordinator

class Hit:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

signals = coordinator._EndingSignals([signal.SIGTERM])
Hit()
assert os.read(signals.wakes, 9) == bytes([signal.SIGTERM])
try:
    signals.check()
except coordinator._Signalled as ended:
    print(ended.args)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"({signal.SIGTERM.value},)\n", "")
