"""Which process of the job owns a device."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from shoal.runtime.client.interface import JobClient
from shoal.runtime.jax_service.process_numbers import processes_of


def owner_indices(
    client: JobClient, devices: Iterable[jax.Device], timeout_s: float
) -> dict[int, int]:
    """Map the JAX process numbers of the devices' owners to job numbers.

    On TPUs JAX may number processes differently; then all owners must look up the mapping.

    Raises:
      NothingPublishedError: one of them did not call this in time.
    """
    platform_of = {device.process_index: device.platform for device in devices}
    if client.num_processes == 1 or "tpu" not in platform_of.values():
        return {owner: owner for owner in platform_of}
    return processes_of(platform_of, client.process, timeout_s=timeout_s)
