"""The API of `torch_xla.distributed.spmd` on `jax.Array`s, with shoal's guarantees.

Never imports torch or torch_xla; knows no other facade.
"""

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
from shoal.compat.torch_xla.api import (
    auto_policy,
    convert_to_xla_mesh,
    convert_to_xla_partition_spec,
    with_xla,
    xla_distribute_module,
    xla_distribute_tensor,
)
from shoal.compat.torch_xla.checkpoints import (
    CheckpointManager,
)
from shoal.compat.torch_xla.left_out import (
    MpDeviceLoader,
    ParallelLoader,
    SpmdFullyShardedDataParallel,
    SPMDLoadPlanner,
    SPMDSavePlanner,
    prime_optimizer,
    send_cpu_data_to_device,
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
from shoal.compat.torch_xla.placements import (
    Replicate,
    Shard,
)
from shoal.compat.torch_xla.sharded import (
    XLAShard,
    XLAShardedTensor,
    unwrap_sharded_tensor,
    visualize_sharding,
    visualize_tensor_sharding,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)
from shoal.plan.hlo import ShardingType

__all__ = [
    "CheckpointManager",
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "MpDeviceLoader",
    "ParallelLoader",
    "Replicate",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "Shard",
    "ShardingSpec",
    "ShardingType",
    "SpmdFullyShardedDataParallel",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "prime_optimizer",
    "send_cpu_data_to_device",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "with_xla",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]
