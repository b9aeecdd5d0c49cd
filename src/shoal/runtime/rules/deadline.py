"""Remaining time-outs that keep the original one: error messages name the time-out that the caller
gave, not the part that remained after connecting, hashing or an earlier wait."""

from __future__ import annotations

import time

_LEAST_S = 0.001  # a time-out must be positive


class Allowance(float):
    """Seconds left, or a point in time on the monotonic clock, and the seconds given.

    >>> Allowance(1.8, 4.0) + 0, given_s(Allowance(1.8, 4.0)), given_s(3.0)
    (1.8, 4.0, 3.0)
    """

    given_s: float

    def __new__(cls, value: float, given_s: float) -> Allowance:
        """Create an allowance of `value` seconds, the rest of `given_s`."""
        allowance = super().__new__(cls, value)
        allowance.given_s = given_s
        return allowance


def given_s(timeout_s: float) -> float:
    """Return the time-out that the caller gave; for a plain float, the float itself."""
    return timeout_s.given_s if isinstance(timeout_s, Allowance) else timeout_s


def ends_at(timeout_s: float) -> Allowance:
    """Return the deadline of a time-out that begins now."""
    return Allowance(time.monotonic() + timeout_s, given_s(timeout_s))


def left_of(deadline: float) -> float:
    """Return the seconds until a deadline, always positive; an `Allowance` for an `Allowance`."""
    left_s = max(_LEAST_S, deadline - time.monotonic())
    return Allowance(left_s, deadline.given_s) if isinstance(deadline, Allowance) else left_s
