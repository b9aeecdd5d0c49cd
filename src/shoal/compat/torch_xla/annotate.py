"""Sharding annotations: arrays in the layout of a mesh and a partition spec."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax

from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.shard_alike import shard_alike
from shoal.colour import collective, traced
from shoal.compat.torch_xla.errors import stands_for
from shoal.compat.torch_xla.mesh import Mesh, get_global_mesh
from shoal.compat.torch_xla.placing import fitted, placed
from shoal.compat.torch_xla.sharded import XLAShardedTensor, unwrap_sharded_tensor

__all__ = [
    "MarkShardingFunction",
    "annotate_custom_sharding",
    "clear_sharding",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "shard_as",
]


@stands_for("shoal.put")
@collective("the mesh's processes")
def mark_sharding(
    t: Any, mesh: Mesh, partition_spec: Any, use_dynamo_custom_op: bool = False
) -> Any:
    """Return an array in a layout: `shoal.put`, `shoal.relayout`, or inside `jit` `constrain`.

    Collective over the mesh's processes.

    Unlike torch_xla, it does not work in place: write `w = mark_sharding(w, …)`. An array that was
    marked before is moved.

    Args:
      t: a host value, an array, or a view of one, which then holds the result (inside `jit` the
        view is unchanged, and a new one is returned).
      mesh: a mesh of this module, over any of the devices.
      partition_spec: for each dim None, an axis by name or index, or a tuple of these.
      use_dynamo_custom_op: ignored; `jit` needs no custom operation.

    Raises:
      UsageError: the spec is wrong, or outside `jit` does not divide a dim evenly. Also an
        AssertionError and a RuntimeError.

    >>> import numpy as np
    >>> from shoal.compat.torch_xla.mesh import get_1d_mesh
    >>> w = mark_sharding(np.ones((8, 3), np.float32), get_1d_mesh("x"), ("x", None))
    >>> w.sharding.spec
    P('x', None)
    """
    return _marked(t, mesh, partition_spec, gradient=False)


@stands_for("shoal.constrain")
@collective("the mesh's processes")
def mark_sharding_with_gradients(t: Any, mesh: Mesh, partition_spec: Any) -> Any:
    """Return an array in a layout, and pin its derivatives to it (`constrain(gradient=True)`).

    Collective over the mesh's processes.

    Args:
      t, mesh, partition_spec: as for `mark_sharding`; a view is unchanged.

    Raises:
      UsageError: as `mark_sharding`.
    """
    return _marked(unwrap_sharded_tensor(t), mesh, partition_spec, gradient=True)


@stands_for("shoal.constrain")
@collective("the mesh's processes")
def annotate_custom_sharding(t: Any, mesh: Mesh, partition_spec: Any) -> Any:
    """Return an array in a layout, whatever it was marked as before (`shoal.constrain`).

    Collective over the mesh's processes.

    Args:
      t, mesh, partition_spec: as for `mark_sharding`.

    Raises:
      UsageError: as `mark_sharding`.
    """
    return _marked(t, mesh, partition_spec, gradient=False)


@stands_for("shoal.constrain")
@traced
def clear_sharding(t: Any) -> Any:
    """Return an array without a layout of its own (`shoal.constrain(t, None)`).

    Traced.

    Inside `jit`, if there is a global mesh (`set_global_mesh`), the compiler chooses its layout
    anew. Outside, it becomes an ordinary array: whole, on the default device.

    Args:
      t: an array, or a view of one, which outside `jit` then holds the result.

    Raises:
      UsageError: outside `jit`, an array of several processes.
    """
    mesh = get_global_mesh()
    with nullcontext() if mesh is None else use_mesh(mesh.on_devices()):
        cleared = constrain(unwrap_sharded_tensor(t), None)
    if isinstance(t, XLAShardedTensor) and not isinstance(cleared, jax.core.Tracer):
        t.global_tensor, t.mesh_shape, t.partition_spec = cleared, None, None
    return cleared


@stands_for("shoal.shard_alike")
@traced
def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Give two trees of values, and their derivatives, one layout (`shoal.shard_alike`).

    Traced.

    Args:
      a, b: trees of one structure.

    Returns:
      both; use these.

    Raises:
      UsageError: structures or shapes differ. Also an AssertionError.
    """
    return shard_alike(a, b, gradient=True)


class MarkShardingFunction:
    """`mark_sharding_with_gradients` in the form of torch's `autograd.Function`."""

    @staticmethod
    def apply(torch_tensor: Any, mesh: Mesh, partition_spec: Any) -> Any:
        """Return `mark_sharding_with_gradients` of these."""
        return mark_sharding_with_gradients(torch_tensor, mesh, partition_spec)

    @staticmethod
    def forward(ctx: SimpleNamespace, torch_tensor: Any, mesh: Mesh, partition_spec: Any) -> Any:
        """Return the array in the layout, and keep the layout in `ctx`."""
        ctx.mesh, ctx.partition_spec = mesh, partition_spec
        return mark_sharding_with_gradients(torch_tensor, mesh, partition_spec)

    @staticmethod
    def backward(ctx: SimpleNamespace, grad_output: Any) -> tuple[Any, None, None]:
        """Return the cotangent in the layout that `forward` kept."""
        return mark_sharding_with_gradients(grad_output, ctx.mesh, ctx.partition_spec), None, None


def _marked(t: Any, mesh: Mesh, spec: Any, *, gradient: bool) -> Any:
    value = unwrap_sharded_tensor(t)
    marked = placed(value, fitted(value, mesh, spec), gradient=gradient)
    if not isinstance(t, XLAShardedTensor):
        return marked
    if isinstance(marked, jax.core.Tracer):  # which a view must not outlive
        return XLAShardedTensor(marked, mesh.mesh_shape, tuple(spec))
    t.global_tensor, t.mesh_shape, t.partition_spec = marked, mesh.mesh_shape, tuple(spec)
    return t
