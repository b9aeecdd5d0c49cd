"""Mesh and Layout of `shoal.compat.dtensor` against what TensorFlow 2.21 says of the same ones."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.compat import dtensor
from shoal.compat.dtensor import DeviceSpec, Layout, Mesh
from shoal.errors import UsageError, UsageTypeError

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "dtensor_values.jsonl").read_text().splitlines()
]
rows = pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
OF_MESH = ("local_device_ids", "local_devices", "mesh_name", "global_devices", "use_xla_spmd")


def made(row):
    size = int(np.prod(row["shape"]))
    ids = np.arange(row["start"], row["start"] + size).reshape(row["shape"])
    return Mesh(row["dim_names"], ids, **{name: row[name] for name in OF_MESH})


@rows
def test_a_mesh_says_what_tensorflow_says(row):
    mesh = made(row)
    size = mesh.size
    assert mesh.to_string() == row["text"]
    assert (mesh.strides, size, mesh.shape()) == (row["strides"], row["size"], row["shape"])
    assert [mesh.coords(i).tolist() for i in range(-2, size + 2)] == row["coords"]
    assert [mesh.device_location(i) for i in range(size)] == row["locations"]
    assert {str(k): v for k, v in mesh.unravel_index().items()} == row["unravel"]
    assert mesh.host_mesh().to_string() == row["host"]
    assert (mesh.device_type(), mesh.is_remote()) == (row["device_type"], row["is_remote"])
    assert (mesh.min_global_device_id(), mesh.num_local_devices()) == (
        row["min_id"],
        row["num_local"],
    )
    first = row["start"]
    at = [row["unravel"][str(one - first)] for one in row["local_device_ids"]]
    assert mesh.local_device_locations() == at  # a KeyError there where ids begin above 0
    assert (
        mesh.global_device_ids().tolist()
        == (first + np.arange(size)).reshape(row["shape"]).tolist()
    )


@rows
def test_texts_make_the_round_trip(row):
    mesh = Mesh.from_string(row["text"])
    assert mesh == made(row)
    assert hash(mesh) == hash(made(row))
    assert pickle.loads(pickle.dumps(mesh)) == mesh == copy.deepcopy(mesh)
    for said in row["layouts"]:
        layout = Layout.from_string(said["text"])
        assert layout == Layout(said["specs"], mesh)
        assert layout.to_string() == said["text"]
        assert layout.to_parted().to_string() == said["parted"]
        assert Layout.from_string(said["parted"]) == layout.to_parted() != layout
        assert pickle.loads(pickle.dumps(layout)) == layout


@rows
def test_a_layout_says_what_tensorflow_says(row):
    mesh = made(row)
    for said in row["layouts"]:
        layout = Layout(said["specs"], mesh)
        offsets = layout.offset_to_shard()
        assert [list(one) for one in offsets] == said["offsets"]
        assert [layout.offset_tuple_to_global_index(one) for one in offsets] == said["index"]
        assert [layout.num_shards(dim) for dim in range(layout.rank)] == said["shards"]
        assert layout.is_fully_replicated() == said["replicated"]
        assert layout.is_batch_parallel() == said["batch"]
        shape = layout.global_shape_from_local_shape(said["local_shape"])
        assert shape == tuple(said["global_shape"])
        assert layout.local_shape_from_global_shape(shape) == tuple(said["local_shape"])
        if layout.rank:
            assert layout.delete([0]).to_string() == said["deleted"]
            assert layout.delete((-layout.rank,)) == layout.delete(0)  # nothing happens there


def cpus(count):
    return [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in range(count)]


def grid(x=2, y=2, **named):
    ids = list(range(x * y))
    return Mesh(["x", "y"], np.arange(x * y).reshape(x, y), ids, cpus(x * y), **named)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((["x"], [0], [0], ["CPU:0"]), "must be an ndarray"),
        ((["x"], np.array([], int), [], ["CPU:0"]), "must be non-empty"),
        ((["x"], np.array([1, 0]), [0, 1], cpus(2)), "sequentially increase"),
        ((["x", "y"], np.arange(2), [0, 1], cpus(2)), "does not match number of dimension names"),
        ((["x"], np.arange(2), (0, 1), cpus(2)), "local_device_ids must be a list"),
        ((["x"], np.arange(2), [0, 1], tuple(cpus(2))), "local_devices must be a list"),
        ((["x"], np.arange(2), [0, 1], cpus(2), "", ("a",)), "global_devices must be a list"),
        ((["x"], np.arange(2), [], []), "Empty list of devices"),
        ((["x"], np.arange(2), [0, 1], ["GPU:0", "GPU:0"]), "Duplicate devices"),
        ((["x"], np.arange(2), [0], cpus(2)), "1 local_device_ids for 2 local_devices"),
        ((["x"], np.arange(1), [0, 1], cpus(2)), "are not among the global_device_ids"),
        ((["x"], np.arange(1), [0], ["/job:a"]), "device_type is required"),
        ((["x"], np.arange(2), [0, 1], ["CPU:0", "GPU:0"]), "multiple device_types : CPU, GPU"),
        ((["x"], np.arange(1), [0], cpus(1), "", None, True), "not supported for CPU mesh"),
        # what TensorFlow lets through
        ((["x", "x"], np.arange(2).reshape(2, 1), [0, 1], cpus(2)), "names are repeated"),
        ((["match"], np.arange(2), [0, 1], cpus(2)), "'match' is reserved"),
        ((["a|b"], np.arange(2), [0, 1], cpus(2)), "cannot hold it"),
        ((["x"], np.arange(3), [0, 1], cpus(2)), "Uneven local clusters"),
        ((["x"], np.arange(2), [5, 6], cpus(2)), r"\[5, 6\] are not among"),
        ((["x"], np.arange(2), [1, 1], cpus(2)), "are repeated"),
        ((["x"], np.arange(2), [0, 1], ["CPU:0", "garbage"]), "is not part of a device's name"),
    ],
)
def test_meshes_that_are_refused(args, words):
    with pytest.raises(ValueError, match=words):
        Mesh(*args)


def test_members_of_a_mesh():
    mesh = grid(x=2, y=4, mesh_name="m")
    assert mesh["y"] == ("y", 4)
    assert mesh.dim_size("x") == 2
    assert mesh.name == "m"
    assert "x" in mesh
    assert not mesh.contains_dim("z")
    with pytest.raises(ValueError, match=r"z does not exist in mesh. Available dimensions: x, y"):
        mesh.dim_size("z")
    with pytest.raises(TypeError, match="must be a string"):
        assert 3 in mesh
    for offset in (-1, 8):
        with pytest.raises(ValueError, match="cannot be negative or exceed"):
            mesh.device_location(offset)
    assert mesh != 3
    assert (mesh == "x") is False
    assert mesh != grid(x=2, y=4)
    with pytest.raises(AttributeError, match="immutable"):
        mesh.name = "n"
    with pytest.raises(NotImplementedError, match="to_string"):
        mesh.as_proto()


def test_a_short_name_is_completed_so_that_tensorflow_reads_the_text():
    mesh = Mesh(["x"], np.arange(2), [0, 1], ["CPU:0", "/device:CPU:1"])
    assert mesh.local_devices() == cpus(2)
    assert Mesh(["x"], np.arange(3, 5), [3, 4], ["CPU:0", "CPU:0"]).num_local_devices() == 2


def test_the_mesh_of_one_device():
    mesh = Mesh.from_device("/job:localhost/replica:0/task:0/device:CPU:0")
    assert Mesh.from_string(mesh.to_string()) == mesh
    assert mesh.is_single_device()
    assert (mesh.shape(), mesh.size, mesh.strides, mesh.num_local_devices()) == ([], 0, [1], 0)
    assert mesh.device_type() == "CPU"
    assert mesh.host_mesh().to_string() == "empty_mesh"
    for ask in (mesh.min_global_device_id, mesh.global_device_ids):  # the first crashes there
        with pytest.raises(ValueError, match="no global device ids"):
            ask()
    for device in ("", "garbage", "/job:a"):
        with pytest.raises(ValueError, match="dtensor"):
            Mesh.from_device(device)
    layout = Layout.from_single_device_mesh(mesh)
    assert (
        layout == Layout.from_device(mesh.single_device) == Layout.from_string(layout.to_string())
    )
    assert layout.type == 2
    assert layout.rank == 0
    assert not layout.is_fully_replicated()
    for wrong in (lambda: Layout.from_single_device_mesh(grid()), lambda: Layout([], mesh)):
        with pytest.raises(ValueError, match="single device"):
            wrong()
    with pytest.raises(ValueError, match="can be parted"):
        layout.to_parted()


def test_the_empty_ones():
    assert Mesh.from_string("empty_mesh").size == 0
    assert Layout.from_string("empty_layout").type == 0
    assert Layout.from_string("empty_layout").to_string() == "empty_layout"
    point = Mesh([], np.array(0), [0], cpus(1))  # which TensorFlow writes, but does not read
    assert Mesh.from_string(point.to_string()) == point
    assert point.size == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a|b|c|d|e", "is not a dim"),  # these two crash the interpreter there
        ("|x|*CPU", "is not a dim"),
        ("|x=a|*CPU", "is not a dim"),
        ("|x=99999999|*CPU", "exceed the limit for implied devices"),
        ("|x=2|*", "not a device type with a star"),
        ("a|b=1|c|d", "but found 4"),
        ("|x=2|0,1|0,1|CPU:0,CPU:1|CPU:0,CPU:1|y", "as the 7th argument"),
        ("|x=2|0|0|CPU:0", "1 global device ids for dims x=2"),
        ("|x=2|1,0|0,1|CPU:0,CPU:1", "sequentially increase"),
        ("|x=1,x=1|0|0|CPU:0", "repeated"),
        ("|any=1|0|0|CPU:0", "reserved"),
        ("", "Input string is invalid"),
    ],
)
def test_texts_of_meshes_that_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Mesh.from_string(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expected 2 items"),
        ("sharding_specs:x,mesh:|x=2|*CPU", "Expected 2 items"),
        ("sharded:x, mesh:|x=2|*CPU", "Unknown layout type prefix"),
        ("sharding_specs:y, mesh:|x=2|*CPU", "must either be a valid mesh dimension"),
        ("sharding_specs:x,x, mesh:|x=2|*CPU", "was repeated"),
        ("sharding_specs:scalar,x, mesh:|x=2|*CPU", "scalar: A dimension sharding"),
        ("maximal:true, mesh:|x=2|*CPU", "not single device"),
        ("maximal:true,x, mesh:CPU:0", "Unknown layout type prefix"),
    ],
)
def test_texts_of_layouts_that_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Layout.from_string(text)


def test_names_of_devices_are_read():
    """TensorFlow reads the first alike, and refuses the others: two devices, also of one type."""
    read = DeviceSpec.from_string("/job:a/task:1/task:2/gpu:1")
    assert read == DeviceSpec(job="a", task=2, device_type="GPU", device_index=1)
    for text in ("/CPU:0/GPU:1", "/device:CPU:0/CPU:0"):
        with pytest.raises(UsageError, match="has several devices"):
            DeviceSpec.from_string(text)


def test_texts_in_which_tensorflow_loses_something():
    both = grid(global_devices=cpus(4), mesh_name="my mesh").to_string()
    seven = both.replace("CPU", "TPU") + "|use_xla_spmd"
    assert Mesh.from_string(seven).global_devices() == [one.replace("C", "T") for one in cpus(4)]
    layout = Layout(["x"], grid(mesh_name="my mesh"))  # whose space its reader stumbles over
    assert Layout.from_string(layout.to_string()) == layout
    assert Layout.from_string("sharding_specs:x,y mesh:|x=1,y=1|*CPU").rank == 2
    assert Layout.from_string("sharding_specs:scalar, mesh:|x=2|*CPU").rank == 0
    assert Layout.from_string("sharding_specs:any, mesh:|x=2|*CPU").sharding_specs == ["any"]


texts = st.one_of(
    st.text(),
    st.text(alphabet="xyab|=,:*0129 /-\n"),
    st.lists(
        st.sampled_from([
            "|", "x=2", "y=1", ",", "0,1", "CPU:0,CPU:1", "*CPU", "use_xla_spmd", "=", "\x00",
            " ", "mesh:", "sharding_specs:", "parted:", "maximal:true,", "x,", "unsharded,", "-1",
            "match,", "empty_mesh", "9" * 30, "/job:a/task:0/device:CPU:0", "²", "\ud800", "name",
        ])
    ).map("".join),
)  # fmt: skip


@given(texts)
def test_no_text_does_worse_than_a_usage_error(text):
    for kind in (Mesh, Layout):
        try:
            value = kind.from_string(text)
        except UsageError:
            continue
        assert kind.from_string(value.to_string()) == value


@given(st.sampled_from(ROWS), st.data())
def test_no_damaged_text_does_worse_than_a_usage_error(row, data):
    text = row["layouts"][0]["text"]
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 6)))
    damaged = text[:start] + data.draw(st.text(alphabet="|,= x0:", max_size=3)) + text[stop:]
    try:
        layout = Layout.from_string(damaged)
    except UsageError:
        return
    assert Layout.from_string(layout.to_string()) == layout


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m: Layout(["x"], "mesh"), TypeError, "not a valid Mesh object"),
        (lambda m: Layout(["x", "x"], m), ValueError, "must be unique in a layout"),
        (lambda m: Layout(["z"], m), ValueError, "valid mesh dimension"),
        (lambda m: Layout(["any"], m), ValueError, "valid mesh dimension"),
        (lambda m: Layout([None], m), TypeError, "must be a name"),
        (lambda m: Layout("x", m), TypeError, "must be a list of names"),
        (lambda m: Layout.batch_sharded(m, "x", 2, axis=2), ValueError, "not a dim of rank 2"),
        (lambda m: Layout.batch_sharded(m, "x", 0), ValueError, "at least 1"),
        (lambda m: Layout.batch_sharded(m, "z", 1), ValueError, "valid mesh dimension"),
        (lambda m: Layout.inner_sharded(m, "x", 0), ValueError, "at least 1"),
        (lambda m: Layout.replicated(m, -1), ValueError, "at least 0"),
        (lambda m: Layout(["x"], m).delete(1), ValueError, "not dims of rank 1"),
        (lambda m: Layout(["x"], m).num_shards(1), ValueError, "not a dim of rank 1"),
        (lambda m: Layout(["match"], m).num_shards(0), ValueError, "'match'"),
        (lambda m: Layout(["match"], m).offset_to_shard(), ValueError, "'match'"),
        (lambda m: Layout(["match"], m).shoal_layout, ValueError, "'match' does not define"),
        (lambda m: Layout(["x"], m).global_shape_from_local_shape([]), ValueError, "rank 0"),
        (lambda m: Layout(["x"], m).local_shape_from_global_shape([3]), ValueError, "uneven"),
        (lambda m: Layout(["x"], m).local_shape_from_global_shape([4, 4]), ValueError, "rank 2"),
        (lambda m: Layout(["x"], m).offset_tuple_to_global_index((2,)), ValueError, "not a shard"),
        (lambda m: Layout(["x"], m).as_proto(), NotImplementedError, "to_string"),
    ],
)
def test_layouts_that_are_refused(call, kind, words):
    with pytest.raises(kind, match=words) as told:
        call(grid())
    assert isinstance(told.value, UsageError)


def test_what_tensorflow_computes_wrongly_of_layouts():
    mesh = grid()
    assert Layout.batch_sharded(mesh, "x", 2, axis=-1).sharding_specs == ["unsharded", "x"]
    assert Layout.inner_sharded(mesh, "x", 2) == Layout.batch_sharded(mesh, "x", 2, axis=1)
    layout = Layout(["x", "unsharded"], mesh)
    assert layout.global_shape_from_local_shape([-1, None]) == (-1, -1)
    assert layout.local_shape_from_global_shape([None, 5]) == (-1, 5)
    assert not layout.is_single_device()
    assert Layout.from_device("CPU:0").is_single_device()
    assert layout.num_shards(-2) == 2
    thin = Layout(["x"], grid(x=1))  # a dim of size 1 counts as a split
    assert not thin.is_fully_replicated()
    assert thin.is_batch_parallel()
    assert not Layout([], mesh).is_batch_parallel()


def test_protocol_buffers_are_read_by_their_fields():
    dims = [SimpleNamespace(name="x", size=2), SimpleNamespace(name="y", size=2)]
    mesh = SimpleNamespace(
        name="m", mesh_dimensions=dims, global_device_ids=range(4), local_device_ids=range(4),
        local_devices=cpus(4), global_devices=[], use_xla_spmd=False, single_device="",
    )  # fmt: skip
    specs = [SimpleNamespace(sharding_spec=one) for one in ("unsharded", "y")]
    proto = SimpleNamespace(type=3, mesh_config=mesh, sharding_specs=specs)
    layout = Layout.from_proto(proto)
    assert layout == Layout(["unsharded", "y"], grid(mesh_name="m")).to_parted()
    one = SimpleNamespace(single_device=cpus(1)[0])
    assert Mesh.from_proto(one) == Mesh.from_device(cpus(1)[0])
    single = SimpleNamespace(type=2, mesh_config=one, sharding_specs=[])
    assert Layout.from_proto(single) == Layout.from_device(cpus(1)[0])


def test_shoals_values_behind_them():
    mesh = Mesh(["x", "y"], np.arange(4).reshape(2, 2), [0, 1, 2, 3],
                ["CPU:3", "CPU:1", "CPU:0", "CPU:7"])  # fmt: skip
    assert mesh.shoal_mesh.device_ids.tolist() == [[3, 1], [0, 7]]
    assert Layout(["y", dtensor.UNSHARDED], mesh).shoal_layout.dims == ("y", None)
    offset = Mesh(["x"], np.arange(3, 5), [3, 4], ["CPU:0", "CPU:1"], "named")
    assert offset.shoal_mesh.label == "named"
    assert offset.shoal_mesh.is_iota
    with pytest.raises(ValueError, match=r"no such cpu devices: .*CPU:9"):
        assert Mesh(["x"], np.arange(1), [0], ["CPU:9"]).shoal_mesh
    with pytest.raises(ValueError, match="empty mesh"):
        assert Mesh.from_string("empty_mesh").shoal_mesh
    assert Mesh.from_device("CPU:5").shoal_mesh.device_ids.tolist() == 5
    assert grid().host_mesh().shoal_mesh == grid().shoal_mesh
    with pytest.raises(UsageTypeError, match="must be a string"):
        Mesh.from_string(3)
