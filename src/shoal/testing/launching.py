"""Start the processes of a bench, in each of the ways in which jobs are started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, cast

from shoal.errors import UsageError, nearest
from shoal.runtime.system.local_devices import chosen_devices, cpu_threads, without_devices
from shoal.runtime.system.process_status import status_of
from shoal.runtime.system.service_commands import (
    COORDINATOR,
    JAX_SERVICE,
    introduction,
    service_arguments,
)
from shoal.runtime.wire.frames import address_text
from shoal.testing import enter
from shoal.testing.bench_programs import Program
from shoal.testing.forked import ForkOrder, fork_all
from shoal.testing.network import address_of
from shoal.testing.running import Running
from shoal.testing.warden import MARK, environment_of, marked
from shoal.testing.warding import Warden

__all__ = ["SERVICES", "WAYS", "BenchJob"]

WAYS = ("process 0", "stand-alone", "launcher")
_SERVICES: Mapping[str, tuple[str, ...]] = {  # name: what their command lines contain
    "the coordinator": (COORDINATOR,),
    "JAX's service": ("shoal.runtime.startup.services", JAX_SERVICE),
}
SERVICES = len(_SERVICES)
_PORT = 7171  # in a separate network every port is free
_IDLE_S = 60.0


class BenchJob:
    """Starts the processes of a bench, and finds them again."""

    def __init__(
        self,
        processes: int,
        devices: int | None,
        services: str,
        folder: str,
        env: dict[str, str],
        warden: Warden,
        *,
        forks: bool,
    ) -> None:
        """`forks`: start functions as forks of one process, see `fork_server`."""
        self._processes, self._devices, self._way = processes, devices, services
        self._forks = forks
        self._folder, self._warden = folder, warden
        self._env = env | {MARK: warden.mark, "SHOAL_TOKEN": secrets.token_hex(16)}
        self._env |= {"PYTHONUNBUFFERED": "1"}
        self._jobs = 0  # started so far
        self._address = self._jax_service = ""
        self._leash: IO[bytes] = io.BytesIO()  # of stand-alone services

    def renew(self) -> list[Running]:
        """Choose the next job's address; start its services if they are stand-alone."""
        for process in range(self._processes):
            Path(self._folder, f"result{process}.json").unlink(missing_ok=True)
        self._jobs += 1
        place = self._processes if self._way == "stand-alone" else 0
        if self._warden.namespaces:
            host, port = address_of(place), _PORT + self._jobs
        else:
            host, port = _quiet_address()
        self._address, self._jax_service = address_text(host, port), ""
        if self._way != "stand-alone":
            return []
        if self._warden.namespaces:
            return self._start_services_apart(host, port)
        arguments = service_arguments(self._processes, host, port, job=self._address)
        idle = ("--idle-s", str(_IDLE_S))
        command = ["-P", "-m", "shoal.runtime.startup.services", *arguments, *idle]
        popen = self._popen(command, self._env, stdin=subprocess.PIPE)
        self._leash = cast("IO[bytes]", popen.stdin)
        return [Running("services", popen)]

    def _start_services_apart(self, host: str, port: int) -> list[Running]:
        """Start each service on a host of its own."""
        reads, writes = os.pipe()
        index = self._processes
        of_coordinator = service_arguments(self._processes, host, port, job=self._address)
        of_jax_service = service_arguments(
            self._processes, address_of(index + 1), port, job=self._address
        )
        idle = ("--until-empty", "--idle-s", str(_IDLE_S))
        coordinator = ["-P", "-m", COORDINATOR, *of_coordinator, *idle]
        jax_service = ["-P", "-m", JAX_SERVICE, *of_jax_service, "--until-stdin-closes"]
        rows = [
            Running(
                "the coordinator", self._popen(coordinator, self._env, index, pass_fds=[writes])
            ),
            Running("JAX's service", self._popen(jax_service, self._env, index + 1, stdin=reads)),
        ]
        os.close(reads)
        self._leash = open(writes, "wb", buffering=0)  # noqa: SIM115 - `note_services` closes it
        return rows

    def note_services(self, services: list[Running]) -> None:
        """Record where the services listen; from here on they end after the job's last member."""
        for running in services:
            if running.code is not None:
                raise UsageError(f"the services did not start: {running.tail(5)}")
        addresses: dict[str, str] = json.loads(services[-1].out.partition(b"\n")[0])
        self._jax_service = addresses.get("jax_service") or addresses["address"]
        order = b".\n" if len(services) == 1 else introduction(self._address)
        with contextlib.suppress(BrokenPipeError), self._leash:
            self._leash.write(order)

    def start(
        self, program: Program, chosen: Collection[int], all_processes: bool
    ) -> list[tuple[Running, int | None]]:
        """Start the program in processes; None stands for a launcher, which starts them itself."""
        command = program.command(Path(self._folder, f"spec{secrets.token_hex(4)}.json"))
        if self._way == "launcher":
            if not all_processes:
                raise UsageError("shoal run starts all processes, not some of them")
            return [(self._launcher(command), None)]
        if self._forks and program.is_function:
            return self._forked(command, chosen)
        rows: list[tuple[Running, int | None]] = []
        for process in chosen:
            own = [*command, str(process)] if program.is_function else command
            safe = ["-P", *own] if program.is_function else own
            popen = self._popen(safe, self._environment(process), process)
            rows.append((Running(f"process {process}", popen), process))
        return rows

    def _forked(
        self, command: list[str], chosen: Collection[int]
    ) -> list[tuple[Running, int | None]]:
        """Start a function in forks of one process that has imported JAX."""
        spaces = self._warden.namespaces or [[]] * self._processes
        starts = [
            ForkOrder([command[-1], str(p)], self._environment(p), spaces[p]) for p in chosen
        ]  # fmt: skip
        return [
            (Running(f"process {process}", forked), process)
            for process, forked in zip(chosen, fork_all(starts), strict=True)
        ]

    def _launcher(self, command: list[str]) -> Running:
        devices = [] if self._devices is None else ["--devices", str(self._devices)]
        logs = ["--log-dir", os.path.join(self._folder, "logs"), "--no-prefix"]
        run = ["-P", "-m", "shoal", "run", "-n", str(self._processes), *devices, *logs]
        return Running("shoal run", self._popen([*run, *command], self._env))

    def _environment(self, process: int) -> dict[str, str]:
        env = self._env | {
            "SHOAL_COORDINATOR": self._address,
            "SHOAL_NUM_PROCESSES": str(self._processes),
            "SHOAL_PROCESS_ID": str(process),
        }
        env.pop("SHOAL_JAX_SERVICE", None)
        if self._jax_service:
            env["SHOAL_JAX_SERVICE"] = self._jax_service
        if self._devices is not None:
            env |= {
                "SHOAL_VIRTUAL_DEVICES": str(self._devices),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(self._devices),
                "XLA_FLAGS": without_devices(env.get("XLA_FLAGS", "")),
            }
        return env | cpu_threads(chosen_devices(env), self._env)

    def _popen(
        self,
        command: list[str],
        env: dict[str, str],
        place: int | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Collection[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start Python, in its namespaces if any, in its own session."""
        inside = []
        if place is not None and self._warden.namespaces:
            paths = self._warden.namespaces[place]
            inside = [sys.executable, "-I", "-S", enter.__file__, *paths]
        return subprocess.Popen(
            [*inside, sys.executable, *command],
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
        )

    def everyone(self, words: str = "") -> list[int]:
        """Return all living processes of the bench whose command line contains `words`."""
        return [pid for pid in marked(self._warden.mark) if words in _command_line(pid)]

    def find(self, who: int | str) -> int:
        """Return the pid of a service, or of a process started by a launcher."""
        if isinstance(who, int):
            index = str(who).encode()
            pids = [
                pid for pid in self.everyone()
                if environment_of(pid).get(b"SHOAL_PROCESS_ID") == index
            ]  # fmt: skip
            statuses = {pid: status_of(pid) for pid in pids}
            candidates = [
                pid
                for pid, status in statuses.items()
                if status is None or status.parent not in pids
            ]
        elif who not in _SERVICES:
            known = ", ".join(map(repr, _SERVICES))
            raise UsageError(
                f"there is no process {who!r}; known are {known}{nearest(who, _SERVICES)}"
            )
        else:
            candidates = [pid for text in _SERVICES[who] for pid in self.everyone(text)]
        if not candidates:
            what = who if isinstance(who, str) else f"process {who}"
            raise UsageError(f"{what} does not run")
        return candidates[0]

    def until_frozen(self, pid: int) -> None:
        """Wait until a process that was sent SIGSTOP has stopped, or is gone."""
        while (status := status_of(pid)) and not (status.is_stopped or status.has_ended):
            time.sleep(0.001)

    def place_of(self, who: int | str) -> int:
        """Return the number of the network namespace of a process or of a stand-alone service."""
        if isinstance(who, int) and 0 <= who < self._processes:
            return who
        if who in _SERVICES and self._way == "stand-alone":
            return self._processes + list(_SERVICES).index(str(who))
        raise UsageError(
            f"{who!r} has no network link of its own: processes 0..{self._processes - 1} have, and "
            f"{' and '.join(map(repr, _SERVICES))} where they are stand-alone"
        )


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _quiet_address() -> tuple[str, int]:
    """Return a loopback address with a free port.

    On Linux all of 127/8 is loopback: with a separate address, no other test and no
    outgoing connection takes the port before the services do.
    """
    host = "127.0.0.1"
    if sys.platform == "linux":
        host = ".".join(["127", *(str(1 + byte % 254) for byte in os.urandom(3))])
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, int(probe.getsockname()[1])
