"""The child processes of one job: start them, signal them, record their end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from shoal.launch import child
from shoal.launch.loop import Loop
from shoal.launch.output import LineStream, Log, Outlet
from shoal.launch.report import Ending
from shoal.runtime.failures.facts import Memory
from shoal.runtime.failures.last_record import LastRecord, take, take_fault
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.process_status import is_stopped, shows_own_pids


class ChildProcess:
    """One process of the job, and its output."""

    def __init__(
        self,
        index: int,
        popen: subprocess.Popen[bytes],
        log: Log,
        record: str,
    ) -> None:
        self.index, self.popen, self.log = index, popen, log
        self._record_file = record
        self.peak_bytes = 0  # resident, once it has ended
        self.code: int | None = None
        self.ended_s = math.inf
        self.sent: tuple[signal.Signals, ...] = ()  # the signals sent to end it
        self.sent_s = math.inf  # the time of the first
        self.was_frozen = False  # when it was sent
        self.is_lost = False  # lost to the others while alive

    def ending(self) -> Ending:
        """Return how it ended; a process that cannot even be killed counts as killed.

        Removes the files that it has written for the launcher.
        """
        taken = take(self._record_file, self.popen.pid)
        return Ending(
            self.index,
            -signal.SIGKILL if self.code is None else self.code,
            self._failed_s(taken.last),
            self.sent,
            self.log.tail.decode(errors="replace"),
            self.log.path,
            self.was_frozen,
            is_lost=self.is_lost,
            sent_s=self.sent_s,
            record=taken.last,
            threads=taken.threads,
            memory=Memory(peak_bytes=self.peak_bytes or None),
            ended_s=self.ended_s,
            crashed_at=take_fault(self._record_file),
        )

    def _failed_s(self, record: LastRecord | None) -> float | None:
        """Return when it failed by itself, or None.

        That is when it recorded its exception: what it does between that and its end (waiting for
        threads, closing devices) may take longer than the failure takes to end the others.
        """
        raises = self.sent or (self.code or 0) > 0  # else a signal ended it, not the exception
        if raises and record is not None and record.at_s < min(self.ended_s, self.sent_s):
            return record.at_s
        return None if self.sent else self.ended_s


class Processes:
    """All processes of one job, each the leader of a session and group of its own."""

    def __init__(self) -> None:
        self.all: list[ChildProcess] = []
        self.first = 0  # the index of the first, in a job on several hosts

    @property
    def alive(self) -> list[ChildProcess]:
        """The processes that have not ended."""
        return [process for process in self.all if process.code is None]

    @property
    def failed(self) -> bool:
        """Whether any exit code was neither 0 nor 75 (preempted and saved)."""
        return any(process.code not in (None, 0, REQUEUE) for process in self.all)

    @property
    def logs(self) -> list[Log]:
        """The log of each."""
        return [process.log for process in self.all]

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        loop: Loop,
        shown: Sequence[tuple[Outlet | None, bytes]],
        log: Log,
        *,
        record: str,
        stdin: bool,
    ) -> None:
        """Start the next process.

        Args:
          command: `script, args…` or `-m, module, args…`.
          shown: for stdout and stderr: the outlet (None: not shown) and the prefix.
          record: the file in which it records how it failed.
          stdin: whether it reads the launcher's standard input; if not, /dev/null.
        """
        popen = subprocess.Popen(
            [sys.executable, child.__file__, *command],
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        words, errors = (LineStream(outlet, prefix, log) for outlet, prefix in shown)
        index = self.first + len(self.all)
        self.all.append(ChildProcess(index, popen, log, record))
        loop.listen_to(popen.stdout, words)  # type: ignore[arg-type] # a PIPE is never None
        loop.listen_to(popen.stderr, errors)  # type: ignore[arg-type]

    def note_end(self, pid: int, code: int, peak_bytes: int) -> bool:
        """Note the end of `pid`; return whether it is a process of the job."""
        for process in self.all:
            if process.popen.pid == pid and process.code is None:
                process.code = process.popen.returncode = code
                process.ended_s = time.monotonic()
                process.peak_bytes = peak_bytes
                return True
        return False

    def send(self, number: signal.Signals, *, groups: bool) -> None:
        """Send a signal to all living processes; with `groups` also to their grandchildren."""
        for process in self.alive:  # not reaped yet, so the pid cannot have been reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if groups else os.kill)(process.popen.pid, number)

    def end(self, number: signal.Signals, *, groups: bool) -> None:
        """Send a signal to end the processes, and record that it was sent."""
        for process in self.alive:
            process.was_frozen |= not process.sent and is_stopped(process.popen.pid)
            process.sent = (*process.sent, number)
            process.sent_s = min(process.sent_s, time.monotonic())
        self.send(number, groups=groups)
        if number != signal.SIGKILL:
            self.send(signal.SIGCONT, groups=True)  # a stopped process would not receive it

    def kill_groups(self) -> None:
        """Kill the process groups of ended processes, where descendants cannot be found."""
        if not shows_own_pids():
            for process in self.all:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.popen.pid, signal.SIGKILL)
