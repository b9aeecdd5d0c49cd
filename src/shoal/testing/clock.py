"""A manual clock: time stands still until a test advances it."""

from __future__ import annotations

import math

from shoal.errors import UsageError

__all__ = ["Clock"]


class Clock:
    """Returns the time in seconds when called, like `time.monotonic`; `advance` moves it.

    Code that takes a clock as an argument can be tested to the second, without waiting.

    >>> clock = Clock()
    >>> clock.advance(2.5)
    >>> clock()
    2.5
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Advance the time by `by_s` seconds.

        Raises:
          UsageError: it is negative, or not a duration: a monotonic clock never goes back.
        """
        if not 0 <= by_s < math.inf:
            raise UsageError(f"advance({by_s!r}): a clock moves forward, by a number of seconds")
        self._now_s += by_s

    def sleep(self, duration_s: float) -> None:
        """Stand in for `time.sleep`: advance the time without waiting."""
        self.advance(duration_s)
