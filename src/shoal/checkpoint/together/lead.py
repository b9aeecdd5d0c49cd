"""Run a function on process 0; return its result, or raise its error, on all.

Among a group of processes, the lowest of them takes the place of process 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.checkpoint.together.errors_between import decode_error, encode_error, failed_processes
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.interrupts import interrupts_delivered


@interrupts_delivered
def run_on_lead(
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
    """Call `act` on the lead; return its result (JSON), or raise its error, on all.

    Args:
      group: the processes that call it; the lead is the lowest of them.
      spec: lines that must be equal on all processes.
      name: identifies calls at different places as the same call.
      site: the user's call site; None: the caller's.

    Also raises what `agree` raises.
    """
    options: dict[str, Any] = {"name": name, "site": site, "lane": lane}
    options |= {"group": group, "timeout_s": timeout_s}
    return meet_lead(coordinator, operation, spec, act, b"", **options)[0]


def raise_together(
    coordinator: Coordinator,
    operation: str,
    work: Callable[[], None],
    *,
    group: Group,
    timeout_s: float,
) -> None:
    """Call `work` on every process; if it fails on one, raise on all: the own error, or that one's.

    Also raises what `agree` raises.
    """
    raised = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
        raised = error
    call = Call(operation, None, callsite(), ("checked",))
    brought = b"" if raised is None else encode_error(raised)
    answers = agree(coordinator, call, brought, timeout_s=timeout_s, group=group.named)
    if raised is not None:
        raise raised
    if who := failed_processes(answers):
        me = ThisProcess(coordinator.process, coordinator.hosts)
        raise decode_error(answers[who[0]], who[0], me)


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
    """Like `run_on_lead`; return also the payloads that the processes `brought`."""
    payload, raised = brought, None
    if coordinator.process == group.lead:
        try:
            payload = json.dumps(act()).encode()
        except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
            payload, raised = encode_error(error), error
    call = Call(operation, name, site or callsite(), spec)
    answers = agree(coordinator, call, payload, timeout_s=timeout_s, group=group.named, lane=lane)
    if raised is not None:
        raise raised
    if failed_processes(answers):
        me = ThisProcess(coordinator.process, coordinator.hosts)
        raise decode_error(answers[group.lead], group.lead, me)
    return json.loads(answers[group.lead]), answers
