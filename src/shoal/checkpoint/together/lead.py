"""What one process does, or finds on disk, and all hear: the lead's answer is everybody's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.checkpoint.together.errors_between import tellers, told, untold
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.interrupts import interrupts_heard


@interrupts_heard
def lead_says(
    coordinator: Coordinator,
    operation: str,
    spec: tuple[str, ...],
    act: Callable[[], Any],
    *,
    group: Group,
    timeout_s: float,
    name: str | None = None,
    site: str | None = None,
    lane: str = "main",
) -> Any:
    """Call `act` on the lead; return what it returned (JSON), or raise what it raised, on all.

    Args:
      group: who calls it; the lead is the lowest of these.
      spec: what must be equal on all processes, a line each.
      name: declares calls at different places to be the same one.
      site: where the program asked for it; None: here.

    Raises, besides: as `agree`.
    """
    options: dict[str, Any] = {"name": name, "site": site, "lane": lane}
    options |= {"group": group, "timeout_s": timeout_s}
    return meet_lead(coordinator, operation, spec, act, b"", **options)[0]


def meet_lead(
    coordinator: Coordinator,
    operation: str,
    spec: tuple[str, ...],
    act: Callable[[], Any],
    brought: bytes,
    *,
    group: Group,
    timeout_s: float,
    name: str | None = None,
    site: str | None = None,
    lane: str = "main",
) -> tuple[Any, Mapping[int, bytes]]:
    """Do what `lead_says` does; return also what the others `brought`, by process."""
    payload, raised = brought, None
    if coordinator.process == group.lead:
        try:
            payload = json.dumps(act()).encode()
        except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
            payload, raised = told(error), error
    call = Call(operation, name, site or callsite(), spec)
    answers = agree(coordinator, call, payload, timeout_s=timeout_s, group=group.named, lane=lane)
    if raised is not None:
        raise raised
    if tellers(answers):
        me = ThisProcess(coordinator.process, coordinator.hosts)
        raise untold(answers[group.lead], group.lead, me)
    return json.loads(answers[group.lead]), answers
