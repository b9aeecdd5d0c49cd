"""Jobs of real processes on the loopback interface, without a launcher."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

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

MARK = "SHOAL_TEST_JOB"  # an environment variable by which all descendants are found


class Ended(NamedTuple):
    """How one process ended."""

    code: int
    out: str
    err: str
    ended_s: float  # seconds after the job began


class Job:
    """Processes that run one script, with HEAD before it."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.env = {**env, MARK: self.mark}
        self.began = time.monotonic()
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.ended: dict[int, Ended] = {}

    def start(
        self, index: int, count: int, script: str, *more: str, **env: str
    ) -> subprocess.Popen[str]:
        """Start one process; its stdout is a pipe, its stderr a file."""
        path = self.folder / f"script{index}.py"
        path.write_text(HEAD + textwrap.dedent(script))
        with (self.folder / f"err{len(self.processes)}").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, str(path), self.address, str(index), str(count), *more],
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.processes[len(self.processes)] = process
        return process

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
        if number not in self.ended:
            process = self.processes[number]
            out, _ = process.communicate(timeout=DEADLINE_S - (time.monotonic() - self.began))
            err = (self.folder / f"err{number}").read_text()
            ended_s = time.monotonic() - self.began
            self.ended[number] = Ended(process.returncode, out, err, ended_s)
        return self.ended[number]

    def descendants(self, of: str = "") -> list[int]:
        """Return the pids of all processes of this job that are alive and run module `of`."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_text()
                is_dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if (
                f"{MARK}={self.mark}".encode() in environ.split(b"\0")
                and of in command
                and not is_dead
            ):
                found.append(int(folder.name))
        return found

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
        """Kill whatever is left, by pid."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for pid in self.descendants():
            os.kill(pid, 9)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def job(tmp_path: Path, child_env: dict[str, str]) -> Iterator[Job]:
    """Return a job without processes; nothing of it outlives the test."""
    job = Job(tmp_path, child_env)
    yield job
    job.end()


@pytest.fixture
def said() -> Callable[[Ended], str]:
    """Return a function that takes what a process said out of its output."""

    def own(ended: Ended) -> str:
        return "\n".join(t[2:] for t in ended.out.splitlines() if t.startswith("> "))

    return own
