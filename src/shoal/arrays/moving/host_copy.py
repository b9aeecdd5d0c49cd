"""Move arrays among the CPU devices of one process by copies within its memory.

These devices share one memory: nothing needs to be sent, and each byte is written at most once. A
tile that is contiguous inside an old one is not written at all: both share it, as replicas do. That
is safe, since arrays on devices are immutable, and XLA copies a donated buffer that is shared.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from shoal.arrays.host.host_values import is_key
from shoal.errors import UsageError
from shoal.plan.layout import Layout

HostArray = np.ndarray[Any, Any]
Box = tuple[tuple[int, int], ...]  # begin and end along each dim
Copy = tuple[HostArray, HostArray]  # to, from

_ALIGNED_AT = 64  # bytes: JAX adopts host memory of this alignment, and copies any other
_LARGE_BYTES = 4 << 20  # larger copies use several threads
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def check_way(function: str, way: Any) -> None:
    """Reject unknown values of `way`."""
    if way is not None and not (isinstance(way, str) and way == "collectives"):
        raise UsageError(
            f"{function}: way={way!r}: pass 'collectives', or nothing for whatever is fastest"
        )


def in_one_memory(source: Layout, target: Layout) -> bool:
    """Are the devices of both layouts CPU devices of one process?"""
    ends = (source.mesh, target.mesh)
    processes = {process for mesh in ends for process in mesh.process_indices}
    return len(processes) == 1 and all(mesh.kind == "cpu" for mesh in ends)


def can_copy(array: jax.Array, target: NamedSharding) -> bool:
    """Can `copied` move this array? False while its values are traced."""
    if is_key(array) or not array.size or array.weak_type or not has_words(array.dtype):
        return False
    ends: tuple[Sharding, ...] = (array.sharding, target)
    if any(isinstance(end, NamedSharding) and end.spec.unreduced for end in ends):
        return False
    own = jax.process_index()
    devices = array.sharding.device_set | target.device_set
    return all(
        device.platform == "cpu" and device.process_index == own for device in devices
    ) and all(end.memory_kind in (None, _plain_kind(target)) for end in ends)


def has_words(dtype: Any) -> bool:
    """Are elements in host memory of a size to copy, and does `jax.device_put` keep their dtype?"""
    return dtype.itemsize in _WORDS and jax.dtypes.canonicalize_dtype(dtype) == dtype


def _plain_kind(target: NamedSharding) -> str:
    return next(iter(target.device_set)).default_memory().kind


def copied(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Return an array for which `can_copy` is true in another layout."""
    places = target.addressable_devices_indices_map(array.shape)
    boxes = [_box(index, array.shape) for index in places.values()]
    with jax.transfer_guard("allow"):  # no real transfer takes place
        tiles = _tiles(boxes, _held(array), array.dtype)
        own = jax.device_put([tiles[box] for box in boxes], [*places])
    return jax.make_array_from_single_device_arrays(array.shape, target, own, dtype=array.dtype)


def _held(array: jax.Array) -> dict[Box, HostArray]:
    """Return the distinct blocks of an array as they lie in host memory."""
    blocks = {_box(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    if not _fill_bytes(array.dtype):
        # Reading these unpacks them to one byte an element, and an array keeps what was read of
        # it. So new arrays of the same buffers are read, and the source holds no more than before.
        for box, data in blocks.items():
            blocks[box] = jax.make_array_from_single_device_arrays(
                data.shape, data.sharding, [data]
            )
            blocks[box].copy_to_host_async()  # all are unpacked at the same time
    return {box: np.asarray(data) for box, data in blocks.items()}


def _fill_bytes(dtype: Any) -> bool:
    if dtype.kind in "bc":
        return True
    info = jax.numpy.finfo if jax.numpy.issubdtype(dtype, np.floating) else jax.numpy.iinfo
    return int(info(dtype).bits) == 8 * dtype.itemsize


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def _tiles(boxes: Sequence[Box], held: Mapping[Box, HostArray], dtype: Any) -> dict[Box, HostArray]:
    """Return each of the boxes, assembled from those held."""
    cuts = [sorted(set(ends)) for ends in zip(*held, strict=True)]
    tiles: dict[Box, HostArray] = {}
    copies: list[Copy] = []
    for box in boxes:
        if box in tiles:
            continue
        pieces = [*_pieces(box, cuts)]
        tile = held[pieces[0][0]][_within(box, pieces[0][0])] if len(pieces) == 1 else None
        if tile is None or not _can_be_taken_over(tile):
            tile = _empty([end - begin for begin, end in box], dtype)
            for own, common in pieces:
                copies.append((tile[_within(common, box)], held[own][_within(common, own)]))
        tiles[box] = tile
    _carry_out(copies)
    return tiles


def _pieces(box: Box, cuts: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of a grid that intersect a box, each with the intersection.

    >>> [*_pieces(((2, 6),), [[(0, 4), (4, 8)]])]
    [(((0, 4),), ((2, 4),)), (((4, 8),), ((4, 6),))]
    """
    met = []
    for (begin, end), intervals in zip(box, cuts, strict=True):
        first = bisect.bisect_right(intervals, begin, key=lambda interval: interval[0]) - 1
        beyond = bisect.bisect_left(intervals, end, key=lambda interval: interval[0])
        met.append(intervals[first:beyond])
    for own in itertools.product(*met):
        yield (
            own,
            tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, own, strict=True)),
        )


def _within(box: Box, around: Box) -> tuple[Any, ...]:
    """Return the indices of a box relative to an enclosing one."""
    return (*(slice(a - c, b - c) for (a, b), (c, _) in zip(box, around, strict=True)), ...)


def _can_be_taken_over(memory: HostArray) -> bool:
    return memory.flags.c_contiguous and memory.ctypes.data % _ALIGNED_AT == 0


def _empty(shape: Sequence[int], dtype: Any) -> HostArray:
    """Return new memory that JAX can adopt."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED_AT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNED_AT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _carry_out(copies: Sequence[Copy]) -> None:
    """Copy bitwise, with several threads if the copy is large."""
    machine_words: list[tuple[HostArray, ...]] = [
        tuple(each.view(_WORDS[each.dtype.itemsize]) for each in pair) for pair in copies
    ]
    if len(machine_words) < 2 or sum(to.nbytes for to, _ in machine_words) < _LARGE_BYTES:
        for to, of in machine_words:
            np.copyto(to, of)
        return
    with ThreadPoolExecutor(min(len(machine_words), os.cpu_count() or 1)) as threads:
        for done in [threads.submit(np.copyto, to, of) for to, of in machine_words]:
            done.result()
