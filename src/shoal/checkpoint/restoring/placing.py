"""Place read data on devices, directly or by an exchange between devices.

Direct: each process reads what its own devices hold, each distinct box once. On CPU the array
adopts the memory that was read into, to which there is no other reference.

Exchange: each byte is read by one process of the job. An array is first split along one dim over
all devices of its mesh, in file order; a program on the devices then moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shoal.arrays.bridge.sharding import memory_of
from shoal.arrays.moving.move import move
from shoal.arrays.moving.planned_move import ArrayMove
from shoal.checkpoint.blocks.memory import empty
from shoal.checkpoint.blocks.reader import Want
from shoal.checkpoint.planning.casting import array_of
from shoal.checkpoint.restoring.filling import Filling, keys_of
from shoal.checkpoint.restoring.read_strategy import Geometry
from shoal.checkpoint.restoring.target import LeafRequest
from shoal.checkpoint.store.opening import Checkpoint
from shoal.checkpoint.tree.dtypes import dtype_of

Array = np.ndarray[Any, Any]
_MOVED_BYTES = 256 << 20  # per device at a time

Key = tuple[tuple[int | None, int | None], ...]


class DistinctBoxes(NamedTuple):
    """The distinct boxes of an array on the devices of one process, or of all."""

    origins: tuple[tuple[int, ...], ...]
    extents: tuple[tuple[int, ...], ...]
    number: dict[Key, int]  # box number of each JAX index


def on_devices(
    checkpoint: Checkpoint, request: LeafRequest, place: Sharding | None = None
) -> Filling:
    """Return how to restore a leaf to devices; `place` overrides that of the request."""
    record = checkpoint.manifest.leaves[request.leaf]
    dtype_of_number = request.dtype
    if not record.has_data and dtype_of_number is not None:
        return Filling([], lambda: _everywhere(array_of(record, dtype_of_number), request))
    stored, key_words = dtype_of(record.dtype), record.words
    dtype = request.dtype or stored
    place = request.place if place is None else place
    spread = spread_of(place, record.shape, jax.process_index())
    zeros, wants = (0,) * len(key_words), []
    for origin, extent in zip(spread.origins, spread.extents, strict=True):
        wants.append(Want(request.leaf, origin + zeros, empty(extent + key_words, dtype)))

    def finish() -> jax.Array:
        boxes = [want.out for want in wants]
        shape, rank = record.stored_shape, len(record.shape)
        if request.is_free:
            array = _uncommitted(boxes[0], place)
        elif not boxes:
            array = jax.make_array_from_single_device_arrays(shape, place, [], dtype=dtype)
        else:
            array = jax.make_array_from_callback(
                shape, place, lambda index: boxes[spread.number[_key(index[:rank])]], dtype=dtype
            )
        if record.kind == "key":
            return keys_of(
                checkpoint, record, lambda: jax.random.wrap_key_data(array, impl=record.impl)
            )
        return array

    extra = 0 if _is_on_cpu(place) else sum(want.out.nbytes for want in wants)
    return Filling(wants, finish, extra)


def _everywhere(value: Array, request: LeafRequest) -> jax.Array:
    """Return a 0-d array on devices."""
    place = request.place
    if request.is_free:
        return _uncommitted(value, place)
    if not spread_of(place, (), jax.process_index()).origins:
        return jax.make_array_from_single_device_arrays((), place, [], dtype=value.dtype)
    return jax.make_array_from_callback((), place, lambda _: value, dtype=value.dtype)


def _uncommitted(value: Array, place: Sharding) -> jax.Array:
    """Return an array on the one device of a sharding, which JAX may move."""
    (device,) = place.device_set
    with jax.default_device(device):
        array: jax.Array = jax.device_put(value)
    return array


def intermediates(place: Sharding, shape: tuple[int, ...]) -> list[NamedSharding]:
    """Return the shardings that split an array along one dim over all devices of its mesh."""
    if not isinstance(place, NamedSharding) or memory_of(place):
        return []  # arrays in other memory kinds are read directly
    row = _row(place.mesh)
    count = row.devices.size
    return [
        NamedSharding(row, PartitionSpec(*[None] * dim, "all"))
        for dim, size in enumerate(shape)
        if size and size % count == 0
    ]


def geometry() -> Geometry:
    """Return the device facts needed for planning."""
    return Geometry(
        boxes=lambda place, shape, process: spread_of(place, shape, process)[:2],
        processes=_processes,
        intermediates=intermediates,
    )


def exchanged(arrays: Sequence[jax.Array], places: Sequence[NamedSharding]) -> list[jax.Array]:
    """Move arrays to their final shardings, consuming them. Collective over their mesh.

    A few at a time: while an array moves, the devices hold it twice.
    """
    moved: list[jax.Array] = []
    while len(moved) < len(arrays):
        count = 1
        some = arrays[len(moved) :]
        sizes = [array.nbytes // array.sharding.num_devices for array in some]
        while count < len(some) and sum(sizes[: count + 1]) <= _MOVED_BYTES:
            count += 1
        targets = places[len(moved) : len(moved) + count]
        pairs = zip(some[:count], targets, strict=True)
        moved += move([ArrayMove(array, array, place) for array, place in pairs], donate=True)
    return moved


def allowed() -> AbstractContextManager[Any]:
    """Allow transfers to devices, whatever JAX's transfer guard is set to."""
    guard: AbstractContextManager[Any] = jax.transfer_guard("allow")
    return guard


@lru_cache(maxsize=4096)
def spread_of(place: Sharding, shape: tuple[int, ...], process: int) -> DistinctBoxes:
    """Return the distinct boxes on the devices of a process (JAX's number), in order."""
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Key]] = {}
    for device, index in place.devices_indices_map(shape).items():
        if device.process_index == process:
            ranges = [cut.indices(size) for cut, size in zip(index, shape, strict=True)]
            origin = tuple(start for start, _, _ in ranges)
            extent = tuple(max(stop - start, 0) for start, stop, _ in ranges)
            boxes.setdefault((origin, extent), []).append(_key(index))
    ordered = sorted(boxes)
    box_number = {key: n for n, box in enumerate(ordered) for key in boxes[box]}
    return DistinctBoxes(tuple(o for o, _ in ordered), tuple(e for _, e in ordered), box_number)


@lru_cache(maxsize=256)
def _row(mesh: Mesh) -> Mesh:
    """Return the devices of a mesh in order, along one axis."""
    return Mesh(mesh.devices.reshape(-1), ("all",))


@lru_cache(maxsize=4096)
def _processes(place: Sharding) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in place.device_set}))


@lru_cache(maxsize=4096)
def _is_on_cpu(place: Sharding) -> bool:
    return all(device.platform == "cpu" for device in place.device_set)


def _key(index: tuple[slice, ...]) -> Key:
    """Return a hashable key: slices are unhashable before Python 3.12."""
    return tuple((cut.start, cut.stop) for cut in index)
