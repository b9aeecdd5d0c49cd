"""Parts of arrays and whole ones in one process, where each part is the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from arrays.device_grids import placements
from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.host_local.host_local import from_host_local, to_host_local
from shoal.arrays.placing.put import put
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region

MESH = Mesh({"data": 4, "model": 2})
ROWS, BOTH = Layout(MESH, "data", None), Layout(MESH, "data", "model")
SPLIT = Layout(MESH, "data")
VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def same_bits(one, other):
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@given(placements())
def test_there_and_back_over_any_layout(placement):
    layout, shape = placement
    value = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    whole = from_host_local(value, layout)
    assert whole.sharding == sharding_of(layout)
    for shard in whole.addressable_shards:
        same_bits(shard.data, value[region(layout, shape, shard.device.id)])
    part = to_host_local(whole, layout)
    assert (part.shape, part.sharding) == (shape, sharding_of(layout))
    assert pointers(part) == pointers(whole)
    again = from_host_local(part, layout)
    assert pointers(again) == pointers(whole)


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int2",
          "int4", "uint8", "int32", "bool", "complex64"]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_bit_for_bit(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    bits = np.random.default_rng(0).integers(0, 256, (8, 4, dtype.itemsize), np.uint8)
    if name in ("float4_e2m1fn", "int4", "int2", "bool"):
        bits %= {"bool": 2, "int2": 4}.get(name, 16)
    value = bits.view(dtype)[..., 0]
    for given_ in (value, jnp.asarray(value)):
        whole = from_host_local(given_, BOTH)
        assert whole.dtype == dtype
        same_bits(to_host_local(whole, BOTH), value)


def test_trees_of_all_kinds_with_prefixes():
    keys = jax.random.split(jax.random.key(3), 4)
    tree = {
        "w": VALUE,
        "k": keys,
        "s": [2.5, True, 3, np.float32(7), 1j],
        "big": VALUE.astype(">f4"),
    }
    layouts = {"w": BOTH, "k": SPLIT, "s": Layout(MESH), "big": sharding_of(ROWS)}
    whole = from_host_local(tree, layouts)
    assert [leaf.dtype for leaf in whole["s"]] == [np.float32, bool, np.int32, np.float32, "c8"]
    assert not whole["s"][0].weak_type
    assert layout_of(whole["k"]) == SPLIT
    same_bits(jax.random.key_data(to_host_local(whole["k"], SPLIT)), jax.random.key_data(keys))
    same_bits(whole["big"], VALUE)
    same_bits(whole["w"], VALUE)
    with use_mesh(MESH):
        specs = from_host_local([VALUE, VALUE, VALUE, 3], [P("data"), ("model", None), None, P()])
        by_path = from_host_local(
            {"a": VALUE}, lambda path, leaf: ("data",) if path == "a" else None
        )
    assert [layout_of(array).dims for array in specs] == [
        ("data", None), ("model", None), (None, None), ()]  # fmt: skip
    assert layout_of(by_path["a"]).dims == ("data", None)
    assert from_host_local({}, SPLIT) == {}
    assert from_host_local({"a": None}, SPLIT) == {"a": None}


def test_local_values_and_global_arrays_pass_unchanged():
    local = jnp.ones(3)  # on one device: not spread over the mesh
    host = np.float64(3)
    tree = {"a": local, "b": VALUE, "c": 2.5, "d": host}
    layouts = {"a": Layout(MESH, None), "b": ROWS, "c": Layout(MESH), "d": Layout(MESH)}
    same = to_host_local(tree, layouts)
    assert all(same[name] is tree[name] for name in tree)
    whole = put(VALUE, ROWS)
    assert from_host_local(whole, ROWS) is not None
    assert pointers(from_host_local(whole, ROWS)) == pointers(whole)


def test_host_values_may_change_afterwards_and_arrays_are_shared():
    value = np.zeros((8, 1 << 10), np.float32)
    whole = from_host_local(value, ROWS)
    value[:] = 1
    same_bits(whole, np.zeros_like(value))
    part = to_host_local(whole, ROWS)
    part.delete()
    assert part.is_deleted()
    alone = jax.device_put(VALUE, jax.devices()[3])
    moved = from_host_local(alone, ROWS)
    alone.delete()
    same_bits(moved, VALUE)


def test_explicit_axes_stay_explicit():
    explicit = Mesh({"data": 4, "model": 2}, axis_types={"data": "explicit"})
    layout = Layout(explicit, "data", "model")
    whole = from_host_local(VALUE, layout)
    part = to_host_local(whole, layout)
    for array in (whole, part):
        assert jax.typeof(array).sharding.spec == P("data", None)
        assert layout_of(array) == layout


def test_scalars_and_floats_are_arrays():
    for value in (2.5, np.float32(2.5), jnp.float32(2.5), np.array(2.5, "f4")):
        whole = from_host_local(value, Layout(MESH))
        assert (whole.shape, whole.dtype, float(whole)) == ((), np.float32, 2.5)
        assert to_host_local(whole, Layout(MESH)).shape == ()
    with use_mesh(MESH), pytest.raises(UsageError, match=r"has 1 entry for 0 dims"):
        from_host_local(2.5, P("data"))


def test_from_host_local_reports_every_problem_at_once():
    gone = put(VALUE, ROWS)
    gone.delete()
    tree = {
        "a": VALUE[:3], "b": np.float64(1e39), "c": "text", "d": np.array([object()]), "e": gone,
        "f": VALUE, "g": VALUE[0], "h": jax.ShapeDtypeStruct((8, 4), np.float32),
    }  # fmt: skip
    pending = Layout(Mesh({"x": 4}, axis_types="explicit"), None, None, partial={"x": "sum"})
    layouts = dict.fromkeys(tree, ROWS) | {"b": Layout(MESH), "c": Layout(MESH), "d": SPLIT}
    with pytest.raises(UsageError, match="from_host_local: 8 problems") as error:
        from_host_local(tree, layouts | {"f": pending})
    for words in (
        "['a']: dim 0 of the part (3, 4) of process 0 has size 3, which its 4 of the 4 shards over "
        "data do not divide; 4 would fit",
        "['b']: holds 1e+39, which does not fit float32; cast, or turn 64-bit values on",
        "['c']: is a str; pass a numpy array",
        "['d']: has dtype object, which arrays on devices cannot have",
        "['e']: was deleted (donated or released)",
        "['f']: Layout(-, - | sum over x @ x=4 explicit over x) is partial over x",
        "['g']: shape (4,) has rank 1, but Layout(data, - @",
        "['h']: has no values, but devices of this process hold a part of the array",
    ):
        assert words in str(error.value) or "partial" in words, words
    assert "['f']: " in str(error.value)
    with pytest.raises(UsageError, match="to_host_local: 4 problems") as error:
        to_host_local({"a": gone, "b": put(VALUE, BOTH), "c": "text", "d": object()},
                      {"a": ROWS, "b": ROWS, "c": Layout(MESH), "d": Layout(MESH)})  # fmt: skip
    assert "['b']: is in Layout(data, model @" in str(error.value)


def test_wrong_options_and_layouts_are_named():
    with pytest.raises(UsageTypeError, match="check_values=1 must be True or False"):
        from_host_local(VALUE, ROWS, check_values=1)
    with pytest.raises(UsageTypeError, match="lane=3 must be a string"):
        from_host_local(VALUE, ROWS, lane=3)
    for convert in (from_host_local, to_host_local):
        with pytest.raises(UsageError, match="needs a mesh: pass "):
            convert(VALUE, P("data"))
        with pytest.raises(UsageError, match="a leaf, but no layout"):
            convert({"w": VALUE, "b": VALUE}, {"w": ROWS})


def test_part_of_the_devices_in_another_order_and_the_mesh_of_set_mesh():
    own = Mesh({"x": 3}, device_ids=[6, 1, 4])
    value = np.arange(6, dtype=np.float32)
    with jax.set_mesh(jax_mesh(MESH)):
        whole = from_host_local(value, Layout(own, "x"))
    assert [shard.device.id for shard in whole.addressable_shards] == [6, 1, 4]
    same_bits(whole.addressable_shards[1].data, value[2:4])
    assert pointers(to_host_local(whole, Layout(own, "x"))) == pointers(whole)
    empty = from_host_local(np.zeros((0, 6), np.float32), Layout(own, "x", None))
    assert empty.shape == (0, 6)
    assert to_host_local(empty, Layout(own, "x", None)).shape == (0, 6)


def test_after_a_donation_neither_is_left():
    whole = from_host_local(VALUE, ROWS)
    part = to_host_local(whole, ROWS)
    jax.jit(lambda x: x + 1, donate_argnums=0)(whole)
    for convert, array in ((from_host_local, part), (to_host_local, whole)):
        with pytest.raises(UsageError, match="the array: was deleted"):
            convert(array, ROWS)


def test_arrays_on_devices_need_no_way_over_the_host():
    whole = put(VALUE, ROWS)
    _, back = jax.vjp(lambda x: from_host_local(x, ROWS), whole)
    with jax.transfer_guard("disallow_explicit"):
        part = to_host_local(from_host_local(whole, ROWS), ROWS)
        (slope,) = back(part)
    assert pointers(slope) == pointers(whole)


def test_a_mesh_is_no_layout():
    for mesh in (MESH, jax_mesh(MESH)):
        with pytest.raises(UsageError, match=r"Mesh\(.* gives every device every row"):
            from_host_local(VALUE, mesh)
