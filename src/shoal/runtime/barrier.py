"""All arrive, or an error says who did not."""

from __future__ import annotations

import os
from collections.abc import Iterable

from shoal import settings
from shoal.colour import collective
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.lanes import one_call
from shoal.runtime.rules.point import Point, group_of
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite


@collective("processes")
def barrier(
    name: str,
    *,
    processes: Iterable[int] | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Wait until all of `processes` have come to this point.

    Collective over processes.

    One round trip to the meeting place; no device takes part. When it returns, every one of
    `processes` has come here. It is impossible that it returns on one process and raises on
    another, unless the answer could not reach that one: it was lost, or the meeting place was. Nor
    does it wait longer than the earliest deadline of those who came. The call is spent either way:
    after an error the next call of all processes is one call again, of whatever name. That holds
    for an exception of this process alone, too: a wrong argument ends the call on the others; an
    interrupt of the wait leaves this process counted as arrived.

    Args:
      name: what the point is called, equal on all; it is shown in every message. It may be used
        again at once.
      processes: who must come, this process among them; None: all of the job.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest of all ends the
        wait for all.
      lane: the line of execution. Points are matched in their order within a lane, so a background
        thread that meets others names a lane of its own.

    Raises:
      DivergenceError: on all that came: others came to another point, or wait in a circle.
      DeadlineError: on all that came, and at once on who comes late: who was missing, and where
        each of them is.
      ProcessLostError: on all that came: a process is dead or unreachable.
      PeerFailedError: on all that came: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError.

    >>> barrier("data is ready")  # one process: returns at once
    """
    from shoal.runtime.process import coordinator

    barrier_with(coordinator(), name, processes=processes, timeout_s=timeout_s, lane=lane)


@one_call("barrier")
def barrier_with(
    coordinator: Coordinator,
    name: str,
    *,
    processes: Iterable[int] | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Do what `barrier` does, with the coordinator given."""
    for argument, text in (("name", name), ("lane", lane)):
        if not isinstance(text, str):
            raise UsageTypeError(f"barrier({name!r}): {argument}={text!r} must be text")
        if not text:
            raise UsageError(f"barrier({name!r}): {argument} must not be empty")
    timeout_s = settings.timeout(f"barrier({name!r})", timeout_s, "SHOAL_TIMEOUT_S")
    group = group_of(f"barrier({name!r})", processes)
    point = Point(name, group=group, lane=lane, fingerprint="barrier", site=callsite())
    has_faults = fault_points.VARIABLE in os.environ  # one look: it is a hundredth of a barrier
    if has_faults:
        fault_points.reach("barrier.before_arrive", coordinator.process)
    coordinator.arrive(point, timeout_s=timeout_s)
    if has_faults:
        fault_points.reach("barrier.after_arrive", coordinator.process)
