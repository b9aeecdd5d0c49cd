"""A cluster of N local processes with M virtual devices each, for tests that break things.

A `Cluster` runs a function or a script in every process and collects the results, outputs and exit
codes. It can kill, freeze, pause and disconnect any of them. Everything has a deadline, whose error
shows the last output of each process, and nothing outlives the cluster: not when the test fails,
nor when it is killed itself (see `warden`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from shoal.arguments import as_integer, seconds
from shoal.errors import DeadlineError, PeerFailedError, UsageError, raise_all
from shoal.runtime.system import fault_points
from shoal.runtime.system.child_process import own_environment
from shoal.testing.bench_programs import program_of
from shoal.testing.ended import Ended, ended_of, raise_first
from shoal.testing.launching import SERVICES, WAYS, BenchJob
from shoal.testing.running import Pause, Pump, Running
from shoal.testing.warding import Warden

__all__ = ["Cluster"]

_START_METHODS = ("spawn", "fork")
_TAIL_LINES = 12


class Cluster:
    """Processes of one job on this machine, for tests. A context manager.

    >>> import operator
    >>> with Cluster(2) as cluster:
    ...     cluster.run("operator:add", 20, 3, initialize=False)
    [23, 23]
    """

    def __init__(
        self,
        processes: int,
        *,
        devices: int | None = 1,
        services: str = "process 0",
        network: bool = False,
        faults: str = "",
        env: Mapping[str, str] | None = None,
        start_method: str = "spawn",
        deadline_s: float = 60.0,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
          processes: number of processes.
          devices: virtual CPU devices of each; None: the devices present.
          services: how the coordinator and JAX's service run: "process 0" starts them as without
            any launcher, "stand-alone" before the job, or "launcher", `shoal run`.
          network: each process (and stand-alone services) gets a host name, an address and a cable
            of its own, so that `cut` and `mend` work; see `shoal.testing.network`.
          faults: faults at named points, see `shoal.runtime.system.fault_points`.
          env: the environment of the processes, except the job's own variables; None: inherited.
          start_method: "spawn" starts each process as a program of its own; "fork" forks those that
            run a function from one that has imported JAX: sooner, for a fraction of the
            computing. But forks share the seed of Python's hashes: a `set` of texts that has
            another order in each process of a real job has the same order in all of them. Only
            Linux can fork once JAX is imported; elsewhere, and under a launcher, both mean "spawn".
          deadline_s: of all waits, in seconds from the start of the processes.

        Raises:
          UsageError: arguments are wrong; names all problems.
        """
        problems = _problems(processes, devices, services, network, deadline_s)
        if start_method not in _START_METHODS:
            problems.append(f"start_method={start_method!r} is neither 'spawn' nor 'fork'")
        raise_all("Cluster", problems)
        self.processes, self.devices, self.services = processes, devices, services
        self.deadline_s = deadline_s
        self.folder = tempfile.mkdtemp(prefix="shoal-bench-")
        self._pauses_at = os.path.join(self.folder, "pauses")
        try:
            given = own_environment() if env is None else dict(env)
            if faults:
                given[fault_points.VARIABLE] = self._checked_faults(faults)
            self._warden = Warden(processes + SERVICES if network else 0)
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        self._pump = Pump(self._pauses_at)
        self._job = BenchJob(
            processes, devices, services, self.folder, given, self._warden,
            forks=start_method == "fork" and sys.platform == "linux",
        )  # fmt: skip
        self._began = time.monotonic()
        self._running: dict[int, Running] = {}
        self._others: list[Running] = []
        self._has_values = False

    def _checked_faults(self, faults: str) -> str:
        entries = [entry.strip() for entry in faults.split(";")]
        text = "; ".join(f"{e}={self._pauses_at}" if e.endswith(":pause") else e for e in entries)
        fault_points.parse(text)
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Idempotent."""
        if not os.path.isdir(self.folder):
            return
        self._warden.close()
        for running in [*self._running.values(), *self._others]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.popen.pid, signal.SIGKILL)
            running.popen.wait()
            if running.popen.stdin is not None:
                running.popen.stdin.close()
        self._pump.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        program: Callable[..., object] | str | os.PathLike[str],
        *arguments: object,
        only: Iterable[int] | None = None,
        initialize: bool = True,
        **named: Any,
    ) -> None:
        """Start the program in all processes, or in those of `only`, without waiting.

        Args:
          program: a function at the top of a module, its name as `"module:function"`, or the path
            of a script. A function is imported again in each process.
          arguments: plain values (see `shoal.testing.values`); of a script, its command line.
          only: in these processes; the others can be started later.
          initialize: call `shoal.initialize()` before the function; a script does so itself.
          named: further arguments of the function.

        Raises:
          UsageError: it cannot run in another process, or the cluster is closed.
        """
        if not os.path.isdir(self.folder):
            raise UsageError("this cluster is closed: make another one")
        checked = program_of(program, arguments, named, folder=self.folder, initialize=initialize)
        self._has_values = checked.is_function
        chosen = tuple(range(self.processes) if only is None else only)
        wrong = [p for p in chosen if p not in range(self.processes)]
        if wrong:
            raise UsageError(f"there are processes 0..{self.processes - 1}, not {wrong}")
        busy = [p for p in chosen if p in self._running and self._running[p].code is None]
        if busy:
            raise UsageError(f"processes {busy} run already")
        if all(running.code is not None for running in self._running.values()):
            self._begin()
        for running, process in self._job.start(checked, chosen, only is None):
            self._pump.follow(running)
            if process is None:
                self._others.append(running)
            else:
                self._running[process] = running

    def _begin(self) -> None:
        """Begin a new job: another address, new services, the deadline from now."""
        self._began = time.monotonic()
        self._running.clear()
        services = self._job.renew()
        for running in services:
            self._others.append(running)
            self._pump.follow(running)
        if services:
            self._until(
                lambda: (
                    all(b"\n" in s.out for s in services)
                    or any(s.code is not None for s in services)
                ),
                "the services listen",
            )
            self._job.note_services(services)

    def run(
        self,
        program: Callable[..., object] | str | os.PathLike[str],
        *arguments: object,
        initialize: bool = True,
        **named: Any,
    ) -> list[Any]:
        """Run the program in all processes until all have succeeded; see `start`.

        Returns:
          The function's result in each process; for a script, an `Ended` for each.

        Raises:
          PeerFailedError: a process failed; `failed` has the traceback of each.
          DeadlineError: not all ended in time; `last_words` has the last output of each.
        """
        self.start(program, *arguments, initialize=initialize, **named)
        ended = self.wait()
        raise_first(ended)
        return [process.value for process in ended] if self._has_values else list(ended)

    def wait(self, *, only: Iterable[int] | None = None) -> list[Ended]:
        """Wait until processes have ended, successfully or not; return how, in order.

        Raises:
          DeadlineError: not in time.
        """
        if self.services == "launcher":
            launcher = self._others[-1]
            self._until(lambda: launcher.code is not None, "the launcher ends")
            return [ended_of(launcher, p, self.folder, log=True) for p in range(self.processes)]
        chosen = sorted(self._running if only is None else only)
        missing = [p for p in chosen if p not in self._running]
        if missing:
            raise UsageError(f"processes {missing} were never started")
        rows = [self._running[p] for p in chosen]
        self._until(lambda: all(row.code is not None for row in rows), f"processes {chosen} end")
        return [ended_of(row, p, self.folder) for p, row in zip(chosen, rows, strict=True)]

    def wait_for(self, words: str, process: int | str) -> str:
        """Wait until a process prints `words`; return the line, of stdout or stderr.

        Under a launcher, all output comes from "the launcher".

        Raises:
          PeerFailedError: it ended first.
          DeadlineError: it did not in time.
        """
        running = self._of(process)

        def line() -> str | None:
            return next((text for text in self.lines_of(process) if words in text), None)

        self._until(
            lambda: line() is not None or running.code is not None, f"{running.name} says {words!r}"
        )
        text = line()
        if text is None:
            output = running.tail(_TAIL_LINES)
            failed = {process: output} if isinstance(process, int) else {}
            raise PeerFailedError(f"it never printed {words!r}: {output}", failed=failed)
        return text

    def lines_of(self, process: int | str) -> list[str]:
        """Return the output lines of a process (or "the launcher") so far, stdout first."""
        running = self._of(process)
        streams = [stream.decode(errors="replace") for stream in (running.out, running.err)]
        return [line for text in streams for line in text.split("\n")[:-1]]

    def wait_for_pause(self, point: str, process: int | None = None) -> int | None:
        """Wait until a process is held by the fault `POINT:pause`; return its number."""
        where = "a process" if process is None else f"process {process}"
        self._until(lambda: bool(self._held(point, process)), f"{where} pauses at {point!r}")
        return self._held(point, process)[0].process

    def release(self, point: str, process: int | None = None) -> None:
        """Resume the processes paused at a point, or one of them."""
        with self._pump.changed:
            for pause in self._held(point, process):
                with contextlib.suppress(OSError):  # it died meanwhile
                    pause.connection.send(b".")
                pause.connection.close()
                self._pump.pauses.remove(pause)

    def _held(self, point: str, process: int | None) -> list[Pause]:
        here = [pause for pause in self._pump.pauses if pause.point == point]
        return [pause for pause in here if process in (None, pause.process)]

    def kill(self, who: int | str) -> None:
        """Send SIGKILL to a process, or to "the coordinator" or "JAX's service"."""
        self._send(who, signal.SIGKILL)

    def stop(self, who: int | str) -> None:
        """Freeze it with SIGSTOP. On Linux, returns once it is stopped."""
        self._send(who, signal.SIGSTOP)
        self._job.until_frozen(self.pid(who))

    def cont(self, who: int | str) -> None:
        """Resume a frozen process with SIGCONT."""
        self._send(who, signal.SIGCONT)

    def terminate(self, who: int | str) -> None:
        """Send SIGTERM."""
        self._send(who, signal.SIGTERM)

    def interrupt(self, who: int | str) -> None:
        """Send SIGINT, like Ctrl-C."""
        self._send(who, signal.SIGINT)

    def _send(self, who: int | str, number: signal.Signals) -> None:
        pid = self.pid(who)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def pid(self, who: int | str) -> int:
        """Return the process id of a process of the job, or of one of its services.

        Raises:
          UsageError: no such process is running.
        """
        if isinstance(who, int) and self.services != "launcher":
            return self._of(who).popen.pid
        return self._job.find(who)

    def pids(self, words: str = "") -> list[int]:
        """Return the living processes of this cluster with `words` in the command line. (Linux.)"""
        return self._job.everyone(words)

    def cut(self, who: int | str) -> None:
        """Silently disconnect a process, or a stand-alone service, from all others."""
        self._warden.order("cut", self._job.place_of(who))

    def mend(self, who: int | str) -> None:
        """Undo `cut`."""
        self._warden.order("mend", self._job.place_of(who))

    def _of(self, process: int | str) -> Running:
        if process == "the launcher" and self.services == "launcher" and self._others:
            return self._others[-1]
        if not isinstance(process, int) or process not in self._running:
            raise UsageError(f"process {process} was not started; there are {[*self._running]}")
        return self._running[process]

    def _until(self, is_so: Callable[[], bool], condition: str) -> None:
        limit = self._began + self.deadline_s
        with self._pump.changed:
            if self._pump.changed.wait_for(is_so, max(0.0, limit - time.monotonic())):
                return
            rows = {p: running.tail(_TAIL_LINES) for p, running in self._running.items()}
            others = [running.tail(_TAIL_LINES) for running in self._others]
        output = "\n".join([*rows.values(), *others])
        raise DeadlineError(
            f"the test bench waited {self.deadline_s:g} s until {condition}\n{output}",
            name=condition,
            waited_s=self.deadline_s,
            missing=[p for p, running in self._running.items() if running.code is None],
            last_words=rows,
        )


def _problems(
    processes: object, devices: object, services: str, network: bool, deadline_s: float
) -> list[str]:
    """Return what is wrong with the arguments of a cluster."""
    problems = []
    if (as_integer(processes) or 0) < 1:
        problems.append(f"processes={processes!r} must be a whole number, at least 1")
    if devices is not None and (as_integer(devices) or 0) < 1:
        problems.append(f"devices={devices!r} must be a whole number, at least 1, or None")
    if services not in WAYS:
        problems.append(f"services={services!r} is not one of {', '.join(map(repr, WAYS))}")
    if network and services == "launcher":
        problems.append("shoal run starts all processes on one host: there is no network to cut")
    seconds("deadline_s", deadline_s, problems)
    return problems
