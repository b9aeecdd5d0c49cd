"""Barriers, read in the programs that JAX hands to the compiler."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.placing.put import put
from shoal.arrays.traced.fence import fence
from shoal.arrays.traced.manual import manual
from shoal.errors import DtypeWarning, UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

BARRIER = re.compile(r"optimization_barrier .*: (.*)")


def barriers(function, *args):
    """Return the types that each barrier of a program holds."""
    text = jax.jit(function).lower(*args).as_text()
    return [operands.split(", ") for operands in BARRIER.findall(text)]


def layer(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def params(*shape):
    w = np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)
    return {"w": w, "b": w[0]}


def test_tree_is_fenced_by_one_barrier():
    x = np.ones((2, 3), np.float32)
    fenced = barriers(lambda x: fence({"a": x * 2, "b": x[0], "n": None}), x)
    assert fenced == [["tensor<2x3xf32>", "tensor<3xf32>"]]
    out = jax.jit(lambda x: fence({"a": x * 2, "n": None}))(x)
    np.testing.assert_array_equal(out["a"], 2 * x)
    assert out["n"] is None


def test_leaves_of_every_kind_stay_what_they_are():
    tree = {"f": 1.5, "i": np.int8(3), "k": jax.random.key(4), "t": (), "b": True}
    out = jax.jit(fence)(tree)
    assert (float(out["f"]), int(out["i"]), bool(out["b"])) == (1.5, 3, True)
    assert out["f"].weak_type
    assert out["i"].dtype == np.int8
    assert jax.random.key_data(out["k"]).tolist() == [0, 4]
    assert len(barriers(fence, tree)) == 1
    assert fence(tree) is not tree
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (fence(tree), tree)), strict=True))
    assert jax.jit(lambda: fence({"a": None}))() == {"a": None}
    constant = barriers(lambda: fence(np.ones(2, np.float32)))
    assert constant == [["tensor<2xf32>"]]


def test_cotangents_of_integers_pass():
    def loss(x, i, key):
        x, i, _ = fence((x, i, key))
        return (x * i.astype(x.dtype)).sum()

    def both(x, i, key):
        return fence(jax.grad(loss, (0, 1), allow_int=True)(x, i, key))

    args = np.ones(3, np.float32), np.arange(3), jax.random.key(0)
    for run in (jax.jit(both), both):
        slope, none = run(*args)
        np.testing.assert_array_equal(slope, [0, 1, 2])
        assert none.dtype == jax.dtypes.float0
    assert barriers(jax.grad(loss), *args)[-1] == ["tensor<3xf32>"]  # nothing but the slope


def test_fence_adds_no_derivative_for_inputs_without_one():
    def loss(w, x):
        w, x = fence((w, x))
        return jnp.tanh(x @ w).sum()

    w, x = np.ones((4, 3), np.float32), np.ones((2, 4), np.float32)
    text = jax.jit(jax.grad(loss)).lower(w, x).as_text()
    assert text.count("dot_general") == 2  # forward, and the slope of w
    assert barriers(jax.grad(loss), w, x) == [
        ["tensor<4x3xf32>", "tensor<2x4xf32>"],
        ["tensor<4x3xf32>"],
    ]


@pytest.mark.parametrize("backward", [False, True])
def test_derivatives_batches_and_loops_are_unchanged(backward):
    def cube(x):
        return (fence(x, backward=backward) ** 3).sum()

    x = jnp.arange(3.0)
    check_grads(cube, (x,), order=3, rtol=0.05)
    np.testing.assert_array_equal(jax.jit(jax.hessian(cube))(x), np.diag(6 * np.arange(3.0)))
    np.testing.assert_array_equal(jax.vmap(jax.grad(cube))(x[:, None]), 3 * x[:, None] ** 2)
    pair = jax.vmap(lambda a, b: fence((a, b), backward=backward), (0, None))(x, 2.0)
    assert pair[0].tolist() == [0, 1, 2]
    assert set(np.ravel(pair[1])) == {2}
    last, _ = jax.lax.scan(lambda c, _: (fence(c * 2, backward=backward), None), x, length=3)
    assert last.tolist() == [0, 8, 16]
    again = jax.grad(jax.checkpoint(cube))(x)
    np.testing.assert_array_equal(again, 3 * x**2)


def test_backward_holds_all_cotangents_together_and_no_value():
    first, second = params(4, 3), params(3, 2)
    x = np.ones((5, 4), np.float32)

    def loss(first, second, x, fenced=True):
        run = fence(layer, backward=True) if fenced else layer
        return (run(second, run(first, x)) ** 2).sum()

    assert barriers(loss, first, second, x) == []
    fenced = barriers(jax.grad(loss, (0, 1)), first, second, x)
    assert [sorted(held) for held in fenced] == [
        ["tensor<2xf32>", "tensor<3x2xf32>", "tensor<5x3xf32>"],  # second: with its input's
        ["tensor<3xf32>", "tensor<4x3xf32>"],  # first: x needs none
    ]
    for argnums in ((0, 1), (0, 1, 2)):
        slopes = jax.jit(jax.grad(loss, argnums))(first, second, x)
        plain = jax.jit(jax.grad(lambda *a: loss(*a, fenced=False), argnums))(first, second, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), slopes, plain)


def test_the_layers_before_wait_for_the_gradients_of_the_parameters():
    """The input's cotangent that flows on is the barrier's, not the one that was computed."""
    run = fence(lambda w, x: x * w, backward=True)
    slopes = jax.grad(lambda w, x: run(w, jnp.sin(x)).sum(), (0, 1))
    _, _, after = str(jax.make_jaxpr(slopes)(2.0, 3.0)).partition(" = optimization_barrier ")
    before = str(jax.make_jaxpr(slopes)(2.0, 3.0)).removesuffix(after)
    _, flows = re.findall(r"(\w+):\S+ (\w+):\S+ = optimization_barrier", before)[0]
    _, computed = after.split("\n")[0].split()
    assert re.search(rf"mul {flows} ", after)
    assert not re.search(rf"\b{computed}\b", after.partition("\n")[2])


def test_functions_take_anything():
    def run(w, x, kind, *, scale=1.0, key=None):
        assert kind == "tanh"
        return (x * w * scale).sum()

    fenced = fence(run, backward=True)
    assert fenced.__name__ == "run"
    slope = jax.jit(jax.grad(lambda w: fenced(w, 2.0, "tanh", scale=3, key=jax.random.key(0))))(1.0)
    assert float(slope) == 6
    assert float(fenced(1.0, np.float32(2), "tanh")) == 2


def test_on_shards_and_inside_shard_map():
    mesh = Mesh({"data": 8}, axis_types="explicit")
    x = put(np.arange(16, dtype=np.float32), Layout(mesh, "data"))
    with jax.set_mesh(jax_mesh(mesh)):
        slope = jax.jit(jax.grad(lambda x: (fence(x) ** 2).sum()))(x)
    np.testing.assert_array_equal(slope, 2 * np.arange(16))
    mapped = jax.shard_map(
        lambda x: fence(x * 2, backward=True), mesh=jax_mesh(mesh), in_specs=P("data"),
        out_specs=P("data"),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * np.arange(16))


def test_fence_refuses_invalid_arguments():
    with pytest.raises(UsageError, match=r"only the derivative can be fenced: backward=True"):
        fence(layer)
    with pytest.raises(UsageError, match=r"\['a'\]: is a str"):
        fence({"a": "text", "b": 1})
    with pytest.raises(UsageError, match="holds 1e\\+39, which does not fit float32"):
        jax.jit(lambda: fence(np.full(2, 1e39)))()
    with pytest.warns(DtypeWarning, match="fence: .*float64 becomes float32"):
        jax.jit(lambda: fence(np.ones(2)))()


def test_integers_that_differ_between_devices_have_no_slope():
    rows = Layout(Mesh({"x": 8}), "x")

    def body(x):
        y, _ = fence((x * 2, jax.lax.axis_index("x")))
        return y

    slope = jax.jit(jax.grad(lambda x: manual(body, rows, rows)(x).sum()))(np.ones(8, np.float32))
    np.testing.assert_array_equal(slope, np.full(8, 2))
