"""Build the images of a process's data files from its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.arrays.host.host_values import is_key, native
from shoal.checkpoint.blocks.image import FileImage, Piece
from shoal.checkpoint.planning.file_layout import PartPlan
from shoal.checkpoint.planning.who_writes import Box, WriteBox
from shoal.checkpoint.saving.state import Array, State, StateLeaf
from shoal.checkpoint.tree import dtypes
from shoal.collectives.leaves import words_of


def images_of(state: State, own: Sequence[WriteBox], plan: PartPlan) -> list[FileImage]:
    """Return the data files of this process; values on devices are transferred lazily.

    Args:
      own: the boxes, in the order of the plan's rows.
    """
    begin = plan.chunks.begin.tolist()
    images = []
    cutting = _Cutting(state)
    with jax.transfer_guard("allow"), jax.ensure_compile_time_eval():  # once for all views
        for file in plan.files:
            pieces = [piece for row in file.rows for piece in cutting.pieces(own[row], begin[row])]
            images.append(FileImage(file.name, file.header, file.num_bytes, tuple(pieces)))
    return images


def start_copies(state: State, own: Sequence[WriteBox]) -> None:
    """Start transfers from accelerators to the host, the largest first."""
    copies: list[tuple[int, Any]] = []
    seen: set[tuple[int, int]] = set()
    for write in own:
        leaf = state.leaves[write.leaf]
        if not leaf.here or leaf.here[0].device.platform == "cpu" or leaf.record.kind == "key":
            continue
        for place, (held, data) in enumerate(zip(leaf.here, _data(leaf), strict=True)):
            if (write.leaf, place) not in seen and _overlap(held.box, write.box):
                seen.add((write.leaf, place))
                copies.append((data.nbytes, data))
    for _, data in sorted(copies, key=lambda pair: -pair[0]):
        data.copy_to_host_async()


def words_here(leaf: StateLeaf) -> list[tuple[Box, Array]]:
    """Return the distinct boxes of a leaf on this host, and their values."""
    if not leaf.here:
        whole = np.asarray(leaf.value)
        return [(Box((0,) * whole.ndim, whole.shape), whole)]
    data = _data(leaf)
    return [(held.box, words_of(array)) for held, array in zip(leaf.here, data, strict=True)]


Cut = tuple[Any, ...]
_SMALL_BYTES = 64 << 10


class _Fit(NamedTuple):
    """The intersection of one box of an array on this host with a chunk."""

    place: int  # index of the box in `StateLeaf.here`
    where: tuple[slice, ...]  # region of the chunk
    cut: Cut  # region of the box


class _Cutting:
    """How chunks are filled; leaves of the same layout share the result."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._fits: dict[tuple[int, Box], list[_Fit]] = {}

    def pieces(self, write: WriteBox, begin: int) -> Iterator[Piece]:
        """Yield the pieces of one chunk: its intersection with each box on this host."""
        leaf, box = self._state.leaves[write.leaf], write.box
        per_byte, dtype = _how(write.record.dtype)
        fill = partial(Piece, begin, box.extent, dtype, per_byte)
        if write.record.kind == "per_process":  # its box has the process as origin
            yield fill(_all(box), lambda: leaf.value)
        elif not leaf.here:
            whole = native(np.asarray(leaf.value))
            part = whole[_cut(box, (0,) * whole.ndim)]
            yield fill(_all(box), lambda: part)
        else:
            fits = self._fitting(leaf, box)
            data = _data(leaf)
            if len(fits) > 1 and write.num_bytes <= _SMALL_BYTES:
                small = _joined(box, dtype, fits, data)
                yield fill(_all(box), lambda: small)
                return
            for fit in fits:
                platform = leaf.here[fit.place].device.platform
                values = _reader(data[fit.place], fit.cut, in_place=platform == "cpu")
                yield fill(fit.where, values)

    def _fitting(self, leaf: StateLeaf, box: Box) -> list[_Fit]:
        key = id(leaf.here), box  # leaves of one layout share the tuple, which `state` keeps alive
        fits = self._fits.get(key)
        if fits is None:
            fits = self._fits[key] = []
            for place, held in enumerate(leaf.here):
                common = box if held.box == box else _overlap(held.box, box)
                if common is not None:
                    where, cut = _within(common, box.origin), _cut(common, held.box.origin)
                    fits.append(_Fit(place, where, cut))
        return fits


def _joined(box: Box, dtype: np.dtype[Any], fits: Sequence[_Fit], data: Sequence[Any]) -> Array:
    """Return a small chunk as one array: copying a few bytes is cheaper than tracking pieces."""
    whole = np.empty(box.extent, dtype)
    for fit in fits:
        values = _reader(data[fit.place], fit.cut, in_place=True)
        whole[fit.where] = values()
    return whole


@lru_cache(maxsize=256)
def _how(name: str) -> tuple[int, np.dtype[Any]]:
    dtype = dtypes.dtype_of(name)
    return dtypes.storage_of(dtype).per_byte, dtype


def _reader(data: Any, cut: Cut, *, in_place: bool) -> Callable[[], Array]:
    """Return a function that reads a part of an array, in place if it is in host memory."""
    if is_key(data) or not in_place:
        return lambda: words_of(data)[cut]
    view = np.asarray(data)[cut]
    return lambda: view


def _data(leaf: StateLeaf) -> list[Any]:
    """Return the single-device arrays that hold the boxes of `here`."""
    here = leaf.here
    if len(here) == 1 and leaf.record.kind != "key":  # faster than listing all shards
        data = leaf.value.addressable_data(here[0].place)
        if data.device == here[0].device:
            return [data]
    shards = leaf.value.addressable_shards
    if all(shards[held.place].device == held.device for held in here):
        return [shards[held.place].data for held in here]
    on = {shard.device: shard.data for shard in shards}  # their order is unspecified
    return [on[held.device] for held in here]


def _overlap(one: Box, other: Box) -> Box | None:
    origin = tuple(map(max, one.origin, other.origin))
    ends = [
        min(a + n, b + m)
        for a, n, b, m in zip(one.origin, one.extent, other.origin, other.extent, strict=True)
    ]
    extent = tuple(end - first for first, end in zip(origin, ends, strict=True))
    if not all(size > 0 for size in extent):
        return None
    return Box(origin, extent)


def _within(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the region of a box relative to `origin`."""
    return tuple(
        slice(a - b, a - b + n) for a, b, n in zip(box.origin, origin, box.extent, strict=True)
    )


def _cut(box: Box, origin: Sequence[int]) -> Cut:
    """Return that region as an index whose result is never a scalar.

    A text scalar is shorter than its slot in the array.
    """
    return (..., *_within(box, origin))


def _all(box: Box) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in box.extent)
