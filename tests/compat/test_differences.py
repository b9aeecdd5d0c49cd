"""Each row of the tables of differences on the pages, asserted."""

from __future__ import annotations

import ast
import logging
import os
import re
import threading
import warnings

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils as theirs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shoal
import shoal.compat.torch_xla as xs
from meta.source import ROOT
from shoal import names
from shoal.compat import dtensor, multihost_utils
from shoal.compat.dtensor import UNSHARDED, DVariable, Layout, Mesh
from shoal.compat.torch_xla import runtime
from shoal.plan.placement import place
from shoal.plan.topology import parse

PAGES = ROOT / "docs" / "coming-from"
ROWS = {}  # (page, the first cell of a row) → a function, or the test that asserts it
U = UNSHARDED


def row(page, *cells, by=None):
    """Register a function, or a test by its name, for rows of a page."""

    def register(function):
        for cell in cells:
            assert (page, cell) not in ROWS, cell
            ROWS[page, cell] = function
        return function

    return register if by is None else register(by)


def listed(page):
    """Return the first cells of a page's table of differences."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8").partition("\n## Differences\n")[2]
    cells = re.findall(r"^\| (.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
    return cells[1:]  # without the head


def mesh(**dims):
    return dtensor.create_mesh(dims or {"x": 4, "y": 2})


def refused(words, call, *args, kind=ValueError, **options):
    """Check that a call is an error of a kind, with these words if any are given."""
    with pytest.raises(kind) as told:
        call(*args, **options)
    assert words in str(told.value)


GRID = xs.Mesh(range(8), (4, 2), ("x", "y"))
VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)


# ---- DTensor


@row("dtensor", "arrays")
def _():
    x = dtensor.copy_to_mesh(VALUE, Layout(["x", U], mesh()))
    assert isinstance(x, jax.Array)
    assert all(device in jax.devices() for device in x.sharding.device_set)
    assert "CUSTOM" in dtensor.device_name()


@row("dtensor", "layouts of results inside a program")
def _():
    x = dtensor.copy_to_mesh(VALUE, Layout(["x", U], mesh()))
    product = jax.jit(lambda x: x.T @ x)(x)  # DTensor has no rule for [x, U] into [U, x]
    np.testing.assert_array_equal(product, VALUE.T @ VALUE)


@row("dtensor", "the C++ device (`_dtensor_device`)")
def _():
    assert not hasattr(dtensor._dtensor_device(), "set_tpu_core_ids")
    refused(
        "no separate DTensor device", dtensor.reset_dtensor_device, True, kind=NotImplementedError
    )


@row("dtensor", "`_register_mesh` of a TPU mesh")
def _():
    assert dtensor._dtensor_device()._register_mesh(mesh()) is None
    assert mesh().host_mesh() == mesh().host_mesh()


@row("dtensor", "log lines of TPU core ids and locations")
def _(caplog):
    with caplog.at_level(logging.DEBUG, "shoal"):
        shoal.make_mesh({"x": 8})
    assert "process after process, for no links are known" in caplog.text


@row("dtensor", "`Mesh == 3`")
def _():
    assert (mesh() == 3) is False


@row("dtensor", "`Mesh`: repeated or reserved dim names, repeated local ids, an uneven number of "
     "local devices, names of no device")  # fmt: skip
def _():
    names = [f"/job:w/replica:0/task:0/device:CPU:{n}" for n in range(4)]
    ids = np.arange(4).reshape(2, 2)
    Mesh(["x", "y"], ids, [0, 1, 2, 3], names)
    for dims, local, devices in (
        (["x", "x"], [0, 1, 2, 3], names),
        (["x", U], [0, 1, 2, 3], names),
        (["x", "y"], [0, 0, 2, 3], names),
        (["x", "y"], [0, 1, 2], names[:3]),
        (["x", "y"], [0, 1, 2, 3], ["nothing", *names[1:]]),
    ):
        refused("", Mesh, dims, ids, local, devices)


@row("dtensor", "`coords`")
def _():
    assert isinstance(mesh().coords(3), np.ndarray)


@row("dtensor", "`local_device_locations`, ids that start above 0")
def _():
    names = [f"/job:w/replica:0/task:0/device:CPU:{n}" for n in range(2)]
    assert Mesh(["x"], np.array([5, 6]), [5, 6], names).local_device_locations() == [
        {"x": 0}, {"x": 1},
    ]  # fmt: skip


@row("dtensor", "members of a mesh without ids")
def _():
    alone = Mesh.from_device("/job:w/replica:0/task:0/device:CPU:0")
    refused("", alone.min_global_device_id)


@row("dtensor", "strings that are no mesh")
def _():
    for text in ("a|b|c|d|e", "|x|*CPU", "|x=a|*CPU"):
        refused("", Mesh.from_string, text)


@row("dtensor", "a short device name (`CPU:0`) in a mesh")
def _():
    short = Mesh(["x"], np.arange(2), [0, 1], ["CPU:0", "CPU:1"])
    assert short.local_devices()[0] == "/job:localhost/replica:0/task:0/device:CPU:0"


@row("dtensor", "a mesh's string with all global devices and `use_xla_spmd`")
def _():
    names = [f"/job:w/replica:0/task:0/device:TPU:{n}" for n in range(2)]
    both = Mesh(["x"], np.arange(2), [0, 1], names, "m", names, True)
    again = Mesh.from_string(both.to_string())
    assert (again.global_devices(), again.use_xla_spmd()) == (names, True)


@row("dtensor", "sparse tensors in `pack`, `unpack`")
def _():
    ones = jax.experimental.sparse.BCOO.fromdense(jnp.ones(2))
    refused("", dtensor.pack, [ones] * 8, Layout(["x"], mesh()))


@row("dtensor", "`as_proto`")
def _():
    for one in (mesh(), Layout(["x"], mesh())):
        refused("no protocol buffers", one.as_proto, kind=NotImplementedError)


@row("dtensor", "several `MATCH` in one layout")
def _():
    x = dtensor.copy_to_mesh(VALUE, Layout(["x", "y"], mesh()))
    kept = dtensor.relayout(x, Layout([dtensor.MATCH, dtensor.MATCH], mesh()))
    assert dtensor.fetch_layout(kept).sharding_specs == ["x", "y"]


@row("dtensor", "`batch_sharded(axis=-1)`, and ranks that do not exist")
def _():
    assert Layout.batch_sharded(mesh(), "x", 3, axis=-1).sharding_specs == [U, U, "x"]
    refused("", Layout.batch_sharded, mesh(), "x", 2, axis=2)
    refused("", Layout.inner_sharded, mesh(), "x", 0)
    refused("", Layout.replicated, mesh(), -1)


@row("dtensor", "`Layout.delete`: a tuple, an index out of range")
def _():
    layout = Layout(["x", U, "y"], mesh())
    assert layout.delete((0, 1)).sharding_specs == ["y"]
    refused("", layout.delete, [3])


@row("dtensor", "`local_shape_from_global_shape`: a dim that does not divide")
def _():
    refused("", Layout(["x"], mesh()).local_shape_from_global_shape, (7,))


@row("dtensor", "`global_shape_from_local_shape`: a dim that is not known (-1)")
def _():
    assert Layout(["x"], mesh()).global_shape_from_local_shape((-1,)) == (-1,)


@row("dtensor", "`create_mesh` with a list")
def _():
    dims = [("x", 4), ("y", -1)]
    assert dtensor.create_mesh(dims).shape() == [4, 2]
    assert dims == [("x", 4), ("y", -1)]


row(
    "dtensor",
    "`create_distributed_mesh`: dims that differ between processes",
    by="processes/test_dtensor_names.py::test_tpus_that_cpu_devices_stand_for",
)
row(
    "dtensor",
    "`create_tpu_mesh`: a name again; bounds that do not divide",
    by="compat/test_dtensor_meshes.py::test_create_tpu_mesh",
)


@row("dtensor", "`default_mesh`, a block that raises")
def _():
    def block():
        with dtensor.default_mesh(mesh()):
            raise KeyError("mine")

    refused("mine", block, kind=KeyError)
    assert dtensor.get_default_mesh() is None


@row("dtensor", "`default_mesh`, operations on host arrays")
def _():
    with dtensor.default_mesh(mesh()):
        assert len((jnp.ones(3) + 1).sharding.device_set) == 1


@row("dtensor", "`relayout` to a layout of another rank")
def _():
    refused("", dtensor.relayout, VALUE, Layout(["x"], mesh()))


@row("dtensor", "`relayout` of a sharded array to a mesh of other devices")
def _():
    x = dtensor.copy_to_mesh(VALUE, Layout(["x", U], mesh()))
    few = dtensor.create_mesh({"x": 2}, devices=["CPU:5", "CPU:6"])
    np.testing.assert_array_equal(dtensor.relayout(x, Layout([U, "x"], few)), VALUE)


@row("dtensor", "`pack`: replicas that differ; an empty list")
def _():
    layout = Layout(["y"], mesh())
    refused("", dtensor.pack, [np.ones(2, np.float32) * n for n in range(8)], layout)
    refused("", dtensor.pack, [], layout)


@row("dtensor", "`call_with_layout`")
def _():
    layout = Layout(["x", U], mesh())
    key = jax.random.key(0)
    drawn = dtensor.call_with_layout(jax.random.normal, layout, key, (8, 4))
    dtensor.check_layout(drawn, layout)
    np.testing.assert_array_equal(drawn, jax.random.normal(key, (8, 4)))


@row("dtensor", "`fetch_layout`, `check_layout`")
def _():
    named = dtensor.create_mesh({"x": 8}, mesh_name="mine")
    x = dtensor.copy_to_mesh(VALUE, Layout(["x", U], named))
    dtensor.check_layout(x, Layout(["x", U], dtensor.create_mesh({"x": 8}, mesh_name="other")))


@row("dtensor", "`DVariable` inside `jit`")
def _():
    v = DVariable(dtensor.copy_to_mesh(VALUE, Layout(["x", U], mesh())))
    assert float(jax.jit(lambda v: v.read_value().sum())(v)) == VALUE.sum()
    refused("", jax.jit(lambda v: v.assign_add(v)), v, kind=RuntimeError)


@row("dtensor", "`scatter_add` and the like of a `DVariable`")
def _():
    v = DVariable(dtensor.copy_to_mesh(VALUE, Layout(["x", U], mesh())))
    assert not hasattr(v, "scatter_add")
    v.assign(v.at[0].add(1))
    assert v.numpy()[0].tolist() == [1, 2, 3, 4]


def batches(**options):
    layout = Layout(["x", U], mesh())
    return dtensor.DTensorDataset(
        VALUE, mesh=mesh(), layouts=layout, global_batch_size=4, batch_dim="x", **options
    )


@row("dtensor", "the source of a `DTensorDataset`")
def _():
    assert [batch.shape for batch in batches()] == [(4, 4), (4, 4)]


@row("dtensor", "`DTensorDataset(tf_data_service_config=)`, needed by several clients")
def _():
    refused("tf_data_service_config", batches, tf_data_service_config=object())


@row("dtensor", "`DTensorDataset(prefetch=)`")
def _():
    assert len([*batches(prefetch=1)]) == 2


@row("dtensor", "a start without devices of the type")
def _():
    for kind in ("TPU", "GPU"):
        refused(f"no valid {kind}s found", dtensor.initialize_accelerator_system, kind)
    assert dtensor.initialize_accelerator_system("CPU") == "CPU"
    dtensor.shutdown_accelerator_system()


@row("dtensor", "a start after JAX has created its devices, in a job of several")
def _():
    jax.devices()
    jobs = ["a:1", "b:1"]
    refused("too late", dtensor.initialize_multi_client_cluster, "j", jobs, 0, "")
    assert dtensor.initialize_accelerator_system("CPU", experimental_reset_context=True) == "CPU"
    dtensor.shutdown_accelerator_system()


@row("dtensor", "`experimental_enable_megcore`")
def _():
    start = dtensor.initialize_tpu_system
    refused("megacore", start, experimental_enable_megcore=True, kind=NotImplementedError)


row(
    "dtensor",
    "`shutdown_accelerator_system`, several clients",
    by="processes/test_dtensor_names.py::test_a_job_by_dtensors_variables",
)


@row("dtensor", "`set_initialized`, `tpu_system_init_helper`")
def _():
    refused("", dtensor.set_initialized, True, kind=NotImplementedError)
    refused("", dtensor.tpu_system_init_helper, 0, 1, 1, kind=NotImplementedError)


@row("dtensor", "`DTENSOR_JOB_NAME` without `DTENSOR_JOBS`")
def _(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOB_NAME", "trainer")
    assert (dtensor.num_clients(), dtensor.job_name()) == (1, "trainer")


@row("dtensor", '`DTENSOR_JOBS=""`, blanks around entries')
def _(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "")
    assert (dtensor.jobs(), dtensor.num_clients()) == ([], 1)
    monkeypatch.setenv("DTENSOR_JOBS", "a:1, b:2")
    assert dtensor.jobs() == ["a:1", "b:2"]


row(
    "dtensor",
    "`num_global_devices`",
    by="processes/test_dtensor_names.py::test_a_job_by_dtensors_variables",
)


@row("dtensor", "`DTENSOR_ENABLE_HEARTBEAT=0`")
def _(monkeypatch, caplog):
    monkeypatch.setenv("DTENSOR_ENABLE_HEARTBEAT", "0")
    with caplog.at_level(logging.WARNING, "shoal"):
        dtensor.initialize_accelerator_system("CPU")
    dtensor.shutdown_accelerator_system()
    assert "SHOAL_LOST_AFTER_S=inf" in caplog.text


row("dtensor", "`barrier`: other names, or other meshes, on other processes",
    "`barrier` on a mesh of some processes",
    by="processes/test_dtensor_names.py::test_barriers")  # fmt: skip


@row("dtensor", "`barrier` without a time")
def _():
    assert shoal.settings.seconds("SHOAL_TIMEOUT_S") == 600


@row("dtensor", "`_global_barrier`'s log lines")
def _(caplog):
    with caplog.at_level(logging.INFO, "shoal"):
        dtensor._global_barrier(mesh(), "SaveV2")
    assert "entering barrier before op: SaveV2" in caplog.text


@row("dtensor", "`sharded_save`'s result", "`shape_and_slices` of `sharded_save`")
def _(tmp_path):
    layout = Layout([U], mesh())
    halves = [
        dtensor.copy_to_mesh(VALUE[0, :2], layout),
        dtensor.copy_to_mesh(VALUE[0, 2:], layout),
    ]
    path, slices = str(tmp_path / "c"), ["4 0,2", "4 2,2"]
    assert dtensor.sharded_save(mesh(), path, ["w", "w"], slices, halves) is None
    like = {"w": dtensor.copy_to_mesh(np.zeros(4, np.float32), layout)}
    np.testing.assert_array_equal(dtensor.name_based_restore(mesh(), path, like)["w"], VALUE[0])


@row(
    "dtensor",
    "a prefix that was saved to",
    "host arrays in `name_based_save`",
    "`name_based_restore` onto an accelerator",
    "`name_based_restore` into a wider dtype",
    "a prefix as a tensor",
    "`name_based_restore`: no such checkpoint, a damaged one",
    "files",
)
def _(tmp_path):
    path = tmp_path / "c"
    dtensor.name_based_save(mesh(), path, {"w": VALUE[0]})
    refused("", dtensor.name_based_save, mesh(), path, {"w": VALUE[1]})
    assert any(name.endswith(".json") for name in os.listdir(path))
    other = dtensor.create_mesh({"z": 2}, devices=["CPU:3", "CPU:4"])  # any devices
    like = {"w": dtensor.copy_to_mesh(np.zeros(4, np.float32), Layout(["z"], other))}
    back = dtensor.name_based_restore(other, str(path), like)["w"]
    np.testing.assert_array_equal(back, VALUE[0])
    refused("", dtensor.name_based_save, mesh(), jnp.ones(3), like)
    refused("absent", dtensor.name_based_restore, other, tmp_path / "absent", like)
    low = {"w": dtensor.copy_to_mesh(VALUE[0].astype(jnp.bfloat16), Layout(["z"], other))}
    dtensor.name_based_save(other, tmp_path / "low", low)
    wide = dtensor.name_based_restore(other, tmp_path / "low", like)["w"]
    assert wide.dtype == np.float32


row(
    "dtensor",
    "saving on a mesh of some processes",
    by="processes/test_dtensor_names.py::test_moves_and_saves",
)
row(
    "dtensor",
    "`enable_save_as_bf16`",
    by="compat/test_dtensor_moves.py::test_save_as_bf16_sticks_to_float32",
)
row(
    "dtensor",
    "`DTensorCheckpoint`: two variables of one name",
    by="compat/test_dtensor_saving.py::test_two_variables_of_one_name_are_an_error",
)


@row("dtensor", "`numpy_util`")
def _():
    assert not hasattr(dtensor, "numpy_util")


# ---- multihost_utils

TWO = "processes/test_multihost_utils.py::test_two_processes"
row(
    "multihost_utils",
    "a dead process, shapes that differ between processes",
    by="processes/test_multihost_utils.py::test_one_dies_inside_a_block",
)
row(
    "multihost_utils",
    "a call without a deadline",
    by="processes/test_job_reports.py::test_a_deadline_names_the_process_that_did_not_arrive",
)
row(
    "multihost_utils",
    "64-bit values between processes",
    "`broadcast_one_to_all`: `is_source` on none, or on several",
    "`broadcast_one_to_all`: -0.0, subnormals, payloads of NaNs",
    "`process_allgather(tiled=True)`: dim 0 that differs",
    "`sync_global_devices`: names are compared by",
    "`assert_equal`: the message",
    "`assert_equal`: an array over several processes, in parts",
    "`host_local_array_to_global_array` and its inverse: `grad`, `vmap`",
    "… inside `jit`",
    "… of replicas that differ between processes",
    "`live_devices`: a process that raises in the block",
    by=TWO,
)
row(
    "multihost_utils",
    "the number of a process",
    by="runtime/jax_service/test_process_numbers.py::test_two_of_one_number_are_refused",
)
row(
    "multihost_utils",
    "calls of several threads",
    by="runtime/client/test_coordinator_contract.py::test_two_threads_in_one_lane_are_refused",
)


@row("multihost_utils", "errors")
def _():
    assert issubclass(multihost_utils.UnequalError, AssertionError)
    assert issubclass(multihost_utils.SpreadArrayError, RuntimeError)
    refused("name=3", multihost_utils.sync_global_devices, 3, kind=TypeError)


@row("multihost_utils", "PRNG keys, str and bytes as values")
def _():
    tree = {"key": jax.random.key(3), "text": "blue", "raw": b"\0"}
    came = multihost_utils.broadcast_one_to_all(tree)
    assert (came["text"], came["raw"]) == ("blue", b"\0")
    refused("", theirs.broadcast_one_to_all, jax.random.key(3), kind=TypeError)


@row("multihost_utils", "`process_allgather` of a fully replicated global array, without `tiled`")
def _():
    x = jax.device_put(VALUE, NamedSharding(jax.make_mesh((8,), ("x",)), P()))
    assert multihost_utils.process_allgather(x).shape == VALUE.shape


@row("multihost_utils", "`process_allgather` with one process, `tiled=True`, of a number")
def _():
    assert multihost_utils.process_allgather(1, tiled=True).shape == (1,)
    assert theirs.process_allgather(1, tiled=True).shape == ()


@row("multihost_utils", "`process_allgather` of host arrays compiles")
def _():
    with jax.log_compiles(), warnings.catch_warnings():
        warnings.simplefilter("error")
        multihost_utils.process_allgather(np.ones((3, 5, 7)))


@row("multihost_utils", "`sync_global_devices` waits for")
def _():
    runs, go, done = threading.Event(), threading.Event(), []

    def wait(x):
        runs.set()
        go.wait()
        done.append(1)
        return x

    like = jax.ShapeDtypeStruct((), np.float32)
    compute = jax.jit(lambda x: jax.pure_callback(wait, like, x))
    thread = threading.Thread(target=lambda: compute(np.float32(1)).block_until_ready())
    thread.start()
    runs.wait()
    multihost_utils.sync_global_devices("while a device computes")
    assert not done
    go.set()
    thread.join()


@row("multihost_utils", "`assert_equal`: equal NaNs; -0.0 and 0.0")
def _():
    multihost_utils.assert_equal(np.float32([np.nan]))
    refused("", theirs.assert_equal, np.float32([np.nan]), kind=AssertionError)


row(
    "multihost_utils",
    "`reached_preemption_sync_point`, after the step",
    "`reached_preemption_sync_point` without `jax_enable_preemption_service`",
    by="compat/test_multihost_utils.py::test_a_program_without_a_service_is_never_told_of_its_end",
)


@row("multihost_utils", "`reached_preemption_sync_point`: a negative step")
def _():
    refused("-1", multihost_utils.reached_preemption_sync_point, -1)


@row("multihost_utils", "… of 64-bit NumPy values")
def _():
    one = jax.make_mesh((8,), ("x",))
    convert = multihost_utils.host_local_array_to_global_array
    assert convert(np.arange(8), one, P("x")).dtype == np.int32
    refused("does not fit int32", convert, np.arange(8) + 2**40, one, P("x"))
    with pytest.warns(shoal.DtypeWarning):
        convert(np.ones(8), one, P("x"))


@row("multihost_utils", "`global_array_to_host_local_array` of a host array")
def _():
    one = jax.make_mesh((8,), ("x",))
    assert multihost_utils.global_array_to_host_local_array(VALUE, one, P("x")) is VALUE


@row("multihost_utils", "`live_devices`: which devices")
def _():
    for devices in (jax.devices(), jax.devices()[1:3]):
        with multihost_utils.live_devices(devices) as alive:
            assert alive == devices


@row("multihost_utils", "`live_devices` without `jax_enable_recoverability`, or "
     "`jax.distributed`")  # fmt: skip
def _():
    refused("", theirs.live_devices(jax.devices()).__enter__, kind=RuntimeError)
    with multihost_utils.live_devices(jax.devices()) as alive:
        assert alive == jax.devices()


@row("multihost_utils", "the primitives (`host_local_array_to_global_array_p` and its inverse)")
def _():
    assert hasattr(theirs, "host_local_array_to_global_array_p")
    assert not hasattr(multihost_utils, "host_local_array_to_global_array_p")


# ---- torch_xla


def marked(spec=("x", None), **options):
    return xs.mark_sharding(VALUE, GRID, spec, **options)


@row("torch_xla", "`mark_sharding` of a tensor", "`use_dynamo_custom_op`, of `mark_sharding`")
def _():
    given = VALUE.copy()
    view = xs.XLAShardedTensor(given)
    assert isinstance(xs.mark_sharding(given, GRID, ("x", None)), jax.Array)
    assert isinstance(given, np.ndarray)
    assert xs.mark_sharding(view, GRID, ("x", None)) is view
    assert view.partition_spec == ("x", None)
    assert marked(use_dynamo_custom_op=True).sharding == marked().sharding


@row("torch_xla", "`mark_sharding` of a marked tensor", "`annotate_custom_sharding` outside `jit`")
def _():
    for function in (xs.mark_sharding, xs.annotate_custom_sharding):
        moved = function(marked(), GRID, (None, "y"))
        assert tuple(moved.sharding.spec) == (None, "y")


@row("torch_xla", "`mark_sharding` outside `jit`: a dim that does not divide")
def _():
    refused("4 or 8 would fit", xs.mark_sharding, np.ones(7), GRID, ("x",))
    inside = jax.jit(lambda x: xs.mark_sharding(x, GRID, ("x",)) + 1)
    assert inside(np.ones(7, np.float32)).tolist() == [2] * 7


PAIR = "processes/test_torch_xla_names.py::test_two_processes_of_two_devices"
row("torch_xla", "`mark_sharding`: values that differ between processes",
    "`ShardingSpec(minibatch=True)` on a mesh of reordered ids", by=PAIR)  # fmt: skip
row(
    "torch_xla",
    "a view inside `jit`",
    by="compat/test_torch_xla_arrays.py::test_a_view_outlives_no_tracer",
)


@row("torch_xla", "`clear_sharding`")
def _():
    cleared = xs.clear_sharding(marked())
    assert (len(cleared.sharding.device_set), cleared.committed) == (1, False)


@row("torch_xla", "`shard_as` outside `jit`")
def _():
    assert xs.shard_as(marked(), VALUE)[1].sharding == marked().sharding
    refused("relayout", xs.shard_as, marked(), marked((None, "y")))


@row("torch_xla", "devices of a `Mesh`")
def _():
    far = xs.Mesh([100, 101], (2,), ("x",))
    assert far.get_logical_mesh().tolist() == [100, 101]
    refused("", xs.mark_sharding, VALUE, far, ("x", None))
    few = xs.mark_sharding(VALUE, xs.Mesh([5, 2], (2,), ("x",)), ("x", None))
    assert {device.id for device in few.sharding.device_set} == {2, 5}


@row("torch_xla", "`Mesh`: equality, hash", "`Mesh.get_axis_name_idx` without names",
     "`Mesh.from_str` of an axis called `MeshX`")  # fmt: skip
def _():
    assert len({xs.Mesh(range(8), (4, 2)), xs.Mesh(np.arange(8), (4, 2))}) == 1
    assert xs.Mesh(range(8), (4, 2)).get_axis_name_idx("x") is None
    odd = xs.Mesh(range(8), (8,), ("MeshX",))
    assert xs.Mesh.from_str(str(odd)).axis_names == ("MeshX",)


@row("torch_xla", "`get_jax_mesh` of a mesh without names")
def _():
    assert xs.Mesh(range(8), (4, 2)).get_jax_mesh().axis_names == ("axis0", "axis1")


@row("torch_xla", "`iota_text` of a mesh of reordered ids")
def _():
    turned = xs.Mesh(range(7, -1, -1), (8,), ("x",))
    assert turned.get_op_sharding(("x",)).iota_text == "{devices=[8]7,6,5,4,3,2,1,0}"


@row("torch_xla", "`is_spmd` before `use_spmd`")
def _():
    assert runtime.is_spmd()


@row("torch_xla", "`get_op_sharding`")
def _():
    sharding = GRID.get_op_sharding(("x", None))
    assert sharding is GRID.get_op_sharding(("x", None))
    for name in ("type", "requested_type", "tile_assignment", "group_assignment",
                 "replication_groups", "text", "iota_text"):  # fmt: skip
        assert hasattr(sharding, name)


@row("torch_xla", "`set_global_mesh` of anything")
def _():
    refused("", xs.set_global_mesh, "x", kind=TypeError)
    xs.set_global_mesh(GRID)
    xs.set_global_mesh(None)
    assert xs.get_global_mesh() is None


@row("torch_xla", "`HybridMesh`, a shape that no whole axes of the torus make: (2, 8) on 4 x 4 "
     "chips")  # fmt: skip
def _():
    placed = place(parse("v5e:4x4"), {"a": 2, "b": 8}, compatible_with="torch_xla")
    assert sorted(placed.device_ids.ravel()) == list(range(16))


@row("torch_xla", "`HybridMesh` off TPUs")
def _():
    assert xs.HybridMesh(ici_mesh_shape=(4, 2)).get_logical_mesh().shape == (4, 2)


@row("torch_xla", "private helpers of `HybridMesh` and of specs "
     "(`_create_device_mesh_for_nd_torus`, `_get_tile_assignment` and the like)")  # fmt: skip
def _():
    assert not hasattr(xs.HybridMesh, "_create_device_mesh_for_nd_torus")
    tiles, *_ = GRID._get_op_sharding_args(("x", None))
    assert np.shape(tiles)[0] == 4


@row("torch_xla", "`ShardingSpec` of lower rank than the mesh", "`ShardingSpec.apply`",
     "`ShardingSpec(minibatch=True)` without an axis for dim 0",
     "an input of another rank than its `ShardingSpec`")  # fmt: skip
def _():
    low = xs.ShardingSpec(GRID, ("x",))
    assert low._sharding_type == xs.ShardingType.PARTIAL
    assert isinstance(low.apply(VALUE[:, 0]), jax.Array)
    refused("rank", low.apply, VALUE)
    refused("batch dimension", xs.ShardingSpec(GRID, (None, "x"), minibatch=True).apply, VALUE)


@row("torch_xla", "`enable_manual_sharding`", "`_mark_manual_sharding`")
def _():
    assert len(xs.enable_manual_sharding(VALUE, ("x", None), mesh=GRID)) == 8
    inside = jax.jit(lambda x: xs.enable_manual_sharding(x, ("x", None), mesh=GRID))
    refused("manual(fn, in_layouts, out_layouts)", inside, VALUE)
    refused("shoal.manual", xs._mark_manual_sharding, VALUE, kind=NotImplementedError)


@row("torch_xla", "`placements` of a named spec", "placements `[Shard(0), Shard(0)]`",
     "`redistribute` of a view", "`XLAShardedTensor.T`, slices and the like",
     "torch's functions on a view (`__torch_dispatch__`, `__torch_function__`)")  # fmt: skip
def _():
    view = xs.XLAShardedTensor(marked())
    assert view.placements == (xs.Shard(0), xs.Replicate())
    moved = view.redistribute(GRID, [xs.Shard(0), xs.Shard(0)])
    assert moved.partition_spec == (("x", "y"), None)
    assert view.partition_spec == ("x", None)
    np.testing.assert_array_equal(view.T[0], VALUE[:, 0])
    refused("jax.numpy", view.__torch_function__, None, (), kind=NotImplementedError)


@row("torch_xla", "`load_local_shards_` of a replicated array")
def _():
    view = xs.XLAShardedTensor(marked((None, None)))
    shards = view.local_shards
    for shard in shards:
        shard.data += 1
    np.testing.assert_array_equal(view.load_local_shards_(shards), VALUE + 1)
    shards[0].data += 1
    refused("", view.load_local_shards_, shards)


@row("torch_xla", "`backward` of `XLAPatchedLinear`: `ctx.needs_input_grad`")
def _():
    context = type("Context", (), {"needs_input_grad": (False, True)})()
    xs.XLAPatchedLinear.forward(context, VALUE, VALUE)
    slopes = xs.XLAPatchedLinear.backward(context, np.ones((8, 8), np.float32))
    assert slopes[0] is not None


row(
    "torch_xla",
    "`EinsumLinear`",
    by="compat/test_torch_xla_modules.py::test_einsum_linear",
)
row(
    "torch_xla",
    "`apply_xla_patch_to_nn_linear`",
    by="compat/test_torch_xla_modules.py::test_layers_are_patched_where_they_stand",
)
row(
    "torch_xla",
    "`apply_backward_optimization_barrier`",
    by="compat/test_torch_xla_modules.py::test_backward_barriers",
)
row("torch_xla", "`xla_distribute_module` of a torch module",
    by="compat/test_torch_tensors.py::"
    "test_a_torch_module_keeps_its_parameters_and_arrays_are_collected")  # fmt: skip


@row("torch_xla", "`auto_policy`", "`use_spmd(auto=True)`",
     "`prime_optimizer`, `SPMDSavePlanner`, `SPMDLoadPlanner`", "`SpmdFullyShardedDataParallel`",
     "`MpDeviceLoader`, `ParallelLoader`, `send_cpu_data_to_device`",
     "`get_master_ip` of `runtime`, the `_XLAC` functions")  # fmt: skip
def _():
    for call in (
        lambda: xs.auto_policy("m", None, GRID),
        lambda: runtime.use_spmd(auto=True),
        lambda: xs.prime_optimizer(None),
        xs.SPMDSavePlanner,
        xs.SPMDLoadPlanner,
        xs.SpmdFullyShardedDataParallel,
        xs.MpDeviceLoader,
        xs.ParallelLoader,
        lambda: xs.send_cpu_data_to_device([], None),
        runtime.get_master_ip,
    ):
        refused("shoal.", call, kind=NotImplementedError)
    assert not hasattr(xs, "_XLAC")


@row("torch_xla", "`visualize_sharding`")
def _(capsys):
    picture = xs.visualize_sharding("{devices=[2,2,2]<=[8]}", use_color=False, scale=2.0)
    assert capsys.readouterr().out == picture + "\n"


@row(
    "torch_xla",
    "`CheckpointManager.save` of a step that is saved",
    "`max_to_keep`",
    "`max_pending_async`, `num_of_threads`, `process_group`",
    "files of checkpoints",
)
def _(tmp_path):
    manager = xs.CheckpointManager(tmp_path, 1, max_to_keep=2, num_of_threads=8)
    for step in (3, 2, 1, 4):
        manager.save(step, {"w": VALUE})
    assert manager.all_steps() == [3, 4]
    refused("", manager.save, 3, {"w": VALUE}, kind=shoal.errors.StepAlreadyCommittedError)
    refused("", xs.CheckpointManager, tmp_path, 1, process_group=1, kind=NotImplementedError)
    assert [*tmp_path.rglob("*.safetensors")]


row(
    "torch_xla",
    "a flipped byte in a checkpoint",
    by="compat/test_torch_xla_checkpoints.py::test_one_flipped_byte_is_found",
)
row(
    "torch_xla",
    "errors of `save_async`",
    by="compat/test_torch_xla_checkpoints.py::test_checkpoint_manager",
)
row("torch_xla", "`CheckpointManager.restore`",
    by="compat/test_torch_xla_checkpoints.py::"
    "test_what_is_nested_and_views_are_restored_in_place")  # fmt: skip
row("torch_xla", "`CheckpointManager.reached_preemption`",
    by="compat/test_torch_xla_checkpoints.py::"
    "test_a_notice_is_a_reason_to_save_and_stops_only_who_asks")  # fmt: skip


# ---- The tables


@pytest.mark.parametrize("page", ["dtensor", "multihost_utils", "torch_xla"])
def test_every_row_is_asserted_and_every_assertion_has_a_row(page):
    own = {cell for name, cell in ROWS if name == page}
    assert own | marked_in_ported_tests(page) == {*listed(page)}


def marked_in_ported_tests(page):
    """Return the rows that the ported tests of a predecessor assert: `mark.differs(row)`."""
    texts = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tests" / "compat").glob(f"test_ported_{page}*.py")
    ]
    assert texts
    marks = [
        node.args[0]
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "differs"
    ]
    return {ast.literal_eval(mark) for mark in marks}


# what a docstring says of a difference
DIFFERS = re.compile(
    r"[Uu]nlike (torch_xla|DTensor|TensorFlow|JAX)\b"
    r"|\b(torch_xla|DTensor|TensorFlow|JAX) (returns?|raises?|keeps?|does|has|took)\b"
)


@pytest.mark.parametrize("facade", [dtensor, multihost_utils, xs])
def test_a_name_whose_docstring_speaks_of_a_difference_has_a_row(facade):
    cells = " ".join(listed(facade.__name__.rpartition(".")[2]))
    exported = {name: getattr(facade, name) for name in names.FACADES[facade.__name__]}
    speaking = {name for name, value in exported.items() if DIFFERS.search(value.__doc__ or "")}
    assert {name for name in speaking if f"`{name}" not in cells} == set()
    assert facade is not xs or "mark_sharding" in speaking


@pytest.mark.parametrize(
    ("page", "cell"),
    [pytest.param(*key, id=" ".join(key)) for key, by in ROWS.items() if callable(by)],
)
def test_a_difference_is_as_the_page_says(page, cell, request):
    function = ROWS[page, cell]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    function(*(request.getfixturevalue(name) for name in names))


def test_the_tests_that_rows_name_exist():
    for by in {by for by in ROWS.values() if isinstance(by, str)}:
        path, _, name = by.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), by
