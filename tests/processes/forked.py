"""Real processes by the dozen: forked from one that imported everything, so a job takes moments.

Each child joins a coordinator, saves, writes down how that ended, and goes. What is saved are
arrays of NumPy: a fork must not have touched devices before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = "the secret of the tests"
DEADLINE_S = 60.0


class Outcome(NamedTuple):
    """How one process fared."""

    is_dead: bool  # it was killed
    said: Mapping[str, Any]  # {} of a dead one; {"error": None}: it is saved

    @property
    def error(self) -> str | None:
        """The name of what it raised, None if it returned."""
        return "dead" if self.is_dead else self.said["error"]


class Child:
    """One forked process."""

    def __init__(self, pid: int, out: Path) -> None:
        self.pid, self._out = pid, out
        self._handle = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        signal.pidfd_send_signal(self._handle, number)

    def until_stopped(self) -> None:
        """Wait until a fault has frozen it."""
        give_up = time.monotonic() + DEADLINE_S
        while _state(self.pid) != "T":
            assert _state(self.pid) not in ("Z", ""), "it ended instead"
            assert time.monotonic() < give_up, "it was never frozen"
            select.select([], [], [], 0.005)

    def wait(self) -> Outcome:
        """Wait until it has ended."""
        ready, _, _ = select.select([self._handle], [], [], DEADLINE_S)
        assert ready, f"process {self.pid} did not end; it stands at\n{_stack(self.pid)}"
        if self._out.exists():
            return Outcome(False, json.loads(self._out.read_text()))
        return Outcome(True, {})

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        os.close(self._handle)


class Forks:
    """The process from which all are forked, and the coordinators of their jobs."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder, self._env = folder, dict(env)
        self._source = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**self._env, "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"},
        )
        self._places: dict[tuple[int, str], tuple[subprocess.Popen[str], str]] = {}
        self._children: list[Child] = []

    def place(self, processes: int, name: str = "") -> str:
        """Return the address of a coordinator for jobs of that size; jobs at once need names."""
        if (processes, name) not in self._places:
            command = [sys.executable, "-m", "shoal.runtime.server.coordinator"]
            server = subprocess.Popen(
                [*command, "--processes", str(processes), "--until-stdin-closes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**self._env, "SHOAL_TOKEN": TOKEN},
            )
            address = json.loads(server.stdout.readline())["address"]
            self._places[processes, name] = server, address
        return self._places[processes, name][1]

    def start(
        self, processes: int, work: str, *arguments: Any, faults: str = "", name: str = ""
    ) -> list[Child]:
        """Fork a job: every process calls `work(client, *arguments)` of this file."""
        address = self.place(processes, name)
        started = []
        for process in range(processes):
            out = self._folder / f"out-{len(self._children)}"
            order = {
                "join": {"address": address, "process": process, "num_processes": processes},
                "faults": faults,
                "work": work,
                "arguments": arguments,
                "out": str(out),
            }
            self._source.stdin.write(json.dumps(order) + "\n")
            self._source.stdin.flush()
            started.append(Child(int(self._source.stdout.readline()), out))
            self._children.append(started[-1])
        return started

    def run(
        self, processes: int, work: str, *arguments: Any, faults: str = "", name: str = ""
    ) -> list[Outcome]:
        """Fork a job and wait for its end."""
        job = self.start(processes, work, *arguments, faults=faults, name=name)
        return [child.wait() for child in job]

    def close(self) -> None:
        for child in self._children:
            child.close()
        for server, _ in [*self._places.values(), (self._source, "")]:
            server.stdin.close()
            server.wait(DEADLINE_S)
            server.stdout.close()


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _stack(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text()
    return "an unknown place"


def tree_of(seed: int, process: int | None = None) -> dict[str, Any]:
    """What jobs save: a large array that is cut, small ones, values, a value of each process."""
    import numpy as np

    from shoal.checkpoint.tree.flatten import PerProcess

    large = np.arange(seed, seed + (3 << 18), dtype=np.int32).reshape(3, 512, 512)
    tree: dict[str, Any] = {"large": large, "seed": seed, "name": "é"}
    tree |= {f"small{i}": np.full((i, 3), seed + i, np.float32) for i in range(5)}
    if process is not None:
        tree["own"] = PerProcess({"process": process, "seed": seed})
    return tree


def save_step(client: Any, path: str, step: int, seed: int, timeout_s: float) -> None:
    """Save one step."""
    from shoal.checkpoint.saving.save import save

    tree = tree_of(seed, client.process)
    save.on(client, path, tree, step=step, name="a step", timeout_s=timeout_s)


def save_behind(client: Any, path: str, step: int, seed: int, timeout_s: float) -> None:
    """Save one step in a thread."""
    from shoal.checkpoint.blocks.memory import Arena
    from shoal.checkpoint.saving.background import start_save
    from shoal.checkpoint.saving.save import save_request

    tree = tree_of(seed, client.process)
    request = save_request(path, step=step, name="a step", timeout_s=timeout_s)
    with client.call("save", "main"):
        saving = start_save(client, request, tree, arena=Arena())
    tree["large"][:] = -1
    saving.wait()


def save_many(client: Any, beside: str, first: int, end: int) -> None:
    """Save steps one after the other, those before too if they are complete but not committed.

    `beside`: the path of another step.
    """
    from shoal.checkpoint.at import store_at

    for step in range(first, end):
        path = f"{beside.rpartition('/')[0]}/{step}"
        if client.process == 0:
            store = store_at(path, "")
            store.recover()
            store.collect_garbage(idle_s=0)
        save_step(client, path, step, step, 30.0)


# What changes or reads files and directories, and what asks a bucket.
CALLS = (
    "open", "close", "link", "replace", "unlink", "fsync", "pwrite", "ftruncate", "mkdir", "rmdir",
    "listdir", "read", "stat", "preadv",
)  # fmt: skip
REQUESTS = (
    "listed", "listed_below", "info", "read", "read_at", "put", "put_new", "put_over", "upload",
    "remove",
)  # fmt: skip


def overwrite(
    client: Any, path: str, seed: int, timeout_s: float, victim: int = 0, dies_at: int = 0
) -> None:
    """Overwrite a checkpoint; `victim` is killed before its call of that number, from 1."""
    import shoal.checkpoint.bucket.transport as transport
    from shoal.checkpoint.saving.save import save

    tree = tree_of(seed, client.process)
    is_bucket = "://" in path
    if not is_bucket:
        os.environ["SHOAL_SAVE_LEASE_S"] = "0.01"  # what is left of the save before is stale
    if client.process == victim:
        owner, names = (transport.ObstoreObjects, REQUESTS) if is_bucket else (os, CALLS)
        _kill_at(owner, names, dies_at)
    save.on(client, path, tree, overwrite=True, name="a step", timeout_s=timeout_s)


def _kill_at(owner: Any, names: Sequence[str], number: int) -> None:
    """Kill this process before a call of any of these functions."""
    calls = itertools.count(1)

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in names:
        setattr(owner, name, counted(getattr(owner, name)))


def _child(order: Mapping[str, Any]) -> None:
    from shoal.runtime.client.over_tcp import join

    os.environ["SHOAL_FAULTS"] = order["faults"]
    said: dict[str, Any] = {"error": None}
    client = join(**order["join"], token=TOKEN, timeout_s=30.0)
    # Which process this is, for points of code that knows no coordinator.
    os.environ["SHOAL_PROCESS_ID"] = str(order["join"]["process"])
    try:
        globals()[order["work"]](client, *order["arguments"])
    except BaseException as error:  # noqa: BLE001 - told
        facts = {key: value for key, value in vars(error).items() if _is_plain(value)}
        said = {**facts, "error": type(error).__name__, "message": str(error)}
    client.close()
    out = Path(order["out"])
    out.with_suffix(".new").write_text(json.dumps(said))
    out.with_suffix(".new").rename(out)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | tuple)


def main(lines: Sequence[str]) -> None:
    """Fork a child for each order."""
    import shoal.checkpoint.saving.background
    import shoal.runtime.client.over_tcp  # noqa: F401

    for line in lines:
        order = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        sys.stdin.close()
        code = 1
        try:
            _child(order)
            code = 0
        finally:
            os._exit(code)


if __name__ == "__main__":
    main(sys.stdin)  # type: ignore[arg-type]
