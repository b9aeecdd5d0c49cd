"""Who is alive, agreed by all of them."""

from __future__ import annotations

from collections.abc import Iterable

from shoal import settings
from shoal.colour import collective
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.point import Point, group_of
from shoal.runtime.system.callsite import callsite


@collective("processes")
def live(
    processes: Iterable[int] | None = None,
    *,
    timeout_s: float | None = None,
    lane: str = "main",
) -> tuple[int, ...]:
    """Return which of `processes` are alive, as all of them that are alive agree.

    Collective over processes.

    All the living among `processes` meet; who is dead, has failed or has left is not waited for,
    also if that happens meanwhile. It is impossible that two processes that return from the same
    call return different processes, or that the result names one that did not take part.

    What you ask about is what you learn: nothing is said of processes outside of `processes`.
    Afterwards the loss of those who are missing is known: `step` does not raise for it any more,
    and calls with `processes=` set to the result work. A loss after that is news again.

    Args:
      processes: who is asked about, this process among them; equal on all. None: all of the job.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest of all ends the
        wait for all.
      lane: the line of execution; see `barrier`.

    Returns:
      The living, in order.

    Raises:
      DeadlineError: on all that came, and at once on one that comes late: a process is alive and
        did not come in time. Call it again.
      DivergenceError: on all that came: others came to another point.
      ProcessLostError: on all that came: the meeting place or JAX's service is lost; on this
        process: the others have gone on without it.
      PeerFailedError: on all that came: an exception (an interrupt, say) took a process out of
        this call, and it lives on. Call it again.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError.

    >>> live()
    (0,)
    """
    from shoal.runtime.process import coordinator

    return live_with(coordinator(), processes, timeout_s=timeout_s, lane=lane)


def live_with(
    coordinator: Coordinator,
    processes: Iterable[int] | None = None,
    *,
    timeout_s: float | None = None,
    lane: str = "main",
) -> tuple[int, ...]:
    """Do what `live` does, with the coordinator given."""
    with coordinator.call("live", lane, processes, survivors=True):
        if not isinstance(lane, str):
            raise UsageTypeError(f"live: lane={lane!r} must be text")
        if not lane:
            raise UsageError("live: lane must not be empty")
        timeout_s = settings.timeout("live()", timeout_s, "SHOAL_TIMEOUT_S")
        group = group_of("live", processes)
        point = Point("live", group, lane, fingerprint="live", site=callsite(), survivors=True)
        return tuple(sorted(coordinator.arrive(point, timeout_s=timeout_s)))
