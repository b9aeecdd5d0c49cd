"""Sharding annotations: arrays in the layout of a mesh and a partition spec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from shoal.arguments import shown
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.host_local.host_local import from_host_local
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.enter_manual import enter_manual, leave_manual
from shoal.arrays.traced.shard_alike import shard_alike
from shoal.colour import collective, local, logically_collective, traced
from shoal.compat.arguments import a, or_none, takes, wholes
from shoal.compat.torch_xla.errors import NoMeaningHere, stands_for
from shoal.compat.torch_xla.mesh import Mesh, get_global_mesh, mesh_or_global
from shoal.compat.torch_xla.sharded import (
    XLAShardedTensor,
    fitted,
    is_traced,
    placed,
    unwrap_sharded_tensor,
    value_of,
    values_of,
)
from shoal.compat.torch_xla.specs import OpSharding, layout_of_spec
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.hlo import ShardingType

_MESH = "a shoal.compat.torch_xla.Mesh"

__all__ = [
    "MarkShardingFunction",
    "ShardingSpec",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
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
      t: a host value, a torch tensor (dense, on the CPU; copied, and its gradient is not followed),
        an array, or a view of one, which then holds the result (inside `jit` the view is unchanged,
        and a new one is returned).
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
    return _marked(value_of(t), mesh, partition_spec, gradient=True)


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
    again. Outside, it becomes an ordinary array: whole, on the default device.

    Args:
      t: an array, or a view of one, which outside `jit` then holds the result.

    Raises:
      UsageError: outside `jit`, an array of several processes.
    """
    mesh = get_global_mesh()
    with nullcontext() if mesh is None else use_mesh(mesh.on_devices()):
        cleared = constrain(value_of(t), None)
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
    a, b = (values_of(tree) for tree in (a, b))
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
    value = value_of(t)
    marked = placed(value, fitted(value, mesh, spec), gradient=gradient)
    if not isinstance(t, XLAShardedTensor):
        return marked
    if isinstance(marked, jax.core.Tracer):  # which a view must not outlive
        return XLAShardedTensor(marked, mesh.mesh_shape, tuple(spec))
    t.global_tensor, t.mesh_shape, t.partition_spec = marked, mesh.mesh_shape, tuple(spec)
    return t


# ---- The partition spec of inputs.


@local
@dataclass
class ShardingSpec:
    """A mesh and a partition spec, for inputs (`shoal.Layout`).

    Local.

    Args:
      mesh: the mesh.
      partition_spec: as for `mark_sharding`.
      minibatch: each process passes its own rows, instead of the whole input.

    Raises:
      UsageError: the spec is wrong.

    >>> from shoal.compat.torch_xla.mesh import Mesh
    >>> spec = ShardingSpec(Mesh(np.arange(8), (4, 2), ("x", "y")), ("x", None))
    >>> spec.can_apply(np.ones((8, 2))), str(spec.xla_spec(np.ones(8)))
    (True, 'None')
    """

    mesh: Mesh
    partition_spec: Any
    minibatch: bool | None = False
    _tile_assignment: list[Any] = field(init=False)
    _group_assignment: list[Any] = field(init=False)
    _replication_groups: list[Any] = field(init=False)
    _sharding_type: ShardingType = field(init=False)

    @stands_for("shoal.Layout")
    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise UsageTypeError(f"ShardingSpec: mesh={shown(self.mesh)} must be {_MESH}")
        tiles, groups, replicas, kind = self.mesh._get_op_sharding_args(self.partition_spec)
        self._tile_assignment, self._group_assignment = tiles, groups
        self._replication_groups, self._sharding_type = replicas, ShardingType(kind)

    def xla_spec(self, t: Any) -> OpSharding | None:
        """Return its XLA sharding, or None if it does not apply. Local."""
        return self.mesh.get_op_sharding(self.partition_spec) if self.can_apply(t) else None

    def can_apply(self, t: Any) -> bool:
        """Return whether an array has the rank of the spec. Local."""
        return len(tuple(self.partition_spec)) == np.ndim(unwrap_sharded_tensor(t))

    @stands_for("shoal.put")
    @collective("the mesh's processes")
    def apply(self, t: Any) -> Any:
        """Return an array in this layout: `mark_sharding`, or with `minibatch` `from_host_local`.

        Collective over the mesh's processes.

        Args:
          t: the whole input, the same on all processes; with `minibatch` this process's rows,
            at the positions of its devices in the mesh.

        Raises:
          UsageError: it does not apply, does not divide a dim evenly, or with `minibatch` the
            devices of a process hold no block of the array. Also an AssertionError.
        """
        value = value_of(t)
        layout = fitted(value, self.mesh, self.partition_spec)
        if not self.minibatch:
            return placed(value, layout)
        if not any(layout.axes_of_dims[:1]):
            raise UsageError(
                "Minibatch sharding only supports sharding along the batch dimension: name axes "
                f"for dim 0 in {tuple(self.partition_spec)!r}"
            )
        return from_host_local(value, layout)


# ---- Manual regions: the shards of each device, to compute on by hand.


@stands_for("shoal.compat.enter_manual")
@collective("the mesh's processes")
@takes("torch_xla ", mesh=or_none(a(Mesh, _MESH)))
def enable_manual_sharding(
    t: Any, partition_spec: Any, *, mesh: Mesh | None = None
) -> list[jax.Array]:
    """Return the shard of an array on each device of this process (`shoal.compat.enter_manual`).

    Collective over the mesh's processes.

    torch_xla returns one tensor that stands for the shard of the current device. Here the result is
    a list, and code runs once per shard; inside `jit` use `shoal.manual(fn, in_layouts,
    out_layouts)`, in which values are shards and collectives take axis names.

    Args:
      t: the array, or a view, or a host value.
      partition_spec: as for `mark_sharding`.
      mesh: the mesh; None: the global one.

    Returns:
      a shard for each device of this process, in mesh order.

    Raises:
      UsageError: there is no mesh, the spec is wrong or does not divide a dim evenly; inside `jit`.
    """
    value = value_of(t)
    layout = fitted(value, mesh_or_global(mesh), partition_spec)
    return enter_manual(value if is_traced(value) else placed(value, layout), layout)


@stands_for("shoal.compat.leave_manual")
@logically_collective("shapes and dtypes of shards, specs and meshes")
@takes("torch_xla ", full_shape=wholes, mesh=or_none(a(Mesh, _MESH)))
def disable_manual_sharding(
    t: Sequence[Any], partition_spec: Any, full_shape: Sequence[int], *, mesh: Mesh | None = None
) -> jax.Array:
    """Return the array assembled from one shard per device (`shoal.compat.leave_manual`).

    Logically collective: shapes and dtypes of shards, specs and meshes must be equal.

    Args:
      t: the shards, as returned by `enable_manual_sharding`.
      partition_spec: as for `mark_sharding`.
      full_shape: the shape of the array.
      mesh: the mesh; None: the global one.

    Raises:
      UsageError: the shards do not make up an array of this shape; inside `jit`.
    """
    layout = layout_of_spec(mesh_or_global(mesh).on_devices(), partition_spec)
    shards = [*map(value_of, t)] if isinstance(t, list | tuple) else t
    return leave_manual(shards, layout, tuple(full_shape))


@local
def _mark_manual_sharding(t: Any) -> Any:
    """Raise: on JAX values are manual inside `shoal.manual`; none is marked as manual.

    Local.

    Raises:
      NotImplementedError: always; it is a UsageError as well.
    """
    raise NoMeaningHere(
        "torch_xla _mark_manual_sharding (shoal.manual): values cannot be marked as manual; write "
        "manual(fn, in_layouts, out_layouts), or enable_manual_sharding(t, spec, mesh=)"
    )
