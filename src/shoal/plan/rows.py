"""Which rows of a batch each process holds, and which of them other processes also hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.shards import owners


class RowHolders(NamedTuple):
    """The shards of one dim, in order, and the processes that hold each of them."""

    holders: tuple[tuple[int, ...], ...]  # for each shard, ascending

    @property
    def num_shards(self) -> int:
        """The number of shards of the dim."""
        return len(self.holders)

    def held_by(self, process: int) -> tuple[int, ...]:
        """Return the shards that a process holds, in order."""
        return tuple(n for n, holders in enumerate(self.holders) if process in holders)

    def slices(self, size: int, process: int) -> tuple[slice, ...]:
        """Return the indices that a process holds: ascending, disjoint, neighbors joined.

        Of 12 indices in 4 shards, of which it holds 0, 1 and 3: 0..6 and 9..12.
        """
        each = size // self.num_shards
        edges: list[list[int]] = []
        for shard in self.held_by(process) if each else ():
            if edges and edges[-1][1] == shard * each:
                edges[-1][1] += each
            else:
                edges.append([shard * each, (shard + 1) * each])
        return tuple(slice(start, stop) for start, stop in edges)


def row_holders(layout: Layout, dim: int = 0) -> RowHolders:
    """Return which processes hold which shards of a dim.

    >>> from shoal import Mesh
    >>> row_holders(Layout(Mesh({"x": 2, "y": 2}, processes=[0, 0, 1, 1]), "y")).holders
    ((0, 1), (0, 1))

    Raises:
      UsageError: the layout has no such dim.
    """
    shards = layout.num_shards(dim)
    along = Layout(layout.mesh, layout.dims[dim])
    box = owners(along, (shards,)).box
    processes = layout.mesh.processes.reshape(-1)
    holders_of: list[set[int]] = [set() for _ in range(shards)]
    for shard, process in np.unique(np.stack([box, processes], axis=1), axis=0).tolist():
        holders_of[shard].add(process)
    return RowHolders(tuple(tuple(sorted(holders)) for holders in holders_of))


def check_even_split(operation: str, layout: Layout, size: int, dim: int) -> None:
    """Raise if the shards do not divide a dim of this size.

    Raises:
      UsageError: they do not; names sizes that would fit.
    """
    count = layout.num_shards(dim)
    if size % count:
        axes = " x ".join(f"{a}={layout.mesh.axes[a]}" for a in layout.axes_of_dims[dim])
        below, above = size // count * count, -(-size // count) * count
        fits = f"{below} or {above}" if below else f"{above}"
        raise UsageError(
            f"{operation}: {size} rows, which {count} shards ({axes}) do not divide; "
            f"{fits} would fit"
        )
