"""A layout in XLA's terms: tile assignment, replication groups, sharding type, HLO text.

There are two equivalent texts. Version 1 lists physical device ids, as XLA prints a sharding given
device by device. Version 2 uses positions in the mesh, as JAX prints it, and writes their order as
a reshape and a transpose of 0..n-1 (XLA's `IotaTileAssignment`), so that it costs O(rank) whatever
the number of devices.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import check_flags, integer
from shoal.colour import local
from shoal.errors import UsageError
from shoal.plan.layout import Layout, check_layout

__all__ = [
    "ShardingType",
    "group_assignment",
    "hlo_text",
    "replication_groups",
    "sharding_type",
    "tile_assignment",
]

IntArray = NDArray[np.int64]


class ShardingType(enum.IntEnum):
    """XLA's kinds of sharding, numbered as in torch_xla."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@local
def tile_assignment(layout: Layout) -> IntArray:
    """Return the device ids with an axis for each split dim, then one for each other mesh axis.

    Local.

    Args:
      layout: the layout.

    Returns:
      ids [shards of each split dim in order …, sizes of the remaining axes in mesh order …].

    Example:
      >>> from shoal import Mesh
      >>> tile_assignment(Layout(Mesh({"x": 2, "y": 2}), "y", None))
      array([[0, 2],
             [1, 3]])
    """
    check_layout("tile_assignment", layout)
    order, sizes = _order(layout), layout.mesh.axes
    shape = [math.prod(sizes[axis] for axis in dim) for dim in layout.axes_of_dims if dim]
    shape += [sizes[axis] for axis in order[len(_used(layout)) :]]
    return _transposed_ids(layout, order).reshape(shape)


@local
def sharding_type(layout: Layout, requested: bool = False) -> ShardingType:
    """Return the kind of a layout, canonicalised by XLA or as requested by a planner.

    Local.

    XLA canonicalises: a single shard is REPLICATED whatever was requested, and replication over one
    device is none, so PARTIAL becomes TILED.

    Args:
      layout: the layout. Axes with a pending reduction count as axes that split nothing.
      requested: as requested, before XLA canonicalises (the rule of torch_xla's planner, which
        looks at the number of axes and not at their sizes).

    Example:
      >>> from shoal import Mesh
      >>> layout = Layout(Mesh({"x": 4, "y": 1}), "x", None)
      >>> sharding_type(layout).name, sharding_type(layout, requested=True).name
      ('TILED', 'PARTIAL')
    """
    check_layout("sharding_type", layout)
    check_flags("sharding_type", requested=requested)
    if not requested:
        if layout.is_replicated:
            return ShardingType.REPLICATED
        return ShardingType.PARTIAL if _group_size(layout) > 1 else ShardingType.TILED
    whole = [not dim for dim in layout.axes_of_dims]
    tile_rank = sum(1 for dim in layout.axes_of_dims if dim) + len(_rest(layout))
    if tile_rank > layout.rank:
        return ShardingType.PARTIAL
    if layout.mesh.size == 1:
        return ShardingType.MAXIMAL
    if all(whole):
        return ShardingType.REPLICATED
    return ShardingType.PARTIAL if any(whole) else ShardingType.TILED


@local
def replication_groups(layout: Layout) -> IntArray:
    """Return the device ids of each tile, in mesh order, where part of the mesh replicates.

    Local.

    Args:
      layout: the layout.

    Returns:
      ids [tiles, devices of a tile], the tiles row-major over the dims; empty [0] unless
      `sharding_type(layout, requested=True)` is PARTIAL: no other type has groups.

    Example:
      >>> from shoal import Mesh
      >>> replication_groups(Layout(Mesh({"x": 2, "y": 2}), "y"))
      array([[0, 2],
             [1, 3]])
    """
    check_layout("replication_groups", layout)
    if sharding_type(layout, requested=True) != ShardingType.PARTIAL:
        return np.empty(0, dtype=np.int64)
    return _transposed_ids(layout, _order(layout)).reshape(-1, _group_size(layout))


@local
def group_assignment(layout: Layout) -> IntArray:
    """Return the number of the replication group at each tile.

    Local.

    Args:
      layout: the layout.

    Returns:
      numbers [shards of each dim], counting row-major; empty [0] unless
      `sharding_type(layout, requested=True)` is PARTIAL.

    Example:
      >>> from shoal import Mesh
      >>> group_assignment(Layout(Mesh({"x": 2, "y": 2}), None, "y"))
      array([[0, 1]])
    """
    check_layout("group_assignment", layout)
    if sharding_type(layout, requested=True) != ShardingType.PARTIAL:
        return np.empty(0, dtype=np.int64)
    shards = _tiles(layout)
    return np.arange(math.prod(shards), dtype=np.int64).reshape(shards)


@local
def hlo_text(layout: Layout, version: int = 1) -> str:
    """Return the sharding as HLO text.

    Local.

    Args:
      layout: the layout.
      version: 1: physical ids, ascending within each replication group, as XLA prints them;
        2: over positions in the mesh, exactly the text that JAX prints, O(rank).

    Raises:
      UsageError: the version is neither 1 nor 2; or a reduction other than "sum" is pending,
        which HLO cannot express.

    Example:
      >>> from shoal import Mesh
      >>> layout = Layout(Mesh({"x": 4, "y": 2}), "y", "x")
      >>> hlo_text(layout), hlo_text(layout, version=2)
      ('{devices=[2,4]0,2,4,6,1,3,5,7}', '{devices=[2,4]<=[4,2]T(1,0)}')
    """
    check_layout("hlo_text", layout)
    if integer("hlo_text", "version", version) not in (1, 2):
        raise UsageError(f"hlo_text: version {version!r} must be 1 or 2")
    other = {axis: how for axis, how in layout.partial.items() if how != "sum"}
    if other:
        raise UsageError(f"hlo_text: {other}: HLO can express only pending sums")
    if layout.is_replicated:
        return "{replicated}"
    if math.prod(layout.mesh.axes[axis] for axis in layout.partial) == layout.mesh.size:
        return "{unreduced}"
    dims, kinds = _tile_dims(layout)
    order = _explicit_order(layout) if version == 1 else _iota_order(layout)
    return f"{{devices=[{','.join(map(str, dims))}]{order}{_last_tile_dims(kinds)}}}"


def _used(layout: Layout) -> list[str]:
    """The axes that split dims, by dim, most significant first."""
    return [axis for dim in layout.axes_of_dims for axis in dim]


def _rest(layout: Layout) -> list[str]:
    """The axes that split nothing, in mesh order; those with a pending sum first, as in JAX."""
    return [*layout.partial, *layout.unused_axes]


def _order(layout: Layout) -> list[str]:
    """All axes: those that split, by dim, most significant first; then the rest."""
    used = _used(layout)
    return used + [axis for axis in layout.mesh.axis_names if axis not in used]


def _transposed_ids(layout: Layout, order: Sequence[str]) -> IntArray:
    names = layout.mesh.axis_names
    return layout.mesh.device_ids.transpose([names.index(axis) for axis in order])


def _tiles(layout: Layout) -> list[int]:
    return [layout.num_shards(dim) for dim in range(layout.rank)]


def _group_size(layout: Layout) -> int:
    return math.prod(layout.mesh.axes[axis] for axis in _rest(layout))


def _tile_dims(layout: Layout) -> tuple[list[int], list[str]]:
    """The tile dims with those of replicas and pending sums; and the kinds of the latter."""
    sizes = layout.mesh.axes
    ends = {
        "unreduced": math.prod(sizes[axis] for axis in layout.partial),
        "replicated": math.prod(sizes[axis] for axis in layout.unused_axes),
    }
    kinds = [kind for kind, size in ends.items() if size > 1]
    return [*_tiles(layout), *(ends[kind] for kind in kinds)], kinds


def _last_tile_dims(kinds: list[str]) -> str:
    if not kinds:
        return ""
    if kinds == ["replicated"]:
        return " last_tile_dim_replicate"
    return f" last_tile_dims={{{', '.join(kinds)}}}"


def _explicit_order(layout: Layout) -> str:
    replicas = math.prod(layout.mesh.axes[axis] for axis in layout.unused_axes)
    ids = _transposed_ids(layout, [*_used(layout), *_rest(layout)])
    if not layout.partial:
        ids = np.sort(ids.reshape(-1, replicas), axis=1)
    return ",".join(map(str, ids.reshape(-1).tolist()))


def _iota_order(layout: Layout) -> str:
    """Positions as a reshape and a transpose of 0..n-1, with neighbors merged: [4,2]T(1,0).

    Axes of size 1 drop out; axes that stay neighbors in the transposed order are one.
    """
    names, sizes = layout.mesh.axis_names, layout.mesh.axes
    axes = [*_used(layout), *_rest(layout)]
    order = [names.index(axis) for axis in axes if sizes[axis] > 1]
    runs: list[list[int]] = []
    places = {place: rank for rank, place in enumerate(sorted(order))}
    for place in (places[place] for place in order):
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    kept = [sizes[names[place]] for place in sorted(order)]
    in_mesh_order = sorted(runs)
    reshape = [math.prod(kept[place] for place in run) for run in in_mesh_order]
    text = f"<=[{','.join(map(str, reshape))}]"
    if len(runs) == 1:
        return text
    return text + f"T({','.join(str(in_mesh_order.index(run)) for run in runs)})"
