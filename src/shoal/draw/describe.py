"""Describe the placement of an array or a layout as text."""

from __future__ import annotations

from typing import Any

from shoal.colour import local
from shoal.draw.described import described
from shoal.draw.layout import draw_layout
from shoal.draw.mesh import draw_mesh
from shoal.draw.ribbons import draw_traffic
from shoal.draw.tree import Placed, draw_tree
from shoal.errors import UsageError, UsageTypeError, with_article
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
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
      x: a `jax.Array`, a `Layout`, a `NamedSharding` with `shape`, or a `Mesh`; a tree of arrays,
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
    if isinstance(x, Mesh):
        return described(draw_mesh(x))
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
    return Placed(path, shape, str(dtype), getattr(dtype, "itemsize", 0), layout)


def _no_placement(x: Any) -> str:
    kind, text = type(x).__name__, repr(x)
    if "Tracer" in kind:  # under `grad` its text contains all values
        return f"describe: {x.aval} is a value inside jit: the compiler has not placed it yet"
    shown = text if len(text) <= 60 and "\n" not in text else with_article(kind)
    return (
        "describe takes arrays on devices, a Layout, a NamedSharding, a Mesh, or a tree of arrays "
        f"on devices or of layouts, not {shown}"
    )
