"""Processes whose programs have ended in order: their calls are compared before they leave.

They are compared as far as both go: a signal, or Ctrl-C, may have ended a program anywhere, and it
need not say so. `shutdown` compares their number, too.

A process waits for the others, which most likely end at the same time, but no longer than a second:
one that ends later finds what it left here. After a loss nothing more is compared: it may have
ended the calls of a process anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting_answers import EndsCompared
from shoal.runtime.rules.record_marks import Found, LatestMarks, RecordMarks

To = TypeVar("To", bound=Hashable)

AT_END = "the end of the program"
WAIT_S = 1.0


class _WaitingToLeave(NamedTuple, Generic[To]):
    """A process that has ended, and waits for the differences."""

    to: To
    ticket: int
    call_records: Sequence[RecordMarks]


class Endings(Generic[To]):
    """The programs of a job that have ended in order; `to` is any address for the answers."""

    def __init__(self, num_processes: int, marks: LatestMarks) -> None:
        """`marks` are those of the heartbeats, which take those of processes that have ended."""
        self.deadline = math.inf  # of the processes that wait
        self._marks = marks
        self._all = range(num_processes)
        self._running = {*self._all}
        # By group: how the main lines of processes that have ended begin and end; mostly alike.
        self._main_lines: dict[tuple[int, ...] | None, set[tuple[str, str]]] = {}
        self._waiting: dict[int, _WaitingToLeave[To]] = {}
        self._before_loss: list[Found] | None = None  # the differences known then; None: no loss

    def end(
        self, now: float, process: int, call_records: Sequence[RecordMarks], to: To, ticket: int
    ) -> None:
        """Take the call records of a process whose program has ended."""
        for call_record in call_records:
            if call_record.lane == "main":
                last_mark = call_record.marks.rpartition(" ")[2]
                self._main_lines.setdefault(call_record.group, set()).add(
                    (call_record.base, last_mark)
                )
        self._waiting[process] = _WaitingToLeave(to, ticket, call_records)
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
            # To compare each mark would take seconds in a job of 10,000.
            is_alike = all(len(ends) == 1 for ends in self._main_lines.values())
            is_even = is_alike and not self._running
            for process, ending in waiting.items():
                call_records = (t for t in ending.call_records if t.lane != "main" or not is_even)
                new += filter(
                    None, [marks.receive(process, call_record) for call_record in call_records]
                )
            known = [*marks.found.values()]
        of_all = [difference for difference in known if difference.group is None]
        of_some: dict[int, list[Found]] = {}
        for difference in known:
            for process in difference.group or ():
                of_some.setdefault(process, of_all[:]).append(difference)
        same = EndsCompared(of_all)  # one object, which is sent to most
        return new, [
            Reply(to, ticket, EndsCompared(of_some[process]) if process in of_some else same)
            for process, (to, ticket, _) in waiting.items()
        ]
