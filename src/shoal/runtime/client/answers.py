"""Turn a meeting's answer into a return value or an exception."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.runtime.client.known_losses import Troubles
from shoal.runtime.rules.gathering import Answer
from shoal.runtime.rules.outcomes import ThisProcess, error_of
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.trail import TrailsDiffer


def conclude(
    answer: Answer, point: Point, me: ThisProcess, troubles: Troubles, waited_s: float
) -> Mapping[int, bytes]:
    """Return the payloads of all that met, or raise the exception that the answer describes.

    Survivors that met have agreed on the losses; an error that names a loss makes it known.
    """
    if answer.kind == "ok":
        return answer.payloads
    facts = answer.facts
    if answer.kind == "live":
        troubles.acknowledge(process for process, _, _ in facts["gone"])
        troubles.acknowledge(name for name, _ in facts["services"])
        return dict.fromkeys(facts["alive"], b"")
    if "trails" in facts:
        raise TrailsDiffer(facts["trails"], facts.get("lane"))
    if point.lane == "main" and answer.kind in ("lost", "failed"):
        troubles.tell(process for process, _ in facts["gone"])
        troubles.tell(name for name, _ in facts.get("services", ()))
    raise error_of(answer.kind, facts, me, point, waited_s)
