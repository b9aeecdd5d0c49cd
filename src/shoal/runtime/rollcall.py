"""Roll call: the state, place and pace of every process, as known to the meeting place."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from shoal import settings
from shoal.colour import local
from shoal.errors import UsageError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.point import Member
from shoal.runtime.verb import verb


class RollCall(NamedTuple):
    """A snapshot of all processes; `str` of it is a readable list."""

    members: tuple[Member, ...]

    @property
    def median_step_s(self) -> float | None:
        """Median over all processes of their median step time, seconds."""
        times_s = [m.step_s for m in self.members if m.step_s is not None]
        return statistics.median(times_s) if times_s else None

    @property
    def median_own_s(self) -> float | None:
        """Median over all processes of their compute time per step, seconds."""
        times_s = [m.own_s for m in self.members if m.own_s is not None]
        return statistics.median(times_s) if times_s else None

    def slowest(self, n: int = 3) -> tuple[tuple[Member, float], ...]:
        """Return the `n` slowest processes, each with its ratio to the median.

        Slow by compute time: the step time without waits for other processes in calls of shoal. In
        a job that meets in each step all step times are equal. A wait inside a collective of JAX is
        not visible and counts as compute time.

        >>> from shoal.runtime.rules.point import Member
        >>> times_s = [1.0, 4.0, 2.0]
        >>> call = RollCall(tuple(Member(p, "h", "here", "", step_s=t)
        ...                       for p, t in enumerate(times_s)))
        >>> [(member.process, ratio) for member, ratio in call.slowest(2)]
        [(1, 2.0), (2, 1.0)]
        """
        median_s = self.median_own_s
        timed = [(m, m.own_s) for m in self.members if m.own_s is not None]
        timed.sort(key=lambda pair: -pair[1])  # stable: the lowest process first among equals
        return tuple((m, own_s / median_s if median_s else 1.0) for m, own_s in timed[:n])

    def __str__(self) -> str:
        step_s, own_s = self.median_step_s, self.median_own_s
        here = sum(member.state in ("here", "silent", "stopped") for member in self.members)
        head = f"{here} of {len(self.members)} processes are here"
        if step_s is not None and own_s is not None:
            own = f", compute time {own_s:.3g} s" if own_s < step_s else ""
            head += f"; median step time {step_s:.3g} s{own}"
        return "\n".join([head, *(self._line(member, own_s) for member in self.members)])

    def _line(self, member: Member, median_s: float | None) -> str:
        said = (member.last_words.strip().splitlines() or [""])[-1]
        line = f"  process {member.process} ({member.host}): {member.state}: {said}"
        if member.own_s is not None and median_s:
            line += f"; compute time {member.own_s:.3g} s ({member.own_s / median_s:.2f}x)"
        if member.memory_bytes:
            line += f"; {member.memory_bytes / 2**20:.0f} MiB"
        return line


@local
@verb
def roll_call(coordinator: Coordinator, *, timeout_s: float | None = None) -> RollCall:
    """Return the state, step, place, pace and memory of every process.

    Local.

    The meeting place answers, not the processes: no process is interrupted or waited for, and it
    works while processes hang or are gone. Facts are as old as the last sign of life of each
    process, up to SHOAL_HEARTBEAT_S (2).

    Args:
      timeout_s: time limit for the meeting place to answer; None: SHOAL_TIMEOUT_S (600).

    Raises:
      DeadlineError: on this process: the meeting place did not answer in time.
      ProcessLostError: on this process: the meeting place is gone, or has declared this process
        lost.

    >>> call = roll_call()
    >>> [member.state for member in call.members]
    ['here']
    """
    timeout_s = settings.timeout("roll_call()", timeout_s, "SHOAL_TIMEOUT_S")
    if not timeout_s > 0:
        raise UsageError(f"roll_call: timeout_s={timeout_s!r} must be a positive number of seconds")
    return RollCall(coordinator.members(timeout_s=timeout_s))
