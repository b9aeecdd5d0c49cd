"""Compare call records of different lengths, as far as both go.

Beside the main line, threads make their calls at their own pace, so two processes rarely have made
the same number when their main lines meet. Each sends digests of its first n calls for a few n, its
*marks*, chosen so that two processes always share one. Signs of life carry marks of all call
records, too, so that processes that never meet are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shoal.hashing import SHORT_BYTES
from shoal.runtime.rules.point import Point

_MOST_LANES = 8  # in an arrival
_MOST_TEXT = 1000  # characters of a lane's name; lanes with longer names are not compared
_TEXT = 1000  # characters of a point's name and of its call site in an answer
UNKNOWN = "?"  # the text of a call record that can no longer be compared


Key = tuple[tuple[int, ...] | None, str, str]  # group, lane, base


class Marks:
    """The marks of one call record: every power of two, and the last two multiples of each.

    Two call records of a ≥ b calls share a mark that is at least the largest power of two ≤ b,
    and more than b - 2(a - b): for 1,000 and 993 calls, that of 992.
    """

    def __init__(self) -> None:
        self._powers: list[tuple[int, str]] = []
        self._levels: list[tuple[tuple[int, str], ...]] = []  # [n]: multiples of 2^n, ascending

    def add(self, count: int, digest: bytes) -> None:
        """Add the digest of the first `count` calls; counts are given in order, from 1."""
        mark = (count, digest[:SHORT_BYTES].hex())
        level = 0
        while count % (1 << level) == 0:
            if level == len(self._levels):
                self._levels.append(())
                self._powers.append(mark)
            self._levels[level] = (*self._levels[level][-1:], mark)
            level += 1

    @property
    def text(self) -> str:
        """All marks, ascending: `1:… 2:… 4:…`."""
        marks = sorted({*self._powers, *(mark for level in self._levels for mark in level)})
        return " ".join(f"{count}:{digest}" for count, digest in marks)


class LaneRecord(NamedTuple):
    """The call record of another lane, as sent with an arrival in the main lane."""

    name: str
    base: str  # identifies the first call: only call records of one base can be compared
    marks: str

    @property
    def text(self) -> str:
        """One line: the name as JSON, without line breaks or tabs, base, marks."""
        return f"{json.dumps(self.name)}\t{self.base}\t{self.marks}"


class RecordMarks(NamedTuple):
    """The call record of one group in one lane, as sent with a heartbeat."""

    group: tuple[int, ...] | None
    lane: str
    base: str
    marks: str


class RecordVersion(NamedTuple):
    """The calls of some processes, where not all made the same calls."""

    text: str  # "count:digest" of their calls
    name: str  # of the point that they had reached, and its call site; empty if they had not
    site: str
    processes: Sequence[int]


class RecordVersions(NamedTuple):
    """A call record of which there is more than one version."""

    versions: Sequence[RecordVersion]
    lane: str | None = None  # beside the main line; None: that of the point


class Found(NamedTuple):
    """A difference found by heartbeats, or at the end of the program."""

    group: tuple[int, ...] | None
    lane: str
    base: str
    versions: Sequence[RecordVersion]


def lanes_of(lanes: list[LaneRecord]) -> str:
    """Return the part of an arrival about other lanes, after that about its own."""
    kept = [lane for lane in lanes if len(lane.name) <= _MOST_TEXT][-_MOST_LANES:]
    return "".join(f"\n{lane.text}" for lane in kept)


def exact_of(text: str) -> str:
    """Return the part of an arrival about its own lane, which must be equal on all."""
    return text.partition("\n")[0]


def records_differ(one: str, other: str) -> bool:
    """Return whether two call records, as sent with arrivals, show that calls differed."""
    if one == other:  # the common case
        return False
    # Both have come to the same point of this lane, so that counts must agree, too. Of other lanes
    # only marks are compared, as far as both go: threads there run at their own pace.
    one, other = exact_of(one), exact_of(other)
    return one != other and UNKNOWN not in (one, other)


def record_versions(points: Iterable[tuple[int, Point]]) -> RecordVersions | None:
    """Group arrivals by call record; None: the call records do not differ."""
    sides: dict[str, tuple[Point, list[int]]] = {}
    for process, point in points:
        text = exact_of(point.call_record)
        if text != UNKNOWN:
            sides.setdefault(text, (point, []))[1].append(process)
    if len(sides) < 2:
        return None
    rows = sorted((sorted(processes), point) for point, processes in sides.values())
    return RecordVersions([
        RecordVersion(exact_of(p.call_record)[:_TEXT], p.name[:_TEXT], p.site[:_TEXT], processes)
        for processes, p in rows
    ])  # fmt: skip


class SharedMarks:
    """The marks of all arrivals at one gathering."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str, int], dict[str, list[int]]] = {}

    def add(self, process: int, text: str) -> RecordVersions | None:
        """Add the marks of an arrival; return the first difference from earlier arrivals."""
        for lane, base, count, digest in _marks_in(text):
            versions = self._versions.setdefault((lane, base, count), {})
            versions.setdefault(digest, []).append(process)
            if len(versions) > 1:
                sides = sorted((who, f"{count}:{digest}") for digest, who in versions.items())
                return RecordVersions(
                    [RecordVersion(mark, "", "", who) for who, mark in sides], lane
                )
        return None


class LatestMarks:
    """The marks in the last heartbeat of each process, and their differences."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, str, int], tuple[Key, list[tuple[int, str]]]] = {}
        self._holders: dict[Key, dict[int, dict[str, set[int]]]] = {}  # count → digest → processes
        self.found: dict[Key, Found] = {}  # each is reported once

    def receive(self, process: int, call_record: RecordMarks) -> Found | None:
        """Take the marks of a process; return the first difference that they show, once."""
        key, marks = call_record[:3], sorted({*_marks(call_record.marks)})
        self._forget(process, call_record)
        if key in self.found:
            return None
        self._last[call_record.group, call_record.lane, process] = key, marks
        holders = self._holders.setdefault(key, {})
        for count, digest in marks:
            holders.setdefault(count, {}).setdefault(digest, set()).add(process)
        for count, _ in marks:
            versions = holders[count]
            if len(versions) > 1:
                sides = sorted((sorted(who), digest) for digest, who in versions.items())
                differing = [
                    RecordVersion(f"{count}:{digest}", "", "", who) for who, digest in sides
                ]
                difference = self.found[key] = Found(*key, differing)
                return difference
        return None

    def _forget(self, process: int, call_record: RecordMarks) -> None:
        """Drop earlier marks of a process for this call record, or for the one it replaces."""
        key, marks = self._last.pop(
            (call_record.group, call_record.lane, process), ((None, "", ""), [])
        )
        holders = self._holders.get(key, {})
        for count, digest in marks:
            holders[count][digest].discard(process)
            if not holders[count][digest]:
                del holders[count][digest]
            if not holders[count]:
                del holders[count]
        if not holders:
            self._holders.pop(key, None)


def _marks(text: str) -> Iterator[tuple[int, str]]:
    """Yield count and digest of each mark; skip malformed ones."""
    for mark in text.split(" "):
        count, colon, digest = mark.partition(":")
        if colon and count.isdecimal() and len(count) < 20:
            yield int(count), digest


def _marks_in(text: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield lane, base, count and digest of each mark; skip malformed ones."""
    for line in text.split("\n")[1:][:_MOST_LANES]:
        name, _, rest = line.partition("\t")
        base, _, marks = rest.partition("\t")
        try:
            lane = json.loads(name)
        except (ValueError, RecursionError):  # deep nesting overflows the parser's stack
            continue
        if isinstance(lane, str):
            for count, digest in _marks(marks):
                yield lane, base, count, digest
