"""Client of a fork server: see `fork_server`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple, cast

__all__ = ["ForkOrder", "Forked", "fork_all"]


class ForkOrder(NamedTuple):
    """The settings with which one process of a cluster runs `shoal.testing.child`."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    namespaces: Sequence[str] = ()  # paths of its network and its host name namespace


class Forked:
    """A process started by a fork server: the part of `Popen` that a bench needs."""

    stdin = None

    def __init__(self, server: _Server, index: int, stdout: int, stderr: int) -> None:
        self._server, self._index = server, index
        self.stdout: IO[bytes] = open(stdout, "rb", buffering=0)  # noqa: SIM115 - the pump closes
        self.stderr: IO[bytes] = open(stderr, "rb", buffering=0)  # noqa: SIM115
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; waits for the fork; the server's if it never happened."""
        return self._server.pid_of(self._index)

    def wait(self) -> int:
        """Wait until it has ended; return its exit code like `Popen`."""
        self.returncode = self._server.code_of(self._index)
        return self.returncode


class _Server:
    """A running fork server; one thread reads its output."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._is_over = False
        threading.Thread(target=self._read, name="shoal fork server", daemon=True).start()

    def _read(self) -> None:
        with cast("IO[bytes]", self._popen.stdout) as lines:
            for line in lines:
                index, *words = line.split()
                rows = self._codes if words[0] == b"code" else self._pids
                with self._changed:
                    rows[int(index)] = int(words[-1])
                    self._changed.notify_all()
        self._popen.wait()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def pid_of(self, index: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: index in self._pids or self._is_over)
            return self._pids.get(index, self._popen.pid)

    def code_of(self, index: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: index in self._codes or self._is_over)
            # A server ends before its processes only if killed or unable to start.
            return self._codes.get(index, self._popen.returncode or -signal.SIGKILL)


def fork_all(starts: Sequence[ForkOrder]) -> list[Forked]:
    """Start one fork server, and through it a process for each of `starts`."""
    pipes = [(os.pipe(), os.pipe()) for _ in starts]
    ends = [end for (_, out), (_, err) in pipes for end in (out, err)]
    try:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "shoal.testing.fork_server"],
            env=dict(starts[0].env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=pipes[0][1][1],  # if it cannot start, the first process reports why
            start_new_session=True,
            pass_fds=ends,
        )
    finally:
        for end in ends:
            os.close(end)
    entries = [
        {**start._asdict(), "out": out, "err": err}
        for start, ((_, out), (_, err)) in zip(starts, pipes, strict=True)
    ]
    with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", popen.stdin) as orders:
        orders.write(json.dumps(entries).encode() + b"\n")
    server = _Server(popen)
    return [Forked(server, i, out, err) for i, ((out, _), (err, _)) in enumerate(pipes)]
