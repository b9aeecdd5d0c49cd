"""Closed walks over the chips of a box with the fewest possible hops.

A collective over a mesh axis passes data around the devices of each group of the axis. A group is a
box of chips, cut out of a torus: in every dim some number of chips, at some stride. The walk visits
each chip once and returns; a *hop* is the number of links between two consecutive chips.

A box of an even number of chips in two dims or more has a walk whose hops are all 1 (a Hamiltonian
cycle of the grid graph), and so has a dim that wraps around. Otherwise, since a grid is a bipartite
graph, an odd box needs one hop of 2, and a line needs n - 2 of them: Itai, Papadimitriou and
Szwarcfiter, "Hamilton paths in grid graphs", SIAM J. Comput. 11 (1982), for the boxes that have
one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Side(NamedTuple):
    """One dim of a box: `chips` of them, each `stride` links from the last."""

    chips: int
    stride: int = 1  # 0: between cores of one chip
    ring: int = 0  # how many chips the dim has in all if its ends are linked, else 0


class Walk(NamedTuple):
    """The chips of a box in the order of a closed walk."""

    longest: int  # hop
    total: int  # of all hops, that back to the first included
    chips: IntArray  # [chips, dims], from 0 in steps of 1


def hops(chips: IntArray, sides: Sequence[Side]) -> IntArray:
    """Return the links between each chip and the next [chips], the last's to the first included.

    Args:
      chips: [chips, dims], in units of the sides' strides.
    """
    apart = np.abs(chips - np.roll(chips, -1, axis=0)) * [side.stride for side in sides]
    rings = np.array([side.ring for side in sides])
    around = np.where(rings > 0, rings - apart, apart)
    return np.asarray(np.minimum(apart, around).sum(axis=1))


def best_walk(sides: Sequence[Side]) -> Walk:
    """Return the known walk with the shortest longest hop, and among those the shortest in total.

    >>> best_walk((Side(2), Side(4)))[:2]
    (1, 8)
    >>> best_walk((Side(8),))[:2], best_walk((Side(8, ring=8),))[:2]
    ((2, 14), (1, 8))
    """
    # Boxes that differ only in the order of their dims share a walk.
    dims = sorted((dim for dim, side in enumerate(sides) if _counts(side)), key=sides.__getitem__)
    longest, total, chips = _walk(tuple(sides[dim] for dim in dims))
    # Cells without a link between them are consecutive.
    near = [dim for dim, side in enumerate(sides) if not side.stride]
    counts = [sides[dim].chips for dim in near]
    inside = np.array(list(np.ndindex(*counts))).reshape(math.prod(counts), len(near))
    full = np.zeros((len(chips) * len(inside), len(sides)), np.int64)
    full[:, dims] = np.repeat(chips, len(inside), axis=0)
    full[:, near] = np.tile(inside, (len(chips), 1))
    return Walk(longest, total, full)


def _counts(side: Side) -> bool:
    return side.chips > 1 and side.stride > 0


def shortest_hops(sides: Sequence[Side]) -> tuple[int, int]:
    """Return the longest hop of the best walk, and the sum of its hops."""
    return _walk(tuple(sorted(filter(_counts, sides))))[:2]


@lru_cache(maxsize=4096)
def _walk(sides: tuple[Side, ...]) -> Walk:
    """The same for a box with sorted dims, all wider than one chip and with links between chips."""
    if not sides:
        return Walk(0, 0, np.zeros((1, 0), np.int64))
    least = min(side.stride for side in sides)  # no hop is shorter
    walks: list[Walk] = []
    for chips in _walks(sides):
        lengths = hops(chips, sides)
        walks.append(Walk(int(lengths.max()), int(lengths.sum()), chips))
        if walks[-1].longest == least:
            break
    return min(walks, key=lambda walk: walk[:2])


def _walks(sides: Sequence[Side]) -> Iterator[IntArray]:
    """Yield walks over a box: row-major, folded, snakes and combs over each order of its dims."""
    counts = [side.chips for side in sides]
    yield np.indices(counts).reshape(len(sides), -1).T
    if len(sides) == 1:
        yield _folded(counts[0])[:, None]
        return
    for order in itertools.permutations(range(len(sides))):
        first, *rest = order
        snake = _snake([counts[dim] for dim in rest])
        # An even number of rows, back and forth: closed if the first dim's ends are linked.
        yield _as_listed(_snake([counts[dim] for dim in order]), order)
        rows, columns = counts[first], len(snake)
        grids = [_comb(rows, columns), _comb(columns, rows)[:, ::-1]]
        if columns % 2:  # closes across the linked ends of the first dim
            grids.append(_comb(columns, rows, turns=False)[:, ::-1])
        for grid in grids:
            yield _as_listed(np.column_stack((grid[:, 0], snake[grid[:, 1]])), order)


def _as_listed(chips: IntArray, order: Sequence[int]) -> IntArray:
    """Reorder coordinates from a permuted order of the dims to the original one."""
    return np.asarray(chips[:, np.argsort(order)])


def _folded(count: int) -> IntArray:
    """Walk along a line and back, visiting every other chip each way: 0 2 4 5 3 1."""
    return np.concatenate((np.arange(0, count, 2), np.arange(1, count, 2)[::-1]))


def _snake(counts: Sequence[int]) -> IntArray:
    """Visit all chips of a box, each a neighbor of the last [chips, dims].

    >>> _snake([2, 3]).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 2], [1, 1], [1, 0]]
    """
    path = np.arange(counts[-1])[:, None]
    for count in reversed(counts[:-1]):
        layers = [path if layer % 2 == 0 else path[::-1] for layer in range(count)]
        numbers = np.repeat(np.arange(count), len(path))
        path = np.column_stack((numbers, np.concatenate(layers)))
    return path


def _comb(rows: int, columns: int, *, turns: bool = True) -> IntArray:
    """Walk over a grid, and back through its first column.

        → → ↓      of 4 x 3: the rows back and forth, without the first column,
        ↑ ↓ ←      and the first column back
        ↑ → ↓
        ↑ ← ←

    With an odd number of rows the last two are taken in turns, column by column; where both are odd
    one step remains that is two links long. Without turns that step leads from the last column to
    the first: one link if the ends of the rows are linked. Rows and columns are at least 2.
    """
    teeth = columns - 1
    turns = turns and rows % 2 == 1
    plain = rows - 2 if turns else rows
    cells = [
        (row, 1 + (column if row % 2 == 0 else teeth - 1 - column))
        for row in range(plain)
        for column in range(teeth)
    ]
    if turns:  # the snake ends at the far end of an odd number of rows
        top = rows - 2
        for turn in range(teeth):
            column = teeth - turn
            pair = [(top, column), (rows - 1, column)]
            cells += pair if turn % 2 == 0 else pair[::-1]
    cells += [(row, 0) for row in reversed(range(rows))]
    return np.array(cells)
