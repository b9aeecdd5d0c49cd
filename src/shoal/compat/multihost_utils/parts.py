"""Per-process arrays ⇄ global arrays, by a mesh and PartitionSpecs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shoal.arrays.bridge.leaf_layouts import Leaf, leaf_layouts
from shoal.arrays.bridge.sharding import named_sharding
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.host_local.host_local import from_host_local, to_host_local
from shoal.arrays.host_local.parts import lies_elsewhere, own_box, seen
from shoal.arrays.moving.move import relabelled
from shoal.arrays.moving.relayout import relayout
from shoal.collectives.leaves import is_global
from shoal.colour import collective, logically_collective
from shoal.compat.wording import errors_named
from shoal.errors import UsageError, raise_all
from shoal.runtime import process

__all__ = ["global_array_to_host_local_array", "host_local_array_to_global_array"]


Tree = Any
PSpecs = Any
"""A `jax.sharding.PartitionSpec`, or a prefix tree of them."""

_NO_NONE = (
    "`None` is not a valid input to the pspecs argument. Please use jax.sharding.PartitionSpec() "
    "if you wanted to replicate your input."
)


@logically_collective("shapes, dtypes, pspecs and what processes hold in common")
def host_local_array_to_global_array(
    local_inputs: Tree, global_mesh: jax.sharding.Mesh, pspecs: PSpecs
) -> Tree:
    """Return global arrays assembled from each process's part: `shoal.from_host_local`.

    Logically collective: shapes, dtypes, pspecs and what processes hold in common must be equal.

    Differentiable and batched. Inside `jit`, where every array is global, values pass through
    unchanged; a pspec by which processes would each give a part is refused.

    Args:
      local_inputs: this process's parts: NumPy arrays, numbers, PRNG keys, jax.Arrays on its own
        devices. Arrays that are global already pass through, in any layout.
      global_mesh: a mesh of JAX or shoal; the devices of each process are one block of it.
      pspecs: PartitionSpecs; dims that they leave out are not split.

    Returns:
      the tree, with global jax.Arrays. 64-bit values are narrowed as by `shoal.put`.

    Raises:
      UsageError: a pspec is None; inside `jit`, a pspec that processes split; and as
        `shoal.from_host_local`. All leaves at fault are named by path.
      InitializeError: this process is one of several, and has not joined them.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(jax.devices(), "x")
    >>> host_local_array_to_global_array(np.arange(8), mesh, jax.P("x")).sharding.spec
    P('x',)
    """
    process.last_coordinator()
    with errors_named("host_local_array_to_global_array"), use_mesh(global_mesh):
        layouts = _layouts(pspecs)
        if _passes(local_inputs, layouts):
            return local_inputs
        whole = from_host_local(jax.tree.map(_with_bits, local_inputs), layouts)
    return jax.tree.map(_spelled, pspecs, local_inputs, whole, is_leaf=_is_none)


@collective("the processes of arrays in other layouts than pspecs")
def global_array_to_host_local_array(
    global_inputs: Tree, global_mesh: jax.sharding.Mesh, pspecs: PSpecs
) -> Tree:
    """Return this process's parts of global arrays: `shoal.to_host_local`.

    Collective over the processes of arrays in other layouts than pspecs.

    These are moved first, by `shoal.relayout`. The others are neither sent nor copied.
    Differentiable and batched. Inside `jit`, like `host_local_array_to_global_array`.

    Args:
      global_inputs: global jax.Arrays. Local arrays pass through.
      global_mesh: a mesh of JAX or shoal; the devices of each process are one block of it.
      pspecs: PartitionSpecs; dims that they leave out are not split.

    Returns:
      the tree, with jax.Arrays on this process's devices.

    Raises:
      UsageError: a pspec is None; inside `jit`, one that processes split; as
        `shoal.to_host_local`, and as `shoal.relayout`. All leaves at fault are named by path.
      InitializeError: as `host_local_array_to_global_array`.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(jax.devices(), "x")
    >>> whole = host_local_array_to_global_array(np.arange(8), mesh, jax.P("x"))
    >>> global_array_to_host_local_array(whole, mesh, jax.P("x")).is_fully_addressable
    True
    """
    process.last_coordinator()
    with errors_named("global_array_to_host_local_array"), use_mesh(global_mesh):
        layouts = _layouts(pspecs, is_global_kept=False)
        if _passes(global_inputs, layouts):
            return global_inputs
        own = to_host_local(_in_place(global_inputs, layouts), layouts)
    return jax.tree.map(_spelled, pspecs, global_inputs, own, is_leaf=_is_none)


def _with_bits(value: Any) -> Any:
    """Return the tangent of an integer, which has no bits, as zeros of bool; others unchanged."""
    if getattr(value, "dtype", None) == jax.dtypes.float0:
        return np.zeros(value.shape, np.bool_)
    return value


def _layouts(pspecs: PSpecs, *, is_global_kept: bool = True) -> Any:
    """Return a function from leaf to layout; None is refused, as in JAX."""
    return jax.tree.map(
        lambda spec: partial(_layout, spec, is_global_kept), pspecs, is_leaf=_is_none
    )


def _is_none(spec: Any) -> bool:
    return spec is None


def _layout(spec: Any, is_global_kept: bool, path: str, leaf: Any) -> Any:
    if spec is None:
        raise UsageError(_NO_NONE)
    value = seen(leaf)
    return value.sharding if is_global_kept and is_global(value) else _cut(spec, np.ndim(leaf))


def _cut(spec: Any, rank: int) -> Any:
    """Return a spec without trailing entries beyond the rank that split nothing, as JAX allows."""
    if not isinstance(spec, PartitionSpec) or len(spec) <= rank or spec[-1] is not None:
        return spec
    return _cut(PartitionSpec(*spec[:-1], unreduced=spec.unreduced, reduced=spec.reduced), rank)


def _passes(tree: Tree, layouts: Any) -> bool:
    """Are these values inside `jit`, and not split between processes? They are not converted."""
    if not is_tracing():
        return False
    problems: list[str] = []
    leaves, _ = leaf_layouts(tree, layouts, problems)
    raise_all("inside jit", problems)
    return not any(set(own_box(leaf.layout).boxes) - {1} for leaf in leaves)


def _spelled(spec: Any, given: Tree, made: Tree) -> Tree:
    """Return the arrays with the PartitionSpec exactly as the caller wrote it, as JAX does."""
    return jax.tree.map(partial(_spelled_leaf, spec), given, made)


def _spelled_leaf(spec: Any, given: Any, made: Any) -> Any:
    if not isinstance(made, jax.Array) or isinstance(made, jax.core.Tracer) or made is given:
        return made
    if isinstance(given, jax.Array) and made.shape == given.shape:
        if made.sharding.is_equivalent_to(given.sharding, made.ndim):
            return given  # passed through
    if not isinstance(spec, PartitionSpec):
        return made
    return relabelled(made, NamedSharding(made.sharding.mesh, _cut(spec, made.ndim)))


def _in_place(tree: Tree, layouts: Any) -> Tree:
    """Return the tree, moving arrays that are in other layouts."""
    problems: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, problems)
    if problems:  # to_host_local reports them
        return tree
    values = {number: leaf.value for number, leaf in enumerate(leaves)}
    moving = {number: leaf.layout for number, leaf in enumerate(leaves) if _must_move(leaf)}
    if moving:
        values |= relayout({number: values[number] for number in moving}, moving)
    return jax.tree.unflatten(treedef, [values[number] for number in range(len(leaves))])


def _must_move(leaf: Leaf) -> bool:
    value = seen(leaf.value)
    if not isinstance(value, jax.Array) or value.is_deleted():
        return False
    is_here = value.sharding.device_set == named_sharding(leaf.layout).device_set
    return (is_here or is_global(value)) and bool(lies_elsewhere(value, leaf.layout))
