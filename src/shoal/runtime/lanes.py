"""The collective call that this process is in, in each lane, from its first line to its last.

A call meets the others at one point or at several: the first begins it, later ones follow. If an
exception leaves a call of which the others do not know that it failed (an interrupt, a wrong
argument, a full disk), they would wait in it for a process that never comes, or take its next call
for this one. So the call is *abandoned*: the meeting place is told, and it fails for all.

One thread at a time waits in a lane: else the order of its points would be left to chance.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from shoal.errors import UsageError
from shoal.runtime.callsite import callsite
from shoal.runtime.failure_words import failure_of
from shoal.runtime.messages import Abandoned
from shoal.runtime.points import Point
from shoal.runtime.verdicts import Self

__all__ = ["Lanes", "Scope", "one_call"]

P = ParamSpec("P")
T = TypeVar("T")


class Scope:
    """One collective call of this process: a context around all of it.

    A scope within another of its lane is a part of that one.
    """

    __slots__ = ("arrivals", "frame", "has_failed", "is_arrival", "lanes", "point", "thread")

    def __init__(self, lanes: Lanes, point: Point, frame: FrameType, *, is_arrival: bool) -> None:
        self.lanes = lanes
        self.point = point  # the last one of it; before that: what it is called, and its line
        self.frame: FrameType | None = frame  # whose call it is
        self.thread = threading.current_thread()
        self.is_arrival = is_arrival  # made for one arrival outside of any scope
        self.arrivals = 0
        self.has_failed = False  # on all members, as the meeting place said

    def __enter__(self) -> Scope:
        return self.lanes.begin(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lanes.end(self, error)

    def enter(self, point: Point) -> tuple[Point, int]:
        """Take the lane for an arrival, until `leave`; return the point as the others see it, and
        how many calls of this lane were abandoned before.

        Raises:
          UsageError: another thread of this process waits in the lane.
        """
        after = self.lanes.take(point)
        follows = self.arrivals > 0 and point.group == self.point.group
        self.point = point._replace(follows=True) if follows else point
        self.arrivals += 1
        self.has_failed = False
        return self.point, after

    def leave(self) -> None:
        """Give the lane back."""
        self.lanes.give_back(self.point)


class _Count(NamedTuple):
    """What was abandoned in a lane; replaced as a whole, for an interrupt may come at any time."""

    number: int = 0
    unsent: tuple[Abandoned, ...] = ()  # or not known to be sent


class Lanes:
    """The lanes of this process: the call in each, and whether a thread waits in it now.

    Args:
      me: this process.
      tell: sends one abandoned call to the meeting place. It may be sent twice.
    """

    def __init__(self, me: Self, tell: Callable[[Abandoned], None]) -> None:
        self._me = me
        self._tell = tell
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._calls: dict[str, Scope] = {}
        self._sent: dict[str, int] = {}  # arrivals, by lane
        self._counts: dict[str, _Count] = {}

    def call(
        self, operation: str, lane: object, processes: object, *, survivors: bool = False
    ) -> Scope:
        """Return the scope of the caller's collective call.

        What is wrong with `lane` or `processes` is for the call to say: it then counts as one of
        all processes in the main lane.
        """
        lane = lane if isinstance(lane, str) and lane else "main"
        point = Point(operation, self._group(processes), lane, survivors=survivors)
        return Scope(self, point, sys._getframe(2), is_arrival=False)

    def arrival(self, point: Point) -> Scope:
        """Return the scope for one arrival, which is a part of the call that it is made in."""
        return Scope(self, point, sys._getframe(1), is_arrival=True)

    def begin(self, scope: Scope) -> Scope:
        """Return the call that is under way in the lane, or else let this one begin.

        Raises:
          UsageError: it is the call of another thread.
        """
        lane = scope.point.lane
        with self._lock:
            outer = self._calls.get(lane)
            if outer is None or _is_over(outer, scope):
                self._calls[lane] = scope
                return scope
        if outer.thread is scope.thread or scope.is_arrival:
            return outer
        raise self._other_thread(scope.point)

    def end(self, scope: Scope, error: BaseException | None) -> None:
        """A scope ends; if `error` leaves it that the others do not know of, tell them."""
        scope.frame = None  # it would keep the values of the call
        lane = scope.point.lane
        if self._calls.get(lane) is not scope:
            return
        del self._calls[lane]
        if error is None or scope.has_failed:
            return
        number, unsent = self._counts.get(lane, _Count())
        point = scope.point if scope.point.site else scope.point._replace(site=callsite())
        words = failure_of(error, point.site).headline
        left = Abandoned(point, scope.arrivals, self._sent.get(lane, 0), number + 1, words)
        self._counts[lane] = _Count(number + 1, (*unsent, left))
        self._flush(lane)

    def take(self, point: Point) -> int:
        """Let a thread wait in a lane; return how many calls were abandoned there.

        Raises:
          UsageError: another one waits in it.
        """
        lane = point.lane
        with self._lock:
            if lane in self._busy:
                raise self._other_thread(point)
            self._busy.add(lane)
        if lane in self._counts:
            self._flush(lane)
        self._sent[lane] = self._sent.get(lane, 0) + 1
        return self._counts[lane].number if lane in self._counts else 0

    def give_back(self, point: Point) -> None:
        """The wait is over."""
        self._busy.discard(point.lane)

    def _flush(self, lane: str) -> None:
        number, unsent = self._counts[lane]
        for left in unsent:
            self._tell(left)
        self._counts[lane] = _Count(number)

    def _group(self, processes: object) -> tuple[int, ...] | None:
        if not isinstance(processes, Collection):  # an iterator is the call's to read
            return None
        everybody = range(len(self._me.hosts))
        is_group = all(hasattr(p, "__index__") and p in everybody for p in processes)
        if not is_group or self._me.process not in processes:
            return None
        members = sorted({operator.index(p) for p in processes})
        return tuple(members) if len(members) < len(everybody) else None

    def _other_thread(self, point: Point) -> UsageError:
        return UsageError(
            f"{self._me}: {point.name!r} ({point.site or callsite()}): another thread waits in lane"
            f" {point.lane!r}; give each thread that meets others a lane of its own"
        )


def one_call(operation: str, *, survivors: bool = False) -> Callable[..., Any]:
    """Decorate a function of (coordinator, …, lane=, processes=) that is one collective call.

    If an exception leaves it that not all members get, the call fails for the others.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            coordinator: Any = args[0]
            lane, processes = kwargs.get("lane", "main"), kwargs.get("processes")
            with coordinator.call(operation, lane, processes, survivors=survivors):
                return function(*args, **kwargs)

        return call

    return decorate


def _is_over(outer: Scope, scope: Scope) -> bool:
    """Has an interrupt come between the end of a call and the word of it?"""
    if outer.thread is not scope.thread:
        return not outer.thread.is_alive()
    frame = scope.frame
    while frame is not None and frame is not outer.frame:
        frame = frame.f_back
    return frame is None
