"""Two layouts whose tiles consist of the same blocks, and the blocks each device lacks.

If the tiles of one layout divide those of the other along every dim, both consist of equal blocks.
Each device lacks a whole number of them, which a few permutes of one block per device deliver: an
*exchange*. It receives no byte that it does not need. An all-to-all is the special case in which
all blocks come from the same group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.edge_colours import edge_colours
from shoal.plan.transfer.same_devices import positions

IntArray = NDArray[np.int64]

Block = tuple[int, ...]
Send = tuple[int, int, Block]  # sender and receiver, positions in a mesh; which block


class Tiles(NamedTuple):
    """The tile that each device holds."""

    counts: tuple[int, ...]  # number of tiles along each dim
    coords: IntArray  # of each device's tile [devices, rank]


def tiles_of(layout: Layout, mesh: Mesh | None = None) -> Tiles:
    """Return the tiles of an evenly cut array, in the order of `mesh` (default: the layout's)."""
    names = layout.mesh.axis_names
    dims = [[names.index(axis) for axis in axes] for axes in layout.axes_of_dims]
    return tiles_by(dims, layout.mesh, mesh)


def tiles_by(dims: Sequence[Sequence[int]], own: Mesh, mesh: Mesh | None = None) -> Tiles:
    """As `tiles_of`, of dims that are split by axes given as positions in the mesh `own`."""
    places = np.indices(own.shape).reshape(len(own.shape), own.size)
    coords = np.zeros((own.size, len(dims)), np.int64)
    for dim, axes in enumerate(dims):
        for axis in axes:
            coords[:, dim] = coords[:, dim] * own.shape[axis] + places[axis]
    counts = tuple(math.prod(own.shape[axis] for axis in axes) for axes in dims)
    if mesh is None or mesh is own:
        return Tiles(counts, coords)
    return Tiles(counts, coords[positions(mesh, own)])


def tile_numbers(tiles: Tiles) -> IntArray:
    """Return the number of each device's tile, row-major over the dims [devices]."""
    numbers = np.zeros(len(tiles.coords), np.int64)
    for count, coords in zip(tiles.counts, tiles.coords.T, strict=True):
        numbers = numbers * count + coords
    return numbers


def grid_of(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...] | None:
    """Return the number of blocks in each dim; None if tiles do not divide each other.

    >>> grid_of((4, 1), (2, 3)), grid_of((2,), (3,))
    ((4, 3), None)
    """
    if any(max(pair) % min(pair) for pair in zip(before, after, strict=True)):
        return None
    return tuple(map(max, before, after))


def missing(before: Tiles, after: Tiles) -> IntArray:
    """Return how many blocks each device must receive [devices]; `grid_of` must not be None.

    >>> mesh = Mesh({"x": 2, "y": 2})
    >>> missing(tiles_of(Layout(mesh, "x", None)), tiles_of(Layout(mesh, None, "y")))
    array([1, 1, 1, 1])
    """
    return _outside(_boxes(after, before), _boxes(before, after))


def lacking(before: Tiles, after: Tiles, shape: Sequence[int]) -> int:
    """Return the number of array items to be received by the device that lacks most."""
    held, wanted = (_items(tiles, shape) for tiles in (before, after))
    return int(_outside(wanted, held).max(initial=0))


def _items(tiles: Tiles, shape: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return the first item of each device's tile, and one past the last [devices, rank]."""
    side = np.array(shape, np.int64) // np.array(tiles.counts, np.int64)
    return tiles.coords * side, (tiles.coords + 1) * side


def _outside(wanted: tuple[IntArray, IntArray], held: tuple[IntArray, IntArray]) -> IntArray:
    """Return how much of each device's box lies outside of another."""
    both = np.minimum(held[1], wanted[1]) - np.maximum(held[0], wanted[0])
    sizes: IntArray = (wanted[1] - wanted[0]).prod(axis=1) - both.clip(min=0).prod(axis=1)
    return sizes


def _boxes(tiles: Tiles, other: Tiles) -> tuple[IntArray, IntArray]:
    """Return the first block of each device's tile, and one past the last [devices, rank]."""
    sides = np.array([max(1, b // a) for a, b in zip(tiles.counts, other.counts, strict=True)])
    first = tiles.coords * sides.astype(np.int64)
    return first, first + sides.astype(np.int64)


def exchange_rounds(before: Layout, after: Layout) -> tuple[tuple[Send, ...], ...]:
    """Return the sends of each round: every device sends and receives at most one block.

    A block comes from the receiver's own process if a device there has it and does not yet have as
    much to send as any device has to receive; else from the device with the least to send. There
    are no more rounds than the busiest device has blocks to send or to receive.

    Returns:
      for each round (sender, receiver, block), devices by position in the mesh of `before`, blocks
      by their coordinates in the grid of blocks.
    """
    old, new = tiles_of(before), tiles_of(after, before.mesh)
    held, wanted = _boxes(old, new), _boxes(new, old)
    processes = before.mesh.processes.ravel()
    most = int(missing(old, new).max(initial=0))
    holders: dict[Block, list[int]] = {}
    for device, box in enumerate(zip(*held, strict=True)):
        for block in _blocks(*box):
            holders.setdefault(block, []).append(device)
    turns: dict[int, int] = dict.fromkeys(range(before.mesh.size), 0)
    sends: list[Send] = []
    for receiver, box in enumerate(zip(*wanted, strict=True)):
        for block in _blocks(*box):
            have = holders[block]
            if receiver in have:
                continue
            near = [
                holder
                for holder in have
                if processes[holder] == processes[receiver] and turns[holder] < most
            ]
            sender = min(near or have, key=lambda holder: (turns[holder], holder))
            turns[sender] += 1
            sends.append((sender, receiver, block))
    colours = edge_colours([(sender, receiver) for sender, receiver, _ in sends])
    rounds: list[list[Send]] = [[] for _ in range(max(colours, default=-1) + 1)]
    for send, colour in zip(sends, colours, strict=True):
        rounds[colour].append(send)
    return tuple(map(tuple, rounds))


class Copies(NamedTuple):
    """One round as each device sees it: it writes one block of its new tile [devices, …]."""

    sends: tuple[tuple[int, int], ...]  # (sender, receiver)
    reads: IntArray  # the block of its old tile that it sends, or else keeps [devices, rank]
    keeps: IntArray  # the one that it copies if it receives none [devices, rank]
    writes: IntArray  # where in its new tile the block goes [devices, rank]
    receives: NDArray[np.bool_]  # [devices]
    idle: NDArray[np.bool_]  # it writes nothing, and only sends to others [devices]


def exchange_copies(before: Layout, after: Layout) -> tuple[Copies, ...]:
    """Return an exchange as the same number of writes on every device.

    In a round without a block to receive a device copies one that it keeps, if any is left. What
    devices still keep after the last send is copied in rounds without sends.

    Returns:
      blocks are counted from the first of the device's own tile.
    """
    old, new = tiles_of(before), tiles_of(after, before.mesh)
    held, wanted = _boxes(old, new), _boxes(new, old)
    kept = [
        _blocks(np.maximum(a, c), np.minimum(b, d).clip(min=np.maximum(a, c)))
        for a, b, c, d in zip(*held, *wanted, strict=True)
    ]
    rounds = exchange_rounds(before, after)
    copies = [_copies(sends, kept, held[0], wanted[0]) for sends in rounds]
    while any(kept):
        copies.append(_copies((), kept, held[0], wanted[0]))
    return tuple(copies)


def _copies(
    sends: Sequence[Send], kept: list[list[Block]], held: IntArray, wanted: IntArray
) -> Copies:
    """Return one round; blocks it keeps are removed from `kept`."""
    reads, keeps, writes = held.copy(), held.copy(), wanted.copy()
    receives, idle = np.zeros(len(held), bool), np.zeros(len(held), bool)
    for sender, receiver, block in sends:
        reads[sender], writes[receiver], receives[receiver] = block, block, True
    for device in np.flatnonzero(~receives):
        if kept[device]:
            keeps[device] = writes[device] = kept[device].pop()
        else:
            idle[device] = True
    own = tuple((sender, receiver) for sender, receiver, _ in sends)
    return Copies(
        sends=own,
        reads=reads - held,
        keeps=keeps - held,
        writes=writes - wanted,
        receives=receives,
        idle=idle,
    )


def _blocks(first: IntArray, end: IntArray) -> list[Block]:
    shape = (end - first).tolist()
    return [
        tuple(a + b for a, b in zip(first.tolist(), offset, strict=True))
        for offset in np.ndindex(*shape)
    ]
