"""Partition specs ↔ layouts, and layouts in XLA's terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import as_integer
from shoal.errors import UsageTypeError, WrongType, raise_all
from shoal.plan.hlo import (
    ShardingType,
    group_assignment,
    hlo_text,
    replication_groups,
    sharding_type,
    tile_assignment,
)
from shoal.plan.layout import Dim, Layout
from shoal.plan.mesh import Mesh

__all__ = ["OpSharding", "layout_of_spec", "op_sharding"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class OpSharding:
    """A layout over device numbers, as an XLA sharding. Equal by content.

    Unlike torch_xla's, which is opaque, it has fields, and `str` returns the HLO text.

    >>> from shoal.plan.mesh import Mesh
    >>> str(OpSharding(Layout(Mesh({"x": 2, "y": 2}), "y", None)))
    '{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}'
    """

    layout: Layout

    @cached_property
    def type(self) -> ShardingType:
        """The kind, as canonicalised by XLA."""
        return sharding_type(self.layout)

    @cached_property
    def requested_type(self) -> ShardingType:
        """The kind requested by torch_xla, before XLA canonicalises."""
        return sharding_type(self.layout, requested=True)

    @cached_property
    def tile_assignment(self) -> IntArray:
        """The devices, with an axis for each split dim, then one for each other mesh axis."""
        return tile_assignment(self.layout)

    @cached_property
    def group_assignment(self) -> IntArray:
        """The number of the replication group of each tile; empty unless PARTIAL is requested."""
        return group_assignment(self.layout)

    @cached_property
    def replication_groups(self) -> IntArray:
        """The devices of each tile; empty unless PARTIAL is requested."""
        return replication_groups(self.layout)

    @cached_property
    def text(self) -> str:
        """The HLO text that lists devices."""
        return hlo_text(self.layout)

    @cached_property
    def iota_text(self) -> str:
        """The HLO text with an iota, as JAX prints it; the list of devices if no iota is theirs.

        >>> from shoal.plan.mesh import Mesh
        >>> for ids in ([0, 1, 2, 3], [3, 1, 2, 0]):
        ...     OpSharding(Layout(Mesh({"x": 4}, device_ids=ids), "x")).iota_text
        '{devices=[4]<=[4]}'
        '{devices=[4]3,1,2,0}'
        """
        return hlo_text(self.layout, version=2 if self.layout.mesh.is_iota else 1)

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def op_sharding(layout: Layout) -> OpSharding:
    """Return the sharding of a layout: the same object for equal layouts."""
    return OpSharding(layout)


def layout_of_spec(mesh: Mesh, spec: object) -> Layout:
    """Return the layout equivalent to a partition spec.

    Args:
      mesh: the mesh.
      spec: for each dim None, the name or the index of an axis, or a tuple of these.

    Raises:
      UsageError: names all problems, as the caller wrote the spec.

    >>> layout_of_spec(Mesh({"x": 4, "y": 2}), (("x", 1), None)).dims
    (('x', 'y'), None)
    """
    if isinstance(spec, str) or not isinstance(spec, Iterable):
        raise UsageTypeError(f"partition_spec {spec!r} must be a tuple with an entry for each dim")
    problems: list[str] = []
    dims = [_dim(mesh, dim, entry, problems) for dim, entry in enumerate(spec)]
    raise_all(f"partition_spec {tuple(spec)!r} on {mesh!r}", problems)
    return Layout(mesh, *dims)


def _dim(mesh: Mesh, dim: int, entry: Any, problems: list[str]) -> Dim:
    many = isinstance(entry, tuple | list)
    axes = [
        _axis(mesh, dim, axis, problems, is_inner=many) for axis in (entry if many else (entry,))
    ]
    return tuple(axes) if many else axes[0]  # type: ignore[arg-type]


def _axis(mesh: Mesh, dim: int, axis: Any, problems: list[str], *, is_inner: bool) -> str | None:
    """Return the name of one axis."""
    if isinstance(axis, str) or (axis is None and not is_inner):
        return axis
    index = as_integer(axis)
    if index is not None and 0 <= index < len(mesh.shape):
        return mesh.axis_names[index]
    if index is not None:
        problems.append(f"dim {dim}: index {axis} is out of bounds of mesh_shape {mesh.shape}")
    elif isinstance(axis, tuple | list):
        problems.append(f"dim {dim}: {axis!r}: a partition spec cannot contain nested tuples")
    else:
        kinds = "an axis name or index" if is_inner else "None, an axis name or index, or a tuple"
        problems.append(WrongType(f"dim {dim}: {axis!r} must be {kinds}"))
    return None
