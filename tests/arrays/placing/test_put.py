"""Host values → sharded arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrays.device_grids import placements
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.host.upload import upload
from shoal.arrays.placing.put import put
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region

MESH = Mesh({"data": 4, "model": 2})
DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32",
    "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
]  # fmt: skip


def aligned(count):
    """Return float32 zeros in memory that JAX would take for its own on CPU."""
    raw = np.zeros(4 * count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * count].view(np.float32)


@given(placements(), st.sampled_from(DTYPES))
def test_every_device_holds_its_region_bit_by_bit(placement, dtype):
    layout, shape = placement
    bits = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    value = (bits % 2 if dtype == "bool" else bits % 7).astype(ml_dtypes_of(dtype))
    array = put(value, layout)
    assert array.sharding == sharding_of(layout)
    assert (array.shape, array.dtype) == (shape, value.dtype)
    for shard in array.addressable_shards:
        held = np.asarray(shard.data)
        np.testing.assert_array_equal(held, value[region(layout, shape, shard.device.id)])


def ml_dtypes_of(name):
    return getattr(ml_dtypes, name, name)


def test_all_bits_arrive():
    odd = np.array([0x80000000, 1, 0x7F800001, 0xFFC12345], np.uint32)  # -0, subnormal, two NaN
    for layout in (Layout(MESH, "data"), Layout(MESH, None)):
        array = put(odd.view(np.float32), layout)
        for shard in array.addressable_shards:
            held = np.asarray(shard.data).view(np.uint32)
            np.testing.assert_array_equal(held, odd[shard.index])


@pytest.mark.parametrize("layout", [Layout(MESH, "data"), Layout(MESH, None)])
@pytest.mark.parametrize("count", [64, 1 << 20])
def test_a_later_change_of_the_host_value_changes_nothing(layout, count):
    value = aligned(count)
    array = put(value, layout)
    value[:] = 7
    np.testing.assert_array_equal(np.asarray(array), 0)


def test_jax_would_have_shared_that_memory():
    value = aligned(64)  # or the test above tests nothing
    shared = jax.device_put(value, jax.devices()[0], may_alias=False)
    assert shared.unsafe_buffer_pointer() == value.ctypes.data
    (own,) = upload([value], [jax.devices()[0]])
    assert own.unsafe_buffer_pointer() != value.ctypes.data


def test_put_arrays_can_be_donated():
    value = aligned(1 << 16)
    array = put(value, Layout(MESH, "data"))
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    np.testing.assert_array_equal(value, 0)


def test_numbers_of_python_get_jaxs_dtypes_and_those_of_numpy_keep_theirs():
    tree = {"b": True, "i": 3, "f": 0.5, "c": 1j, "n": np.int8(3), "h": ml_dtypes.bfloat16(2)}
    dtypes = jax.tree.map(lambda array: array.dtype.name, put(tree, Layout(MESH)))
    assert dtypes == {"b": "bool", "i": "int32", "f": "float32", "c": "complex64",
                     "n": "int8", "h": "bfloat16"}  # fmt: skip
    with jax.enable_x64(True):
        wide = put({"i": 2**40, "f": 1e300, "n": np.int64(3)}, Layout(MESH))
        assert wide["i"].dtype == wide["n"].dtype == np.int64
        assert float(wide["f"]) == 1e300
        assert int(wide["i"]) == 2**40


def test_nothing_is_narrowed_where_dtypes_are_strict(monkeypatch):
    monkeypatch.setenv("SHOAL_STRICT_DTYPES", "1")
    tree = {"a": np.zeros(8), "b": {"c": np.zeros(8, np.int64)}, "d": np.zeros(8, np.complex128)}
    with pytest.raises(UsageError, match="put: 3 problems") as caught:
        put(tree, Layout(MESH, None))
    message = str(caught.value)
    assert "['a']: float64 would become float32; cast" in message
    assert "['b']['c']: int64 would become int32; cast" in message
    assert "['d']: complex128 would become complex64; cast, or turn 64-bit" in message
    assert "JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)" in message
    with jax.enable_x64(True):
        assert put(tree, Layout(MESH, None))["a"].dtype == np.float64


@pytest.mark.parametrize(
    "value", [2**31, -(2**31) - 1, 1e39, 1e39j, pytest.param(10**5000, id="long")]
)
def test_numbers_that_do_not_fit(value):
    with pytest.raises(UsageError, match=r"\['n'\]: is .*, which does not fit"):
        put({"n": value}, Layout(MESH))


def test_infinities_and_nan_are_numbers():
    arrays = put([float("inf"), float("-inf"), float("nan")], Layout(MESH))
    assert [str(float(array)) for array in arrays] == ["inf", "-inf", "nan"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("text", "is a str"),
        (b"bytes", "is a bytes"),
        (object(), "is an object"),
        (np.array("text"), "has dtype <U4"),
        (np.array(None), "has dtype object"),
        (np.datetime64("2020-01-01"), "has dtype datetime64"),
        (np.timedelta64(1, "s"), "has dtype timedelta64"),
        (np.longdouble(1), "has dtype"),
        (np.zeros((), [("a", "f4")]), "has dtype"),
        (np.ma.masked_array(3.0, mask=True), "is a masked array"),
    ],
)
def test_put_refuses_values_that_are_not_arrays(value, why):
    with pytest.raises(UsageError, match=r"\['x'\]: " + why):
        put({"x": value, "y": np.float32(1)}, Layout(MESH))


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn"])
def test_a_dtype_that_only_some_versions_of_jax_have(name):
    value = np.arange(8).astype(getattr(ml_dtypes, name))
    try:
        jax.device_put(value)
    except jax.errors.JaxRuntimeError:
        with pytest.raises(UsageError, match=f"has dtype {name}, which arrays on devices cannot"):
            put({"x": value}, Layout(MESH))
    else:
        assert put(value, Layout(MESH)).dtype == value.dtype


def test_any_memory_order():
    value = np.arange(64, dtype=np.int16).reshape(8, 8)
    swapped = value.astype(value.dtype.newbyteorder())
    assert not swapped.dtype.isnative
    for odd in (value.T, value[::-1], np.asfortranarray(value), swapped, value[:, ::2]):
        array = put(odd, Layout(MESH, "data", "model"))
        np.testing.assert_array_equal(np.asarray(array), odd)
        assert array.dtype == np.int16


def test_a_mapped_file(tmp_path):
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.save(tmp_path / "value.npy", value)
    mapped = np.load(tmp_path / "value.npy", mmap_mode="r")
    np.testing.assert_array_equal(np.asarray(put(mapped, Layout(MESH, "data", None))), value)


def test_keys():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 8)
    for layout in (
        Layout(MESH, "data"),
        Layout(MESH, None),
        Layout(Mesh({}, device_ids=[6]), None),
    ):
        array = put(keys, layout)
        assert array.dtype == keys.dtype
        assert layout_of(array) == layout
        np.testing.assert_array_equal(jax.random.key_data(array), jax.random.key_data(keys))
        again = put(array, Layout(Mesh({"a": 8}), "a"))
        np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(keys))


def test_array_already_in_its_layout_is_returned():
    array = put(np.zeros((8, 2), np.float32), Layout(MESH, "data", None))
    assert put(array, Layout(MESH, "data", None)) is array


def test_array_in_an_equal_layout_of_other_axis_names_is_not_copied():
    array = put(np.zeros((8, 2), np.float32), Layout(MESH, "data", None))
    other = Layout(Mesh({"rows": 4, "rest": 2}, axis_types="explicit"), "rows", None)
    again = put(array, other)
    assert layout_of(again) == other
    for shard, other_shard in zip(array.addressable_shards, again.addressable_shards, strict=True):
        assert shard.data.unsafe_buffer_pointer() == other_shard.data.unsafe_buffer_pointer()


def test_arrays_of_jax():
    value = np.arange(16, dtype=np.float32).reshape(8, 2)
    layout = Layout(MESH, "model", None)
    for array in (jnp.asarray(value), jax.device_put(value, jax.devices()[5]),
                  put(value, Layout(MESH, None, "model"))):  # fmt: skip
        moved = put(array, layout)
        assert moved.sharding == sharding_of(layout)
        np.testing.assert_array_equal(np.asarray(moved), value)


def test_a_part_of_the_devices():
    layout = Layout(Mesh({"x": 3}, device_ids=[6, 1, 4]), "x")
    array = put(np.arange(6, dtype=np.int32), layout)
    held = {shard.device.id: np.asarray(shard.data).tolist() for shard in array.addressable_shards}
    assert held == {6: [0, 1], 1: [2, 3], 4: [4, 5]}


def test_pending_sums_are_refused():
    mesh = Mesh({"x": 8}, axis_types="explicit")
    with pytest.raises(UsageError, match="is partial over x"):
        put(np.zeros(3, np.float32), Layout(mesh, None, partial={"x": "sum"}))


def test_inside_jit():
    with pytest.raises(UsageError, match="inside jit or grad; constrain pins it there"):
        jax.jit(lambda x: put(x, Layout(MESH, None)))(jnp.zeros(3))


def test_an_empty_tree():
    assert put({"a": [], "b": None}, Layout(MESH)) == {"a": [], "b": None}


@pytest.mark.parametrize("dtype", [">f8", ">i8", ">u8", ">c16"])
@pytest.mark.filterwarnings("ignore::shoal.DtypeWarning")
def test_values_are_narrowed_in_any_byte_order(dtype):
    most = np.array(np.iinfo(dtype).max if dtype[1] in "iu" else 1e300, dtype)
    with pytest.raises(UsageError, match=r"\['w'\]: holds .*, which does not fit \w+(32|64)"):
        put({"w": most}, Layout(MESH))
    narrow = put({"w": np.arange(8).astype(dtype)}, Layout(MESH, "data"))["w"]
    assert narrow.dtype.itemsize == np.dtype(dtype).itemsize // 2
    np.testing.assert_array_equal(np.asarray(narrow), np.arange(8))
    with jax.enable_x64(True):
        array = put({"w": np.arange(8).astype(dtype)}, Layout(MESH, "data"))["w"]
    assert array.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(np.asarray(array), np.arange(8))


@pytest.mark.parametrize("dims", [("data", None), (None, "model")])
def test_deleted_arrays_are_named(dims):
    gone = put(np.zeros((8, 2), np.float32), Layout(MESH, "data", None))
    gone.delete()
    with pytest.raises(UsageError, match=r"\['w'\]\[1\]: was deleted \(donated or released\)"):
        put({"w": [np.zeros((8, 2), np.float32), gone]}, Layout(MESH, *dims))


@pytest.mark.parametrize("value", [np.ones(8, np.float32), 2.0])
def test_host_values_are_placed_outside_jit(value):
    layout = Layout.replicated(MESH, np.ndim(value))
    with pytest.raises(UsageError, match="inside jit no value is on a device yet; place host"):
        jax.jit(lambda x: x + put(value, layout))(jnp.zeros(8))


def test_an_array_that_moves_is_of_its_dtype_and_not_weak():
    weak = jnp.asarray(2.0)  # jobs lose the weakness on the way over the host: so does one process
    assert weak.weak_type
    array = put(weak, Layout(MESH))
    assert (array.dtype, array.weak_type) == (np.float32, False)


@pytest.mark.parametrize("ids", [range(8), [0, 3], [5, 0, 2, 1]])
def test_arrays_that_are_donated_later_take_nothing_with_them(ids):
    mesh, pair = Mesh({"x": len(ids)}, device_ids=ids), Mesh({"a": 2}, device_ids=[3, 0])
    for source in (jax.device_put(np.ones(8, np.float32), jax.devices()[0]),
                   put(np.ones(8, np.float32), Layout(pair, None))):  # fmt: skip
        arrays = [put(source, Layout(mesh, None)), put(source, Layout(mesh, "x"))]
        source.delete()
        for array in arrays:
            np.testing.assert_array_equal(np.asarray(array), 1)
