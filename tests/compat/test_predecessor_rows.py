"""Every promise of the predecessors: kept, or different by a row of a page, or left out by one.

The table, `predecessor_rows.jsonl`, has for each promise the facade, the name, what was compared
and how it is now: "same", with the test that shows it, or "differs" or "left out", with the row of
the facade's page that says so, which `test_differences.py` asserts.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shoal
import shoal.compat.torch_xla as xs
from compat.test_differences import listed
from meta.source import ROOT
from shoal.compat import dtensor, multihost_utils
from shoal.compat.dtensor import UNSHARDED, Layout

ROWS = [
    json.loads(line)
    for line in (ROOT / "tests/compat/predecessor_rows.jsonl").read_text("utf-8").splitlines()
]
VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)


def test_no_row_is_missing_and_none_is_wrong():
    assert len({row["row"] for row in ROWS}) == len(ROWS) == 228
    assert {row["now"] for row in ROWS} == {"same", "differs", "left out"}
    cells = {page: {*listed(page)} for page in ("dtensor", "multihost_utils", "torch_xla")}
    for row in ROWS:
        assert {*row} == {"row", "of", "name", "compared", "now", *(
            ["by"] if row["now"] == "same" else ["see"])}  # fmt: skip
        assert row["now"] == "same" or row["see"] in cells[row["of"]], row


def test_the_tests_that_show_what_is_the_same_exist():
    for by in {row["by"] for row in ROWS if row["now"] == "same"}:
        path, _, name = by.partition("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), by


# ---- The rows that no other test shows


def mesh():
    return dtensor.create_mesh({"x": 4, "y": 2})


def test_there_is_one_device_for_all_threads_and_it_has_its_methods():
    with ThreadPoolExecutor(8) as pool:
        devices = {*pool.map(lambda _: dtensor._dtensor_device(), range(64))}
    (device,) = devices
    layout = Layout(["x", UNSHARDED], mesh())
    x = dtensor.copy_to_mesh(VALUE, layout)
    assert device.name == dtensor.device_name()
    assert device.is_dtensor(x)
    assert not device.is_dtensor(VALUE)
    assert device.fetch_layout(x) == layout
    np.testing.assert_array_equal(device.pack(device.unpack(x), layout), x)


def test_a_mesh_is_registered_again_and_again_from_many_threads():
    register = dtensor._dtensor_device()._register_mesh
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(lambda _: register(mesh()), range(64))} == {None}
    with pytest.raises(ValueError, match="mesh"):
        register("x")
    names = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in (98, 99)]
    with pytest.raises(ValueError, match="99"):
        register(dtensor.Mesh(["x"], np.array([98, 99]), [98, 99], names))


def test_a_barrier_on_the_host_mesh():
    dtensor.barrier(mesh().host_mesh(), "on hosts")


def test_saving_leaves_its_files_alone_and_makes_the_folders_above(tmp_path):
    path = tmp_path / "a" / "b" / "model"
    dtensor.name_based_save(mesh(), path, {"w": VALUE})
    assert [one.name for one in (tmp_path / "a" / "b").iterdir()] == ["model"]


def test_what_does_not_fit_a_checkpoint_is_named(tmp_path):
    layout = Layout(["x", UNSHARDED], mesh())
    dtensor.name_based_save(mesh(), tmp_path / "c", {"w": VALUE})
    like = dtensor.copy_to_mesh(np.zeros((4, 4), np.float32), layout)
    with pytest.raises(ValueError, match=r"w.*8, 4.*4, 4"):
        dtensor.name_based_restore(mesh(), tmp_path / "c", {"w": like})
    with pytest.raises(ValueError, match="other"):
        dtensor.name_based_restore(mesh(), tmp_path / "c", {"other": like})
    data = max((tmp_path / "c").rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    torn = bytearray(data.read_bytes())
    torn[torn.index(VALUE.tobytes()) + 9] ^= 1
    data.write_bytes(torn)
    like = dtensor.copy_to_mesh(np.zeros((8, 4), np.float32), layout)
    with pytest.raises(ValueError, match="w") as told:
        dtensor.name_based_restore(mesh(), tmp_path / "c", {"w": like})
    assert isinstance(told.value, shoal.errors.CorruptCheckpointError)


@pytest.mark.parametrize(
    "call",
    [
        multihost_utils.broadcast_one_to_all,
        multihost_utils.process_allgather,
        multihost_utils.assert_equal,
    ],
)
def test_values_between_processes_do_not_travel_inside_jit(call):
    with pytest.raises(shoal.UsageError, match=f"{call.__name__}.*jit"):
        jax.jit(lambda x: call(x) or x)(jnp.ones(3))


@pytest.mark.filterwarnings("ignore:.with mesh.:DeprecationWarning")
def test_a_mesh_that_is_set_changes_nothing():
    grid = jax.make_mesh((8,), ("x",))
    for context in (jax.set_mesh(grid), grid):
        with context:
            assert multihost_utils.broadcast_one_to_all(VALUE).tolist() == VALUE.tolist()
            assert multihost_utils.process_allgather(VALUE).shape == (1, 8, 4)
            multihost_utils.sync_global_devices("here")


def test_pspecs_that_do_not_fit():
    grid = jax.make_mesh((8,), ("x",))
    convert = multihost_utils.host_local_array_to_global_array
    for value, spec in ((VALUE, P("z")), (VALUE[:7], P("x")), (VALUE, P(None, None, "x"))):
        with pytest.raises(ValueError, match="host_local_array_to_global_array"):
            convert(value, grid, spec)


def test_the_numbers_of_the_types_of_sharding():
    names = ["REPLICATED", "MAXIMAL", "TUPLE", "TILED", "MANUAL", "PARTIAL", "UNKNOWN"]
    assert [xs.ShardingType[name] for name in names] == list(range(7))


def test_a_spec_has_an_entry_for_each_dim():
    with pytest.raises(
        AssertionError, match=r"length \(1\) should be equal to the input rank \(2\)"
    ):
        xs.mark_sharding(VALUE, xs.get_1d_mesh("x"), ("x",))
