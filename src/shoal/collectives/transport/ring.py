"""One device of each process, and the programs that move chunks between them.

A route is compiled on first use, ahead of time and for each chunk size; the shape of a value never
compiles anything. A program only moves bytes: no arithmetic, so every bit is preserved.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shoal.collectives.transport.chunks import CHUNKS, ByteArray
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import JobClient
from shoal.runtime.jax_service import jax_runtime

Hops = tuple[tuple[int, int], ...]  # (sender, receiver) pairs, simultaneous


class Ring:
    """One device of each process, in the order of the processes, as this process sees them."""

    def __init__(self, devices: tuple[jax.Device, ...], process: int) -> None:
        self.process, self.num_processes = process, len(devices)
        self._devices, self._device = devices, devices[process]
        self._sharding = _sharding(devices)
        self._zeros = {size: self.put(np.zeros(size, np.uint8)) for size in CHUNKS}

    def put(self, chunk: ByteArray) -> jax.Array:
        """Return a chunk of this process's data on its device. May share the host's memory."""
        buffer = jax.device_put(chunk, self._device)
        shape = (self.num_processes * chunk.size,)
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [buffer])

    def zeros(self, num_bytes: int) -> jax.Array:
        """Return a chunk of zeros."""
        return self._zeros[num_bytes]

    def prepare(self, ways: Iterable[Hops]) -> None:
        """Compile these routes for all chunk sizes: once per job."""
        for hops in ways:
            _programs(self._devices, hops)

    def move(self, chunk: jax.Array, hops: Hops) -> jax.Array:
        """Send chunks between processes; a process that receives none has zeros. May block."""
        programs = _programs(self._devices, hops)
        moved: jax.Array = programs[chunk.size // self.num_processes](chunk)
        return moved

    @staticmethod
    def host_value(chunk: jax.Array) -> ByteArray:
        """Return this process's chunk; waits for it."""
        return np.asarray(chunk.addressable_data(0))


def rotation(num_processes: int) -> Hops:
    """Each process sends to the next one.

    >>> rotation(3)
    ((0, 1), (1, 2), (2, 0))
    """
    return tuple((place, (place + 1) % num_processes) for place in range(num_processes))


def chain(num_processes: int, source: int) -> Hops:
    """Each process sends to the next, from the source to the one before it.

    >>> chain(3, source=1)
    ((1, 2), (2, 0))
    """
    hops = rotation(num_processes)
    return hops[source:] + hops[: max(0, source - 1)] if source else hops[:-1]


def tree(num_processes: int, source: int) -> tuple[Hops, ...]:
    """Return the rounds of a binomial tree: in each, processes with the chunk send it to others.

    If the number of processes is not a power of two, some that have it send nothing.

    >>> tree(4, source=0)
    (((0, 2),), ((0, 1), (2, 3)))
    """
    rounds = []
    for power in reversed(range((num_processes - 1).bit_length())):
        span = 1 << power
        pairs = [(sender, sender + span) for sender in range(0, num_processes - span, 2 * span)]
        rounds.append(tuple(((a + source) % num_processes, (b + source) % num_processes)
                            for a, b in pairs))  # fmt: skip
    return tuple(rounds)


def has_devices(client: JobClient) -> bool:
    """Did JAX join exactly this job? If not, there are no common devices."""
    attached = jax_runtime.attached()
    return (
        client.num_processes > 1
        and bool(client.jax_service)
        and attached is not None
        and attached.num_processes == client.num_processes
    )


@contextlib.contextmanager
def borrowed_ring(
    client: JobClient, *, site: str, timeout_s: float, lane: str = "main"
) -> Iterator[Ring | None]:
    """Borrow the ring of a job; None if a process has no device available.

    The first time, processes exchange the ids of their devices: on some machines JAX numbers
    processes differently. Creates JAX's devices, which waits for all processes.

    They also meet if the ring was not returned last time: an abandoned thread may still be moving
    chunks, which could be taken for those of the next value. While there is such a thread anywhere,
    no process gets the ring; if one has failed midway, no process ever gets it again.

    Raises:
      As `JobClient.arrive`; a RuntimeError of JAX if it cannot create its devices.
    """
    known = _known(client)
    if not known.is_free:
        rows = json.dumps(None if known.users else _own_device()).encode()
        call = Call("devices", "values between processes", site)
        answers = agree(client, call, rows, timeout_s=timeout_s, lane=lane)
        devices = _devices([json.loads(answers[p]) for p in range(client.num_processes)])
        known.ring = None if devices is None else Ring(devices, client.process)
    known.is_free = False
    user = object()
    known.users.add(user)
    yield known.ring
    known.users.discard(user)  # not after an error: chunks may be in flight


def give_ring_back(client: JobClient) -> None:
    """Give the ring back: all processes have met since they borrowed it, and all are done."""
    _known(client).is_free = True


class _Known:
    """The state of a job's ring."""

    def __init__(self) -> None:
        self.ring: Ring | None = None
        self.is_free = False  # known to all, and not in use
        self.users: set[object] = set()  # borrowers in this process that are not done


def _known(client: JobClient) -> _Known:
    known: _Known = client.kept.setdefault("ring", _Known())
    return known


def _own_device() -> list[object] | None:
    """Return platform and id of this process's first device of JAX's default kind."""
    own = jax.local_devices()
    return [own[0].platform, own[0].id] if own else None


def _devices(rows: list[list[object] | None]) -> tuple[jax.Device, ...] | None:
    """Return the devices that the processes chose, if all chose one and all are of one kind."""
    present = {(device.platform, device.id): device for device in jax.devices()}
    chosen = [present.get((str(row[0]), row[1])) if row else None for row in rows]
    devices = tuple(device for device in chosen if device is not None)
    return devices if len(devices) == len(rows) else None


def _sharding(devices: tuple[jax.Device, ...]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices, dtype=object), "process"), PartitionSpec("process"))


@lru_cache(maxsize=1024)
def _programs(devices: tuple[jax.Device, ...], hops: Hops) -> Mapping[int, Any]:
    """Compile the program that moves a chunk over these hops, for each size of a chunk."""
    sharding, count = _sharding(devices), len(devices)

    def move(chunk: jax.Array) -> jax.Array:
        return jax.lax.ppermute(chunk, "process", hops)

    spec = sharding.spec
    moved = jax.shard_map(move, mesh=sharding.mesh, in_specs=spec, out_specs=spec)
    chunks = [jax.ShapeDtypeStruct((count * size,), np.uint8, sharding=sharding) for size in CHUNKS]
    return {
        size: jax.jit(moved).lower(chunk).compile()
        for size, chunk in zip(CHUNKS, chunks, strict=True)
    }
