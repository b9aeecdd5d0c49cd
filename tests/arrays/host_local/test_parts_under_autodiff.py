"""What grad, vmap and jit do with parts of arrays, in one process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrays.device_grids import placements
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.host_local.host_local import from_host_local, to_host_local
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.put import put
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
ROWS, BOTH = Layout(MESH, "data", None), Layout(MESH, "data", "model")
SPLIT = Layout(MESH, "data")
VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)


def same_bits(one, other):
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@settings(max_examples=25)
@given(placements(), st.data())
def test_slopes_over_any_layout_are_those_of_the_identity(placement, data):
    layout, shape = placement
    other = Layout(Mesh(layout.mesh.axes, device_ids=layout.mesh.device_ids), *layout.dims)
    layout = data.draw(st.sampled_from([layout, other]))
    value = np.random.default_rng(1).normal(size=shape).astype(np.float32)

    def through(x):
        return to_host_local(from_host_local(x, layout), layout)

    part, back = jax.vjp(through, jnp.asarray(value))
    same_bits(part, value)
    (slope,) = back(put(value + 1, layout_of(part)))
    assert slope.shape == shape
    same_bits(slope, value + 1)
    _, pushed = jax.jvp(through, (value,), (value + 2,))
    same_bits(pushed, value + 2)


# JAX's own conversions get each of the next four wrong (multihost_utils, jax 0.10).


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("kind", ["numpy", "array", "spread"])
def test_gradients_have_the_shapes_and_types_of_their_primals(axis_types, kind):
    layout = Layout(Mesh({"data": 4, "model": 2}, axis_types=axis_types), "data", "model")
    value = {"numpy": VALUE, "array": jnp.asarray(VALUE), "spread": put(VALUE, layout)}[kind]
    whole, back = jax.vjp(lambda x: from_host_local(x, layout), value)
    assert layout_of(whole) == layout
    (slope,) = back(whole)
    same_bits(slope, VALUE)
    wanted = jax.typeof(value if kind == "spread" else jnp.asarray(VALUE)).sharding.spec
    assert jax.typeof(slope).sharding.spec == wanted
    part, back = jax.vjp(lambda x: to_host_local(x, layout), put(VALUE, layout))
    (slope,) = back(part)
    assert layout_of(slope) == layout
    same_bits(slope, VALUE)


def test_gradients_against_one_device_and_finite_differences():
    def loss(x):
        whole = from_host_local(x, BOTH)
        part = to_host_local(jax.jit(jnp.sin, out_shardings=sharding_of(BOTH))(whole), BOTH)
        return (part * part * part).sum()

    x = VALUE / 10
    slope = jax.grad(loss)(x)
    np.testing.assert_allclose(slope, jax.grad(lambda x: (jnp.sin(x) ** 3).sum())(x), rtol=1e-5)
    step = np.zeros_like(x)
    step[2, 3] = 1e-2
    difference = (loss(x + step) - loss(x - step)) / 2e-2
    np.testing.assert_allclose(slope[2, 3], difference, rtol=1e-2)
    small = x[:4, :2]
    curve = jax.jvp(jax.grad(loss_of), (small,), (small,))[1]
    wanted = jax.jvp(jax.grad(lambda x: (jnp.sin(x) ** 3).sum()), (small,), (small,))[1]
    np.testing.assert_allclose(curve, wanted, atol=1e-5)
    linear = jax.linear_transpose(lambda x: from_host_local(x, BOTH), x)
    same_bits(linear(put(x, BOTH))[0], x)
    pushed = jax.linearize(loss, x)[1](step)
    np.testing.assert_allclose(pushed, slope[2, 3] * 1e-2, rtol=1e-4)


def loss_of(x):
    part = to_host_local(from_host_local(x, BOTH), BOTH)
    return (jnp.sin(part) ** 3).sum()


def test_unused_and_integer_leaves_have_no_gradient():
    def loss(tree):
        whole = from_host_local({**tree, "n": 3, "k": jax.random.key(0)}, layouts)
        part = to_host_local(whole, layouts)
        return (part["w"] ** 2).sum(), (part["n"], part["i"])

    layouts = {"w": BOTH, "unused": ROWS, "i": SPLIT, "n": Layout(MESH), "k": Layout(MESH)}
    tree = {"w": VALUE, "unused": VALUE, "i": np.arange(4, dtype=np.int32)}
    slope, (number, ints) = jax.grad(loss, has_aux=True, allow_int=True)(tree)
    same_bits(slope["w"], 2 * VALUE)
    same_bits(slope["unused"], 0 * VALUE)
    assert slope["i"].dtype == jax.dtypes.float0
    assert int(number) == 3
    same_bits(ints, tree["i"])


def test_under_grad_what_is_global_or_local_already_passes():
    whole, local = put(VALUE, ROWS), jnp.asarray(VALUE)
    slope = jax.grad(lambda x: (from_host_local(x, ROWS) ** 2).sum())(whole)
    same_bits(slope, 2 * VALUE)
    same_bits(jax.grad(lambda x: (to_host_local(x, ROWS) ** 2).sum())(local), 2 * VALUE)


BATCH = np.stack([VALUE, VALUE + 1])


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_vmap_shifts_the_layout_both_ways(axis_types):
    mesh = Mesh({"data": 4, "model": 2}, axis_types=axis_types)
    rows = Layout(mesh, "data", None)
    whole = jax.vmap(lambda x: from_host_local(x, rows))(BATCH)
    assert layout_of(whole) == Layout(mesh, None, "data", None)
    part = jax.vmap(lambda x: to_host_local(x, rows))(whole)
    assert part.shape == BATCH.shape
    same_bits(part, BATCH)
    last = jax.vmap(lambda x: from_host_local(x, rows), in_axes=-1, out_axes=-1)
    inner = last(np.moveaxis(BATCH, 0, -1))
    assert layout_of(inner) == Layout(mesh, "data", None, None)
    for where in ("model", ("model",)):
        split = jax.vmap(lambda x: from_host_local(x, rows), spmd_axis_name=where)(BATCH)
        assert layout_of(split) == Layout(mesh, "model", "data", None)
        same_bits(split, BATCH)
        part = jax.vmap(lambda x: to_host_local(x, rows), spmd_axis_name=where)(split)
        assert layout_of(part) == Layout(mesh, "model", "data", None)
    twice = jax.vmap(jax.vmap(lambda x: from_host_local(x, Layout(mesh, "data"))))(
        np.ones((2, 3, 8), np.float32)
    )
    assert layout_of(twice) == Layout(mesh, None, None, "data")
    mixed = jax.vmap(lambda x, y: from_host_local([x, y], [rows, rows]), in_axes=(0, None),
                     out_axes=(0))(BATCH, VALUE)  # fmt: skip
    assert mixed[0].shape == mixed[1].shape == BATCH.shape


def test_vmap_names_what_cannot_be_split():
    for name, words in (("data", "axis 'data' is used 2 times"), ("x", "no axis 'x'")):
        with pytest.raises(UsageError, match=f"the array: spmd_axis_name=.* of vmap: .*{words}"):
            jax.vmap(lambda x: from_host_local(x, ROWS), spmd_axis_name=name)(BATCH)
    with pytest.raises(UsageError, match="of vmap: 2 shards do not divide a batch of 3"):
        jax.vmap(lambda x: from_host_local(x, ROWS), spmd_axis_name="model")(BATCH[[0, 1, 0]])
    with pytest.raises(UsageError, match=r"is in Layout\(data, -, - @ .*relayout moves it"):
        jax.vmap(lambda x: to_host_local(x, ROWS))(put(np.ones((4, 8, 4), "f4"),
                                                     Layout(MESH, "data", None, None)))  # fmt: skip


def test_gradients_of_batches_and_batches_of_gradients():
    def one(x):
        return (to_host_local(from_host_local(x, ROWS), ROWS) ** 2).sum()

    for x in (BATCH, jnp.asarray(BATCH)):
        np.testing.assert_allclose(jax.vmap(jax.grad(one))(x), 2 * BATCH)
        np.testing.assert_allclose(jax.grad(lambda x: jax.vmap(one)(x).sum())(x), 2 * BATCH)
    rows = jax.jacrev(lambda x: to_host_local(from_host_local(x, SPLIT), SPLIT))(np.ones(4, "f4"))
    columns = jax.jacfwd(lambda x: from_host_local(x, SPLIT))(np.ones(4, "f4"))
    np.testing.assert_array_equal(rows, np.eye(4))
    np.testing.assert_array_equal(columns, np.eye(4))


INSIDE = r"inside jit \(or scan, cond, checkpoint, eval_shape\) every array is global"


@pytest.mark.parametrize(("convert", "advice"), [
    (from_host_local, "call it outside and pass the result in; constrain pins a layout inside"),
    (to_host_local, "return the array, and call it on the result"),
])  # fmt: skip
def test_inside_jit_and_its_like_it_says_in_a_sentence_what_to_write(convert, advice):
    def call(x):
        return convert(x, ROWS)

    _, back = jax.vjp(call, put(VALUE, ROWS))
    traced = [
        lambda: jax.jit(call)(VALUE),
        lambda: jax.jit(lambda: call(VALUE))(),
        lambda: jax.jit(jax.vmap(call))(BATCH),
        lambda: jax.vmap(jax.jit(call))(BATCH),
        lambda: jax.jit(jax.grad(lambda x: call(x).sum()))(VALUE),
        lambda: jax.grad(lambda x: jax.checkpoint(call)(x).sum())(VALUE),
        lambda: jax.lax.scan(lambda carry, x: (carry, call(x)), 0, BATCH),
        lambda: jax.lax.cond(jnp.bool_(True), call, call, VALUE),
        lambda: jax.eval_shape(call, VALUE),
        lambda: jax.make_jaxpr(call)(VALUE),
    ]
    for inside in traced:
        with pytest.raises(UsageError, match=f"^{convert.__name__}: {INSIDE}.*{advice}"):
            inside()
    if convert is from_host_local:  # of a whole array, no part is found in jit either
        with pytest.raises(UsageError, match=f"^to_host_local: {INSIDE}"):
            jax.jit(back)(put(VALUE, ROWS))


def test_cotangents_may_lie_anywhere():
    _, back = jax.vjp(lambda x: from_host_local(x, ROWS), VALUE)
    spread = relayout(put(VALUE, ROWS), Layout(MESH, None, "model"))
    for cotangent in (spread, jnp.asarray(VALUE), VALUE, jax.device_put(VALUE, jax.devices()[5])):
        (slope,) = back(cotangent)
        same_bits(slope, VALUE)
    _, back = jax.vjp(lambda x: to_host_local(x, ROWS), put(VALUE, ROWS))
    for cotangent in (spread, jnp.asarray(VALUE), VALUE):
        (slope,) = back(cotangent)
        assert layout_of(slope) == ROWS
        same_bits(slope, VALUE)


def test_slopes_by_python_numbers_and_on_explicit_meshes_of_other_axes():
    scalar = Layout(MESH)
    slope = jax.grad(lambda x: to_host_local(from_host_local(x, scalar), scalar) ** 2)(3.0)
    assert float(slope) == 6
    other = Layout(Mesh({"a": 4, "b": 2}, axis_types="explicit"), "a", None)
    slope = jax.vjp(lambda x: to_host_local(x, ROWS), put(VALUE, other))[1](VALUE)[0]
    assert layout_of(slope) == other
    few = Layout(Mesh({"q": 4}, device_ids=[5, 4, 3, 2], axis_types="explicit"), None, "q")
    slope = jax.vjp(lambda x: from_host_local(x, ROWS), put(VALUE, few))[1](put(VALUE, ROWS))[0]
    assert layout_of(slope) == few
    same_bits(slope, VALUE)
