"""Table of a job's processes and where each one is, for reading in a hurry.

Most processes usually wait at one place, for a few that are elsewhere; those few come first. In a
large job, processes at the same place share a row.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.draw.amounts import in_bytes, in_seconds
from shoal.errors import counted
from shoal.runtime.failures.process_text import numbers_of
from shoal.runtime.job_status import SLOW
from shoal.runtime.rules.point import Member, without_age
from shoal.runtime.system.foreign_text import headline_of

GONE = ("left", "failed", "lost")  # final states
_URGENCY = {"failed": 0, "lost": 0, "stopped": 1, "silent": 1, "absent": 2, "here": 3, "left": 4}
_STYLES = {
    "failed": "bold red",
    "lost": "bold red",
    "stopped": "bold yellow",
    "silent": "bold yellow",
    "left": "dim",
}
_STATES = ("here", "stopped", "silent", "absent", "failed", "lost", "left")
_MOST_HOST = 24  # characters of a host's name
_COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "rank": {"no_wrap": True},
    "host": {"no_wrap": True, "overflow": "ellipsis", "max_width": _MOST_HOST},
    "state": {"no_wrap": True},
    "step": {"no_wrap": True, "justify": "right"},
    "compute time": {"no_wrap": True, "justify": "right"},
    "where": {"overflow": "fold"},
    "since": {"no_wrap": True, "justify": "right"},
    "memory": {"no_wrap": True, "justify": "right"},
}
_DROPPED = ("memory", "compute time", "host")  # in this order, if the terminal is too narrow
_LEAST_WHERE = 20  # characters; may wrap, but is always shown
_A_TIME = re.compile(r"[\d.]+ s\b")  # differs among processes lost for the same reason
_MOST_PROGRAMS = 3  # shown, of those that only some have compiled
_MOST_LETTERS = 28  # characters for the processes of a row


class ServiceRow(NamedTuple):
    """The status of a service of the job, such as JAX's."""

    name: str
    host: str
    state: str  # as for a `Member`
    last_words: str  # why it is gone, if it is


class Roll(NamedTuple):
    """The coordinator's view of a job."""

    address: str
    members: tuple[Member, ...]
    services: tuple[ServiceRow, ...] = ()
    programs: tuple[str, ...] = ()  # that only some have compiled, as sentences

    @property
    def is_over(self) -> bool:
        """Have all processes ended?"""
        return all(member.state in GONE for member in self.members)

    @property
    def counts(self) -> dict[str, int]:
        """The number of processes in each occupied state."""
        counts = Counter(member.state for member in self.members)
        return {state: counts[state] for state in [*_STATES, *counts] if counts[state]}

    @property
    def median_step_s(self) -> float | None:
        """The median step time of the present processes, seconds; None if none has one."""
        times_s = [m.step_s for m in self.members if m.step_s is not None and m.state not in GONE]
        return statistics.median(times_s) if times_s else None

    @property
    def median_own_s(self) -> float | None:
        """The same for the compute time: without waits for others, seconds."""
        times_s = [m.own_s for m in self.members if m.own_s is not None and m.state not in GONE]
        return statistics.median(times_s) if times_s else None


class Row(NamedTuple):
    """Processes at the same place, with the worst of their numbers."""

    members: tuple[Member, ...]
    slowness: float | None  # of the slowest, relative to the median over all
    is_majority: bool = False

    @property
    def first(self) -> Member:
        """A representative of the others: of the same state, place and step."""
        return self.members[0]

    @property
    def own_s(self) -> float | None:
        """The compute time of the slowest, seconds."""
        return max((m.own_s for m in self.members if m.own_s is not None), default=None)

    @property
    def since_s(self) -> float:
        """How long the first of them has been there, seconds."""
        return max(member.since_s for member in self.members)

    @property
    def memory_bytes(self) -> int:
        """The largest memory use."""
        return max(member.memory_bytes for member in self.members)


def _notability(row: Row) -> tuple[object, ...]:
    """Sort key: lost and silent processes first, then the slow, the late and the stuck."""
    first = row.first
    slow = 0.0
    if row.slowness is not None and row.slowness >= SLOW:
        slow = row.slowness
    step = -1 if first.step is None else first.step
    urgency = _URGENCY.get(first.state, 0)
    since_s = 0.0 if row.is_majority else row.since_s
    return (urgency, row.is_majority, -slow, step, first.is_waiting, -since_s)


ORDERS: Mapping[str, Callable[[Row], tuple[object, ...]]] = {
    "urgency": _notability,
    "rank": lambda row: (),  # ties are broken by rank
    "host": lambda row: (row.first.host,),
    "step": lambda row: (-1 if row.first.step is None else row.first.step,),
    "time": lambda row: (-(row.own_s or 0.0),),
    "since": lambda row: (-row.since_s,),
    "memory": lambda row: (-row.memory_bytes,),
}


def rows_of(roll: Roll, *, order: str = "urgency", fold: bool = True) -> list[Row]:
    """Return the rows in the given order; each process is in exactly one.

    Args:
      roll: the processes.
      order: a key of `ORDERS`; "urgency": processes apart from the majority come first.
      fold: processes of one state, place, step, and pace share a row.
    """
    alike = Counter(_scene(member) for member in roll.members)
    majority: object = None
    if len(roll.members) > 2:  # of two processes, neither is apart from the others
        scene, size = alike.most_common(1)[0]
        majority = scene if 2 * size > len(roll.members) else None
    median_s = roll.median_own_s
    slowness = {member.process: slowness_of(member, median_s) for member in roll.members}
    groups: dict[object, list[Member]] = {}
    for member in roll.members:
        is_slow = (slowness[member.process] or 0.0) >= SLOW
        key = (*_scene(member), member.step, is_slow) if fold else member.process
        groups.setdefault(key, []).append(member)
    rows = []
    for members in groups.values():
        known = [own for member in members if (own := slowness[member.process]) is not None]
        is_majority = _scene(members[0]) == majority
        rows.append(Row(tuple(members), max(known, default=None), is_majority))
    return sorted(rows, key=lambda row: (ORDERS[order](row), row.first.process))


def _scene(member: Member) -> tuple[object, ...]:
    """A key that is equal for processes at the same place in the same state."""
    if member.state in GONE or not member.place:
        return member.state, _A_TIME.sub("", standing(member))
    return member.state, member.place, member.is_waiting


def slowness_of(member: Member, median_s: float | None) -> float | None:
    """Return the compute time of a step as a multiple of the median; None if unknown."""
    if not median_s or member.own_s is None:
        return None
    return member.own_s / median_s


def standing(member: Member) -> str:
    """Return where a process is, or why it is gone, on one line."""
    if member.state in GONE or not member.place:
        text, _ = without_age(member)  # which has a column of its own
        return headline_of(text)
    place = f"waits at {member.place}" if member.is_waiting else f"last at {member.place}"
    if member.still and member.state != "stopped":  # its state says so
        return f"{member.still}; {place}"
    return place


def render_roll(
    roll: Roll,
    *,
    order: str = "urgency",
    most_rows: int | None = None,
    note: str = "",
    width: int | None = None,
) -> RenderableType:
    """Return a `rich` renderable.

    Args:
      roll: the processes.
      order: see `rows_of`.
      most_rows: if there are more processes, those at the same place share a row; if there are
        still more rows, the first ones are shown. None: a row for every process.
      note: a remark on the whole, such as that it is outdated.
      width: of the terminal, to omit columns that do not fit.
    """
    fold = most_rows is not None and len(roll.members) > most_rows
    rows = rows_of(roll, order=order, fold=fold)
    shown = rows[:most_rows]
    hosts = sorted({member.host for member in roll.members if member.host})
    table, left_out = _table(shown, len(hosts) > 1, width)
    parts: list[RenderableType] = [_title(roll, hosts), table]
    if left_out:
        parts.append(Text(f"too narrow for {', '.join(left_out)}", style="dim"))
    if len(rows) > len(shown):
        rest = sum(len(row.members) for row in rows[len(shown) :])
        more = counted(rest, "more process", "more processes")
        parts.append(Text(f"and {more} in {counted(len(rows) - len(shown), 'row')}: --all"))
    parts += [_service(service) for service in roll.services]
    parts += [Text(line, style="yellow") for line in roll.programs[:_MOST_PROGRAMS]]
    others = len(roll.programs) - _MOST_PROGRAMS
    if others > 0:
        parts.append(Text(f"and {counted(others, 'more such program')}: --json"))
    if note:
        parts.append(Text(note, style="bold red"))
    return Group(*parts)


def _title(roll: Roll, hosts: Sequence[str]) -> Text:
    processes = counted(len(roll.members), "process", "processes")
    text = Text(f"{processes} at {roll.address}", style="bold")
    if hosts:
        text.append(f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts")
    text.append(": ")
    for index, (state, size) in enumerate(roll.counts.items()):
        text.append(", " if index else "")
        text.append(f"{size} {state}", style=_STYLES.get(state, ""))
    median_s = roll.median_step_s
    if median_s is not None:
        text.append(f"; median step time {in_seconds(median_s)}")
        own_s = roll.median_own_s
        if own_s is not None and own_s < 0.99 * median_s:
            text.append(f", compute time {in_seconds(own_s)}")
    return text


def _table(rows: Sequence[Row], has_hosts: bool, width: int | None) -> tuple[Table, list[str]]:
    """Return the table, and the columns that do not fit."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    lines = [_cells(row) for row in rows]
    widths = {name: max([0, *(len(line[name].plain) for line in lines)]) for name in _COLUMNS}
    shown = [n for n in _COLUMNS if widths[n] and (has_hosts or n != "host")]
    left_out = []
    for name in _DROPPED:
        if width is not None and name in shown and _least_width(widths, shown) > width:
            shown.remove(name)
            left_out.append(name)
    for name in shown:
        table.add_column(name, **_COLUMNS[name])
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*map(line.get, shown), style="dim" if row.first.state == "left" else "")
    return table, left_out


def _least_width(widths: Mapping[str, int], shown: Sequence[str]) -> int:
    """Return the width of a table with these columns if the place wraps as much as it may."""
    most = {"where": _LEAST_WHERE, "host": _MOST_HOST}
    wide = [max(len(n), min(widths[n], most.get(n, widths[n]))) for n in shown]
    return sum(wide) + 2 * (len(shown) - 1)


def _cells(row: Row) -> dict[str, Text]:
    """Return the text of each column."""
    first, is_gone = row.first, row.first.state in GONE
    hosts = {member.host for member in row.members}
    since, memory = "", ""
    if is_gone or first.place:
        since = in_seconds(row.since_s)
    if row.memory_bytes and not is_gone:
        memory = in_bytes(row.memory_bytes)
    return {
        "rank": Text(_processes(row.members)),
        "host": Text(first.host if len(hosts) == 1 else f"{len(hosts)} hosts"),
        "state": Text(first.state, style=_STYLES.get(first.state, "")),
        "step": Text("" if first.step is None else str(first.step)),
        "compute time": _pace(row),
        "where": Text(standing(first)),
        "since": Text(since),
        "memory": Text(memory),
    }


def _pace(row: Row) -> Text:
    if row.own_s is None:
        return Text("")
    times = "" if row.slowness is None else f", {row.slowness:.1f}x"
    is_slow = row.slowness is not None and row.slowness >= SLOW
    return Text(f"{in_seconds(row.own_s)}{times}", style="bold yellow" if is_slow else "")


def _processes(members: Sequence[Member]) -> str:
    """Return `3`, `0-2, 4-511`, or as much of it as fits: `0, 2, 4, … (500)`."""
    text = numbers_of(member.process for member in members)
    if len(text) <= _MOST_LETTERS:
        return text
    return f"{text[: _MOST_LETTERS - 8].rpartition(', ')[0]}, … ({len(members)})"


def _service(service: ServiceRow) -> Text:
    text = Text(f"{service.name} ({service.host}): " if service.host else f"{service.name}: ")
    text.append(service.state, style=_STYLES.get(service.state, ""))
    return text.append(f": {service.last_words}" if service.state in GONE else "")
