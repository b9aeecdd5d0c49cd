"""One thread at a time in each lane: else the order of its points would be left to chance."""

from __future__ import annotations

import threading

from shoal.errors import UsageError
from shoal.runtime.points import Point
from shoal.runtime.verdicts import Self

__all__ = ["Lanes"]


class Lanes:
    """The lanes in which this process waits now."""

    def __init__(self, me: Self) -> None:
        self._me = me
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def enter(self, point: Point) -> None:
        """Take the lane of `point`, until `leave`.

        Raises:
          UsageError: another thread of this process waits in it.
        """
        with self._lock:
            if point.lane not in self._busy:
                self._busy.add(point.lane)
                return
        raise UsageError(
            f"{self._me}: {point.name!r} ({point.site}): another thread waits in lane"
            f" {point.lane!r}; give each thread that meets others a lane of its own"
        )

    def leave(self, point: Point) -> None:
        """Give the lane back."""
        self._busy.discard(point.lane)
