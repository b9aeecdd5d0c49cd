"""Resolve layouts as the user gives them into one Layout for each leaf of a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import PyTreeDef, SequenceKey, keystr, tree_flatten_with_path

from shoal.arrays.bridge.layout_functions import wrong_arguments
from shoal.arrays.bridge.sharding import layout_of_sharding, named_sharding, padded_dims
from shoal.arrays.bridge.use_mesh import default_mesh
from shoal.errors import UsageError, nearest, with_article
from shoal.plan.layout import Layout

Layouts = Any
"""A layout, or a prefix tree of them: Layout, NamedSharding, PartitionSpec; a tuple of axis names
and None, one name, or None (with `use_mesh`); or a function of a path and a leaf that returns one.
"""

Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """A leaf of a tree and its target layout."""

    path: str
    value: Any
    layout: Layout


def leaf_layouts(
    tree: Any,
    layouts: Layouts,
    problems: list[str],
    *,
    none_clears: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[list[Leaf], PyTreeDef]:
    """Pair every leaf of `tree` with its layout; append all problems to `problems`.

    PartitionSpecs, tuples and names may omit trailing dims, as in JAX; Layouts have the rank of
    their leaves. `None` splits nothing, or with `none_clears` is the layout None. `devices` are
    those searched for the meshes' devices; None: those of this job.
    """
    pairs: list[tuple[Path, Any, Any]] = []
    _pair(tree, layouts, (), pairs, problems)
    leaves: list[Leaf] = []
    names: dict[str, list[str]] = {}  # problem → names of the leaves that have it
    for path, value, given in pairs:
        if given is None and none_clears:
            leaves.append(Leaf(path_text(path), value, None))  # type: ignore[arg-type]
            continue
        try:
            layout = layout_for(given, value, path)
            named_sharding(layout, devices=devices)  # checks devices and expressibility
            leaves.append(Leaf(path_text(path), value, layout))
        except UsageError as error:
            names.setdefault(str(error), []).append(path_text(path))
    problems += [f"{', '.join(paths)}: {error}" for error, paths in names.items()]
    return leaves, jax.tree.structure(tree)


def path_text(path: Path) -> str:
    """Return the name of a leaf in messages."""
    return keystr(path) or "the array"


def must_divide(leaf: Leaf, problems: list[str]) -> None:
    """Report each dim that its shards do not divide evenly: JAX stores no uneven shards."""
    shape = np.shape(leaf.value)
    for dim, size in enumerate(shape):
        count = leaf.layout.num_shards(dim)
        if size % count == 0:
            continue
        axes = " x ".join(f"{a}={leaf.layout.mesh.axes[a]}" for a in leaf.layout.axes_of_dims[dim])
        problems.append(
            f"{leaf.path}: dim {dim} of {shape} has size {size}, which {count} shards ({axes}) "
            f"do not divide; {fitting(size, count)} would fit"
        )


def fitting(size: int, count: int) -> str:
    """Name the sizes next to `size` that this many shards divide."""
    below, above = size // count * count, -(-size // count) * count
    return f"{below} or {above}" if below else f"{above}"


def cannot_be_pending(leaf: Leaf, problems: list[str]) -> None:
    """Report a leaf whose layout has pending reductions."""
    if leaf.layout.partial:
        axes = ", ".join(leaf.layout.partial)
        problems.append(
            f"{leaf.path}: {leaf.layout!r} is partial over {axes}; values are never partial: "
            "leave it out"
        )


def _pair(
    node: Any, given: Any, path: Path, pairs: list[tuple[Path, Any, Any]], problems: list[str]
) -> None:
    """Walk both trees together, down to where `given` is one layout."""
    if is_one_layout(given):
        if type(given) is type(node) is tuple and len(given) == len(node) and _names_twice(given):
            for number, (value, own) in enumerate(zip(node, given, strict=True)):
                _pair(value, own, (*path, SequenceKey(number)), pairs, problems)
            return
        if _is_ambiguous(node, given):
            each = ", ".join(f"PartitionSpec({_spec_text(own)})" for own in given)
            problems.append(
                f"{path_text(path)}: {given!r} may mean one layout, or one for each of {len(node)} "
                f"elements; write PartitionSpec{given!r} for the first, "
                f"({each}{',' * (len(given) == 1)}) for the other"
            )
            return
        for rest, value in tree_flatten_with_path(node)[0]:
            pairs.append((path + rest, value, given))
        return
    wanted, found = _children(given), _children(node)
    if wanted is None:
        what = _what(given)
        problems.append(f"{path_text(path)}: {what} is not a layout; pass a Layout or a spec")
    elif found is None:
        problems.append(
            f"{path_text(path)}: one {_what(node)} here, but "
            f"{with_article(type(given).__name__)} of layouts; write one layout "
            "(a tuple of axis names, not a list)"
        )
    else:
        no_leaf = [key for key in wanted if key not in found]
        no_layout = [key for key in found if key not in wanted and jax.tree.leaves(found[key][1])]
        for key in no_leaf:
            near = nearest(_bare(key), map(_bare, no_layout))
            problems.append(f"{keystr(path)}{key}: a layout, but no leaf{near}")
        for key in no_layout:
            near = nearest(_bare(key), map(_bare, no_leaf))
            problems.append(f"{keystr(path)}{key}: a leaf, but no layout{near}")
        for key, (step, value) in found.items():
            if key in wanted:
                _pair(value, wanted[key][1], path + step, pairs, problems)


def _children(node: Any) -> Mapping[str, tuple[Path, Any]] | None:
    """Return key text → (path, child) of a container, or None for a leaf."""
    pairs, _ = tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return {keystr(path): (path, child) for path, child in pairs}


def _bare(key: str) -> str:
    """['w'] → w: brackets and quotes make all short keys look alike."""
    return key.strip(".[]'\"")


def is_one_layout(given: Any) -> bool:
    """True if `given` is one layout for everything below."""
    if given is None or isinstance(given, Layout | Sharding | PartitionSpec | str):
        return True
    if type(given) is tuple:
        return all(map(_is_dim, given))
    if isinstance(given, jax.sharding.Mesh):  # callable, as a decorator
        return False
    return isinstance(given, Callable) and _children(given) is None  # type: ignore[arg-type]


def _is_dim(dim: Any) -> bool:
    if type(dim) is tuple:
        return all(isinstance(axis, str) for axis in dim)
    return dim is None or isinstance(dim, str)


def _is_ambiguous(node: Any, given: Any) -> bool:
    """Could a tuple mean one layout or one per element of a tuple, with different results?"""
    if not (type(given) is type(node) is tuple and len(given) == len(node)):
        return False
    return any(given) and not (len(given) == 1 and isinstance(given[0], str))


def _names_twice(given: tuple[Any, ...]) -> bool:
    """True for dims that name an axis twice: they are several layouts, not one."""
    axes = [axis for dim in given for axis in ((dim,) if isinstance(dim, str) else dim or ())]
    return len({*axes}) < len(axes)


def _spec_text(given: Any) -> str:
    """Return the arguments of the PartitionSpec equivalent to one layout."""
    return ", ".join(map(repr, _dims(given)))


def layout_for(given: Any, value: Any, path: Path) -> Layout:
    """Resolve the layout of one leaf from a value for which `is_one_layout` is true.

    Raises:
      UsageError: it is not a layout for a leaf of this rank, or there is no mesh.
    """
    rank = np.ndim(value)
    if callable(given):
        if why := wrong_arguments(given, "the leaf"):
            raise UsageError(why)
        given = given(keystr(path, simple=True, separator="/"), value)
        if not is_one_layout(given) or callable(given):
            raise UsageError(f"the function of layouts returned {given!r}, which is not a layout")
    if isinstance(given, Layout):
        given.check_shape(np.shape(value))
        return given
    if isinstance(given, Sharding):
        return _of_sharding(given, rank)
    mesh = default_mesh()
    if mesh is None:
        raise UsageError(
            f"{given!r} needs a mesh: pass a Layout, or call this inside `with use_mesh(mesh):`"
        )
    spec = given if isinstance(given, PartitionSpec) else PartitionSpec(*_dims(given))
    partial = dict.fromkeys(spec.unreduced, "sum")
    return Layout(mesh, *padded_dims(spec, rank), partial=partial)


def _dims(given: str | tuple[Any, ...] | None) -> tuple[Any, ...]:
    return () if given is None else (given,) if isinstance(given, str) else given


def _of_sharding(given: Sharding, rank: int) -> Layout:
    layout = layout_of_sharding(given, rank)
    kind = given.memory_kind
    platform = next(iter(given.device_set)).platform
    try:
        own = jax.local_devices(backend=platform)  # all processes must agree to refuse
        kinds = {device.default_memory().kind for device in own}
    except RuntimeError:  # not present: described devices do not report it
        kinds = {"device"}
    if kind is not None and kind not in kinds:
        raise UsageError(
            f"memory kind {kind!r}: shoal's arrays live in device memory; pass the layout without "
            "it, and move the result by jax.device_put(…, this sharding)"
        )
    return layout


def _what(value: Any) -> str:
    """Return a short one-line text of a value."""
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{kind} {value.dtype}{list(value.shape)}"
    text = " ".join(repr(value).split())
    return f"{kind} {text if len(text) <= 60 else text[:59] + '…'}"
