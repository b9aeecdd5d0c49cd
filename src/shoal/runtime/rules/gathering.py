"""One meeting of one line, and what can be told of it: the parts of `meeting.Meeting`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.runtime.rules.first_difference import excerpts
from shoal.runtime.rules.meeting_answers import (
    Answer,
    CallLeft,
    CircleSide,
    MeetingSide,
    Outcome,
    SidesDiffer,
    TrailsApart,
    WaitInCircle,
)
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.trail import trail_versions, trails_differ
from shoal.runtime.rules.trail_marks import SharedMarks

To = TypeVar("To", bound=Hashable)

_TEXT = 1000  # characters of each text that an answer about sides carries; it goes to all of them


class Reply(NamedTuple, Generic[To]):
    """An answer and where it must go: the `to` and `ticket` that came with the arrival."""

    to: To
    ticket: int
    answer: Answer


class WaitingProcess(NamedTuple, Generic[To]):
    """One process that waits."""

    to: To
    ticket: int
    point: Point
    payload: bytes
    since: float


class Gathering(Generic[To]):
    """One meeting of a line: open while `answer` is None, afterwards a tombstone."""

    __slots__ = (
        "alike",
        "answer",
        "arrived",
        "deadline",
        "follows",
        "left",
        "limit",
        "line",
        "marks",
        "number",
        "opener",
        "owing",
        "question",
        "restarts",
        "survivors",
    )

    def __init__(self, line: Line[To], point: Point) -> None:
        self.line = line
        self.survivors = point.survivors  # are those who are gone not waited for?
        self.follows = point.follows  # is it a later point of a call?
        self.restarts = point.survivors  # has a survivor come?
        self.alike: list[Gathering[To]] = []  # all that ended together with it
        # Who has come, and has left the call since: the reason, and the next gathering's number
        self.left: dict[int, tuple[Outcome, int]] = {}
        self.number = 0  # in the order of their opening
        self.opener = -1  # the process for which it was opened
        self.arrived: dict[int, WaitingProcess[To]] = {}
        self.answer: Outcome | None = None
        self.owing: set[int] = set()  # living members that must still be told
        self.deadline = math.inf
        self.limit = (-1, math.inf)  # whose deadline that is, and its time-out in seconds
        self.marks = SharedMarks()  # what the trails of other lanes have in common
        self.question: int | None = None  # past the deadline, where the others are is asked

    def expects(self, process: int) -> bool:
        """Is the next arrival of this process for this gathering?"""
        return process in self.owing if self.answer else process not in self.arrived

    def missing(self, gone: Container[int]) -> list[int]:
        """Return who is waited for."""
        away = [p for p in self.line.members if p not in self.arrived]
        return [p for p in away if p not in gone] if self.survivors else away


class Line(Generic[To]):
    """The gatherings of one group in one lane, oldest first, as long as somebody owes one."""

    __slots__ = ("gatherings", "key", "lane", "members")

    def __init__(self, key: tuple[tuple[int, ...] | None, str], everybody: range) -> None:
        group, self.lane = self.key = key
        self.members: Collection[int] = everybody if group is None else dict.fromkeys(group)
        self.gatherings: deque[Gathering[To]] = deque()


def find_circle(
    process: int,
    start: Gathering[To],
    waiting: Collection[Gathering[To]],
    waits_at: Callable[[int], Gathering[To] | None],
    gone: Container[int],
) -> list[Gathering[To]]:
    """Return the gatherings of a lane that wait for each other since `process` came to `start`.

    A lane is one line of execution: who waits at one gathering cannot come to another. So
    gathering a waits for b if a member that a misses waits at b. A new circle must lead through
    `process`: to some gathering that misses it.

    Args:
      waiting: all open gatherings of the lane.
      waits_at: where a process waits in this lane.
    """
    # Two ways to see at once that there is none; small groups are many, large ones few.
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


def place_text(point: Point) -> str:
    """Return where that is: the point, its lane if it is no main one, who calls it."""
    lane = "" if point.lane == "main" else f" in lane {point.lane!r}"
    return f"{point.name!r}{lane}" + (f" ({point.site})" if point.site else "")


def what_of(point: Point) -> tuple[str, str, bool]:
    """Return what must be equal."""
    return point.name, point.fingerprint, point.survivors


def differ(one: Point, other: Point) -> bool:
    """Say whether two that came to one gathering came for different things, or differently."""
    return what_of(one) != what_of(other) or trails_differ(one.trail, other.trail)


def divergence(gathering: Gathering[Any]) -> SidesDiffer | TrailsApart:
    """Group who arrived by what they came for; the first to come speaks for its side.

    All are told at once of the first who differs, so there are two sides. Where trails differ,
    that is what is told: the calls before are the cause.
    """
    if found := trail_versions((p, wait.point) for p, wait in gathering.arrived.items()):
        return TrailsApart(found)
    sides: dict[tuple[str, str, bool], tuple[Point, list[int]]] = {}
    for process, wait in gathering.arrived.items():
        sides.setdefault(what_of(wait.point), (wait.point, []))[1].append(process)
    rows = sorted((sorted(processes), point) for point, processes in sides.values())
    names = excerpts([point.name for _, point in rows])
    return SidesDiffer([
        MeetingSide(name, point.fingerprint[:_TEXT], point.site[:_TEXT], processes)
        for name, (processes, point) in zip(names, rows, strict=True)
    ])  # fmt: skip


def circle_of(circle: list[Gathering[Any]], gone: Container[int]) -> WaitInCircle:
    """Return who waits where for whom."""
    sides = []
    for gathering in circle:
        place = place_text(next(iter(gathering.arrived.values())).point)
        words = f"{'waits' if len(gathering.arrived) == 1 else 'wait'} at {place}"
        sides.append(CircleSide(words, sorted(gathering.arrived), gathering.missing(gone)))
    return WaitInCircle(sides)


def went_on(process: int, point: Point) -> CallLeft:
    """Return what the members of a call get which a process has left for the one at `point`."""
    return CallLeft(process, f"it is at {place_text(point)} now")
