"""The rules by which a job is found stalled: all its processes live, and none moves.

A *mark* is progress that a process makes: a step that ends, a point reached or passed, a batch, a
call of `preempted`, a save's or restore's own progress. A process that has left none for long is
*idle*, and reports it, with the place where its main thread stands; it is *stuck* if its limit is
over and it does nothing. It judges both itself, by its own clocks. A job that moves sends nothing.

The job is stalled when each process is idle, and ends when each is stuck. A process that left in
order, or gives no sign of life because native code holds its interpreter lock, counts as both.
Places explain a stall, and never decide: a healthy loop is seen at one place all the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from shoal.runtime.system.failure_words import listed
from shoal.runtime.wire.frames import FrameError, number_field, text_field

MOST_SITE = 300  # characters
NO_PROGRESS = "no progress for"  # how the last words of an idle process begin
_MOST_GROUPS = 8  # of processes at one place, in a report
_BELOW = ("library", "", "jax")
_FACTS = ("is_waiting", "is_slow", "is_due", "is_stuck", "is_held")


class Idle(NamedTuple):
    """A process that has left no mark for long."""

    idle_s: float  # without the time in which it was suspended
    limit_s: float  # after which it is stuck; inf: never
    site: str  # the innermost frame of the program, `train.py:12 (main)`
    below: str = ""  # what that frame has called: "jax", "library", "": native code, perhaps JAX's
    is_waiting: bool = False  # in a wait of shoal, which has a deadline
    is_slow: bool = False  # its main thread uses the processor
    is_due: bool = False  # for so long that a stall is to be reported
    is_stuck: bool = False
    is_held: bool = False  # by a debugger or a prompt: it ends nothing


def idle_header(idle: Idle | None) -> dict[str, Any]:
    """Return the message of a process that is idle; None: it has moved again."""
    if idle is None:
        return {"do": "idle"}
    limit_s = None if math.isinf(idle.limit_s) else idle.limit_s
    return {"do": "idle", **idle._asdict(), "limit_s": limit_s}


def idle_of(header: Mapping[str, Any]) -> Idle | None:
    """Parse such a message."""
    if "idle_s" not in header:
        return None
    facts = {name: header.get(name) for name in _FACTS}
    if not all(type(fact) is bool for fact in facts.values()):
        raise FrameError("a report of an idle process lacks a required boolean")
    idle_s, limit_s = number_field(header, "idle_s"), number_field(header, "limit_s")
    site, below = text_field(header, "site")[:MOST_SITE], text_field(header, "below")
    if below not in _BELOW:
        raise FrameError("field 'below' is not where a process stands")
    return Idle(idle_s, limit_s, site, below, **facts)  # type: ignore[arg-type]


class StalledGroup(NamedTuple):
    """Processes that stand at one place."""

    processes: tuple[int, ...]
    words: str  # where, and how
    order: tuple[int, int, int]  # the likeliest cause of the stall first


class Stall(NamedTuple):
    """A stalled job."""

    is_final: bool  # the job is to be ended
    idle_s: float  # for how long all are idle
    groups: tuple[StalledGroup, ...]  # of all processes, the odd ones first

    @property
    def headline(self) -> str:
        """One sentence: for how long, and where the odd ones and the others are."""
        first, *others = self.groups
        rest = f"; {_said(others[0])}" if others else ""
        return f"no process has moved for {self.idle_s:.0f} s: {_said(first)}{rest}"

    @property
    def lines(self) -> list[str]:
        """One line for each group."""
        lines = [_said(group) for group in self.groups[:_MOST_GROUPS]]
        more = len(self.groups) - len(lines)
        return [*lines, f"… and {more} more places"] if more > 0 else lines

    @property
    def text(self) -> str:
        """The headline, then the lines, indented."""
        return "\n".join([self.headline, *(f"  {line}" for line in self.lines)])


class Stalls:
    """The meeting place's record of the processes that are idle.

    >>> stalls = Stalls()
    >>> stalls.receive(0, Idle(9.0, 5.0, "train.py:14 (main)", below="jax", is_stuck=True))
    >>> stalls.receive(1, Idle(9.0, 5.0, "train.py:12 (main)", is_stuck=True))
    >>> stalls.judge((0, 1), {}, {}).headline
    'no process has moved for 9 s: process 1 at train.py:12 (main); process 0 in JAX, called at \
train.py:14 (main)'
    """

    def __init__(self) -> None:
        self._idle: dict[int, Idle] = {}
        self._sites: dict[int, str] = {}  # of processes that cannot report
        self._report_from_s = 0.0  # the next report of this stall
        self._has_ended = False

    @property
    def limit_s(self) -> float:
        """The limit of the processes that are idle: silence as long means that one is stuck."""
        return max((idle.limit_s for idle in self._idle.values()), default=math.inf)

    def receive(self, process: int, idle: Idle | None) -> None:
        """Take the report of a process."""
        if idle is not None:
            self._idle[process] = idle
        elif self._idle.pop(process, None) is not None:
            self._report_from_s = 0.0
        self._sites.pop(process, None)

    def receive_site(self, process: int, site: str) -> None:
        """Take the place of a process that cannot report."""
        self._sites[process] = site[:MOST_SITE]

    def are_idle(self, processes: Collection[int]) -> bool:
        """Return whether each of these has reported that it is."""
        return all(process in self._idle for process in processes)

    def judge(
        self, living: Collection[int], left: Mapping[int, str], silent_s: Mapping[int, float]
    ) -> Stall | None:
        """Return a stall that is to be reported or ended now, or None.

        Args:
          living: the processes in the job.
          left: those that have left it in order: where.
          silent_s: of the living, those that give no sign of life though they run: for how long.
        """
        idle = {process: self._idle[process] for process in living if process in self._idle}
        if self._has_ended or not idle or not idle.keys() | silent_s.keys() >= {*living}:
            return None
        limit_s, held = self.limit_s, any(one.is_held for one in idle.values())
        are_silent = all(silent >= limit_s for silent in silent_s.values())
        are_stuck = are_silent and all(one.is_stuck for one in idle.values())
        # While all are in waits of shoal, the deadlines of these decide.
        in_waits = not silent_s and all(one.is_waiting for one in idle.values())
        is_final = are_stuck and not held and not in_waits
        idle_s = min([*(one.idle_s for one in idle.values()), *silent_s.values()])
        is_due = all(one.is_due for one in idle.values()) and idle_s >= self._report_from_s
        if not (is_final or is_due):
            return None
        self._has_ended, self._report_from_s = is_final, 2 * idle_s
        return Stall(is_final, idle_s, self._groups(idle, left, silent_s))

    def _groups(
        self, idle: Mapping[int, Idle], left: Mapping[int, str], silent_s: Mapping[int, float]
    ) -> tuple[StalledGroup, ...]:
        found: dict[tuple[str, int, int], list[int]] = {}
        for process, where in left.items():
            words = f"left the job, last at {where}" if where else "left the job"
            found.setdefault((words, 0, 0), []).append(process)
        for process in silent_s:
            site = self._sites.get(process, "")
            called = f", called at {site}" if site else ""
            words = f"in native code that holds the interpreter lock{called}"
            found.setdefault((words, 0, 0), []).append(process)
        for process, one in idle.items():
            found.setdefault(_words_of(one), []).append(process)
        groups = [
            StalledGroup(tuple(processes), words, (order, len(processes), tie))
            for (words, order, tie), processes in found.items()
        ]
        return tuple(sorted(groups, key=lambda group: (group.order, group.processes)))


def _words_of(idle: Idle) -> tuple[str, int, int]:
    """Return where a process stands, and two numbers, lower for the likelier cause of the stall.

    Code of a library, as a queue's, waits for no other process. Of processes that may wait for
    others, the fewest are odd; native code below the program may be JAX's, or a lock.
    """
    site = idle.site or "an unknown place"
    if idle.is_slow:
        return f"slow, at {site}", 1, 0
    if idle.is_waiting:
        return f"waiting in shoal, called at {site}", 2, 1
    if idle.below == "jax":
        return f"in JAX, called at {site}", 2, 1
    return f"at {site}", 1 if idle.below else 2, 0


def _said(group: StalledGroup) -> str:
    name = listed(group.processes)
    return f"{name} {group.words}"
