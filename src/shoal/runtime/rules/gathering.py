"""The lines of a job, the gatherings of each, and their answers: the parts of `meeting.Meeting`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from shoal.runtime.rules.first_difference import excerpts
from shoal.runtime.rules.meeting_answers import (
    Answer,
    CallLeft,
    CycleSide,
    FailingSince,
    MeetingSide,
    Outcome,
    RecordsApart,
    SidesDiffer,
    WaitCycle,
    group_text,
)
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.record_marks import SharedMarks, record_versions, records_differ

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


class Gathering(Generic[To]):
    """One meeting of a line: open while `answer` is None, afterwards a tombstone."""

    __slots__ = (
        "alike",
        "answer",
        "arrived",
        "call",
        "deadline",
        "follows",
        "left",
        "limit",
        "line",
        "marks",
        "number",
        "opener",
        "point",
        "reported",
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
        self.call = line.num_calls  # of which call of its line it is a point, from 1
        self.point = point  # of the first that arrived, or left the call
        self.number = 0  # in order of opening
        self.opener = -1  # the process for which it was opened
        self.arrived: dict[int, WaitingProcess[To]] = {}
        self.answer: Outcome | None = None
        self.unanswered: set[int] = set()  # living members that have yet to be answered
        self.deadline = math.inf
        self.limit = (-1, math.inf)  # the process with that deadline, and its time-out in seconds
        self.reported: tuple[str, ...] = ()  # places at which a process has logged its long wait
        self.marks = SharedMarks()  # the marks of the call records of other lanes
        self.stack_request: int | None = None  # past the deadline: the ticket of the stack request

    def expects(self, process: int) -> bool:
        """Return whether the next arrival of this process is for this gathering."""
        return process in self.unanswered if self.answer else process not in self.arrived

    @property
    def points(self) -> dict[int, Point]:
        """Where each process that waits here has arrived."""
        return {process: wait.point for process, wait in self.arrived.items()}

    def missing(self, gone: Container[int]) -> list[int]:
        """Return the members that have not arrived."""
        away = [p for p in self.line.members if p not in self.arrived]
        return [p for p in away if p not in gone] if self.survivors else away


class Line(Generic[To]):
    """One group in one lane: its gatherings, oldest first, while open or owed; and its calls."""

    __slots__ = ("failing", "gatherings", "key", "lane", "members", "num_calls")

    def __init__(self, key: tuple[tuple[int, ...] | None, str], all_processes: range) -> None:
        group, self.lane = self.key = key
        self.members: Collection[int] = all_processes if group is None else dict.fromkeys(group)
        self.gatherings: deque[Gathering[To]] = deque()
        self.num_calls = 0  # begun so far
        self.failing: FailingSince | None = None  # the first of the calls that failed in a row


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


def compared_fields(point: Point) -> tuple[object, ...]:
    """Return the fields that must be equal."""
    return point.name, point.operation, point.fingerprint, point.survivors


def differ(one: Point, other: Point) -> bool:
    """Return whether two arrivals at one gathering differ."""
    if compared_fields(one) != compared_fields(other):
        return True
    return records_differ(one.call_record, other.call_record)


def divergence(
    points: Mapping[int, Point], since: FailingSince | None
) -> SidesDiffer | RecordsApart:
    """Group the arrivals by their point; the first arrival of each side represents it.

    Args:
      points: where each process has arrived.
      since: see `SidesDiffer`.

    The answer is sent at the first arrival that differs, so there are two sides. If call records
    differ, the answer is about them: the earlier calls are the cause.
    """
    versions = record_versions(points.items())
    if versions:
        return RecordsApart(versions)
    sides: dict[tuple[object, ...], tuple[Point, list[int]]] = {}
    for process, point in points.items():
        sides.setdefault(compared_fields(point), (point, []))[1].append(process)
    rows = sorted((sorted(processes), point) for point, processes in sides.values())
    names = excerpts([point.name for _, point in rows])
    shown = [
        MeetingSide.of(point, processes, name)
        for name, (processes, point) in zip(names, rows, strict=True)
    ]
    return SidesDiffer(shown, since)


def cycle_of(cycle: list[Gathering[Any]], gone: Container[int], num_processes: int) -> WaitCycle:
    """Return the sides of a cycle: which processes wait where, and for which."""
    sides = []
    for gathering in cycle:
        point = next(iter(gathering.arrived.values())).point
        group = group_text(gathering.line.key[0], num_processes)
        side = MeetingSide.of(point, sorted(gathering.arrived))
        sides.append(CycleSide(side, group, gathering.missing(gone)))
    return WaitCycle(sides)


def abandoned_answer(process: int, point: Point) -> CallLeft:
    """Return the answer to members of a call that a process has left for the one at `point`."""
    return CallLeft(process, f"it is at {point.place} now")


# ---- The lines of a job, and the next gathering of a process in its line.
#
# A *line* is a group of processes in a lane. One rule: the n-th call of each process in a line
# meets the n-th of the others. All of them get its values, or all of them one error; either way
# each has made one call more. Names and arguments cannot decide which calls meet: they repeat, and
# a program that differs in two calls looks like one that makes a call less.
#
# So a gathering that failed stays in its line until each living member has been answered: a late
# process gets the error that the others got, and its next call meets their next call. An exception
# on one process alone is its arrival. If a process makes a call more or less than the others, its
# calls differ from theirs until `live_processes` has returned, and their errors say since which
# call (`Line.failing`). If the calls are equal, nothing shows that they are not the same one.
#
# What a call is, and where the count begins again:
#
# * A call may consist of several points. One that a process left between two of them fails at the
#   next (`follows`): members that are still in the call get the error there; members that begin
#   another call have also left it, and pass.
# * Gatherings that ended together, as one cycle of waits, are one failure: a process that was
#   answered in one of them is not answered again in another (`alike`).
# * Survivors of a loss start again from their current positions: they pass earlier failures, but
#   not a failed point of survivors (`restarts`), which belongs to the new start.
# * Once all members of a line have met in its lane, also among more processes, they are at one
#   place of the program: what failed there before is owed to none of them (`settle_before`). Calls
#   that one has made since it left that meeting by an exception (`opener`) stay.


_Key: TypeAlias = tuple[tuple[int, ...] | None, str]  # of a line: its group and lane


class OpenGatherings(Generic[To]):
    """All gatherings that are open, or failed and still owed to a living process."""

    def __init__(self, processes: range) -> None:
        self._processes = processes
        self._lines: dict[_Key, Line[To]] = {}  # in which any call was made
        self._unsettled: dict[_Key, Line[To]] = {}  # in which a call has failed or was left
        self._open: dict[str, dict[Gathering[To], None]] = {}  # by lane, in order of opening
        self._count = 0  # gatherings opened so far

    def __bool__(self) -> bool:
        return bool(self._open) or any(line.gatherings for line in self._lines.values())

    def of(self, process: int) -> list[Line[To]]:
        """Return the lines that a process is a member of and that have gatherings."""
        lines = [line for line in self._lines.values() if line.gatherings]
        return [line for line in lines if process in line.members]

    def open_in(self, lane: str) -> Collection[Gathering[To]]:
        """Return the gatherings of a lane in which processes wait."""
        return self._open.get(lane, ())

    def all_open(self) -> list[Gathering[To]]:
        """Return the gatherings of all lanes in which processes wait."""
        return [gathering for gatherings in self._open.values() for gathering in gatherings]

    def next_of(self, process: int, point: Point, *, after_loss: bool) -> Gathering[To] | None:
        """Return the gathering of an arrival at `point`; None: a new one must be opened.

        Args:
          after_loss: whether a process or a service was lost since this process last met survivors.
        """
        line = self._lines.get((point.group, point.lane))
        for gathering in tuple(line.gatherings) if line is not None else ():
            if not gathering.expects(process):
                continue
            if gathering.answer is None or not _passes(gathering, point, after_loss):
                return gathering
            self.settle(process, gathering)
        return None

    def open(self, process: int, point: Point) -> Gathering[To]:
        """Add a gathering to the line of `point`, opened by this process."""
        key = (point.group, point.lane)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, self._processes)
        line.num_calls += not point.follows
        gathering = Gathering(line, point)
        gathering.number, gathering.opener = self._count, process
        self._count += 1
        line.gatherings.append(gathering)
        self._open.setdefault(line.lane, {})[gathering] = None
        return gathering

    def left_by(self, process: int, point: Point, *, after_loss: bool) -> Iterator[Gathering[To]]:
        """Yield the open gatherings that must fail because a process has left its call.

        Args:
          point: the next point of that call, at which the process would have arrived: `follows`
            tells whether it has arrived at an earlier one.
        """
        while True:
            gathering = self.next_of(process, point, after_loss=after_loss)
            if gathering is None:
                break
            if gathering.answer is not None:
                if gathering.follows == point.follows:  # the call has failed for all before
                    self.settle(process, gathering)
                return
            if gathering.follows == point.follows:
                yield gathering
                return
            if point.follows:  # the others have left the call, too
                return
            yield gathering  # of an earlier call, in which the others still are
        yield self.open(process, point)

    def fail_after(self, gathering: Gathering[To], gone: Container[int]) -> None:
        """Fail the next point of a gathering's call, because processes left the call here."""
        line, left = gathering.line, gathering.left
        after = Gathering(line, Point("", follows=True))
        after.answer, _ = next(iter(left.values()))
        after.number, after.opener = gathering.number, gathering.opener
        after.unanswered = {p for p in line.members if p not in left and p not in gone}
        line.gatherings.insert(line.gatherings.index(gathering) + 1, after)

    def leave(self, process: int, gathering: Gathering[To], answer: Outcome) -> None:
        """Record that a process that arrived at this gathering has left the call."""
        gathering.left[process] = (answer, self._count)
        self._unsettled[gathering.line.key] = gathering.line

    def close(self, gathering: Gathering[To], *, has_failed: bool) -> None:
        """Close a gathering that has its answer: no process waits there any more."""
        line = gathering.line
        if has_failed:
            line.failing = line.failing or FailingSince.at(gathering.call, gathering.point)
            self._unsettled[line.key] = line
        else:
            line.failing = None
        self._open[line.lane].pop(gathering, None)
        self._forget(line)

    def join(self, gatherings: list[Gathering[To]], answered: Collection[int]) -> None:
        """Join gatherings that ended together; `answered` are the processes that waited in them."""
        for gathering in gatherings:
            gathering.alike = gatherings
            gathering.unanswered.difference_update(answered)
            self._forget(gathering.line)

    def settle(self, process: int, gathering: Gathering[To]) -> None:
        """Record that a process was answered, or passes: the failure is no longer owed to it."""
        for each in gathering.alike or (gathering,):
            each.unanswered.discard(process)
            self._forget(each.line)

    def drop_process(self, process: int) -> None:
        """Drop everything owed to a process that is gone."""
        for line in self.of(process):
            for gathering in line.gatherings:
                gathering.unanswered.discard(process)
            self._forget(line)

    def settle_before(self, met: Gathering[To], members: Container[int]) -> None:
        """Record that all of `members` but those that are gone have met: what failed before in the
        lane, among these processes or some of them, is owed to none of them."""
        if not self._unsettled:  # nearly always
            return
        lines = [line for line in self._unsettled.values() if line.lane == met.line.lane]
        for line in [
            candidate for candidate in lines if all(p in members for p in candidate.members)
        ]:
            for gathering in tuple(line.gatherings):
                if not _is_before(gathering, met):
                    continue
                if gathering.answer is None and gathering.left.keys() >= gathering.arrived.keys():
                    gathering.answer, _ = next(iter(gathering.left.values()))
                    self._open[line.lane].pop(gathering, None)
                gathering.unanswered.clear()
            line.failing = None
            self._forget(line)

    def end_lane(self, lane: str) -> None:
        """Drop the lines of a lane in which a process makes no more calls, once nothing is owed."""
        lines = [line for line in self._lines.values() if line.lane == lane]
        for line in [candidate for candidate in lines if not candidate.gatherings]:
            del self._lines[line.key]
            self._unsettled.pop(line.key, None)

    def _forget(self, line: Line[To]) -> None:
        """Drop gatherings that are no longer owed to any process."""
        gatherings = line.gatherings
        while gatherings and gatherings[0].answer is not None and not gatherings[0].unanswered:
            gatherings.popleft()
        if not gatherings:
            if line.failing is None:
                self._unsettled.pop(line.key, None)
            if not self._open.get(line.lane):
                self._open.pop(line.lane, None)


def _is_before(gathering: Gathering[Any], met: Gathering[Any]) -> bool:
    """Return whether the opener of a gathering made that call before it arrived at `met`."""
    _, number = met.left.get(gathering.opener, (None, gathering.number + 1))
    return met.number != gathering.number < number  # a later point of a call has its number


def _passes(gathering: Gathering[Any], point: Point, after_loss: bool) -> bool:
    """Return whether an arrival at `point` passes this failed gathering."""
    has_left_the_call = gathering.follows and not point.follows
    return has_left_the_call or (after_loss and point.survivors and not gathering.restarts)
