"""The placement of each leaf of a tree, for pictures."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path, treedef_is_leaf

from shoal.arrays.bridge.leaf_layouts import leaf_layouts
from shoal.arrays.bridge.sharding import layout_of
from shoal.errors import UsageError, raise_all
from shoal.plan.layout import Layout


def placed_leaves(tree: Any, shapes: Any) -> list[tuple[str, Any, Layout | None]] | None:
    """Return the path, value and layout of each leaf; None if nothing has a layout.

    Args:
      tree: a tree of arrays (host arrays have no layout), or of layouts.
      shapes: for a tree of layouts, the corresponding tree of shapes.

    Raises:
      UsageError: the trees do not fit, or a layout does not fit its leaf.
    """
    if treedef_is_leaf(jax.tree.structure(tree)):
        return None
    if shapes is not None:
        problems: list[str] = []
        leaves, _ = leaf_layouts(shapes, tree, problems, is_plan=True)
        raise_all("describe", problems)
        named = zip(_paths(shapes), leaves, strict=True)
        return [(path, leaf.value, leaf.layout) for path, leaf in named]
    values = jax.tree.leaves(tree)
    if any(isinstance(value, Layout) or hasattr(value, "spec") for value in values):
        raise UsageError(
            "describe: a tree of layouts has no sizes; pass the tree of shapes, too: "
            "describe(layouts, jax.eval_shape(…))"
        )
    layouts = [layout_of(value) if hasattr(value, "sharding") else None for value in values]
    if not any(layouts):
        return None
    return list(zip(_paths(tree), values, layouts, strict=True))


def _paths(tree: Any) -> list[str]:
    pairs, _ = tree_flatten_with_path(tree)
    return [keystr(path, simple=True, separator="/") for path, _ in pairs]
