"""A large move in chunks: the same steps on one part of the array after another.

If all layouts on the way together cut a dim into L tiles of n items each, the items at position k
of all tiles form an array, for every k of 0..n-1. All these arrays move by the same steps. A chunk
is a run of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.plan.transfer.move_steps import Step, received_bytes
from shoal.plan.transfer.same_devices import in_one_order

CHUNK_BYTES = 64 << 20  # temporary memory of a move
_MOST_TIMES = 4  # up to this many times the needed chunks, for equal sizes: more cost time
_PIECES = 4  # copies of a part that exist at the same time: cut out, in flight, received, joined


class ChunkCut(NamedTuple):
    """How an array is cut into chunks."""

    dim: int
    tiles: int  # L
    parts: int  # number of chunks of one size
    width: int  # items of each tile in a chunk
    rest: int  # remainder for one more chunk


def chunks_of(steps: Sequence[Step], shape: Sequence[int], item_bytes: int) -> ChunkCut | None:
    """Return the chunks of a move; None if chunking gains nothing.

    That is the case for a small array, for one whose dims have too few items per tile, and for a
    single step that sends nothing or is a permute, which needs no memory besides both shards
    (except on TPUs, where XLA copies the result of a permute). The first possible dim is cut,
    since chunks along it are contiguous rows; preferably one in which a chunk has several
    items of each tile, since for a single item XLA may copy the whole shard into another
    order.

    >>> from shoal.plan.layout import Layout
    >>> from shoal.plan.mesh import Mesh
    >>> mesh = Mesh({"x": 4})
    >>> rows, columns = Layout(mesh, "x", None), Layout(mesh, None, "x")
    >>> move = [Step("all_to_all", ("x",), 0, 1, rows, columns)]
    >>> chunks_of(move, (1 << 14, 1 << 14), 4)
    ChunkCut(dim=0, tiles=4, parts=16, width=256, rest=0)
    """
    layouts = [layout for step in steps for layout in (step.before, step.after)]
    largest = max(math.prod(layout.shard_shape(shape)) for layout in layouts) * item_bytes
    if largest <= CHUNK_BYTES or (len(steps) == 1 and _is_lean(steps[0], shape)):
        return None
    wanted = -(-largest * _PIECES // CHUNK_BYTES)
    found = []
    for dim, size in enumerate(shape):
        tiles = math.lcm(*(layout.num_shards(dim) for layout in layouts))
        places = size // tiles if size % tiles == 0 else 1
        if places >= wanted:
            even = range(wanted, min(places, _MOST_TIMES * wanted) + 1)
            parts = next((parts for parts in even if places % parts == 0), wanted)
            found.append(ChunkCut(dim, tiles, parts, places // parts, places % parts))
    return next((chunks for chunks in found if chunks.width > 1), found[0] if found else None)


def _is_lean(step: Step, shape: Sequence[int]) -> bool:
    """Does a step need no temporary memory?"""
    if step.kind == "permute":
        return step.before.mesh.kind != "tpu"
    is_within = in_one_order(step.before.mesh, step.after.mesh)
    return is_within and not received_bytes(step, shape, 1).any()
