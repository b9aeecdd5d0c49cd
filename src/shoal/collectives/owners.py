"""Which process of the job owns a device."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from shoal.runtime.client.interface import Coordinator
from shoal.runtime.jax_service.process_numbers import processes_of


def owner_numbers(
    coordinator: Coordinator, devices: Iterable[jax.Device], timeout_s: float
) -> dict[int, int]:
    """Return the process of the job for each number by which JAX counts the devices' owners.

    On TPUs JAX may count processes in its own order, which all owners must then look up.

    Raises:
      TimeoutError: one of them did not look it up in time.
    """
    platforms = {device.process_index: device.platform for device in devices}
    if coordinator.num_processes == 1 or "tpu" not in platforms.values():
        return {owner: owner for owner in platforms}
    return processes_of(platforms, coordinator.process, timeout_s=timeout_s)
