"""Attach the call record to arrivals; where call records differ, find the first call that does.

Only after a difference: a few rounds in a separate lane, bounded in time, as for a long
specification (see `agreement`). If the rounds fail, the error shows what is known without them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

from shoal.errors import DivergenceError, ShoalError
from shoal.hashing import SHORT_BYTES, short_digest
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import RecordsDiffer, ThisProcess, call_at
from shoal.runtime.failures.comparison import (
    Kind,
    ShownSide,
    compare_lines,
    divergence_error,
    headline,
    needs,
    with_late,
)
from shoal.runtime.rules.call_record import CallRecord
from shoal.runtime.rules.endings import AT_END
from shoal.runtime.rules.first_difference import (
    ENDED,
    MAX_GROUPS_SHOWN,
    Meet,
    OutOfStepError,
    find_first,
    find_line,
    highest,
)
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.record_marks import UNKNOWN, Found, RecordVersion
from shoal.runtime.system.callsite import line_of

Arrive = Callable[..., Mapping[int, bytes]]

_SEARCH_S = 10.0  # time limit of the search for the first difference
_SEARCH_AT_END_S = 1.0  # the same: some may have left


def compares_records(arrive: Arrive) -> Arrive:
    """Make `arrive` of a job client carry the call record, and name the call that differs."""

    @wraps(arrive)
    def arrive_with_record(
        self: JobClient, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        brought = self.call_records.arrive(point)
        try:
            answers = arrive(self, brought, payload, timeout_s=timeout_s)
        except RecordsDiffer as error:
            known = error
        else:
            self.call_records.agree(brought, answers)
            return answers
        raise _explained(self, point, known, min(timeout_s, _SEARCH_S))

    return arrive_with_record


def raise_found(client: JobClient, caller: str, site: str, limit_s: float = _SEARCH_S) -> None:
    """Raise a difference found by heartbeats, unless a meeting has reported it meanwhile.

    Raises:
      DivergenceError: processes have made different calls.
    """
    difference = client.call_records.take_found()
    if difference is not None:
        point = Point(caller, difference.group, site=site)
        raise _explained(
            client, point, RecordsDiffer(difference.versions, difference.lane), limit_s
        )


def raise_at_end(client: JobClient, differences: Sequence[Found]) -> None:
    """Raise the first of the differences known at the end of the program, unless it was before.

    Raises:
      DivergenceError: processes have made different calls.
    """
    if not differences:
        return
    for difference in reversed(differences):
        client.call_records.receive(difference)
    point = Point(AT_END)
    client.progress.begin_wait(point, time.monotonic())
    try:
        raise_found(client, AT_END, "", _SEARCH_AT_END_S)
    finally:
        client.progress.end_wait(point)


def _end(side: RecordVersion) -> str:
    """Return the position at which a side's calls ended, as text."""
    if not side.name:
        return "it has continued since"
    return f"it reached {side.name!r}" + (f" ({line_of(side.site)})" if side.site else "")


def _explained(
    client: JobClient, point: Point, known: RecordsDiffer, limit_s: float
) -> DivergenceError:
    """Return the error that names the first call that differs, or without it if it is not found."""
    call_record = _taken(client, point, known)
    sides = known.versions
    me = ThisProcess(client.process, client.hosts)
    group = tuple(sorted(process for side in sides for process in side.processes))
    rows = [_unexplained(side, call_record) for side in sides]
    shown = _Shown(rows, advice=needs("", "call", is_silent=True))
    key = key_of([known.lane, *sides])
    lane = f"{point.lane}: the trail"
    if known.lane == point.lane:  # found by heartbeats: perhaps not all come, and it fails
        lane = f"{lane} {key}"

    def search(meet: Meet, representatives: Sequence[int]) -> _Shown | None:
        mine = call_record if me.process in representatives else None
        return _search(meet, mine, sides, representatives)

    here = Point("the trail", lane=lane, site=point.site)
    explanation = find_together(client, point, here, sides, search, key=key, limit_s=limit_s)
    shown = _shown_of(explanation) or shown
    error = _error(me, point, known, shown)
    if me.process in group or call_record.text == UNKNOWN:
        return error
    like = next((side.processes[0] for side in sides if _is_of(side, call_record.text)), None)
    return error if like is None else with_late(error, me.process, like)


class _Shown(NamedTuple):
    """The first call that differs."""

    rows: Sequence[ShownSide]  # of each representative, without processes
    kind: Kind = Kind("call")
    advice: str = ""
    step: int | None = None  # the first in which one of them made it


def _shown_of(facts: Any) -> _Shown | None:
    """Return what another process has found, as it came from JSON."""
    try:
        rows, kind, advice, step = facts
        return _Shown([ShownSide((), *row[1:]) for row in rows], Kind(*kind), advice, step)
    except (TypeError, ValueError):
        return None


def _error(me: ThisProcess, point: Point, known: RecordsDiffer, shown: _Shown) -> DivergenceError:
    """Return the error: the first call that differs."""
    name = known.lane or point.lane
    lane = "" if name == "main" else f" (lane {name!r})"
    rows: dict[ShownSide, list[int]] = {}
    for row, side in zip(shown.rows, known.versions, strict=False):
        rows.setdefault(row, []).extend(side.processes)
    call = next((row.call for row in shown.rows if row.call), "")
    return divergence_error(
        f"{me}: {headline(shown.kind, call)}{lane}",
        [row._replace(processes=sorted(who)) for row, who in rows.items()],
        kind=shown.kind,
        advice=shown.advice,
        found_at=call_at(point),
        step=shown.step,
    )


def _is_of(side: RecordVersion, mine: str) -> bool:
    """Return whether calls, as text, are those of a side, whose digest may be a short one."""
    return mine.startswith(side.text) if side.text else not mine


def _taken(client: JobClient, point: Point, known: RecordsDiffer) -> CallRecord:
    """Return the call record that differs. It starts again, if this is a meeting of its line."""
    if known.lane is not None:
        count = int(known.versions[0].text.partition(":")[0])
        return client.call_records.mark_reported(point, known.lane, count)
    versions = json.dumps(known.versions).encode()
    base = short_digest(versions).hex()
    return client.call_records.start_anew(point, base)


class _Made(NamedTuple):
    """The call that a process made, where call records differ first; without one, empty."""

    operation: str = ""
    site: str = ""
    step: int | None = None

    @classmethod
    def of(cls, sent: bytes) -> _Made:
        """Undo its form in JSON.

        Raises:
          OutOfStepError: it is none, so the other process is not in this round.
        """
        with contextlib.suppress(ValueError):
            match json.loads(sent):
                case [str(operation), str(site), int() | None as step]:
                    return cls(operation, site, step)
        raise OutOfStepError("no call")


def _search(
    meet: Meet,
    mine: CallRecord | None,
    sides: Sequence[RecordVersion],
    representatives: Sequence[int],
) -> _Shown | None:
    """Return each representative's entry at the first difference, if it is found."""
    answers = meet(b"" if mine is None else b"%d" % mine.first_kept)
    first = highest(answers, representatives)
    index = find_first(meet, None if mine is None else _Calls(mine, first), representatives)
    if index is None:
        return None
    if index < first:
        advice = f"They differ before call {first}: earlier calls are not kept on all."
        return _Shown([_unexplained(side, None) for side in sides], advice=advice)
    entry = None if mine is None else mine.entry(index)
    own = _Made() if entry is None else _Made(entry.operation, entry.site, entry.step)
    answers = meet(json.dumps(own).encode())
    made = [_Made.of(answers[process]) for process in representatives]
    calls = [ShownSide((), call=row.operation, site=row.site) for row in made]
    step = min((row.step for row in made if row.step is not None), default=None)
    if len({*calls}) > 1:
        shown_sides = sides[: len(calls)]  # those that have a representative
        rows = [
            row if row.call else ShownSide((), f"(no call: {_end(side)} first)")
            for row, side in zip(calls, shown_sides, strict=True)
        ]
        return _Shown(rows, advice=needs("", "call", is_silent=True), step=step)
    call = calls[0]
    difference = find_line(meet, None if entry is None else entry.lines, representatives)
    if difference is None:
        return _Shown(calls, step=step)
    _, lines = difference
    kind, shown = compare_lines([lines[process] for process in representatives], ENDED)
    rows = [call._replace(said=line) for line in shown]
    return _Shown(rows, kind, needs(call.call, kind.what), step)


class _Calls:
    """The calls of a call record from `first` on. Whether all calls before are equal is known, and
    a difference among them shows in the last one's digest. `ItemsInOrder`."""

    def __init__(self, call_record: CallRecord, first: int) -> None:
        self._call_record, self._first = call_record, first

    def __len__(self) -> int:
        return self._call_record.count

    def digest(self, low: int, high: int) -> bytes:
        """See `ItemsInOrder.digest`. Covers all calls so far: those before `low` are equal."""
        if high < self._first:
            return bytes(SHORT_BYTES)
        end = min(high, self._call_record.count)
        text = b"%d:" % end + self._call_record.digest_of(end)
        return short_digest(text)

    def show(self, index: int) -> str:
        """See `ItemsInOrder.show`."""
        entry = self._call_record.entry(index)
        return "" if entry is None else entry.place


def _unexplained(side: RecordVersion, mine: CallRecord | None) -> ShownSide:
    """Return what is known of a side: its number of calls, and the last one of this process's."""
    count, _, digest = side.text.partition(":")
    made = "no call"
    if count:
        calls = "call" if count == "1" else "calls"
        made = f"{count} {calls}, digest {digest[:8]}"
    if mine is not None and mine.count > mine.first_kept and _is_of(side, mine.text):
        last = mine.entry(mine.count - 1)
        made += f", the last {last.place}" if last else ""
    return ShownSide((), f"{made}; then {_end(side)}")


# ---- Give processes that arrive later the difference that the others have found.
#
# The processes that are compared search for the first difference together, in a few rounds. The
# lowest of them leaves the result with the coordinator, and processes that arrive later, which
# take no part in the search, fetch it there. Nothing is sent unless there is a difference.


_PAUSES_S = (0.002, 0.1)  # between two queries: the first, and the longest

Search = Callable[[Meet, Sequence[int]], Any]  # by rounds, between these representatives


def find_together(
    client: JobClient,
    point: Point,
    here: Point,
    sides: Sequence[Any],
    search: Search,
    *,
    key: str,
    limit_s: float,
) -> Any:
    """Return what the processes that differ have found, as JSON has it; None: nothing.

    Args:
      point: where the processes met.
      here: the point of a round, without its group.
      sides: what differs, each with its `processes`.
      key: of the difference; see `key_of`.
    """
    deadline = time.monotonic() + limit_s
    group = tuple(sorted(process for side in sides for process in side.processes))
    if client.process not in group:
        return fetch(client, key, group, limit_s)
    here = here._replace(group=group)

    def meet(payload: bytes) -> Mapping[int, bytes]:
        left_s = max(0.001, deadline - time.monotonic())
        return client.arrive(here, payload, timeout_s=left_s)

    explanation = None
    try:
        with client.call("first difference", here.lane, group):
            explanation = search(meet, [side.processes[0] for side in sides][:MAX_GROUPS_SHOWN])
    except ShoalError:  # that they differ is known anyway
        pass
    finally:
        publish(client, key, point, group, explanation)
    return explanation


def key_of(sides: Any) -> str:
    """Return the key of a difference, from its sides: equal on all processes."""
    return short_digest(json.dumps(sides).encode()).hex()


def publish(
    client: JobClient, key: str, point: Point, group: Collection[int], explanation: Any
) -> None:
    """Leave what `group` has found, if this is its lowest process and others have yet to arrive.

    Args:
      point: where the processes met.
      found: what was found, for JSON; None: nothing.
    """
    members = client.num_processes if point.group is None else len({*point.group})
    if client.process == min(group) and len(group) < members:
        client.explain(key, "" if explanation is None else json.dumps(explanation))


def fetch(client: JobClient, key: str, group: Collection[int], limit_s: float) -> Any:
    """Return what the lowest of `group` has found, or None if it is not there in time."""
    deadline = time.monotonic() + limit_s
    pause_s, longest_s = _PAUSES_S
    text = None
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            text = client.explanation(key, min(group), timeout_s=left_s)
            if text is not None:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, longest_s)
    except ShoalError:  # that they differ is known anyway
        return None
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None
