"""Arrivals of several processes at once: what one host's processes say in one message.

The rules are those of `meeting`, process by process. Where nothing but equal arrivals can happen
they come down to a few bulk operations, so that a large job costs as many of them as it has hosts.
Such a job would spend most of a barrier on the records of processes that do the same as the others
of their host. So an arrival of several is recorded once for all of them, and written to the record
of each when one of these is looked at: at a query, a loss, an arrival of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from shoal.runtime.rules.deadline import JointLimits, earliest_of, limit_of
from shoal.runtime.rules.gathering import Gathering, Reply, WaitingProcess, Waits, differ
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.meeting_answers import Outcome
from shoal.runtime.rules.member_record import Activity, Record
from shoal.runtime.rules.messages import Beat
from shoal.runtime.rules.point import Point

To = TypeVar("To", bound=Hashable)


class JointRecord(Generic[To]):
    """What processes did together that is not in the record of each yet."""

    __slots__ = ("activity", "arrivals", "blocked", "processes", "step")

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes = processes
        self.arrivals: dict[str, int] = {}  # number of arrivals, by lane
        self.blocked: dict[str, Gathering[To]] = {}  # the gathering at which they wait, by lane
        self.activity: Activity | None = None
        self.step: int | None = None


class JointRecords(Mapping[int, Record[To]]):
    """The record of each process, up to date whenever it is looked at."""

    def __init__(self, records: Mapping[int, Record[To]]) -> None:
        self._records = records
        # A process is in at most one joint record, so the order of writing them is of no matter.
        self._joint: dict[tuple[int, ...], JointRecord[To]] = {}  # by its processes
        self._of: dict[int, JointRecord[To]] = {}  # by process
        # Those that wait at a gathering, in order; a list would be searched for each to be removed.
        self._at: dict[Gathering[To], dict[JointRecord[To], None]] = {}

    def __getitem__(self, process: int) -> Record[To]:
        if self._of and (joint := self._of.get(process)) is not None:
            self._write(joint)
        return self._records[process]

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def beat(self, now: float, process: int, beat: Beat) -> None:
        """Record a sign of life. Of what is not written yet only the step can be older than it."""
        joint = self._of.get(process)
        if joint is not None and joint.step is not None:
            for each in joint.processes:
                self._records[each].step = joint.step
            joint.step = None
        self._records[process].take_beat(now, beat)

    def arrive(
        self, processes: tuple[int, ...], gathering: Gathering[To], step: int | None
    ) -> None:
        """Record that processes have arrived at a gathering, where they wait."""
        joint = self._joint.get(processes) or self._begin(processes)
        lane = gathering.line.lane
        joint.arrivals[lane] = joint.arrivals.get(lane, 0) + 1
        joint.blocked[lane] = gathering
        if step is not None:
            joint.step = step
        waiting = self._at.get(gathering)
        if waiting is None:
            waiting = self._at[gathering] = {}
        waiting[joint] = None

    def release(
        self, now: float, gathering: Gathering[To], arrived: Waits[To]
    ) -> Collection[JointRecord[To]]:
        """End the waits at a gathering of those that arrived together; return their records."""
        released = self._at.pop(gathering, {})
        lane, last = gathering.line.lane, None
        for joint in released:
            del joint.blocked[lane]
            point = arrived[joint.processes[0]].point
            if last is None or last.point is not point:
                last = Activity("last at", point, now)
            joint.activity = last
        return released

    def _begin(self, processes: tuple[int, ...]) -> JointRecord[To]:
        for process in self._of.keys() & processes:
            if process in self._of:  # still: writing one writes it for all of its processes
                self._write(self._of[process])
        joint = self._joint[processes] = JointRecord(processes)
        self._of.update(dict.fromkeys(processes, joint))
        return joint

    def _write(self, joint: JointRecord[To]) -> None:
        """Write what processes did together to the record of each."""
        del self._joint[joint.processes]
        for gathering in joint.blocked.values():
            del self._at[gathering][joint]
        for process in joint.processes:
            del self._of[process]
            record = self._records[process]
            for lane, count in joint.arrivals.items():
                record.arrivals[lane] = record.arrivals.get(lane, 0) + count
            record.blocked.update(joint.blocked)
            if joint.activity is not None:
                record.activity = joint.activity
            if joint.step is not None:
                record.step = joint.step


class JointMeeting(Meeting[To]):
    """A meeting that takes the arrivals of several processes at one point together."""

    def __init__(
        self,
        hosts: Sequence[str],
        now: float,
        *,
        pids: Sequence[int] = (),
        stack_grace_s: float = 0.0,
    ) -> None:
        """See `Meeting`."""
        super().__init__(hosts, now, pids=pids, stack_grace_s=stack_grace_s)
        self._records = self._joint_records = JointRecords(self._records)

    def arrive_together(
        self,
        now: float,
        processes: Sequence[int],
        point: Point,
        payloads: Sequence[bytes],
        *,
        limits: JointLimits | float,
        to: To,
        each: Sequence[To],
        step: int | None = None,
    ) -> list[Reply[To]]:
        """Take arrivals of members of one group; do what `arrive` does for each, in order.

        Args:
          limits: the time-out of each, seconds; a number: of all.
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
                    timeout_s=limit_of(limits, index), to=each[index], ticket=0, step=step,
                )
            ]  # fmt: skip
        if any(payloads):
            for process, payload in zip(processes, payloads, strict=True):
                gathering.arrived[process] = WaitingProcess(to, 0, point, payload, now)
        else:
            wait = WaitingProcess(to, 0, point, b"", now)
            gathering.arrived.update(dict.fromkeys(processes, wait))
        self._joint_records.arrive(tuple(processes), gathering, step)
        least_s, first = earliest_of(limits)
        if now + least_s < gathering.deadline:
            self._limit(gathering, now, processes[first], limit_of(limits, first))
        return self._complete(now, gathering) if self._is_complete(gathering) else []

    def beat(self, now: float, process: int, beat: Beat) -> None:
        """See `Roster`."""
        if process not in self._gone:
            self._joint_records.beat(now, process, beat)

    def _release(
        self, now: float, gathering: Gathering[To], arrived: Waits[To], answer: Outcome
    ) -> list[Reply[To]]:
        released = self._joint_records.release(now, gathering, arrived)
        first_waits = [arrived[joint.processes[0]] for joint in released]
        replies = [Reply(wait.to, wait.ticket, answer) for wait in first_waits]
        if sum(len(joint.processes) for joint in released) < len(arrived):
            together = {process for joint in released for process in joint.processes}
            alone = {p: wait for p, wait in arrived.items() if p not in together}
            replies += super()._release(now, gathering, alone, answer)
        return replies

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
