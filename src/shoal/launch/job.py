"""Run one job: its services and its processes, from start to end.

A job ends by itself when all its processes have ended. It is ended early by the first failure, by
a signal to the launcher, or by the launcher's death; of several hosts' launchers, by that of any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable

from shoal.errors import counted
from shoal.launch import child
from shoal.launch.conclusion import Conclusion
from shoal.launch.diagnose import NOT_RECORDED
from shoal.launch.environment import JobStart, has_input, variables
from shoal.launch.github_actions import ReportFiles
from shoal.launch.launchers import JobExit, Launchers, PassedSignal
from shoal.launch.log_dir import (
    JOB_FILE,
    remove_job_file,
    shown_path,
    write_failure,
    write_job_file,
)
from shoal.launch.loop import Console
from shoal.launch.order import JobOrder
from shoal.launch.output import Log, display_of, paint_prefixes
from shoal.launch.processes import Processes, StragglerWatch
from shoal.launch.services import EarlyServices, late_words
from shoal.runtime.exit.first_failure import is_signal_from_outside
from shoal.runtime.failures.facts import Cause, Memory
from shoal.runtime.failures.headline import seconds
from shoal.runtime.failures.last_record import fault_file
from shoal.runtime.failures.rendering import facts_without_secrets, plain_text
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system import progress_file
from shoal.runtime.system.process_status import (
    Relative,
    descendants,
    memory_limit,
    memory_peak,
    oom_kills,
    send,
    status_of,
)
from shoal.runtime.system.progress_file import StepProgress, reached_together
from shoal.runtime.system.stacks import seen

_START_S = 60.0  # time limit for the services to listen
_LEFTOVERS_S = 1.0  # between SIGTERM and SIGKILL for processes left behind
_DRAIN_S = 1.0  # for the last output, if an unreachable process holds the pipe open
_TAKE_S = 2.0  # for a reader to take the last output, if a signal has ended the job
_UNKILLABLE_S = 2.0  # after SIGKILL: a process in an uninterruptible wait is not waited for
_REAPED_S = 60.0  # but before a new attempt, which needs its devices and files, it is
_POLL_S = 0.02
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of getrusage(2)
_SAVE_POLL_S = 0.05
_SERVICES_POLL_S = 0.25
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # passed on; they do not end the job
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # signals after which a program may end in order
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)  # which sends them to grandchildren too
_SAME_S = 1.0  # a signal to all processes of the job reaches both of the launcher's within this


class _LauncherDiedError(Exception):
    """The launcher process is gone."""


class Job:
    """A job, run once (`attempts` runs it again).

    Args:
      attempt: its number, as far as this launcher knows.
      launchers: the launchers of the job.
      early: the services that wait for the next attempt, or for this one.
      is_last: whether no new attempt follows if this one fails.
    """

    def __init__(
        self,
        order: JobOrder,
        attempt: int,
        console: Console,
        launchers: Launchers,
        early: EarlyServices,
        *,
        is_last: bool,
    ) -> None:
        self._order, self._early, self._is_last = order, early, is_last
        # From the first failure to SIGTERM for the others; if one of them is saving, until it has
        # saved, `order.failure_grace_s` at most. Their reports are of use after the last failure;
        # before, they cost time.
        self._failure_grace_s = order.failure_grace_s
        if not is_last:
            self._failure_grace_s = min(order.between_s, order.failure_grace_s)
        self._save_until_s = math.inf  # until then a save after the first failure has time
        self._oom_kills = oom_kills()
        self._log_dir = order.attempt_dir(attempt)
        self._processes = Processes()
        self._interrupted: signal.Signals | None = None
        self._interrupts = 0  # number of SIGINTs
        self._heard: dict[int, tuple[bool, float]] = {}  # signals: by the launcher, and when
        self._problem = ""  # why the job failed, if no process of it was the cause
        self._is_of_services = False  # the problem
        self._is_service_killed = False  # by a signal from outside, which is the problem
        self._remaining = ""  # the processes that exist in spite of SIGKILL
        self._is_reaping = False  # all have got SIGKILL, and nothing more ends them
        self._straggler_watch: StragglerWatch | None = None
        self._terminate_at_s = self._kill_at_s = self._killed_s = math.inf
        self._passed_on_s = math.inf  # when the request to end was passed on
        self._has_time = False  # to stop by itself: `leave_s`
        self._has_reported = False  # the first failure, to other nodes
        self._start_s = time.monotonic()
        self._console, self._launchers = console, launchers
        self._print, self._loop = console.print, console.loop

    def run(self, orders_fd: int) -> Conclusion:
        """Run the job to its end and return how it ended."""
        self._loop.read_orders(orders_fd, self._take_orders)
        self._loop.read_signals(lambda number: self._hear(number, by_launcher=False))
        try:
            self._start()
            self._watch(lambda: self._processes.alive)
            self._end_leftovers()
            end = self._end_of_host()
            if self._launchers.services:
                self._launchers.services.close()
            self._drain()
            self._loop.silence()
            conclusion = self._conclude(end)
            self._flush()
            conclusion = self._unless_interrupted(conclusion)
            self._launchers.close()
            self._close_logs()
        except _LauncherDiedError:
            self._kill()
            self._loop.silence()
            return Conclusion(128 + signal.SIGKILL, has_failed=True, again=False)
        self._loop.ignore(orders_fd)
        return conclusion

    # Start.

    def _start(self) -> None:
        order, launchers = self._order, self._launchers
        what = "the services"
        try:
            os.makedirs(self._log_dir, exist_ok=True)
            launchers.open(self._early)
            until_s = math.inf if order.nodes else self._start_s + _START_S
            self._watch(
                lambda: (
                    not (launchers.start or launchers.problem or self._interrupted or self._problem)
                ),
                until_s,
            )
            start = launchers.start
            if start and not self._interrupted:
                self._straggler_watch = StragglerWatch(
                    self._processes,
                    launchers.news,
                    num_processes=start.total,
                    warn_after_s=order.warn_after_s,
                    lost_after_s=order.lost_after_s,
                    start_s=time.monotonic() if launchers.services else math.inf,
                    have_devices=lambda: self._have_devices(start.total),
                )
                what = "process {} of " + str(start.total)
                self._start_processes(start)
                self._post(start)
            elif not self._interrupted and not launchers.problem and not self._problem:
                self._lose_services(late_words(_START_S), is_from_outside=False)
        except OSError as error:
            index = self._processes.first + len(self._processes.all)
            self._problem = f"{what.format(index)} could not be started: {error}"
            self._begin_failure_grace()
            self._kill()

    def _post(self, start: JobStart) -> None:
        """Write the job's address where observers look for it; the job does not depend on it."""
        if not self._launchers.services:
            return
        folder = self._order.log_dir
        try:
            write_job_file(
                folder,
                start.addresses,
                start.token,
                services=self._launchers.services.named_pids,
                processes=[process.popen.pid for process in self._processes.all],
            )
        except OSError as error:
            path = os.path.join(folder, JOB_FILE)
            self._print(
                f"{path} cannot be written ({error.strerror}): "
                "shoal watch and other observers will not find this job"
            )

    def _start_processes(self, start: JobStart) -> None:
        order = self._order
        outlets = (self._console.out, self._console.err)
        painted = [
            paint_prefixes(start.total, colour=outlet.colour, shown=order.prefix)
            for outlet in outlets
        ]
        self._processes.first = start.share.first
        self._log_dir = order.attempt_dir(start.attempt)
        os.makedirs(self._log_dir, exist_ok=True)
        by_python = [sys.executable, child.__file__] if order.is_python else []
        for index in range(start.share.first, start.share.first + start.share.processes):
            log = Log(os.path.join(self._log_dir, f"p{index:04d}.log"))
            progress, record = self._progress_file(index), self._record_file(index)
            progress_file.prepare(progress)
            for path in (record, fault_file(record)):  # of an earlier job
                with contextlib.suppress(OSError):
                    os.unlink(path)
            is_shown = order.shown is None or index in order.shown
            shown = [
                display_of(outlet, prefixes[index], is_alone=start.total == 1) if is_shown else None
                for outlet, prefixes in zip(outlets, painted, strict=True)
            ]
            env = variables(
                os.environ,
                process=index,
                start=start,
                devices=order.devices,
                stdin=order.stdin,
                progress_file=progress,
                record_file=record,
                may_restart=order.restarts is not None,
                suspect_since_s=order.suspect_since_s,
            )
            self._processes.start(
                [*by_python, *order.command],
                env,
                loop=self._loop,
                shown=shown,
                log=log,
                record_file=record,
                has_stdin=has_input(index, start, order.stdin),
                is_python=order.is_python,
            )

    def _progress_file(self, process: int) -> str:
        return os.path.join(self._log_dir, f".p{process:04d}.progress")

    def _record_file(self, process: int) -> str:
        return os.path.join(self._log_dir, f".p{process:04d}.record")

    def _have_devices(self, total: int) -> bool:
        """Return whether JAX's devices exist in all processes; unknown of those of other hosts."""
        files = [self._progress_file(process.index) for process in self._processes.all]
        return len(files) == total and all(map(progress_file.has_devices, files))

    def _take_progress(self) -> list[StepProgress]:
        """Return how far each process of this host has come, and remove the files."""
        return [
            progress_file.take(self._progress_file(process.index))
            for process in self._processes.all
        ]

    # Watch.

    def _watch(
        self, going_on: Callable[[], object], until_s: float = math.inf, poll_s: float = math.inf
    ) -> None:
        """Run the loop while `going_on()`, at most until `until_s`; enforce the deadlines."""
        while going_on():
            end_s = min(until_s, self._killed_s + _UNKILLABLE_S)
            if time.monotonic() >= end_s:
                return
            self._turn_launchers()
            # First the news of this host's processes: the failure of the others is often their
            # consequence, and both may arrive in one turn.
            look_s = self._look()  # may set a deadline
            self._follow_others()
            next_s = min(look_s, self._launchers.next_s)
            deadlines = (end_s, self._terminate_at_s, self._kill_at_s, next_s)
            self._loop.turn(min(*deadlines, time.monotonic() + poll_s))
            self._reap()
            self._extend_time()
            if self._loop.broken and not self._interrupted:
                self._interrupt(signal.SIGPIPE)  # as `python script | head` ends
            if time.monotonic() >= self._terminate_at_s and not self._spares_a_save():
                self._end_survivors()
            if time.monotonic() >= self._kill_at_s:
                self._kill()

    def _turn_launchers(self) -> None:
        """Let the launchers of all nodes go on, and print what they report."""
        lines = self._launchers.turn()
        if lines:
            self._print(*lines)

    def _follow_others(self) -> None:
        """Take failures and signals that other nodes report."""
        if self._launchers.has_failure and self._processes.alive and not self._is_ending:
            self._begin_failure_grace()
        for passed in self._launchers.take_signals():
            self._take_signal(passed)

    def _look(self) -> float:
        """Check the processes that outlive others; return the time of the next check."""
        alive = self._processes.alive
        is_unsent = self._terminate_at_s < math.inf or not self._is_ending  # SIGTERM
        if alive and is_unsent and all(process.is_lost for process in alive):
            if not self._spares_a_save():
                self._terminate_at_s = 0.0  # none is left that could end by itself
        if self._is_ending or self._straggler_watch is None:
            return self._look_at_services()
        lost_service = self._launchers.news.lost_service
        if alive and lost_service:
            self._problem = self._problem or lost_service
            self._begin_failure_grace()
        lost, lines, due_s = self._straggler_watch.look(time.monotonic())
        if lines:
            self._print(*lines)
        for process in lost:  # the others may go on without it
            process.is_lost = True
            # On a host of one process no other process could look.
            gone, site = self._launchers.news.gone[process.index], seen(process.popen.pid).site
            if site and site not in gone.words:
                self._print(f"process {process.index} is lost, in native code called at {site}")
        return 0.0 if lost else due_s

    def _look_at_services(self) -> float:
        """Check that the services are not stopped before they listen: nothing else tells."""
        services, now_s = self._launchers.services, time.monotonic()
        if services is None or self._problem or self._is_ending or self._launchers.start:
            return math.inf
        reason = services.stopped_words(now_s, self._order.lost_after_s)
        if reason:
            self._lose_services(reason, is_from_outside=True)
        return now_s + _SERVICES_POLL_S

    def _reap(self) -> None:
        """Reap every child that has ended; adopted orphans are children too."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:  # there is no child
                return
            if pid == 0:  # none of them has ended
                return
            peak_bytes = used.ru_maxrss * _RSS_UNIT
            self._note_end(pid, os.waitstatus_to_exitcode(status), peak_bytes)

    def _note_end(self, pid: int, code: int, peak_bytes: int) -> None:
        services = self._launchers.services
        reason = services.note_end(pid, code) if services else ""
        if reason and not self._processes.failed and not self._interrupted:
            self._lose_services(reason, is_from_outside=is_signal_from_outside(code))
        is_process = self._processes.note_end(pid, code, peak_bytes)
        if reason or (is_process and code not in (0, REQUEUE)):
            self._begin_failure_grace()
        if services and not is_process:
            services.news.note_end(pid, code, [process.index for process in self._processes.all])

    def _lose_services(self, reason: str, *, is_from_outside: bool) -> None:
        """Record that the services of this attempt have failed: the job cannot go on."""
        self._is_of_services |= not self._problem
        self._problem = self._problem or reason
        self._is_service_killed |= is_from_outside

    # End.

    @property
    def _is_ending(self) -> bool:
        """Return whether the end of the living processes is scheduled."""
        when = min(self._terminate_at_s, self._kill_at_s, self._killed_s)
        return self._is_reaping or when < math.inf

    def _begin_failure_grace(self) -> None:
        """Schedule the end after the first failure; the other processes learn of it until then."""
        now_s, order = time.monotonic(), self._order
        if not self._has_reported:
            self._has_reported = True
            self._launchers.report_failure()
            if self._launchers.services and not (self._is_last or self._interrupted):
                self._launchers.services.start_next(self._early)
        if not self._is_ending:
            self._terminate_at_s = now_s + self._failure_grace_s
            self._save_until_s = now_s + order.failure_grace_s
        elif self._has_time:  # no longer
            self._kill_at_s = min(self._kill_at_s, now_s + order.failure_grace_s + order.grace_s)
        self._passed_on_s = math.inf

    def _spares_a_save(self) -> bool:
        """Postpone the end of the other processes while one of them saves."""
        now_s = time.monotonic()
        files = (self._progress_file(process.index) for process in self._processes.alive)
        if now_s < self._save_until_s < math.inf and any(map(progress_file.is_saving, files)):
            self._terminate_at_s = min(now_s + _SAVE_POLL_S, self._save_until_s)
            return True
        return False

    def _extend_time(self) -> None:
        """Extend the time of processes that took SIGTERM as a notice: they save, then exit.

        The sender of the SIGTERM has its own limit, and ends everything when it ends the launcher.
        """
        if self._passed_on_s < math.inf and self._launchers.news.has_notice:
            self._kill_at_s = self._passed_on_s + self._order.leave_s
            self._passed_on_s = math.inf
            self._has_time = True
            if self._processes.alive:
                reason = (
                    f"they took it as a preemption notice, and have {self._order.leave_s:g} s "
                    "to save"
                )
                self._print(f"{reason} and end (SHOAL_PREEMPTION_GRACE_S)")

    def _take_orders(self, data: bytes) -> None:
        if not data:
            raise _LauncherDiedError
        for number in data:
            self._hear(signal.Signals(number), by_launcher=True)

    def _hear(self, number: signal.Signals, *, by_launcher: bool) -> None:
        """Take a signal to the launcher, or to this process, which counts as one to the launcher;
        one to all processes of the job is both."""
        now_s = time.monotonic()
        was_by_launcher, at_s = self._heard.pop(number, (by_launcher, -math.inf))
        if was_by_launcher != by_launcher and now_s - at_s < _SAME_S:
            return
        self._heard[number] = by_launcher, now_s
        self._interrupt(number)

    def _interrupt(self, number: signal.Signals) -> None:
        """Pass on a signal to the launcher; a second Ctrl-C kills."""
        self._interrupts += number == signal.SIGINT
        if number in _NOTICES:
            self._processes.send(number, groups=False)
        elif self._interrupts > 1:
            self._launchers.report_signal(signal.SIGKILL)
            self._kill()
        else:
            why = self._loop.broken if number == signal.SIGPIPE else number.name
            self._launchers.report_signal(number)
            self._pass_on(number, why)

    def _take_signal(self, passed: PassedSignal) -> None:
        """Take a signal of another node. Launchers may all get the same one, once."""
        if passed.number == signal.SIGKILL:
            self._kill()
        elif self._interrupted is None:
            self._pass_on(passed.number, f"{passed.number.name} on {passed.source}")

    def _pass_on(self, number: signal.Signals, why: str) -> None:
        """Pass on a signal that ends the job to its processes."""
        self._interrupted = self._interrupted or number
        if self._processes.alive:
            again = "; Ctrl-C again kills them now" if self._interrupts else ""
            self._print(f"{why}: the processes have {self._order.grace_s:g} s to end{again}")
        kill_at_s = self._kill_at_s
        if number in _END_SIGNALS:
            self._limit_end()
            self._processes.ask(signal.SIGTERM)
        else:
            self._end(number if number in _FROM_TERMINAL else signal.SIGTERM)
        if number in _END_SIGNALS and self._has_time:
            self._kill_at_s = kill_at_s  # said once more
        elif number in _END_SIGNALS and not self._processes.failed:
            self._passed_on_s = time.monotonic()
        else:
            self._passed_on_s = math.inf

    def _end(self, number: signal.Signals) -> None:
        """Ask all living processes to end, and schedule their kill.

        SIGINT and SIGQUIT go to grandchildren too, as from a terminal. SIGTERM does not, as with
        `kill`: helpers that a process needs to save its work (data loaders) stay alive.
        """
        self._limit_end()
        self._processes.end(number, groups=number in _FROM_TERMINAL)

    def _limit_end(self) -> None:
        """Schedule the kill of processes that are asked to end now."""
        self._terminate_at_s = math.inf
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._order.grace_s)

    def _end_survivors(self) -> None:
        """Ask the survivors of a failure to end; kill those that would not.

        JAX takes SIGTERM as a preemption notice: a program that joined by JAX alone would train on,
        and save, until the end of the grace. Shoal, once joined, tells it of the failure.
        """
        self._end(signal.SIGTERM)
        by_jax = self._launchers.news.joined_by_jax
        deaf = [
            process
            for process in self._processes.alive
            if process.index in by_jax
            and not progress_file.is_done(self._progress_file(process.index))
        ]
        self._processes.end(signal.SIGKILL, groups=True, among=deaf)

    def _kill(self) -> None:
        """Kill every process of the job and all descendants, now."""
        self._terminate_at_s = self._kill_at_s = math.inf
        self._killed_s = min(self._killed_s, time.monotonic())
        self._processes.end(signal.SIGKILL, groups=True)
        send(self._leftovers(), signal.SIGKILL)

    def _leftovers(self) -> list[Relative]:
        """Return the descendants that do not belong to a service."""
        services = self._launchers.services.pids if self._launchers.services else set()
        return descendants(os.getpid(), without=services | self._early.pids)

    def _end_leftovers(self) -> None:
        """End processes left behind: SIGTERM, a moment, SIGKILL."""
        for number, within_s in ((signal.SIGTERM, _LEFTOVERS_S), (signal.SIGKILL, _UNKILLABLE_S)):
            left = self._leftovers()
            send(left, number)
            if left:
                self._watch(self._leftovers, time.monotonic() + within_s, _POLL_S)
        self._processes.kill_groups()
        if left or self._processes.alive:
            self._wait_for_killed()

    def _wait_for_killed(self) -> None:
        """Wait for what SIGKILL has not ended yet, if a new attempt may follow."""
        remaining = self._remaining_words()
        has_failed = any(process.code != 0 for process in self._processes.all)
        restarts = self._order.restarts
        may_follow = not self._is_last or (restarts is not None and restarts.after_preemption)
        if remaining and has_failed and may_follow and not self._interrupted:
            limit = f"a new attempt waits for that, {_REAPED_S:g} s at most"
            self._print(f"SIGKILL has not ended {remaining} yet: {limit}")
            self._without_deadlines()
            self._is_reaping, until_s = True, time.monotonic() + _REAPED_S
            self._watch(
                lambda: (self._processes.alive or self._leftovers()) and not self._interrupted,
                until_s,
                _POLL_S,
            )
        self._remaining = self._remaining_words()

    def _remaining_words(self) -> str:
        """Return the processes of this attempt that exist in spite of SIGKILL, as text."""
        alive = {process.popen.pid: process.index for process in self._processes.alive}
        left = [relative.pid for relative in self._leftovers() if relative.pid not in alive]
        rows = [(f"process {index} (pid", pid) for pid, index in alive.items()]
        rows += [("a child of a process (pid", pid) for pid in left]
        states = {pid: status.state for _, pid in rows if (status := status_of(pid))}
        return ", ".join(f"{who} {pid}, state {states.get(pid, '?')})" for who, pid in rows)

    def _end_of_host(self) -> JobExit:
        """Wait for the end of the other nodes; return how the job ended on this one."""
        exits = [process.process_exit() for process in self._processes.all]
        loaded = [
            progress_file.has_loaded(self._progress_file(process_exit.process))
            for process_exit in exits
        ]
        each = self._take_progress()
        exits = [
            process_exit._replace(step=progress.step, ran_loaded=has_loaded and progress.ended < 0)
            for process_exit, progress, has_loaded in zip(exits, each, loaded, strict=True)
        ]
        before, after = self._oom_kills, oom_kills()
        kills = None
        if before is not None and after is not None:
            kills = after - before
        counted = {
            "cgroup_oom_kills": kills,
            "cgroup_peak_bytes": memory_peak(),
            "cgroup_limit_bytes": memory_limit(),
        }
        exits = [
            process_exit._replace(
                memory=dataclasses.replace(process_exit.memory or Memory(), **counted)
            )
            for process_exit in exits
        ]
        if kills:
            self._is_service_killed = False  # it may have been killed for want of memory
        progress = reached_together(each)
        end = JobExit(
            exits,
            self._start_s,
            problem=self._problem,
            interrupted=self._interrupted,
            progress=progress,
            is_of_services=self._is_of_services,
            is_service_killed=self._is_service_killed,
            remaining=self._remaining,
        )
        self._launchers.finish(end)
        self._without_deadlines()
        self._watch(lambda: self._launchers.is_waiting)
        problem = self._problem or self._launchers.problem
        return end._replace(problem=problem, interrupted=self._interrupted)

    def _close_logs(self) -> None:
        services = self._launchers.services
        for log in [*self._processes.logs, *(services.logs if services else ())]:
            log.close()

    def _conclude(self, end: JobExit) -> Conclusion:
        """Report how the job ended, unless it succeeded; return it."""
        if self._launchers.services:
            remove_job_file(self._order.log_dir)
        for log in self._processes.logs:
            if log.problem:
                self._print(log.problem)
        conclusion = self._launchers.conclude(end)
        self._report(conclusion)
        return conclusion

    def _unless_interrupted(self, conclusion: Conclusion) -> Conclusion:
        """Return `conclusion`, without a new attempt if a signal came after it was drawn."""
        if not (conclusion.again and self._interrupted):
            return conclusion
        self._print(f"{self._interrupted.name}: no new attempt")
        self._flush()
        return conclusion._replace(again=False, code=128 + self._interrupted)

    def _report(self, conclusion: Conclusion) -> None:
        """Print how the job ended, the cause last."""
        if conclusion.failure is None:
            self._print(*(conclusion.lines or self._good_words()))
            return
        advice = (*conclusion.failure.advice, *conclusion.lines)
        folder = shown_path(self._log_dir)
        if not (conclusion.has_failed or self._order.keeps_logs):
            folder = ""  # they go
        failure = dataclasses.replace(conclusion.failure, advice=advice, logs=folder)
        are_there = os.path.isdir(self._log_dir)
        if not are_there:
            self._print(f"the directory of the logs was removed while the job ran: {self._log_dir}")
            failure = dataclasses.replace(
                failure, causes=tuple(map(_without_files, failure.causes)), logs=""
            )
        failure = facts_without_secrets(failure)
        failure = dataclasses.replace(failure, text=plain_text(failure))
        if are_there:
            problem = write_failure(self._log_dir, failure)
            if problem:
                self._print(problem)
        logs = {process.index: process.log.path for process in self._processes.all}
        files = ReportFiles(logs, self._order.import_root, conclusion.reported_by)
        self._console.report(failure, files)

    def _good_words(self) -> list[str]:
        """Return the last line of a good run: for a person, as programs compare what is printed."""
        start = self._launchers.start
        if start is None or self._order.quiet or not self._console.err.terminal:
            return []
        duration = seconds(time.monotonic() - self._start_s)
        return [f"finished after {duration}: {counted(start.total, 'process', 'processes')}"]

    def _without_deadlines(self) -> None:
        self._terminate_at_s = self._kill_at_s = self._killed_s = math.inf
        self._straggler_watch = None

    def _drain(self) -> None:
        """Read the last output; while its reader is slow, it has time."""
        until_s = time.monotonic() + _DRAIN_S

        def is_draining() -> bool:
            nonlocal until_s
            now_s = time.monotonic()
            if self._loop.is_full and not self._interrupted:
                until_s = now_s + _DRAIN_S
            return self._loop.has_input and now_s < until_s

        self._watch(is_draining, poll_s=_DRAIN_S)

    def _flush(self) -> None:
        """Wait until the output is written; a slow reader has time, a signal ends the wait."""
        self._without_deadlines()

        def is_parting() -> bool:
            return bool(self._loop.writes) or self._launchers.is_waiting

        self._watch(lambda: is_parting() and not self._interrupted)
        if self._interrupted:
            self._watch(is_parting, time.monotonic() + _TAKE_S)


def _without_files(cause: Cause) -> Cause:
    """Return a cause without what the files of its process would show: they were removed."""
    lines = tuple(line for line in cause.words if line != NOT_RECORDED)
    return dataclasses.replace(cause, log="", words=lines)
