"""Agree on which processes are alive."""

from __future__ import annotations

from collections.abc import Iterable

from shoal import settings
from shoal.colour import collective
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.lanes import one_call
from shoal.runtime.rules.point import Point, group_of
from shoal.runtime.system.callsite import callsite
from shoal.runtime.verb import verb


@collective("processes")
@verb
@one_call("live", survivors=True)
def live(
    coordinator: Coordinator,
    processes: Iterable[int] | None = None,
    *,
    timeout_s: float | None = None,
    lane: str = "main",
) -> tuple[int, ...]:
    """Return which of `processes` are alive, as agreed by all that are.

    Collective over processes.

    All living processes among `processes` meet; processes that are dead, have failed or have left
    are not waited for, even if that happens meanwhile. It is impossible that two processes that
    return from the same call return different processes, or that the result names one that did not
    take part.

    Nothing is reported about processes outside `processes`. Afterwards the loss of the missing ones
    is acknowledged: `step` no longer raises for it, and calls with `processes=` set to the result
    work. A later loss is reported again.

    Args:
      processes: the candidates, the caller among them; equal on all. None: all of the job.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the line of execution; see `barrier`.

    Returns:
      The living processes, in order.

    Raises:
      DeadlineError: on all that arrived, and at once on one that is late: a process is alive and
        did not arrive in time. Call it again.
      DivergenceError: on all that arrived: others arrived at another point.
      ProcessLostError: on all that arrived: the meeting place or JAX's service is lost; on this
        process: the others have continued without it.
      PeerFailedError: on all that arrived: an exception (such as an interrupt) took a process out
        of this call, and it is alive. Call it again.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError.

    >>> live()
    (0,)
    """
    if not isinstance(lane, str):
        raise UsageTypeError(f"live: lane={lane!r} must be text")
    if not lane:
        raise UsageError("live: lane must not be empty")
    timeout_s = settings.timeout("live()", timeout_s, "SHOAL_TIMEOUT_S")
    group = group_of("live", processes)
    point = Point("live", group, lane, fingerprint="live", site=callsite(), survivors=True)
    return tuple(sorted(coordinator.arrive(point, timeout_s=timeout_s)))
