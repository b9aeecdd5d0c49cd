"""Run one job: its services and its processes, from start to end.

A job ends by itself when all its processes have ended. It is ended early by the first failure, by
a signal to the launcher, or by the launcher's death.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.errors import InitializeError, ProcessLostError
from shoal.launch.descendants import Relative, descendants, send
from shoal.launch.environment import Addresses, free_port, variables
from shoal.launch.loop import Loop
from shoal.launch.news import News
from shoal.launch.outliving import Outliving
from shoal.launch.output import Log, Outlet, paint_prefixes
from shoal.launch.processes import Processes
from shoal.launch.report import (
    Ending,
    dead_host_keeper,
    describe_failure,
    describe_host_keeper,
    exit_code,
    first_failure,
)
from shoal.launch.services import ServiceProcesses
from shoal.runtime.rules.stopping import REQUEUE

JOB_FILE = "job.json"  # in the log directory, as long as the job runs
_START_S = 60.0  # time limit for the services to listen
_LEFTOVERS_S = 1.0  # between SIGTERM and SIGKILL for processes left behind
_DRAIN_S = 1.0  # for the last output, if an unreachable process holds the pipe open
_TAKE_S = 2.0  # for a reader to take the last output, if a signal has ended the job
_UNKILLABLE_S = 2.0  # after SIGKILL: a process in an uninterruptible wait is not waited for
_POLL_S = 0.02
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # passed on; they do not end the job
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # signals after which a program may end in order


class JobOrder(NamedTuple):
    """The order of a job: what to run, and how."""

    command: tuple[str, ...]  # `script, args…` or `-m, module, args…`
    processes: int
    devices: int | None  # virtual CPU devices per process; None: the existing devices
    shown: frozenset[int]  # processes whose output is shown
    log_dir: str
    keeps_logs: bool  # always; else only if the job fails
    aftermath_s: float  # from the first failure to SIGTERM for the others
    grace_s: float  # from SIGTERM to SIGKILL
    prefix: bool = True  # prefix each line with its process
    leave_s: float = math.inf  # from a SIGTERM taken as a notice to SIGKILL
    warn_after_s: float = math.inf  # from the end of the others until the remaining ones are listed
    lost_after_s: float = math.inf  # how long a process may live without its connection


class _LauncherDiedError(Exception):
    """The launcher process is gone."""


class Job:
    """A job, run once, in a process of its own (`keeper.run_in_keeper`)."""

    def __init__(self, order: JobOrder) -> None:
        self._order = order
        self._processes = Processes()
        self._services: ServiceProcesses | None = None
        self._outliving: Outliving | None = None
        self._interrupted: signal.Signals | None = None
        self._interrupts = 0  # number of SIGINTs
        self._trouble = ""  # why the job failed, if no process of it was the cause
        self._terminate_at_s = self._kill_at_s = self._killed_s = math.inf
        self._passed_on_s = math.inf  # when the request to end was passed on
        self._has_time = False  # to stop by itself: `leave_s`
        self._start_s = time.monotonic()
        self._out, self._err = _open_outlets()
        self._loop = Loop([self._out] if self._out is self._err else [self._out, self._err])

    def run(self, orders_fd: int) -> int:
        """Run the job to its end and return its exit code."""
        self._loop.obey(orders_fd, self._obey)
        try:
            self._start()
            self._watch(lambda: self._processes.alive)
            self._end_leftovers()
            if self._services:
                self._services.close()
            self._watch(lambda: self._loop.hears, time.monotonic() + _DRAIN_S)
            self._loop.silence()
            code = self._conclude()
            self._flush()
        except _LauncherDiedError:
            self._kill()
            self._loop.silence()
            return 128 + signal.SIGKILL
        return code

    # Start.

    def _start(self) -> None:
        order, token = self._order, secrets.token_hex(16)
        try:
            env = os.environ | {"SHOAL_TOKEN": token}
            services = ServiceProcesses(order.processes, env, order.log_dir, self._loop)
            self._services = services
            self._outliving = Outliving(
                self._processes,
                services.news,
                warn_after_s=order.warn_after_s,
                lost_after_s=order.lost_after_s,
            )
            self._watch(
                lambda: not (services.addresses or self._interrupted or self._trouble),
                self._start_s + _START_S,
            )
            if services.addresses and not self._interrupted:
                meeting_place, jax_service = services.addresses
                master = f"127.0.0.1:{free_port()}"
                addresses = Addresses(meeting_place, jax_service, master)
                self._start_processes(addresses, token)
                self._write_job_file(addresses, token)
            elif not self._interrupted:
                late = f"the meeting place or JAX's service did not start within {_START_S:g} s"
                self._trouble = self._trouble or late
        except OSError as error:
            started = len(self._processes.all)
            self._trouble = f"process {started} of {order.processes} could not be started: {error}"
            self._kill()

    def _start_processes(self, addresses: Addresses, token: str) -> None:
        order = self._order
        outlets = (self._out, self._err)
        painted = [
            paint_prefixes(order.processes, colour=outlet.colour, shown=order.prefix)
            for outlet in outlets
        ]
        for index in range(order.processes):
            log = Log(os.path.join(order.log_dir, f"p{index:04d}.log"))
            shown = [
                (outlet if index in order.shown else None, prefixes[index])
                for outlet, prefixes in zip(outlets, painted, strict=True)
            ]
            env = variables(
                os.environ,
                process=index,
                num_processes=order.processes,
                devices=order.devices,
                addresses=addresses,
                token=token,
            )
            self._processes.start(
                order.command, env, self._loop, shown, log, stdin=order.processes == 1
            )

    def _write_job_file(self, addresses: Addresses, token: str) -> None:
        """Write the job's address to the log directory, for observers outside the job.

        The file holds the token, with which the job can be controlled, so only this user may read
        it.
        """
        posted = {
            "meeting_place": addresses.meeting_place,
            "jax_service": addresses.jax_service,
            "token": token,
            "launcher": os.getppid(),
            "services": self._services.named_pids if self._services else {},
            "processes": [process.popen.pid for process in self._processes.all],
        }
        temporary = f"{self._job_file}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w") as stream:
            stream.write(json.dumps(posted) + "\n")
        os.replace(temporary, self._job_file)

    @property
    def _job_file(self) -> str:
        return os.path.join(self._order.log_dir, JOB_FILE)

    # Watch.

    def _watch(
        self, going_on: Callable[[], object], until_s: float = math.inf, poll_s: float = math.inf
    ) -> None:
        """Run the loop while `going_on()`, at most until `until_s`; enforce the deadlines."""
        while going_on():
            end_s = min(until_s, self._killed_s + _UNKILLABLE_S)
            if time.monotonic() >= end_s:
                return
            look_s = self._look()  # may set a deadline
            deadlines = (end_s, self._terminate_at_s, self._kill_at_s, look_s)
            self._loop.turn(min(*deadlines, time.monotonic() + poll_s))
            self._reap()
            self._extend_time()
            if self._loop.broken and not self._interrupted:
                self._interrupt(signal.SIGPIPE)  # as `python script | head` ends
            if time.monotonic() >= self._terminate_at_s:
                self._end(signal.SIGTERM)
            if time.monotonic() >= self._kill_at_s:
                self._kill()

    def _look(self) -> float:
        """Check the processes that outlive others; return the time of the next check."""
        alive = self._processes.alive
        is_due = self._terminate_at_s < math.inf or not self._is_ending
        if alive and is_due and all(process.is_lost for process in alive):
            self._terminate_at_s = 0.0  # none is left that could end by itself
        if self._is_ending or self._outliving is None or self._services is None:
            return math.inf
        if alive and (lost_service := self._services.news.lost_service):
            self._trouble = self._trouble or lost_service
            self._begin_aftermath()
        lost, lines, due_s = self._outliving.look(time.monotonic())
        if lines:
            self._say(*lines)
        for process in lost:  # the others may go on without it
            process.is_lost = True
        return 0.0 if lost else due_s

    def _reap(self) -> None:
        """Reap every child that has ended; adopted orphans are children too."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._note_end(ended[0], os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            return

    def _note_end(self, pid: int, code: int) -> None:
        words = self._services.note_end(pid, code) if self._services else ""
        if words and not self._processes.failed and not self._interrupted:
            self._trouble = self._trouble or words
        is_process = self._processes.note_end(pid, code)
        if words or (is_process and code not in (0, REQUEUE)):
            self._begin_aftermath()
        if self._services and not is_process:
            self._services.news.note_end(pid, code)

    # End.

    @property
    def _is_ending(self) -> bool:
        """Return whether the end of the living processes is scheduled."""
        return min(self._terminate_at_s, self._kill_at_s, self._killed_s) < math.inf

    def _begin_aftermath(self) -> None:
        """Schedule the end after the first failure; the other processes learn of it until then."""
        now_s, order = time.monotonic(), self._order
        if not self._is_ending:
            self._terminate_at_s = now_s + order.aftermath_s
        elif self._has_time:  # no longer
            self._kill_at_s = min(self._kill_at_s, now_s + order.aftermath_s + order.grace_s)
        self._passed_on_s = math.inf

    def _extend_time(self) -> None:
        """Extend the time of processes that took SIGTERM as a notice: they save, then exit.

        The sender of the SIGTERM has its own limit, and ends everything when it ends the launcher.
        """
        if self._passed_on_s < math.inf and self._services and self._services.has_notice:
            self._kill_at_s = self._passed_on_s + self._order.leave_s
            self._passed_on_s = math.inf
            self._has_time = True
            if self._processes.alive:
                reason = f"they took it as a notice, and have {self._order.leave_s:g} s to save"
                self._say(f"{reason} and end (SHOAL_LEAVE_S)")

    def _obey(self, data: bytes) -> None:
        if not data:
            raise _LauncherDiedError
        for number in data:
            self._interrupt(signal.Signals(number))

    def _interrupt(self, number: signal.Signals) -> None:
        """Pass on a signal to the launcher; a second Ctrl-C kills."""
        self._interrupts += number == signal.SIGINT
        if number in _NOTICES:
            self._processes.send(number, groups=False)
        elif self._interrupts > 1:
            self._kill()
        else:
            self._interrupted = self._interrupted or number
            if self._processes.alive:
                why = self._loop.broken if number == signal.SIGPIPE else number.name
                again = "; Ctrl-C again kills them now" if number == signal.SIGINT else ""
                self._say(f"{why}: the processes have {self._order.grace_s:g} s to end{again}")
            kill_at_s = self._kill_at_s
            self._end(number if number == signal.SIGINT else signal.SIGTERM)
            if number in _ENDINGS and self._has_time:
                self._kill_at_s = kill_at_s  # said once more
            elif number in _ENDINGS and not self._processes.failed:
                self._passed_on_s = time.monotonic()
            else:
                self._passed_on_s = math.inf

    def _end(self, number: signal.Signals) -> None:
        """Ask all living processes to end, and schedule their kill.

        SIGINT goes to grandchildren too, as from a terminal. SIGTERM does not, as with `kill`:
        helpers that a process needs to save its work (data loaders) stay alive.
        """
        self._terminate_at_s = math.inf
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._order.grace_s)
        self._processes.end(number, groups=number == signal.SIGINT)

    def _kill(self) -> None:
        """Kill every process of the job and all descendants, now."""
        self._terminate_at_s = self._kill_at_s = math.inf
        self._killed_s = min(self._killed_s, time.monotonic())
        self._processes.end(signal.SIGKILL, groups=True)
        send(self._leftovers(), signal.SIGKILL)

    def _leftovers(self) -> list[Relative]:
        """Return the descendants that do not belong to a service."""
        return descendants(os.getpid(), without=self._services.pids if self._services else ())

    def _end_leftovers(self) -> None:
        """End processes left behind: SIGTERM, a moment, SIGKILL."""
        for number, within_s in ((signal.SIGTERM, _LEFTOVERS_S), (signal.SIGKILL, _UNKILLABLE_S)):
            left = self._leftovers()
            send(left, number)
            if left:
                self._watch(self._leftovers, time.monotonic() + within_s, _POLL_S)
        self._processes.kill_groups()

    def _conclude(self) -> int:
        """Report how the job ended, unless it succeeded; return its exit code."""
        with contextlib.suppress(OSError):
            os.unlink(self._job_file)
        news = self._services.news if self._services else News(self._order.processes)
        endings = [process.ending(news.gone.get(process.index)) for process in self._processes.all]
        for log in self._processes.logs:
            if log.trouble:
                self._say(log.trouble)
        root = first_failure(e for e in endings if e.code != REQUEUE)
        if self._trouble:
            self._say(f"logs: {self._order.log_dir}", *self._trouble.splitlines())
            complete = len(endings) == self._order.processes
            return (ProcessLostError if complete else InitializeError).exit_code
        if root:
            return self._report_root(root, endings, news)
        if not self._order.keeps_logs:
            shutil.rmtree(self._order.log_dir, ignore_errors=True)
        codes = {ending.code for ending in endings}
        if self._interrupted and not (codes and codes <= {0, REQUEUE}):
            self._say(f"the job was ended by {self._interrupted.name}")
            return 128 + self._interrupted
        if REQUEUE in codes or (self._services and self._services.has_saved):
            self._say(f"preempted, and saved: start it again (exit code {REQUEUE})")
            return REQUEUE
        if absent := news.absent_words():
            self._say(absent)
        return 0

    def _report_root(self, root: Ending, endings: Sequence[Ending], news: News) -> int:
        """Report the first failure; return the exit code of the job."""
        if keeper := dead_host_keeper(root, news.host_keepers.values()):
            code = ProcessLostError.exit_code
            particulars, sentence = describe_host_keeper(keeper, root, endings, self._start_s)
        else:
            code = exit_code(root, endings)
            particulars, sentence = describe_failure(root, endings, self._start_s)
        if code == InitializeError.exit_code and news.joined and (absent := news.absent_words()):
            particulars.append(absent)
        self._say(*particulars, f"\x1b[31m{sentence}\x1b[0m" if self._err.colour else sentence)
        return code

    def _flush(self) -> None:
        """Wait until the output is written; a slow reader has time, a signal ends the wait."""
        self._terminate_at_s = self._kill_at_s = self._killed_s = math.inf
        self._outliving = None
        until_s = time.monotonic() + _TAKE_S if self._interrupted else math.inf
        for outlet in self._loop.outlets:
            outlet.end_line()
        self._watch(lambda: any(outlet.waiting for outlet in self._loop.outlets), until_s)

    def _say(self, *lines: str) -> None:
        """Print lines of the launcher; a line that starts with a space continues the last one."""
        self._err.end_line()
        for line in lines:
            named = line if line.startswith(" ") else f"shoal run: {line}"
            self._err.put(f"{named}\n".encode(errors="replace"))


def _open_outlets() -> tuple[Outlet, Outlet]:
    """Return the outlets of stdout and stderr; one and the same if both are one terminal."""
    out, err = Outlet(1, os.environ), Outlet(2, os.environ)
    same = out.terminal and err.terminal and os.fstat(1).st_rdev == os.fstat(2).st_rdev
    return out, out if same else err
