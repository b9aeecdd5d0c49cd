"""Describe the placement of an array or a layout as text."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.colour import local
from shoal.draw.amounts import in_bytes
from shoal.draw.layout import draw_layout
from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, elide
from shoal.draw.media.svg import picture_svg
from shoal.draw.media.terminal import to_text
from shoal.draw.mesh import draw_mesh
from shoal.draw.ribbons import draw_traffic
from shoal.errors import UsageError, UsageTypeError, counted, with_article
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh, mesh_of
from shoal.plan.notation.words import quote
from shoal.plan.transfer.traffic import Traffic


@local
def describe(x: Any, *, shape: Any = None) -> str:
    """Return a text picture of the placement of an array, a layout, a mesh or a tree.

    Local.

    Any rank: the last two dims are rows and columns, the others panels. A block shows its
    devices, with their processes if there are several. A tree has a row for each leaf: its bytes
    on each device, and how much of it is replicated. No value is read, nothing is moved.

    As wide as the terminal; columns that do not fit are omitted, and counted. In a notebook the
    value of a cell is shown as the picture.

    Args:
      x: a `jax.Array`, a `Layout`, a `NamedSharding` with `shape`, or a mesh; a tree of arrays,
        or with `shape` a (prefix) tree of layouts; or the `traffic` of a plan.
      shape: for a layout, the shape to show [rank]; default: one index for each shard. For a tree
        of layouts, the tree of shapes: the result of `jax.eval_shape`, or arrays.

    Raises:
      UsageError: `x` is none of these, it is inside `jit`, or the shape does not fit.

    Example:
      >>> from shoal import Layout, Mesh
      >>> print(describe(Layout(Mesh({"data": 2, "model": 2}), None, "model"), shape=(4, 4)))
      [4, 4] as Layout(-, model @ data=2 model=2)
      ┌──────────────────────────────────┬─────┬─────┐
      │ dim 0 (whole) ↓  dim 1 (model) → │ 0:2 │ 2:4 │
      ├──────────────────────────────────┼─────┼─────┤
      │ 0:4                              │ 0,2 │ 1,3 │
      └──────────────────────────────────┴─────┴─────┘
      each block on 2 devices
    """
    if isinstance(x, Traffic):
        return described(draw_traffic(x))
    if isinstance(x, Mesh) or hasattr(x, "axis_types"):
        return described(draw_mesh(mesh_of("describe", x)))
    if isinstance(x, Layout):
        return described(draw_layout(x, shape))
    if not hasattr(x, "sharding") and not hasattr(x, "spec"):
        return described(draw_tree(_leaves(x, shape)))
    from shoal.arrays.bridge.sharding import layout_of, layout_of_sharding

    if not hasattr(x, "dtype"):
        rank = len(x.spec if shape is None else shape)
        return described(draw_layout(layout_of_sharding(x, rank), shape))
    if shape is not None and tuple(shape) != tuple(x.shape):
        raise UsageError(f"describe: the array has shape {tuple(x.shape)}, not {tuple(shape)}")
    itemsize = getattr(x.dtype, "itemsize", 0)
    return described(draw_layout(layout_of(x), x.shape, itemsize, name=str(x.dtype)))


def _leaves(tree: Any, shapes: Any) -> list[Placed]:
    """Return the leaves of a tree of arrays, or of one of layouts and one of shapes."""
    from shoal.arrays.placed import placed_leaves

    leaves = placed_leaves(tree, shapes)
    if leaves is None:
        raise UsageTypeError(_no_placement(tree))
    return [_placed(*leaf) for leaf in leaves]


def _placed(path: str, value: Any, layout: Layout | None) -> Placed:
    dtype = getattr(value, "dtype", type(value).__name__)
    shape = tuple(getattr(value, "shape", ()))
    return Placed(
        path, shape, dtype=str(dtype), item_bytes=getattr(dtype, "itemsize", 0), layout=layout
    )


def _no_placement(x: Any) -> str:
    kind, text = type(x).__name__, repr(x)
    if "Tracer" in kind:  # under `grad` its text contains all values
        return f"describe: {x.aval} is a value inside jit: the compiler has not placed it yet"
    is_short = len(text) <= 60 and "\n" not in text
    shown = text if is_short else with_article(kind)
    return (
        "describe takes arrays on devices, a Layout, a NamedSharding, a Mesh, or a tree of arrays "
        f"on devices or of layouts, not {shown}"
    )


# ---- A picture as a string that notebooks and interactive sessions display as the picture.


_WIDTH = 200  # if the output is not a terminal


class Described(str):
    """The text of a picture; displayed in a notebook without quotes and escaped newlines."""

    __slots__ = ("_svg",)

    _svg: str

    def __new__(cls, text: str, svg: str = "") -> Described:
        self = super().__new__(cls, text)
        self._svg = svg
        return self

    def _repr_html_(self) -> str | None:
        return self._svg or None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython has one for all strings
        printer.text(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Described, (str(self), self._svg)


def described(picture: Picture) -> str:
    """Return a picture as text, as wide as the terminal; 200 columns without one."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if is_terminal else _WIDTH
    return Described(to_text(picture, width), picture_svg(picture))


# ---- Picture of a tree of arrays: the layout, bytes per device and replication of each leaf.


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
    return Picture(f"{counted(len(leaves), 'leaf', 'leaves')} on {on}", [panel], notes)


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
