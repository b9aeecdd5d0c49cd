"""Processes that outlive others: lost to them, or merely slower.

A process may rightly work longer than the others, or save after them: slow processes are never
ended. But a job must not wait silently, nor, once the others have ended, for a process that they
have lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.launch.news import News
from shoal.launch.processes import ChildProcess, Processes
from shoal.runtime.system.failure_words import listed
from shoal.runtime.system.process_status import is_stopped

_LATE_NEWS_S = 1.0  # news of a process may arrive after its end
_LINES = 8


class _Look(NamedTuple):
    """The result of a check, and the time of the next one."""

    lost: Sequence[ChildProcess] = ()  # still alive, but lost to the others
    lines: Sequence[str] = ()  # to be printed
    due_s: float = math.inf


class Outliving:
    """Checks the processes that live while others are gone.

    Args:
      num_processes: of the whole job, those of other hosts included.
      warn_after_s: after this long since the end of the others, the running ones are listed, once.
      lost_after_s: how long a process may live after its connection to the meeting place ended; a
        process that is about to end closes it first.
    """

    def __init__(
        self,
        processes: Processes,
        news: News,
        *,
        num_processes: int,
        warn_after_s: float,
        lost_after_s: float,
    ) -> None:
        self._processes, self._news = processes, news
        self._num_processes = num_processes
        self._warn_after_s, self._lost_after_s = warn_after_s, lost_after_s
        self._has_warned = False
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
        later = [at_s for at_s in (*lost_s.values(), absent_s, longer_s) if at_s > now_s]
        return _Look(lost, [*absent, *longer], min(later, default=math.inf))

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

    def _longer_lines(self, now_s: float) -> tuple[list[str], float]:
        """List the running processes, once, if most have ended a while ago."""
        alive = self._processes.alive
        ended = [process.ended_s for process in self._processes.all if process.code is not None]
        if self._has_warned or len(alive) > len(ended):
            return [], math.inf
        due_s = max(ended) + self._warn_after_s
        if due_s > now_s:
            return [], due_s
        self._has_warned = True
        after_s = f"{now_s - max(ended):.0f} s after the others ended"
        lines = [
            f"process {process.index} (pid {process.popen.pid}) still runs, {after_s}: "
            + self._standing(process)
            for process in alive[:_LINES]
        ]
        more = len(alive) - len(lines)
        return [*lines, *([f"and {more} more"] if more else [])], math.inf

    def _standing(self, process: ChildProcess) -> str:
        gone = self._news.gone.get(process.index)
        if is_stopped(process.popen.pid):
            return f"it is stopped by a signal; `kill -CONT {process.popen.pid}` resumes it"
        if gone is not None:
            words = {"left": "it has left the job", "failed": "it reported a failure to the others"}
            return words.get(gone.state, f"the others have lost it ({gone.words})")
        if process.index not in self._news.joined:
            return "it has not joined the job"
        return "`shoal stacks` shows its stacks"
