"""What a gatherer holds back for a moment, to send it for several processes at once. No sockets.

A point completes only when all of its members have arrived, so an arrival may wait for those of the
same host without delaying an answer. What is held is sent once all of them have come, at the latest
after `HOLD_S`, and before anything else that any of them sends. A process that did not come in that
time is not waited for again until it comes: its calls may take another way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.runtime.rules.deadline import given_s
from shoal.runtime.rules.messages import Arrival, Beat, pack_limits
from shoal.runtime.rules.trail_marks import TrailMarks
from shoal.runtime.wire.frames import MAX_PAYLOAD_BYTES, Frame, join_payloads, pack_frame

HOLD_S = 0.02  # an arrival that others of its host do not follow within this is sent without them
LARGE_BYTES = 1 << 18  # a payload that is not held, nor is a point
MOST_BEATS_BYTES = 1 << 20  # signs of life in one frame; a single one may be larger

_EACH_BYTES = 1 << 8  # more than an arrival adds to a frame besides its payload
_FIELDS = ("do", "point", "step", "after")  # what must be equal to go together
_LIMITS = ("timeout_s", "given_s")


class _HeldArrival(NamedTuple):
    """An arrival that is held."""

    branch: int
    header: Mapping[str, Any]
    limit_s: float
    payload: bytes


class _Line:
    """The processes of one host that are at a point of one group in one lane."""

    def __init__(self, place: tuple[tuple[int, ...] | None, str]) -> None:
        self.place = place  # group and lane
        self.key = ""  # the point
        self.members: Collection[int] = ()  # of this host
        self.held: dict[int, _HeldArrival] = {}  # by process
        self.waiting: dict[int, int] = {}  # processes with a sent arrival, and its branch
        self.size = 0  # of what is held, bytes
        self.due = math.inf  # when it must be sent

    def missing(self) -> list[int]:
        """Return the members that have not come."""
        here = self.held.keys() | self.waiting.keys()
        return [process for process in self.members if process not in here]

    def lacks_only(self, away: Collection[int]) -> bool:
        """Return whether all members have come, except for some of these."""
        if len(self.held) + len(self.waiting) + len(away) < len(self.members):
            return False  # nearly always, before the last has come
        return all(process in away for process in self.missing())


class HeldArrivals:
    """Arrivals of the processes of one host: those that are alike become one frame."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._lines: dict[tuple[tuple[int, ...] | None, str], _Line] = {}
        self._holding: dict[_Line, None] = {}  # those that hold anything
        self._waiting: dict[int, tuple[_Line, int]] = {}  # line and process, by branch
        self._away: set[int] = set()  # processes that did not come in time, nor since
        self._last: tuple[Mapping[str, Any], str] = {}, ""  # a header, and its key

    @property
    def due(self) -> float:
        """The time at which `expire` must be called."""
        return min((line.due for line in self._holding), default=math.inf)

    def add(
        self,
        now: float,
        branch: int,
        process: int,
        frame: Frame,
        arrival: Arrival,
        members: Collection[int],
    ) -> bool:
        """Hold an arrival, or send it with all that are alike; return False if it is too large.

        Args:
          arrival: the header of the frame, parsed.
          members: the processes of this host that take part.
        """
        if frame.header is not self._last[0]:
            self._last = frame.header, json.dumps(_chosen(frame.header, _FIELDS))
        key, size = self._last[1], len(frame.body) + _EACH_BYTES
        if len(key) > LARGE_BYTES:
            return False
        place = arrival.point.group, arrival.point.lane
        line = self._lines.get(place) or self._lines.setdefault(place, _Line(place))
        line.waiting.pop(process, None)  # its answer has come, or its call was left
        differs = line.key != key and bool(line.held or line.waiting)
        if process in line.held or line.size + size > MAX_PAYLOAD_BYTES or differs:
            self._send_line(line)
        self._away.discard(process)
        line.key, line.members = key, members
        line.held[process] = _HeldArrival(branch, frame.header, arrival.timeout_s, frame.body)
        line.size += size
        line.due = min(line.due, now + HOLD_S)
        self._holding[line] = None
        # Processes of this host that disagree are all to learn it at once.
        if differs or size > LARGE_BYTES or line.lacks_only(self._away):
            self._send_line(line)
        return True

    def answered(self, branch: int) -> None:
        """Note that a branch was sent something, or has ended: its process no longer waits."""
        line, process = self._waiting.pop(branch, (None, -1))
        if line is not None and line.waiting.get(process) == branch:
            del line.waiting[process]
            if not line.waiting and not line.held:
                del self._lines[line.place]

    def left(self, process: int) -> None:
        """Note that a process is no longer on this host."""
        self._away.discard(process)

    def expire(self, now: float) -> None:
        """Send what has been held for long, and wait no more for those that have not come."""
        for line in [line for line in self._holding if line.due <= now]:
            self._away.update(line.missing())
            self._send_line(line)

    def flush(self) -> None:
        """Send all that is held."""
        for line in list(self._holding):
            self._send_line(line)

    def _send_line(self, line: _Line) -> None:
        held, line.held = line.held, {}
        line.size, line.due = 0, math.inf
        self._holding.pop(line, None)
        if not held:
            return
        for process, one in held.items():
            if self._waiting.get(one.branch, (line,))[0] is not line:
                self.answered(one.branch)  # it did not wait for that
            line.waiting[process] = one.branch
            self._waiting[one.branch] = line, process
        self._send(_packed(sorted(held.values(), key=lambda one: one.branch)))


def _packed(held: Sequence[_HeldArrival]) -> bytes:
    """Return one frame; limits that differ stand before the payloads, so that the frames of all
    hosts have equal headers."""
    first = held[0].header
    header = _chosen(first, _FIELDS)
    body = join_payloads([one.payload for one in held])
    limits_s = [one.limit_s for one in held]
    are_equal = all(one.header is first for one in held)  # nearly always
    if are_equal or len({(limit_s, given_s(limit_s)) for limit_s in limits_s}) == 1:
        header |= _chosen(first, _LIMITS)
    else:
        header |= {"timeout_s": None, "limits": True}
        body = pack_limits(limits_s) + body
    return pack_frame({**header, "branches": [one.branch for one in held]}, body)


def _chosen(header: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of these names, as far as the header has them."""
    return {name: header[name] for name in names if name in header}


class _HeldBeat(NamedTuple):
    """A sign of life that is held, since when, and the trails of it and those it replaces."""

    since: float
    beat: Beat
    trails: Sequence[TrailMarks]

    def text(self, now: float, branch: int) -> str:
        """Return its row, as it reads now."""
        aged = self.beat._replace(since_s=self.beat.since_s + now - self.since)
        return json.dumps([branch, *aged, *([self.trails] if self.trails else [])])


class HeldBeats:
    """The signs of life of the processes of one host, sent together."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: dict[int, _HeldBeat] = {}  # by branch
        self._trails_size = 0
        self._unanswered: set[int] = set()  # branches whose sign of life was sent
        self.due = math.inf  # when `frames` must be sent

    def add(
        self, now: float, branch: int, beat: Beat, trails: Sequence[TrailMarks], wanted: int
    ) -> None:
        """Hold a sign of life; it is due with all others, or when the first has waited."""
        earlier = self._held[branch].trails if branch in self._held else ()
        self._held[branch] = _HeldBeat(now, beat, [*earlier, *trails])
        self._trails_size += len(json.dumps(trails)) if trails else 0
        self.due = min(self.due, now + self._hold_s)
        if len(self._held) >= wanted or self._trails_size > MOST_BEATS_BYTES:
            self.due = now

    def frames(self, now: float) -> Iterator[bytes]:
        """Yield the frames with all that are held; one without any, if none are."""
        held, self._held = self._held, {}
        self._unanswered.update(held)
        self._trails_size, self.due = 0, math.inf
        texts: list[str] = []
        size = 0
        for branch, one in sorted(held.items()):
            text = one.text(now, branch)
            if texts and size + len(text) > MOST_BEATS_BYTES:
                yield _beats_frame(texts)
                texts, size = [], 0
            texts.append(text)
            size += len(text)
        yield _beats_frame(texts)

    def answered(self) -> list[int]:
        """Return the branches whose sign of life was sent: the meeting place has been heard."""
        branches, self._unanswered = sorted(self._unanswered), set()
        return branches


def _beats_frame(texts: Iterable[str]) -> bytes:
    return pack_frame({"do": "beats"}, f"[{','.join(texts)}]".encode())
