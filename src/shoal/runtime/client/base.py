"""What both job clients share: the state of this process in its job, and answers as results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.runtime.client.known_losses import PeerLosses
from shoal.runtime.client.lanes import Lanes, Scope
from shoal.runtime.client.outcomes import ThisProcess, error_of
from shoal.runtime.client.programs import ProgramNotes
from shoal.runtime.client.progress import Progress
from shoal.runtime.rules.call_record import CallRecords
from shoal.runtime.rules.meeting_answers import (
    AllMet,
    Outcome,
    ProcessesGone,
    ServicesLost,
    SurvivorsMet,
)
from shoal.runtime.rules.messages import Abandoned
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.stalls import Stall
from shoal.runtime.rules.stopping import PreemptionState


class BaseJobClient:
    """The members of `JobClient` that do not depend on how messages travel."""

    def __init__(
        self,
        me: ThisProcess,
        abandon: Callable[[Abandoned], None],
        end_lane: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`abandon` and `end_lane` tell the others of a call that was left, and of a lane's end."""
        self._me = me
        self.process = me.process
        self.hosts = tuple(me.hosts)
        self.num_processes = len(self.hosts)
        self.progress = Progress(clock)
        self.peer_losses = PeerLosses(me, clock)
        self.call_records = CallRecords(me.process, self.num_processes)
        self.programs = ProgramNotes(self.num_processes)
        self.stop = PreemptionState(me.process, clock)
        self.kept: dict[str, Any] = {}
        self.stall: Stall | None = None
        self._lanes = Lanes(me, abandon, end_lane)

    def call(
        self, operation: str, lane: object = "main", processes: object = None, **more: bool
    ) -> Scope:
        """See `JobClient.call`."""
        return self._lanes.call(operation, lane, processes, **more)


def conclude(
    answer: Outcome, point: Point, me: ThisProcess, losses: PeerLosses, waited_s: float
) -> Mapping[int, bytes]:
    """Return the payloads of all that met, or raise the exception that the answer describes.

    Survivors that met have agreed on the losses; an error that names a loss makes it known.
    """
    match answer:
        case AllMet():
            return answer.payloads
        case SurvivorsMet():
            losses.acknowledge(process for process, _, _ in answer.gone)
            losses.acknowledge(name for name, _ in answer.services)
            return dict.fromkeys(answer.alive, b"")
        case ProcessesGone() if point.lane == "main":
            losses.mark_reported(process for process, _ in answer.gone)
        case ServicesLost() if point.lane == "main":
            losses.mark_reported(name for name, _ in answer.services)
    raise error_of(answer, me, point, waited_s)
