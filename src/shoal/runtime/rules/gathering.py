"""One meeting of one line, and its answers: the parts of `meeting.Meeting`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.runtime.rules.first_difference import excerpts
from shoal.runtime.rules.meeting_answers import (
    MOST_TEXT,
    Answer,
    CallLeft,
    CycleSide,
    MeetingSide,
    Outcome,
    SidesDiffer,
    TrailsApart,
    WaitCycle,
    group_text,
)
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.trail_marks import SharedMarks, trail_versions, trails_differ

To = TypeVar("To", bound=Hashable)


class Reply(NamedTuple, Generic[To]):
    """An answer and its destination: the `to` and `ticket` of the arrival."""

    to: To
    ticket: int
    answer: Answer


class WaitingProcess(NamedTuple, Generic[To]):
    """One waiting process."""

    to: To
    ticket: int
    point: Point
    payload: bytes
    since: float


Waits = Mapping[int, WaitingProcess[To]]  # by process


class Gathering(Generic[To]):
    """One meeting of a line: open while `answer` is None, afterwards a tombstone."""

    __slots__ = (
        "alike",
        "answer",
        "arrived",
        "call",
        "deadline",
        "follows",
        "late",
        "left",
        "limit",
        "line",
        "marks",
        "number",
        "opener",
        "restarts",
        "stack_request",
        "survivors",
        "unanswered",
    )

    def __init__(self, line: Line[To], point: Point) -> None:
        self.line = line
        self.survivors = point.survivors  # whether lost processes are not waited for
        self.follows = point.follows  # whether it is a later point of a call
        self.restarts = point.survivors  # whether a survivor has arrived
        self.alike: list[Gathering[To]] = []  # all gatherings that ended together with it
        # Members that arrived and have left the call since: the reason, and the next gathering's
        self.left: dict[int, tuple[Outcome, int]] = {}
        # Members for which it is the next only under its own name; see `lines`
        self.late: set[int] = set()
        self.call: Point | None = None  # once it has failed: where the first had arrived
        self.number = 0  # in order of opening
        self.opener = -1  # the process for which it was opened
        self.arrived: dict[int, WaitingProcess[To]] = {}
        self.answer: Outcome | None = None
        self.unanswered: set[int] = set()  # living members that have yet to be answered
        self.deadline = math.inf
        self.limit = (-1, math.inf)  # the process with that deadline, and its time-out in seconds
        self.marks = SharedMarks()  # the marks of the trails of other lanes
        self.stack_request: int | None = None  # past the deadline: the ticket of the stack request

    def expects(self, process: int) -> bool:
        """Return whether the next arrival of this process is for this gathering."""
        return process in self.unanswered if self.answer else process not in self.arrived

    @property
    def points(self) -> dict[int, Point]:
        """Where each process that waits here has arrived."""
        return {process: wait.point for process, wait in self.arrived.items()}

    def is_elsewhere(self, point: Point) -> bool:
        """Return whether the call here, which has failed or is under way, is another one."""
        call = self.call
        if call is None and self.arrived:
            call = next(iter(self.arrived.values())).point
        return call is not None and compared_fields(call) != compared_fields(point)

    def begin_again(self) -> None:
        """Remove those that wait here, with their deadlines and trails."""
        self.arrived, self.marks, self.stack_request = {}, SharedMarks(), None
        self.deadline, self.limit = math.inf, (-1, math.inf)

    def missing(self, gone: Container[int]) -> list[int]:
        """Return the members that have not arrived."""
        away = [p for p in self.line.members if p not in self.arrived]
        return [p for p in away if p not in gone] if self.survivors else away


class Line(Generic[To]):
    """The gatherings of one group in one lane, oldest first, as long as any is owed."""

    __slots__ = ("gatherings", "key", "lane", "members")

    def __init__(self, key: tuple[tuple[int, ...] | None, str], all_processes: range) -> None:
        group, self.lane = self.key = key
        self.members: Collection[int] = all_processes if group is None else dict.fromkeys(group)
        self.gatherings: deque[Gathering[To]] = deque()


def find_cycle(
    process: int,
    start: Gathering[To],
    waiting: Collection[Gathering[To]],
    waits_at: Callable[[int], Gathering[To] | None],
    gone: Container[int],
) -> list[Gathering[To]]:
    """Return the gatherings of a lane that wait for each other since `process` arrived at `start`.

    A lane is one line of execution: a process that waits at one gathering cannot arrive at another.
    So gathering a waits for b if a member that a misses waits at b. A new cycle must lead through
    `process`: to some gathering that misses it.

    Args:
      waiting: all open gatherings of the lane.
      waits_at: the gathering at which a process waits in this lane.
    """
    # Two quick checks that there is none; small groups are many, large ones few.
    if len(start.line.members) < len(waiting) and not any(map(waits_at, start.missing(gone))):
        return []
    goals = {
        g
        for g in waiting
        if g is not start and process in g.line.members and process not in g.arrived
    }
    if not goals:
        return []

    def awaited(gathering: Gathering[To]) -> Iterator[Gathering[To]]:
        for missing in gathering.missing(gone):
            other = waits_at(missing)
            if other is not None:
                yield other

    path: list[Gathering[To]] = [start]
    branches: list[Iterator[Gathering[To]]] = [awaited(start)]
    seen = {start}
    while branches:
        step = next(branches[-1], None)
        if step is None:
            branches.pop()
            path.pop()
        elif step not in seen:
            seen.add(step)
            path.append(step)
            if step in goals:
                return path
            branches.append(awaited(step))
    return []


def compared_fields(point: Point) -> tuple[str, str, bool]:
    """Return the fields that must be equal."""
    return point.name, point.fingerprint, point.survivors


def differ(one: Point, other: Point) -> bool:
    """Return whether two arrivals at one gathering differ."""
    return compared_fields(one) != compared_fields(other) or trails_differ(one.trail, other.trail)


def divergence(points: Mapping[int, Point]) -> SidesDiffer | TrailsApart:
    """Group the arrivals by their point; the first arrival of each side represents it.

    Args:
      points: where each process has arrived.

    The answer is sent at the first arrival that differs, so there are two sides. If trails differ,
    the answer is about them: the earlier calls are the cause.
    """
    found = trail_versions(points.items())
    return TrailsApart(found) if found else sides_of(points)


def sides_of(points: Mapping[int, Point]) -> SidesDiffer:
    """Group the arrivals by their point, whatever their trails."""
    sides: dict[tuple[str, str, bool], tuple[Point, list[int]]] = {}
    for process, point in points.items():
        sides.setdefault(compared_fields(point), (point, []))[1].append(process)
    rows = sorted((sorted(processes), point) for point, processes in sides.values())
    names = excerpts([point.name for _, point in rows])
    return SidesDiffer([
        MeetingSide(name, point.fingerprint[:MOST_TEXT], point.site[:MOST_TEXT], processes)
        for name, (processes, point) in zip(names, rows, strict=True)
    ])  # fmt: skip


def cycle_of(cycle: list[Gathering[Any]], gone: Container[int], num_processes: int) -> WaitCycle:
    """Return the sides of a cycle: which processes wait where, and for which."""
    sides = []
    for gathering in cycle:
        point = next(iter(gathering.arrived.values())).point
        name, fingerprint, site = (
            text[:MOST_TEXT] for text in (point.name, point.fingerprint, point.site)
        )
        group = group_text(gathering.line.key[0], num_processes)
        arrived, missing = sorted(gathering.arrived), gathering.missing(gone)
        sides.append(CycleSide(name, fingerprint, site, group, arrived, missing))
    return WaitCycle(sides)


def abandoned_answer(process: int, point: Point) -> CallLeft:
    """Return the answer to members of a call that a process has left for the one at `point`."""
    return CallLeft(process, f"it is at {point.place} now")
