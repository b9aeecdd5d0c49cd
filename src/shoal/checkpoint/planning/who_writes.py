"""Decide which process writes which box: each element once, by a holder, balancing the bytes.

Boxes with one holder are its own. Boxes with several holders are dealt out by the wrap-around rule
(R. McNaughton, *Scheduling with deadlines and loss functions*, Management Science 6, 1959): fill
one holder up to the common level, cut the box that crosses it, continue with the next holder. So
few boxes are cut, and most leaves stay whole. Adjacent boxes that form a larger box are merged
first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shoal.checkpoint.format.records import IntArray, LeafRecord
from shoal.checkpoint.tree.dtypes import dtype_of, num_bytes

SHARE_BYTES = 1 << 20  # nothing is cut into smaller pieces, approximately


class Box(NamedTuple):
    """A box of indices."""

    origin: tuple[int, ...]
    extent: tuple[int, ...]


class ShardMap(NamedTuple):
    """The distinct boxes of an array, and the processes that hold each."""

    origin: IntArray  # [boxes, rank]
    extent: IntArray  # [boxes, rank]
    holders: tuple[tuple[int, ...], ...]  # of each box, in order
    digest: str = ""  # of all of the above


class HeldLeaf(NamedTuple):
    """A leaf that processes hold together: any but a per-process value."""

    number: int  # in the manifest
    record: LeafRecord
    shards: ShardMap


class WriteBox(NamedTuple):
    """A box of a leaf that one process writes: a future chunk."""

    leaf: int  # its number in the manifest
    record: LeafRecord
    box: Box

    @property
    def num_bytes(self) -> int:
        """Its size in a file."""
        return box_bytes(self.record.dtype, self.box.extent)


class _Pattern(NamedTuple):
    """The boxes that all leaves of the same shape, dtype and layout have in common."""

    alone: dict[int, list[Box]]  # boxes with one holder, by process
    shared: list[tuple[tuple[int, ...], list[Box]]]  # (holders, boxes that all of them hold)


def own_boxes(held: Sequence[HeldLeaf], process: int) -> list[WriteBox]:
    """Return what `process` writes, sorted by leaf and origin.

    All processes apply the same rule to the same `held`. It is impossible that an element is
    written twice, not at all, or by a process that does not hold it.
    """
    alike: dict[tuple[Any, ...], list[HeldLeaf]] = {}
    for leaf in held:  # by identity: comparing the holders of each leaf is slow in large jobs
        key = leaf.record.dtype, leaf.record.stored_shape, id(leaf.shards)
        alike.setdefault(key, []).append(leaf)
    own: list[WriteBox] = []
    loads: dict[int, int] = {}
    classes: dict[tuple[int, ...], list[WriteBox]] = {}
    patterns: dict[tuple[Any, ...], _Pattern] = {}
    for (dtype, shape, _), leaves in alike.items():
        shards = leaves[0].shards
        content = dtype, shape, shards.origin.tobytes(), shards.extent.tobytes(), shards.holders
        pattern = patterns.get(content) or patterns.setdefault(content, _pattern(shape, shards))
        own += _writes(leaves, pattern.alone.get(process, ()))
        for writer, boxes in pattern.alone.items():
            size = sum(box_bytes(dtype, box.extent) for box in boxes)
            loads[writer] = loads.get(writer, 0) + size * len(leaves)
        for holders, boxes in pattern.shared:
            classes.setdefault(holders, []).extend(_writes(leaves, boxes))
    for holders in sorted(classes, key=lambda names: (len(names), names)):
        # In an order that does not depend on which objects happen to be identical here.
        shared = sorted(classes[holders], key=_place)
        own += _Distribution(holders, loads).share_of(shared, process)
    return sorted(own, key=_place)


def _writes(leaves: Iterable[HeldLeaf], boxes: Sequence[Box]) -> list[WriteBox]:
    return [WriteBox(leaf.number, leaf.record, box) for leaf in leaves for box in boxes]


def _place(write: WriteBox) -> tuple[int, tuple[int, ...]]:
    return write.leaf, write.box.origin


@lru_cache(maxsize=1 << 12)
def box_bytes(dtype: str, extent: tuple[int, ...]) -> int:
    """Return the size of a box in a file."""
    return num_bytes(dtype_of(dtype), extent)


def _pattern(shape: tuple[int, ...], shards: ShardMap) -> _Pattern:
    """Group the boxes by their holders, and merge those of the same holders."""
    origins, extents = shards.origin.tolist(), shards.extent.tolist()
    boxes = [Box(tuple(o), tuple(e)) for o, e in zip(origins, extents, strict=True)]
    if 0 in shape:  # no elements; one entry records that the leaf exists
        writer = min(itertools.chain.from_iterable(shards.holders))
        whole = Box((0,) * len(shape), shape)
        return _Pattern({writer: [whole]}, [])
    of: dict[tuple[int, ...], list[Box]] = {}
    for holders, box in zip(shards.holders, boxes, strict=True):
        if 0 not in box.extent:
            of.setdefault(holders, []).append(box)
    merged = {holders: merge(boxes) for holders, boxes in of.items()}
    alone = {holders[0]: boxes for holders, boxes in merged.items() if len(holders) == 1}
    return _Pattern(alone, [pair for pair in merged.items() if len(pair[0]) > 1])


def merge(boxes: Iterable[Box]) -> list[Box]:
    """Join boxes that touch along one dim and agree in all others, dim by dim from the last."""
    merged = list(boxes)
    if len(merged) < 2:
        return merged
    for dim in reversed(range(len(merged[0].origin))):
        rows = sorted((_others(box, dim), box) for box in merged)
        merged = []
        for _, row in itertools.groupby(rows, key=lambda pair: pair[0]):
            merged += _joined([box for _, box in row], dim)
    return sorted(merged)


def _joined(row: Sequence[Box], dim: int) -> list[Box]:
    """Join the boxes of a row along `dim`, in order, that touch."""
    joined: list[Box] = []
    for box in row:
        last = joined[-1] if joined else None
        if last is not None and last.origin[dim] + last.extent[dim] == box.origin[dim]:
            size = last.extent[dim] + box.extent[dim]
            joined[-1] = Box(last.origin, _put(last.extent, dim, size))
        else:
            joined.append(box)
    return joined


def _others(box: Box, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _put(box.origin, dim, 0), _put(box.extent, dim, 0)


def _put(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


class _Distribution:
    """Deal out boxes that all `holders` hold; `loads` are the bytes that each writes so far."""

    def __init__(self, holders: Sequence[int], loads: dict[int, int]) -> None:
        self._loads = loads
        self._order = sorted(holders, key=lambda process: (loads.get(process, 0), process))
        self._before = np.array([loads.get(p, 0) for p in self._order], np.float64)
        self._next = 0  # the current recipient, in that order; later ones have received nothing yet
        self._level = 0.0

    def share_of(self, shared: Sequence[WriteBox], process: int) -> list[WriteBox]:
        """Return what `process` receives."""
        sizes = [write.num_bytes for write in shared]
        left = sum(sizes)
        self._raise_level(left)
        own: list[WriteBox] = []
        for write, size in zip(shared, sizes, strict=True):
            dtype = write.record.dtype
            box: Box | None = write.box
            while box is not None:
                writer = self._order[self._next]
                room = self._level - self._loads.get(writer, 0)
                first, box = self._take(box, size, dtype, room)
                if first is not None:
                    given = box_bytes(dtype, first.extent)
                    left -= given
                    self._loads[writer] = self._loads.get(writer, 0) + given
                    if writer == process:
                        own.append(write._replace(box=first))
                if box is not None:
                    size = box_bytes(dtype, box.extent)
                    self._next += 1
                    self._raise_level(left)
        return own

    def _take(self, box: Box, size: int, dtype: str, room: float) -> tuple[Box | None, Box | None]:
        """Split a box into what fits into `room` and the rest for the next holder."""
        if self._next == len(self._order) - 1 or size <= room:
            return box, None
        if size < 2 * SHARE_BYTES or min(room, size - room) < SHARE_BYTES:  # all or nothing
            return (box, None) if 2 * room >= size else (None, box)
        return cut_box(box, room / size, dtype)

    def _raise_level(self, left: int) -> None:
        """Set the level to which `left` bytes fill the remaining holders, the emptiest first.

        It is the least mean of `left` and the first k loads: one more holder below the level lowers
        that mean, one above raises it. Loads 0, 4 and 9, and 8 bytes: the level is 6, and the third
        holder gets nothing.
        """
        loads = self._before[self._next :]
        levels = (np.cumsum(loads) + left) / np.arange(1, len(loads) + 1)
        self._level = float(levels.min())


def cut_box(box: Box, share: float, dtype: str) -> tuple[Box | None, Box | None]:
    """Cut a box near the fraction `share`, 0 < share < 1, along the first dim of fine enough steps.

    Steps of a dim of 8 are eighths of the box, whatever dims come before: a cut along a later dim
    costs strided copies, but no bytes.
    """
    size = box_bytes(dtype, box.extent)
    fine = (dim for dim, count in enumerate(box.extent) if size <= count * SHARE_BYTES)
    dim = next(fine, int(np.argmax(box.extent)))
    count = box.extent[dim]
    cut = min(max(math.floor(share * count + 0.5), 0), count)
    if cut in (0, count):
        return (None, box) if cut == 0 else (box, None)
    first = Box(box.origin, _put(box.extent, dim, cut))
    origin = _put(box.origin, dim, box.origin[dim] + cut)
    return first, Box(origin, _put(box.extent, dim, count - cut))
