"""Wrong kinds of arguments are refused by name at the entrance of each facade."""

import tempfile

import jax
import numpy as np
import pytest

from shoal.compat import dtensor, multihost_utils, torch_xla
from shoal.errors import ShoalError

_ANY = (None, 3, -1, 1.5, True, float("nan"), "x", b"x", object(), [], (), {}, [object()], ("x",),
        [1, 2], {1, 2}, {"nope": 1}, np.array([1, 2]))  # fmt: skip
_VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)


def _calls():
    """Yield functions of the facades, and arguments that each takes."""
    d_mesh = dtensor.create_mesh({"x": 4, "y": 2})
    d_layout = dtensor.Layout(["x", dtensor.UNSHARDED], d_mesh)
    array = dtensor.copy_to_mesh(_VALUE, d_layout)
    yield dtensor.create_mesh, {"mesh_dims": {"x": 8}, "mesh_name": "", "device_type": None}
    yield (
        dtensor.Mesh,
        {"dim_names": ["x"], "global_device_ids": np.arange(2), "local_device_ids": [0, 1],
         "local_devices": ["CPU:0", "CPU:1"]},
    )  # fmt: skip
    yield dtensor.Mesh.from_device, {"device": "CPU:0"}
    yield dtensor.Layout, {"sharding_specs": ["x", "y"], "mesh": d_mesh}
    yield dtensor.Layout.batch_sharded, {"mesh": d_mesh, "batch_dim": "x", "rank": 2, "axis": 0}
    yield dtensor.Layout.inner_sharded, {"mesh": d_mesh, "inner_dim": "x", "rank": 2}
    yield d_layout.delete, {"dims": 0}
    yield d_layout.num_shards, {"idx": 0}
    yield d_layout.offset_tuple_to_global_index, {"offset_tuple": (0, 0)}
    yield dtensor.relayout, {"tensor": array, "layout": d_layout}
    yield dtensor.call_with_layout, {"fn": lambda: _VALUE, "layout": d_layout}
    yield dtensor.barrier, {"mesh": d_mesh, "barrier_name": "a", "timeout_in_ms": None}
    yield dtensor.DVariable, {"initial_value": array, "layout": d_layout, "dtype": None}
    yield (
        dtensor.DTensorDataset,
        {"dataset": _VALUE, "mesh": d_mesh, "layouts": d_layout, "global_batch_size": 4,
         "batch_dim": "x", "prefetch": None},
    )  # fmt: skip
    yield dtensor.local_devices, {"device_type": "CPU", "for_client_id": None}
    yield dtensor.full_job_name, {"task_id": None}
    yield multihost_utils.sync_global_devices, {"name": "a"}
    yield multihost_utils.process_allgather, {"in_tree": _VALUE, "tiled": False}
    yield multihost_utils.assert_equal, {"in_tree": _VALUE, "fail_message": "m"}
    mesh = torch_xla.Mesh(np.arange(8), (4, 2), ("x", "y"))
    placed = torch_xla.mark_sharding(_VALUE, mesh, ("x", None))
    yield (
        torch_xla.Mesh,
        {"device_ids": np.arange(8), "mesh_shape": (4, 2), "axis_names": ("x", "y")},
    )
    yield (
        torch_xla.HybridMesh,
        {"ici_mesh_shape": (4, 2), "dcn_mesh_shape": None, "axis_names": None},
    )
    yield mesh.get_axis_name_idx, {"name": "x"}
    yield torch_xla.mark_sharding, {"t": _VALUE, "mesh": mesh, "partition_spec": ("x", None)}
    yield torch_xla.ShardingSpec, {"mesh": mesh, "partition_spec": ("x", None)}
    yield (
        torch_xla.enable_manual_sharding,
        {"t": placed, "partition_spec": ("x", None), "mesh": mesh},
    )
    split = [torch_xla.Shard(0), torch_xla.Replicate()]
    yield (
        torch_xla.xla_distribute_tensor,
        {"tensor": _VALUE, "device_mesh": mesh, "placements": split},
    )
    view = torch_xla.XLAShardedTensor(placed)
    yield view.redistribute, {"device_mesh": mesh, "placements": split}
    yield view.load_local_shards_, {"shards": view.local_shards}
    yield (
        torch_xla.CheckpointManager,
        {"path": tempfile.mkdtemp(), "save_interval": 1, "max_to_keep": 0},
    )


def test_a_wrong_argument_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # "x" is a path, too
    raw = []
    for function, arguments in _calls():
        function(**arguments)
        for name in arguments:
            for wrong in _ANY:
                try:
                    function(**{**arguments, name: wrong})
                except ShoalError:
                    pass
                except Exception as error:  # noqa: BLE001 - compared below
                    raw.append(f"{function.__qualname__}({name}={wrong!r}): {error!r}")
    assert not raw, "\n".join(raw)
    assert jax.device_count() == 8


def test_all_wrong_arguments_are_named_at_once():
    with pytest.raises(TypeError) as refused:
        torch_xla.Mesh(np.arange(8), 8, "x")
    assert "mesh_shape=8 must be a list or tuple of integers" in str(refused.value)
    assert "axis_names='x' must be a list or tuple" in str(refused.value)


def test_an_error_names_the_function_that_was_called():
    """Some are made of others of the same facade."""
    mesh = dtensor.create_mesh({"x": 8})
    row, replicated = dtensor.Layout(["x"], mesh), dtensor.Layout.replicated(mesh, rank=1)
    array = dtensor.copy_to_mesh(np.ones(8, np.float32), row)
    variable = dtensor.DVariable(array)
    theirs = torch_xla.Mesh(np.arange(8), (8,), ("x",))
    for name, call in (
        ("dtensor.copy_to_mesh: shape (8, 4) has", lambda: dtensor.copy_to_mesh(_VALUE, row)),
        ("dtensor.copy_to_mesh: shape (8,) has rank 1", lambda: dtensor.copy_to_mesh(
            array, dtensor.Layout.replicated(mesh, rank=3))),
        ("dtensor.relayout: shape (8, 4) has", lambda: dtensor.relayout(_VALUE, row)),
        ("dtensor.relayout_like: [[1], [", lambda: dtensor.relayout_like([[1], ["a"]], array)),
        ("dtensor.check_layout: ", lambda: dtensor.check_layout([1], replicated)),
        ("dtensor.check_layout must be called", lambda: jax.jit(
            lambda one: dtensor.check_layout(one, row))(array)),
        ("dtensor.DVariable: shape (8, 4) has", lambda: dtensor.DVariable(_VALUE, layout=row)),
        ("dtensor.DVariable.assign: ", lambda: variable.assign([[1], ["a"]])),
        ("torch_xla xla_distribute_tensor ", lambda: torch_xla.xla_distribute_tensor(
            _VALUE, theirs, [torch_xla.Shard(5)])),
    ):  # fmt: skip
        with pytest.raises(ShoalError) as caught:
            call()
        assert str(caught.value).startswith(name)
