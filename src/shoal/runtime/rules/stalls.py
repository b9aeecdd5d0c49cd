"""The rules by which a job is found stalled: all its processes live, and none moves.

A *mark* is progress that a process makes: a step that ends, a point reached or passed, a batch, a
call of `preempted`, a save's or restore's own progress. A process that has left none for long is
*idle*, and reports it, with the place where its main thread stands; it is *stuck* if its limit is
over and it does nothing. It reports what its own clocks say, and the rules are here. A job that
moves sends nothing.

A main thread does nothing if it uses hardly any processor time; where devices are no CPUs, whose
runtimes may poll, also if it has not come back to the interpreter. In a compilation, and until a
loop leaves marks, it must not have come back either, and its other threads must do nothing, too.

The job is stalled when each process is idle, and ends when each is stuck. A process that left in
order counts as both. One that gives no heartbeat is idle, and stuck only if another process of its
host has *seen* it: its signal handler answers, so it is neither stopped nor cut off, and its main
thread does nothing, in native code that holds its interpreter lock.

Places explain a stall, and never decide: a healthy loop is seen at one place all the time.

When a process reports is decided in it, by `exit.idle`, which also leaves its limit where others
of its host find it while it gives no heartbeat (`system.stacks.seen`). `Stalls.judge` decides for
the job; `server.job` calls it, and keeps each report as a process's activity, which `shoal watch`
shows. It is documented in `settings`, and on the pages settings, watching, stopping and messages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from shoal.runtime.rules.programs import Differences, differences_of
from shoal.runtime.system.callsite import line_of
from shoal.runtime.system.process_status import Seen
from shoal.runtime.wire.frames import FrameError, number_field, text_field

MOST_SITE = 300  # characters
_BELOW = ("library", "", "jax")
_FACTS = (
    "is_waiting", "has_returned", "marks_its_loop", "is_compiling", "may_poll", "is_due", "is_held",
    "is_reading",
)  # fmt: skip
_SHARES = ("seen_s", "main_share", "other_share")
_BUSY = 0.02  # of a core: threads that use less do nothing
_FRESH_S = 6.0  # a report that is older says nothing of now; they come every two seconds
_ANSWER_S = 1.5  # how long a process may take to say where a silent one of its host stands
_SEEN_S = 2.0  # after which it is asked again


# How processes stand at a place.
IN_PROGRAM, SLOW, IN_JAX = "in-program", "slow", "in-jax"
FOR_READER, IN_SHOAL, LEFT = "for-reader", "in-shoal", "left"
UNSEEN, HELD, SLOW_HELD = "unseen", "held", "slow-held"  # see LOCKED
LOCKED = "in native code that holds the interpreter lock"
_STANCES = (IN_PROGRAM, SLOW, IN_JAX, FOR_READER, IN_SHOAL, LEFT, UNSEEN, HELD, SLOW_HELD)


class Idle(NamedTuple):
    """A process that has left no mark for long. Sent: one field more is a higher PROTOCOL."""

    idle_s: float  # without the time in which it was suspended
    limit_s: float  # after which it is stuck; inf: never
    site: str  # the innermost frame of the program, `train.py:12 (main)`
    below: str = ""  # what that frame has called: "jax", "library", "": native code, perhaps JAX's
    is_waiting: bool = False  # in a wait of shoal, which has a deadline
    seen_s: float = 0.0  # over which the rest was seen: the limit, once that is over
    main_share: float = 0.0  # of a core, used by its main thread
    other_share: float = 0.0  # by its other threads
    has_returned: bool = False  # its main thread has come back to the interpreter
    marks_its_loop: bool = False
    is_compiling: bool = False
    may_poll: bool = False  # a wait for devices may use the processor: they are no CPUs
    is_due: bool = False  # for so long that a stall is to be reported
    is_held: bool = False  # by a debugger or a prompt: it ends nothing
    is_reading: bool = False  # in `feed`: its own reader has returned no batch
    source: str = ""  # the line of `site`

    @property
    def is_slow(self) -> bool:
        """Does its main thread work, judging by its processor time?"""
        return self.main_share >= _BUSY and (self.has_returned or not self.may_poll)

    @property
    def is_stuck(self) -> bool:
        """Has it done nothing for its limit?"""
        does_nothing = not self.is_slow
        if not self.marks_its_loop or self.is_compiling:
            does_nothing &= not self.has_returned and self.other_share < _BUSY
        return does_nothing and self.seen_s >= self.limit_s


def idle_header(idle: Idle | None) -> dict[str, Any]:
    """Return the message of a process that is idle; None: it has moved again."""
    if idle is None:
        return {"do": "idle"}
    return {"do": "idle", **_sent(idle)}


def _sent(facts: Idle | Seen) -> dict[str, Any]:
    limit_s = None if math.isinf(facts.limit_s) else facts.limit_s
    return {**facts._asdict(), "limit_s": limit_s}


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
        raise FrameError("field 'below' is not where a process is")
    source = text_field(header, "source")[:MOST_SITE]
    facts |= {name: number_field(header, name) for name in _SHARES}
    return Idle(idle_s, limit_s, site, below, source=source, **facts)  # type: ignore[arg-type]


def seen_at(seen: Seen | None) -> tuple[str, str]:
    """Return how and where a silent process stands."""
    if seen is None or not seen.site:
        return UNSEEN, ""
    return SLOW_HELD if seen.share >= _BUSY else HELD, line_of(seen.site)


def seen_words(seen: Seen) -> str:
    """Return how and where a silent process stands, for the words about its loss."""
    stance, site = seen_at(seen)
    slow = "slow, " if stance == SLOW_HELD else ""
    return f"{slow}{LOCKED}, called at {site}"


def seen_header(process: int, seen: Seen) -> dict[str, Any]:
    """Return the message about a silent process."""
    return {"do": "seen", "process": process, **_sent(seen)}


def seen_of(header: Mapping[str, Any]) -> Seen:
    """Parse such a message."""
    site, share = text_field(header, "site")[:MOST_SITE], number_field(header, "share")
    return Seen(site, share, number_field(header, "limit_s"))


class StalledGroup(NamedTuple):
    """Processes that stand at one place."""

    processes: tuple[int, ...]
    stance: str
    site: str  # "train.py:14"; "": unknown
    source: str  # the line of `site`


class Stall(NamedTuple):
    """A stalled job."""

    is_final: bool  # the job is to be ended
    idle_s: float  # for how long all are idle
    groups: tuple[StalledGroup, ...]  # the odd ones first
    places: int  # more than `groups`, where some are left out
    programs: Differences = Differences()
    reporter: int = -1  # the process that prints the report of the job, where no launcher does


def stall_of(row: object) -> Stall:
    """Parse a stall as it is sent: in JSON, a tuple is a list.

    Raises:
      FrameError: it is none.
    """
    kinds = [bool, float, list, int, list, int]
    if not isinstance(row, list) or [*map(type, row)] != kinds or not row[2]:
        raise FrameError("a message holds no stall")
    is_final, idle_s, groups, places, programs, reporter = row
    return Stall(
        is_final,
        idle_s,
        groups=tuple(map(_group_of, groups)),
        places=places,
        programs=differences_of(programs),
        reporter=reporter,
    )


def _group_of(row: object) -> StalledGroup:
    if not isinstance(row, list) or [*map(type, row)] != [list, str, str, str]:
        raise FrameError("a stall holds an invalid place")
    processes, stance, site, source = row
    if stance not in _STANCES or {*map(type, processes)} != {int}:
        raise FrameError("a stall holds an invalid place")
    return StalledGroup(tuple(processes), stance, site[:MOST_SITE], source[:MOST_SITE])


class Stalls:
    """The coordinator's record of the processes that are idle.

    >>> stalls = Stalls()
    >>> stalls.receive(60.0, 0, Idle(9.0, 5.0, "train.py:14 (main)", below="jax", seen_s=5.0))
    >>> stalls.receive(60.0, 1, Idle(9.0, 5.0, "train.py:12 (main)", seen_s=5.0))
    >>> stall = stalls.judge(60.0, (0, 1), {}, {})
    >>> [(group.processes, group.stance, group.site) for group in stall.groups]
    [((1,), 'in-program', 'train.py:12'), ((0,), 'in-jax', 'train.py:14')]
    """

    def __init__(self) -> None:
        self._idle: dict[int, tuple[float, Idle]] = {}  # and when it reported it
        self._asked_at: dict[int, float] = {}  # of silent processes: when another was asked
        self._seen: dict[int, tuple[float, Seen]] = {}  # and the answer
        self._report_from_s = 0.0  # the next report of this stall
        self.has_ended = False  # the job, by a final stall

    def receive(self, now: float, process: int, idle: Idle | None) -> None:
        """Take the report of a process."""
        if idle is not None:
            self._idle[process] = now, idle
        elif self._idle.pop(process, None) is not None:
            self._report_from_s = 0.0

    def hear(self, process: int) -> None:
        """Take a heartbeat of a process."""
        if self._asked_at.pop(process, None) is not None:
            self._seen.pop(process, None)

    def receive_seen(self, now: float, process: int, seen: Seen) -> None:
        """Take the answer of another process about a silent one."""
        if process in self._asked_at:
            self._seen[process] = now, seen

    def seen(self, process: int) -> Seen | None:
        """Return what is known of a silent process."""
        return self._seen[process][1] if process in self._seen else None

    def ask(self, now: float, silent: int) -> bool:
        """Return whether a process is to be asked about a silent one now."""
        answered = self._seen.get(silent)
        if silent in self._asked_at and (answered is None or now < answered[0] + _SEEN_S):
            return False
        self._asked_at.setdefault(silent, now)
        return True

    def are_idle(self, now: float, processes: Collection[int]) -> bool:
        """Return whether each of these has reported lately that it is."""
        return all(
            process in self._idle and now < self._idle[process][0] + _FRESH_S
            for process in processes
        )

    def waiting(self, processes: Iterable[int]) -> list[int]:
        """Return those of these idle processes that are in waits of shoal."""
        return [process for process in processes if self._idle[process][1].is_waiting]

    def judge(
        self,
        now: float,
        living: Collection[int],
        left: Mapping[int, str],
        silent_s: Mapping[int, float],
    ) -> Stall | None:
        """Return a stall that is to be reported or ended now, or None.

        Args:
          now: on any clock that only runs forward.
          living: the processes in the job.
          left: those that have left it in order: where.
          silent_s: of the living, those that give no heartbeat: for how long.
        """
        awake = [process for process in living if process not in silent_s]
        if self.has_ended or not awake or not self.are_idle(now, awake):
            return None
        if any(self._is_asked(now, process) for process in silent_s):
            return None
        idle = {process: self._idle[process][1] for process in awake}
        are_stuck = all(report.is_stuck for report in idle.values()) and all(
            self._is_stuck(now, process, silent) for process, silent in silent_s.items()
        )
        is_held = any(report.is_held for report in idle.values())
        # While all are in waits of shoal, the deadlines of these decide.
        in_waits = not silent_s and all(report.is_waiting for report in idle.values())
        is_final = are_stuck and not is_held and not in_waits
        idle_s = min([*(report.idle_s for report in idle.values()), *silent_s.values()])
        is_due = all(report.is_due for report in idle.values()) and idle_s >= self._report_from_s
        if not (is_final or is_due):
            return None
        self.has_ended, self._report_from_s = is_final, 2 * idle_s
        groups = self._groups(idle, left, silent_s)
        return Stall(is_final, float(idle_s), groups, places=len(groups))

    def _is_asked(self, now: float, silent: int) -> bool:
        """Return whether an answer about it may still come."""
        return silent not in self._seen and now < self._asked_at.get(silent, now) + _ANSWER_S

    def _is_stuck(self, now: float, silent: int, silent_s: float) -> bool:
        seen_at_s, seen = self._seen.get(silent, (-math.inf, Seen()))
        is_known = bool(seen.site) and now < seen_at_s + 2 * _SEEN_S
        return is_known and seen.share < _BUSY and silent_s >= seen.limit_s

    def _groups(
        self, idle: Mapping[int, Idle], left: Mapping[int, str], silent_s: Mapping[int, float]
    ) -> tuple[StalledGroup, ...]:
        processes_at: dict[_Place, list[int]] = {}
        sources = {line_of(report.site): report.source for report in idle.values()}
        for process in silent_s:
            stance, site = seen_at(self.seen(process))
            processes_at.setdefault(_Place(stance, site), []).append(process)
        for process, report in idle.items():
            processes_at.setdefault(_stands(report), []).append(process)
        # One that left explains why others wait, unless one of the living does.
        order = 0 if min(place.order for place in processes_at) > 1 else 2
        for process, where in left.items():
            processes_at.setdefault(_Place(LEFT, line_of(where), order), []).append(process)
        places = sorted(
            processes_at,
            key=lambda place: (
                place.order,
                len(processes_at[place]),
                place.tie,
                processes_at[place],
            ),
        )
        return tuple(
            StalledGroup(
                tuple(processes_at[place]), place.stance, place.site, sources.get(place.site, "")
            )
            for place in places
        )


class _Place(NamedTuple):
    """How and where processes stand; `order` and `tie` are lower for the likelier cause."""

    stance: str
    site: str
    order: int = 0
    tie: int = 0


def _stands(idle: Idle) -> _Place:
    """Return how and where a process stands.

    Code of a library, as a queue's, waits for no other process. Of processes that may wait for
    others, the fewest are odd; native code below the program may be JAX's, or a lock.
    """
    site = line_of(idle.site)
    if idle.is_slow:
        return _Place(SLOW, site, order=1)
    if idle.is_reading:
        return _Place(FOR_READER, site)
    if idle.is_waiting:
        return _Place(IN_SHOAL, site, order=4)
    if idle.below == "jax":
        return _Place(IN_JAX, site, order=3, tie=1)
    return _Place(IN_PROGRAM, site, order=1 if idle.below else 3)
