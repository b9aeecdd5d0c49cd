"""From what a process writes, and the arrays that it has, to files as images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shoal.arrays.host_values import is_key, native
from shoal.checkpoint import dtypes
from shoal.checkpoint.chunks import PartPlan
from shoal.checkpoint.format import data_name
from shoal.checkpoint.shares import Box, Own
from shoal.checkpoint.state import Array, Lies, Saved, State
from shoal.checkpoint.writer import FileImage, Piece
from shoal.collectives.leaves import words_of

__all__ = ["images_of", "start_copies", "words_here"]


def images_of(
    state: State, own: Sequence[Own], plan: PartPlan, attempt: str, num_processes: int
) -> list[FileImage]:
    """Return the data files of this process; values on devices are read when they are asked for.

    Args:
      own: the boxes, by the rows of the plan.
    """
    begin = plan.chunks.begin.tolist()
    images = []
    with jax.transfer_guard("allow"), jax.ensure_compile_time_eval():  # once for all the views
        for number, file in enumerate(plan.files):
            name = data_name(attempt, plan.process, num_processes, number)
            pieces: list[Piece] = []
            for row in file.rows:
                pieces += _pieces(state, own[row], begin[row])
            images.append(FileImage(name, file.header, file.num_bytes, tuple(pieces)))
    return images


def start_copies(state: State, own: Sequence[Own]) -> None:
    """Let what lies on accelerators set out for the host, the largest first."""
    leaves = [state.leaves[one.held.leaf] for one in own]
    pieces = {
        (id(leaf.value), lies.place): (leaf, lies)
        for one, leaf in zip(own, leaves, strict=True)
        for lies in leaf.here
        if lies.device.platform != "cpu" and _overlap(lies.box, one.box)
    }
    for leaf, lies in sorted(pieces.values(), key=lambda pair: -np.prod(pair[1].box.extent)):
        data = _data(leaf, lies)
        if not is_key(data):
            data.copy_to_host_async()


def words_here(leaf: Saved) -> list[tuple[Box, Array]]:
    """Return the distinct boxes of a leaf with data that are on this host, and their values."""
    if not leaf.here:
        whole = np.asarray(leaf.value)
        return [(Box((0,) * whole.ndim, whole.shape), whole)]
    return [(lies.box, words_of(_data(leaf, lies))) for lies in leaf.here]


def _pieces(state: State, one: Own, begin: int) -> list[Piece]:
    """Return what fills one chunk: a part of each box on this host that it overlaps."""
    leaf, box = state.leaves[one.held.leaf], one.box
    how, dtype = _how(one.held.dtype)
    if one.held.is_per_process:
        blob = state.blobs[one.held.leaf]
        return [Piece(begin, box.extent, dtype, how, _all(box), lambda: blob)]
    if not leaf.here:
        whole = native(np.asarray(leaf.value))
        part = whole[_within(box, (0,) * whole.ndim)]
        return [Piece(begin, box.extent, dtype, how, _all(box), lambda: part)]
    pieces = []
    for lies in leaf.here:
        common = box if lies.box == box else _overlap(lies.box, box)
        if common is not None:
            where = _within(common, box.origin)
            values = _reader(leaf, lies, _within(common, lies.box.origin))
            pieces.append(Piece(begin, box.extent, dtype, how, where, values))
    return pieces


def _how(name: str) -> tuple[int, np.dtype[Any]]:
    dtype = dtypes.dtype_of(name)
    return dtypes.storage_of(dtype).per_byte, dtype


def _reader(leaf: Saved, lies: Lies, cut: tuple[slice, ...]) -> Callable[[], Array]:
    """Return what gives a part of an array: in place where it is in this host's memory already."""
    data = _data(leaf, lies)
    if lies.device.platform != "cpu" or is_key(data):
        return lambda: words_of(data)[cut]
    view = np.asarray(data)[cut]
    return lambda: view


def _data(leaf: Saved, lies: Lies) -> Any:
    """Return the array on one device."""
    if leaf.record.kind == "key":
        return leaf.value.addressable_shards[lies.place].data
    data = leaf.value.addressable_data(lies.place)
    if data.device == lies.device:
        return data
    shards = leaf.value.addressable_shards  # as the order is nowhere promised
    return next(shard.data for shard in shards if shard.device == lies.device)


def _overlap(one: Box, other: Box) -> Box | None:
    origin = tuple(map(max, one.origin, other.origin))
    ends = [
        min(a + n, b + m)
        for a, n, b, m in zip(one.origin, one.extent, other.origin, other.extent, strict=True)
    ]
    extent = tuple(end - first for first, end in zip(origin, ends, strict=True))
    return Box(origin, extent) if all(size > 0 for size in extent) else None


def _within(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return where a box is, counted from `origin`."""
    return tuple(
        slice(a - b, a - b + n) for a, b, n in zip(box.origin, origin, box.extent, strict=True)
    )


def _all(box: Box) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in box.extent)
