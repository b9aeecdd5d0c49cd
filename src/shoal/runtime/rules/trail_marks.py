"""Trails that are not at one point: compared as far as both have come.

Beside the main line, threads make their calls at their own pace, so two processes rarely have the
same number of them when their main lines meet. Each brings digests of its first n calls for a few
n, its *marks*, chosen so that two processes always share one. Marks of all trails ride in signs of
life, too, so that processes are compared that never meet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shoal.hashing import SHORT_BYTES

_MOST_LANES = 8  # of which an arrival tells
_MOST_TEXT = 1000  # characters of the name of a lane; a lane of a longer one is not compared


Key = tuple[tuple[int, ...] | None, str, str]  # group, lane, base


class Marks:
    """The marks of one trail: every power of two, and the last two multiples of each.

    Two trails of a ≥ b calls share a mark that is at least the largest power of two ≤ b, and more
    than b - 2(a - b): with 1,000 and 993 calls they share that of 992.
    """

    def __init__(self) -> None:
        self._powers: list[tuple[int, str]] = []
        self._levels: list[tuple[tuple[int, str], ...]] = []  # [n]: multiples of 2^n, ascending

    def add(self, count: int, digest: bytes) -> None:
        """The first `count` calls have this digest; every count comes once, in order, from 1."""
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


class LaneTrail(NamedTuple):
    """The trail of one lane beside the main line, as an arrival in the main line tells of it."""

    name: str
    base: str  # the calls are counted from there: only trails of one base can be compared
    marks: str

    @property
    def text(self) -> str:
        """A line: the name as JSON, which has neither line breaks nor tabs, base, marks."""
        return f"{json.dumps(self.name)}\t{self.base}\t{self.marks}"


class TrailMarks(NamedTuple):
    """The trail of one group in one lane, as a sign of life tells of it."""

    group: tuple[int, ...] | None
    lane: str
    base: str
    marks: str


class TrailVersion(NamedTuple):
    """What some processes called, where not all called the same."""

    text: str  # "count:digest" of their calls
    name: str  # of the point that they had come to, and its call site; empty where they had not
    site: str
    processes: Sequence[int]


class TrailVersions(NamedTuple):
    """A trail of which there is more than one version."""

    versions: Sequence[TrailVersion]
    lane: str | None = None  # beside the main line; None: that of the point


class Found(NamedTuple):
    """A difference that signs of life have shown."""

    group: tuple[int, ...] | None
    lane: str
    base: str
    versions: Sequence[TrailVersion]


def lanes_of(lanes: list[LaneTrail]) -> str:
    """Return what an arrival says of them, after what it says of its own lane."""
    told = [lane for lane in lanes if len(lane.name) <= _MOST_TEXT][-_MOST_LANES:]
    return "".join(f"\n{lane.text}" for lane in told)


def exact_of(text: str) -> str:
    """Return what an arrival says of the calls of its own lane: they must be equal."""
    return text.partition("\n")[0]


class SharedMarks:
    """The marks that those have brought who have come to one gathering."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str, int], dict[str, list[int]]] = {}

    def add(self, process: int, text: str) -> TrailVersions | None:
        """Take what a process brings; return where it differs from what others brought, if it
        does."""
        for lane, base, count, digest in _marks_in(text):
            versions = self._versions.setdefault((lane, base, count), {})
            versions.setdefault(digest, []).append(process)
            if len(versions) > 1:
                sides = sorted((who, f"{count}:{digest}") for digest, who in versions.items())
                return TrailVersions([TrailVersion(at, "", "", who) for who, at in sides], lane)
        return None


class LatestMarks:
    """The marks that the last sign of life of each process told, and what is wrong with them."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, str, int], tuple[Key, list[tuple[int, str]]]] = {}
        self._holders: dict[Key, dict[int, dict[str, set[int]]]] = {}  # count → digest → processes
        self._found: set[Key] = set()  # is told once

    def hear(self, process: int, told: TrailMarks) -> Found | None:
        """Take what a process tells; return the first difference that it shows, once."""
        key, marks = told[:3], sorted({*_marks(told.marks)})
        self._forget(process, told)
        if key in self._found:
            return None
        self._last[told.group, told.lane, process] = key, marks
        holders = self._holders.setdefault(key, {})
        for count, digest in marks:
            holders.setdefault(count, {}).setdefault(digest, set()).add(process)
        for count, _ in marks:
            if len(versions := holders[count]) > 1:
                self._found.add(key)
                sides = sorted((sorted(who), digest) for digest, who in versions.items())
                at = [TrailVersion(f"{count}:{digest}", "", "", who) for who, digest in sides]
                return Found(*key, at)
        return None

    def _forget(self, process: int, told: TrailMarks) -> None:
        """What a process told before of this trail, or of the one that it had before, is over."""
        key, marks = self._last.pop((told.group, told.lane, process), ((None, "", ""), []))
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
    """Yield count and digest of each mark; what is none is passed over."""
    for mark in text.split(" "):
        count, colon, digest = mark.partition(":")
        if colon and count.isdecimal() and len(count) < 20:
            yield int(count), digest


def _marks_in(text: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield lane, base, count and digest of each mark; what is none is passed over."""
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
