"""DTensor's placements, without torch: the placement along each axis of a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.colour import local
from shoal.compat.torch_xla.errors import NoMeaningHere, NoSuchDim, SpmdError
from shoal.plan.layout import Layout, dim_of

__all__ = ["Replicate", "Shard", "placements_of", "spec_of_placements"]


@local
@dataclass(frozen=True)
class Shard:
    """Placement of an axis that splits a dim.

    Local.
    """

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True; given a dim, whether this is the split dim. Local."""
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        """Return False. Local."""
        return False


@local
@dataclass(frozen=True)
class Replicate:
    """Placement of an axis that splits nothing.

    Local.
    """

    def is_shard(self, dim: int | None = None) -> bool:
        """Return False. Local."""
        return False

    def is_replicate(self) -> bool:
        """Return True. Local."""
        return True


def placements_of(layout: Layout) -> tuple[Shard | Replicate, ...]:
    """Return the placement along each axis of a layout's mesh.

    Raises:
      UsageError: the axes of a dim are not in mesh order, which placements cannot express.

    >>> from shoal.plan.mesh import Mesh
    >>> placements_of(Layout(Mesh({"x": 4, "y": 2}), None, "x"))
    (Shard(dim=1), Replicate())
    """
    names = layout.mesh.axis_names
    for axes in layout.axes_of_dims:
        if sorted(axes, key=names.index) != list(axes):
            raise SpmdError(
                f"torch_xla placements (shoal.layout_of): {layout!r} splits one dim by "
                f"{' and '.join(axes)}, against the order of the mesh, which placements cannot "
                "express"
            )
    dim_of = {axis: dim for dim, axes in enumerate(layout.axes_of_dims) for axis in axes}
    return tuple(Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in names)


def spec_of_placements(placements: Iterable[Any], rank: int) -> tuple[Any, ...]:
    """Return the partition spec by axis index; axes that split one dim are in mesh order.

    Args:
      placements: of this module, or torch's.
      rank: the rank of the array.

    >>> spec_of_placements([Shard(0), Shard(0), Replicate()], 2)
    ((0, 1), None)
    """
    axes: list[list[int]] = [[] for _ in range(rank)]
    for mesh_dim, placement in enumerate(placements):
        dim = _split_dim(placement, rank)
        if dim is not None:
            axes[dim].append(mesh_dim)
    return tuple(map(dim_of, axes))


def _split_dim(placement: Any, rank: int) -> int | None:
    """Return the dim that a placement splits; None if it splits none."""
    if getattr(placement, "is_replicate", lambda: False)():
        return None
    if not getattr(placement, "is_shard", lambda: False)():
        kind = NoMeaningHere if type(placement).__name__ == "Partial" else SpmdError
        raise kind(
            f"torch_xla placements (shoal.Layout): Unsupported placement type: {placement!r}; "
            "a pending sum is Layout(…, partial=)"
        )
    if not -rank <= placement.dim < rank:
        raise NoSuchDim(
            f"torch_xla placements (shoal.Layout): Shard dimension {placement.dim} is out of "
            f"bounds for tensor with {rank} dimensions"
        )
    return int(placement.dim)
