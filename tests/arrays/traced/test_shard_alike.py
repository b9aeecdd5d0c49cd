"""Two values in one layout, read in the programs that come out."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.placing.put import put
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.manual import manual
from shoal.arrays.traced.shard_alike import shard_alike
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

AXES = {"data": 4, "model": 2}
AUTO, EXPLICIT = Mesh(AXES), Mesh(AXES, axis_types="explicit")
ROWS, FREE = Layout(AUTO, "data", None), Layout(AUTO, None, None)


def values(layout=FREE, shape=(8, 8)):
    return put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), layout)


def groups(function, *args):
    """Return the numbers of the groups in a program."""
    text = jax.jit(function).lower(*args).as_text()
    return [int(number) for number in re.findall(r"sdy.sharding_group .* group_id=(\d+)", text)]


@pytest.mark.parametrize("swapped", [False, True])
def test_earlier_layout_of_one_array_is_shared_with_the_other(swapped):
    def both(a, b):
        pair = (jnp.sin(a), jnp.cos(b))
        one, other = shard_alike(*(pair[::-1] if swapped else pair))
        return (other, one) if swapped else (one, other)

    def neither(a, b):
        return jnp.sin(a), jnp.cos(b)

    a, b = jax.jit(both)(values(ROWS), values())
    assert layout_of(a) == layout_of(b) == ROWS
    np.testing.assert_array_equal(b, jnp.cos(values()))
    _, free = jax.jit(neither)(values(ROWS), values())
    assert layout_of(free) == FREE
    program = jax.jit(both).lower(values(ROWS), values()).compile().as_text()
    assert re.search(r"f32\[2,8\]\S* cosine", program)  # computed where it lies, not moved


def test_later_layout_of_one_array_is_shared_with_the_other():
    def both(a, b):
        a, b = shard_alike(jnp.sin(a), jnp.cos(b))
        return a, constrain(b * 2, ROWS)

    a, b = jax.jit(both)(np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))
    assert layout_of(a) == layout_of(b) == ROWS


def test_trees_with_none_integers_keys_and_host_values():
    keys = put(jax.random.split(jax.random.key(0), 8), Layout(AUTO, "data"))
    more = put(jax.random.split(jax.random.key(1), 8), Layout(AUTO, None))
    tree = {"w": values(ROWS), "n": None, "k": keys, "i": values(ROWS)}
    like = {"w": np.ones((8, 8), np.float32), "n": None, "k": more,
            "i": jnp.ones((8, 8), jnp.int8)}  # fmt: skip
    a, b = jax.jit(shard_alike)(tree, like)
    assert jax.tree.structure(a) == jax.tree.structure(b) == jax.tree.structure(tree)
    assert layout_of(b["w"]) == layout_of(b["i"]) == ROWS
    assert layout_of(b["k"]) == Layout(AUTO, "data")
    np.testing.assert_array_equal(b["i"], like["i"])
    assert b["i"].dtype == np.int8
    assert shard_alike({}, {}) == ({}, {})
    assert jax.jit(shard_alike)(1.0, 2.0) == (1.0, 2.0)


def test_each_tie_is_a_group_of_its_own_and_the_same_in_every_process():
    def two(a, b, c, d):
        return shard_alike(a, b), shard_alike(c, d)

    args = values(ROWS), values(), values(Layout(AUTO, None, "model")), values()
    assert groups(two, *args) == [0, 0, 1, 1] == groups(two, *args)
    (_, b), (_, d) = jax.jit(two)(*args)
    assert (layout_of(b), layout_of(d)) == (ROWS, Layout(AUTO, None, "model"))


@pytest.mark.parametrize("gradient", [False, True])
def test_cotangents_are_tied_only_if_asked(gradient):
    def pair(a, b):
        return shard_alike(jnp.sin(a), b, gradient=gradient)

    def back(a, b, one, other):
        return jax.vjp(pair, a, b)[1]((one, other))

    a, b = values(), values() + 1
    slopes = jax.jit(back)(a, b, values(ROWS), b)
    np.testing.assert_allclose(slopes[0], np.cos(a) * np.asarray(values()), rtol=1e-5)
    np.testing.assert_array_equal(slopes[1], b)
    assert (layout_of(slopes[1]) == ROWS) is gradient
    one = jax.jit(jax.grad(lambda a: shard_alike(jnp.sin(a), b, gradient=gradient)[0].sum()))(a)
    np.testing.assert_allclose(one, np.cos(a), rtol=1e-5)
    # the derivative of an integer is no number
    mixed = jax.grad(lambda a: shard_alike(a, jnp.arange(8), gradient=gradient)[0].sum())(
        jnp.ones(8)
    )
    np.testing.assert_array_equal(mixed, np.ones(8))


@pytest.mark.parametrize("gradient", [False, True])
def test_second_derivatives_forward_mode_and_loops(gradient):
    def cube(x):
        return (shard_alike(x**3, x, gradient=gradient)[0]).sum()

    x = values()
    expected = 6 * np.asarray(x)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: jax.grad(cube)(x).sum()))(x), expected)
    _, slope = jax.jit(lambda x: jax.jvp(jax.grad(cube), (x,), (jnp.ones_like(x),)))(x)
    np.testing.assert_allclose(slope, expected)
    last, _ = jax.jit(
        lambda x: jax.lax.scan(
            lambda c, _: (shard_alike(c * 2, x, gradient=gradient)[0], None), x, length=3
        )
    )(x)
    np.testing.assert_array_equal(last, 8 * np.asarray(x))


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (None, 1)])
def test_batches_are_tied_in_the_dims_that_both_have(axes):
    shapes = [(8, 8) if axis is None else np.insert((8, 8), axis, 3) for axis in axes]
    a, b = (values(FREE if a is None else Layout.replicated(AUTO, 3), tuple(shape))
            for a, shape in zip(axes, shapes, strict=True))  # fmt: skip

    def pinned(a, b):
        return shard_alike(constrain(a * 1, ROWS), jnp.cos(b))

    one, other = jax.jit(jax.vmap(pinned, in_axes=axes))(a, b)
    wanted = jax.vmap(lambda a, b: (a, jnp.cos(b)), in_axes=axes)(a, b)
    np.testing.assert_array_equal(one, wanted[0])
    np.testing.assert_allclose(other, wanted[1], rtol=1e-6)
    assert layout_of(other).dims[-2:] == ("data", None)
    slope = jax.jit(jax.grad(lambda a: (jax.vmap(pinned, in_axes=axes)(a, b)[0] ** 2).sum()))(a)
    np.testing.assert_allclose(slope, 2 * np.asarray(a) * (3 if axes[0] is None else 1))


def test_inside_shard_map_and_on_one_device():
    mapped = jax.shard_map(
        lambda a, b: shard_alike(a * 2, b),
        mesh=jax_mesh(AUTO),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    a, b = jax.jit(mapped)(values(), values())
    np.testing.assert_array_equal(a, 2 * np.asarray(b))
    assert [x.tolist() for x in jax.jit(shard_alike)(jnp.ones(2), jnp.zeros(2))] == [[1, 1], [0, 0]]


def test_on_explicit_axes_the_types_must_agree():
    with jax.set_mesh(jax_mesh(EXPLICIT)):
        x, y = values(Layout(EXPLICIT, "data", None)), values(Layout(EXPLICIT, None, "model"))
        assert jax.typeof(jax.jit(shard_alike)(x, x + 1)[1]).sharding.spec == P("data", None)
        with pytest.raises(UsageError, match=r"types say P\('data', None\) and P\(None, 'model'\)"):
            jax.jit(shard_alike)(x, y)


def test_outside_jit_layouts_agree_or_an_error_says_what_to_write():
    x = values(ROWS)
    a, b = shard_alike(x, values(ROWS))
    assert a is x
    assert layout_of(b) == ROWS
    assert shard_alike(x, jnp.ones((8, 8)))[0] is x  # lies nowhere in particular
    with pytest.raises(UsageError, match=r"outside jit .*Layout\(data, - .*relayout\(b, layout_of"):
        shard_alike({"w": x}, {"w": values()})


def test_differences_between_the_trees_are_named_by_path():
    x = jnp.ones(8)
    with pytest.raises(UsageError, match=r"\['b'\]: in the first tree only"):
        jax.jit(shard_alike)({"a": x, "b": x}, {"a": x, "b": None})
    with pytest.raises(UsageError, match="the containers differ"):
        jax.jit(shard_alike)([x], [x, None])
    with pytest.raises(UsageError, match=r"\['a'\]: shapes \(8,\) and \(2,\) differ"):
        jax.jit(shard_alike)({"a": x}, {"a": jnp.ones(2)})
    with pytest.raises(UsageError, match="pass keys with keys"):
        jax.jit(shard_alike)(jax.random.key(0), 1.0)
    with pytest.raises(UsageError, match="is a str"):
        shard_alike("a", x)
    with pytest.raises(UsageError, match="holds 1e\\+39, which does not fit float32"):
        shard_alike(np.full(8, 1e39), x)


def test_without_shardy_nothing_would_be_tied():
    if not getattr(jax.config, "jax_use_shardy_partitioner", None):
        pytest.skip("this JAX has no other partitioner")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(UsageError, match="shard_alike needs the Shardy partitioner"):
            shard_alike(1.0, 2.0)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_faults_name_the_tree():
    with pytest.raises(UsageError) as caught:
        shard_alike({"w": np.full(3, 1e39)}, {"w": "a"})
    assert "['w']: in the first tree: holds 1e+39, which does not fit float32; cast" in str(
        caught.value
    )
    assert "['w']: in the second tree: is a str" in str(caught.value)


def test_in_a_region_over_all_axes_there_is_nothing_to_tie():
    rows = Layout(Mesh({"x": 8}), "x")
    run = manual(lambda x: shard_alike(x, 2 * x)[1], rows, rows)
    twice = jax.jit(lambda x: (run(x), run(x + 1), jax.grad(lambda x: run(x).sum())(x)))
    value = np.arange(8, dtype=np.float32)
    for found, wanted in zip(twice(value), (2 * value, 2 * value + 2, 0 * value + 2), strict=True):
        np.testing.assert_array_equal(found, wanted)
