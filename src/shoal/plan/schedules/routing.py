"""Traffic over each link of a torus: data routed dim by dim, over shortest paths.

Coordinates are rows of (slice, x, y, z, core): as many dims as the torus has, and slices of one
shape side by side. The link numbered p of a line leads from chip p to chip p + 1, and the last one
of a ring back to chip 0; each link is two, one for each direction. Between devices of one chip data
take no link.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Grid(NamedTuple):
    """Slices of one shape."""

    slices: int
    shape: tuple[int, ...]  # chips along each dim of links
    wrap: tuple[bool, ...]
    cores: int

    @property
    def chips(self) -> tuple[int, ...]:
        """The shape of an array that has an entry for each chip."""
        return (self.slices, *self.shape)

    @property
    def dims(self) -> range:
        """The columns of the coordinates that have links."""
        return range(1, len(self.shape) + 1)

    def place(self, coords: IntArray) -> IntArray:
        """Return the number of the chip of each device."""
        columns = coords[..., :-1].reshape(-1, len(self.chips)).T
        return np.asarray(np.ravel_multi_index(tuple(columns), self.chips))

    def along(self, dim: int, changes: NDArray[Any]) -> FloatArray:
        """Accumulate what each chip adds to the next link's load, relative to the last link's."""
        return np.cumsum(changes.reshape(self.chips), axis=dim)


class LinkTraffic:
    """Accumulated bytes over each link."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        count = math.prod(grid.chips)
        # Difference to the previous link's traffic: to the right, to the left.
        self._changes = [np.zeros((2, count)) for _ in grid.shape]

    def add(self, source: IntArray, target: IntArray, num_bytes: float) -> None:
        """Send bytes from each of the sources to its target [devices, dims]."""
        places = source.copy()
        for dim in self._grid.dims:
            self.add_along(dim, places, target[:, dim], num_bytes)
            places[:, dim] = target[:, dim]

    def add_along(self, dim: int, source: IntArray, end: IntArray, num_bytes: float) -> None:
        """Send bytes from each source along one dim; of two equally short ways, half on each."""
        size, start = self._grid.shape[dim - 1], source[:, dim]
        right: FloatArray
        if self._grid.wrap[dim - 1]:
            ahead = (end - start) % size
            right = np.where(2 * ahead == size, 0.5, 2 * ahead < size)
        else:
            right = np.asarray(end > start, np.float64)
        self._add(dim, way=0, row=source, first=start, last=end, load=num_bytes * right)
        self._add(dim, way=1, row=source, first=end, last=start, load=num_bytes * (1.0 - right))

    def _add(
        self, dim: int, way: int, row: IntArray, first: IntArray, last: IntArray, load: FloatArray
    ) -> None:
        """Load the links from chip `first` on, to the right, until `last`."""
        used = (load > 0) & (first != last)
        row, first, last, load = row[used].copy(), first[used], last[used], load[used]
        changes = self._changes[dim - 1][way]
        passes_end = np.where(last < first, load, 0.0)
        for chip, more in ((first, load), (last, -load), (np.zeros_like(first), passes_end)):
            row[:, dim] = chip
            changes += np.bincount(self._grid.place(row), more, minlength=changes.size)

    def busiest(self) -> list[float]:
        """Return the bytes over the busiest link of each dim, in one direction."""
        return [
            max(float(self._grid.along(dim, way).max()) for way in self._changes[dim - 1])
            for dim in self._grid.dims
        ]


def distance(grid: Grid, source: IntArray, target: IntArray) -> IntArray:
    """Return the links between devices, on the shortest path; another core is one away."""
    apart = np.abs(source - target)
    for dim in grid.dims:
        if grid.wrap[dim - 1]:
            size = grid.shape[dim - 1]
            apart[..., dim] = np.minimum(apart[..., dim], size - apart[..., dim])
    return np.asarray(apart.sum(axis=-1))


def box_values(groups: IntArray) -> list[IntArray] | None:
    """Return the boxes that groups fill; None if they are not boxes of one size.

    Args:
      groups: coordinates [groups, members, dims]; those of a group differ.

    Returns:
      for each dim the coordinates of each group's box, in order [groups, count]. A group of as many
      members as the product of its counts holds every combination of them: it is a box.
    """
    boxes, members = [], groups.shape[1]
    for dim in range(groups.shape[2]):
        values = np.sort(groups[:, :, dim], axis=1)
        counts = 1 + (np.diff(values, axis=1) > 0).sum(axis=1)
        if (counts != counts[0]).any() or members % counts[0]:
            return None
        boxes.append(values[:, :: members // int(counts[0])])
    return boxes if math.prod(values.shape[1] for values in boxes) == members else None


class GatherLine(NamedTuple):
    """How each group's box gathers along one dim: as rings, or as lines from end to end."""

    dim: int  # of links, from 0
    chips: int  # of the box along it
    load: float  # bytes over the busiest link for each byte that a device receives along it
    steps: int  # hops one after the other


def lines(grid: Grid, groups: IntArray, values: list[IntArray]) -> list[GatherLine]:
    """Return how boxes gather along each dim of links in which they have several chips.

    Every chip of a line of n receives the n - 1 shards of the others. In a ring, half of each shard
    goes either way: each link carries (n - 1) / 2 shards. In a line whose ends are not linked each
    shard goes both ways as far as there are chips: a link carries the shards of all chips behind
    it. The loads that the lines of all groups put on one link are added up; the mode with the
    lighter busiest link is taken.
    """
    gathered = []
    place = grid.place(groups)
    for dim in grid.dims:
        size, own = values[dim].shape[1], values[dim]
        if size == 1:
            continue
        first = (groups[:, :, dim] == own[:, :1]).ravel()
        last = (groups[:, :, dim] == own[:, -1:]).ravel()
        total = math.prod(grid.chips)
        ways = [np.bincount(place, more, total) for more in (1.0 - size * last, size * first - 1.0)]
        shards = max(float(grid.along(dim, way).max()) for way in ways)
        modes = [(shards / (size - 1), int((own[:, -1] - own[:, 0]).max()))]
        if grid.wrap[dim - 1]:
            chips = grid.shape[dim - 1]
            gaps = np.diff(own, axis=1, append=own[:, :1] + chips)
            row = np.bincount(place, minlength=total).reshape(grid.chips).sum(axis=dim)
            modes.append((int(row.max()) / size / 2, size // 2 * int(gaps.max())))
        gathered.append(GatherLine(dim - 1, size, *min(modes)))
    return gathered
