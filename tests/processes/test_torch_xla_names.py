"""torch_xla's names in a job of two processes with two devices each."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import shoal
import shoal.compat.torch_xla as xs
from shoal.compat.torch_xla import runtime as xr
from shoal.compat.torch_xla.errors import SpmdError
from shoal.errors import DivergenceError
from shoal.runtime import process
from shoal.testing.cluster import Cluster

VALUE = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)


def whole(array):
    return shoal.allgather(array, tiled=True)


def marks_and_views():
    mesh = xs.Mesh(range(4), (2, 2), ("x", "y"))
    marked = xs.mark_sharding(VALUE, mesh, ("x", "y"))
    np.testing.assert_array_equal(whole(marked), VALUE)
    view = xs.wrap_if_sharded(marked)
    first = 2 * shoal.process_index()
    assert view.sharding_spec == "{devices=[2,2]0,1,2,3}"  # numbers, whatever JAX's ids are
    assert [shard.shard_device for shard in view.local_shards] == [
        f"CPU:{first}",
        f"CPU:{first + 1}",
    ]
    for shard in view.local_shards:
        np.testing.assert_array_equal(shard.data, VALUE[tuple(shard.indices)])
        shard.data += 1
    held = view.local_shards
    for shard in held:
        shard.data += 1
    np.testing.assert_array_equal(whole(view.load_local_shards_(held).global_tensor), VALUE + 1)
    np.testing.assert_array_equal(whole(view * 2), 2 * (VALUE + 1))
    assert float(jax.jit(lambda v: v.sum())(view)) == (VALUE + 1).sum()
    turned = xs.mark_sharding(marked, xs.Mesh([3, 1, 2, 0], (4,), ("x",)), (None, "x"))
    np.testing.assert_array_equal(whole(turned), VALUE)
    assert xs.wrap_if_sharded(turned).sharding_spec == "{devices=[1,4]3,1,2,0}"
    with pytest.raises(SpmdError, match=r"clear_sharding \(shoal.constrain\).*allgather"):
        xs.clear_sharding(marked)
    xs.set_global_mesh(xs.Mesh([2 * shoal.process_index()], (1,), ("x",)))  # not the program's
    cleared = jax.jit(lambda v: xs.clear_sharding(v) + 0)(view)
    np.testing.assert_array_equal(whole(cleared), VALUE + 1)
    xs.set_global_mesh(None)
    grown = jax.jit(lambda x: xs.mark_sharding(x + 1, mesh, ("y", None)))(marked)
    np.testing.assert_array_equal(whole(grown), VALUE + 1)


def inputs_and_regions():
    mesh = xs.get_1d_mesh("d")
    xs.set_global_mesh(mesh)
    mine = VALUE[4 * shoal.process_index() :][:4]
    batch = xs.ShardingSpec(mesh, ("d", None), minibatch=True).apply(mine)
    np.testing.assert_array_equal(whole(batch), VALUE)
    swapped = xs.Mesh([2, 3, 0, 1], (4,), ("d",))  # its first rows are process 1's
    batch = xs.ShardingSpec(swapped, ("d", None), minibatch=True).apply(mine)
    np.testing.assert_array_equal(whole(batch), np.concatenate([VALUE[4:], VALUE[:4]]))
    mixed = xs.Mesh([0, 2, 1, 3], (4,), ("d",))
    with pytest.raises(SpmdError, match=r"ShardingSpec.apply \(shoal.put\)"):
        xs.ShardingSpec(mixed, ("d", None), minibatch=True).apply(mine)
    shards = xs.enable_manual_sharding(VALUE, ("d", None))
    assert [shard.shape for shard in shards] == [(2, 8)] * 2
    doubled = xs.disable_manual_sharding([2 * shard for shard in shards], ("d", None), (8, 8))
    np.testing.assert_array_equal(whole(doubled), 2 * VALUE)
    hybrid = xs.HybridMesh(ici_mesh_shape=(1, 2), dcn_mesh_shape=(2, 1))  # processes are slices
    assert hybrid.get_logical_mesh().tolist() == [[0, 1], [2, 3]]
    with pytest.raises(
        ValueError, match="Number of slices 2 must equal the product of dcn_mesh_shape 4"
    ):
        xs.HybridMesh(ici_mesh_shape=(1, 1), dcn_mesh_shape=(2, 2))
    assert (process.process_count(), xr.global_runtime_device_count()) == (2, 4)
    assert xr.addressable_runtime_device_count() == 2
    assert [row["name"] for row in xr.global_runtime_device_attributes()] == [
        f"CPU:{n}" for n in range(4)
    ]


def checkpoints(path):
    mesh = xs.get_1d_mesh("d")
    manager = xs.CheckpointManager(path, save_interval=10, max_to_keep=2)
    state = {"w": xs.mark_sharding(VALUE, mesh, ("d", None))}
    assert [manager.save_async(step, state) for step in (5, 10, 20, 30)] == [
        False,
        True,
        True,
        True,
    ]
    manager.join()
    assert manager.all_steps() == [20, 30]  # on both processes
    view = xs.wrap_if_sharded(xs.mark_sharding(np.zeros_like(VALUE), mesh, (None, "d")))
    target = {"w": view}
    assert manager.restore(30, target) is target
    assert target["w"] is view
    np.testing.assert_array_equal(whole(view.global_tensor), VALUE)
    assert view.partition_spec == (None, "d")
    assert manager.save(40, {"nested": [{"w": view}]})  # saved as the array, by every process
    nested = {"nested": [{"w": xs.mark_sharding(np.zeros_like(VALUE), mesh, ("d", None))}]}
    manager.restore(40, nested)
    np.testing.assert_array_equal(whole(nested["nested"][0]["w"]), VALUE)
    with pytest.raises(AssertionError, match="untracked step 10"):
        manager.restore(10, target)


def values_that_differ():
    """Processes that mark otherwise get an error at their next synchronization point."""
    me = shoal.process_index()
    shapes, names = (VALUE, VALUE[:4]), ("d", "e")
    for value, name in ((VALUE + me, "d"), (shapes[me], "d"), (VALUE, names[me])):
        shoal.barrier("before")
        xs.mark_sharding(value, xs.get_1d_mesh(name), (name, None))
        with pytest.raises(DivergenceError):
            shoal.barrier("after")


def everything(path):
    marks_and_views()
    inputs_and_regions()
    checkpoints(path)
    values_that_differ()
    xs.set_global_mesh(xs.get_1d_mesh())
    shoal.shutdown()
    assert xs.get_global_mesh() is None


def test_two_processes_of_two_devices(tmp_path):
    with Cluster(2, devices=2, start_method="fork") as cluster:
        cluster.run(everything, str(tmp_path / "run"))
