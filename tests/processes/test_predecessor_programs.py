"""Programs as the documentation of each predecessor has them, at one process and at several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
import shoal.compat.torch_xla as xs
from shoal.compat import dtensor, multihost_utils
from shoal.testing.cluster import Cluster

DEVICES = 8
GIVEN = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def trains_as_with_dtensor(folder):
    """Train data and model parallel, save by two functions, and restore onto another mesh."""
    dtensor.initialize_accelerator_system("CPU")
    mesh = dtensor.create_distributed_mesh([("batch", 4), ("model", 2)], device_type="CPU")
    rows = dtensor.Layout.batch_sharded(mesh, "batch", rank=2)
    columns = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
    random = np.random.default_rng(0)
    x, y = (random.normal(size=shape).astype(np.float32) for shape in ((16, 8), (16, 4)))
    x, y = (dtensor.copy_to_mesh(value, rows) for value in (x, y))
    whole = dtensor.Layout.replicated(mesh, rank=2)
    start = dtensor.call_with_layout(jnp.ones, whole, (8, 4), jnp.float32)
    w = dtensor.DVariable(dtensor.relayout(start, columns), name="w")

    @jax.jit
    def step(w, x, y):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return loss, dtensor.relayout(0.1 * slope, columns)

    losses = []
    for _ in range(3):
        loss, change = step(w.read_value(), x, y)
        w.assign_sub(change)
        losses.append(float(loss))
    dtensor.barrier(mesh, "trained")
    dtensor.sharded_save(mesh, f"{folder}/sharded", ["w"], [""], [w])
    dtensor.name_based_save(mesh, f"{folder}/named", {"w": w})
    flat = dtensor.create_distributed_mesh({"all": DEVICES}, device_type="CPU")
    like = dtensor.copy_to_mesh(
        np.zeros((8, 4), np.float32), dtensor.Layout(["all", dtensor.UNSHARDED], flat)
    )
    back = [
        dtensor.name_based_restore(flat, f"{folder}/{name}", {"w": like})["w"]
        for name in ("sharded", "named")
    ]
    values = [shoal.allgather(one, tiled=True).tolist() for one in (w.read_value(), *back)]
    dtensor.shutdown_accelerator_system()
    assert values[0] == values[1] == values[2]
    return losses, values[0]


def trains_as_with_torch_xla(_):
    """Mark torch's tensors, train, compute in a manual region, and load rows of each process."""
    torch = pytest.importorskip("torch")
    shoal.initialize()
    mesh = xs.Mesh(np.arange(DEVICES), (4, 2), ("data", "model"))
    x, weight = torch.tensor(GIVEN), torch.nn.Linear(8, 4).weight
    with torch.no_grad():
        weight.copy_(torch.arange(32.0).reshape(4, 8) / 32)
    x = xs.mark_sharding(x, mesh, ("data", None))
    w = xs.mark_sharding(weight, mesh, ("model", None))

    @jax.jit
    def train(w, x):
        loss, slope = jax.value_and_grad(lambda w: (xs.XLAPatchedLinear.apply(x, w) ** 2).mean())(w)
        return w - 0.1 * slope, loss

    losses = []
    for _ in range(3):
        w, loss = train(w, x)
        losses.append(float(loss))
    hybrid = xs.HybridMesh(
        ici_mesh_shape=(1, DEVICES // shoal.process_count()),
        dcn_mesh_shape=(shoal.process_count(), 1),
        axis_names=("data", "model"),
    )
    turned = xs.mark_sharding(w, hybrid, (None, "model"))
    line = xs.get_1d_mesh("data")
    xs.set_global_mesh(line)
    shards = xs.enable_manual_sharding(GIVEN, ("data", None))
    doubled = xs.disable_manual_sharding(
        [2 * shard for shard in shards], ("data", None), GIVEN.shape
    )
    share = len(GIVEN) // shoal.process_count()
    mine = torch.tensor(GIVEN[share * shoal.process_index() :][:share])
    batch = xs.ShardingSpec(line, ("data", None), minibatch=True).apply(mine)
    xs.set_global_mesh(None)
    values = [shoal.allgather(one, tiled=True) for one in (doubled, batch, turned)]
    np.testing.assert_array_equal(values[0], 2 * GIVEN)
    np.testing.assert_array_equal(values[1], GIVEN)
    return losses, values[2].tolist()


def trains_as_with_multihost_utils(_):
    """Start equal, make global batches from the rows of each process, compare, and stop."""
    shoal.initialize()
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    rows = jax.P("data")
    share = len(GIVEN) // shoal.process_count()
    mine = GIVEN[share * shoal.process_index() :][:share]
    seed = multihost_utils.broadcast_one_to_all(np.int32(7 + shoal.process_index()))
    w = multihost_utils.broadcast_one_to_all(np.full(8, seed, np.float32))
    batch = multihost_utils.host_local_array_to_global_array(mine, mesh, rows)

    @jax.jit
    def train(w, batch):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
        return w - 0.1 * slope, loss, batch @ w

    losses = []
    for step in range(3):
        if multihost_utils.reached_preemption_sync_point(step):
            break
        w, loss, products = train(w, batch)
        losses.append(float(multihost_utils.process_allgather(loss, tiled=True)))
    own = multihost_utils.global_array_to_host_local_array(products, mesh, rows)
    assert own.shape == (share,)
    multihost_utils.assert_equal(w, "replicas of w")
    products = multihost_utils.process_allgather(np.asarray(own), tiled=True)
    with multihost_utils.live_devices(jax.devices()) as alive:
        assert alive == jax.devices()
    multihost_utils.sync_global_devices("trained")
    return losses, products.tolist()


@pytest.mark.parametrize(
    "program", [trains_as_with_dtensor, trains_as_with_torch_xla, trains_as_with_multihost_utils]
)
def test_a_program_has_the_same_results_at_one_process_and_at_several(program, tmp_path):
    if program is trains_as_with_torch_xla:
        pytest.importorskip("torch")
    results = []
    for processes in (1, 2):
        (folder := tmp_path / str(processes)).mkdir()
        with Cluster(processes, devices=DEVICES // processes, start_method="fork") as cluster:
            results += cluster.run(program, str(folder), initialize=False)
    losses, values = results[0]
    assert losses[0] > losses[1] > losses[2]
    for other, found in results[1:]:
        np.testing.assert_allclose(other, losses, rtol=1e-5)
        np.testing.assert_allclose(found, values, rtol=1e-5)
