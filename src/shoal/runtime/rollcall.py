"""Who is here, where each process is, and who is slow: asked by one process, of nobody else."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from shoal import settings
from shoal.colour import local
from shoal.errors import UsageError
from shoal.runtime.coordinator import Coordinator, Member

__all__ = ["RollCall", "roll_call", "roll_call_with"]


class RollCall(NamedTuple):
    """What is known of each process at one moment; `str` of it is a readable list."""

    members: tuple[Member, ...]

    @property
    def median_step_s(self) -> float | None:
        """The median over all processes of the median time of their last steps, seconds."""
        times_s = [m.step_s for m in self.members if m.step_s is not None]
        return statistics.median(times_s) if times_s else None

    def slowest(self, n: int = 3) -> tuple[tuple[Member, float], ...]:
        """Return the `n` processes whose steps take longest, each with its ratio to the median.

        >>> from shoal.runtime.coordinator import Member
        >>> times_s = [1.0, 4.0, 2.0]
        >>> call = RollCall(tuple(Member(p, "h", "here", "", step_s=t)
        ...                       for p, t in enumerate(times_s)))
        >>> [(member.process, ratio) for member, ratio in call.slowest(2)]
        [(1, 2.0), (2, 1.0)]
        """
        median_s = self.median_step_s
        timed = [(m, m.step_s) for m in self.members if m.step_s is not None]
        timed.sort(key=lambda pair: -pair[1])  # stable: of equals the lowest process first
        return tuple((m, step_s / median_s if median_s else 1.0) for m, step_s in timed[:n])

    def __str__(self) -> str:
        median_s = self.median_step_s
        here = sum(member.state in ("here", "silent") for member in self.members)
        head = f"{here} of {len(self.members)} processes are here"
        lines = [head + (f"; median step {median_s:.3g} s" if median_s is not None else "")]
        return "\n".join(lines + [self._line(member, median_s) for member in self.members])

    def _line(self, member: Member, median_s: float | None) -> str:
        said = (member.said.strip().splitlines() or [""])[-1]
        line = f"  process {member.process} ({member.host}): {member.state}: {said}"
        if member.step_s is not None and median_s:
            line += f"; step {member.step_s:.3g} s ({member.step_s / median_s:.2f}x)"
        if member.memory_bytes:
            line += f"; {member.memory_bytes / 2**20:.0f} MiB"
        return line


@local
def roll_call(*, timeout_s: float | None = None) -> RollCall:
    """Return what is known of every process: its state, step, place, pace and memory.

    Local.

    The meeting place answers, not the processes: nobody is disturbed or waited for, and it works
    while others hang or are gone. What it knows is as old as the last sign of life of each, up to
    SHOAL_HEARTBEAT_S (2).

    Args:
      timeout_s: until the meeting place must have answered; None: SHOAL_TIMEOUT_S (600).

    Raises:
      DeadlineError: on this process: it did not answer in time.
      ProcessLostError: on this process: it is gone, or has declared this process lost.

    >>> call = roll_call()
    >>> [member.state for member in call.members]
    ['here']
    """
    from shoal.runtime.process import coordinator

    return roll_call_with(coordinator(), timeout_s=timeout_s)


def roll_call_with(coordinator: Coordinator, *, timeout_s: float | None = None) -> RollCall:
    """Do what `roll_call` does, with the coordinator given."""
    timeout_s = settings.timeout("roll_call()", timeout_s, "SHOAL_TIMEOUT_S")
    if not timeout_s > 0:
        raise UsageError(f"roll_call: timeout_s={timeout_s!r} must be a positive number of seconds")
    return RollCall(coordinator.members(timeout_s=timeout_s))
