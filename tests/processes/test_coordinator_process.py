"""A real coordinator, real processes, real signals: who survives learns who did not."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from shoal.cli.observer import Observer, ServerAddress
from shoal.errors import DeadlineError, DivergenceError, InitializeError, ProcessLostError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.over_tcp import join

PATIENCE_S = 60.0  # a deadline of the test itself: reached only when something is broken
SURVIVOR_S = 2.0  # a killed process must be known to the others within this

CHILD = """
import json, os, sys
from shoal.runtime.barrier import barrier
from shoal.runtime.client.over_tcp import join

def report(**facts):
    print(json.dumps(facts), flush=True)

def attempt(action):
    try:
        report(result=action())
    except (Exception, KeyboardInterrupt) as error:
        report(error=type(error).__name__, words=str(error))

def fork(hold):
    child = os.fork()
    if child == 0:
        os.read(hold, 1)
        os._exit(0)
    return child

def main(address, process, processes, timeout_s, hold):
    job = join(address, process=process, num_processes=processes, timeout_s=timeout_s)
    report(result="joined")
    for line in sys.stdin:
        verb, *values = json.loads(line)
        if verb == "barrier":
            name, timeout_s = values
            attempt(lambda: barrier.on(job, name, timeout_s=timeout_s))
        elif verb == "fork":
            attempt(lambda: fork(hold))
        elif verb == "failed":
            job.report("failed", "Traceback\\nValueError: no data")
            os._exit(1)
    job.close()

try:
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
except Exception as error:
    report(error=type(error).__name__, words=str(error))
"""


class Child:
    """A process of the job that does what it is told."""

    def __init__(self, script, env, hold, address, process, processes, timeout_s=PATIENCE_S):
        numbers = [str(n) for n in (process, processes, timeout_s, hold)]
        self.popen = subprocess.Popen(
            [sys.executable, str(script), address, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=(hold,),
        )
        self.process = process

    def order(self, *words):
        self.popen.stdin.write(json.dumps(words) + "\n")
        self.popen.stdin.flush()

    def answer(self):
        line = self.popen.stdout.readline()
        assert line, "it ended without a word"
        return json.loads(line)

    def signal(self, number):
        self.popen.send_signal(number)

    def end(self):
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.stdin.close()
            try:
                self.popen.wait(PATIENCE_S)
            finally:
                self.popen.kill()
        with self.popen:
            self.popen.stdout.close()


class Stage:
    """A coordinator, and a job of which the test itself is process 0."""

    def __init__(self, folder, env):
        self.script = folder / "child.py"
        self.script.write_text(CHILD)
        self.env = env
        self.children = []
        self.hold, self._release = os.pipe()
        self.me = None

    def open(self, processes, **env):
        command = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--processes"]
        self.server = subprocess.Popen(
            [*command, str(processes), "--until-empty"],
            stdout=subprocess.PIPE,
            env={**self.env, **env},
        )
        self.processes = processes
        self.address = json.loads(self.server.stdout.readline())["address"]

    def child(self, process, **more):
        child = Child(self.script, self.env, self.hold, self.address, process, self.processes,
                      **more)  # fmt: skip
        self.children.append(child)
        return child

    def join(self, timeout_s=PATIENCE_S):
        return join(self.address, process=0, num_processes=self.processes, timeout_s=timeout_s)

    def start(self, processes, **env):
        """Start a job; return this process's coordinator and the children."""
        self.open(processes, **env)
        children = [self.child(p) for p in range(1, processes)]
        self.me = self.join()
        assert [child.answer() for child in children] == [{"result": "joined"}] * len(children)
        return self.me, children

    def until_waits(self, child):
        give_up = time.monotonic() + PATIENCE_S
        while not self.me.members(timeout_s=PATIENCE_S)[child.process].last_words.startswith(
            "waits at"
        ):
            assert time.monotonic() < give_up

    def until_lost(self, process):
        """Wait until the coordinator has noticed the end of a process."""
        give_up = time.monotonic() + PATIENCE_S
        with contextlib.closing(Observer("test", ServerAddress(self.address, ("",)))) as observer:
            while observer.roll().members[process].state != "lost":
                assert time.monotonic() < give_up

    def strike(self):
        """Clear the stage. A coordinator that still lives must end by itself."""
        if self.me is not None:
            self.me.close()
        os.close(self._release)
        os.close(self.hold)
        for child in self.children:
            child.end()
        try:
            self.server.send_signal(signal.SIGCONT)
            assert self.server.wait(PATIENCE_S) in (0, -signal.SIGKILL)
        finally:
            self.server.kill()
            self.server.stdout.close()


@pytest.fixture
def stage(tmp_path, child_env):
    stage = Stage(tmp_path, child_env)
    yield stage
    stage.strike()


def test_killed_process_raises_at_once_in_present_and_later_waits(stage):
    me, (victim, other) = stage.start(3)
    other.order("barrier", "epoch", PATIENCE_S)
    stage.until_waits(other)
    killed = time.monotonic()
    victim.signal(signal.SIGKILL)
    told = other.answer()
    assert time.monotonic() - killed < SURVIVOR_S
    assert told["error"] == "ProcessLostError"
    assert told["words"].startswith("process 2 of 3 (")
    assert "'epoch' (child.py:" in told["words"]
    assert "process 1 (" in told["words"]
    for name in ("epoch", "later"):
        with pytest.raises(ProcessLostError) as caught:
            barrier.on(me, name, timeout_s=PATIENCE_S)
        assert set(caught.value.lost) == {1}
    assert time.monotonic() - killed < SURVIVOR_S


def test_a_frozen_process_is_late_is_named_and_may_come_back(stage):
    me, (frozen, other) = stage.start(3)
    frozen.signal(signal.SIGSTOP)
    other.order("barrier", "epoch", 1.0)
    with pytest.raises(DeadlineError) as caught:
        barrier.on(me, "epoch", timeout_s=PATIENCE_S)
    assert caught.value.missing == (1,)
    assert caught.value.last_words[1].startswith("joined, ")
    assert other.answer()["error"] == "DeadlineError"
    frozen.signal(signal.SIGCONT)
    frozen.order("barrier", "epoch", PATIENCE_S)
    told = frozen.answer()
    assert told["error"] == "DeadlineError"
    assert "missed the wait at" in told["words"]
    for child in (frozen, other):
        child.order("barrier", "next", PATIENCE_S)
    barrier.on(me, "next", timeout_s=PATIENCE_S)
    assert [child.answer() for child in (frozen, other)] == [{"result": None}] * 2


def test_a_process_that_is_silent_too_long_is_lost_and_learns_it_when_it_wakes(stage):
    me, (frozen,) = stage.start(2, SHOAL_LOST_AFTER_S="0.5", SHOAL_SILENT_LOST_AFTER_S="1")
    frozen.signal(signal.SIGSTOP)
    with pytest.raises(ProcessLostError, match="silent for 1 s") as caught:
        barrier.on(me, "epoch", timeout_s=PATIENCE_S)
    assert set(caught.value.lost) == {1}
    assert me.members(timeout_s=PATIENCE_S)[1].state == "lost"
    frozen.signal(signal.SIGCONT)
    frozen.order("barrier", "epoch", PATIENCE_S)
    assert frozen.answer()["error"] == "ProcessLostError"


def test_deadline_has_the_stack_of_the_late_process(stage):
    me, (child,) = stage.start(2)
    with pytest.raises(DeadlineError) as caught:
        barrier.on(me, "epoch", timeout_s=0.2)
    assert "in main" in caught.value.stacks[1]
    assert "child.py" in caught.value.stacks[1]
    child.order("barrier", "epoch", PATIENCE_S)
    assert child.answer()["error"] == "DeadlineError"


def test_disagreeing_processes_are_shown_both_sides(stage):
    me, (child,) = stage.start(2)
    child.order("barrier", "save", PATIENCE_S)
    with pytest.raises(DivergenceError) as caught:
        barrier.on(me, "evaluate", timeout_s=PATIENCE_S)
    words = child.answer()["words"]
    for told in (str(caught.value), words):
        assert re.search(
            r"process 0: barrier 'evaluate' at \S*test_coordinator_process\.py:\d+ \(test_", told
        )
        assert "process 1: barrier 'save' at child.py:" in told


def test_a_failure_brings_its_traceback(stage):
    _, (failing, other) = stage.start(3)
    other.order("barrier", "epoch", PATIENCE_S)
    stage.until_waits(other)
    failing.order("failed")
    told = other.answer()
    assert told["error"] == "PeerFailedError"
    assert "ValueError: no data" in told["words"]


def test_killed_coordinator_ends_the_waits(stage):
    me, (child,) = stage.start(2)
    child.order("barrier", "epoch", PATIENCE_S)
    stage.until_waits(child)
    stage.server.kill()
    told = child.answer()
    assert told["error"] == "ProcessLostError"
    assert f"the coordinator at {stage.address} is lost" in told["words"]
    for _ in range(2):
        with pytest.raises(ProcessLostError, match="the coordinator"):
            barrier.on(me, "epoch", timeout_s=PATIENCE_S)


def test_frozen_coordinator_ends_the_wait_shortly_after_the_deadline(stage):
    me, (child,) = stage.start(2)
    stage.server.send_signal(signal.SIGSTOP)
    with pytest.raises(ProcessLostError, match="it does not answer"):
        barrier.on(me, "epoch", timeout_s=0.2)
    stage.server.send_signal(signal.SIGCONT)
    stage.until_lost(0)  # else both may have arrived before it reads that one has gone
    child.order("barrier", "epoch", PATIENCE_S)
    told = child.answer()
    assert told["error"] == "ProcessLostError"  # all or none: who gave up is lost to the others
    assert "process 0 (" in told["words"]


def test_process_that_joins_too_late_raises_and_so_do_the_others(stage):
    stage.open(2)
    with pytest.raises(InitializeError) as caught:
        stage.join(timeout_s=0.3)
    assert caught.value.missing == (1,)
    told = stage.child(1, timeout_s=0.3).answer()
    assert told["error"] == "InitializeError"
    assert told["words"].startswith("process 1 of 2 (")


def test_a_forked_child_does_not_hide_the_death_of_its_parent(stage):
    """Its connections stay open in the child. Without a host agent, its silence shows its death."""
    me, (parent,) = stage.start(2, SHOAL_SILENT_LOST_AFTER_S="5")
    parent.order("fork")
    grandchild = parent.answer()["result"]
    parent.signal(signal.SIGKILL)
    with pytest.raises(ProcessLostError):
        barrier.on(me, "epoch", timeout_s=PATIENCE_S)
    os.kill(grandchild, 0)  # it lives on, with all that it inherited


def test_ctrl_c_in_a_wait_is_pythons_own_and_leaves_the_count_right(stage):
    me, (child,) = stage.start(2)
    child.order("barrier", "first", PATIENCE_S)
    stage.until_waits(child)
    child.signal(signal.SIGINT)
    assert child.answer()["error"] == "KeyboardInterrupt"
    barrier.on(me, "first", timeout_s=PATIENCE_S)
    child.order("barrier", "second", PATIENCE_S)
    barrier.on(me, "second", timeout_s=PATIENCE_S)
    assert child.answer() == {"result": None}


def test_coordinator_without_processes_ends(child_env):
    command = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--processes", "1"]
    run = subprocess.run(
        [*command, "--until-empty", "--idle-s", "0.1"],
        env=child_env, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert set(json.loads(run.stdout)) == {"address"}
    assert run.stderr == ""


def test_a_leash_that_is_no_pipe_is_refused(child_env):
    command = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--processes", "1"]
    run = subprocess.run(
        [*command, "--until-stdin-closes"],
        env=child_env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert run.returncode == 2
    assert "standard input must be a pipe" in run.stderr


def test_started_job_survives_the_process_that_started_its_coordinator(child_env):
    """Its holder may be killed in the moment after the last HELLO."""
    command = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--processes", "1"]
    command += ["--until-empty", "--until-stdin-closes"]
    with subprocess.Popen(command, env=child_env, stdin=-1, stdout=-1) as server:
        address = json.loads(server.stdout.readline())["address"]
        member = join(address, process=0, num_processes=1, timeout_s=PATIENCE_S)
        server.stdin.close()
        for turn in range(100):  # of which the first may be before the end of the pipe is seen
            barrier.on(member, f"turn {turn}", timeout_s=PATIENCE_S)
        member.close()
        assert server.wait(PATIENCE_S) == 0
