"""How mesh axes share the dims of a torus, and in which order each walks over its chips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.plan.cost import box_seconds
from shoal.plan.hardware.links import Link, links_of
from shoal.plan.hardware.wiring import Torus
from shoal.plan.hardware.wiring_checks import text_of
from shoal.plan.schedules.ring import Side, best_walk, shortest_hops

IntArray = NDArray[np.int64]
Sizes = tuple[int, ...]
Weights = tuple[float, ...]

_MOST_NESTED = 3  # limit of axes for trying every nesting
_SPEED = Link("link", 1.0, 0.0, "")  # if unknown: times are proportional to it


def order(torus: Torus, sizes: Sizes, split: bool, weights: Weights | None = None) -> IntArray:
    """Return the device ids [sizes] in the best order for the wires.

    Args:
      torus: the chips.
      sizes: of the mesh.
      split: may two axes share a dim?
      weights: bytes of each axis's all-reduces; None: the last axis is the busiest.

    Raises:
      UsageError: axes would have to share a dim, which is not allowed.
    """
    wraps = (*torus.wrap, False)  # the cores of a chip are a dim of their own
    nest = tuple(range(len(sizes)))
    if weights is None:
        taken = _best(torus.grid, wraps, sizes, split)
    else:
        link = links_of(torus).near or _SPEED
        nest, taken = _fastest(torus.grid, wraps, sizes, split, weights, link)
    if taken is None:
        whole = ", ".join(map(text_of, itertools.islice(_whole(torus.grid, len(sizes)), 6)))
        raise UsageError(
            f"place: {text_of(sizes)} on {torus.text} needs a dim that two axes share; whole dims "
            f"make {whole}, …\nallow_split_physical_axes=True lets axes share dims"
        )
    coords = [np.zeros(sizes, np.int64) for _ in torus.grid]
    for place, axis in enumerate(nest):
        walk = best_walk(_sides(taken, place, torus.grid, wraps))
        shape = [size if other == axis else 1 for other, size in enumerate(sizes)]
        for dim, coord in enumerate(coords):
            coord += (walk.chips[:, dim] * _stride(taken, place, dim)).reshape(shape)
    return torus.device_ids[tuple(coords)]


@lru_cache(maxsize=256)
def _best(
    grid: Sizes, wraps: tuple[bool, ...], sizes: Sizes, split: bool
) -> tuple[Sizes, ...] | None:
    """Return the best share of each dim for each axis [axis][dim]; None if impossible.

    The busiest axis comes first and keeps all of its equally good shares; the next one chooses
    among what these leave, and so on. Every remaining choice can be completed, so no better
    one is missed.
    """
    partial_shares: list[tuple[tuple[Sizes, ...], Sizes]] = [
        ((), grid)
    ]  # shares, remainder of each dim
    for axis in reversed(range(len(sizes))):
        grown: dict[tuple[int, int], list[tuple[tuple[Sizes, ...], Sizes]]] = {}
        for shares, left in partial_shares:
            for share in _shares(left, sizes[axis], split):
                rest = tuple(size // part for size, part in zip(left, share, strict=True))
                if split or _fits(rest, sizes[:axis]):
                    taken = (share, *shares)
                    cost = shortest_hops(_sides(taken, 0, grid, wraps))
                    grown.setdefault(cost, []).append((taken, rest))
        if not grown:
            return None
        partial_shares = grown[min(grown)]
    # Among equals, many dims for the busiest axes: each has links of its own.
    return min(
        (shares for shares, _ in partial_shares),
        key=lambda shares: ([-sum(part > 1 for part in share) for share in shares[::-1]], shares),
    )


@lru_cache(maxsize=256)
def _fastest(
    grid: Sizes, wraps: tuple[bool, ...], sizes: Sizes, split: bool, weights: Weights, link: Link
) -> tuple[Sizes, tuple[Sizes, ...] | None]:
    """Return the nesting of the axes, innermost last, and the shares of each."""
    search = _OrderSearch(grid, wraps, sizes, split, weights, link)
    axes = range(len(sizes))
    by_weight = tuple(sorted(axes, key=lambda axis: weights[axis]))
    for nest in itertools.permutations(axes) if len(axes) <= _MOST_NESTED else [by_weight]:
        search.grow(nest, (), grid, 0.0)
    return search.nest, search.taken


class _OrderSearch:
    """Branch and bound over nestings and shares: the least time of all axes' all-reduces."""

    def __init__(
        self,
        grid: Sizes,
        wraps: tuple[bool, ...],
        sizes: Sizes,
        split: bool,
        weights: Weights,
        link: Link,
    ) -> None:
        self._grid, self._wraps, self._sizes, self._split = grid, wraps, sizes, split
        self._weights, self._link = weights, link
        self._least: tuple[float, list[tuple[int, int]]] = (math.inf, [])
        self.nest: Sizes = ()
        self.taken: tuple[Sizes, ...] | None = None

    def grow(self, nest: Sizes, inner: tuple[Sizes, ...], left: Sizes, seconds: float) -> None:
        """Try each possible share of the rest for the next outer axis, the fastest first.

        Args:
          nest: the axes, the innermost last.
          inner: the shares of the axes assigned so far.
          left: the rest of each dim.
          seconds: the time of the axes assigned so far.
        """
        if len(inner) == len(nest):
            self._note(nest, inner, seconds)
            return
        place = len(nest) - len(inner) - 1
        axis, outer = nest[place], tuple(self._sizes[a] for a in nest[:place])
        candidates = []
        for share in _shares(left, self._sizes[axis], self._split):
            rest = tuple(size // part for size, part in zip(left, share, strict=True))
            if self._split or _fits(rest, outer):
                taken = (share, *inner)
                sides = _sides(taken, 0, self._grid, self._wraps)
                own = _seconds(sides, self._link, self._weights[axis], self._grid[-1])
                candidates.append((seconds + own, taken, rest))
        for total, taken, rest in sorted(candidates):
            if total <= self._least[0] * (1 + 1e-9):  # equally fast ones may have shorter hops
                self.grow(nest, taken, rest, total)

    def _note(self, nest: Sizes, taken: tuple[Sizes, ...], seconds: float) -> None:
        hops = [
            shortest_hops(_sides(taken, nest.index(axis), self._grid, self._wraps))
            for axis in reversed(range(len(nest)))
        ]
        cost = (float(f"{seconds:.9g}"), hops)
        if cost < self._least:
            self._least, self.nest, self.taken = cost, nest, taken


@lru_cache(maxsize=4096)
def _seconds(sides: tuple[Side, ...], link: Link, weight: float, cores: int) -> float:
    return box_seconds(sides, link, weight, cores=cores) if weight else 0.0


def _fits(grid: Sizes, sizes: Sizes) -> bool:
    """Can the axes be assigned to whole dims?"""
    if not sizes:
        return all(size == 1 for size in grid)
    for share in _shares(grid, sizes[-1], False):
        left = tuple(size // part for size, part in zip(grid, share, strict=True))
        if _fits(left, sizes[:-1]):
            return True
    return False


def _sides(
    taken: Sequence[Sizes], axis: int, grid: Sizes, wraps: Sequence[bool]
) -> tuple[Side, ...]:
    """Return the box of chips of an axis's group; `taken` may begin at that axis.

    The last side is that of a chip's cores, between which there is no link.
    """
    links = tuple(
        Side(taken[axis][dim], _stride(taken, axis, dim), grid[dim] if wraps[dim] else 0)
        for dim in range(len(grid) - 1)
    )
    return (*links, Side(taken[axis][-1], 0))


def _stride(taken: Sequence[Sizes], axis: int, dim: int) -> int:
    """Return the distance of an axis's chips along a dim: busier axes lie between them."""
    return math.prod(row[dim] for row in taken[axis + 1 :])


def _shares(grid: Sizes, size: int, split: bool) -> Iterator[Sizes]:
    """Yield the ways to factor a size into shares of dims."""
    if not grid:
        if size == 1:
            yield ()
        return
    parts = (n for n in range(1, grid[0] + 1) if grid[0] % n == 0 and size % n == 0)
    for part in parts:
        if split or part in (1, grid[0]):
            for rest in _shares(grid[1:], size // part, split):
                yield (part, *rest)


def _whole(grid: Sizes, rank: int) -> Iterator[Sizes]:
    """Yield the meshes of this many axes that share no dim."""
    seen = set()
    for owners in itertools.product(range(rank), repeat=len(grid)):
        row = [1] * rank
        for size, owner in zip(grid, owners, strict=True):
            row[owner] *= size
        if tuple(row) not in seen:
            seen.add(tuple(row))
            yield tuple(row)
