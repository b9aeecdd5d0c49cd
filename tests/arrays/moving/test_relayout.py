"""Arrays → the same values in another layout."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrays.device_grids import grids
from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.pack import pack
from shoal.arrays.placing.put import put
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region
from shoal.testing.strategies import layouts

MESH = Mesh({"data": 4, "model": 2})
ROWS, COLUMNS = Layout(MESH, "data", None), Layout(MESH, None, ("model", "data"))


@st.composite
def moves(draw):
    """Two layouts of one rank over devices that exist, and a shape that both divide."""
    source = draw(layouts(draw(grids()), max_rank=2))
    target = draw(
        layouts(draw(grids()), max_rank=2).filter(lambda other: other.rank == source.rank)
    )
    shape = tuple(np.lcm(source.num_shards(d), target.num_shards(d)) for d in range(source.rank))
    return source, target, tuple(map(int, shape))


@pytest.mark.parametrize("way", [None, "collectives"])
@given(moves())
def test_any_layout_to_any_layout_of_any_devices(way, move):
    source, target, shape = move
    value = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    array = relayout(put(value, source), target, way=way)
    assert array.sharding == sharding_of(target)
    for shard in array.addressable_shards:
        held = np.asarray(shard.data)
        np.testing.assert_array_equal(held, value[region(target, shape, shard.device.id)])


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_arrays_without_items(shape):
    for source, target in [(ROWS, COLUMNS), (COLUMNS, ROWS), (ROWS, Layout(MESH, "model", "data"))]:
        moved = relayout(put(np.ones(shape, np.float32), source), target)
        assert moved.sharding == sharding_of(target)
        assert {s.data.shape for s in moved.addressable_shards} == {target.shard_shape(shape)}


@pytest.mark.parametrize("way", [None, "collectives"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "int4"])
def test_bits_of_narrow_values_survive_every_way(dtype, way):
    words = np.random.default_rng(0).integers(0, 256, (64, 64 * np.dtype(dtype).itemsize), np.uint8)
    values = (words % 16 if dtype == "int4" else words).view(dtype)
    for target in (COLUMNS, Layout(MESH, "model", "data"), Layout(MESH, None, None)):
        moved = np.asarray(relayout(put(values, ROWS), target, way=way))
        np.testing.assert_array_equal(
            moved.view(np.uint8), np.asarray(put(values, ROWS)).view("u1")
        )


@pytest.mark.parametrize("way", [None, "collectives"])
def test_bits_survive(way):
    odd = np.array([0x80000000, 1, 0x7F800001, 0xFFC12345] * 2, np.uint32)
    value = put(odd.view(np.float32), Layout(MESH, "data"))
    array = relayout(value, Layout(MESH, "model"), way=way)
    np.testing.assert_array_equal(np.asarray(array).view(np.uint32), odd)


def test_relayout_of_a_tree_returns_placed_leaves_unchanged():
    tree = {
        "a": put(np.ones((8, 8), np.float32), ROWS),
        "b": put(np.ones(8, np.float32), Layout(MESH, None)),
    }
    moved = relayout(tree, {"a": COLUMNS, "b": Layout(MESH, None)})
    assert moved["b"] is tree["b"]
    assert layout_of(moved["a"]) == COLUMNS


def test_arrays_on_one_device_and_keys_move_too():
    value = jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[3])
    assert layout_of(relayout(value, Layout(MESH, "data"))) == Layout(MESH, "data")
    keys = jax.random.split(jax.random.key(0), 8)
    moved = relayout(put(keys, Layout(MESH, "data")), Layout(MESH, "model"))
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


@pytest.mark.parametrize("way", [None, "collectives"])
@pytest.mark.parametrize("dims", [("model", "data"), (None, "data")])  # other, same shard shapes
def test_donated_arrays_are_gone(dims, way):
    array = put(np.ones((8, 8), np.float32), ROWS)
    moved = relayout(array, Layout(MESH, *dims), donate=True, way=way)
    assert array.is_deleted()
    np.testing.assert_array_equal(moved, 1)
    assert relayout(moved, Layout(MESH, *dims), donate=True) is moved
    assert not moved.is_deleted()


def test_nothing_passes_through_the_host():
    array = put(np.arange(64, dtype=np.float32).reshape(8, 8), ROWS)
    target = Layout(MESH, None, "model")
    jax.block_until_ready(relayout(array, target, way="collectives"))  # compiled
    with jax.transfer_guard("disallow_explicit"):
        moved = relayout(array, target, way="collectives")
    assert layout_of(moved) == Layout(MESH, None, "model")


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float16", "int8", "int4"])
def test_a_pending_sum_is_carried_out(dtype):
    mesh = Mesh({"x": 4, "y": 2}, axis_types="explicit")
    terms = pack([np.full(2, n % 4 - n // 4).astype(dtype) for n in range(8)],
                 Layout(mesh, "x", partial={"y": "sum"}))  # fmt: skip
    for target in (Layout(mesh, "x"), Layout(mesh, None), Layout(MESH, "model")):
        whole = relayout(terms, target)
        assert whole.dtype == dtype
        assert np.asarray(whole).astype(int).tolist() == [1, 1, 5, 5, -1, -1, 3, 3]
        assert layout_of(whole) == target


def test_cotangents_travel_back():
    array = put(np.arange(64, dtype=np.float32).reshape(8, 8), ROWS)

    def loss(x):
        moved = relayout(x, COLUMNS)
        return (moved * moved).sum()

    value, slope = jax.value_and_grad(loss)(array)
    np.testing.assert_array_equal(slope, 2 * np.asarray(array))
    assert layout_of(slope) == ROWS
    assert float(value) == float((np.asarray(array) ** 2).sum())
    _, pushed = jax.jvp(lambda x: relayout(x, COLUMNS), (array,), (array,))
    assert layout_of(pushed) == COLUMNS


W = np.arange(64, dtype=np.float32).reshape(8, 8)
LOSSES = {
    "linear": (lambda move, x: (move(x) * 2).sum(), 0 * W + 2),
    "sum": (lambda move, x: move(x).sum(), 0 * W + 1),
    "quadratic": (lambda move, x: (move(x) ** 2).sum(), 2 * W),
    "mixed": (lambda move, x: (move(x) ** 2).sum() + (x * 3).sum(), 2 * W + 3),
    "weighted": (lambda move, x: (move(x) * move(jnp.asarray(x))).sum(), 2 * W),
    "second": (lambda move, x: jax.grad(lambda y: (move(y) ** 3).sum())(x).sum(), 6 * W),
    "third": (
        lambda move, x: jax.grad(lambda y: jax.grad(lambda z: (move(z) ** 4).sum())(y).sum())(
            x
        ).sum(),
        24 * W,
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["auto", "explicit", "mixed"])
def test_cotangents_of_any_layout_come_back_in_the_source_s(kind, loss):
    types = {"a": "auto", "b": "explicit"} if kind == "mixed" else kind
    mesh = Mesh({"a": 2, "b": 4}, axis_types=types)
    layouts = [Layout(mesh, *dims) for dims in ((None, None), ("b", "a"), (None, ("b", "a")))]
    compute, expected = LOSSES[loss]
    with jax.set_mesh(None if kind == "auto" else jax_mesh(mesh)):
        for source, target in itertools.product(layouts, repeat=2):
            x = put(W, source)
            slope = jax.grad(lambda x, to=target: compute(lambda y: relayout(y, to), x))(x)
            np.testing.assert_allclose(slope, expected, rtol=1e-6)
            assert slope.sharding.is_equivalent_to(x.sharding, 2)


def test_a_derivative_takes_cotangents_of_any_layout():
    layouts = [ROWS, COLUMNS, Layout(MESH, "model", "data"), Layout(MESH, None, None)]
    for source, target in itertools.product(layouts, repeat=2):
        x = put(W, source)
        _, backwards = jax.vjp(lambda x, to=target: relayout(x, to), x)
        _, forwards = jax.linearize(lambda x, to=target: relayout(x, to) * 2, x)
        np.testing.assert_array_equal(forwards(x), 2 * W)
        for lies in layouts:
            (slope,) = backwards(put(W, lies))
            np.testing.assert_array_equal(slope, W)
            assert layout_of(slope) == source


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_inside_jit_and_vmap_one_constrains(transform):
    with pytest.raises(UsageError, match="inside jit or vmap; constrain pins it there"):
        transform(lambda x: relayout(x, Layout.replicated(MESH, x.ndim)))(jnp.ones((8, 8)))


def test_relayout_reports_every_problem_at_once():
    tree = {"a": put(np.ones((8, 8), np.float32), ROWS), "b": np.ones(8), "c": jnp.ones((3, 3))}
    with pytest.raises(UsageError, match="relayout: 3 problems") as caught:
        relayout(
            tree, {"a": Layout(MESH, "data", None, None), "b": Layout(MESH, "data"), "c": ROWS}
        )
    message = str(caught.value)
    assert "['a']: shape (8, 8) has rank 2" in message
    assert "['b']: an ndarray is not on devices yet; put places host values" in message
    assert "['c']: dim 0 of (3, 3) has size 3, which 4 shards (data=4) do not divide; 4" in message


@pytest.mark.parametrize("target", [ROWS, COLUMNS])
def test_deleted_arrays_are_named(target):
    gone = put(np.ones((8, 8), np.float32), ROWS)
    gone.delete()
    with pytest.raises(UsageError, match=r"\['a'\]: was deleted \(donated or released\)"):
        relayout({"a": gone}, target)


@pytest.mark.parametrize("way", [None, "collectives"])
@pytest.mark.parametrize("donate", [False, True])
def test_array_on_other_devices_outlives_its_source(donate, way):
    source = jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[0])
    moved = relayout(source, Layout(MESH, None), donate=donate, way=way)
    assert source.is_deleted() is donate
    source.delete()
    np.testing.assert_array_equal(moved, np.arange(8))
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(8))


@pytest.mark.parametrize(
    ("layout", "stays"),
    [(ROWS, True), (Layout(Mesh({"a": 4, "b": 2}), "a", None), True),
     (COLUMNS, False), (Layout(Mesh({"x": 2}, device_ids=[5, 1]), "x", None), False)],
)  # fmt: skip
@pytest.mark.parametrize("way", [None, "collectives"])
def test_donated_arrays_that_stand_twice_in_a_tree(way, layout, stays):
    tied = put(np.ones((8, 8), np.float32), ROWS)
    moved = relayout([tied, tied], [COLUMNS, layout], donate=True, way=way)
    assert [layout_of(array) for array in moved] == [COLUMNS, layout]
    for array in moved:
        np.testing.assert_array_equal(np.asarray(array), 1)
    assert tied.is_deleted() is not stays


def test_donated_terms_of_a_sum_are_gone():
    mesh = Mesh({"x": 4, "y": 2}, axis_types="explicit")
    for target in (Layout(mesh, "x"), Layout(MESH, "model")):
        terms = pack([np.full(2, n, np.float32) for n in range(8)],
                     Layout(mesh, "x", partial={"y": "sum"}))  # fmt: skip
        whole = relayout(terms, target, donate=True)
        assert terms.is_deleted()
        assert np.asarray(whole).tolist() == [1, 1, 5, 5, 9, 9, 13, 13]


@pytest.mark.parametrize("ids", [range(7, -1, -1), [6, 1]])
def test_the_mesh_of_jax_set_mesh_does_not_matter(ids):
    own = Mesh({"x": len(ids)}, device_ids=ids)
    with jax.set_mesh(jax_mesh(MESH)):
        array = put(np.ones((8, 8), np.float32), Layout(own, "x", None))
        moved = relayout(array, Layout(own, None, "x"))
        assert jax.sharding.get_mesh() is jax_mesh(MESH)
    assert layout_of(moved) == Layout(own, None, "x")
    np.testing.assert_array_equal(moved, 1)


WEAK_MOVES = {
    "planned": Layout(MESH, "model", "data"),
    "another order": Layout(Mesh({"x": 8}, device_ids=[3, 1, 4, 0, 5, 2, 7, 6]), "x", None),
    "XLA": COLUMNS,
    "the same shards": Layout(Mesh({"a": 4, "b": 2}), "a", None),
    "other devices": Layout(Mesh({"x": 4}), "x", None),
    "explicit": Layout(Mesh({"a": 2, "b": 4}, axis_types="explicit"), "b", "a"),
}


@pytest.mark.parametrize("name", WEAK_MOVES)
@pytest.mark.parametrize("value", [3, 1.5, 2j])
def test_weakly_typed_arrays_stay_so(name, value):
    weak = jax.device_put(jnp.full((8, 8), value), sharding_of(ROWS))
    assert weak.weak_type
    moved = relayout(weak, WEAK_MOVES[name])
    assert (moved.weak_type, moved.dtype) == (True, weak.dtype)
    assert moved.sharding == sharding_of(WEAK_MOVES[name])
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(weak))
    strong = relayout(jnp.asarray(np.asarray(weak)), WEAK_MOVES[name])
    assert not strong.weak_type


def test_weakly_typed_arrays_with_the_same_shards_are_not_copied():
    weak = jax.device_put(jnp.full((8, 8), 1.5), sharding_of(ROWS))
    moved = relayout(weak, WEAK_MOVES["the same shards"])
    places = [
        {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}
        for array in (weak, moved)
    ]
    assert places[0] == places[1]
