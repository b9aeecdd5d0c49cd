"""Which process reports the failure of its job, where no launcher of shoal does.

A process that ends with a failure asks whether it is to report. The lowest that lives is named: it
is asked whether it is there, which its watcher thread answers whatever its program does. If it does
not confirm within 0.5 s, or is gone, the lowest that has asked is named. All are answered then. The
process that is named may go on without the others: then there is no failure to report.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

To = TypeVar("To", bound=Hashable)

CONFIRMS_S = 0.5  # how long the lowest process may take to confirm


class Named(NamedTuple, Generic[To]):
    """An answer: whether the process that asked is to report."""

    to: To
    ticket: int
    reports: bool


class Reporting(Generic[To]):
    """The choice of the process that reports one failure.

    >>> reporting = Reporting()
    >>> reporting.ask(0.0, 2, "c", 7, living=[1, 2])
    []
    >>> reporting.expected  # it is to be asked now
    1
    >>> reporting.confirm(1)
    [Named(to='c', ticket=7, reports=False)]
    """

    def __init__(self) -> None:
        self._asked: dict[int, tuple[To, int]] = {}  # and have no answer yet
        self._named: int | None = None
        self._has_asked = False  # the process that is named
        self.expected: int | None = None  # the lowest process that lives
        self.deadline = math.inf  # at which `tick` must be called

    def ask(
        self,
        now: float,
        process: int,
        to: To,
        ticket: int,
        living: Collection[int],
        *,
        waits: bool = True,
    ) -> list[Named[To]]:
        """Take the question of a process; return the answers now due.

        Args:
          living: the processes that may report.
          waits: whether it waits until a lower one has confirmed; one that has raised the error
            does not, since it has printed its traceback.
        """
        if self._named is None:
            lowest = min([process, *living]) if self.expected is None else self.expected
            if lowest != process and not waits:
                return [Named(to, ticket, False)]
            if self.expected is None:
                self.expected, self.deadline = lowest, now + CONFIRMS_S
        self._asked[process] = to, ticket
        return self.confirm(process) if self._named is None else self._answer()

    def confirm(self, process: int) -> list[Named[To]]:
        """Take the answer of the process that is expected; return the answers now due."""
        if self._named is None and process == self.expected:
            self._named = process
            return self._answer()
        return []

    def lose(self, process: int) -> list[Named[To]]:
        """Handle the end of a process; return the answers now due."""
        self._asked.pop(process, None)
        if process != self.expected or self._has_asked:
            return []
        self._named = self.expected = None
        return self._choose()

    def tick(self, now: float) -> list[Named[To]]:
        """Return the answers due at this time."""
        return self._choose() if now >= self.deadline else []

    def _choose(self) -> list[Named[To]]:
        """Name the lowest process that has asked, unless one is named."""
        if self._named is None and self._asked:
            self._named = self.expected = min(self._asked)
        return self._answer()

    def _answer(self) -> list[Named[To]]:
        asked, self._asked, self.deadline = self._asked, {}, math.inf
        self._has_asked |= self._named in asked
        return [Named(*who, process == self._named) for process, who in asked.items()]
