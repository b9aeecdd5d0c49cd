"""Manual regions: the shards of each device, to compute on by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from shoal.arrays.traced.enter_manual import enter_manual, leave_manual
from shoal.colour import collective, local, logically_collective
from shoal.compat.torch_xla.errors import NoMeaningHere, stands_for
from shoal.compat.torch_xla.mesh import Mesh, mesh_or_global
from shoal.compat.torch_xla.placing import fitted, is_traced, placed
from shoal.compat.torch_xla.sharded import unwrap_sharded_tensor
from shoal.compat.torch_xla.specs import layout_of_spec

__all__ = ["_mark_manual_sharding", "disable_manual_sharding", "enable_manual_sharding"]


@stands_for("shoal.compat.enter_manual")
@collective("the mesh's processes")
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
    value = unwrap_sharded_tensor(t)
    layout = fitted(value, mesh_or_global(mesh), partition_spec)
    return enter_manual(value if is_traced(value) else placed(value, layout), layout)


@stands_for("shoal.compat.leave_manual")
@logically_collective("shapes and dtypes of shards, specs and meshes")
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
    return leave_manual(t, layout, tuple(full_shape))


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
