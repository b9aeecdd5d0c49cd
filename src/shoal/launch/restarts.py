"""The rules by which a job that has ended is started again, as a pure state machine."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable

from shoal.launch.conclusion import Conclusion
from shoal.launch.job import Job
from shoal.launch.launchers import Judge, Launchers
from shoal.launch.loop import Console
from shoal.launch.order import JobOrder, Restarts
from shoal.launch.services import EarlyServices
from shoal.runtime.failures.facts import JobFailure
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.process_status import kill_all
from shoal.runtime.system.progress_file import StepProgress

MOST_IDLE = 3  # failures without progress between them


class RestartRules:
    """Judges the attempts of a job, in order.

    >>> rules = RestartRules(Restarts(1, False))
    >>> rules.judge(Conclusion(1), StepProgress(step=4), 0).again
    True
    >>> rules.judge(Conclusion(1), StepProgress(step=9), 1).again
    False
    """

    def __init__(self, restarts: Restarts | None) -> None:
        """`restarts`: None: one attempt."""
        self._restarts = restarts
        self.attempt = 0  # the number of the running one
        self._failures = 0
        self._idle = 0  # failures since the last progress
        self._progress = StepProgress()
        # The cause and step of the program's latest failure, and the step that was saved by then.
        self._last = ("", -1, -1)
        self._is_alike = False  # the one before it was the same
        self._failure: JobFailure | None = None  # as reported last

    @property
    def is_last(self) -> bool:
        """Return whether no new attempt follows if the running one fails."""
        return self._failures >= self._most

    @property
    def _most(self) -> int:
        """The number of failures after which a new attempt may begin."""
        return 0 if self._restarts is None else self._restarts.most

    def judge(self, conclusion: Conclusion, progress: StepProgress, attempt: int) -> Conclusion:
        """Return how an attempt ended, with whether the next one begins, and why.

        Args:
          conclusion: if it already determines whether the next one begins, that stays.
          progress: by any of its processes.
          attempt: its number, counted by node 0: a launcher that joined later has seen fewer.
        """
        if self._progresses(progress):
            self._idle = 0
        elif _is_own(conclusion):
            self._idle += 1
        self._progress = self._progress.joined(progress)
        if _is_own(conclusion):
            # Of the process that failed: others may have gone further until they were ended.
            failed = (conclusion.cause, conclusion.step, self._progress.saved)
            self._is_alike, self._last = bool(conclusion.cause) and failed == self._last, failed
        self._failures += conclusion.code != REQUEUE
        if conclusion.again is None:
            is_requested = self._is_requested(conclusion)
            refusal = self._refusal(conclusion) if is_requested else ""
            lines = (*conclusion.lines, refusal) if refusal else conclusion.lines
            again = is_requested and not refusal
            next_words = self._next_words(attempt + 1) if again else ""
            if next_words and conclusion.suspicion:
                next_words = f"{next_words}; without the compile cache: {conclusion.suspicion}"
            conclusion = conclusion._replace(again=again, lines=lines, next_words=next_words)
        if conclusion.failure is not None:
            conclusion = conclusion._replace(failure=self._numbered(conclusion.failure, attempt))
        self.attempt = attempt + bool(conclusion.again)
        return conclusion

    def _progresses(self, progress: StepProgress) -> bool:
        """Return whether an attempt has come further than all before it.

        What is saved counts. Until anything is, the steps that have ended do.
        """
        earlier = self._progress
        if max(earlier.saved, progress.saved) >= 0:
            return progress.saved > earlier.saved
        return progress.ended > earlier.ended

    def _numbered(self, failure: JobFailure, attempt: int) -> JobFailure:
        """Return a failure with the number of its attempt, and whether it is the same again."""
        before, self._failure = self._failure, failure
        is_same = before is not None and _shown(before) == _shown(failure)
        return dataclasses.replace(
            failure,
            attempt=attempt + 1,
            attempts=max(self._most, attempt) + 1,
            as_before=is_same and bool(failure.causes),
        )

    def _next_words(self, attempt: int) -> str:
        """Return the line between two restart attempts."""
        count = f"{self._failures} of --max-restarts {self._most}"
        why = count if self._failures else "--restart-preempted"
        return f"attempt {attempt} begins ({why}){self._after()}"

    def _is_requested(self, conclusion: Conclusion) -> bool:
        """Return whether a new attempt is requested; a limit may forbid it."""
        if self._restarts is None or conclusion.is_final or conclusion.code == 0:
            return False
        if conclusion.code == REQUEUE:
            return self._restarts.after_preemption
        return self._most > 0

    def _refusal(self, conclusion: Conclusion) -> str:
        """Return the limit that forbids a requested new attempt; "": none does."""
        if conclusion.remaining:
            return f"No new attempt: SIGKILL has not ended {conclusion.remaining}."
        if conclusion.code != REQUEUE and self._failures > self._most:
            return f"No new attempt: --max-restarts {self._most}."
        if not _is_own(conclusion):
            return ""
        if self._is_alike:
            step = self._last[1]
            when = f"at step {step}" if step >= 0 else "before the first step"
            return f"No new attempt: two failed alike, {conclusion.cause} {when}."
        if self._idle < MOST_IDLE:
            return ""
        refusal = f"No new attempt: a crash loop, {MOST_IDLE} failed"
        if self._progress == StepProgress():
            calls = "shoal.step, shoal.preempted, shoal.preemption.mark_saved"
            return f"{refusal} and noted no step ({calls})."
        return f"{refusal} without progress{self._after()}."

    def _after(self) -> str:
        """Return the progress of the attempts, as text."""
        rows = [("begun", self._progress.step), ("saved", self._progress.saved)]
        known = [f"{name} {step}" for name, step in rows if step >= 0]
        return f"; highest step {', '.join(known)}" if known else ""


def _shown(failure: JobFailure) -> object:
    """Return what a report of a failure shows, without what differs between attempts."""
    causes = [
        (cause.kind, cause.error, cause.frames, cause.difference, cause.signal, cause.words)
        for cause in failure.causes
    ]
    return failure.headline, causes


def _is_own(conclusion: Conclusion) -> bool:
    """Return whether an attempt failed by the program, not by something outside."""
    return conclusion.code != REQUEUE and not conclusion.is_from_outside


# ---- The attempts of a job: until one ends well, or no new one is allowed.
#
# Each attempt is a separate job: its services, its token and its processes are new, and nothing
# of the earlier one survives. Attempts share the console and the signals to the launcher.


_BETWEEN_S = 5.0  # for the rest of an attempt to end

LaunchersOf = Callable[[JobOrder, int, Console, Judge], Launchers]


class Attempts:
    """Runs a job, in a process of its own (`supervisor`), repeatedly if so ordered.

    Args:
      launchers_of: returns the launchers of an attempt, by its number: this one alone, or those of
        all nodes.
    """

    def __init__(self, order: JobOrder, launchers_of: LaunchersOf) -> None:
        self._order, self._launchers_of = order, launchers_of

    def run(self, orders_fd: int) -> int:
        """Run the job to the end of its last attempt; return the exit code of that one."""
        order, console, rules = self._order, Console(), RestartRules(self._order.restarts)
        keeps_logs, early = order.keeps_logs, EarlyServices()
        while True:
            launchers = self._launchers_of(order, rules.attempt, console, rules.judge)
            job = Job(order, rules.attempt, console, launchers, early, is_last=rules.is_last)
            began_s = time.time()
            conclusion = job.run(orders_fd)
            keeps_logs |= conclusion.has_failed
            if not conclusion.again:
                break
            order = order.next(is_announced=conclusion.is_announced)
            if conclusion.suspicion:
                order = order._replace(suspect_since_s=began_s)
            kill_all(within_s=_BETWEEN_S, without=early.pids)
            console.print(conclusion.next_words)
        early.close()
        if not keeps_logs:
            shutil.rmtree(order.log_dir, ignore_errors=True)
        return conclusion.code
