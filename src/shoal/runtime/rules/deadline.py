"""What is left of a time-out, with the time-out itself: the message of a deadline names what the
caller gave, not what was left of it after connecting, hashing or an earlier wait."""

from __future__ import annotations

import time

_LEAST_S = 0.001  # waits refuse what is not positive


class Allowance(float):
    """Seconds that are left, or a moment on the monotonic clock, and the seconds given.

    >>> Allowance(1.8, 4.0) + 0, given_s(Allowance(1.8, 4.0)), given_s(3.0)
    (1.8, 4.0, 3.0)
    """

    given_s: float

    def __new__(cls, value: float, given_s: float) -> Allowance:
        """Return `value`, of which `given_s` was the whole."""
        one = super().__new__(cls, value)
        one.given_s = given_s
        return one


def given_s(timeout_s: float) -> float:
    """Return the whole that a time-out is the rest of, or is itself."""
    return timeout_s.given_s if isinstance(timeout_s, Allowance) else timeout_s


def ends_at(timeout_s: float) -> Allowance:
    """Return the moment at which a time-out is over that begins now."""
    return Allowance(time.monotonic() + timeout_s, given_s(timeout_s))


def left_of(deadline: float) -> float:
    """Return the seconds until a deadline, always positive; of an `Allowance`, as one."""
    left_s = max(_LEAST_S, deadline - time.monotonic())
    return Allowance(left_s, deadline.given_s) if isinstance(deadline, Allowance) else left_s
