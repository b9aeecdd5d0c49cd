"""The progress of this process's main thread.

Written by its shoal calls, read by the watcher, which reports it. No lock: values that belong
together are one attribute, and only one thread writes it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.runtime.rules.point import Point

_LOOP_MARKS = 3  # of a loop; fewer may be warm-up
STEPS = 64  # number of recent steps in the median


class ExitCall(NamedTuple):
    """A call of `sys.exit` by the program."""

    site: str

    @property
    def place(self) -> str:
        """The call as text: `sys.exit() at train.py:31 (main)`."""
        return f"sys.exit() at {self.site}"


class Progress:
    """The step, the last shoal call, and the recent step times."""

    __slots__ = (
        "_clock",
        "_last",
        "_own_s",
        "_points",
        "_timed",
        "_times_s",
        "_waited_s",
        "ended",
        "is_waiting",
        "is_watched",
        "on_limit",
        "outer",
        "point",
        "reads",
        "saved",
        "step",
        "turns",
        "within_s",
        "worked",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[Point | ExitCall | str, float] = ("", clock())
        self._times_s = [0.0] * STEPS  # ring buffer
        self._own_s = [0.0] * STEPS  # compute times: the same without waits
        self._waited_s = 0.0  # for other processes, so far
        self._timed = 0
        self.step: int | None = None  # the label: the innermost open step, else the last one
        self.outer: int | None = None  # the innermost open step
        self.ended = 0  # steps, timed or not
        self.point: Point | None = None  # where it has waited last
        self.is_waiting = False  # in a call that waits for others, with a deadline
        self.is_watched = False  # whether a thread looks for a lack of progress
        # Grows while a long call makes progress. Threads increment it without a lock: of two that
        # do so at once one may be lost, but the watchers ask only whether it has changed.
        self.worked = 0
        self.saved = 0  # the same, for saves in the background
        self._points = 0  # reached or passed
        self.turns = 0  # of the program's loop, other than steps: batches, calls of `preempted`
        self.within_s: float | None = None  # the limit of the innermost step that has one
        self.on_limit: Callable[[], None] = lambda: None  # called when it changes
        # While the program waits for a batch of a `feed`: whether its own reader is the reason.
        self.reads: Callable[[], bool] | None = None

    @property
    def place(self) -> str:
        """The last shoal call: `barrier 'epoch' (train.py:31)`."""
        last = self._last[0]
        return last if isinstance(last, str) else last.place

    @property
    def since(self) -> float:
        """The time at which it reached `place`, or left it."""
        return self._last[1]

    @property
    def mark(self) -> tuple[int, ...]:
        """Differs once progress was made: a step ended, a point reached or passed, work done."""
        return self.ended, self.turns, self._points, self.worked, self.saved

    @property
    def marks_its_loop(self) -> bool:
        """Whether the program's loop leaves marks. A point or a save may be passed before it."""
        return self.ended + self.turns >= _LOOP_MARKS

    @property
    def step_s(self) -> float | None:
        """The median step time, seconds; None before the first step has ended."""
        times_s = self._times_s[: min(self._timed, STEPS)]
        return statistics.median(times_s) if times_s else None

    @property
    def wait_s(self) -> float:
        """The part of `step_s` spent waiting for other processes, seconds.

        Where all wait for the slowest process in each step, all step times are equal; the slow
        process shows in the rest, the compute time.
        """
        timed = min(self._timed, STEPS)
        if not timed:
            return 0.0
        own_s = statistics.median(self._own_s[:timed])
        return max(0.0, statistics.median(self._times_s[:timed]) - own_s)

    def limit(self, within_s: float | None) -> None:
        """Change the limit, which is counted from here."""
        self.worked += 1  # first: no time before it may be judged by the new limit
        self.within_s = within_s
        self.on_limit()

    def begin_wait(self, point: Point, now: float) -> None:
        """Record that the main thread begins to wait at `point`."""
        self._last = (point, now)
        self.point = point
        self._points += 1
        self.is_waiting = True

    def end_wait(self, point: Point) -> None:
        """Record that the wait has ended, by an answer or an error."""
        now = self._clock()
        self._waited_s += now - self._last[1]
        self._last = (point, now)
        self._points += 1
        self.is_waiting = False

    @property
    def exited_at(self) -> str:
        """The call site of `sys.exit`, if that is the last call; empty otherwise."""
        last = self._last[0]
        return last.site if isinstance(last, ExitCall) else ""

    def leave(self, site: str) -> None:
        """Record that the program calls `sys.exit` at `site`."""
        self._last = (ExitCall(site), self._clock())

    def begin(self, step: int, place: Point | str) -> tuple[float, float]:
        """Begin a step; return the time, and the total wait until then."""
        now = self._clock()
        self.step = step
        self._last = (place, now)
        return now, self._waited_s

    def end(self, began: tuple[float, float] | None, place: Point | str | None) -> None:
        """End a step. Without `began` it is not timed; without `place` the last call stays that."""
        now = self._clock()
        if began is not None:
            began_at, waited_s = began
            took_s = now - began_at
            self._times_s[self._timed % STEPS] = took_s
            self._own_s[self._timed % STEPS] = took_s - (self._waited_s - waited_s)
            self._timed += 1
        self.ended += 1
        self._last = (self._last[0] if place is None else place, now)

    def beat(self) -> dict[str, Any]:
        """Return the fields of a heartbeat."""
        last = self._last[0]
        last_point = {"at": [last.call, last.name, last.site]} if isinstance(last, Point) else {}
        return {
            **last_point,
            "step": self.step,
            "place": self.place,
            "since_s": max(0.0, self._clock() - self.since),
            "step_s": self.step_s,
            "wait_s": self.wait_s,
            "memory_bytes": memory_bytes(),
        }


def memory_bytes() -> int:
    """Return the resident memory of this process; 0 where the platform does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
