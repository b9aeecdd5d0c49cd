"""`shoal watch` and `shoal stacks` at work on jobs with one frozen process and others that wait."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.observer import Observer, find
from shoal.draw.roll import Roll
from shoal.testing.cluster import Cluster

DEADLINE_S = 60.0
SCRIPT = """
import signal, shoal

from shoal.errors import ProcessLostError

def load():
    open(__file__ + ".go").read()  # until the test resumes it

def train():
    try:
        shoal.barrier("epoch")
    except ProcessLostError:
        shoal.live_processes()
        if shoal.process_index() == 2:
            signal.pause()  # in plain Python, while the others wait for it
        shoal.barrier("without it", processes=[0, 2])

shoal.initialize()
with shoal.step(7):
    if shoal.process_index() == 1:
        load()
    train()
shoal.shutdown()
"""


class Watched:
    """A job of three, of which process 1 does not come to the barrier, and who looks at it."""

    def __init__(self, bench: Cluster, env: dict[str, str]) -> None:
        self.bench, self.env = bench, env
        self.logs = os.path.join(bench.folder, "logs")
        script = Path(bench.folder, "train.py")
        script.write_text(SCRIPT)
        self._go = f"{script}.go"
        os.mkfifo(self._go)
        bench.start(script)

    def until(self, is_so: Callable[[Roll], bool]) -> Roll:
        """Ask until it is so."""
        limit = time.monotonic() + DEADLINE_S
        while not os.path.exists(os.path.join(self.logs, "job.json")):
            assert time.monotonic() < limit
        looking = Observer("watch", find("watch", self.logs, None))
        try:
            while not is_so(roll := looking.roll()):
                assert time.monotonic() < limit, roll
                looking.answer(time.monotonic() + 0.02)  # nothing was asked, nothing will come
            return roll
        finally:
            looking.close()

    def freeze(self) -> Roll:
        """Stop process 1 where all know that it is, while the others wait for it."""
        self.until(others_wait)
        self.bench.stop(1)
        return self.until(lambda roll: roll.members[1].state in ("stopped", "lost"))

    def let_go(self) -> None:
        """Let process 1 go on, to the barrier."""
        self.bench.cont(1)
        with open(self._go, "w"):  # it reads there, until the end
            pass

    def shoal(self, command: str, *arguments: str) -> str:
        """Run a command that must end well; return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "shoal", command, self.logs, *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture
def watched(cluster, child_env) -> Callable[[str], Watched]:
    """Return a function that starts the job, in which who is frozen is lost after so long."""

    def start(lost_after_s: str) -> Watched:
        env = child_env | {"SHOAL_LOST_AFTER_S": lost_after_s, "SHOAL_HEARTBEAT_S": "0.2"}
        return Watched(cluster(3, services="launcher", env=env), child_env)

    return start


def others_wait(roll: Roll, at: str = "barrier 'epoch'") -> bool:
    """Do all but process 1 wait there, and has it come to its step?"""
    waiting = [m.is_waiting and m.place.startswith(at) for m in roll.members]
    return waiting == [True, False, True] and roll.members[1].step == 7


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_frozen_process_is_the_one_that_does_not_answer(watched):
    job = watched("inf")
    roll = job.freeze()
    host = roll.members[0].host

    facts = json.loads(job.shoal("watch", "--json"))
    assert facts["counts"] == {"here": 2, "stopped": 1}
    assert [p["is_waiting"] for p in facts["processes"]] == [True, False, True]
    assert [p["step"] for p in facts["processes"]] == [7, 7, 7]
    assert all(p["memory_bytes"] > 1 << 20 for p in facts["processes"])
    assert facts["processes"][0]["where"].startswith("waits at barrier 'epoch' (train.py:11)")
    assert [s["name"] for s in facts["services"]] == ["JAX's service"]

    title, _, _, frozen, *waiting, service = job.shoal("watch").splitlines()
    assert f" on {host}: 2 here, 1 stopped" in title
    assert frozen.split()[:2] == ["1", "stopped"]
    assert "last at step (train.py:19)" in frozen
    assert [line.split()[0] for line in waiting] == ["0", "2"]
    assert all("waits at barrier 'epoch' (train.py:11)" in line for line in waiting)
    assert service == f"JAX's service ({host}): here"

    pid = roll.members[1].pid
    waits, silent = job.shoal("stacks").strip().split("\n\n")
    assert waits.startswith(f"processes 0, 2 ({host}): waits at barrier 'epoch' (train.py:11), up")
    assert 'train.py", line 11, in train\n' in waits
    assert waits.splitlines()[-1].endswith(" in shoal")
    assert "shoal watcher" not in waits
    assert silent.startswith(f"process 1 ({host}) does not answer: pid {pid}: stopped")
    assert job.shoal("stacks", "1").startswith(f"process 1 ({host}) does not answer: pid {pid}: ")
    told = json.loads(job.shoal("stacks", "0-1", "--json"))["processes"]
    assert [p["answers"] for p in told] == [True, False]
    assert "Thread 'MainThread' " in told[0]["stacks"]
    assert "Thread 'shoal watcher' " in told[0]["stacks"]
    assert told[1]["stacks"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_lost_process_comes_first_then_the_one_that_the_other_waits_for(watched):
    job = watched("0.5")
    job.freeze()
    job.until(lambda roll: roll.members[0].place.startswith("barrier 'without it'"))
    facts = json.loads(job.shoal("watch", "--json"))
    assert facts["counts"] == {"here": 2, "lost": 1}
    assert "stopped (SIGSTOP?), silent for " in facts["processes"][1]["where"]

    _, _, _, lost, late, waiting, _ = job.shoal("watch").splitlines()
    assert lost.startswith("1     lost   ")
    assert "stopped (SIGSTOP?), silent for " in lost
    assert late.startswith("2 ")
    assert "last at live_processes " in late
    assert "waits at barrier 'without it' (train.py:16)" in waiting

    *stacks, gone = job.shoal("stacks").strip().split("\n\n")
    assert gone.startswith("process 1 (")
    assert "is lost: stopped (SIGSTOP?), silent for " in gone
    assert ["line 16, in train" in text for text in stacks] == [True, False]
    assert ["line 15, in train" in text for text in stacks] == [False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_on_a_terminal_it_redraws_until_ctrl_c_or_the_end_of_the_job(watched):
    job = watched("inf")
    job.freeze()
    with Terminal(["watch", job.logs], job.env) as terminal:
        terminal.until(lambda said: b"3 processes at" in said)
        os.write(terminal.ours, b"\x03")
        assert terminal.popen.wait(DEADLINE_S) == 130
        terminal.until(lambda said: b"\x1b[?25h" in said)  # the cursor is back
    assert b"Traceback" not in terminal.said
    with Terminal(["watch", job.logs, "--every", "0.05"], job.env) as terminal:
        terminal.until(lambda said: said.count(b"3 processes at") >= 3)
        assert b"\x1b[?1049h" in terminal.said  # the alternate screen
        job.let_go()
        terminal.until(lambda said: b"the job is over: " in said)
        after = terminal.said.partition(b"\x1b[?1049l")[2]
        assert b"3 processes at" in after  # what was seen last stays
        assert terminal.popen.wait(DEADLINE_S) == 0
    job.bench.wait()


class Terminal:
    """The command on a terminal of 100 × 24, and all that it wrote there."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.said = b""
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", ENTER, *arguments],
            env=env | {"TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.popen.kill()
        self.popen.wait()
        os.close(self.ours)

    def until(self, is_so: Callable[[bytes], bool]) -> None:
        """Read until it is so."""
        limit = time.monotonic() + DEADLINE_S
        while not is_so(self.said):
            ready, _, _ = select.select([self.ours], [], [], max(0.0, limit - time.monotonic()))
            assert ready, self.said
            self.said += os.read(self.ours, 1 << 16)


# Ctrl-C reaches who has a controlling terminal: this one becomes it.
ENTER = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from shoal.cli.main import main
main()
"""
