"""Arrays that are born sharded."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.create import create
from shoal.arrays.placing.put import put
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.linear import linear
from shoal.errors import DtypeWarning, UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
KINDS = {
    "auto": MESH,
    "explicit": Mesh({"data": 4, "model": 2}, axis_types="explicit"),
    "mixed": Mesh({"data": 4, "model": 2}, axis_types={"data": "explicit"}),
    "reordered": Mesh({"data": 2, "model": 2}, device_ids=[6, 1, 4, 3]),
}


def init(key):
    w, b = jax.random.split(key)
    return {"w": jax.random.normal(w, (16, 8)), "b": [jax.random.uniform(b, (8,)), jnp.zeros(())]}


@pytest.mark.parametrize("mesh", KINDS.values(), ids=KINDS)
def test_the_values_do_not_depend_on_the_layout(mesh):
    key = jax.random.key(5)
    layouts = {"w": Layout(mesh, "model", "data"), "b": [Layout(mesh, "data"), Layout(mesh)]}
    made = create(init, key, layouts=layouts)
    wanted = jax.jit(init)(key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), made, wanted)
    assert jax.tree.map(layout_of, made) == layouts


def test_nothing_is_whole_on_a_device():
    target = sharding_of(Layout(MESH, "data", "model"))
    program = jax.jit(lambda k: jax.random.normal(k, (64, 48)), out_shardings=target)
    text = program.lower(jax.random.key(0)).compile().as_text()
    assert "f32[16,24]" in text
    assert not re.search(r"\[64,48\]|\[3072\]", text.partition("ENTRY")[2])
    made = create(lambda k: jax.random.normal(k, (64, 48)), jax.random.key(0),
                  layouts=Layout(MESH, "data", "model"))  # fmt: skip
    assert {shard.data.shape for shard in made.addressable_shards} == {(16, 24)}


def test_a_prefix_and_a_function_choose_layouts():
    with use_mesh(MESH):
        whole = create(init, jax.random.key(0), layouts=None)
        assert layout_of(whole["w"]) == Layout(MESH, None, None)
    seen = {}

    def choose(path, leaf):
        seen[path] = (leaf.shape, leaf.dtype.name)
        return Layout(MESH, *["data"] * min(1, leaf.ndim), *[None] * (leaf.ndim - 1))

    made = create(init, jax.random.key(0), layouts=choose)
    assert seen == {"w": ((16, 8), "float32"), "b/0": ((8,), "float32"), "b/1": ((), "float32")}
    assert layout_of(made["w"]) == Layout(MESH, "data", None)


def test_arguments_of_all_kinds():
    def scale(key, by, table, weight):
        return jax.random.normal(key, (8,)) * by + table.sum() + weight.sum()

    weight = put(np.ones((8, 2), np.float32), Layout(MESH, "data", "model"))
    args = jax.device_put(jax.random.key(1), jax.devices()[5]), 2, np.ones(3, np.float32), weight
    made = create(scale, *args, layouts=Layout(MESH, "data"))
    wanted = scale(jax.random.key(1), 2, np.ones(3, np.float32), np.ones((8, 2), np.float32))
    np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_the_same_function_is_compiled_once():
    traces = []

    def noisy(key):
        traces.append(key)
        return jax.random.normal(key, (8,))

    for seed in range(3):
        create(noisy, jax.random.key(seed), layouts=Layout(MESH, "data"))
    assert len(traces) <= 2  # once for the shapes, once for the program


def test_layouts_that_do_not_fit_raise_before_anything_runs():
    layouts = {
        "w": Layout(MESH, "data", None, None),
        "b": [Layout(MESH, "data"), Layout(MESH)],
        "c": Layout(MESH),
    }
    ran = []
    with pytest.raises(UsageError, match="create: 2 problems") as caught:
        create(lambda key: (jax.debug.callback(lambda: ran.append(1)), init(key))[1],
               jax.random.key(0), layouts=layouts)  # fmt: skip
    assert "['c']: a layout, but no leaf" in str(caught.value)
    assert "['w']: shape (16, 8) has rank 2, but Layout(data, -, - @" in str(caught.value)
    with pytest.raises(UsageError, match=r"\['b'\]\[0\]: dim 0 of \(8,\) has size 8, which 3"):
        create(init, jax.random.key(0), layouts={
            "w": Layout(MESH, None, None),
            "b": [Layout(Mesh({"x": 3}), "x"), Layout(MESH)]})  # fmt: skip
    assert ran == []


def test_one_program_runs_on_one_row_of_devices():
    other = Mesh({"x": 8}, device_ids=range(7, -1, -1))
    with pytest.raises(UsageError, match=r"\['b'\]\[0\] is on Mesh\(x=8.*\['w'\] on Mesh\(data=4"):
        create(init, jax.random.key(0), layouts=lambda path, leaf: Layout.replicated(
            MESH if path == "w" else other, leaf.ndim))  # fmt: skip
    same = Mesh({"x": 8})
    made = create(init, jax.random.key(0), layouts=lambda path, leaf: Layout.replicated(
        MESH if path == "w" else same, leaf.ndim))  # fmt: skip
    assert layout_of(made["b"][0]).mesh == same


def test_arguments_are_narrowed_as_by_put():
    with pytest.warns(DtypeWarning, match=r"create: args\[0\]\['a'\]: float64 becomes float32"):
        made = create(lambda x: x["a"], {"a": np.ones(8)}, layouts=Layout(MESH, "data"))
    assert made.dtype == np.float32
    with pytest.raises(UsageError, match=r"args\[0\]\['a'\]: holds -1e\+39, which does not fit"):
        create(lambda x: x["a"], {"a": np.full(8, -1e39)}, layouts=Layout(MESH, "data"))
    with pytest.raises(UsageError, match=r"args\[1\]: is a str"):
        create(lambda key, name: key, jax.random.key(0), "relu", layouts=Layout(MESH))
    with pytest.raises(UsageTypeError, match="must be a function, not 3"):
        create(3, layouts=Layout(MESH))


def test_nothing_to_create():
    assert create(lambda: {"a": []}, layouts={"a": []}) == {"a": []}


def test_arguments_are_as_strongly_typed_as_they_run():
    def scale(by):
        return jnp.ones(8, jnp.bfloat16).astype(jnp.float32) * by, by

    made, by = create(scale, jnp.asarray(2.0), layouts=lambda path, leaf: Layout.replicated(
        MESH, leaf.ndim))  # fmt: skip
    assert (made.dtype, by.weak_type) == (np.float32, False)


def test_arguments_that_lie_in_another_order_are_named():
    backwards = put(
        np.ones(8, np.float32), Layout(Mesh({"x": 8}, device_ids=range(7, -1, -1)), "x")
    )
    with pytest.raises(UsageError, match=r"args\[1\]\['w'\]: is on other devices .*relayout it"):
        create(lambda key, t: t["w"], jax.random.key(0), {"w": backwards},
               layouts=Layout(MESH, "data"))  # fmt: skip
    few = put(np.ones(8, np.float32), Layout(Mesh({"x": 2}, device_ids=[3, 5]), "x"))
    made = create(lambda x: x * 2, few, layouts=Layout(MESH, "data"))
    np.testing.assert_array_equal(made, 2)


def test_deleted_arguments_are_named():
    gone = put(np.ones(8, np.float32), Layout(MESH, "data"))
    gone.delete()
    with pytest.raises(UsageError, match=r"args\[0\]: was deleted"):
        create(lambda x: x, gone, layouts=Layout(MESH, "data"))


@pytest.mark.parametrize("ids", [range(7, -1, -1), [6, 1]])
def test_the_mesh_of_jax_set_mesh_does_not_matter(ids):
    own, key = Mesh({"x": len(ids)}, device_ids=ids), jax.random.key(0)
    with jax.set_mesh(sharding_of(Layout(MESH)).mesh):
        made = create(lambda k: jax.random.bits(k, (8,)), key, layouts=Layout(own, "x"))
    assert layout_of(made) == Layout(own, "x")
    np.testing.assert_array_equal(made, jax.random.bits(key, (8,)))


@pytest.mark.parametrize("dtype", [">f4", ">i4", ">i2", ">c8"])
def test_arguments_of_the_other_byte_order(dtype):
    value = np.arange(8, dtype=dtype)
    made = create(lambda tree: tree["a"] + 1, {"a": value}, layouts=Layout(MESH, "data"))
    np.testing.assert_array_equal(made, value + 1)
    assert made.dtype == value.dtype.newbyteorder("=")


@pytest.mark.parametrize("dims", [(None, "model"), ("data", "model"), (None, ("data", "model"))])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_arrays_of_size_0_have_the_shards_of_their_layout(dims, shape):
    """A program of JAX 0.10 returns whole shards of them, at which `np.asarray` fails."""
    layout = Layout(MESH, *dims)
    given = put(np.zeros(shape, np.float32), Layout(MESH, None, None))
    made = {
        "create": create(lambda: jnp.zeros(shape), layouts=layout),
        "constrain": constrain(given, layout),
        "linear": linear(given, jnp.ones((8, shape[1])), layout=Layout(MESH, None, "model")),
    }
    for name, array in made.items():
        whole = np.asarray(array)
        assert whole.shape == array.shape, name
        shards = {shard.data.shape for shard in array.addressable_shards}
        assert shards == {array.sharding.shard_shape(array.shape)}, name
        assert layout_of(relayout(array, Layout(MESH, None, None))).dims == (None, None)
