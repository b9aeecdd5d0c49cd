"""`live_devices`: a context manager over the devices whose processes are alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax

from shoal import settings
from shoal.collectives.live_processes import LiveBlock
from shoal.collectives.owners import owner_numbers
from shoal.colour import collective
from shoal.compat.multihost_utils.errors import ProcessFailureError
from shoal.errors import ProcessLostError, UsageError
from shoal.runtime import process
from shoal.runtime.client.lanes import fail_call, refused_for_all
from shoal.runtime.verb import coordinator_here
from shoal.tracebacks import block_at_caller

__all__ = ["live_devices"]


def _fail(error: BaseException, *_: object, **__: object) -> None:
    """Fail the call for the other processes: the devices are not known here."""
    if (here := coordinator_here()) is not None:
        fail_call(here, "live_devices", error, survivors=True)


@collective("the devices' processes")
@block_at_caller
@refused_for_all(_fail)
def live_devices(devices: Iterable[jax.Device]) -> Iterator[list[jax.Device]]:
    """Return a context manager that yields the devices whose processes are alive.

    Collective over the devices' processes.

    The living processes enter the block together, with the same devices, and leave it together. It
    is impossible that one of them leaves it without an exception while another died inside or
    leaves it with an exception.

    Args:
      devices: the candidates, some of this process's among them; equal on all.

    Returns:
      A context manager that yields the devices of the living processes, by ascending id.

    Raises:
      ProcessFailureError: on all survivors, at the end: processes died inside.
      PeerFailedError: at the end, on those whose own code did not raise: another's did.
      UsageError: there are no devices, or none of this process.
      DeadlineError, DivergenceError, ProcessLostError: as `shoal.live_processes`.

    >>> with live_devices(jax.devices()) as alive:
    ...     alive == jax.devices()
    True
    """
    devices, owners = _owners(devices)
    alive: list[jax.Device] = []
    try:
        with LiveBlock(process.coordinator(), "live_devices", sorted({*owners.values()})) as living:
            alive += (device for device in devices if owners[device.process_index] in living)
            yield sorted(alive, key=lambda device: device.id)
    except ProcessLostError as error:
        failed = {device for device in alive if owners[device.process_index] in error.lost}
        if not failed:
            raise
        failure = ProcessFailureError(failed, f"{error}: devices {sorted(map(str, failed))}")
        failure.lost = error.lost
        raise failure from error


def _owners(given: Iterable[jax.Device]) -> tuple[tuple[jax.Device, ...], dict[int, int]]:
    """Return the devices, and their owners: JAX's process numbers → processes of the job.

    An error fails the call for the other processes.
    """
    try:
        devices = tuple(dict.fromkeys(given))
        if not devices:
            raise UsageError("live_devices: No devices provided.")
        if jax.process_index() not in {device.process_index for device in devices}:
            raise UsageError("live_devices: Provided devices do not have any local devices.")
        timeout_s = settings.timeout("live_devices", None, "SHOAL_TIMEOUT_S")
        return devices, owner_numbers(process.coordinator(), devices, timeout_s)
    except BaseException as error:
        _fail(error)
        raise
