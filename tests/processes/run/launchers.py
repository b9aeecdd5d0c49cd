"""The launchers of one job on several hosts, on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

from processes.clusters.pages import Started
from quiet_ports import quiet_row
from shoal.launch.order import NUM_PORTS
from shoal.testing import enter
from shoal.testing.network import address_of
from shoal.testing.warden import MARK, environment_of, marked
from shoal.testing.warding import Warden

HEAD = re.compile(r"shoal run: (?:failed|interrupted|preempted)\b")

_NODE = "LAUNCHER_OF_NODE"  # a variable that all processes of a launcher inherit


def on_host(warden: Warden, host: int) -> list[str]:
    """Return the command that runs another on one of the warden's hosts; here if it has none."""
    if not warden.namespaces:
        return []
    return [sys.executable, "-I", "-S", enter.__file__, *warden.namespaces[host]]


class Launchers:
    """Starts `shoal run --nnodes …` for each node: here, or each in a namespace of its own."""

    def __init__(self, folder: Path, env: dict[str, str], warden: Warden) -> None:
        self.folder, self._warden = folder, warden
        host, self.port = quiet_row(NUM_PORTS)
        self.host = address_of(0) if warden.namespaces else host
        self.env = {
            **env, MARK: warden.mark, "TMPDIR": str(folder), "COLUMNS": "200",
            "SHOAL_TOKEN": "a secret",
            "SHOAL_FAILURE_GRACE_S": "0.3", "SHOAL_GRACE_S": "5",
            "SHOAL_INITIALIZE_TIMEOUT_S": "60",
        }  # fmt: skip
        self._started: list[Started] = []

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(
        self,
        node: int,
        *options: str,
        nodes: int = 2,
        program: Iterable[str] = ("script.py",),
        before: Iterable[str] = (),
        **env: str,
    ) -> Started:
        """Start the launcher of a node."""
        run = [sys.executable, "-m", "shoal", "run", "--nnodes", str(nodes)]
        where = ["--node-rank", str(node), "--coordinator", self.address]
        command = [*on_host(self._warden, node), *before, *run, *where, *options, *program]
        env = {**self.env, _NODE: str(node), **env}
        self._started.append(Started(command, self.folder, env))
        return self._started[-1]

    def both(self, *options: str, script: str, **env: str) -> list[Started]:
        """Start both launchers of a job on two nodes."""
        self.write(script)
        return [self.start(node, *options, **env) for node in range(2)]

    def write(self, script: str, name: str = "script.py") -> None:
        (self.folder / name).write_text(textwrap.dedent(script))

    def pids(self, node: int | None = None) -> list[int]:
        """Return all living processes, of one node or of all."""
        wanted = None if node is None else str(node).encode()
        return [
            pid
            for pid in marked(self._warden.mark)
            if node is None or environment_of(pid).get(_NODE.encode()) == wanted
        ]

    def kill(self, node: int) -> None:
        """Kill every process of a node."""
        while pids := self.pids(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def leaves_nobody(self, within_s: float = 10.0) -> bool:
        """Return whether no process is left, at most after a while."""
        deadline_s = time.monotonic() + within_s
        while self.pids():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Kill what is left, and mend both cables."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for started in self._started:
            started.end()
        for place in range(len(self._warden.namespaces)):
            self._warden.order("mend", place)


def verdict(started: Started) -> str:
    """Return what a launcher says first of the last failure; else its last line."""
    return verdict_of(started.said)


def verdict_of(text: str) -> str:
    """Return the headline of the last report in a launcher's output; else the last line.

    Without the time of an end that was asked for.
    """
    lines = text.splitlines()
    heads = [line for line in lines if HEAD.match(line)]
    last = heads[-1] if heads else lines[-1]
    return re.sub(r"^(shoal run: (?:interrupted|preempted)) after [\d.]+ s", r"\1", last)


def codes(launchers: Iterable[Started]) -> list[int]:
    """Wait for the end of launchers; return their exit codes."""
    return [started.code() for started in launchers]


def said(launchers: Iterable[Started]) -> str:
    """Return the output of launchers, whole: pytest cuts what is no string."""
    return "\n\n".join(started.said for started in launchers)
