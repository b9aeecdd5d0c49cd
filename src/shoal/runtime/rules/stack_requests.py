"""Stack requests under way: which processes have yet to answer. Pure rules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Generic, TypeVar

from shoal.runtime.wire.frames import FrameError

About = TypeVar("About")

_MOST_CHARACTERS = 64 << 10  # of one answer
_MOST_TOGETHER = 64 << 20  # of all answers to one request


class StackRequest(Generic[About]):
    """One stack request: the processes that have yet to answer, and the answers so far."""

    def __init__(self, about: About, processes: list[int], limit: float) -> None:
        self.about = about
        self.limit = limit
        self.stacks: dict[int, str] = {}
        self.awaited = set(processes)
        self._most = min(_MOST_CHARACTERS, _MOST_TOGETHER // max(1, len(processes)))

    def take(self, process: int, text: str) -> None:
        """Take the answer of a process; only its first counts."""
        if process in self.awaited:
            self.awaited.discard(process)
            self.stacks[process] = text[: self._most]


class StackRequests(Generic[About]):
    """All stack requests under way, by ticket."""

    def __init__(self) -> None:
        self._open: dict[int, StackRequest[About]] = {}
        self._tickets = 0
        self.to_send: list[tuple[int, int]] = []  # (ticket, process); the sender clears it

    @property
    def next_deadline(self) -> float:
        """The time at which `tick` must be called."""
        return min((request.limit for request in self._open.values()), default=math.inf)

    def add(self, about: About, processes: Iterable[int], limit: float) -> int:
        """Add a request; return its ticket."""
        targets = list(processes)
        self._tickets += 1
        self._open[self._tickets] = StackRequest(about, targets, limit)
        self.to_send += [(self._tickets, process) for process in targets]
        return self._tickets

    def take(self, ticket: int | None) -> dict[int, str]:
        """End a request, if it is under way; return the answers so far."""
        request = None if ticket is None else self._open.pop(ticket, None)
        return request.stacks if request else {}

    def receive(self, process: int, ticket: int, text: str) -> StackRequest[About] | None:
        """Take an answer; return the request if it was the last one, which ends it.

        Raises:
          FrameError: there was no such request.
        """
        if not 1 <= ticket <= self._tickets:
            raise FrameError(f"an answer to request {ticket}, which was never sent")
        request = self._open.get(ticket)
        if request is None:
            return None  # the request is over
        request.take(process, text)
        return None if request.awaited else self._open.pop(ticket)

    def forget(self, process: int) -> list[StackRequest[About]]:
        """Expect no more answers of a process; return the requests that this ends."""
        for request in self._open.values():
            request.awaited.discard(process)
        done = [ticket for ticket, request in self._open.items() if not request.awaited]
        return [self._open.pop(ticket) for ticket in done]

    def tick(self, now: float) -> list[StackRequest[About]]:
        """Return the requests whose time is over."""
        done = [ticket for ticket, request in self._open.items() if request.limit <= now]
        return [self._open.pop(ticket) for ticket in done]
