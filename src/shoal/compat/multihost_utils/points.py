"""`sync_global_devices`, `reached_preemption_sync_point`: synchronisation points."""

from __future__ import annotations

from shoal.colour import collective
from shoal.compat.multihost_utils.errors import UnequalError
from shoal.compat.wording import errors_named
from shoal.runtime import process
from shoal.runtime.barrier import barrier
from shoal.runtime.client.lanes import one_call
from shoal.runtime.preemption import checked_step, preempted
from shoal.runtime.verb import coordinator_here

__all__ = ["reached_preemption_sync_point", "sync_global_devices"]


@collective()
@one_call("sync_global_devices", of=coordinator_here)
def sync_global_devices(name: str) -> None:
    """Wait until all processes have reached this point: `shoal.barrier`.

    Collective over all processes.

    No device takes part; `shoal.sync_devices` waits for the devices' work, too.

    Args:
      name: the name of the point, equal on all. It may be reused.

    Raises:
      UnequalError: on all: names differ. Also an AssertionError.
      DeadlineError, ProcessLostError, PeerFailedError, UsageError: as `shoal.barrier`.

    >>> sync_global_devices("data is ready")
    """
    with errors_named("sync_global_devices", UnequalError):
        barrier(f"sync_global_devices({name!r})" if isinstance(name, str) else name)


@collective("processes")
def reached_preemption_sync_point(step_id: int) -> bool:
    """Return whether to save and stop at this step: `shoal.preempted`.

    Collective over processes.

    False until some process has a notice, then True on all from one agreed step on, at any stride.
    A program of one process that called neither `shoal.initialize` nor `shoal.preemption.watch`
    receives no notice: False.

    Args:
      step_id: the number of the step, 0 or greater, of any size.

    Raises:
      UsageError, DeadlineError, ProcessLostError, PeerFailedError, DivergenceError: as
        `shoal.preempted`.

    >>> reached_preemption_sync_point(0)
    False
    """
    has_service = process.process_count() > 1 or process.has_joined() or process.is_watching()
    with errors_named("reached_preemption_sync_point"):
        checked_step("preempted", step_id)
        return preempted(step_id) if has_service else False
