"""An index of names that shoal does not have: the facade that has each, and shoal's name."""

from __future__ import annotations

from collections.abc import Mapping

from shoal import errors

__all__ = [
    "FACADES",
    "FORMER",
    "INSTEAD",
    "MULTIHOST_UTILS",
    "OTHERS",
    "TORCH_XLA",
    "hint_of",
    "hint_within",
]

MULTIHOST_UTILS: Mapping[str, str] = {
    "ProcessFailureError": "ProcessLostError",
    "assert_equal": "assert_same",
    "broadcast_one_to_all": "broadcast",
    "global_array_to_host_local_array": "to_host_local",
    "host_local_array_to_global_array": "from_host_local",
    "live_devices": "live_processes",
    "process_allgather": "allgather",
    "reached_preemption_sync_point": "preempted",
    "sync_global_devices": "barrier",
}
"""Name in `shoal.compat.multihost_utils` → our own name in `shoal`."""

TORCH_XLA: Mapping[str, str] = {
    "CheckpointManager": "Checkpoints",
    "EinsumLinear": "compat.linear",
    "HybridMesh": "make_mesh",
    "MarkShardingFunction": "constrain",
    "Mesh": "Mesh",
    "MpDeviceLoader": "feed",
    "ParallelLoader": "feed",
    "Replicate": "Layout",
    "SPMDLoadPlanner": "restore",
    "SPMDSavePlanner": "save",
    "Shard": "Layout",
    "ShardingSpec": "Layout",
    "ShardingType": "Layout",
    "SpmdFullyShardedDataParallel": "match_layouts",
    "XLAPatchedLinear": "compat.linear",
    "XLAShard": "compat.unpack",
    "XLAShardedTensor": "layout_of",
    "_mark_manual_sharding": "manual",
    "annotate_custom_sharding": "constrain",
    "apply_backward_optimization_barrier": "compat.fence",
    "apply_xla_patch_to_nn_linear": "compat.linear",
    "auto_policy": "match_layouts",
    "clear_sharding": "constrain",
    "convert_to_xla_mesh": "Mesh",
    "convert_to_xla_partition_spec": "Layout",
    "disable_manual_sharding": "compat.leave_manual",
    "enable_manual_sharding": "compat.enter_manual",
    "get_1d_mesh": "make_mesh",
    "get_global_mesh": "use_mesh",
    "mark_sharding": "constrain",
    "mark_sharding_with_gradients": "constrain",
    "prime_optimizer": "restore",
    "send_cpu_data_to_device": "put",
    "set_global_mesh": "use_mesh",
    "shard_as": "shard_alike",
    "unwrap_sharded_tensor": "layout_of",
    "visualize_sharding": "describe",
    "visualize_tensor_sharding": "describe",
    "with_xla": "initialize",
    "wrap_as_sharded_tensor": "layout_of",
    "wrap_if_sharded": "layout_of",
    "xla_distribute_module": "match_layouts",
    "xla_distribute_tensor": "put",
    "xla_patched_nn_linear_forward": "compat.linear",
}
"""Name in `shoal.compat.torch_xla` → our own name in `shoal`."""

DTENSOR: Mapping[str, str] = {
    "DTensorCheckpoint": "Checkpoints",
    "DTensorDataset": "feed",
    "DVariable": "put",
    "Layout": "Layout",
    "MATCH": "relayout",
    "Mesh": "Mesh",
    "UNSHARDED": "Layout",
    "_dtensor_device": "make_mesh",
    "_global_barrier": "sync_devices",
    "barrier": "sync_devices",
    "call_with_layout": "create",
    "check_layout": "layout_of",
    "client_id": "process_index",
    "copy_to_mesh": "put",
    "create_distributed_mesh": "make_mesh",
    "create_mesh": "make_mesh",
    "create_tpu_mesh": "make_mesh",
    "default_mesh": "use_mesh",
    "device_name": "layout_of",
    "dtensor_initialize_tpu_system": "initialize",
    "dtensor_shutdown_tpu_system": "shutdown",
    "enable_save_as_bf16": "save",
    "fetch_layout": "layout_of",
    "full_job_name": "process_index",
    "get_default_mesh": "use_mesh",
    "get_device_ids": "Mesh",
    "get_device_locations": "Mesh",
    "heartbeat_enabled": "job_status",
    "initialize_accelerator_system": "initialize",
    "initialize_multi_client": "initialize",
    "initialize_multi_client_cluster": "initialize",
    "initialize_tpu_system": "initialize",
    "is_dtensor": "layout_of",
    "is_initialized": "is_initialized",
    "job_name": "process_index",
    "jobs": "job_status",
    "local_devices": "make_mesh",
    "name_based_restore": "restore",
    "name_based_save": "save",
    "num_clients": "process_count",
    "num_global_devices": "make_mesh",
    "num_local_devices": "make_mesh",
    "pack": "compat.pack",
    "preferred_device_type": "make_mesh",
    "relayout": "relayout",
    "relayout_like": "relayout",
    "reset_dtensor_device": "shutdown",
    "run_on": "use_mesh",
    "set_initialized": "initialize",
    "sharded_save": "save",
    "shutdown_accelerator_system": "shutdown",
    "shutdown_tpu_system": "shutdown",
    "tpu_system_init_helper": "initialize",
    "unpack": "compat.unpack",
}
"""Name in `shoal.compat.dtensor` → our own name in `shoal`."""

FACADES: Mapping[str, Mapping[str, str]] = {
    "shoal.compat.multihost_utils": MULTIHOST_UTILS,
    "shoal.compat.torch_xla": TORCH_XLA,
    "shoal.compat.dtensor": DTENSOR,
}


FORMER: Mapping[str, str] = {
    "contents": "checkpoint_info",
    "drain": "sync_devices",
    "enter_manual": "compat.enter_manual",
    "exit_code": "preemption.exit_code",
    "fence": "compat.fence",
    "layouts": "match_layouts",
    "leave_manual": "compat.leave_manual",
    "linear": "compat.linear",
    "live": "live_processes",
    "notice": "preemption.notice",
    "rearm": "preemption.clear",
    "roll_call": "job_status",
    "saved": "preemption.mark_saved",
    "sharding": "named_sharding",
    "tie": "shard_alike",
    "watch_notices": "preemption.watch",
}
"""Name before 0.1 → today's, in `shoal`; docs/decisions/names.md says why."""

OTHERS: Mapping[str, str] = {
    "Checkpoint": "Checkpoints",
    "all_gather": "allgather",
    "bcast": "broadcast",
    "create_device_mesh": "make_mesh",
    "device_get": "allgather",
    "device_put": "put",
    "gather": "allgather",
    "get_rank": "process_index",
    "get_world_size": "process_count",
    "init": "initialize",
    "init_process_group": "initialize",
    "load": "restore",
    "load_checkpoint": "restore",
    "make_array_from_callback": "put",
    "make_array_from_process_local_data": "from_host_local",
    "rank": "process_index",
    "reshard": "relayout",
    "restore_checkpoint": "restore",
    "save_checkpoint": "save",
    "set_mesh": "use_mesh",
    "shard_map": "manual",
    "show": "describe",
    "visualize": "describe",
    "visualize_array_sharding": "describe",
    "with_sharding_constraint": "constrain",
    "world_size": "process_count",
}
"""Name in other libraries of the field → our own in `shoal`."""


INSTEAD: Mapping[str, Mapping[str, str]] = {
    "shoal": {
        **{name: f"shoal.retention.{name}" for name in ("Best", "EverySteps", "Last", "Saved")},
        "AbstractMesh": "jax.sharding.AbstractMesh, or shoal.Mesh to plan without devices",
        "AxisType": "jax.sharding.AxisType, as in shoal.make_mesh(…, axis_types=…)",
        "NamedSharding": "jax.sharding.NamedSharding: shoal takes it as it takes shoal.Layout",
        "P": "jax.P: shoal takes it as it takes shoal.Layout",
        "PartitionSpec": "jax.sharding.PartitionSpec: shoal takes it as it takes shoal.Layout",
        "cost": "shoal.planning.cost",
        "device_count": "jax.device_count()",
        "devices": "jax.devices()",
        "local_device_count": "jax.local_device_count()",
        "local_devices": "jax.local_devices()",
        "place": "shoal.planning.place",
        "plan_transfer": "shoal.planning.plan_transfer",
        "topology": "shoal.planning.topology",
        "zeros": "shoal.create(lambda: jnp.zeros(shape), layouts=…)",
    },
    "Checkpoints": {
        "latest_step": "latest()",
        "reached_preemption": "shoal.preempted(step)",
        "wait_until_finished": "wait()",
    },
    "Checkpoints.__init__": {"max_to_keep": "keep=2", "save_interval_steps": "every=100"},
    "Checkpoints.save": {"args": "save(step, tree)"},
    "broadcast": {"root": "source=0"},
    "make_mesh": {
        "axis_shapes": 'make_mesh((4, 2), ("data", "model"))',
        "data": 'make_mesh({"data": -1})',
        "x": 'make_mesh({"x": -1})',
    },
    "manual": {"in_specs": "in_layouts", "mesh": "layouts on that mesh"},
    "barrier": {"": 'barrier("data is ready")'},
}
"""Class or function → attribute or argument that it does not have, or "" for none → ours."""


def hint_within(owner: str, *names: str) -> str:
    """Return what to write for names that a class or function does not have; empty if unknown.

    >>> hint_within("Checkpoints.__init__", "max_to_keep", "save_interval_steps")
    'write keep=2 and every=100'
    """
    known = INSTEAD.get(owner, {})
    ours = [known[name] for name in names if name in known]
    return f"write {' and '.join(ours)}" if ours else ""


def hint_of(name: str) -> str:
    """Return where a name that `shoal` does not have is, as text; empty if unknown.

    >>> hint_of("sync_global_devices")
    'it is shoal.compat.multihost_utils.sync_global_devices; ours is shoal.barrier'
    >>> hint_of("tie")
    'it is shoal.shard_alike now'
    >>> hint_of("world_size")
    'ours is shoal.process_count'
    >>> hint_of("StorageFull"), hint_of("StorageError")
    ('it is shoal.errors.StorageFullError now', 'it is shoal.errors.StorageError')
    >>> hint_of("no_such_name")
    ''
    """
    if name in FORMER:
        return f"it is shoal.{FORMER[name]} now"
    facades = [(facade, ours[name]) for facade, ours in FACADES.items() if name in ours]
    if facades:
        theirs = " and ".join(f"{facade}.{name}" for facade, _ in facades)
        ours = " and ".join(dict.fromkeys(f"shoal.{own}" for _, own in facades))
        return f"it is {theirs}; ours is {ours}"
    if name in OTHERS:
        return f"ours is shoal.{OTHERS[name]}"
    for error, now in ((name, ""), (f"{name}Error", " now")):
        if error.endswith("Error") and hasattr(errors, error):
            return f"it is shoal.errors.{error}{now}"
    return hint_within("shoal", name)
