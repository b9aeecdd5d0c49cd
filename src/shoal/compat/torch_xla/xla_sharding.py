"""The names of torch_xla's module `xla_sharding`, at its path below the package."""

from __future__ import annotations

from shoal.compat.torch_xla.annotate import (
    MarkShardingFunction,
    ShardingSpec,
    _mark_manual_sharding,
    annotate_custom_sharding,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_as,
)
from shoal.compat.torch_xla.linear import (
    EinsumLinear,
    XLAPatchedLinear,
    apply_backward_optimization_barrier,
    apply_xla_patch_to_nn_linear,
    xla_patched_nn_linear_forward,
)
from shoal.compat.torch_xla.mesh import (
    HybridMesh,
    Mesh,
    get_1d_mesh,
    get_global_mesh,
    set_global_mesh,
)
from shoal.compat.torch_xla.sharded import (
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)
from shoal.plan.hlo import (
    ShardingType,
)

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]
