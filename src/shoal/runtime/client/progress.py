"""How far the main line of this process has come.

Written by its calls of shoal, read by the watcher, which tells the others. No lock: what belongs
together is one attribute, and only one thread writes it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from shoal.runtime.rules.point import Point

STEPS = 64  # how many of the last steps count for the median


class Progress:
    """The step, the last call of shoal, and the times of the last steps."""

    __slots__ = (
        "_clock",
        "_last",
        "_own_s",
        "_timed",
        "_times_s",
        "_waited_s",
        "ended",
        "is_waiting",
        "outer",
        "step",
        "worked",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[Point | str, float] = ("", clock())
        self._times_s = [0.0] * STEPS  # a ring
        self._own_s = [0.0] * STEPS  # the same, without the waits for others
        self._waited_s = 0.0  # for others, so far
        self._timed = 0
        self.step: int | None = None  # the label: the last one that began, or goes on
        self.outer: int | None = None  # the innermost one that has not ended
        self.ended = 0  # steps, timed or not
        self.is_waiting = False  # in a call that waits for others, by a deadline
        self.worked = 0  # grows while a long call does work of its own; from any of its threads

    @property
    def place(self) -> str:
        """The last call of shoal: `'epoch' (train.py:31 (main))`."""
        last = self._last[0]
        return last if isinstance(last, str) else last.place

    @property
    def since(self) -> float:
        """When it came to `place`, or when it went on from there."""
        return self._last[1]

    @property
    def step_s(self) -> float | None:
        """The median time of the last steps, seconds; None before the first has ended."""
        times_s = self._times_s[: min(self._timed, STEPS)]
        return statistics.median(times_s) if times_s else None

    @property
    def wait_s(self) -> float:
        """How much of `step_s` it waited for others, seconds.

        Where all wait for the slowest in each step, all steps take equally long; who is slow shows
        in the rest.
        """
        timed = min(self._timed, STEPS)
        if not timed:
            return 0.0
        own_s = statistics.median(self._own_s[:timed])
        return max(0.0, statistics.median(self._times_s[:timed]) - own_s)

    def come(self, point: Point, now: float) -> None:
        """The main line waits for others at `point`."""
        self._last = (point, now)
        self.is_waiting = True

    def go(self, point: Point) -> None:
        """The wait is over, well or not."""
        now = self._clock()
        self._waited_s += now - self._last[1]
        self._last = (point, now)
        self.is_waiting = False

    def begin(self, step: int, place: str) -> tuple[float, float]:
        """A step begins; return when, and how long it had waited for others until then."""
        now = self._clock()
        self.step = step
        self._last = (place, now)
        return now, self._waited_s

    def end(self, began: tuple[float, float] | None, place: str) -> None:
        """A step ends. Without `began` it is not timed."""
        now = self._clock()
        if began is not None:
            began_at, waited_s = began
            took_s = now - began_at
            self._times_s[self._timed % STEPS] = took_s
            self._own_s[self._timed % STEPS] = took_s - (self._waited_s - waited_s)
            self._timed += 1
        self.ended += 1
        self._last = (place, now)

    def beat(self) -> dict[str, Any]:
        """Return what a sign of life says."""
        return {
            "step": self.step,
            "place": self.place,
            "since_s": max(0.0, self._clock() - self.since),
            "step_s": self.step_s,
            "wait_s": self.wait_s,
            "memory_bytes": memory_bytes(),
        }


def memory_bytes() -> int:
    """Return the resident memory of this process; 0 where the platform does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
