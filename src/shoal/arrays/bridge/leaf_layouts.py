"""Resolve layouts as the user gives them into one Layout for each leaf of a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef, SequenceKey, keystr, tree_flatten_with_path

from shoal.arrays.bridge.layout_functions import wrong_arguments
from shoal.arrays.bridge.sharding import layout_of_sharding, padded_dims, sharding_of, spec_of
from shoal.arrays.bridge.use_mesh import default_mesh, on_current_mesh
from shoal.errors import UsageError, nearest, with_article
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh, mesh_of

Layouts = Any
"""A layout, or a prefix tree of them: NamedSharding; PartitionSpec, a tuple of axis names and None,
one name, or None (with the mesh in force); Layout; a mesh (replicated on it); or a function of a
path and a leaf that returns one.
"""

Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """A leaf of a tree and its target layout."""

    path: str
    value: Any
    layout: Layout
    given: NamedSharding | PartitionSpec | None = None  # what the caller wrote, in JAX's types

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of an array on the target."""
        if isinstance(self.given, NamedSharding):
            return self.given
        if self.given is None:
            return sharding_of(self.layout)
        return _with_spec(self.layout, self.given)

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec of `sharding`."""
        if isinstance(self.given, PartitionSpec):
            return self.given
        return spec_of(self.layout) if self.given is None else self.given.spec

    def on(self, layout: Layout) -> Leaf:
        """Return the leaf with another target."""
        return Leaf(self.path, self.value, layout)


@lru_cache(maxsize=4096)
def _with_spec(layout: Layout, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(sharding_of(layout).mesh, spec)


def leaf_layouts(
    tree: Any,
    layouts: Layouts,
    problems: list[str],
    *,
    none_clears: bool = False,
    is_plan: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[list[Leaf], PyTreeDef]:
    """Pair every leaf of `tree` with its layout; append all problems to `problems`.

    Trailing dims may be left out, as in JAX. `None` splits nothing, or with `none_clears` is the
    layout None. With `is_plan` the devices need not exist; else `devices` are those searched for
    the meshes'; None: those of this job.
    """
    pairs: list[tuple[Path, Any, Any]] = []
    try:
        _pair(node=tree, given=layouts, path=(), pairs=pairs, problems=problems)
    except ValueError as error:
        raise UsageError(not_a_tree(error)) from error
    leaves: list[Leaf] = []
    names: dict[str, list[str]] = {}  # problem → names of the leaves that have it
    for path, value, given in pairs:
        if given is None and none_clears:
            leaves.append(Leaf(path_text(path), value, None))  # type: ignore[arg-type]
            continue
        try:
            leaf = leaf_for(given, value, path)
            if not is_plan:
                sharding_of(leaf.layout, devices=devices)  # checks devices and expressibility
            leaves.append(leaf)
        except UsageError as error:
            names.setdefault(str(error), []).append(path_text(path))
    problems += [f"{', '.join(paths)}: {error}" for error, paths in names.items()]
    return leaves, jax.tree.structure(tree)


def not_a_tree(error: ValueError) -> str:
    """Return what is wrong with a tree that JAX cannot flatten, and what to write."""
    return f"not a pytree: {error.__cause__ or error}; give all keys of a dict one type"


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
            for index, (value, own) in enumerate(zip(node, given, strict=True)):
                _pair(
                    node=value,
                    given=own,
                    path=(*path, SequenceKey(index)),
                    pairs=pairs,
                    problems=problems,
                )
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
    wanted, present = _children(given), _children(node)
    if wanted is None:
        is_swapped = isinstance(node, Layout | Sharding | PartitionSpec) or is_mesh(node)
        why = "the values come first, then their layouts" if is_swapped else not_a_layout(given)
        problems.append(f"{path_text(path)}: {why}")
    elif present is None:
        problems.append(
            f"{path_text(path)}: one {_what(node)} here, but "
            f"{with_article(type(given).__name__)} of layouts; write one layout "
            "(a tuple of axis names, not a list)"
        )
    else:
        no_leaf = [key for key in wanted if key not in present]
        no_layout = [
            key for key in present if key not in wanted and jax.tree.leaves(present[key][1])
        ]
        for key in no_leaf:
            near = nearest(_bare(key), map(_bare, no_layout))
            problems.append(f"{keystr(path)}{key}: a layout, but no leaf{near}")
        for key in no_layout:
            near = nearest(_bare(key), map(_bare, no_leaf))
            problems.append(f"{keystr(path)}{key}: a leaf, but no layout{near}")
        for key, (step, value) in present.items():
            if key in wanted:
                _pair(
                    node=value,
                    given=wanted[key][1],
                    path=path + step,
                    pairs=pairs,
                    problems=problems,
                )


def not_a_layout(given: Any) -> str:
    """Return what is wrong with a value that is no layout, and what to write."""
    text = f"{_what(given)} is not a layout"
    if isinstance(given, jax.Array | jax.ShapeDtypeStruct):
        return f"{text}; pass its .sharding"
    return f"{text}; pass a NamedSharding, a PartitionSpec or a Layout"


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
    if isinstance(given, None | Format | Layout | Sharding | PartitionSpec | str) or is_mesh(given):
        return True
    if type(given) is tuple:
        return all(map(_is_dim, given))
    return is_layout_function(given) and _children(given) is None


def is_mesh(given: Any) -> bool:
    """True for a mesh, which as a layout means: replicated on it."""
    return isinstance(given, Mesh | jax.sharding.Mesh)


def is_layout_function(given: Any) -> bool:
    """True for a function of layouts. JAX's meshes and specs can be called as decorators, too."""
    return callable(given) and not is_mesh(given)


def sharding_in(given: Format) -> Any:
    """Return the sharding of a Format whose dims are in memory as JAX itself orders them.

    Raises:
      UsageError: they are in another order, which shoal would not keep.
    """
    order = getattr(given.layout, "major_to_minor", None)
    tiling = getattr(given.layout, "tiling", None)
    if given.sharding is None or order is None or tiling or order != (*range(len(order)),):
        raise UsageError(f"{_what(given)} sets an order in memory; pass its .sharding")
    return given.sharding


def _is_dim(dim: Any) -> bool:
    if type(dim) is tuple:
        return all(isinstance(axis, str) for axis in dim)
    return dim is None or isinstance(dim, str)


def axes_of(dim: Any) -> tuple[str, ...]:
    """Return the axes of one entry of a spec: None, a name, or a tuple of names."""
    if isinstance(dim, str):
        return (dim,)
    return tuple(dim or ())


def _is_ambiguous(node: Any, given: Any) -> bool:
    """Could a tuple mean one layout or one per element of a tuple, with different results?"""
    if not (type(given) is type(node) is tuple and len(given) == len(node)):
        return False
    return any(given) and not (len(given) == 1 and isinstance(given[0], str))


def _names_twice(given: tuple[Any, ...]) -> bool:
    """True for dims that name an axis twice: they are several layouts, not one."""
    axes = [axis for dim in given for axis in axes_of(dim)]
    return len({*axes}) < len(axes)


def _spec_text(given: Any) -> str:
    """Return the arguments of the PartitionSpec equivalent to one layout."""
    return ", ".join(map(repr, _dims(given)))


def layout_for(given: Any, value: Any, path: Path) -> Layout:
    """Return the layout of `leaf_for`."""
    return leaf_for(given, value, path).layout


def leaf_for(given: Any, value: Any, path: Path) -> Leaf:
    """Resolve the layout of one leaf from a value for which `is_one_layout` is true.

    Raises:
      UsageError: it is not a layout for a leaf of this rank, or there is no mesh.
    """
    rank = np.ndim(value)
    if is_layout_function(given):
        why = wrong_arguments(given, "the leaf")
        if why:
            raise UsageError(why)
        given = given(keystr(path, simple=True, separator="/"), value)
        if not is_one_layout(given) or is_layout_function(given):
            raise UsageError(f"the function of layouts returned {given!r}, which is not a layout")
    name = path_text(path)
    if isinstance(given, Format):
        given = sharding_in(given)
    if is_mesh(given):
        whole = Layout.replicated(mesh_of("Layout", given), rank)
        return Leaf(name, value, whole, PartitionSpec())
    if isinstance(given, Layout):
        layout = padded(given, rank)
        layout.check_shape(np.shape(value))
        return Leaf(name, value, layout, spec_of(given))
    if isinstance(given, NamedSharding):
        given = on_current_mesh(given)
    if isinstance(given, Sharding):
        layout = _of_sharding(given, rank)
        return Leaf(name, value, layout, given if isinstance(given, NamedSharding) else None)
    spec = given if isinstance(given, PartitionSpec) else PartitionSpec(*_dims(given))
    partial = dict.fromkeys(spec.unreduced, "sum")
    layout = Layout(mesh_in_force(given), *padded_dims(spec, rank), partial=partial)
    return Leaf(name, value, layout, spec)


def dims_of(given: Any) -> tuple[Any, ...]:
    """Return the dims that one layout, which is no function, writes down."""
    given = getattr(given, "sharding", given)  # of a Format
    if isinstance(given, Layout):
        return given.dims
    spec = getattr(given, "spec", given)
    if isinstance(spec, PartitionSpec):
        return tuple(spec.partitions)
    if is_mesh(spec) or isinstance(spec, Sharding):
        return ()
    return _dims(spec)


def whole_rows(layouts: Layouts) -> list[str]:
    """Report the meshes among layouts of rows, of which each process gives its own."""
    return [
        f"{one!r} as a layout gives every device every row; pass NamedSharding(mesh, P(axis)) with "
        "the axis of the rows, or P() for one value that all processes hold"
        for one in jax.tree.leaves(layouts, is_leaf=is_one_layout)
        if is_mesh(one)
    ]


def meshes_in(layouts: Any) -> Iterator[Mesh]:
    """Yield the meshes that layouts name."""
    for given in jax.tree.leaves(layouts, is_leaf=is_one_layout):
        if isinstance(given, NamedSharding):
            given = on_current_mesh(given)
        if isinstance(given, Layout | NamedSharding):
            yield mesh_of("Layout", given.mesh)
        elif is_mesh(given):
            yield mesh_of("Layout", given)


def padded(layout: Layout, rank: int) -> Layout:
    """Return a layout with the dims that it leaves out, which are whole."""
    missing = rank - layout.rank
    if missing <= 0:
        return layout
    return Layout(layout.mesh, *layout.dims, *[None] * missing, partial=layout.partial)


def mesh_in_force(given: object) -> Mesh:
    """Return the mesh for a layout that names none.

    Raises:
      UsageError: there is none.
    """
    mesh = default_mesh()
    if mesh is None:
        raise UsageError(
            f"{given!r} needs a mesh: pass NamedShardings, as shoal.named_sharding(tree, mesh) "
            "makes of specs, or call this inside `with use_mesh(mesh):`"
        )
    return mesh


def _dims(given: str | tuple[Any, ...] | None) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else given


def _of_sharding(given: Sharding, rank: int) -> Layout:
    layout = layout_of_sharding(given, rank)
    kind = given.memory_kind
    if kind is None:
        return layout
    platform = next(iter(given.device_set)).platform
    try:
        own = jax.local_devices(backend=platform)  # all processes must agree to refuse
        kinds = {device.default_memory().kind for device in own}
    except RuntimeError:  # not present: described devices do not report it
        kinds = {"device"}
    if kind not in kinds:
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
    return f"{kind} {text}" if len(text) <= 60 else f"{kind} {text[:59]}…"
