"""The lines of a job, the gatherings of each, and their answers: the parts of `meeting.Meeting`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

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
        # Members for which it is the next only under its own name; see the lines below
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


# ---- The lines of a job, and the next gathering of a process in its line.
#
# A *line* is a group of processes in a lane; its gatherings are kept in the order in which they
# were opened. One that failed stays until each living member has been answered: a late process
# then gets the error that the others got, and its next call meets their next call.
#
# Three rules keep the count right where calls do not pair up one by one:
#
# * A call may consist of several points. One that a process left between two of them fails at the
#   next (`follows`): members that are still in the call get the error there; members that begin
#   another call have also left it, and pass.
# * Gatherings that ended together, as one cycle of waits, are one failure: a process that was
#   answered in one of them is not answered again in another (`alike`).
# * Survivors of a loss start again from their current positions: they pass earlier failures, but
#   not a failed point of survivors (`restarts`), which belongs to the new start.
#
# Counts alone would leave processes apart for ever once one of them has made a call less than the
# others in a line, because it made it in another lane, for another group, or not at all. So names
# are compared too, where counts have failed:
#
# * A process is *late* for a call if it arrives there, the others are at a call of another name,
#   and all of them have had this call before, which failed, more often than it has since all of
#   the line last met (`FailedCalls`). It gets that error alone, at once, and the others wait for
#   it to come to their call under the same name.
# * If it comes under another name instead, it was not late: its call stood in the place of that
#   of the others, which fails as it would have without this rule, only later, and the counts are
#   those without it. So the rule can make calls of one name meet, and nothing else. Meanwhile the
#   others wait as for a process that has yet to arrive: deadlines, losses and cycles end the
#   wait.
# * Once all members of a line have met in its lane, also among more processes, none of them can
#   be on its way to a call of that line that failed before. It is owed to a process only if that
#   comes there under the same name after all, perhaps in another order of its program.


_Key: TypeAlias = tuple[tuple[int, ...] | None, str]  # of a line: its group and lane

_MOST_CALLS = 16  # that have failed and are kept, of a line
_MOST_LINES = 8  # of which any are kept


class OpenGatherings(Generic[To]):
    """All gatherings that are open, or failed and still owed to a living process."""

    def __init__(self, processes: range) -> None:
        self._processes = processes
        self._lines: dict[_Key, Line[To]] = {}
        self.failed: dict[_Key, FailedCalls] = {}  # oldest first
        self._open: dict[str, dict[Gathering[To], None]] = {}  # by lane, in order of opening
        self._count = 0  # gatherings opened so far

    def __bool__(self) -> bool:
        return bool(self._lines or self._open)

    def of(self, process: int) -> list[Line[To]]:
        """Return the lines that a process is a member of."""
        return [line for line in self._lines.values() if process in line.members]

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
            if gathering.answer is None or not (
                _passes(gathering, point, after_loss) or _is_elsewhere(process, gathering, point)
            ):
                return gathering
            self.settle(process, gathering)
        return None

    def open(self, process: int, point: Point) -> Gathering[To]:
        """Add a gathering to the line of `point`, opened by this process."""
        key = (point.group, point.lane)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, self._processes)
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
        after.unanswered = {p for p in line.members if p not in left and p not in gone}
        line.gatherings.insert(line.gatherings.index(gathering) + 1, after)

    def leave(self, process: int, gathering: Gathering[To], answer: Outcome) -> None:
        """Record that a process that arrived at this gathering has left the call."""
        gathering.left[process] = (answer, self._count)

    def close(self, gathering: Gathering[To]) -> None:
        """Close a gathering that has its answer: no process waits there any more."""
        self._open[gathering.line.lane].pop(gathering, None)
        self._forget(gathering.line)

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

    def note_failure(self, processes: Iterable[int], point: Point) -> None:
        """Record that processes have made a call that failed."""
        if point.follows or point.survivors:
            return
        key = (point.group, point.lane)
        if key not in self.failed and len(self.failed) == _MOST_LINES:
            del self.failed[next(iter(self.failed))]
        self.failed.setdefault(key, FailedCalls()).note(processes, point)

    def late_for(self, gathering: Gathering[To], process: int, point: Point) -> Collection[int]:
        """Return the processes that are late for a call that failed: the one that arrives at
        `point`, those that wait at this gathering, or none."""
        arrived, failed = gathering.arrived, self.failed.get((point.group, point.lane))
        if failed is None or not arrived or gathering.left or point.follows or point.survivors:
            return ()
        other = next(iter(arrived.values())).point
        if not gathering.is_elsewhere(point) or other.follows or other.survivors:
            return ()
        is_late = failed.is_missed_by((process,), point, arrived)
        if is_late == failed.is_missed_by(arrived, other, (process,)):
            return ()  # neither, or each for the call of the other
        return (process,) if is_late else tuple(arrived)

    def agree(self, met: Gathering[To], members: Container[int]) -> None:
        """Record that all of `members` but those that are gone have met: they are in step."""
        if not self.failed:  # nearly always
            return
        for key in [key for key in self.failed if key[1] == met.line.lane]:
            if all(process in members for process in key[0] or self._processes):
                del self.failed[key]
                for gathering in self._lines[key].gatherings if key in self._lines else ():
                    if gathering.call is not None and _is_before(gathering, met):
                        gathering.late.update(gathering.unanswered)

    def restart(self, met: Gathering[To], members: Container[int]) -> None:
        """Drop what earlier failures in the lane of `met` owe to the survivors that met there.

        Calls that a survivor has left again since it arrived there were made later, and stay.
        """
        self.agree(met, members)
        for line in [line for line in self._lines.values() if line.lane == met.line.lane]:
            if all(process in members for process in line.members):
                for gathering in line.gatherings:
                    if _is_before(gathering, met):
                        gathering.unanswered.clear()
                self._forget(line)

    def _forget(self, line: Line[To]) -> None:
        """Drop gatherings that are no longer owed to any process, and a line without any."""
        gatherings = line.gatherings
        while gatherings and gatherings[0].answer is not None and not gatherings[0].unanswered:
            gatherings.popleft()
        if not gatherings:
            self._lines.pop(line.key, None)
            if not self._open.get(line.lane):
                self._open.pop(line.lane, None)


class FailedCalls:
    """How often each member of a line has made each call that failed since all of them last met."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, bool], dict[int, int]] = {}  # oldest first

    def note(self, processes: Iterable[int], point: Point) -> None:
        """Record that processes have made a call that failed."""
        counts = self._calls.setdefault(compared_fields(point), {})
        for process in processes:
            counts[process] = counts.get(process, 0) + 1
        if len(self._calls) > _MOST_CALLS:
            del self._calls[next(iter(self._calls))]

    def is_missed_by(self, late: Iterable[int], point: Point, others: Iterable[int]) -> bool:
        """Return whether all `others` have made a call more often than any of `late`."""
        counts = self._calls.get(compared_fields(point))
        if counts is None:
            return False
        most = max(counts.get(process, 0) for process in late)
        return all(counts.get(other, 0) > most for other in others)


def _is_elsewhere(process: int, gathering: Gathering[Any], point: Point) -> bool:
    """Return whether a process that is late for a gathering has come to another call instead."""
    return process in gathering.late and gathering.is_elsewhere(point)


def _is_before(gathering: Gathering[Any], met: Gathering[Any]) -> bool:
    """Return whether the opener of a gathering made that call before it arrived at `met`."""
    _, number = met.left.get(gathering.opener, (None, gathering.number + 1))
    return gathering.number < number


def _passes(gathering: Gathering[Any], point: Point, after_loss: bool) -> bool:
    """Return whether an arrival at `point` passes this failed gathering."""
    has_left_the_call = gathering.follows and not point.follows
    return has_left_the_call or (after_loss and point.survivors and not gathering.restarts)
