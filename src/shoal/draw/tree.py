"""Picture of a tree of arrays: the layout, bytes per device and replication of each leaf."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shoal.draw.amounts import in_bytes
from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, elide
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.notation.words import quote

_MOST_ROWS = 60
_COLUMNS = ["array", "layout", "per device", "in all", "copies"]


class Placed(NamedTuple):
    """A leaf of a tree, and its layout."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int  # 0: unknown
    layout: Layout | None  # None: in host memory

    @property
    def device_bytes(self) -> int:
        """Bytes on each device of its mesh: the largest shard."""
        if self.layout is None:
            return 0
        return math.prod(self.layout.shard_shape(self.shape)) * self.item_bytes

    @property
    def all_bytes(self) -> int:
        """Bytes without replication."""
        return 0 if self.layout is None else math.prod(self.shape) * self.item_bytes

    @property
    def copies(self) -> int:
        """Number of devices that hold the same data."""
        if self.layout is None:
            return 0
        shards = math.prod(map(self.layout.num_shards, range(self.layout.rank)))
        return self.layout.mesh.size // shards


def draw_tree(leaves: Sequence[Placed]) -> Picture:
    """Return a row for each leaf, and sums.

    Leaves that differ only in the numbers of their paths (the layers of a stack) share a row.
    """
    groups: dict[tuple[object, ...], list[Placed]] = {}
    for leaf in leaves:
        pattern = re.sub(r"(?<![^/])\d+(?![^/])", "*", leaf.path)
        groups.setdefault((pattern, *leaf[1:]), []).append(leaf)
    colours: dict[str, int] = {}
    rows = [_row(group, colours) for group in groups.values()]
    gap = ("…", [GAP] * len(_COLUMNS))
    panel = CellTable("", "leaf", _COLUMNS, elide(rows, _MOST_ROWS, gap))
    meshes = list(dict.fromkeys(leaf.layout.mesh for leaf in leaves if leaf.layout is not None))
    notes = _sums(leaves, meshes)
    if len(rows) > _MOST_ROWS:
        notes.append(f"{_MOST_ROWS - 1} of {len(rows)} rows are shown")
    on = " and ".join(_axes(mesh) for mesh in meshes) or "no mesh"
    count = len(leaves)
    return Picture(f"{count} {'leaf' if count == 1 else 'leaves'} on {on}", [panel], notes)


def _row(group: Sequence[Placed], colours: dict[str, int]) -> tuple[str, list[Cell]]:
    first = group[0]
    parts = zip(*(leaf.path.split("/") for leaf in group), strict=True)
    label = "/".join(part[0] if len({*part}) == 1 else "*" for part in parts) or "the array"
    label += f" ×{len(group)}" * (len(group) > 1)
    array = f"{first.dtype}[{','.join(map(str, first.shape))}]"
    if first.layout is None:
        return label, [Cell(array), Cell("on the host"), Cell("-"), Cell("-"), Cell("-")]
    dims = first.layout.text.removesuffix(f" @ {first.layout.mesh.text}")
    dims = dims if dims.startswith("(") else f"({dims})"
    colour = colours.setdefault(dims, len(colours))
    return label, [
        Cell(array),
        Cell(dims, colour),
        Cell(in_bytes(len(group) * first.device_bytes)),
        Cell(in_bytes(len(group) * first.all_bytes)),
        Cell(str(first.copies)),
    ]


def _sums(leaves: Sequence[Placed], meshes: Sequence[Mesh]) -> list[str]:
    """Return the bytes held by each device, and how many of them are replicated."""
    held: Counter[tuple[str, int]] = Counter()
    for mesh in meshes:
        on_it = [leaf for leaf in leaves if leaf.layout is not None and leaf.layout.mesh == mesh]
        own = sum(leaf.device_bytes for leaf in on_it)
        held.update({(mesh.kind, device): own for device in mesh.device_ids.ravel().tolist()})
    if not held:
        return ["nothing is placed on devices"]
    most, least = max(held.values()), min(held.values())
    once = sum(leaf.all_bytes for leaf in leaves)
    spread = in_bytes(most) if most == least else f"{in_bytes(least)} to {in_bytes(most)}"
    ideal = in_bytes(math.ceil(once / len(held)))
    notes = [f"{spread} per device, {in_bytes(once)} in all; {ideal} without replication"]
    several = [leaf for leaf in leaves if leaf.layout is not None and leaf.layout.mesh.size > 1]
    whole = [leaf for leaf in several if leaf.layout is not None and leaf.layout.is_replicated]
    if whole:
        size = in_bytes(sum(leaf.device_bytes for leaf in whole))
        notes.append(f"whole on every device: {size} in {len(whole)} of {len(leaves)} leaves")
    return notes


def _axes(mesh: Mesh) -> str:
    return " ".join(f"{quote(axis)}={size}" for axis, size in mesh.axes.items()) or "one device"
