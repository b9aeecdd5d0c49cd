"""Client of the fork server: see `fork_server`."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from shoal.runtime.system.process_status import status_of
from shoal.testing.fork_server import DEVICES, MOST_FDS, NO_MARK
from shoal.testing.warden import MARK

__all__ = ["ForkOrder", "Forked", "fork_all"]

_MOST_SERVERS = 4  # kept at a time: each has imported JAX, about 200 MB that its forks share
_UNREAD = ("SHOAL_", "PYTEST_")  # variables that importing does not read
_LATER = ("PJRT_NPROC", DEVICES)  # and those that have the same effect in a fork


class ForkOrder(NamedTuple):
    """The settings with which one process of a cluster runs `shoal.testing.child`, or a script."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    namespaces: Sequence[str] = ()  # paths of its network and its host name namespace
    is_script: bool = False  # the first argument is the path of a program


class Forked:
    """A process started by a fork server: the part of `Popen` that a bench needs."""

    stdin = None

    def __init__(self, group: _Group, index: int, stdout: int, stderr: int) -> None:
        self._group, self._index = group, index
        self.stdout: IO[bytes] = open(stdout, "rb", buffering=0)  # noqa: SIM115 - the pump closes
        self.stderr: IO[bytes] = open(stderr, "rb", buffering=0)  # noqa: SIM115
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; waits for the fork. The group's if it never happened.

        Raises:
          ProcessLookupError: the fork server was killed before that.
        """
        return self._group.pid_of(self._index)

    def wait(self) -> int:
        """Wait until it has ended; return its exit code like `Popen`."""
        self.returncode = self._group.code_of(self._index)
        return self.returncode


class _Group:
    """The forks of one cluster; one thread reads what their parent reports."""

    def __init__(self, reports: int) -> None:
        self._changed = threading.Condition()
        self._pid: int | None = None
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._is_over = False
        arguments = (open(reports, "rb"),)  # noqa: SIM115 - the thread closes it
        threading.Thread(target=self._read, args=arguments, name="shoal forks", daemon=True).start()

    def _read(self, reports: IO[bytes]) -> None:
        with reports:
            for line in reports:
                self._note(*line.decode().split())
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _note(self, what: str, *tokens: str) -> None:
        with self._changed:
            if what == "group":
                self._pid = int(tokens[0])
            else:
                rows = self._codes if tokens[0] == "code" else self._pids
                rows[int(what)] = int(tokens[-1])
            self._changed.notify_all()

    def pid_of(self, index: int) -> int:
        with self._changed:
            known = (self._pids, self._codes)
            self._changed.wait_for(lambda: any(index in row for row in known) or self._is_over)
            pid = self._pids.get(index, self._pid)
        if pid is None:
            raise ProcessLookupError("the fork server ended before it forked")
        return pid

    def code_of(self, index: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: index in self._codes or self._is_over)
            return self._codes.get(index, -signal.SIGKILL)  # a killed group reports no code


class _Server:
    """A running fork server."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "shoal.testing.fork_server"],
                env={**env, MARK: NO_MARK},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def order(self, order: Mapping[str, object], fds: Sequence[int]) -> None:
        """Send an order, and the files that it names.

        Raises:
          OSError: the server has ended.
        """
        status = status_of(self._popen.pid)
        if status is not None and status.state in "ZX":  # a thread of it may still hold the socket
            raise BrokenPipeError("the fork server has ended")
        body = json.dumps({**order, "num_fds": len(fds)}).encode()
        with self._lock:
            self._orders.sendall(len(body).to_bytes(4, "big") + body)
            for first in range(0, len(fds), MOST_FDS):
                socket.send_fds(self._orders, [b"."], fds[first : first + MOST_FDS])

    def close(self) -> None:
        """Let it end after its last group."""
        self._orders.close()
        threading.Thread(target=self._popen.wait, daemon=True).start()


class _Servers:
    """The fork servers of this process, by their environment; the last used are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[frozenset[tuple[str, str]], _Server] = {}
        atexit.register(self._close)

    def order(
        self, env: Mapping[str, str], order: Mapping[str, object], fds: Sequence[int]
    ) -> None:
        """Have the server of an environment fork, or a new one if it was killed."""
        of_import = {
            name: value
            for name, value in env.items()
            if not name.startswith(_UNREAD) and name not in _LATER
        }
        key = frozenset(of_import.items())
        with self._lock:
            server = self._servers.pop(key, None)
            try:
                if server is None:
                    raise ConnectionError("none yet")
                server.order(order, fds)
            except OSError:
                if server is not None:
                    server.close()
                server = _Server(of_import)
                server.order(order, fds)
            self._servers[key] = server
            for oldest in list(self._servers)[:-_MOST_SERVERS]:
                self._servers.pop(oldest).close()

    def _close(self) -> None:
        for server in self._servers.values():
            server.close()


@functools.cache
def _servers_of(pid: int) -> _Servers:
    """Return the servers of a process: a fork of this one must not share its sockets."""
    del pid
    return _Servers()


def fork_all(starts: Sequence[ForkOrder]) -> list[Forked]:
    """Start a process for each of `starts`, which have one mark, as forks of one fork server."""
    folder = os.open(".", os.O_RDONLY)
    reports, writes = os.pipe()
    pipes = [(os.pipe(), os.pipe()) for _ in starts]
    ends = [end for (_, out), (_, err) in pipes for end in (out, err)]
    env = starts[0].env
    order = {
        "mark": env[MARK],
        "entries": [{**start._asdict(), "env": dict(start.env)} for start in starts],
    }
    try:
        _servers_of(os.getpid()).order(env, order, [folder, writes, *ends])
    finally:
        for end in (folder, writes, *ends):
            os.close(end)
    group = _Group(reports)
    return [Forked(group, i, out, err) for i, ((out, _), (err, _)) in enumerate(pipes)]
