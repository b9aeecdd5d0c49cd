"""Arrivals of several processes at once: what one host's processes say in one message.

The rules are those of `meeting`, process by process. Where nothing but equal arrivals can happen
they come down to a few bulk operations, so that a large job costs as many of them as it has hosts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from shoal.runtime.rules.deadline import JointLimits
from shoal.runtime.rules.gathering import Gathering, Reply, WaitingProcess, differ
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.point import Point

To = TypeVar("To", bound=Hashable)


class JointMeeting(Meeting[To]):
    """A meeting that takes the arrivals of several processes at one point together."""

    def arrive_together(
        self,
        now: float,
        processes: Sequence[int],
        point: Point,
        payloads: Sequence[bytes],
        *,
        limits: JointLimits,
        to: To,
        each: Sequence[To],
        step: int | None = None,
    ) -> list[Reply[To]]:
        """Take arrivals of members of one group; do what `arrive` does for each, in order.

        Args:
          limits: the time-out of each, seconds.
          to: the destination of an answer to all of them.
          each: the destination of an answer to one of them.
        """
        gathering = self._plain_gathering(processes, point)
        if gathering is None:
            return [
                reply
                for index, process in enumerate(processes)
                for reply in self.arrive(
                    now, process, point, payloads[index],
                    timeout_s=limits.of(index), to=each[index], ticket=0, step=step,
                )
            ]  # fmt: skip
        if any(payloads):
            for process, payload in zip(processes, payloads, strict=True):
                gathering.arrived[process] = WaitingProcess(to, 0, point, payload, now)
        else:
            wait = WaitingProcess(to, 0, point, b"", now)
            gathering.arrived.update(dict.fromkeys(processes, wait))
        records, lane = self._records, point.lane
        for process in processes:
            record = records[process]
            record.count_arrival(point, step)
            record.blocked[lane] = gathering
        first = limits.timeouts_s.index(min(limits.timeouts_s))
        self._limit(gathering, now, processes[first], limits.of(first))
        return self._complete(now, gathering) if self._is_complete(gathering) else []

    def _plain_gathering(self, processes: Sequence[int], point: Point) -> Gathering[To] | None:
        """Return the gathering of all of these arrivals if they can only wait there or complete it:
        no process or service is gone, nothing failed is owed, nothing differs, and no process waits
        at another point of the lane. None: otherwise."""
        if self._num_losses or point.survivors or "\n" in point.trail:
            return None
        others = len(self._lines.open_in(point.lane))
        known = self._lines.in_line(point)
        if not known:
            return None if others else self._lines.open(processes[0], point)
        gathering = known[0]
        if len(known) > 1 or others != 1 or gathering.answer is not None:
            return None
        if gathering.survivors or gathering.follows != point.follows:
            return None
        if not gathering.arrived.keys().isdisjoint(processes):
            return None
        first = next(iter(gathering.arrived.values()), None)
        if first is None or (first.point is not point and differ(point, first.point)):
            return None
        return gathering
