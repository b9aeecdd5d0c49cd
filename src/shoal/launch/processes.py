"""The child processes of one job: start, signal, record their end; the stragglers among them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shoal.launch.loop import Loop
from shoal.launch.news import News
from shoal.launch.output import Display, LineStream, Log
from shoal.runtime.exit.first_failure import ProcessExit
from shoal.runtime.failures.facts import Memory
from shoal.runtime.failures.last_record import LastRecord, take, take_fault
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.process_status import is_stopped, shows_own_pids


class ChildProcess:
    """One process of the job, and its output."""

    def __init__(
        self,
        index: int,
        popen: subprocess.Popen[bytes],
        log: Log,
        record_file: str,
        *,
        has_stdin: bool = True,
        is_python: bool = True,
    ) -> None:
        self.index, self.popen, self.log = index, popen, log
        self._has_stdin, self._is_python = has_stdin, is_python
        self._record_file = record_file
        self.peak_bytes = 0  # resident, once it has ended
        self.code: int | None = None
        self.ended_s = math.inf
        self.sent: tuple[signal.Signals, ...] = ()  # the signals sent to end it
        self.sent_s = math.inf  # the time of the first
        self.asked_s = math.inf  # the time of a SIGTERM passed on, as a request to end
        self.was_frozen = False  # when it was sent
        self.is_lost = False  # lost to the others while alive

    def process_exit(self) -> ProcessExit:
        """Return how it ended; one that SIGKILL has not ended counts as killed.

        Removes the files that it has written for the launcher.
        """
        # A command may start the process that joins the job.
        taken = take(self._record_file, self.popen.pid if self._is_python else None)
        return ProcessExit(
            process=self.index,
            code=-signal.SIGKILL if self.code is None else self.code,
            failed_s=self._failed_s(taken.last),
            sent=self.sent,
            output=self.log.tail.decode(errors="replace"),
            log=self.log.path,
            was_frozen=self.was_frozen,
            is_lost=self.is_lost,
            sent_s=self.sent_s,
            record=taken.last,
            threads=taken.threads,
            memory=Memory(peak_bytes=self.peak_bytes or None),
            ended_s=self.ended_s,
            crashed_at=take_fault(self._record_file),
            asked_s=self.asked_s,
            is_python=self._is_python,
            has_input=self._has_stdin,
        )

    def _failed_s(self, record: LastRecord | None) -> float | None:
        """Return when it failed by itself, or None.

        That is when it recorded its exception: what it does between that and its end (waiting for
        threads, closing devices) may take longer than the failure takes to end the others.
        """
        raises = self.sent or (self.code or 0) > 0  # else a signal ended it, not the exception
        until_s = min(self.ended_s, self.sent_s)
        if not raises and self.asked_s < math.inf:  # unless it was asked to end in its teardown
            raises, until_s = True, self.asked_s
        if raises and record is not None and record.at_s < until_s:
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
        shown: Sequence[Display | None],
        log: Log,
        *,
        record_file: str,
        has_stdin: bool,
        is_python: bool,
    ) -> None:
        """Start the next process.

        Args:
          command: the program and its arguments.
          shown: how stdout and stderr are shown; None: not shown.
          record_file: the file in which it records how it failed.
          has_stdin: whether it reads the launcher's standard input; if not, /dev/null.
          is_python: whether the command is `child`, which records how it ends.
        """
        popen = subprocess.Popen(
            command,
            stdin=None if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        out, err = (LineStream(display, log) for display in shown)
        index = self.first + len(self.all)
        process = ChildProcess(
            index, popen, log, record_file, has_stdin=has_stdin, is_python=is_python
        )
        self.all.append(process)
        loop.listen_to(popen.stdout, out)  # type: ignore[arg-type] # a PIPE is never None
        loop.listen_to(popen.stderr, err)  # type: ignore[arg-type] # the same

    def note_end(self, pid: int, code: int, peak_bytes: int) -> bool:
        """Note the end of `pid`; return whether it is a process of the job."""
        for process in self.all:
            if process.popen.pid == pid and process.code is None:
                process.code = process.popen.returncode = code
                process.ended_s = time.monotonic()
                process.peak_bytes = peak_bytes
                return True
        return False

    def send(
        self,
        number: signal.Signals,
        *,
        groups: bool,
        among: Sequence[ChildProcess] | None = None,
    ) -> None:
        """Send a signal to living processes, by default to all; with `groups` also to their
        grandchildren."""
        # They are not reaped yet, so the pid cannot have been reused.
        for process in self.alive if among is None else among:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if groups else os.kill)(process.popen.pid, number)

    def end(
        self,
        number: signal.Signals,
        *,
        groups: bool,
        among: Sequence[ChildProcess] | None = None,
    ) -> None:
        """Send a signal to end living processes, by default all, and record that it was sent."""
        among = self.alive if among is None else among
        for process in among:
            process.was_frozen |= not process.sent and is_stopped(process.popen.pid)
            process.sent = (*process.sent, number)
            process.sent_s = min(process.sent_s, time.monotonic())
        self._send_and_wake(number, groups=groups, among=among)

    def ask(self, number: signal.Signals) -> None:
        """Pass on a request to end: what a process does then is its own."""
        for process in self.alive:
            process.asked_s = min(process.asked_s, time.monotonic())
        self._send_and_wake(number, groups=False, among=self.alive)

    def _send_and_wake(
        self, number: signal.Signals, *, groups: bool, among: Sequence[ChildProcess]
    ) -> None:
        self.send(number, groups=groups, among=among)
        if number != signal.SIGKILL:  # a stopped process would not receive it
            self.send(signal.SIGCONT, groups=True, among=among)

    def kill_groups(self) -> None:
        """Kill the process groups of ended processes, where descendants cannot be found."""
        if not shows_own_pids():
            for process in self.all:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.popen.pid, signal.SIGKILL)


# ---- Stragglers, which outlive the other processes: lost to them, or merely slower.
#
# A process may rightly work longer than the others, or save after them: slow processes are never
# ended. But a job must not wait silently, nor, once the others have ended, for a process that
# they have lost.


_LATE_NEWS_S = 1.0  # news of a process may arrive after its end
_APART_S = 20.0  # from the start: most programs have joined by then
_DEVICES_POLL_S = 0.25  # no event tells of them
_LINES = 8


class _Look(NamedTuple):
    """The result of a check, and the time of the next one."""

    lost: Sequence[ChildProcess] = ()  # still alive, but lost to the others
    lines: Sequence[str] = ()  # to be printed
    due_s: float = math.inf


class StragglerWatch:
    """Checks the processes that live while others are gone, or that are apart from the beginning.

    Args:
      num_processes: of the whole job, those of other hosts included.
      warn_after_s: after this long since the end of the others, the running ones are listed, once.
      lost_after_s: how long a process may live after its connection to the coordinator ended; a
        process that is about to end closes it first.
      start_s: when the processes started; inf: another launcher reports that none has joined.
      have_devices: returns whether the devices of every process exist, after which none can join.
    """

    def __init__(
        self,
        processes: Processes,
        news: News,
        *,
        num_processes: int,
        warn_after_s: float,
        lost_after_s: float,
        start_s: float = math.inf,
        have_devices: Callable[[], bool] = lambda: False,
    ) -> None:
        self._processes, self._news = processes, news
        self._num_processes = num_processes
        self._warn_after_s, self._lost_after_s = warn_after_s, lost_after_s
        self._has_warned = False
        self._start_s, self._have_devices = start_s, have_devices
        self._apart_look_s = start_s  # when to check next whether any has joined
        self._absent: set[int] = set()  # already reported as ended without joining

    def look(self, now_s: float) -> _Look:
        """Check all living processes. A job of one process has no others."""
        alive = self._processes.alive
        if self._num_processes < 2 or not alive:
            return _Look()
        lost_s = {process.index: self._lost_s(process) for process in alive}
        lost = [process for process in alive if lost_s[process.index] <= now_s]
        absent, absent_s = self._absent_lines(now_s)
        longer, longer_s = self._longer_lines(now_s)
        apart, apart_s = self._apart_lines(now_s)
        times_s = (*lost_s.values(), absent_s, longer_s, apart_s)
        later = [at_s for at_s in times_s if at_s > now_s]
        return _Look(lost, [*absent, *longer, *apart], min(later, default=math.inf))

    def _lost_s(self, process: ChildProcess) -> float:
        """Return the time from which a living process counts as lost to the others."""
        gone = self._news.gone.get(process.index)
        if gone is None or gone.state != "lost" or process.is_lost:
            return math.inf
        # No process waits for it; only a stopped process never ends by itself.
        if not gone.is_missed and not is_stopped(process.popen.pid):
            return math.inf
        return gone.at_s if gone.is_dismissed else gone.at_s + self._lost_after_s

    def _absent_lines(self, now_s: float) -> tuple[list[str], float]:
        """Report processes that exited with 0 without joining, while others wait for them."""
        joined = self._news.joined
        waiting = [process.index for process in self._processes.alive if process.index in joined]
        due_s, lines = math.inf, []
        for process in self._processes.all:
            index = process.index
            if process.code == 0 and waiting and not {index} & (joined | self._absent):
                at_s = process.ended_s + _LATE_NEWS_S
                due_s = min(due_s, at_s)
                if at_s <= now_s:
                    self._absent.add(index)
                    wait = "waits" if len(waiting) == 1 else "wait"
                    ended = f"process {index} ended with exit code 0 without joining the job"
                    lines.append(f"{ended}; {listed(waiting)} {wait} for it")
        return lines, due_s

    def _apart_lines(self, now_s: float) -> tuple[list[str], float]:
        """Report, once, that no process has joined: as soon as none can, or after a while."""
        if now_s < self._apart_look_s or self._news.is_said_apart:
            return [], self._apart_look_s
        can_join = not self._have_devices()
        line = self._news.apart_words(can_join=can_join)
        due_s = self._start_s + _APART_S
        if not line or (now_s < due_s and can_join):
            self._apart_look_s = min(due_s, now_s + _DEVICES_POLL_S) if line else math.inf
            return [], self._apart_look_s
        self._news.is_said_apart = True
        return [line], math.inf

    def _longer_lines(self, now_s: float) -> tuple[list[str], float]:
        """List the running processes, once, a while after at least half have ended."""
        alive = self._processes.alive
        ended = [process.ended_s for process in self._processes.all if process.code is not None]
        if self._has_warned or len(alive) > len(ended):
            return [], math.inf
        due_s = max(ended) + self._warn_after_s
        if due_s > now_s:
            return [], due_s
        self._has_warned = True
        late_s = now_s - max(ended)
        lines = [
            f"process {process.index} (pid {process.popen.pid}) still runs, {late_s:.0f} s after "
            f"the others ended: {self._standing(process)}"
            for process in alive[:_LINES]
        ]
        if len(alive) > _LINES:
            lines.append(f"and {len(alive) - _LINES} more")
        return lines, math.inf

    def _standing(self, process: ChildProcess) -> str:
        gone = self._news.gone.get(process.index)
        if is_stopped(process.popen.pid):
            return f"it is stopped by a signal; `kill -CONT {process.popen.pid}` resumes it"
        if gone is not None:
            descriptions = {
                "left": "it has left the job",
                "failed": "it reported a failure to the others",
            }
            return descriptions.get(gone.state, f"the others have lost it ({gone.words})")
        if process.index not in self._news.joined:
            return "it has not joined the job"
        return "`shoal stacks` shows its stacks"
