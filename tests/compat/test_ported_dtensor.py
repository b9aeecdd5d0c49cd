"""What TensorFlow's own tests of DTensor say of meshes, layouts, configuration and starts."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.compat import dtensor
from shoal.compat.dtensor import UNSHARDED, DeviceSpec, Layout, Mesh, meshes
from shoal.compat.dtensor import mesh as values
from shoal.plan import placement, topology

U = UNSHARDED
SINGLE = "job:localhost/replica:0/task:0/TPU:0"  # without the first slash, and without "device:"


def names(kind, count):
    return [f"/job:localhost/replica:0/task:0/device:{kind}:{n}" for n in range(count)]


def grid(dims, kind="TPU", **named):
    """Return a mesh of all devices of a host, which need not exist."""
    shape = [*dims.values()]
    size = int(np.prod(shape))
    ids = np.arange(size).reshape(shape)
    return Mesh([*dims], ids, [*range(size)], names(kind, size), **named)


TEXT = "|rows=2,cols=3|0,1,2,3,4,5|0,1,2,3,4,5|" + ",".join(names("TPU", 6))


@pytest.fixture
def mesh():
    return grid({"rows": 2, "cols": 3})


# ---- Meshes.


def test_the_mesh_of_a_device_has_a_single_device():
    assert Mesh.from_device(SINGLE).is_single_device()


def test_the_mesh_of_a_device_comes_back_from_its_string():
    mesh = Mesh.from_device(SINGLE)
    back = Mesh.from_string(mesh.to_string())
    assert back.is_single_device()
    assert back.single_device == mesh.single_device


@pytest.mark.differs("`as_proto`")
def test_the_mesh_of_a_device_is_read_from_the_fields_of_a_proto():
    mesh = Mesh.from_device(SINGLE)
    with pytest.raises(NotImplementedError, match="protocol buffers"):
        mesh.as_proto()
    back = Mesh.from_proto(SimpleNamespace(single_device=SINGLE))
    assert back.is_single_device()
    assert back.single_device == mesh.single_device


def test_a_mesh_from_a_string_is_the_one_that_was_constructed(mesh):
    assert Mesh.from_string(TEXT) == mesh


def test_the_string_of_a_mesh_comes_back_unchanged():
    assert Mesh.from_string(TEXT).to_string() == TEXT


def test_repr_of_a_mesh_shows_dims_and_devices():
    shown = repr(grid({"a": 3, "b": 2}, "CPU"))
    for part in ("a=3,b=2", "CPU:0", "CPU:5"):
        assert part in shown


def test_a_mesh_contains_its_dims_and_no_others(mesh):
    assert [mesh.contains_dim(name) for name in ("rows", "cols", "other")] == [True, True, False]
    assert "rows" in mesh
    assert "cols" in mesh
    assert "other" not in mesh


def test_a_mesh_knows_its_names_sizes_and_devices(mesh):
    assert mesh.dim_names == ["rows", "cols"]
    assert mesh.size == 6
    assert mesh.device_type() == "TPU"
    assert grid({"x": 2}, "CPU").device_type() == "CPU"
    assert mesh.num_local_devices() == 6
    assert mesh.min_global_device_id() == 0
    assert not mesh.is_remote()
    assert mesh.local_device_ids() == [0, 1, 2, 3, 4, 5]
    assert mesh.local_devices() == names("TPU", 6)
    assert mesh.shape() == [2, 3]


def test_a_mesh_can_be_pickled(mesh):
    assert pickle.loads(pickle.dumps(mesh)) == mesh


@pytest.mark.differs("a mesh's name, once it is made")
def test_a_mesh_is_immutable_and_its_name_is_pickled():
    named = grid({"x": 2}, mesh_name="grid")
    with pytest.raises(AttributeError, match="immutable"):
        named._name = "other"
    back = pickle.loads(pickle.dumps(named))
    assert back == named
    assert back.name == "grid"


def test_a_dim_of_a_mesh_has_a_name_and_a_size(mesh):
    for name, size in (("rows", 2), ("cols", 3)):
        assert (mesh[name].name, mesh[name].size) == (name, size)


@pytest.mark.parametrize(
    ("shape", "strides"), [((6,), [1]), ((3, 2, 4), [8, 4, 1]), ((2, 5, 3, 2), [30, 6, 2, 1])]
)
def test_strides_are_the_distances_of_neighbors(shape, strides):
    dims = dict(zip("abcd", shape, strict=False))
    assert grid(dims, "CPU").strides == strides


@pytest.mark.differs("`coords`")
def test_coords_wrap_around():
    mesh = grid({"a": 3, "b": 2, "c": 2}, "CPU")
    wanted = [*itertools.product(range(3), range(2), range(2))] * 2
    for position, place in enumerate(wanted):
        found = mesh.coords(position)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, place)


@pytest.mark.parametrize("is_xla", [True, False])
def test_a_tpu_mesh_keeps_use_xla_spmd(is_xla):
    mesh = grid({"a": 2, "b": 2}, use_xla_spmd=is_xla)
    assert mesh.use_xla_spmd() is is_xla


@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_use_xla_spmd_is_refused_without_tpus(kind):
    with pytest.raises(ValueError, match=f"XLA SPMD is not .*supported for {kind}"):
        grid({"a": 2, "b": 2}, kind, use_xla_spmd=True)


@pytest.mark.differs("`as_proto`")
@pytest.mark.parametrize("is_xla", [True, False])
def test_use_xla_spmd_is_read_from_the_fields_of_a_proto(is_xla):
    made = grid({"x": 2}, use_xla_spmd=is_xla)
    proto = SimpleNamespace(
        single_device="", name="", mesh_dimensions=[SimpleNamespace(name="x", size=2)],
        global_device_ids=[0, 1], local_device_ids=[0, 1], local_devices=names("TPU", 2),
        global_devices=[], use_xla_spmd=is_xla,
    )  # fmt: skip
    assert Mesh.from_proto(proto) == made
    assert Mesh.from_proto(proto).use_xla_spmd() is is_xla


@pytest.mark.parametrize(
    "text",
    [
        f"|x=2|0,1|0,1|{','.join(names('TPU', 2))}|use_xla_spmd",
        f"|x=2|0,1|1|{names('TPU', 2)[1]}|{','.join(names('TPU', 2))}|use_xla_spmd",
    ],
    ids=["without global devices", "with global devices"],
)
def test_use_xla_spmd_is_read_from_a_string(text):
    assert Mesh.from_string(text).use_xla_spmd()


def test_a_mesh_of_several_device_types_is_refused():
    devices = [*names("CPU", 1), *names("TPU", 1)]
    with pytest.raises(ValueError, match="multiple device_types"):
        Mesh(["x"], np.arange(2), [0, 1], devices)


def test_a_device_twice_in_a_mesh_is_refused():
    with pytest.raises(ValueError, match="Duplicate devices"):
        Mesh(["x", "y"], np.arange(4).reshape(2, 2), [0, 1, 2, 3], names("CPU", 2) * 2)


def test_ids_of_a_mesh_must_increase_by_one():
    with pytest.raises(ValueError, match="must sequentially increase"):
        Mesh(["x"], np.arange(2)[::-1], [1, 0], names("CPU", 2))


def test_the_host_mesh_has_cpus_and_no_name():
    mesh = grid({"a": 3, "b": 2}, "GPU", mesh_name="lost")
    assert mesh.host_mesh() == grid({"a": 3, "b": 2}, "CPU")


# ---- Layouts.


def test_no_spec_is_not_one_unsharded_spec():
    one, none = (
        Layout.from_string(f"sharding_specs:{specs} mesh:{TEXT}") for specs in (f"{U},", "")
    )
    assert (one.rank, none.rank) == (1, 0)
    assert one.to_string() != none.to_string()


@pytest.mark.parametrize("specs", ["rows,cols,", f"{U},{U},", f"cols,{U},rows,"])
def test_the_string_of_a_layout_comes_back_unchanged(specs):
    text = f"sharding_specs:{specs} mesh:{TEXT}"
    assert Layout.from_string(text).to_string() == text


def test_a_layout_can_be_pickled(mesh):
    layout = Layout.replicated(mesh, rank=4)
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_repr_of_a_layout_shows_its_specs(mesh):
    assert f"cols,{U},{U}" in repr(Layout.batch_sharded(mesh, "cols", rank=3))


def test_what_is_no_mesh_is_refused_in_a_layout():
    with pytest.raises(ValueError, match="mesh is not a valid Mesh object"):
        Layout(["rows"], TEXT)


def test_a_mesh_dim_twice_in_a_layout_is_refused(mesh):
    with pytest.raises(ValueError, match="Mesh dimensions must be unique"):
        Layout(["cols", U, "cols"], mesh)


def test_an_unknown_mesh_dim_in_a_layout_is_refused(mesh):
    with pytest.raises(ValueError, match=r"must either be a valid mesh dimension .*or UNSHARDED"):
        Layout(["depth", U], mesh)


def test_a_batch_sharded_layout_splits_the_first_dim_only(mesh):
    layout = Layout.batch_sharded(mesh, "cols", rank=2)
    assert layout.num_shards(0) == mesh.dim_size("cols") == 3
    assert layout.num_shards(1) == 1


def test_global_and_local_shapes_follow_from_each_other(mesh):
    layout = Layout(["cols", U, "rows"], mesh)
    assert layout.global_shape_from_local_shape((2, 7, 1)) == (6, 7, 2)
    assert layout.local_shape_from_global_shape((6, 7, 2)) == (2, 7, 1)


def test_the_layout_of_a_single_device_mesh_is_that_of_its_device():
    mesh = Mesh.from_device(SINGLE)
    layout = Layout.from_single_device_mesh(mesh)
    assert layout.is_single_device()
    assert layout.mesh == mesh
    assert layout == Layout.from_device(mesh.single_device)


def test_the_layout_of_a_single_device_comes_back_from_its_string():
    layout = Layout.from_device(SINGLE)
    assert Layout.from_string(layout.to_string()) == layout


@pytest.mark.differs("`as_proto`")
def test_the_layout_of_a_single_device_is_read_from_the_fields_of_a_proto():
    layout = Layout.from_device(SINGLE)
    with pytest.raises(NotImplementedError, match="protocol buffers"):
        layout.as_proto()
    mesh = SimpleNamespace(single_device=SINGLE)
    proto = SimpleNamespace(type=2, mesh_config=mesh, sharding_specs=[])
    assert Layout.from_proto(proto) == layout


def test_a_layout_can_be_marked_as_parted(mesh):
    parted = Layout.batch_sharded(mesh, "rows", rank=2).to_parted()
    assert parted.type.name == "PARTED"


# ---- Configuration.


def test_a_process_by_itself_is_client_0_of_1():
    assert (dtensor.client_id(), dtensor.num_clients()) == (0, 1)
    assert dtensor.job_name() == "localhost"
    assert dtensor.full_job_name() == "localhost/replica:0/task:0"
    assert dtensor.jobs() == []


def test_all_devices_of_the_preferred_type_are_listed():
    kind = dtensor.preferred_device_type()
    wanted = [DeviceSpec.from_string(one) for one in names(kind, 8)]
    assert dtensor.local_devices(kind) == wanted
    assert dtensor.num_local_devices(kind) == dtensor.num_global_devices(kind) == 8


@pytest.mark.parametrize("port", ["", ":7000"])
def test_bns_jobs_must_be_in_the_order_of_their_tasks(monkeypatch, port):
    listed = [f"/bns/cell/job/{task}{port}" for task in range(12)]
    monkeypatch.setenv("DTENSOR_JOBS", ",".join(listed))
    assert dtensor.jobs() == listed
    monkeypatch.setenv("DTENSOR_JOBS", ",".join(reversed(listed)))
    with pytest.raises(ValueError, match="Unexpected DTENSOR_JOBS"):
        dtensor.jobs()


def test_jobs_with_ports_may_be_in_any_order(monkeypatch):
    listed = [f"host:{port}" for port in (8004, 8003, 8010, 8001)]
    monkeypatch.setenv("DTENSOR_JOBS", ",".join(listed))
    assert dtensor.jobs() == listed


# ---- Meshes of the devices there are, and starts.


@pytest.fixture
def joined():
    dtensor.initialize_accelerator_system(dtensor.preferred_device_type())
    yield
    if dtensor.is_initialized():
        dtensor.shutdown_accelerator_system()


def test_a_mesh_without_dims_has_all_devices():
    mesh = dtensor.create_mesh()
    assert mesh.num_local_devices() == mesh.size == 8


def test_a_mesh_is_created_from_a_dict():
    mesh = dtensor.create_mesh({"p": 4, "q": 2}, device_type="CPU")
    assert mesh.dim_names == ["p", "q"]
    assert mesh.num_local_devices() == mesh.size == 8


@pytest.mark.parametrize(
    "devices",
    [
        ["/device:cpu:1", "/device:cpu:0"],
        [DeviceSpec.from_string("/cpu:1"), DeviceSpec.from_string("/cpu:0")],
    ],
    ids=["names", "specs"],
)
def test_a_mesh_is_created_of_named_devices(devices):
    mesh = dtensor.create_mesh([("p", 2), ("q", 1)], devices=devices)
    assert mesh.num_local_devices() == mesh.size == 2
    assert mesh.dim_names == ["p", "q"]
    assert mesh.local_devices() == names("CPU", 2)[::-1]


@pytest.mark.parametrize("dims", [[("p", 8)], {"p": 8, "q": 1}])
def test_a_distributed_mesh_of_one_client_has_its_devices(joined, dims):
    mesh = dtensor.create_distributed_mesh(mesh_name="all", mesh_dims=dims)
    assert mesh.num_local_devices() == mesh.size == 8
    assert mesh.dim_names == [*dict(dims)]


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
def test_a_distributed_mesh_can_have_fewer_devices_and_be_made_again(joined, devices):
    for _ in range(2):
        mesh = dtensor.create_distributed_mesh(
            mesh_name="some", mesh_dims=[("p", len(devices))], local_devices=devices
        )
        assert mesh.num_local_devices() == mesh.size == len(devices)


def test_a_distributed_mesh_needs_a_start():
    with pytest.raises(ValueError, match="Accelerators are uninitialized"):
        dtensor.create_distributed_mesh([("p", 1)], "some", local_devices=["CPU:0"])


def test_a_distributed_mesh_of_more_devices_than_there_are_is_refused(joined):
    with pytest.raises(ValueError, match="not the number of devices"):
        dtensor.create_distributed_mesh([("p", 16)], "more")


def test_a_distributed_mesh_of_cpus_is_refused_with_xla_spmd(joined):
    with pytest.raises(ValueError, match=r"XLA SPMD is not .*supported for CPU"):
        dtensor.create_distributed_mesh(
            [("p", 2)], "some", local_devices=["CPU:0", "CPU:1"], use_xla_spmd=True
        )


def test_after_a_start_the_system_is_initialized(joined):
    assert dtensor.is_initialized()


def test_a_start_returns_the_type_of_the_devices(joined):
    dtensor.shutdown_accelerator_system()
    assert dtensor.initialize_accelerator_system("CPU") == "CPU"
    dtensor.shutdown_accelerator_system()
    assert dtensor.initialize_accelerator_system() == dtensor.preferred_device_type()


@pytest.mark.differs("a start after JAX has created its devices, in a job of several")
def test_a_client_by_itself_may_start_after_jax_has():
    jax.devices()
    assert dtensor.initialize_accelerator_system("CPU") == "CPU"
    dtensor.shutdown_accelerator_system()


@pytest.mark.differs("a start after JAX has created its devices, in a job of several")
def test_a_reset_at_the_start_changes_nothing(caplog):
    assert dtensor.initialize_accelerator_system("CPU", experimental_reset_context=True) == "CPU"
    assert dtensor.num_local_devices("CPU") == len(jax.devices()) == 8
    assert "experimental_reset_context" not in caplog.text
    dtensor.shutdown_accelerator_system()


def test_a_start_makes_as_many_cpus_as_are_asked_for(child_env):
    program = """
from shoal.compat import dtensor
assert dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=12) == "CPU"
print(dtensor.num_local_devices("CPU"))
"""
    env = {key: value for key, value in child_env.items() if key != "SHOAL_VIRTUAL_DEVICES"}
    env = {
        key: value for key, value in env.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12"]


def test_a_shutdown_needs_a_start(joined):
    dtensor.shutdown_accelerator_system()
    assert not dtensor.is_initialized()
    with pytest.raises(ValueError, match="not initialized"):
        dtensor.shutdown_accelerator_system()


def test_a_barrier_needs_no_name(joined):
    mesh = dtensor.create_mesh([("p", 8)], device_type=dtensor.preferred_device_type())
    dtensor.barrier(mesh, "named")
    dtensor.barrier(mesh)


# ---- Meshes of TPU cores.


@pytest.fixture
def slice_of(monkeypatch):
    """Let there be a TPU slice of x, y, z, core; return the place of each core by its id."""

    def be(*box):
        places = [*itertools.product(*map(range, box))]
        cores = [
            {"id": n, "process": 0, "coords": place[:3], "core": place[3], "kind": "TPU v3",
             "platform": "tpu"}
            for n, place in enumerate(places)
        ]  # fmt: skip

        def mesh_of_rings(pairs, rings, *, label):
            slice_ = topology.from_devices(cores)
            return placement.place(slice_, pairs, compatible_with="dtensor", rings=rings)

        monkeypatch.setattr(meshes, "mesh_of_rings", mesh_of_rings)
        monkeypatch.setattr(values, "devices_of", lambda kind: {0: [*range(len(cores))]})
        return np.array(places)

    return be


@pytest.mark.parametrize(
    "box", [(2, 2, 1, 1), (2, 2, 1, 2), (4, 4, 1, 2), (2, 2, 2, 2), (4, 4, 2, 2)]
)
def test_a_ring_of_cores_goes_along_links_and_closes(slice_of, box):
    places = slice_of(*box)
    mesh = dtensor.create_tpu_mesh(["ring"], [len(places)], "", ring_dims=1)
    ring = places[mesh.shoal_mesh.device_ids]
    for one, following in zip(ring, np.roll(ring, -1, axis=0), strict=True):
        assert np.abs(one - following)[:3].sum() <= 1


@pytest.mark.parametrize(
    ("is_rotated", "starts"),
    [
        (False, [[0, 0], [2, 0], [2, 2], [0, 2]]),
        (True, [[0, 0], [0, 2], [2, 2], [2, 0]]),
    ],
)
def test_rings_are_ordered_as_a_ring(slice_of, is_rotated, starts):
    places = slice_of(4, 4, 1, 1)
    mesh = dtensor.create_tpu_mesh(
        ["rings", "ring"], [4, 4], "", ring_bounds=[2, 2, 1, 1],
        build_ring_across_rings=True, rotate_ring_across_rings=is_rotated,
    )  # fmt: skip
    rings = places[mesh.shoal_mesh.device_ids][..., :2]
    assert rings[:, 0].tolist() == starts
    for ring in rings:
        assert (ring - ring[0]).tolist() == [[0, 0], [1, 0], [1, 1], [0, 1]]


@pytest.mark.parametrize("axes", ["core x y z", "core y z x", "z core x y"])
def test_cores_are_walked_along_the_first_axis_first(slice_of, axes):
    places, order = slice_of(4, 2, 3, 2), axes.split()
    mesh = dtensor.create_tpu_mesh(["a"], [48], "", ring_dims=0, ring_axes=order)
    columns = [["x", "y", "z", "core"].index(axis) for axis in reversed(order)]
    walked = places[mesh.shoal_mesh.device_ids][:, columns].tolist()
    assert walked == sorted(walked)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ([2], {}),
        ([2, 1], {"ring_dims": 1}),
        ([1, 2, 1], {"ring_dims": -2}),
        ([2, 1], {"ring_dims": 0}),
        ([2, 1], {"ring_axes": ["x", "z", "y", "core"]}),
        ([2, 1], {"ring_dims": -1, "ring_axes": ["core", "z", "y", "x"]}),
    ],
)
def test_a_mesh_of_two_cores_has_the_shape_that_is_asked_for(slice_of, shape, options):
    slice_of(1, 1, 1, 2)
    mesh = dtensor.create_tpu_mesh(["x", "y", "z"][: len(shape)], shape, "two", **options)
    assert (mesh.shape(), mesh.num_local_devices()) == (shape, 2)


@pytest.mark.parametrize(
    ("shape", "options"), [([2, 1], {"can_split_host_across_rings": False}), ([1, 1], {})]
)
def test_meshes_that_two_cores_cannot_make_are_refused(slice_of, shape, options):
    slice_of(1, 1, 1, 2)
    with pytest.raises(ValueError, match="create_tpu_mesh"):
        dtensor.create_tpu_mesh(["x", "y"], shape, "two", **options)


# differs: a second mesh of a name is refused
def test_meshes_of_cores_may_have_one_name_or_none(slice_of):
    slice_of(1, 1, 1, 2)
    for name in ("", "two", "two"):
        assert dtensor.create_tpu_mesh(["x"], [2], name).shape() == [2]


def test_ids_and_locations_of_cores_are_known(slice_of):
    slice_of(1, 1, 1, 2)
    mesh = dtensor.create_tpu_mesh(["x", "y"], [1, 2], "two")
    assert dtensor.get_device_ids(mesh) == [0, 1]
    assert dtensor.get_device_locations(mesh) == [{"x": 0, "y": 0}, {"x": 0, "y": 1}]


# ---- The default mesh.


@pytest.mark.differs("`default_mesh`, operations on host arrays")
@pytest.mark.parametrize(
    ("function", "wanted"), [(lambda: jnp.ones(()) + 3, 4), (lambda: jnp.array([7, 9]), [7, 9])]
)
def test_the_default_mesh_leaves_host_arrays_alone(function, wanted):
    mesh = dtensor.create_mesh({"p": 2, "q": 2}, devices=[f"CPU:{n}" for n in range(4)])
    wrapped = dtensor.default_mesh(mesh)(lambda: jax.jit(function)())
    with dtensor.default_mesh(mesh):
        inside = jax.jit(function)()
    for found in (inside, wrapped()):
        np.testing.assert_array_equal(found, wanted)
        assert not dtensor.is_dtensor(found)


def test_the_default_mesh_must_be_a_mesh():
    with pytest.raises(ValueError, match="Expect `mesh` to be `Mesh`"), dtensor.default_mesh(None):
        pass


def test_default_meshes_can_be_nested():
    mesh = dtensor.create_mesh({"p": 4, "q": 2})
    other = dtensor.create_mesh({"z": 2}, devices=["CPU:5", "CPU:6"])
    assert dtensor.get_default_mesh() is None
    with dtensor.default_mesh(mesh):
        assert dtensor.get_default_mesh() == mesh
        with dtensor.default_mesh(mesh.host_mesh()):
            assert dtensor.get_default_mesh() == mesh.host_mesh()
        with dtensor.default_mesh(other):
            with dtensor.default_mesh(mesh):
                assert dtensor.get_default_mesh() == mesh
            assert dtensor.get_default_mesh() == other
        assert dtensor.get_default_mesh() == mesh
    assert dtensor.get_default_mesh() is None


def test_the_mesh_of_a_device_can_be_the_default():
    mesh = Mesh.from_device(names("CPU", 4)[3])
    with dtensor.default_mesh(mesh):
        assert dtensor.get_default_mesh() == mesh
