"""Attach the trail to arrivals; where trails differ, find the first call that does.

Only after a difference: a few rounds in a separate lane, bounded in time, as for a long
specification (see `agreement`). If the rounds fail, the error shows what is known without them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps

from shoal.errors import DivergenceError, ShoalError
from shoal.hashing import SHORT_BYTES, short_digest
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.first_difference import (
    MAX_GROUPS_SHOWN,
    Meet,
    find_first,
    find_line,
)
from shoal.runtime.rules.outcomes import ThisProcess, disagreement
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.trail import Trail, TrailsDiffer
from shoal.runtime.rules.trail_marks import TrailVersion
from shoal.runtime.system.failure_words import listed

Arrive = Callable[..., Mapping[int, bytes]]

_SEARCH_S = 10.0  # time limit of the search for the first difference
_VALUES_DIFFER = {
    "put": (
        "put takes the whole array, equal on all processes; from_host_local joins each process's "
        "own rows\n"
        "to compare only the tree, shapes, dtypes and layouts, pass put(..., same=False)"
    ),
    "create": (
        "create runs one program on all processes: its arguments must be equal on them; broadcast "
        "them first"
    ),
    "from_host_local": (
        "data that a layout does not split between processes must be equal on them; split them, "
        "or broadcast them first\n"
        "to compare only the tree, shapes, dtypes and layouts, pass same=False"
    ),
    "gradient of to_host_local": (
        "the cotangents of data that several processes hold must be equal on them: each process "
        "must compute the same loss of it, or convert its own loss back with from_host_local"
    ),
}
_ELSEWHERE = (
    "all processes must make the same put, pack, create, from_host_local, relayout and feed calls, "
    "in order, at the same lines"
)


def compares_trails(arrive: Arrive) -> Arrive:
    """Make a coordinator's `arrive` carry the trail, and name the call that differs, if any."""

    @wraps(arrive)
    def arrive_with_trail(
        self: Coordinator, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        brought = self.trails.arrive(point)
        try:
            answers = arrive(self, brought, payload, timeout_s=timeout_s)
        except TrailsDiffer as error:
            known = error
        else:
            self.trails.agree(brought, answers)
            return answers
        raise _explained(self, point, known, min(timeout_s, _SEARCH_S))

    return arrive_with_trail


def raise_found(coordinator: Coordinator, caller: str, site: str) -> None:
    """Raise a difference found by signs of life, unless a meeting has reported it meanwhile.

    Raises:
      DivergenceError: processes have made different calls.
    """
    found = coordinator.trails.take_found()
    if found is not None:
        point = Point(caller, found.group, site=site)
        raise _explained(coordinator, point, TrailsDiffer(found.versions, found.lane), _SEARCH_S)


def _end(side: TrailVersion) -> str:
    """Return the position at which a side's calls ended, as text."""
    if not side.name:
        return "it has continued since"
    return f"it reached {side.name!r}" + (f" ({side.site})" if side.site else "")


def _explained(
    coordinator: Coordinator, point: Point, known: TrailsDiffer, limit_s: float
) -> DivergenceError:
    """Return the error that names the first call that differs, or without it if it is not found.

    The trails of all processes that know of the difference then start anew, and are equal again.
    """
    trail = _taken(coordinator, point, known)
    sides = known.versions
    me = ThisProcess(coordinator.process, coordinator.hosts)
    name = known.lane or point.lane
    lane = "" if name == "main" else f" (lane {name!r})"
    heading = f"{me}: processes disagree on a call before {point.place}{lane}"
    group = tuple(sorted(process for side in sides for process in side.processes))
    advice = ""
    found: Sequence[str] | None = None
    if me.process not in group:
        advice = f"the errors on {listed(group)} name the first call that differs"
    else:
        representatives = [side.processes[0] for side in sides][:MAX_GROUPS_SHOWN]
        mine = trail if me.process in representatives else None
        meet = _rounds(coordinator, point, group, limit_s)
        try:
            with coordinator.call("the trail", f"{point.lane}: the trail", group):
                found, advice = _search(meet, mine, sides, representatives)
        except (ShoalError, ValueError, LookupError):  # that they differ is known anyway
            found = None
    shown = found or [_unexplained(side) for side in sides]
    rows: dict[str, list[int]] = {}
    for text, side in zip(shown, sides, strict=False):
        rows.setdefault(text, []).extend(side.processes)
    return disagreement(heading, rows.items(), advice)


def _taken(coordinator: Coordinator, point: Point, known: TrailsDiffer) -> Trail:
    """Return the trail that differs; its calls are not compared again."""
    if known.lane is not None:
        count = int(known.versions[0].text.partition(":")[0])
        return coordinator.trails.stop_comparing(point, known.lane, count)
    versions = json.dumps(known.versions).encode()
    base = short_digest(versions).hex()
    return coordinator.trails.start_anew(point, base)


def _rounds(coordinator: Coordinator, point: Point, group: tuple[int, ...], limit_s: float) -> Meet:
    deadline = time.monotonic() + limit_s
    here = Point("the trail", group, f"{point.lane}: the trail", "first difference", point.site)

    def meet(payload: bytes) -> Mapping[int, bytes]:
        left_s = max(0.001, deadline - time.monotonic())
        return coordinator.arrive(here, payload, timeout_s=left_s)

    return meet


def _search(
    meet: Meet, mine: Trail | None, sides: Sequence[TrailVersion], representatives: Sequence[int]
) -> tuple[Sequence[str] | None, str]:
    """Return each representative's entry at the first difference, as text, and advice."""
    answers = meet(b"" if mine is None else b"%d" % mine.first_kept)
    first = max(int(answers[process]) for process in representatives)
    number = find_first(meet, None if mine is None else _Calls(mine, first), representatives)
    if number is None:
        return None, ""
    if number < first:
        return None, f"they differ before call {first}: earlier calls are not kept on all"
    entry = None if mine is None else mine.entry(number)
    answers = meet(b"" if entry is None else entry.place.encode(errors="replace"))
    places = [answers[process].decode(errors="replace") for process in representatives]
    if len({*places}) > 1:
        ended = [f"(no call: {_end(side)} first)" for side in sides]
        return [place or end for place, end in zip(places, ended, strict=False)], _ELSEWHERE
    lines = find_line(meet, None if entry is None else entry.lines, representatives)
    if lines is None:
        return places, ""
    shown = [lines[1][process] for process in representatives]
    before = {line.rpartition(": values ")[0] for line in shown}
    is_of_values = len(before) == 1 and "" not in before
    advice = _VALUES_DIFFER.get(places[0].partition(" at ")[0], "") if is_of_values else ""
    return [f"{place}: {line}" for place, line in zip(places, shown, strict=True)], advice


class _Calls:
    """The calls of a trail from `first` on. Whether all calls before are equal is known, and a
    difference among them shows in the last one's digest. `ItemsInOrder`."""

    def __init__(self, trail: Trail, first: int) -> None:
        self._trail, self._first = trail, first

    def __len__(self) -> int:
        return self._trail.count

    def digest(self, low: int, high: int) -> bytes:
        """See `ItemsInOrder.digest`. Covers all calls so far: those before `low` are equal."""
        if high < self._first:
            return bytes(SHORT_BYTES)
        end = min(high, self._trail.count)
        text = b"%d:" % end + self._trail.digest_of(end)
        return short_digest(text)

    def show(self, index: int) -> str:
        """See `ItemsInOrder.show`."""
        entry = self._trail.entry(index)
        return "" if entry is None else entry.place


def _unexplained(side: TrailVersion) -> str:
    count, _, digest = side.text.partition(":")
    made = f"{count} call{'' if count == '1' else 's'}, digest {digest[:8]}" if count else "no call"
    return f"{made}; then {_end(side)}"
