"""The shards that this process's devices hold, and small programs that run on them.

Such a program runs on the devices of this process alone: JAX never starts one that the other
processes must start as well. Shards in the memory of this host are read by NumPy, which is faster
there than a program of XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shoal.arrays.host.host_values import is_key
from shoal.collectives.leaves import LeafSpec, box_of, words_of
from shoal.errors import UsageError
from shoal.hashing import quick_digest
from shoal.plan.shards import Box

# XLA stores them, and compiles no program of them (jax 0.10 to 0.12).
_WITHOUT_PROGRAMS = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
Program = Callable[[jax.Array], jax.Array]


class Holder(NamedTuple):
    """A device that holds a region of an array."""

    device: int  # its id
    process: int  # in JAX


class DeviceShard(NamedTuple):
    """The data of one of this process's devices."""

    region: int  # its number among those of the array, in the order of their boxes
    box: Box
    holders: tuple[Holder, ...]  # all devices that hold this region, in order
    device: int  # its id
    data: jax.Array  # on this device alone

    def read(self) -> np.ndarray[Any, Any]:
        """Return its words on the host."""
        (device,) = self.data.devices()
        if device.platform == "cpu":  # in place
            return words_of(self.data)
        # JAX keeps a copy with an array as long as that lives: not with the program's.
        own = self.data.shape, self.data.sharding, [self.data]
        return words_of(jax.make_array_from_single_device_arrays(*own))


def shards_here(leaf: LeafSpec, array: jax.Array) -> list[DeviceShard]:
    """Return the shards of an array that this process's devices hold."""
    regions = _regions(array.sharding, leaf._replace(path=""))
    shards = []
    for shard in array.addressable_shards:
        box = box_of(shard.index, leaf)
        region, holders = regions[box]
        shards.append(DeviceShard(region, box, holders, shard.device.id, shard.data))
    return shards


def layout_text(leaf: LeafSpec, value: Any) -> str:
    """Return the layout, which must be equal on all processes, of an array that several of them
    hold; else an empty text."""
    if not isinstance(value, jax.Array):
        return ""
    return _layout_text(value.sharding, leaf._replace(path=""))


def is_on_host(data: jax.Array) -> bool:
    """Is an array on one device read by NumPy? Also one without dims or of keys: it is small."""
    if _in_host_memory(data) or not data.ndim or is_key(data):
        return True
    return data.dtype.itemsize == 1 and data.dtype.name in _WITHOUT_PROGRAMS


def _in_host_memory(data: jax.Array) -> bool:
    (device,) = data.devices()
    return device.platform == "cpu" or "host" in (data.sharding.memory_kind or "")


def on_each(program: Program, pieces: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the results of a program for arrays on one device each, in order; not awaited.

    Those of one shape run as one program. They have one dtype, and at least one dim.

    Raises:
      UsageError: JAX traces a function, which would trace the program as well.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, piece in enumerate(pieces):
        alike.setdefault(piece.shape, []).append(place)
    results: dict[int, jax.Array] = {}
    for shape, places in alike.items():
        own = [pieces[place] for place in places]
        devices = tuple(device for piece in own for device in piece.devices())
        line = _line(devices)
        size = (len(own) * shape[0], *shape[1:])
        joined = jax.make_array_from_single_device_arrays(size, line, own)
        with _mesh_of(line):
            shards = _on_line(program, line)(joined).addressable_shards
        by_device = {shard.device: shard.data for shard in shards}
        results |= {p: by_device[device] for p, device in zip(places, devices, strict=True)}
    return [results[place] for place in range(len(pieces))]


def _mesh_of(line: NamedSharding) -> AbstractContextManager[None]:
    """Return the context of a line: the mesh in force may be of other devices.

    Raises:
      UsageError: see `on_each`.
    """
    try:
        mesh: AbstractContextManager[None] = jax.set_mesh(line.mesh)
    except ValueError:
        raise UsageError(
            "check_finite, check_replicas: the devices cannot check values while JAX traces a "
            "function (jit, grad, vmap or shard_map)\n"
            "call it outside of the function, with what that returns"
        ) from None
    return mesh


@lru_cache(maxsize=64)
def _line(devices: tuple[jax.Device, ...]) -> NamedSharding:
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), "device")
    return NamedSharding(mesh, PartitionSpec("device"))


@lru_cache(maxsize=64)
def _on_line(program: Program, line: NamedSharding) -> Program:
    """Return a program that each device of a line runs on its own shard."""
    each: Program = jax.jit(
        jax.shard_map(
            lambda x: program(x)[None], mesh=line.mesh, in_specs=line.spec, out_specs=line.spec
        )
    )
    return each


@lru_cache(maxsize=1024)
def _regions(sharding: Any, leaf: LeafSpec) -> dict[Box, tuple[int, tuple[Holder, ...]]]:
    """Return the number and the holders of each region of a sharded array."""
    holders: dict[Box, list[Holder]] = {}
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        holder = Holder(device.id, device.process_index)
        holders.setdefault(box_of(index, leaf), []).append(holder)
    return {box: (n, tuple(sorted(holders[box]))) for n, box in enumerate(sorted(holders))}


@lru_cache(maxsize=1024)
def _layout_text(sharding: Any, leaf: LeafSpec) -> str:
    if len({device.process_index for device in sharding.device_set}) == 1:
        return ""
    spec = getattr(sharding, "spec", type(sharding).__name__)
    kind = f" in {sharding.memory_kind}" if sharding.memory_kind else ""
    digest = quick_digest(repr(_regions(sharding, leaf)).encode()).hex()
    return f"{spec}{kind} (digest of the holders: {digest})"
