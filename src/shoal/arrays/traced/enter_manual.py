"""Whole arrays → shards of this process's devices → whole arrays, as a pair of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.leaf_layouts import Layouts, leaf_layouts
from shoal.arrays.host.host_values import deleted
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.moving.agreed_move import fail_move
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.pack import pack, unpack
from shoal.colour import collective, logically_collective
from shoal.errors import UsageError, UsageTypeError, raise_all, with_article
from shoal.plan.mesh import Mesh
from shoal.runtime.client.lanes import refused_for_all


@collective("the processes of both meshes")
@refused_for_all(fail_move)
def enter_manual(tree: Any, layouts: Layouts) -> list[Any]:
    """Return the shards of arrays on each of this process's devices, to compute on by hand.

    Collective over the processes of both meshes.

    Arrays in other layouts are moved first (`relayout`); then this is `unpack`, so that
    nothing is copied. Code that works on one shard runs once for each: on that shard's device, and
    concurrently, since JAX dispatches asynchronously. Shards are independent: for
    collectives, derivatives, or inside `jit` use `manual(fn, in_layouts, out_layouts)`.

    Args:
      tree: jax.Arrays.
      layouts: one layout, or a prefix tree of them, as for `put`.

    Returns:
      For each device of the mesh that this process owns, in mesh order, its shard: a jax.Array on
      that device, or a tree of them. With one device for each process, a list of one.

    Raises:
      UsageError: as for `relayout`; inside `jit`, `grad` or `vmap`. On every process.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> rows = NamedSharding(mesh, P("x"))
      >>> x = shoal.put(np.ones((2 * mesh.size, 3), np.float32), rows)
      >>> shards = [shard * 2 for shard in shoal.compat.enter_manual(x, rows)]
      >>> shards[0].shape
      (2, 3)
      >>> shoal.compat.leave_manual(shards, rows, x.shape).sharding.is_equivalent_to(rows, 2)
      True
    """
    _refuse("enter_manual", tree)
    return unpack(relayout(tree, layouts))


@logically_collective("shapes and dtypes of shards, and layouts,")
def leave_manual(
    shards: Sequence[Any], layouts: Layouts, full_shape: Any, *, like: Any = None
) -> Any:
    """Assemble whole arrays from one shard per device; undoes `enter_manual`.

    Logically collective: shapes and dtypes of shards, and layouts, must be equal.

    This is `pack`, with a check of the result's shape: a shard of another size never silently makes
    an array of another size. Nothing is copied or sent.

    Args:
      shards: for each device of the mesh that this process owns, in mesh order, its shard, or a
        tree of them; all of one shape.
      layouts: one layout, or a prefix tree of them, as for `put`.
      full_shape: the shape of the whole array, or a tree of shapes.
      like: one shard, as `jax.ShapeDtypeStruct`s; needed only where this process owns no device.

    Returns:
      The array, or the tree of arrays.

    Raises:
      UsageError: shards that do not make up `full_shape` or lie on a device that another one
        stands for, and as for `pack`; inside `jit`, `grad` or `vmap`. All leaves at fault by path.
    """
    _refuse("leave_manual", shards)
    if not isinstance(shards, list | tuple):
        raise UsageTypeError(
            f"leave_manual: the shards must be a list, not {with_article(type(shards).__name__)}"
        )
    if shards or like is not None:
        _check(shards, shards[0] if shards else like, layouts, full_shape)
    return pack(shards, layouts, like=like)


def _refuse(operation: str, tree: Any) -> None:
    """Raise inside a trace: a single shard is not a value of a program on all devices."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
    if traced or is_tracing():
        raise UsageError(
            f"{operation}: inside jit, grad and vmap code runs per device as a function: write "
            "manual(fn, in_layouts, out_layouts)"
        )


def _check(shards: Sequence[Any], shard: Any, layouts: Layouts, full_shape: Any) -> None:
    problems: list[str] = []
    leaves, treedef = leaf_layouts(shard, layouts, problems)
    raise_all("leave_manual", problems)
    try:
        wanted = treedef.flatten_up_to(full_shape)
    except ValueError as error:
        raise UsageError(
            f"leave_manual: full_shape={full_shape!r} does not have one shape for each leaf: "
            f"{str(error).splitlines()[0]}"
        ) from None
    for index, each in enumerate(shards):
        for path, leaf in jax.tree_util.tree_flatten_with_path(each)[0]:
            why = deleted(leaf) if isinstance(leaf, jax.Array) else ""
            if why:
                name = f"{jax.tree_util.keystr(path)}: " if path else ""
                problems.append(f"shard {index}: {name}{why}")
    raise_all("leave_manual", problems)
    for leaf, shape in zip(leaves, wanted, strict=True):
        full = leaf.layout.check_shape(shape)
        held = np.shape(leaf.value)
        made = leaf.layout.global_shape(held)
        if made != full:
            problems.append(
                f"{leaf.path}: shards of {held} in {leaf.layout!r} make {made}, not {full}"
            )
    for mesh in {leaf.layout.mesh for leaf in leaves}:
        problems += _elsewhere(shards, mesh)
    raise_all("leave_manual", problems)


def _elsewhere(shards: Sequence[Any], mesh: Mesh) -> list[str]:
    """Name the shards on a device that belongs to another shard: they are out of order."""
    owner = jax.process_index()
    own = [device for device in jax_mesh(mesh).devices.flat if device.process_index == owner]
    problems = []
    for index, (shard, device) in enumerate(zip(shards, own, strict=False)):
        devices = {d for leaf in jax.tree.leaves(shard) if _is_placed(leaf) for d in leaf.devices()}
        away = sorted(d.id for d in devices & {*own} if d != device)
        if away:
            problems.append(
                f"shard {index} is on device {away[0]}, in the place of the shard of "
                f"device {device.id}; keep the order of enter_manual"
            )
    return problems


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed
