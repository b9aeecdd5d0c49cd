"""Configuration, start and meshes of `shoal.compat.dtensor`, in one process."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

from shoal.compat import dtensor
from shoal.compat.dtensor import mesh, meshes, tpu
from shoal.errors import InitializeError, UsageError
from shoal.plan import placement, topology


@pytest.fixture(scope="module")
def joined():
    dtensor.initialize_accelerator_system("CPU")
    yield
    dtensor.shutdown_accelerator_system()


def texts(devices):
    return [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in devices]


def test_this_process_and_its_devices(monkeypatch):
    assert (dtensor.client_id(), dtensor.num_clients(), dtensor.jobs()) == (0, 1, [])
    assert dtensor.job_name() == "localhost"
    assert dtensor.full_job_name() == "localhost/replica:0/task:0"
    assert dtensor.num_local_devices("cpu") == dtensor.num_global_devices("CPU") == 8
    assert dtensor.num_local_devices("TPU") == dtensor.num_local_devices("XPU") == 0
    assert dtensor.num_global_devices("XPU") == 0
    assert [one.to_string() for one in dtensor.local_devices("CPU")] == texts(range(8))
    assert dtensor.preferred_device_type() == "CPU"
    assert dtensor.is_local_mode()
    with pytest.raises(ValueError, match="Unknown device_type XPU, Allowed values: CPU, GPU, TPU"):
        dtensor.local_devices("XPU")
    with pytest.raises(ValueError, match="Unexpected task ID 1"):
        dtensor.full_job_name(1)
    monkeypatch.setenv("DTENSOR_JOB_NAME", "learner")
    assert dtensor.full_job_name() == "learner/replica:0/task:0"


def test_variables_of_a_job_of_several(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "a:1, b:2")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "1")
    assert (dtensor.client_id(), dtensor.num_clients()) == (1, 2)
    assert dtensor.jobs() == ["a:1", "b:2"]
    assert dtensor.full_job_name() == "worker/replica:0/task:1"
    assert not dtensor.is_local_mode()
    with pytest.raises(ValueError, match="Accelerators are uninitialized"):
        dtensor.num_global_devices("CPU")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "2")
    with pytest.raises(ValueError, match="out of range"):
        dtensor.client_id()


@pytest.mark.parametrize(
    ("listed", "is_right"),
    [("/bns/l/2:80,/bns/l/10:80", True), ("/bns/l/1:80,/bns/l/0:80", False), ("/bns/x", False)],
)
def test_bns_entries_are_sorted(monkeypatch, listed, is_right):
    monkeypatch.setenv("DTENSOR_JOBS", listed)
    if is_right:
        assert dtensor.jobs() == listed.split(",")
    else:
        with pytest.raises(ValueError, match="Unexpected DTENSOR_JOBS content"):
            dtensor.jobs()


def test_switches(monkeypatch):
    for value, is_on in [("", False), ("1", True), ("TRUE", True), ("no", False), ("0", False)]:
        monkeypatch.setenv("DTENSOR_ENABLE_HEARTBEAT", value)
        assert dtensor.heartbeat_enabled() is is_on
    monkeypatch.delenv("DTENSOR_ENABLE_HEARTBEAT")
    assert dtensor.heartbeat_enabled()
    assert dtensor.gpu_use_nccl_communication()
    assert dtensor.use_multi_device_mode()
    monkeypatch.setenv("DTENSOR_GPU_USE_NCCL_COMMUNICATION", "0")
    monkeypatch.setenv("DTENSOR_ENABLE_MULTI_DEVICE_EXPANSION", "0")
    assert not dtensor.gpu_use_nccl_communication()
    assert not dtensor.use_multi_device_mode()


def test_join_and_leave(monkeypatch, caplog):
    assert not dtensor.is_initialized()
    with pytest.raises(ValueError, match="is not initialized; call initialize_accelerator_system"):
        dtensor.shutdown_accelerator_system()
    for name in ("initialize_accelerator_system", "initialize_tpu_system",
                 "initialize_multi_client"):  # fmt: skip
        assert getattr(dtensor, name)("cpu") == "CPU"
        assert dtensor.is_initialized()
        with pytest.raises(ValueError, match="already been initialized") as told:
            dtensor.initialize_accelerator_system()
        assert isinstance(told.value, InitializeError)
        dtensor.shutdown_tpu_system()
    monkeypatch.setenv("DTENSOR_ENABLE_HEARTBEAT", "0")
    with caplog.at_level(logging.WARNING, "shoal"):
        assert dtensor.initialize_accelerator_system() == "CPU"
    assert "SHOAL_LOST_AFTER_S=inf" in caplog.text
    dtensor.dtensor_shutdown_tpu_system()


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: dtensor.initialize_accelerator_system("XPU"), ValueError, "Unknown device_type"),
        (lambda: dtensor.initialize_accelerator_system("GPU"), ValueError, "no valid GPUs found"),
        (lambda: dtensor.dtensor_initialize_tpu_system(True), ValueError, "no valid TPUs found"),
        (lambda: dtensor.initialize_accelerator_system("CPU", True, 32), ValueError, "too late"),
        (lambda: tpu.initialize_tpu_system(True), NotImplementedError, "megacore"),
        (lambda: tpu.initialize_tpu_system(), ValueError, "no valid TPUs found"),
        (
            lambda: dtensor.initialize_tpu_system(experimental_enable_megcore=True),
            NotImplementedError,
            "megacore",
        ),
        (lambda: dtensor.set_initialized(True), NotImplementedError, "cannot be set"),
        (lambda: dtensor.tpu_system_init_helper(0, 1, 1), NotImplementedError, "by itself"),
        (
            lambda: dtensor.initialize_multi_client_cluster("j", [], 0, ""),
            ValueError,
            "dtensor_jobs is empty",
        ),
        (
            lambda: dtensor.initialize_multi_client_cluster("j", ["a:1", "b:1"], 0, ""),
            ValueError,
            "too late",
        ),
        (lambda: dtensor.create_distributed_mesh({"x": 8}), ValueError, "are uninitialized"),
    ],
)
def test_starts_that_are_refused(call, kind, words):
    jax.devices()  # JAX has started: some come too late
    with pytest.raises(kind, match=words):
        call()
    assert not dtensor.is_initialized()


def test_mesh_functions_are_refused_inside_jit():
    def within(call):
        jax.jit(lambda x: call() or x)(np.float32(1))

    mesh = dtensor.create_mesh()
    for call in (
        dtensor.initialize_accelerator_system,
        dtensor.shutdown_accelerator_system,
        lambda: dtensor.barrier(mesh),
    ):
        with pytest.raises(RuntimeError, match="must be called eagerly"):
            within(call)


def test_create_mesh():
    assert dtensor.create_mesh().to_string() == (
        f"|x=8|0,1,2,3,4,5,6,7|0,1,2,3,4,5,6,7|{','.join(texts(range(8)))}"
    )
    dims = [("x", 2), ("y", -1)]
    mesh = dtensor.create_mesh(dims, "m", device_type="cpu")
    assert (mesh.shape(), mesh.name, dims) == ([2, 4], "m", [("x", 2), ("y", -1)])
    some = dtensor.create_mesh({"x": 2}, devices=["CPU:3", dtensor.local_devices("CPU")[1]])
    assert some.local_devices() == texts([3, 1])
    assert some.shoal_mesh.device_ids.tolist() == [3, 1]
    assert some.local_device_ids() == [0, 1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dtensor.create_mesh({"x": 3}), "create_mesh: make_mesh.*multiply to 3"),
        (lambda: dtensor.create_mesh({"x": -1, "y": -1}), "-1"),
        (lambda: dtensor.create_mesh({"x": 1}, devices=[]), "is empty"),
        (lambda: dtensor.create_mesh({"x": 1}, devices=["CPU:77"]), "has 8 cpu devices"),
        (lambda: dtensor.create_mesh({"x": 1}, devices=["GPU:0"]), "has 0 gpu devices"),
        (lambda: dtensor.create_mesh(device_type="TPU"), "must be non-empty"),
        (lambda: dtensor.create_mesh(devices=["CPU:0"], device_type="GPU"), "Conflicting devices"),
        (lambda: dtensor.create_mesh(use_xla_spmd=True), "not supported for CPU mesh"),
        (lambda: dtensor.create_mesh(device_type="XPU"), "Unknown device_type XPU"),
    ],
)
def test_meshes_that_create_mesh_refuses(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_create_distributed_mesh(joined):
    mesh = dtensor.create_distributed_mesh({"x": 2, "y": -1})
    assert mesh == dtensor.create_mesh({"x": 2, "y": 4})
    some = dtensor.create_distributed_mesh([("x", 2)], "n", ["CPU:0", "CPU:2"], "CPU")
    assert some.shoal_mesh.device_ids.tolist() == [0, 2]
    for call, words in [
        (lambda: dtensor.create_distributed_mesh({"x": 16}), "multiply to 16"),
        (lambda: dtensor.create_distributed_mesh({"x": 1}, device_type="XPU"), "Unknown"),
        (lambda: dtensor.create_distributed_mesh({"x": 1}, use_xla_spmd=True), "CPU mesh"),
        (lambda: dtensor.create_distributed_mesh({"x": 1}, "", [], "CPU"), "is empty"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


# 4x4 chips of one core, four hosts of 2x2; the id of a core is y * 4 + x.
CORES = [
    {"id": y * 4 + x, "process": y // 2 * 2 + x // 2, "coords": (x, y, 0), "kind": "TPU v5e",
     "platform": "tpu"}
    for y in range(4)
    for x in range(4)
]  # fmt: skip
TABLE = [
    ({}, [*range(16)], [0, 1, 4, 5], [2, 3, 6, 7]),
    ({"build_ring_across_rings": True},
     [0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7], [0, 1, 12, 13], [2, 3, 14, 15]),
    ({"build_ring_across_rings": True, "rotate_ring_across_rings": True},
     [*range(16)], [0, 1, 4, 5], [2, 3, 6, 7]),
    ({"can_split_host_across_rings": False},
     [0, 1, 5, 4, 2, 3, 7, 6, 8, 9, 13, 12, 10, 11, 15, 14], [0, 1, 3, 2], [4, 5, 7, 6]),
    ({"ring_bounds": [2, 2, 1, 1]},
     [0, 1, 5, 4, 2, 3, 7, 6, 8, 9, 13, 12, 10, 11, 15, 14], [0, 1, 3, 2], [4, 5, 7, 6]),
    ({"ring_bounds": [2, 2, 1, 1], "build_ring_across_rings": True},
     [0, 1, 5, 4, 2, 3, 7, 6, 10, 11, 15, 14, 8, 9, 13, 12], [0, 1, 3, 2], [4, 5, 7, 6]),
    ({"ring_axes": ["core", "y", "x", "z"]},
     [0, 12, 8, 4, 1, 13, 9, 5, 2, 14, 10, 6, 3, 15, 11, 7], [0, 4, 3, 7], [8, 12, 11, 15]),
    ({"ring_dims": 2},
     [0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4], [0, 1, 15, 6], [2, 3, 5, 4]),
    ({"ring_dims": 0}, [*range(16)], [0, 1, 4, 5], [2, 3, 6, 7]),
]  # fmt: skip


@pytest.fixture
def on_a_slice(monkeypatch):
    """Let the mesh be of the cores of a TPU slice, and this process any of its hosts'."""

    def mesh_of_rings(pairs, rings, *, label):
        cores = topology.from_devices(CORES)
        return placement.place(cores, pairs, compatible_with="dtensor", rings=rings)

    def be(process):
        owned = {p: [c["id"] for c in CORES if c["process"] == p] for p in range(4)}
        monkeypatch.setattr(meshes, "mesh_of_rings", mesh_of_rings)
        monkeypatch.setattr(mesh, "devices_of", lambda kind: owned)
        monkeypatch.setattr(mesh, "process_index", lambda: process)

    return be


@pytest.mark.parametrize(("options", "order", "first", "second"), TABLE)
def test_create_tpu_mesh(on_a_slice, options, order, first, second):
    for process, ids in enumerate((first, second)):
        on_a_slice(process)
        mesh = dtensor.create_tpu_mesh(["x", "y"], [4, 4], "ring", **options)
        assert mesh.shoal_mesh.device_ids.ravel().tolist() == order
        assert mesh.local_device_ids() == ids
        assert mesh.local_devices()[3] == f"/job:localhost/replica:0/task:{process}/device:TPU:3"
    with pytest.raises(NotImplementedError, match=r"shoal_mesh\.local"):
        dtensor.get_device_ids(mesh, 1)
    assert dtensor.get_device_ids(mesh) == second
    assert dtensor.get_device_locations(mesh)[0] == {"x": second[0] // 4, "y": second[0] % 4}


@pytest.mark.parametrize(
    ("names", "shape", "options", "words"),
    [
        (["x"], [2, 8], {}, "1 names for 2 sizes"),
        (["x", "y"], [4, 4], {"ring_dims": 3}, "dims=3"),
        (["x", "y"], [4, 4], {"ring_axes": ["x"]}, "each once"),
        (["x", "y"], [4, 4], {"ring_bounds": [3, 9, 1, 1]}, "must divide"),
        (["x", "y"], [2, 4], {}, "16"),
        (["x", "x"], [4, 4], {}, "repeated"),
    ],
)
def test_rings_that_are_refused(on_a_slice, names, shape, options, words):
    on_a_slice(0)
    with pytest.raises(ValueError, match=words):
        dtensor.create_tpu_mesh(names, shape, "", **options)


def test_tpu_functions_without_tpus_raise():
    with pytest.raises(InitializeError, match=r"dtensor\.create_tpu_mesh"):
        dtensor.create_tpu_mesh(["x"], [8], "")
    mesh = dtensor.create_mesh()
    for ask in (dtensor.get_device_ids, dtensor.get_device_locations):
        with pytest.raises(ValueError, match="must be a TPU mesh"):
            ask(mesh)


def test_barrier(caplog):
    mesh = dtensor.create_mesh({"x": 8})
    with caplog.at_level(logging.INFO, "shoal"):
        dtensor.barrier(mesh)
        dtensor.barrier(mesh, "before exit", 30_000)
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert "entering barrier before op: (barrier)" in logged
    assert "finished running barrier across all clients after op: before exit" in logged
    with pytest.raises(TypeError, match="last_op_name"):
        dtensor._global_barrier(mesh)
    for wrong in (None, dtensor.Mesh.from_device("CPU:0")):
        with pytest.raises(ValueError, match="dtensor"):
            dtensor.barrier(wrong)
    with pytest.raises(ValueError, match=r"dtensor.barrier: sync_devices.*positive"):
        dtensor.barrier(mesh, "late", -1)
