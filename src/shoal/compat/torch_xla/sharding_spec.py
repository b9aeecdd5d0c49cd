"""The partition spec of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.arrays.host_local.host_local import from_host_local
from shoal.colour import collective, local
from shoal.compat.torch_xla.errors import stands_for
from shoal.compat.torch_xla.mesh import Mesh
from shoal.compat.torch_xla.placing import fitted, placed
from shoal.compat.torch_xla.sharded import unwrap_sharded_tensor
from shoal.compat.torch_xla.specs import OpSharding
from shoal.errors import UsageError
from shoal.plan.hlo import ShardingType

__all__ = ["ShardingSpec"]


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
        value = unwrap_sharded_tensor(t)
        layout = fitted(value, self.mesh, self.partition_spec)
        if not self.minibatch:
            return placed(value, layout)
        if not any(layout.axes_of_dims[:1]):
            raise UsageError(
                "Minibatch sharding only supports sharding along the batch dimension: name axes "
                f"for dim 0 in {tuple(self.partition_spec)!r}"
            )
        return from_host_local(value, layout)
