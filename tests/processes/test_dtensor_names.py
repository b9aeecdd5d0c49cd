"""`shoal.compat.dtensor` in two real processes of two devices, started as DTensor's jobs are."""

from __future__ import annotations

import logging
import os
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.compat import dtensor
from shoal.compat.dtensor import DTensorCheckpoint, DTensorDataset, DVariable, Layout
from shoal.plan.placement import place
from shoal.plan.topology import parse
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.options import Arguments
from shoal.testing.cluster import Cluster

U = dtensor.UNSHARDED


@pytest.fixture(scope="module")
def cluster():
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    with Cluster(2, start_method="fork", devices=2, env={**env, "JAX_PLATFORMS": "cpu"}) as two:
        yield two


def refused(call):
    """Return what a call raised, in words."""
    try:
        call()
    except shoal.ShoalError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def as_clients(jobs):
    """Say in DTensor's variables what the launcher said in its own, and join by them."""
    os.environ["DTENSOR_CLIENT_ID"] = os.environ.pop("SHOAL_PROCESS_ID")
    del os.environ["SHOAL_NUM_PROCESSES"]
    os.environ["DTENSOR_JOBS"] = jobs


def meets_as_dtensor_says():
    address = os.environ["SHOAL_COORDINATOR"]
    as_clients(f"{address},{address}")
    me = dtensor.client_id()
    early = refused(lambda: dtensor.num_global_devices("CPU"))
    decided = decide(Arguments(), os.environ)
    absent = refused(lambda: dtensor.initialize_accelerator_system("TPU"))  # and falls back
    kind = dtensor.initialize_accelerator_system("CPU")
    again = refused(dtensor.initialize_accelerator_system)
    mesh = dtensor.create_distributed_mesh({"x": 2, "y": 2}, "grid", device_type="CPU")
    told = [
        me, kind, decided.reason.split(" (")[0], dtensor.num_clients(), dtensor.full_job_name(),
        len(dtensor.jobs()), dtensor.num_local_devices("CPU"), dtensor.num_global_devices("CPU"),
        [one.to_string() for one in dtensor.local_devices("CPU", 1 - me)],
        dtensor.device_name(), mesh.to_string(), mesh.shoal_mesh.text,
        dtensor.Mesh.from_string(mesh.to_string()).shoal_mesh == mesh.shoal_mesh,
        dtensor.create_mesh({"z": 2}).local_devices(),
    ]  # fmt: skip
    dtensor.shutdown_accelerator_system()  # an error there
    over = refused(dtensor.shutdown_accelerator_system)
    return told, early, absent, again, over, refused(dtensor.initialize_accelerator_system)


def test_a_job_by_dtensors_variables(child_env):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as cluster:
        found = cluster.run(meets_as_dtensor_says, initialize=False)
    for me, (told, early, absent, again, over, twice) in enumerate(found):
        job, other = f"worker/replica:0/task:{me}", f"/job:worker/replica:0/task:{1 - me}"
        ids = f"{2 * me},{2 * me + 1}"
        own = [f"/job:{job}/device:CPU:{n}" for n in range(2)]
        assert told == [
            me, "CPU", "DTensor", 2, job, 2, 2, 4,
            [f"{other}/device:CPU:{n}" for n in range(2)], f"/job:{job}/device:CUSTOM:0",
            f"grid|x=2,y=2|0,1,2,3|{ids}|{','.join(own)}",
            "x=2 y=2 | ids 0..1,2048..2049 | processes 0x2,1x2 | name grid", True, own,
        ]  # fmt: skip
        assert "Accelerators are uninitialized in this process of a job of 2" in early
        assert "already been initialized" in again
        assert "is not initialized" in over
        assert "no valid TPUs found" in absent
        assert "cannot be joined a second time in one process" in twice


def meets_on_described_tpus():
    kind = dtensor.initialize_accelerator_system("TPU")
    rings = dtensor.create_tpu_mesh(["x", "y"], [2, 4], "ring")
    same = dtensor.create_distributed_mesh({"x": 2, "y": 4}, "ring", device_type="TPU")
    x = dtensor.copy_to_mesh(np.arange(8.0, dtype=np.float32), Layout(["x"], rings))
    if shoal.process_index():
        os.environ["SHOAL_TOPOLOGY"] = "v4:2x2x2"
    apart = refused(lambda: shoal.make_mesh({"x": 2, "y": 4}))
    ids = rings.shoal_mesh.device_ids.ravel().tolist()
    return kind, ids, same.shoal_mesh == rings.shoal_mesh, float(jnp.sum(x)), apart


def test_tpus_that_cpu_devices_stand_for(child_env):
    """On a laptop: what mesh does the program make on these slices, and whose are its devices?"""
    env = {**child_env, "SHOAL_TOPOLOGY": "v5e:2x4"}
    real = [*place(parse("v5e:2x4"), {"x": 2, "y": 4}, compatible_with="dtensor").device_ids.flat]
    listed = parse("v5e:2x4").listed_ids.tolist()
    cpus = [0, 1, 2, 3, 2048, 2049, 2050, 2051]
    with Cluster(2, start_method="fork", devices=4, env=env) as cluster:
        for kind, ids, is_same, total, apart in cluster.run(
            meets_on_described_tpus, initialize=False
        ):
            assert (kind, is_same, total) == ("CPU", True, 28.0)
            assert ids == [cpus[listed.index(number)] for number in real]
            assert "SHOAL_TOPOLOGY='v4:2x2x2'" in apart


def moves_and_saves(folder):
    mesh = dtensor.create_distributed_mesh({"x": 2, "y": 2}, device_type="CPU")
    rows, columns = Layout(["x", U], mesh), Layout([U, "y"], mesh)
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    x = dtensor.copy_to_mesh(values, rows)
    dtensor.check_layout(dtensor.relayout(x, columns), columns)
    own = values[2 * shoal.process_index() :][:2]
    packed = dtensor.pack([own, own], rows)
    pieces = [np.asarray(one).tolist() for one in dtensor.unpack(packed)]
    born = dtensor.call_with_layout(jnp.ones, columns, (4, 4))
    _ = dtensor.call_with_layout(jnp.full, columns, (4, 4), float(shoal.process_index()))
    with pytest.raises(shoal.DivergenceError, match=r"process 1: argument \[0\]\[1\]: 1\.0"):
        shoal.barrier("numbers that are compiled in differ")
    v = DVariable(x)
    v.assign_add(dtensor.relayout(born, rows)).assign(dtensor.relayout_like(packed, born))
    scalar = float(jax.jit(jnp.sum)(v.read_value()))
    unreachable = refused(lambda: DVariable(packed).numpy())
    dtensor.name_based_save(mesh, f"{folder}/named", {"w": v, "b": born})
    back = dtensor.name_based_restore(mesh, f"{folder}/named", {"w": born})
    dtensor.check_layout(back["w"], columns)
    target = born if shoal.process_index() else "text"
    wrong = refused(lambda: dtensor.name_based_restore(mesh, f"{folder}/named", {"w": target}))
    own_prefix = f"{folder}/of {shoal.process_index()}"
    apart = refused(lambda: dtensor.name_based_save(mesh, own_prefix, {"b": born}))
    assert "Diverged" in apart, apart
    assert not os.path.exists(own_prefix)
    assert float((abs(v) * 2 - v).sum()) == float(v.sum())
    checkpoint = DTensorCheckpoint(mesh, v=v)
    path = checkpoint.save(f"{folder}/ckpt")
    v.assign_sub(v)
    checkpoint.restore(path)
    same = shoal.allgather(back["w"], tiled=True)
    dtensor._global_barrier(mesh, "SaveV2")
    dtensor._dtensor_device()._register_mesh(mesh)
    layouts = dtensor.fetch_layout(back["w"]) == columns
    return (
        pieces,
        scalar,
        unreachable,
        wrong,
        np.asarray(same).tolist(),
        layouts,
        float(v.read_value().sum()),
    )


def test_moves_and_saves(cluster):
    with tempfile.TemporaryDirectory() as folder:
        found = cluster.run(moves_and_saves, folder)
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    for me, (pieces, scalar, unreachable, wrong, same, layouts, total) in enumerate(found):
        assert wrong.startswith(("UsageError", "PeerFailedError")[me])
        assert "must be a DTensor" in wrong
        assert pieces == [values[2 * me : 2 * me + 2].tolist()] * 2
        assert scalar == total == values.sum()
        assert "shoal.allgather(read_value(), tiled=True) fetches them" in unreachable
        assert same == values.tolist()
        assert layouts


def leaves_alone(folder):
    """Process 0 leaves each call of a checkpoint by an exception before it meets the other."""
    mesh = dtensor.create_distributed_mesh({"x": 4}, device_type="CPU")
    v = DVariable(jnp.arange(4.0), layout=Layout(["x"], mesh))
    checkpoint, me, told = DTensorCheckpoint(mesh, v=v), shoal.process_index(), []
    path = checkpoint.save(f"{folder}/model")
    for call in (checkpoint.write, checkpoint.save, checkpoint.read, checkpoint.restore):
        for wrong in ({"options": 1}, {"option": 1}):
            try:
                call(path, **({} if me else wrong))
                told.append("nothing")
            except (shoal.ShoalError, TypeError) as error:
                told.append(type(error).__name__)
            shoal.barrier("goes on", timeout_s=60)
    checkpoint.save(f"{folder}/model")  # under the next number on both
    return told


def test_a_call_of_a_checkpoint_that_one_leaves_fails_for_all(cluster, tmp_path):
    first, second = cluster.run(leaves_alone, str(tmp_path))
    assert first == ["NotPossible", "UsageTypeError"] * 4
    assert second == ["SaveAbortedError"] * 4 + ["PeerFailedError"] * 4


class Rows:
    """A dataset that can only be iterated."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def feeds():
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    found = []
    for dims in ({"batch": 4}, {"h": 2, "batch": 2}, {"batch": 2, "h": 2}):
        mesh = dtensor.create_distributed_mesh(dims, device_type="CPU")
        rows = Layout(["batch", U], mesh)
        for dataset in (values, Rows(values)):
            batches = DTensorDataset(
                dataset, mesh=mesh, layouts=rows, global_batch_size=4, batch_dim="batch"
            )
            found.append([np.asarray(shoal.allgather(one, tiled=True)).tolist() for one in batches])
        pairs = (values.tolist(), np.arange(8, dtype=np.int32))  # side by side
        batches = DTensorDataset(
            pairs, mesh=mesh, layouts=(rows, Layout(["batch"], mesh)), global_batch_size=4
        )
        found.append([np.asarray(shoal.allgather(one, tiled=True)).tolist() for one, _ in batches])
    uneven = DTensorDataset(  # only process 1 reads the element of another dtype
        [1] * 6 + [1 + 0.5 * shoal.process_index()] * 2, mesh=mesh,
        layouts=Layout(["batch"], mesh), global_batch_size=8,
    )  # fmt: skip
    return found, refused(lambda: [*uneven])


def test_every_process_reads_its_own_rows(cluster):
    wanted = np.arange(16, dtype=np.float32).reshape(2, 4, 2).tolist()
    for found, told in cluster.run(feeds):
        assert found == [wanted] * 9
        assert "DTensorDataset: float64 is not int32; cast it" in told


def barriers():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))
    logging.getLogger("shoal").addHandler(handler)
    logging.getLogger("shoal").setLevel(logging.DEBUG)
    me = shoal.process_index()
    mesh = dtensor.create_distributed_mesh({"x": 4}, device_type="CPU")
    own = dtensor.create_mesh({"x": 2})
    dtensor.barrier(own, f"own {me}")  # of two devices of one process: the other is not waited for
    dtensor.barrier(mesh, "both", 60_000)
    other = refused(lambda: dtensor.barrier(mesh, f"name {me}", 60_000))
    began = time.monotonic()
    if me:  # comes when the deadline of the other is over
        shoal.barrier("over", lane="told")
    late = refused(lambda: dtensor.barrier(mesh, "late", 60_000 if me else 200))
    waited = time.monotonic() - began
    if not me:
        shoal.barrier("over", lane="told")
    dtensor.barrier(mesh)
    return other, late, waited, [text for level, text in lines if level == logging.INFO]


def test_barriers(cluster):
    for me, (other, late, waited, logged) in enumerate(cluster.run(barriers)):
        assert "Diverged: dtensor.barrier" in other
        assert "DeadlineError" in late
        assert waited < 30
        assert f"finished running barrier across all clients after op: own {me}" in logged
        assert "entering barrier before op: both" in logged
