"""Jobs of real processes on the loopback interface, without a launcher."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from quiet_ports import quiet_row
from shoal.testing.forked import Forked, ForkOrder, fork_all
from shoal.testing.running import Pump, Running
from shoal.testing.warden import MARK, marked
from shoal.testing.warding import Warden

DEADLINE_S = 60.0
# Before every script: who it is, and what most of them do.
HEAD = """
import os, signal, sys
import shoal.runtime.process as process
from shoal.errors import *
from shoal.runtime.barrier import barrier

address, index, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def initialize(**options):
    process.initialize(**dict(
        coordinator_address=address, num_processes=count, process_id=index,
        virtual_devices=2, timeout_s=30) | options)

def global_sum():
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
    rows = np.arange(len(devices), dtype=np.float32)
    array = jax.make_array_from_callback(rows.shape, sharding, lambda where: rows[where])
    return float(jax.jit(lambda a: a.sum())(array))

def say(*words):
    # One write, on a line of its own: Gloo's threads print to the same stdout.
    text = " ".join(map(str, words)).replace("\\n", "\\n> ")
    os.write(1, f"\\n> {text}\\n".encode())
"""


class Ended(NamedTuple):
    """How one process ended."""

    code: int
    out: str
    err: str
    ended_s: float  # seconds after `Job.began`


class Started:
    """One process of a job: what `Popen` offers, with its output read by the bench."""

    def __init__(self, running: Running, pump: Pump) -> None:
        self.running, self._pump = running, pump
        self.pid = running.popen.pid
        self.stdout = self._lines()

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.running.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Sleep until it is so; each line that is said, and each end, wakes."""
        with self._pump.changed:
            found = self._pump.changed.wait_for(is_so, DEADLINE_S)
        assert found, f"not within {DEADLINE_S:g} s: {self.running.tail(10)}"

    def until_said(self, word: str) -> None:
        """Read its stdout up to a line of what it said that begins with `word`."""
        assert any(text.startswith(f"> {word}") for text in self.stdout), f"it never said {word!r}"

    def _lines(self) -> Iterator[str]:
        """Yield the lines of its stdout as they come, until it ends."""
        running, begin = self.running, 0
        while True:
            self.until(lambda n=begin: b"\n" in running.out[n:] or running.code is not None)
            line, newline, _ = bytes(running.out[begin:]).partition(b"\n")
            if not newline:
                return
            begin += len(line) + 1
            yield line.decode(errors="replace") + "\n"


class Job:
    """Processes that run one script, with HEAD before it. The numbers are arguments of the script:
    unlike those of a `Cluster`, two may have one index, and none need join."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.forks = True  # its processes fork from one that has imported JAX, see `fork_server`
        self.warden = Warden(0)
        self.pump = Pump()
        self.env = {**env, MARK: self.warden.mark}
        self.began = time.monotonic()
        host, port = quiet_row(1)
        self.address = f"{host}:{port}"
        self.processes: list[Started] = []

    def start(self, index: int, count: int, script: str, *more: str, **env: str) -> Started:
        """Start one process."""
        path = self.folder / f"script{index}.py"
        path.write_text(HEAD + textwrap.dedent(script))
        popen = self._popen([str(path), self.address, str(index), str(count), *more], env)
        running = Running(f"process {index}", popen)
        self.pump.follow(running)
        self.processes.append(Started(running, self.pump))
        return self.processes[-1]

    def _popen(self, command: list[str], env: dict[str, str]) -> Forked | subprocess.Popen[bytes]:
        if self.forks:
            return fork_all([ForkOrder(command, {**self.env, **env}, is_script=True)])[0]
        return subprocess.Popen(
            [sys.executable, *command],
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, count: int, script: str, *more: str, **env: str) -> list[Ended]:
        """Start all processes and wait until all have ended."""
        for index in range(count):
            self.start(index, count, script, *more, **env)
        return self.wait()

    def wait(self) -> list[Ended]:
        """Wait until all processes have ended; none may outlive the deadline."""
        return [self.wait_for(number) for number in range(len(self.processes))]

    def wait_for(self, number: int) -> Ended:
        """Wait until the process that was started as this one has ended."""
        started = self.processes[number]
        running = started.running
        started.until(lambda: running.code is not None)
        out, err = (said.decode(errors="replace") for said in (running.out, running.err))
        return Ended(running.code, out, err, running.began - self.began + running.ended_s)

    def descendants(self, of: str = "") -> list[int]:
        """Return the pids of all processes of this job that are alive and run module `of`."""
        return [pid for pid in marked(self.warden.mark) if of in command_line(pid)]

    def leaves_no_orphan(self, within_s: float = 15.0, of: str = "") -> bool:
        """Wait, event-driven, until every descendant that runs module `of` has ended."""
        deadline = time.monotonic() + within_s
        while pids := self.descendants(of):
            try:
                handle = os.pidfd_open(pids[0])
            except ProcessLookupError:
                continue
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            os.close(handle)
            if not ready:
                return False
        return True

    def end(self) -> None:
        """Kill whatever is left."""
        self.warden.close()
        for process in self.processes:
            process.running.popen.wait()
        self.pump.close()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def job(tmp_path: Path, child_env: dict[str, str]) -> Iterator[Job]:
    """Return a job without processes; nothing of it outlives the test."""
    job = Job(tmp_path, child_env)
    yield job
    job.end()


@pytest.fixture
def interpreters(job: Job) -> None:
    """Let each process start and end as a user's does: not as a fork."""
    job.forks = False


@pytest.fixture
def said() -> Callable[[Ended], str]:
    """Return a function that takes what a process said out of its output."""

    def own(ended: Ended) -> str:
        return "\n".join(t[2:] for t in ended.out.splitlines() if t.startswith("> "))

    return own
