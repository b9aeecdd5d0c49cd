"""The rules of meeting, as a pure state machine: no socket, no thread, no clock of its own.

`meeting_place` drives it from a socket loop and `coordinator_local` under a lock, so both obey
one set of rules. Every method takes the time and returns the replies that are now due.

The n-th arrival of each process in a *line* (a group and a lane) is one *gathering*. Arrivals are
counted here and not by who arrives, so the count cannot drift apart: a gathering that failed stays
in its line until every living member came and was told. One answer object is given to all, hence
all or none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.runtime.coordinator import Member, Point

__all__ = ["Answer", "Meeting", "Reply"]

To = TypeVar("To", bound=Hashable)

_WORDS = 64  # an answer quotes the last words of this many processes; it goes to all of them


class Answer(NamedTuple):
    """What all members of a gathering are told: "ok" with the payloads, or what went wrong."""

    kind: str  # "ok" | "diverged" | "deadline" | "lost" | "failed"
    facts: Mapping[str, Any] = MappingProxyType({})  # as JSON would carry it
    payloads: Mapping[int, bytes] = MappingProxyType({})


class Reply(NamedTuple, Generic[To]):
    """An answer and where it must go: the `to` and `ticket` that came with the arrival."""

    to: To
    ticket: int
    answer: Answer


class _Wait(NamedTuple, Generic[To]):
    to: To
    ticket: int
    point: Point
    payload: bytes
    since: float


class _Gathering(Generic[To]):
    """One meeting of a line: open while `answer` is None, afterwards a tombstone."""

    __slots__ = ("answer", "arrived", "deadline", "limit", "line", "owing")

    def __init__(self, line: _Line[To]) -> None:
        self.line = line
        self.arrived: dict[int, _Wait[To]] = {}
        self.answer: Answer | None = None
        self.owing: set[int] = set()  # living members that must still be told
        self.deadline = math.inf
        self.limit = (-1, math.inf)  # whose deadline that is, and its time-out in seconds

    def expects(self, process: int) -> bool:
        return process in self.owing if self.answer else process not in self.arrived

    def missing(self) -> list[int]:
        return [p for p in self.line.members if p not in self.arrived]


class _Line(Generic[To]):
    """The gatherings of one group in one lane, oldest first, as long as somebody owes one."""

    __slots__ = ("gatherings", "key", "lane", "members")

    def __init__(self, key: tuple[tuple[int, ...] | None, str], everybody: range) -> None:
        group, self.lane = self.key = key
        self.members: Collection[int] = everybody if group is None else dict.fromkeys(group)
        self.gatherings: deque[_Gathering[To]] = deque()


class _Process(Generic[To]):
    """What is known of one process."""

    __slots__ = ("blocked", "host", "point", "state", "when", "words")

    def __init__(self, host: str, now: float) -> None:
        self.host = host
        self.state = "here"
        self.words = "joined"
        self.point: Point | None = None
        self.when = now
        self.blocked: dict[str, _Gathering[To]] = {}  # where it waits, by lane


class Meeting(Generic[To]):
    """All points of a job whose processes are all here; `to` is any address for the answers."""

    def __init__(self, hosts: Sequence[str], now: float) -> None:
        self._processes: list[_Process[To]] = [_Process(host, now) for host in hosts]
        self._everybody = range(len(hosts))
        self._lines: dict[tuple[tuple[int, ...] | None, str], _Line[To]] = {}
        self._open: dict[str, set[_Gathering[To]]] = {}  # by lane
        self._gone: dict[int, str] = {}  # process: state, in the order in which they went
        self._next = math.inf

    @property
    def next_deadline(self) -> float:
        """When `tick` must be called; never too late, at times too early."""
        return self._next

    @property
    def is_over(self) -> bool:
        """Has everybody gone?"""
        return len(self._gone) == len(self._processes)

    def has_gone(self, process: int) -> bool:
        """Has this process left, failed or been lost?"""
        return process in self._gone

    def arrive(
        self,
        now: float,
        process: int,
        point: Point,
        payload: bytes,
        *,
        timeout_s: float,
        to: To,
        ticket: int,
    ) -> list[Reply[To]]:
        """Take an arrival; return the answers that it settles (for nobody: everybody waits)."""
        line, gathering = self._find(process, point)
        if gathering.answer is not None:
            gathering.owing.discard(process)
            self._bury(line)
            self._note(process, now, "came too late to", point)
            return [Reply(to, ticket, gathering.answer)]
        gathering.arrived[process] = _Wait(to, ticket, point, payload, now)
        self._processes[process].blocked[line.lane] = gathering
        if now + timeout_s < gathering.deadline:
            gathering.deadline, gathering.limit = now + timeout_s, (process, timeout_s)
            self._next = min(self._next, gathering.deadline)
        return self._judge(now, process, gathering)

    def tick(self, now: float) -> list[Reply[To]]:
        """End every wait whose earliest deadline has passed."""
        if now < self._next:
            return []
        waiting = [g for gatherings in self._open.values() for g in gatherings]
        late = [g for g in waiting if g.deadline <= now]
        answers = [(g, Answer("deadline", self._deadline_facts(g, now))) for g in late]
        replies = [r for g, answer in answers for r in self._finish(now, g, answer)]
        self._next = min((g.deadline for g in waiting if g.answer is None), default=math.inf)
        return replies

    def say(self, now: float, process: int, words: str) -> None:
        """Remember what a process is doing."""
        if process not in self._gone:
            self._note(process, now, words)

    def depart(self, now: float, process: int, state: str, words: str) -> list[Reply[To]]:
        """A process is gone: "left", "failed" or "lost". Only the first such word counts.

        Who is lost or failed ends every gathering of its groups, who left in peace only those to
        which it had not come.
        """
        if process in self._gone:
            return []
        self._gone[process] = state
        record = self._processes[process]
        record.state = state
        self._note(process, now, words)
        replies: list[Reply[To]] = []
        for line in [line for line in self._lines.values() if process in line.members]:
            for gathering in list(line.gatherings):
                gathering.owing.discard(process)
                came = process in gathering.arrived
                if gathering.answer is None and not (state == "left" and came):
                    replies += self._finish(now, gathering, self._gone_answer(line))
            self._bury(line)
        return replies

    def waiting_for(self, now: float, process: int, lane: str) -> Mapping[str, Any] | None:
        """Return who is missing where `process` waits, or None if it does not wait."""
        gathering = self._processes[process].blocked.get(lane)
        return self._missing_facts(gathering, now) if gathering else None

    def members(self, now: float) -> tuple[Member, ...]:
        """Return what is known of each process, in order."""
        return tuple(
            Member(index, record.host, record.state, self._last_words(index, now))
            for index, record in enumerate(self._processes)
        )

    def _find(self, process: int, point: Point) -> tuple[_Line[To], _Gathering[To]]:
        """Return the first gathering of the line to which `process` has not come; open one."""
        key = (point.group, point.lane)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(key, self._everybody)
        for gathering in line.gatherings:
            if gathering.expects(process):
                return line, gathering
        gathering = _Gathering(line)
        line.gatherings.append(gathering)
        self._open.setdefault(point.lane, set()).add(gathering)
        return line, gathering

    def _judge(self, now: float, process: int, gathering: _Gathering[To]) -> list[Reply[To]]:
        line, arrived = gathering.line, gathering.arrived
        first = next(iter(arrived.values())).point
        mine = arrived[process].point
        if len(arrived) == 1 and any(p in line.members for p in self._gone):
            return self._finish(now, gathering, self._gone_answer(line))
        if (mine.name, mine.fingerprint) != (first.name, first.fingerprint):
            return self._finish(now, gathering, Answer("diverged", _sides_facts(gathering)))
        if len(arrived) == len(line.members):
            payloads = {p: arrived[p].payload for p in line.members}
            return self._finish(now, gathering, Answer("ok", payloads=payloads))
        circle = self._circle(process, gathering)
        if not circle:
            return []
        answer = Answer("diverged", _circle_facts(circle))
        return [reply for g in circle for reply in self._finish(now, g, answer)]

    def _circle(self, process: int, start: _Gathering[To]) -> list[_Gathering[To]]:
        """Return the gatherings of a lane that wait for each other since `process` came to `start`.

        A lane is one line of execution: who waits at one gathering cannot come to another. So
        gathering a waits for b if a member that a misses waits at b. A new circle must lead
        through `process`: to some gathering that misses it.
        """
        lane = start.line.lane
        goals = {
            g
            for g in self._open[lane]
            if g is not start and process in g.line.members and process not in g.arrived
        }
        if not goals:
            return []
        path: list[_Gathering[To]] = [start]
        branches: list[Iterator[_Gathering[To]]] = [self._awaited(start)]
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
                branches.append(self._awaited(step))
        return []

    def _awaited(self, gathering: _Gathering[To]) -> Iterator[_Gathering[To]]:
        for process in gathering.missing():
            other = self._processes[process].blocked.get(gathering.line.lane)
            if other is not None:
                yield other

    def _finish(self, now: float, gathering: _Gathering[To], answer: Answer) -> list[Reply[To]]:
        """Give the one answer to all that wait; keep it for the living that did not come yet."""
        line = gathering.line
        gathering.answer = answer
        if answer.kind != "ok":
            gathering.owing = {p for p in gathering.missing() if p not in self._gone}
        verb = "passed" if answer.kind == "ok" else "gave up"
        for process, wait in gathering.arrived.items():
            record = self._processes[process]
            if record.blocked.get(line.lane) is gathering:
                del record.blocked[line.lane]
            if process not in self._gone:
                self._note(process, now, verb, wait.point)
        replies = [Reply(w.to, w.ticket, answer) for w in gathering.arrived.values()]
        gathering.arrived = {}
        self._open[line.lane].discard(gathering)
        self._bury(line)
        return replies

    def _bury(self, line: _Line[To]) -> None:
        """Forget the gatherings that nobody owes any more, and a line without gatherings."""
        gatherings = line.gatherings
        while gatherings and gatherings[0].answer is not None and not gatherings[0].owing:
            gatherings.popleft()
        if not gatherings:
            self._lines.pop(line.key, None)
            if not self._open.get(line.lane):
                self._open.pop(line.lane, None)

    def _note(self, process: int, now: float, words: str, point: Point | None = None) -> None:
        """Remember words, and the point that completes them: put together only when asked for."""
        record = self._processes[process]
        record.words, record.point, record.when = words, point, now

    def _gone_answer(self, line: _Line[To]) -> Answer:
        """The first member that did not leave in peace is the cause; its words are kept whole."""
        gone = [p for p in self._gone if p in line.members]
        cause = next((p for p in gone if self._gone[p] != "left"), gone[0])
        kind = "lost" if self._gone[cause] == "lost" else "failed"
        alike = [p for p in gone if (self._gone[p] == "lost") == (kind == "lost")]
        pairs = [[cause, self._processes[cause].words]]
        pairs += [[p, _last_line(self._processes[p].words)] for p in alike if p != cause]
        return Answer(kind, {"gone": pairs})

    def _deadline_facts(self, gathering: _Gathering[To], now: float) -> dict[str, Any]:
        by, timeout_s = gathering.limit
        return {**self._missing_facts(gathering, now), "by": by, "timeout_s": timeout_s}

    def _missing_facts(self, gathering: _Gathering[To], now: float) -> dict[str, Any]:
        missing = gathering.missing()
        words = [[p, self._last_words(p, now)] for p in missing[:_WORDS]]
        return {"missing": missing, "words": words}

    def _last_words(self, process: int, now: float) -> str:
        record = self._processes[process]
        if record.state == "here" and record.blocked:
            return "; ".join(
                f"waits at {_place(g.arrived[process].point)}"
                f" since {now - g.arrived[process].since:.1f} s"
                for g in record.blocked.values()
            )
        place = f" {_place(record.point)}" if record.point else ""
        return f"{record.words}{place}, {now - record.when:.1f} s ago"


def _place(point: Point) -> str:
    lane = "" if point.lane == "main" else f" in lane {point.lane!r}"
    return f"{point.name!r}{lane}" + (f" ({point.site})" if point.site else "")


def _last_line(words: str) -> str:
    return words.strip().rpartition("\n")[2]


def _sides_facts(gathering: _Gathering[Any]) -> dict[str, Any]:
    """Group who arrived by what they came for; the first to come speaks for its side."""
    sides: dict[tuple[str, str], tuple[str, list[int]]] = {}
    same_name = len({wait.point.name for wait in gathering.arrived.values()}) == 1
    for process, wait in gathering.arrived.items():
        point = wait.point
        told = f"{point.name!r}" + (f" [{point.fingerprint[:400]}]" if same_name else "")
        told += f" at {point.site}" if point.site else ""
        sides.setdefault((point.name, point.fingerprint), (told, []))[1].append(process)
    rows = sorted((sorted(processes), told) for told, processes in sides.values())
    return {"sides": [[told, processes] for processes, told in rows]}


def _circle_facts(circle: list[_Gathering[Any]]) -> dict[str, Any]:
    sides = []
    for gathering in circle:
        place = _place(next(iter(gathering.arrived.values())).point)
        sides.append([f"waits at {place}", sorted(gathering.arrived), gathering.missing()])
    return {"circle": sides}
