"""Turn a meeting's answer into a return value or an exception."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.runtime.client.known_losses import Troubles
from shoal.runtime.rules.meeting_answers import (
    AllMet,
    Outcome,
    ProcessesGone,
    ServicesLost,
    SurvivorsMet,
)
from shoal.runtime.rules.outcomes import ThisProcess, error_of
from shoal.runtime.rules.point import Point


def conclude(
    answer: Outcome, point: Point, me: ThisProcess, troubles: Troubles, waited_s: float
) -> Mapping[int, bytes]:
    """Return the payloads of all that met, or raise the exception that the answer describes.

    Survivors that met have agreed on the losses; an error that names a loss makes it known.
    """
    match answer:
        case AllMet():
            return answer.payloads
        case SurvivorsMet():
            troubles.acknowledge(process for process, _, _ in answer.gone)
            troubles.acknowledge(name for name, _ in answer.services)
            return dict.fromkeys(answer.alive, b"")
        case ProcessesGone() if point.lane == "main":
            troubles.mark_reported(process for process, _ in answer.gone)
        case ServicesLost() if point.lane == "main":
            troubles.mark_reported(name for name, _ in answer.services)
    raise error_of(answer, me, point, waited_s)
