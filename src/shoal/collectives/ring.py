"""The ring: one device of each process, and the programs that move a chunk to the next one.

They are compiled once for the devices of a job, ahead of time, for each size of a chunk; no shape
of a value ever compiles anything. A chunk is bytes and the program moves it: no arithmetic, so
every bit arrives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shoal.collectives.chunks import CHUNKS, ByteArray
from shoal.runtime import jax_runtime
from shoal.runtime.agreement import Call, agree
from shoal.runtime.coordinator import Coordinator

__all__ = ["Ring", "find_ring", "has_devices"]


class Ring:
    """One device of each process, in the order of the processes, as this process sees them."""

    def __init__(self, devices: tuple[jax.Device, ...], process: int) -> None:
        self.process, self.num_processes = process, len(devices)
        self._device = devices[process]
        self._sharding = _sharding(devices)
        self._rotate = _programs(devices)
        self._zeros = {size: self.put(np.zeros(size, np.uint8)) for size in CHUNKS}

    def put(self, chunk: ByteArray) -> jax.Array:
        """Return a chunk of this process's own, on its device. The host's memory may be shared."""
        buffer = jax.device_put(chunk, self._device)
        shape = (self.num_processes * chunk.size,)
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [buffer])

    def zeros(self, num_bytes: int) -> jax.Array:
        """Return a chunk of nothing."""
        return self._zeros[num_bytes]

    def rotate(self, chunk: jax.Array) -> jax.Array:
        """Give each process's chunk to the next process. May block until it is done."""
        moved: jax.Array = self._rotate[chunk.size // self.num_processes](chunk)
        return moved

    @staticmethod
    def host_value(chunk: jax.Array) -> ByteArray:
        """Return this process's chunk; waits until it is there."""
        return np.asarray(chunk.addressable_data(0))


def has_devices(coordinator: Coordinator) -> bool:
    """Did JAX join exactly this job? If not, no process of it has a device for the others."""
    found = jax_runtime.attached()
    return (
        coordinator.num_processes > 1
        and bool(coordinator.jax_service)
        and found is not None
        and found.num_processes == coordinator.num_processes
    )


def find_ring(
    coordinator: Coordinator, *, site: str, timeout_s: float, lane: str = "main"
) -> Ring | None:
    """Return the ring of a job, None if a process has no device for it.

    The first time, processes tell each other which device they give: on some machines JAX counts
    processes in an order of its own. Creates JAX's devices, which waits for all processes.

    Raises:
      As `Coordinator.arrive`; a RuntimeError of JAX if it cannot create its devices.
    """
    known = _known(coordinator)
    if not known:
        said = json.dumps(_own_device()).encode()
        call = Call("devices", "values between processes", site)
        answers = agree(coordinator, call, said, timeout_s=timeout_s, lane=lane)
        devices = _devices([json.loads(answers[p]) for p in range(coordinator.num_processes)])
        known.append(None if devices is None else Ring(devices, coordinator.process))
    return known[0]


@lru_cache(maxsize=8)
def _known(coordinator: Coordinator) -> list[Ring | None]:
    """What was found for a job: nothing yet, or one entry."""
    return []


def _own_device() -> list[object] | None:
    """Return platform and id of this process's first device of JAX's default kind."""
    own = jax.local_devices()
    return [own[0].platform, own[0].id] if own else None


def _devices(said: list[list[object] | None]) -> tuple[jax.Device, ...] | None:
    """Return the devices that the processes named, if all did and all are of one kind."""
    present = {(device.platform, device.id): device for device in jax.devices()}
    found = [present.get((str(row[0]), row[1])) if row else None for row in said]  # type: ignore[call-overload]
    devices = tuple(device for device in found if device is not None)
    return devices if len(devices) == len(said) else None


def _sharding(devices: tuple[jax.Device, ...]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices, dtype=object), "process"), PartitionSpec("process"))


@lru_cache(maxsize=8)
def _programs(devices: tuple[jax.Device, ...]) -> Mapping[int, Any]:
    """Compile the rotation for each size of a chunk."""
    sharding, count = _sharding(devices), len(devices)
    onwards = [(place, (place + 1) % count) for place in range(count)]

    def rotate(chunk: jax.Array) -> jax.Array:
        return jax.lax.ppermute(chunk, "process", onwards)

    spec = sharding.spec
    moved = jax.shard_map(rotate, mesh=sharding.mesh, in_specs=spec, out_specs=spec)
    chunks = {size: jax.ShapeDtypeStruct((count * size,), np.uint8, sharding=sharding)
              for size in CHUNKS}  # fmt: skip
    return {size: jax.jit(moved).lower(chunk).compile() for size, chunk in chunks.items()}
