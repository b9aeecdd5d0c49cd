"""Arrays → the same values in another layout."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import concrete_or_error
from jax.sharding import NamedSharding, PartitionSpec

from shoal.arrays.layouts import Layouts, Leaf, cannot_be_pending, leaf_layouts, must_divide
from shoal.arrays.relabel import relabelled
from shoal.arrays.sharding import sharding
from shoal.colour import collective
from shoal.errors import raise_all

__all__ = ["relayout"]


@collective("the processes of both meshes")
def relayout(tree: Any, layouts: Layouts, *, donate: bool = False) -> Any:
    """Return a tree of arrays with the same values in other layouts.

    Collective over the processes of both meshes.

    Any layout to any layout of the same devices, in any order and under any axes; between
    different devices as long as one process owns them all. Arrays that lie right already are not
    copied. Differentiable: cotangents travel the way back. Inside `jit` use `constrain`.

    Args:
      tree: jax.Arrays. A pending sum is carried out.
      layouts: one layout, or a prefix tree of them, as for `put`.
      donate: give up the arrays, so that their memory can be used again; those that need not
        move stay valid.

    Returns:
      the tree, with the arrays in their new layouts.

    Raises:
      UsageError: ranks that do not match, dims that do not divide evenly, values that are not on
        devices or are inside `jit`, devices of several processes that differ; all leaves at fault
        are named by path. On every process, before anything moves.

    Example:
      >>> import numpy as np, shoal
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> rows = shoal.put(np.ones((8, 8), np.float32), shoal.Layout(mesh, "x", None))
      >>> shoal.relayout(rows, shoal.Layout(mesh, None, "x")).sharding.spec
      P(None, 'x')
    """
    offences: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, offences)
    arrays = [_concrete(leaf, offences) for leaf in leaves]
    for leaf, array in zip(leaves, arrays, strict=True):
        must_divide(leaf, offences)
        cannot_be_pending(leaf, offences)
        if array is not None and (why := _obstacle(array, sharding(leaf.layout))):
            offences.append(f"{leaf.path}: {why}")
    raise_all("relayout", offences)
    return jax.tree.unflatten(treedef, _move(leaves, arrays, donate))


def _concrete(leaf: Leaf, offences: list[str]) -> jax.Array | None:
    """Return the array behind a leaf; under `grad` that is the primal value."""
    if not isinstance(leaf.value, jax.Array):
        kind = type(leaf.value).__name__
        offences.append(f"{leaf.path}: a {kind} is not on devices yet; put places host values")
        return None
    try:
        return concrete_or_error(None, leaf.value)
    except jax.errors.ConcretizationTypeError:
        offences.append(f"{leaf.path}: is a value inside jit or vmap; constrain pins it there")
        return None


def _obstacle(array: jax.Array, target: NamedSharding) -> str:
    """Return why an array cannot move, or an empty string; the same on every process."""
    here, there = array.sharding.device_set, target.device_set
    processes = sorted({device.process_index for device in here | there})
    if here == there or len(processes) == 1:
        return ""
    return (
        f"lies on {len(here)} devices and shall lie on {len(there)} others, of processes "
        f"{', '.join(map(str, processes))}; between processes arrays move only among the same "
        "devices; put places what each process holds"
    )


def _move(leaves: list[Leaf], arrays: list[Any], donate: bool) -> list[jax.Array]:
    moved: list[Any] = []
    waiting: dict[int, tuple[jax.Array, NamedSharding]] = {}
    for number, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        target = sharding(leaf.layout)
        traced = isinstance(leaf.value, jax.core.Tracer)
        if array.sharding == target:
            moved.append(leaf.value)
        elif not traced and (same := relabelled(array, target)) is not None:
            moved.append(same)
        elif not target.addressable_devices and not array.addressable_shards:
            moved.append(
                jax.make_array_from_single_device_arrays(array.shape, target, [], dtype=array.dtype)
            )
        else:
            moved.append(None)
            waiting[number] = _summed(leaf.value, array), target
    sources = [source for source, _ in waiting.values()]
    targets = [target for _, target in waiting.values()]
    for number, array in zip(waiting, jax.device_put(sources, targets, donate=donate), strict=True):
        moved[number] = array
    return moved


def _summed(value: jax.Array, array: jax.Array) -> jax.Array:
    """Carry out a pending sum where the array lies: `device_put` cannot."""
    lies = array.sharding
    if not isinstance(lies, NamedSharding) or not lies.spec.unreduced:
        return value
    return jax.reshard(value, NamedSharding(lies.mesh, PartitionSpec(*lies.spec.partitions)))
