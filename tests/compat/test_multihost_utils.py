"""`shoal.compat.multihost_utils` in one process, beside JAX's own."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.experimental import multihost_utils as theirs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shoal
from shoal.compat import multihost_utils as ours
from shoal.errors import DivergenceError, ProcessLostError, UsageError, UsageTypeError

VALUES = [
    np.arange(6.0).reshape(2, 3),
    np.arange(4, dtype=np.int64) << 40,
    np.ones((2, 2), ml_dtypes.bfloat16),
    np.float32([-0.0, np.nan, 1e-42]),
    np.array(5),
    np.int8(3),
    7,
    2.5,
    True,
    1j,
    jnp.arange(8.0).reshape(4, 2),
    jnp.float32(3),
]
MESH = (4, 2)


def mesh():
    return Mesh(np.array(jax.devices()).reshape(MESH), ("x", "y"))


def same(one, other):
    """Check that two trees of NumPy arrays have the same types, shapes and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, yours in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (type(mine), mine.dtype, mine.shape) == (type(yours), yours.dtype, yours.shape)
        assert mine.tobytes() == yours.tobytes()


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_those_of_jax(value):
    tree = {"a": value, "b": [value], "nothing": None}
    same(ours.broadcast_one_to_all(tree), theirs.broadcast_one_to_all(tree))
    same(ours.process_allgather(tree), theirs.process_allgather(tree))
    tiled = ours.process_allgather(tree, tiled=True)
    if np.ndim(value):
        same(tiled, theirs.process_allgather(tree, tiled=True))
    else:  # JAX gives no dims at one process, and one at many
        assert tiled["a"].shape == (1,)
    ours.assert_equal(tree)
    if not np.isnan(np.asarray(value, np.complex64)).any():
        theirs.assert_equal(tree)


@given(
    st.sampled_from(["u1", "i2", "i4", "f4", "c8", "?"]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=3))
    )
)
def test_arrays_of_any_shape_are_those_of_jax(value):
    for tiled in (False, True):
        same(ours.process_allgather(value, tiled), theirs.process_allgather(value, tiled))


def test_what_jax_cannot_send_travels():
    key = jax.random.key(3)
    tree = {"run": "blue", "seed": 1 << 70, "key": key, "raw": b"\0"}
    with pytest.raises(TypeError):
        theirs.process_allgather(key)
    back = ours.broadcast_one_to_all(tree)
    assert (back["run"], back["seed"], back["raw"]) == ("blue", 1 << 70, b"\0")
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(key)).all()
    assert ours.process_allgather({"run": "blue", "seed": 1 << 70}) == {
        "run": ["blue"],
        "seed": [1 << 70],
    }


def test_what_is_replicated_over_a_mesh_has_one_value():
    loss = jax.jit(lambda x: x.sum())(
        jax.device_put(np.ones(8, np.float32), NamedSharding(mesh(), P("x")))
    )
    same(ours.process_allgather(loss, tiled=True), theirs.process_allgather(loss, tiled=True))
    rows = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh(), P()))
    came = ours.process_allgather({"loss": loss, "rows": rows, "own": np.ones(3)})
    assert [came[name].shape for name in ("loss", "rows", "own")] == [(), (8, 3), (1, 3)]


def test_a_lone_process_must_be_the_source():
    assert ours.broadcast_one_to_all(1, is_source=np.True_) == 1
    with pytest.raises(DivergenceError, match=r"broadcast_one_to_all: .*no process is the source"):
        ours.broadcast_one_to_all(1, is_source=False)


def test_unsupported_values_are_refused_under_both_names():
    for call, ours_is in (
        (ours.broadcast_one_to_all, "broadcast"),
        (ours.process_allgather, "allgather"),
        (ours.assert_equal, "assert_same"),
    ):
        with pytest.raises(UsageTypeError, match=rf"{call.__name__}: {ours_is}: \['a'\]") as caught:
            call({"a": object()})
        assert isinstance(caught.value, TypeError)
        assert caught.value.problems


def test_sync():
    ours.sync_global_devices("a point")
    ours.sync_global_devices("")  # as there
    with pytest.raises(UsageTypeError, match="sync_global_devices: barrier"):
        ours.sync_global_devices(3)


@pytest.mark.parametrize(
    "begin", ["", "import shoal; shoal.initialize()", "import shoal; shoal.preemption.watch()"]
)
def test_a_program_without_a_service_is_never_told_of_its_end(begin):
    code = f"""
import os, signal
from shoal.compat import multihost_utils
{begin}
told = [multihost_utils.reached_preemption_sync_point(step) for step in range(3)]
os.kill(os.getpid(), signal.SIGTERM)
step = 3
while not multihost_utils.reached_preemption_sync_point(step):
    step += 1
print(told, [multihost_utils.reached_preemption_sync_point(s) for s in (step, step + 1, step + 9)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    if begin:
        assert (done.returncode, done.stdout) == (0, f"{[False] * 3} {[True] * 3}\n"), done.stderr
    else:
        assert done.returncode == -signal.SIGTERM


def test_a_wrong_step_is_refused():
    for begin in (lambda: None, lambda: shoal.preemption.watch(signals=())):
        begin()
        with pytest.raises(UsageError, match=r"reached_preemption_sync_point: preempted\(-1\)"):
            ours.reached_preemption_sync_point(-1)
        with pytest.raises(UsageTypeError):
            ours.reached_preemption_sync_point(1.5)
        assert ours.reached_preemption_sync_point(np.int64(3)) is False


SPECS = [P("x", "y"), P("x"), P(None, "y"), P(), P(("x", "y")), P(("y", "x"), None), P("y", "x")]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("dtype", ["f4", "i8", "?", "bfloat16"])
def test_conversions_are_those_of_jax(spec, dtype):
    local = np.arange(64).reshape(8, 8).astype(getattr(ml_dtypes, dtype, dtype))
    for value in (local, jnp.asarray(local)):
        mine, yours = (
            module.host_local_array_to_global_array(value, mesh(), spec)
            for module in (ours, theirs)
        )
        assert (mine.sharding, mine.dtype, mine.shape) == (yours.sharding, yours.dtype, yours.shape)
        for one, other in zip(mine.addressable_shards, yours.addressable_shards, strict=True):
            assert one.index == other.index
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))
    back = ours.global_array_to_host_local_array(mine, mesh(), spec)
    assert back is theirs.global_array_to_host_local_array(mine, mesh(), spec) is mine


def test_pspecs_are_prefix_trees_and_none_is_refused():
    tree = {"w": np.ones((8, 4), np.float32), "b": [np.ones(8, np.float32)] * 2, "n": None}
    pspecs = {"w": P("x", "y"), "b": P("y"), "n": None}
    for module in (ours, theirs):
        whole = module.host_local_array_to_global_array(tree, mesh(), pspecs)
        assert whole["w"].sharding == NamedSharding(mesh(), P("x", "y"))
        assert [array.sharding.spec for array in whole["b"]] == [P("y")] * 2
        assert whole["n"] is None
        pair = module.host_local_array_to_global_array(
            (tree["w"], tree["w"]), mesh(), (P("x"), P())
        )
        assert [array.sharding.spec for array in pair] == [P("x"), P()]
    for convert in (ours.host_local_array_to_global_array, ours.global_array_to_host_local_array):
        for tree_, specs in ((tree["w"], None), (tree, pspecs | {"w": None})):
            with pytest.raises(
                ValueError, match="`None` is not a valid input to the pspecs"
            ) as caught:
                convert(tree_, mesh(), specs)
            assert isinstance(caught.value, UsageError)
            assert str(caught.value).startswith(f"{convert.__name__}: ")
    with pytest.raises(ValueError, match=r"\['v'\]: a leaf, but no layout"):
        ours.host_local_array_to_global_array({"v": tree["w"]}, mesh(), {"w": P()})


@pytest.mark.filterwarnings("ignore::shoal.DtypeWarning")
def test_64_bits_become_32_where_values_fit():
    convert = ours.host_local_array_to_global_array
    good = {
        "i": np.arange(8) - 4,
        "u": np.uint64(np.arange(8)),
        "f": np.float64([0.5, np.inf, np.nan] * 8),
        "c": np.complex128([1 + 2j] * 8),
        "big endian": np.arange(8).astype(">i8"),
        "s": np.int64(3),
    }
    for name, value in good.items():
        made = convert(value, mesh(), P())
        assert made.dtype.itemsize == value.dtype.itemsize // 2, name
        np.testing.assert_array_equal(np.asarray(made), value)
    assert convert(np.array([0.1]), mesh(), P())[0] == np.float32(0.1)
    for bad in (np.array([1 << 40]), np.array([1e300]), np.uint64([1 << 32])):
        with pytest.raises(UsageError, match=r"does not fit .*; cast, or turn 64-bit values on"):
            convert(bad, mesh(), P())
    with jax.enable_x64(True):
        assert convert(np.array([0.1]), mesh(), P()).dtype == np.float64


def test_numbers_keys_and_tangents_of_whole_numbers_become_arrays():
    convert = ours.host_local_array_to_global_array
    assert convert([1.5, 2, True], mesh(), P())[0].shape == ()
    with pytest.raises(AttributeError):
        theirs.host_local_array_to_global_array(1.5, mesh(), P())
    keys = jax.random.split(jax.random.key(0), 8)
    for module in (ours, theirs):
        whole = module.host_local_array_to_global_array(keys, mesh(), P("x"))
        assert (whole.dtype, whole.shape) == (keys.dtype, keys.shape)
        float0 = np.zeros((8, 2), jax.dtypes.float0)
        zeros = module.host_local_array_to_global_array(float0, mesh(), P("x"))
        assert (zeros.dtype, zeros.shape, bool(zeros.any())) == (bool, (8, 2), False)


def test_host_values_stay_host_values_on_the_way_back():
    value = np.arange(8.0)
    assert ours.global_array_to_host_local_array(value, mesh(), P("x")) is value


def test_conversions_are_differentiated_and_batched_and_refused_inside_jit():
    def loss(x):
        whole = ours.host_local_array_to_global_array(x, mesh(), P("x"))
        return (ours.global_array_to_host_local_array(whole, mesh(), P("x")) ** 2).sum()

    x = jnp.arange(24.0, dtype="float32").reshape(3, 8)
    np.testing.assert_allclose(jax.grad(loss)(x[0]), 2 * x[0])
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(x), 2 * x)
    batch = jax.vmap(lambda row: ours.host_local_array_to_global_array(row, mesh(), P("x")))(x)
    assert batch.sharding.is_equivalent_to(NamedSharding(mesh(), P(None, "x")), 2)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x[0]), 2 * x[0])  # inside jit, too


@pytest.mark.parametrize(
    "name", ["host_local_array_to_global_array", "global_array_to_host_local_array"]
)
def test_values_pass_through_jit_as_they_do_in_jax(name):
    x = np.arange(8, dtype=np.float32)
    for module in (ours, theirs):
        convert = getattr(module, name)
        found = jax.jit(lambda a, convert=convert: convert({"a": a, "n": None}, mesh(), P("x")))(x)
        np.testing.assert_array_equal(found["a"], x)
        spread = jax.device_put(x, NamedSharding(mesh(), P("y")))
        kept = jax.jit(lambda a, convert=convert: convert(a, mesh(), P("x")))(spread)
        assert kept.sharding.is_equivalent_to(spread.sharding, 1)
    for spec, words in ((None, "`None` is not a valid input"), (P(None, "x"), "2 entries for 1")):
        with pytest.raises(UsageError, match=words):
            jax.jit(lambda a, spec=spec: getattr(ours, name)(a, mesh(), spec))(x)


def test_entries_of_a_pspec_beyond_the_rank_count_for_nothing_if_they_are_none():
    tree = {"w": np.ones((8, 4), np.float32), "b": np.ones(8, np.float32), "n": np.float32(3)}
    for module in (ours, theirs):
        made = module.host_local_array_to_global_array(
            {"w": tree["w"], "b": tree["b"]}, mesh(), P("x", None)
        )
        assert made["b"].sharding.is_equivalent_to(NamedSharding(mesh(), P("x")), 1)
    assert made["w"].sharding.spec == P("x", None)
    whole = ours.host_local_array_to_global_array(tree, mesh(), P(None, None, ()))
    assert [whole[name].sharding.spec for name in "wbn"] == [P(None, None), P(None), P()]
    back = ours.global_array_to_host_local_array(whole, mesh(), P(None, None))
    assert all(back[name] is whole[name] for name in tree)
    for spec in (P("x", "y"), P(None, "x")):
        with pytest.raises(UsageError, match=r"\['b'\]: .* has 2 entries for 1 dim"):
            ours.host_local_array_to_global_array({"b": tree["b"]}, mesh(), spec)


def test_what_lies_otherwise_is_moved_and_what_is_no_mesh_is_refused():
    whole = jax.device_put(
        np.arange(64.0, dtype="f4").reshape(8, 8), NamedSharding(mesh(), P("x", "y"))
    )
    own = ours.global_array_to_host_local_array([whole, 3], mesh(), P())
    assert own[0].sharding == NamedSharding(mesh(), P())
    assert own[1] == 3
    np.testing.assert_array_equal(own[0], whole)
    slope = jax.grad(
        lambda x: (ours.global_array_to_host_local_array(x, mesh(), P("y")) ** 2).sum()
    )
    np.testing.assert_allclose(slope(whole), 2 * np.asarray(whole))
    with pytest.raises(UsageTypeError, match="host_local_array_to_global_array: use_mesh"):
        ours.host_local_array_to_global_array(whole, "x", P())


def test_live_devices():
    with ours.live_devices(jax.devices()[::-1]) as alive:
        assert alive == jax.devices()
    with ours.live_devices(jax.devices()[1:3]) as alive:  # each call asks about its own
        assert alive == jax.devices()[1:3]
    with pytest.raises(ZeroDivisionError), ours.live_devices(jax.devices()):
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match="No devices provided"), ours.live_devices([]):
        pytest.fail("entered")


def test_a_failure_has_its_devices_and_can_be_pickled():
    error = ours.ProcessFailureError({jax.devices()[1]})
    assert isinstance(error, ProcessLostError)
    assert str(error) == f"Devices failed: {error.failed_devices}"
    error.lost = {1: "killed"}
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.lost) == (str(error), error.lost)
    assert again.failed_devices == {str(jax.devices()[1])}


@pytest.mark.parametrize(
    "error", [ours.UnequalError("a", sides={"x": (0,)}), ours.SpreadArrayError("a")]
)
def test_errors_can_be_pickled(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
