"""`shoal coordinator`: run the two services of a job separately, so that no process is special."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Annotated, NamedTuple

import typer

from shoal import settings
from shoal.errors import InitializeError, ProcessLostError, UsageError, raise_all
from shoal.runtime.startup.rendezvous import own_host
from shoal.runtime.system.child_process import Spawned
from shoal.runtime.system.own_name import why_unresolved
from shoal.runtime.system.service_commands import (
    COORDINATOR,
    JAX_SERVICE,
    ignored_sigint_line,
    introduction,
    not_ignored,
    service_arguments,
)
from shoal.runtime.wire.frames import address_text, split_address

_HELP = """\
Run the services of a job separately.

They are shoal's coordinator and JAX's service. By default, process 0 of the job starts both. Under
shoal run, the launcher does. Run this command on a host or in a pod that outlives the processes.
Any process can then die, and the others continue. It prints one line of JSON on stdout (addresses,
pids) and, on stderr, the variables for the processes.

\b
Examples:
  shoal coordinator -n 4                            on this host only
  shoal coordinator -n 64 --bind 0.0.0.0 --port 8476 --jax-port 8477
  shoal coordinator -n 4 --keep                     one job after another

\b
Start each process with the variables printed on stderr, and its rank:
  SHOAL_COORDINATOR=… SHOAL_JAX_SERVICE=… SHOAL_TOKEN=…
  SHOAL_NUM_PROCESSES=4 SHOAL_PROCESS_ID=0 python train.py

\b
The token is a secret: a process that has it can join the job, or end it. It
is read from SHOAL_TOKEN. If that is not set, a token is generated and
printed. Set the limits after which a process counts as lost for this command,
not for the processes: SHOAL_HEARTBEAT_S, SHOAL_LOST_AFTER_S,
SHOAL_SILENT_LOST_AFTER_S.

\b
The command exits when the job is over. Ctrl-C or SIGTERM ends it, and the job
with it. Signals that are ignored at the start stay ignored: SIGHUP after
nohup, SIGINT in a script that starts it with &.
Exit code:
  0      the job is over
  2      wrong usage
  71     the coordinator or JAX's service ended before the job
  74     they failed to start, for example because a port is taken
  128+n  ended by signal n
"""

_START_S = 60.0
_LINGER_MAX_S = 600.0
_END_S = 10.0
_ANYWHERE = ("0.0.0.0", "::")

_Processes = Annotated[
    str, typer.Option(*("-n", "--processes"), metavar="N", help="Number of processes of the job.")
]
_Bind = Annotated[
    str,
    typer.Option(metavar="HOST", help="Address to listen at; 0.0.0.0: all, for other hosts."),
]
_Port = Annotated[str, typer.Option(metavar="P", help="Port of the coordinator; 0: any.")]
_JaxPort = Annotated[str, typer.Option(metavar="P", help="Port of JAX's service; 0: any.")]
_Keep = Annotated[
    bool, typer.Option("--keep", help="Serve one job after another, at the same addresses.")
]


class _Signalled(Exception):
    """A signal was received."""


class _EndingSignals:
    """The signals that end the command. They are recorded and wake what waits: raised by a handler,
    an exception that hits a destructor would be lost, and the signal with it."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._first: int | None = None
        self.wakes, waker = os.pipe()  # readable once one was received
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._first = self._first or number

    def check(self) -> None:
        """Raise _Signalled if one was received."""
        if self._first is not None:
            raise _Signalled(self._first)


class _Request(NamedTuple):
    """The services to run."""

    processes: int
    bind: str
    port: int
    jax_port: int
    token: str
    is_token_ours: bool  # made here, and not known elsewhere yet


def coordinator(
    processes: _Processes,
    bind: _Bind = "127.0.0.1",
    port: _Port = "0",
    jax_port: _JaxPort = "0",
    keep: _Keep = False,
) -> None:
    """Run the services of a job separately: shoal's coordinator and JAX's service."""
    given = settings.text("SHOAL_TOKEN")
    request = _Request(
        *_checked(processes, bind, port, jax_port), given or secrets.token_hex(16), not given
    )
    signals = _EndingSignals(not_ignored([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
    line = ignored_sigint_line()
    if line:
        print(f"shoal coordinator: {line}", file=sys.stderr)
    try:
        while True:
            request = _serve(request, signals)
            if not keep:
                return
    except _Signalled as ended:
        raise typer.Exit(128 + int(ended.args[0])) from None


coordinator.__doc__ = _HELP


def _checked(processes: str, bind: str, port: str, jax_port: str) -> tuple[int, str, int, int]:
    problems = []
    if not (processes.isascii() and processes.isdigit() and int(processes) >= 1):
        problems.append(f"-n {processes} must be a whole number, at least 1")
    for option, value in (("--port", port), ("--jax-port", jax_port)):
        if not (value.isascii() and value.isdigit() and int(value) <= 65535):
            problems.append(f"{option} {value} must be a port, 0 to 65535")
    if port == jax_port != "0":
        problems.append(f"--port {port} and --jax-port {jax_port} must differ")
    raise_all("coordinator", problems)
    return int(processes), bind, int(port), int(jax_port)


def _serve(request: _Request, signals: _EndingSignals) -> _Request:
    """Serve one job; return the request with the ports that were chosen for it."""
    signals.check()
    services = _Services(request)
    try:
        coordinator, jax_service = services.await_addresses(request)
        signals.check()
        _announce(request, coordinator, jax_service, services)
        services.await_end(signals)
    finally:
        services.close()
    port, jax_port = split_address(coordinator)[1], split_address(jax_service)[1]
    return request._replace(port=port, jax_port=jax_port)


class _Services:
    """Both services. They end when their standard input closes, so never outlive this process."""

    def __init__(self, request: _Request) -> None:
        env, job = {"SHOAL_TOKEN": request.token}, f"shoal-coordinator-{os.getpid()}"
        of_coordinator, of_jax_service = (
            (
                *service_arguments(request.processes, request.bind, port, job=job),
                "--until-stdin-closes",
            )
            for port in (request.port, request.jax_port)
        )
        until = ("--until-empty", "--idle-s", "inf")
        self.coordinator = Spawned(COORDINATOR, *of_coordinator, *until, env=env)
        self.jax_service = Spawned(JAX_SERVICE, *of_jax_service, env=env)

    def await_addresses(self, request: _Request) -> tuple[str, str]:
        """Return their addresses, as seen from other hosts; let one monitor the other."""
        addresses = []
        for name, port, spawned in (
            ("the coordinator", request.port, self.coordinator),
            ("JAX's service", request.jax_port, self.jax_service),
        ):
            line = spawned.first_line(_START_S)
            if not line:
                where, last_words = address_text(request.bind, port), spawned.last_words()
                raise InitializeError(f"coordinator: {name} cannot start at {where}: {last_words}")
            addresses.append(str(json.loads(line)["address"]))
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is handled elsewhere
            self.jax_service.stdin.write(introduction(addresses[0]))
        return _reachable(addresses[0]), _reachable(addresses[1])

    def await_end(self, signals: _EndingSignals) -> None:
        """Wait until the job is over.

        Raises:
          _Signalled: a signal ends the command.
          ProcessLostError: one of the services ended before.
        """
        ends = select.poll()
        ends.register(signals.wakes, select.POLLIN)
        for spawned in (self.coordinator, self.jax_service):
            ends.register(spawned.stdout, select.POLLIN)
        ended = {file for file, _ in ends.poll()}
        signals.check()
        if self.coordinator.stdout.fileno() in ended:
            code = self.coordinator.wait()
            if code:
                raise _lost("the coordinator", code, self.coordinator)
            return
        lost = _lost("JAX's service", self.jax_service.wait(), self.jax_service)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it notifies the processes
            self.coordinator.wait(min(settings.seconds("SHOAL_HANG_TIMEOUT_S"), _LINGER_MAX_S))
        raise lost

    def close(self) -> None:
        """End both: the coordinator first, because JAX's service is needed until then."""
        for spawned in (self.coordinator, self.jax_service):
            with contextlib.suppress(OSError):
                spawned.stdin.close()
            try:
                spawned.wait(_END_S)
            except subprocess.TimeoutExpired:
                spawned.kill()
                spawned.wait()
            spawned.stdout.close()
            spawned.detach()


def _lost(name: str, code: int, spawned: Spawned) -> ProcessLostError:
    last_words = spawned.last_words()
    return ProcessLostError(
        f"coordinator: {name} ended, code {code}" + (last_words and f": {last_words}")
    )


def _reachable(address: str) -> str:
    """Return the address by which other hosts reach it."""
    host, port = split_address(address)
    if host in _ANYWHERE:
        host = own_host() if why_unresolved() else socket.gethostname()
    return address_text(host, port)


def _announce(request: _Request, coordinator: str, jax_service: str, services: _Services) -> None:
    """Print the addresses: for programs on stdout, for people on stderr."""
    record = {
        "coordinator": coordinator,
        "jax_service": jax_service,
        "pids": {"coordinator": services.coordinator.pid, "jax_service": services.jax_service.pid},
    }
    variables = {"SHOAL_COORDINATOR": coordinator, "SHOAL_JAX_SERVICE": jax_service}
    if request.is_token_ours:
        record["token"] = variables["SHOAL_TOKEN"] = request.token
    try:
        print(json.dumps(record), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise UsageError("coordinator: its standard output has no reader") from None
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}", file=sys.stderr)
    last = request.processes - 1
    print(
        f"and for each process SHOAL_NUM_PROCESSES={request.processes} "
        f"and SHOAL_PROCESS_ID, 0 to {last}",
        file=sys.stderr,
        flush=True,
    )
