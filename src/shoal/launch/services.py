"""The two services of a job: shoal's coordinator and JAX's coordination service.

Each is a process of its own, so that no process of the job is special: if any of them dies, the
others still learn of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.launch.environment import job_name
from shoal.launch.loop import Loop
from shoal.launch.news import News
from shoal.launch.output import LineStream, Log
from shoal.runtime.system import process_status
from shoal.runtime.system.child_process import uninspected
from shoal.runtime.system.service_commands import (
    COORDINATOR,
    JAX_SERVICE,
    WAITS,
    introduction,
    service_arguments,
    token_line,
)
from shoal.runtime.wire.sockets import bind_host, moved

# (name in messages, module, …); each prints {"address": "host:port"} once it listens.
_SERVICES = (
    ("coordinator", COORDINATOR, "--print-leaving", "--print-news"),
    ("JAX service", JAX_SERVICE),
)


def late_words(within_s: float) -> str:
    """Return the words about services that do not listen in time."""
    return f"the coordinator or JAX's service did not start within {within_s:g} s"


class ServiceProcess:
    """One of the two services. It ends when its standard input is closed."""

    def __init__(
        self,
        name: str,
        popen: subprocess.Popen[bytes],
        log: Log,
        on_address: Callable[[], None],
        on_line: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.name, self.popen, self._on_address = name, popen, on_address
        self._on_line = on_line
        self.address = ""  # empty until it listens
        self.log = log
        self.errors = LineStream(None, log)
        self.stopped_since_s = math.inf
        self._said = b""

    def feed(self, data: bytes, _now_s: float) -> None:
        """Parse its output; the first line is its address."""
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                if self.address:
                    self._on_line(message)
                    continue
                self.address = str(message["address"])
            except (ValueError, KeyError, TypeError):
                self.errors.feed(b"not understood: " + line + b"\n", 0.0)
            else:
                self._on_address()

    def close(self) -> None:
        """Handle the end of its output."""

    def describe_end(self, code: int) -> str:
        """Describe its end, with its last output."""
        tail = self.log.tail.decode(errors="replace").strip()
        tail = tail.replace("\n", "\n    ")
        return f"the {self.name} ended, code {code}" + (f": {tail}" if tail else "")


class EarlyServices:
    """The services of the next attempt, started at the first failure of this one.

    Once nothing of this attempt is left, Python has started and imported in them. They listen then.
    """

    def __init__(self) -> None:
        self._popens: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}  # by their commands

    @property
    def pids(self) -> set[int]:
        """Their process ids."""
        return {popen.pid for popen in self._popens.values()}

    def start(self, commands: Sequence[tuple[str, ...]], env: Mapping[str, str]) -> None:
        """Start them; without effect on those that are there."""
        env = {name: value for name, value in env.items() if name != "SHOAL_TOKEN"}
        for command in commands:
            if command not in self._popens:
                self._popens[command] = _popen([*command, WAITS], env)

    def take(self, command: tuple[str, ...], token: str) -> subprocess.Popen[bytes] | None:
        """Let one listen; return it, or None if it is not there, or has ended."""
        popen = self._popens.pop(command, None)
        if popen is None:
            return None
        if popen.poll() is not None:
            _close(popen)
            return None
        with contextlib.suppress(BrokenPipeError):  # it ends just now, which is handled elsewhere
            popen.stdin.write(token_line(token))  # type: ignore[union-attr] # a PIPE is never None
            popen.stdin.flush()  # type: ignore[union-attr]
        return popen

    def close(self) -> None:
        """End those that were not taken."""
        for popen in self._popens.values():
            _close(popen)
        self._popens.clear()


def _close(popen: subprocess.Popen[bytes]) -> None:
    for pipe in (popen.stdin, popen.stdout, popen.stderr):
        pipe.close()  # type: ignore[union-attr] # a PIPE is never None


def _popen(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=uninspected(env),
        start_new_session=True,
    )


class ServiceProcesses:
    """Both services, started at once."""

    def __init__(
        self,
        num_processes: int,
        env: Mapping[str, str],
        log_dir: str,
        loop: Loop,
        *,
        early: EarlyServices,
        host: str = "",
        first_port: int = 0,
        on_line: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        """Start them.

        Args:
          early: those that were started already, if they fit.
          host: by which other hosts reach this one; "": only this host does.
          first_port: of the coordinator; the next port is of JAX's service; 0: any free ports.
          on_line: called with each line of the coordinator, after `news` has taken it.
        """
        self._all: list[ServiceProcess] = []
        self._closed = False
        self._host, self._on_line = host, on_line
        self._env, self._commands = env, list[tuple[str, ...]]()
        self.news = News(num_processes)
        for index, (name, module, *more) in enumerate(_SERVICES):
            bind, port = bind_host(host) if host else "", first_port and first_port + index
            arguments = service_arguments(num_processes, bind, port, job=job_name())
            # -P: a file of the user's cannot shadow a module of shoal's.
            python = (sys.executable, "-P", "-m", module)
            command = (*python, *arguments, *more, "--until-stdin-closes")
            self._commands.append(command)
            popen = early.take(command, env["SHOAL_TOKEN"]) or _popen(command, env)
            log = Log(os.path.join(log_dir, f"{name.lower().replace(' ', '_')}.log"))
            service = ServiceProcess(name, popen, log, self._introduce, self._receive)
            self._all.append(service)
            # Even while the processes wait for a slow reader: it must never block.
            loop.listen(
                popen.stdout,  # type: ignore[arg-type] # a PIPE is never None
                service.feed,
                service.close,
                always=True,
            )
            loop.listen_to(popen.stderr, service.errors)  # type: ignore[arg-type]
        early.close()

    def start_next(self, early: EarlyServices) -> None:
        """Start those of the next attempt, which wait until they are taken."""
        with contextlib.suppress(OSError):  # then they are started when they are needed
            early.start(self._commands, self._env)

    def _receive(self, line: Mapping[str, Any]) -> None:
        self.news.receive(line)
        self._on_line(line)

    def _introduce(self) -> None:
        """Once both listen, connect JAX's service to the coordinator, which monitors it."""
        addresses = self.addresses
        if addresses and not self._closed:
            stdin = self._all[1].popen.stdin
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is handled elsewhere
                # A PIPE is never None.
                stdin.write(introduction(addresses[0]))  # type: ignore[union-attr]
                stdin.flush()  # type: ignore[union-attr]

    @property
    def addresses(self) -> list[str]:
        """Their addresses, the coordinator's first; empty until both listen."""
        known = [service.address for service in self._all]
        if not all(known):
            return []
        return [moved(address, self._host) for address in known] if self._host else known

    @property
    def pids(self) -> set[int]:
        """Their process ids."""
        return set(self.named_pids.values())

    @property
    def named_pids(self) -> dict[str, int]:
        """The process id of each, by name."""
        return {service.name: service.popen.pid for service in self._all}

    @property
    def logs(self) -> list[Log]:
        """The log of each."""
        return [service.log for service in self._all]

    def stopped_words(self, now_s: float, limit_s: float) -> str:
        """Return a message if one of them has been stopped (SIGSTOP) for this long."""
        for service in self._all:
            is_stopped = service.popen.returncode is None and process_status.is_stopped(
                service.popen.pid
            )
            since_s = min(service.stopped_since_s, now_s) if is_stopped else math.inf
            service.stopped_since_s = since_s
            if now_s - since_s >= limit_s:
                return f"the {service.name} is stopped (SIGSTOP?), for {limit_s:g} s"
        return ""

    def note_end(self, pid: int, code: int) -> str:
        """Note the end of `pid`; return a message if it is a service that was not closed."""
        for service in self._all:
            if service.popen.pid == pid:
                service.popen.returncode = code
                return "" if self._closed else service.describe_end(code)
        return ""

    def close(self) -> None:
        """End both."""
        self._closed = True
        for service in self._all:
            with contextlib.suppress(BrokenPipeError):
                service.popen.stdin.close()  # type: ignore[union-attr]
