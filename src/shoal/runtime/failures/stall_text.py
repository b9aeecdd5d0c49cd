"""A stalled job as sentences: see `rules.stalls`."""

from __future__ import annotations

from shoal.errors import counted
from shoal.runtime.failures.comparison import process_label
from shoal.runtime.failures.facts import CallPlace, ProcessSet, Waiting
from shoal.runtime.failures.program_text import program_lines
from shoal.runtime.rules.stalls import (
    FOR_READER,
    HELD,
    IN_JAX,
    IN_PROGRAM,
    IN_SHOAL,
    LEFT,
    LOCKED,
    SLOW,
    SLOW_HELD,
    UNSEEN,
    Stall,
    StalledGroup,
)
from shoal.runtime.system.callsite import split_site
from shoal.runtime.system.foreign_text import one_line

_MOST_GROUPS = 8  # in a log
_MOST_PROGRAMS = 3
_STANDS = {  # the predicate of a sentence, and what precedes the place
    IN_PROGRAM: ("", ""),
    SLOW: ("slow", ""),
    IN_JAX: ("in JAX", "called"),
    FOR_READER: ("waiting for its reader", "called"),
    IN_SHOAL: ("waiting in shoal", "called"),
    LEFT: ("left the job", "last"),
    UNSEEN: ("without a heartbeat", ""),
    HELD: (LOCKED, "called"),
    SLOW_HELD: (f"slow, {LOCKED}", "called"),
}
_WAITS_FOR = {IN_SHOAL: "others", FOR_READER: "reader", LEFT: "left"}


def stance_text(stance: str, site: str) -> str:
    """Return how and where a process stands, as the predicate of a sentence.

    >>> stance_text(IN_JAX, "train.py:14"), stance_text(IN_PROGRAM, "train.py:14")
    ('in JAX, called at train.py:14', 'at train.py:14')
    """
    phrase, verb = _STANDS[stance]
    if not site and stance not in (LEFT, UNSEEN):
        site = "an unknown place"
    place = f"{verb} at {site}".strip() if site else ""
    return ", ".join(filter(None, (phrase, place)))


def stall_headline(stall: Stall) -> str:
    """Return one sentence: for how long, and where the odd processes and the others are."""
    first, *others = stall.groups
    rest = f"; {_group_text(others[0])}" if others else ""
    return f"no process has moved for {stall.idle_s:.0f} s: {_group_text(first)}{rest}"


def stall_lines(stall: Stall) -> list[str]:
    """Return the lines below: programs that differ, then each place with its source line."""
    shown = stall.groups[:_MOST_GROUPS]
    lines = program_lines(stall.programs)[:_MOST_PROGRAMS]
    lines += [f"{_group_text(group)}   {one_line(group.source)}".rstrip() for group in shown]
    more = stall.places - len(shown)
    return [*lines, f"… and {counted(more, 'more place')}"] if more > 0 else lines


def _group_text(group: StalledGroup) -> str:
    return f"{process_label(group.processes)} {stance_text(group.stance, one_line(group.site))}"


def waiting_of(group: StalledGroup) -> Waiting:
    """Return where processes of a stalled job stand, as facts of a report."""
    processes, waits_for = ProcessSet(group.processes), _WAITS_FOR.get(group.stance, "")
    file, line = split_site(group.site)
    if not file or group.stance == LEFT:
        phrase = stance_text(group.stance, group.site)
        return Waiting(processes=processes, words=phrase, waits_for=waits_for)
    phrase, _ = _STANDS[group.stance]
    place = CallPlace(file=file, line=line, source=group.source)
    return Waiting(processes=processes, place=place, words=phrase, waits_for=waits_for)
