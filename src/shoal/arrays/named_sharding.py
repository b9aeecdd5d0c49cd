"""Layouts and specs → `jax.sharding.NamedSharding`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shoal.arrays.bridge.devices import listed_devices
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    dims_of,
    is_layout_function,
    is_mesh,
    is_one_layout,
    leaf_for,
    not_a_layout,
    path_text,
)
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.bridge.use_mesh import AnyMesh, use_mesh
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, raise_all
from shoal.plan.layout import Layout
from shoal.plan.mesh import mesh_of


@local
def named_sharding(
    layouts: Layouts, mesh: AnyMesh | None = None, *, devices: Sequence[jax.Device] | None = None
) -> Any:
    """Return the JAX sharding for each layout of a tree.

    Local.

    For `jit`, `device_put` and all that takes JAX's shardings. Equal layouts give the same object,
    and `layout_of(named_sharding(layout)) == layout` but for the label of the mesh, which JAX's
    meshes lack.

    Args:
      layouts: a layout, or a tree of them: PartitionSpecs, such as those of
        `nnx.get_partition_spec` and linen's; Layouts; a mesh (replicated on it). None is `P()`.
        NamedShardings are kept.
      mesh: the mesh of the specs; None: the one in force (`use_mesh`).
      devices: the devices to search for the meshes', such as those of a described TPU slice
        (`jax.experimental.topologies.get_topology_desc(…).devices`), to compile for absent
        hardware. None: those of this job.

    Returns:
      The tree, with a NamedSharding for each layout.

    Raises:
      UsageError: what is no layout, specs without a mesh, axes that the mesh does not have, devices
        that do not exist, pending reductions that JAX cannot express (it has sums over Explicit
        axes, which it calls *unreduced*). All offending leaves are named by path.

    Example:
      >>> import jax, shoal
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> shoal.named_sharding({"w": jax.P("x"), "b": None}, mesh)["w"].spec
      P('x',)
    """
    among = listed_devices("named_sharding", devices)
    if isinstance(mesh, PartitionSpec) and is_mesh(layouts):
        raise UsageTypeError("named_sharding: the mesh comes second: named_sharding(specs, mesh)")
    with nullcontext() if mesh is None else use_mesh(mesh_of("named_sharding", mesh)):
        if isinstance(layouts, Layout):
            return sharding_of(layouts, devices=among)
        return _shardings(layouts, among)


def _shardings(layouts: Layouts, among: tuple[jax.Device, ...] | None) -> Any:
    problems: list[str] = []
    pairs, treedef = jax.tree_util.tree_flatten_with_path(layouts, is_leaf=is_one_layout)
    shardings = []
    for path, given in pairs:
        try:
            shardings.append(_sharding(given, among))
        except UsageError as error:
            problems.append(f"{path_text(path)}: {error}" if path else str(error))
    raise_all("named_sharding", problems)
    return jax.tree.unflatten(treedef, shardings)


def _sharding(given: Any, among: tuple[jax.Device, ...] | None) -> NamedSharding:
    if not is_one_layout(given) or is_layout_function(given):
        raise UsageError(not_a_layout(given))
    if isinstance(given, NamedSharding):
        return given
    shape = jax.ShapeDtypeStruct((0,) * len(dims_of(given)), np.int8)
    leaf = leaf_for(given, shape, ())
    if among is None:
        return leaf.sharding
    sharding = sharding_of(leaf.layout, devices=among)
    if isinstance(leaf.given, PartitionSpec):
        return NamedSharding(sharding.mesh, leaf.given)
    return sharding
