"""Processes whose programs have ended in order: their calls are compared before they leave.

They are compared as far as both go: a signal, or Ctrl-C, may have ended a program anywhere, and it
need not say so. `shutdown` compares their number, too.

A process waits for the others, which most likely end at the same time, but no longer than a second:
one that ends later finds what it left here. After a loss nothing more is compared: it may have
ended the calls of a process anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting_answers import EndsCompared
from shoal.runtime.rules.trail_marks import (
    UNKNOWN,
    EndedTrails,
    Found,
    LatestMarks,
    TrailMarks,
    last_mark,
)

To = TypeVar("To", bound=Hashable)

AT_END = "the end of the program"
WAIT_S = 1.0


class _WaitingToLeave(NamedTuple, Generic[To]):
    """A process that has ended, and waits for the differences."""

    to: To
    ticket: int
    trails: list[TrailMarks]


class _MainLines(NamedTuple):
    """The calls that a process had made in its main line when its program ended."""

    base: str  # of groups for which it made none
    calls: dict[tuple[int, ...] | None, tuple[str, str]]  # by group: base and mark, or UNKNOWN

    def mark(self, group: tuple[int, ...] | None, base: str) -> str:
        """Return the mark of its calls since this base; UNKNOWN if they are not compared."""
        own, mark = self.calls.get(group, (self.base, ""))
        return mark if own == base else UNKNOWN


class Endings(Generic[To]):
    """The programs of a job that have ended in order; `to` is any address for the answers."""

    def __init__(self, num_processes: int, marks: LatestMarks) -> None:
        """`marks` are those of the heartbeats, which take those of processes that have ended."""
        self.deadline = math.inf  # of the processes that wait
        self._marks = marks
        self._all = range(num_processes)
        self._running = {*self._all}
        self._main_lines: dict[int, _MainLines] = {}
        self._waiting: dict[int, _WaitingToLeave[To]] = {}
        self._before_loss: list[Found] | None = None  # the differences known then; None: no loss

    def end(self, now: float, process: int, ended: EndedTrails, to: To, ticket: int) -> None:
        """Take the trails of a process whose program has ended."""
        marks = {
            one.group: (one.base, UNKNOWN if one.marks == UNKNOWN else last_mark(one.marks))
            for one in ended.trails
            if one.lane == "main"
        }
        self._main_lines[process] = _MainLines(ended.base, marks)
        trails = [one for one in ended.trails if one.marks != UNKNOWN]
        self._waiting[process] = _WaitingToLeave(to, ticket, trails)
        self._running.discard(process)
        self.deadline = min(self.deadline, now + WAIT_S)

    def depart(self, process: int, *, is_lost: bool) -> None:
        """Record that a process is gone, and that it is lost or has failed."""
        self._running.discard(process)
        self._waiting.pop(process, None)
        if is_lost:
            self.lose()

    def lose(self) -> None:
        """Record the loss of a process, or of a service that all of them need."""
        if self._before_loss is None:
            self._before_loss = [*self._marks.found.values()]

    def answer(self, now: float) -> tuple[list[Found], list[Reply[To]]]:
        """Return the differences that are new, and the answers that are now due."""
        known, marks, new = self._before_loss, self._marks, list[Found]()
        is_due = known is not None or not self._running or now >= self.deadline
        if not (self._waiting and is_due):
            return [], []
        waiting, self._waiting, self.deadline = self._waiting, {}, math.inf
        if known is None:
            is_even = not self._running and self._are_even()  # most are: see `receive`
            for process, one in waiting.items():
                trails = (t for t in one.trails if t.lane != "main" or not is_even)
                new += filter(None, [marks.receive(process, trail) for trail in trails])
            known = [*marks.found.values()]
        of_all = [found for found in known if found.group is None]
        of_some: dict[int, list[Found]] = {}
        for found in known:
            for process in found.group or ():
                of_some.setdefault(process, of_all[:]).append(found)
        same = EndsCompared(of_all)  # one object, which is sent to most
        return new, [
            Reply(to, ticket, EndsCompared(of_some[process]) if process in of_some else same)
            for process, (to, ticket, _) in waiting.items()
        ]

    def _are_even(self) -> bool:
        """Return whether the processes that have ended made equal calls in their main lines."""
        lines = self._main_lines
        keys = {
            (group, base): None
            for line in lines.values()
            for group, (base, mark) in line.calls.items()
            if mark != UNKNOWN
        }
        for group, base in keys:
            members = (p for p in (self._all if group is None else group) if p in lines)
            if len({lines[process].mark(group, base) for process in members} - {UNKNOWN}) > 1:
                return False
        return True
