"""Each row of the tables of differences on the pages, asserted."""

from __future__ import annotations

import logging
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from meta.source import ROOT
from shoal.compat import dtensor
from shoal.compat.dtensor import UNSHARDED, DVariable, Layout, Mesh

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


row("dtensor", "`create_distributed_mesh`: dims that differ between processes",
    by="processes/test_dtensor_names.py::test_tpus_that_cpu_devices_stand_for")  # fmt: skip
row("dtensor", "`create_tpu_mesh`: a name again; bounds that do not divide",
    by="compat/test_dtensor_meshes.py::test_create_tpu_mesh")  # fmt: skip


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


@row("dtensor", "`DTensorDataset` of what")
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


row("dtensor", "`shutdown_accelerator_system`, several clients",
    by="processes/test_dtensor_names.py::test_a_job_by_dtensors_variables")  # fmt: skip


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


row("dtensor", "`num_global_devices`",
    by="processes/test_dtensor_names.py::test_a_job_by_dtensors_variables")  # fmt: skip


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
    like = {"w": jax.ShapeDtypeStruct((4,), np.float32)}
    like = {"w": dtensor.copy_to_mesh(np.zeros(4, np.float32), Layout(["z"], other))}
    back = dtensor.name_based_restore(other, str(path), like)["w"]
    np.testing.assert_array_equal(back, VALUE[0])
    refused("", dtensor.name_based_save, mesh(), jnp.ones(3), like)
    refused("absent", dtensor.name_based_restore, other, tmp_path / "absent", like)
    low = {"w": dtensor.copy_to_mesh(VALUE[0].astype(jnp.bfloat16), Layout(["z"], other))}
    dtensor.name_based_save(other, tmp_path / "low", low)
    wide = dtensor.name_based_restore(other, tmp_path / "low", like)["w"]
    assert wide.dtype == np.float32


row("dtensor", "saving on a mesh of some processes",
    by="processes/test_dtensor_names.py::test_moves_and_saves")  # fmt: skip
row("dtensor", "`enable_save_as_bf16`",
    by="compat/test_dtensor_moves.py::test_save_as_bf16_sticks_to_float32")  # fmt: skip
row("dtensor", "`DTensorCheckpoint`: two variables of one name",
    by="compat/test_dtensor_saving.py::test_two_variables_of_one_name_are_an_error")  # fmt: skip


@row("dtensor", "`numpy_util`")
def _():
    assert not hasattr(dtensor, "numpy_util")


# ---- The tables


@pytest.mark.parametrize("page", ["dtensor"])
def test_every_row_is_asserted_and_every_assertion_has_a_row(page):
    assert {cell for name, cell in ROWS if name == page} == {*listed(page)}


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
