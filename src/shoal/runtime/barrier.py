"""Wait for all processes to arrive; otherwise raise an error that names the missing ones."""

from __future__ import annotations

import os
from collections.abc import Iterable

from shoal import settings
from shoal.colour import collective
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.rules.point import Point, group_of
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client


@collective("processes")
@uses_client
@collective_scope("barrier")
def barrier(
    client: JobClient,
    name: str,
    *,
    processes: Iterable[int] | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Wait until all of `processes` have arrived at this point.

    Collective over processes.

    It takes one round trip to the coordinator, two messages per process, and no device. When it
    returns, every one of `processes` has arrived. It either returns on all processes or raises on
    all, except on a process that the answer could not reach, because that process or the
    coordinator was lost. The wait never exceeds the earliest deadline of the waiting processes.
    In a group and lane, the n-th call of each process meets the n-th call of the others, also after
    an error, and whatever their names. An exception on this process alone counts as its call: an
    invalid argument ends the call on the others, and an interrupted wait leaves this process
    counted as arrived. If a process makes a call more or less than the others, or one in another
    lane or group, the next calls raise on all of them and say since which call, until
    `live_processes` in this lane and group returns.

    Args:
      name: the name of the synchronization point, equal on all processes; part of every message. It
        can be reused immediately.
      processes: the processes that synchronize, including the caller; None: all of the job.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline ends the
        wait for all.
      lane: an independent sequence of collective calls. Calls are matched in order within a lane,
        so a background thread that synchronizes with other processes needs a lane of its own.

    Raises:
      DivergenceError: on all that arrived, and immediately on a late arrival: processes are at
        different calls, or wait for each other in a cycle.
      DeadlineError: on all that arrived, and immediately on a late arrival: names the missing
        processes and the call site of each.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError.

    >>> barrier("data is ready")  # one process: returns at once
    """
    for argument, text in (("name", name), ("lane", lane)):
        if not isinstance(text, str):
            raise UsageTypeError(f"barrier({name!r}): {argument}={text!r} must be a string")
        if not text:
            raise UsageError(f"barrier({name!r}): {argument} must not be empty")
    timeout_s = settings.timeout(f"barrier({name!r})", timeout_s, "SHOAL_TIMEOUT_S")
    group = group_of(f"barrier({name!r})", processes)
    point = Point(name, group=group, lane=lane, operation="barrier", site=callsite())
    has_faults = fault_points.VARIABLE in os.environ  # one lookup: a hundredth of a barrier
    if has_faults:
        fault_points.reach("barrier.before_arrive", client.process)
    client.arrive(point, timeout_s=timeout_s)
    if has_faults:
        fault_points.reach("barrier.after_arrive", client.process)
