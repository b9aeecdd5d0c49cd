"""Track the collective call in each lane, and allow one waiting thread per lane.

A call meets the others at one point or at several: the first begins it, later ones follow. If an
exception leaves a call and the other processes do not know that it failed (an interrupt, a wrong
argument, a full disk), they would wait in it for a process that never arrives, or take its next
call for this one. So the call is *abandoned*: the coordinator is notified, and it fails for all.
Two threads in one lane would race for the order of its points, so the second is refused. In
a job of one process there is no order to keep, and no process to notify: each thread has the lane.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from shoal.errors import UsageError
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.exception_text import failure_of
from shoal.runtime.rules.messages import Abandoned
from shoal.runtime.rules.point import Point
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.shapes_only import shapes_only

P = ParamSpec("P")
T = TypeVar("T")

_OTHERS = ()  # a call in which no other process waits for this one


class Scope:
    """One collective call of this process, as a context manager around all of it.

    A scope inside another of its lane is a part of that one.
    """

    __slots__ = (
        "arrivals",
        "ends_lane",
        "frame",
        "has_failed",
        "is_arrival",
        "lanes",
        "point",
        "thread",
    )

    def __init__(self, lanes: Lanes, point: Point, frame: FrameType, *, is_arrival: bool) -> None:
        self.lanes = lanes
        self.point = point  # its last point; before that: its name and line
        self.frame: FrameType | None = frame  # the caller's frame
        self.thread = threading.current_thread()
        self.is_arrival = is_arrival  # made for one arrival outside of any scope
        self.arrivals = 0
        self.has_failed = False  # on all members, according to the coordinator
        self.ends_lane = False  # whether this is the last call of this process in its lane

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
        """Acquire the lane for an arrival, until `leave`; return the point as the other processes
        see it, and the number of calls of this lane abandoned before.

        Raises:
          UsageError: another thread of this process waits in the lane.
        """
        self.lanes.take(point)
        try:
            after = self.lanes.count(point.lane)
            follows = self.arrivals > 0 and point.group == self.point.group
            self.point = point._replace(follows=True) if follows else point
            self.arrivals += 1
            self.has_failed = False
        except BaseException:  # an interrupt: this thread does not wait
            self.lanes.give_back(point)
            raise
        return self.point, after

    def leave(self) -> None:
        """Release the lane."""
        self.lanes.give_back(self.point)


class _Count(NamedTuple):
    """The abandoned calls of a lane; replaced as a whole, since an interrupt may hit any line."""

    number: int = 0
    unsent: tuple[Abandoned, ...] = ()  # or not known to be sent
    latest: Scope | None = None


class _Wait(NamedTuple):
    """A thread waiting in a lane."""

    thread: threading.Thread
    frame: FrameType | None  # the frame that releases the lane, unless interrupted there


class Lanes:
    """The lanes of this process: the call in each, and the thread that waits in it, if any.

    Args:
      me: this process.
      report_abandoned: sends an abandoned call to the coordinator. It may be sent twice.
      end_lane: notifies the coordinator that this process makes no more calls in a lane.
    """

    def __init__(
        self,
        me: ThisProcess,
        report_abandoned: Callable[[Abandoned], None],
        end_lane: Callable[[str], None],
    ) -> None:
        self._me = me
        self._report_abandoned = report_abandoned
        self._end_lane = end_lane
        self._lock = threading.RLock()  # a signal handler may make calls of its own
        self._is_alone = len(me.hosts) == 1
        self._busy: dict[object, _Wait] = {}  # by lane, and if alone by thread
        self._calls: dict[object, Scope] = {}  # the same
        self._sent: dict[str, int] = {}  # arrivals, by lane
        self._counts: dict[str, _Count] = {}

    def call(
        self,
        operation: str,
        lane: object,
        processes: object,
        *,
        survivors: bool = False,
        ends_lane: bool = False,
    ) -> Scope:
        """Return the scope of the caller's collective call.

        The call itself reports invalid values of `lane` or `processes`: the scope is then one
        of all processes in the main lane; or of none, if `processes` lists only other processes.
        """
        if not isinstance(lane, str) or not lane:
            lane = "main"
        point = Point(operation, self._group(processes), lane, survivors=survivors)
        scope = Scope(self, point, sys._getframe(2), is_arrival=False)
        scope.ends_lane = ends_lane
        return scope

    def arrival(self, point: Point) -> Scope:
        """Return the scope for one arrival, which is a part of the enclosing call."""
        return Scope(self, point, sys._getframe(1), is_arrival=True)

    def begin(self, scope: Scope) -> Scope:
        """Return the call that is under way in the lane, or else begin this one.

        Raises:
          UsageError: the call under way is another thread's.
        """
        lane, key = scope.point.lane, self._key(scope.point)
        with self._lock:
            outer = self._calls.get(key)
            is_over = outer is not None and _is_over(outer, scope)
            if outer is not None and is_over and not outer.has_failed:
                self._count(outer, "an interrupt at its end")
            if outer is None or is_over:
                self._calls[key] = outer = scope
        if is_over and lane in self._counts:
            self._flush(lane)
        if outer is scope or outer.thread is scope.thread or scope.is_arrival:
            return outer
        raise self._other_thread(scope.point)

    def end(self, scope: Scope, error: BaseException | None) -> None:
        """End a scope; if `error` is unknown to the other processes, notify them."""
        scope.frame = None  # it would keep the call's values alive
        lane, key = scope.point.lane, self._key(scope.point)
        if self._calls.get(key) is not scope:
            return
        unknown_error = None if scope.has_failed else error
        if unknown_error is not None:
            self._count(scope, unknown_error)
        del self._calls[key]  # after an interrupt before this line, the next call counts it
        if unknown_error is not None and lane in self._counts:
            self._flush(lane)
        if scope.ends_lane:
            self._sent.pop(lane, None)
            self._counts.pop(lane, None)
            self._end_lane(lane)

    def take(self, point: Point) -> None:
        """Acquire a lane for a waiting thread.

        Raises:
          UsageError: another thread waits in it.
        """
        key = self._key(point)
        wait = _Wait(threading.current_thread(), sys._getframe(2))
        with self._lock:
            busy = self._busy.get(key)
            if busy is not None and not _is_over(busy, wait):
                raise self._other_thread(point)
            self._busy[key] = wait

    def count(self, lane: str) -> int:
        """Count an arrival; return the number of calls of the lane abandoned before."""
        if lane in self._counts:
            self._flush(lane)
        self._sent[lane] = self._sent.get(lane, 0) + 1
        return self._counts[lane].number if lane in self._counts else 0

    def give_back(self, point: Point) -> None:
        """Release a lane after a wait."""
        self._busy.pop(self._key(point), None)

    def _key(self, point: Point) -> object:
        return (point.lane, threading.get_ident()) if self._is_alone else point.lane

    def _count(self, scope: Scope, why: BaseException | str) -> None:
        """Count an abandoned call, once."""
        lane = scope.point.lane
        earlier, unsent, latest = self._counts.get(lane, _Count())
        if self._is_alone or latest is scope or scope.point.group == _OTHERS:
            return
        point = scope.point if scope.point.site else scope.point._replace(site=callsite())
        reason = why if isinstance(why, str) else failure_of(why, point.site).headline
        left = Abandoned(
            point, scope.arrivals, sent=self._sent.get(lane, 0), number=earlier + 1, words=reason
        )
        self._counts[lane] = _Count(earlier + 1, (*unsent, left), scope)

    def _flush(self, lane: str) -> None:
        for left in self._counts[lane].unsent:
            self._report_abandoned(left)
        self._counts[lane] = self._counts[lane]._replace(unsent=())

    def _group(self, processes: object) -> tuple[int, ...] | None:
        if not isinstance(processes, Collection):  # `collective_scope` has expanded other iterables
            return None
        try:
            members = sorted({operator.index(p) for p in processes})
        except Exception:  # noqa: BLE001 - no list of processes: the call itself will raise
            return None
        count = len(self._me.hosts)
        if not members or members[0] < 0 or members[-1] >= count:
            return None
        if self._me.process not in members:
            return _OTHERS
        return tuple(members) if len(members) < count else None

    def _other_thread(self, point: Point) -> UsageError:
        return UsageError(
            f"{self._me}: {point.name!r} ({point.site or callsite()}): another thread waits in lane"
            f" {point.lane!r}; pass a lane= of its own in each thread that synchronizes with other "
            "processes, for example to barrier, save or restore"
        )


def collective_scope(
    operation: str,
    *,
    of: Callable[..., Any] | None = None,
    among: Callable[..., Collection[int] | None] | None = None,
    survivors: bool = False,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function of (client, …, lane=, processes=) that is one collective call.

    Whatever leaves it that not all members get fails the call for the others, also if Python
    refuses the arguments, or the processes cannot be read.

    Args:
      operation: the name of the call in messages.
      of: maps its arguments to the job client (None: a process that has joined no job); by
        default that is the first of them.
      among: maps its arguments to its processes; by default that is the argument `processes`.
      survivors: whether survivors of a loss meet there.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = [*inspect.signature(function).parameters]
        has_lane, has_list = "lane" in names, "processes" in names
        place = names.index("processes") if has_list else len(names)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            if shapes_only():  # before it counts as a call: not all processes may come so far
                raise UsageError(f"{operation}: not while `init` is traced for its shapes")
            client = args[0] if of is None else of(*args, **kwargs)
            if client is None:
                return function(*args, **kwargs)
            lane, processes = kwargs.get("lane", "main") if has_lane else "main", None
            try:
                if has_list and "processes" in kwargs:
                    processes = kwargs["processes"] = _expanded(kwargs["processes"])
                elif has_list and len(args) > place:
                    processes = _expanded(args[place])
                    args = (*args[:place], processes, *args[place + 1 :])
                if among is not None:
                    processes = among(*args, **kwargs)
            except BaseException:
                with client.call(operation, lane, survivors=survivors):
                    raise
            with client.call(operation, lane, processes, survivors=survivors):
                return function(*args, **kwargs)

        call.fails_for_all = True  # type: ignore[attr-defined]
        return cast(Callable[P, T], call)

    return decorate


def refused_for_all(fail: Callable[..., object]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that begins its call itself: `fail` is called if Python refuses it.

    Args:
      fail: a function of the exception and of the arguments, which calls `fail_call` if processes
        would have met.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                trace = error.__traceback__
                if trace is not None and trace.tb_next is None:  # its first line was not reached
                    with contextlib.suppress(Exception):  # whose call it is cannot be known
                        fail(error, *args, **kwargs)
                raise

        call.fails_for_all = True  # type: ignore[attr-defined]
        return call

    return decorate


def fail_call(
    client: Any,
    operation: str,
    error: BaseException,
    *,
    lane: object = "main",
    processes: Collection[int] | None = None,
    survivors: bool = False,
) -> None:
    """Fail a call for the others that this process leaves before it has begun it."""
    scope = client.call(operation, lane, processes, survivors=survivors)
    scope.__enter__()
    scope.__exit__(type(error), error, error.__traceback__)


def _expanded(processes: Any) -> Any:
    """Return the processes as a tuple, if they are a list of any kind: it may be read only once."""
    if isinstance(processes, tuple | str) or not isinstance(processes, Iterable):
        return processes
    return tuple(processes)


def _is_over(earlier: Scope | _Wait, new: Scope | _Wait) -> bool:
    """Return whether a recorded call or wait has ended without being removed from the record.

    That is so if its thread is dead, or if an interrupt hit between its end and its removal: then
    its frame is no longer on this thread's stack, or was already set to None by `Lanes.end`.
    """
    if earlier.thread is not new.thread:
        return not earlier.thread.is_alive()
    frame = new.frame
    while frame is not None and frame is not earlier.frame:
        frame = frame.f_back
    return frame is None
