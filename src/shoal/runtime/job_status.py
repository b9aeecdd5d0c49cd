"""The status of a job: state, place and pace of every process, as the coordinator knows them."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from shoal import settings
from shoal.colour import local
from shoal.runtime.client.interface import JobClient
from shoal.runtime.failures.comparison import process_label
from shoal.runtime.failures.program_text import program_lines
from shoal.runtime.rules.point import Member, without_age
from shoal.runtime.uses_client import uses_client

SLOW = 1.5  # a compute time above this multiple of the median is slow


class JobStatus(NamedTuple):
    """A snapshot of all processes; `str` of it is a readable list.

    Processes that do the same share a line, the fewest first; slow ones are not with others.
    `programs` are sentences about programs that only some of their processes have compiled
    (docs/stopping.md).
    """

    members: tuple[Member, ...]
    programs: tuple[str, ...] = ()

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

        Slow by compute time: the step time without waits for other processes in shoal calls. In a
        job that synchronizes in each step, all step times are equal. A wait inside a collective of
        JAX is not visible and counts as compute time.

        >>> from shoal.types import Member
        >>> times_s = [1.0, 4.0, 2.0]
        >>> status = JobStatus(tuple(Member(p, "h", "here", "", step_s=t)
        ...                         for p, t in enumerate(times_s)))
        >>> [(member.process, ratio) for member, ratio in status.slowest(2)]
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
        alike: dict[object, list[Member]] = {}
        for member in self.members:
            is_slow = bool(own_s and member.own_s and member.own_s >= SLOW * own_s)
            last_seen = member.place, member.is_waiting, _last_line(without_age(member)[0])
            alike.setdefault((member.state, member.step, last_seen, is_slow), []).append(member)
        groups = sorted(alike.values(), key=lambda group: (len(group), group[0].process))
        programs = (f"  {line}" for line in self.programs)
        return "\n".join([head, *(self._line(group, own_s) for group in groups), *programs])

    def _line(self, group: list[Member], median_s: float | None) -> str:
        """Return the line of processes that do the same: the largest of their numbers."""
        hosts = sorted({member.host for member in group})
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        most = "up to " if len(group) > 1 else ""
        first = max(group, key=lambda member: member.since_s)
        last_words, ending = without_age(first)
        text = _last_line(last_words) + ending.format(f"{most}{first.since_s:.1f}")
        label = process_label([member.process for member in group])
        line = f"  {label} ({where}): {group[0].state}: {text}"
        slowest_s = max((m.own_s for m in group if m.own_s is not None), default=None)
        if slowest_s is not None and median_s:
            line += f"; compute time {most}{slowest_s:.3g} s ({slowest_s / median_s:.2f}x)"
        memory = max(member.memory_bytes for member in group)
        if memory:
            line += f"; {most}{memory / 2**20:.0f} MiB"
        return line


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


@local
@uses_client
def job_status(client: JobClient, *, timeout_s: float | None = None) -> JobStatus:
    """Return the state, step, call site, pace and memory of every process.

    Local.

    The coordinator answers, not the processes: no process is interrupted or waited for, and the
    call works while processes hang or have exited. Each process is shown as of its last heartbeat,
    up to SHOAL_HEARTBEAT_S (2) ago.

    Args:
      timeout_s: time limit for the coordinator to answer; None: SHOAL_TIMEOUT_S (600).

    Raises:
      DeadlineError: on this process: the coordinator did not answer in time.
      ProcessLostError: on this process: the coordinator is gone, or has declared this process lost.

    >>> status = job_status()
    >>> [member.state for member in status.members]
    ['here']
    """
    timeout_s = settings.timeout("job_status", timeout_s, "SHOAL_TIMEOUT_S")
    known = client.job_state(timeout_s=timeout_s)
    return JobStatus(tuple(known.members), tuple(program_lines(known.programs)))
