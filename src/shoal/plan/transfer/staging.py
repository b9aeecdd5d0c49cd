"""A move via host memory: the array in chunks, each an array that moves by itself.

As in `chunks`, but cut in as many dims as necessary, and the last chunk of a dim may be smaller,
since each is moved by a program of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.plan.layout import Layout, shard_of
from shoal.plan.transfer.move_steps import CHUNK_BYTES
from shoal.plan.transfer.plan import Transfer

_PIECES = 4  # copies of a chunk's shards at the same time: source, result, two in between

Box = tuple[slice, ...]  # a range of places of each dim
HostArray = np.ndarray[Any, Any]


class Staging(NamedTuple):
    """How an array is cut into chunks.

    Dim d is cut into `tiles[d]` tiles, of `places[d]` items each; a chunk has the same places of
    all tiles: `widths[d]` of them, or fewer in the last chunk.
    """

    tiles: tuple[int, ...]
    places: tuple[int, ...]
    widths: tuple[int, ...]

    def boxes(self) -> Iterator[Box]:
        """Yield the places of each chunk; the first chunk is the largest."""
        ranges = [
            [slice(first, min(first + width, size)) for first in range(0, size, width)]
            for size, width in zip(self.places, self.widths, strict=True)
        ]
        return itertools.product(*ranges)

    def shape_of(self, box: Box) -> tuple[int, ...]:
        """Return the shape of a chunk."""
        return tuple(n * (b.stop - b.start) for n, b in zip(self.tiles, box, strict=True))

    def view(self, shard: HostArray, layout: Layout, box: Box) -> HostArray:
        """Return a view of a chunk's part of a shard: each dim becomes two, tiles and places.

        Args:
          shard: contiguous.
        """
        split: list[int] = []
        index: list[Any] = []
        for dim, places in enumerate(box):
            split += [self.tiles[dim] // layout.num_shards(dim), self.places[dim]]
            index += [slice(None), places]
        index.append(...)  # keeps a scalar an array
        seen: HostArray = shard.reshape(split)[tuple(index)]
        return seen


def staging_of(plan: Transfer) -> Staging:
    """Return the chunks of a plan of collectives; moving one takes at most `CHUNK_BYTES`.

    With too few places it takes more: a chunk has at least one item of each tile.

    >>> from shoal import Mesh
    >>> from shoal.planning import plan_transfer
    >>> mesh = Mesh({"x": 4})
    >>> rows, columns = Layout(mesh, "x", None), Layout(mesh, None, "x")
    >>> staging_of(plan_transfer(rows, columns, (1 << 14, 1 << 14), 4))
    Staging(tiles=(4, 4), places=(4096, 4096), widths=(256, 4096))
    """
    ends = [layout for step in plan.steps for layout in (step.before, step.after)]
    layouts = [plan.source, plan.target, *ends]
    rank = len(plan.shape)
    tiles = [math.lcm(*(layout.num_shards(dim) for layout in layouts)) for dim in range(rank)]
    places = [size // count for size, count in zip(plan.shape, tiles, strict=True)]
    largest = max(math.prod(shard_of(layout, plan.shape)) for layout in layouts)
    widths = _widths(places, largest * plan.item_bytes)
    return Staging(tuple(tiles), tuple(places), widths)


def _widths(places: Sequence[int], largest_bytes: int) -> tuple[int, ...]:
    """Return the number of places of each dim in a chunk; the first dims are cut first."""
    left = _PIECES * largest_bytes / CHUNK_BYTES  # factor by which a chunk is too large
    widths = []
    for size in places:
        width = max(1, min(size, int(size / left))) if left > 1 else size
        left *= width / max(1, size)
        widths.append(max(1, width))
    return tuple(widths)
