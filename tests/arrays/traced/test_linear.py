"""Linear maps: values, derivatives, and programs in which no leading dims are merged."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.placing.put import put
from shoal.arrays.traced.linear import linear
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

AXES = {"data": 2, "seq": 2, "model": 2}
AUTO, EXPLICIT = Mesh(AXES), Mesh(AXES, axis_types="explicit")
MIXED = Mesh(AXES, axis_types={"model": "explicit"})
MESHES = {"auto": AUTO, "explicit": EXPLICIT, "mixed": MIXED}


def host(*shape):
    return np.sin(np.arange(np.prod(shape), dtype=np.float32) + 1).reshape(shape)


def reference(x, w, b=None):
    y = np.einsum("...n,mn->...m", x, w)
    return y if b is None else y + b


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_derivatives_are_those_of_the_formula(rank, with_bias):
    x, w = host(*range(2, 1 + rank), 4), host(3, 4)
    args = (x, w, host(3)) if with_bias else (x, w)
    np.testing.assert_allclose(linear(*args), reference(*args), rtol=1e-5, atol=1e-6)
    ct = host(*x.shape[:-1], 3)
    slopes = jax.jit(lambda *a: jax.vjp(linear, *a)[1](ct))(*map(jnp.asarray, args))
    flat, rows = ct.reshape(-1, 3), x.reshape(-1, 4)
    wanted = [(flat @ w).reshape(x.shape), flat.T @ rows, flat.sum(0)]
    for slope, value in zip(slopes, wanted, strict=False):
        np.testing.assert_allclose(slope, value, rtol=1e-4, atol=1e-5)
    assert len(slopes) == len(args)
    many = jax.vmap(linear, (0, None))(np.stack([x, 2 * x]), w)
    np.testing.assert_allclose(many[1], 2 * reference(x, w), rtol=1e-5, atol=1e-5)
    each = jax.vmap(linear, (None, 0))(x, np.stack([w, 2 * w]))
    np.testing.assert_allclose(each[1], 2 * reference(x, w), rtol=1e-5, atol=1e-5)


def merging(x, w, b):
    """As layers of torch do it."""
    return (x.reshape(-1, x.shape[-1]) @ w.T + b[None]).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("weights", [("model", None), (None, "model"), (None, None)])
def test_no_program_merges_or_gathers_what_leads(weights):
    spread = Layout(AUTO, "data", "seq", weights[1])
    x = put(host(4, 6, 8), spread)
    w, b = put(host(2, 8), Layout(AUTO, *weights)), put(host(2), Layout(AUTO, weights[0]))

    def step(apply):
        def loss(x, w, b):
            return (apply(jnp.sin(x), w, b) ** 2).sum()

        pinned = jax.tree.map(lambda v: v.sharding, (x, w, b))
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)), out_shardings=(None, pinned))

    ours, torch = step(linear).lower(x, w, b), step(merging).lower(x, w, b)
    assert "reshape" in torch.as_text()
    assert "reshape" not in ours.as_text()
    moves = re.compile(r" (all-gather|all-to-all|collective-permute)\(")
    assert moves.search(torch.compile().as_text())
    assert not moves.search(ours.compile().as_text())
    value, slopes = step(linear)(x, w, b)
    wanted, expected = jax.value_and_grad(
        lambda *a: (merging(jnp.sin(a[0]), *a[1:]) ** 2).sum(), (0, 1, 2)
    )(*map(jnp.asarray, (host(4, 6, 8), host(2, 8), host(2))))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for slope, right in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(slope, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("split", [("model", None), (None, "model")])
def test_linear_result_has_the_requested_layout(kind, split):
    mesh = MESHES[kind]
    wide = Layout(mesh, "data", "seq", split[0])
    with jax.set_mesh(jax_mesh(mesh)):
        x = put(host(4, 6, 8), Layout(mesh, "data", "seq", split[1]))
        w, b = put(host(2, 8), Layout(mesh, *split)), put(host(2), Layout(mesh, split[0]))
        y = jax.jit(lambda *a: linear(*a, layout=wide))(x, w, b)
        slopes = jax.jit(jax.grad(lambda *a: (linear(*a, layout=wide) ** 2).sum(), (0, 1, 2)))(
            x, w, b
        )
    assert layout_of(y) == wide
    wanted = reference(host(4, 6, 8), host(2, 8), host(2))
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slopes[2], 2 * wanted.sum((0, 1)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        slopes[1], 2 * np.einsum("abm,abn->mn", wanted, host(4, 6, 8)), rtol=1e-4, atol=1e-4
    )


def test_sums_of_narrow_values_are_as_wide_as_asked():
    x, w = jnp.full((1, 4096), 1, jnp.bfloat16), jnp.full((1, 4096), 1.0, jnp.bfloat16)
    assert linear(x, w).dtype == jnp.bfloat16
    wide = linear(
        x[:, :4095], w[:, :4095], jnp.ones(1, jnp.bfloat16), preferred_element_type=jnp.float32
    )
    assert wide.dtype == jnp.float32
    assert float(wide[0, 0]) == 4096  # bfloat16 has no 4095
    slopes = jax.grad(lambda *a: linear(*a, preferred_element_type=jnp.float32).sum(), (0, 1))(x, w)
    assert [slope.dtype for slope in slopes] == [jnp.bfloat16, jnp.bfloat16]
    text = (
        jax.jit(lambda x, w: linear(x, w, preferred_element_type=jnp.float32)).lower(x, w).as_text()
    )
    assert re.search(r"dot_general.*bf16>\) -> tensor<1x1xf32>", text)
    whole = linear(np.arange(3, dtype=np.int32), np.arange(6, dtype=np.int32).reshape(2, 3))
    assert whole.tolist() == [5, 14]


X, W = np.ones((2, 3, 4), np.float32), np.ones((5, 4), np.float32)
WRONG = [
    ((X, W.T), r"x \(2, 3, 4\) has 4 in, weight \(4, 5\) 5; weight is \[out, in\]: pass its .T"),
    ((X, np.ones((5, 7), np.float32)), r"has 4 in, weight \(5, 7\) 7$"),
    ((X, W[None]), r"weight: shape \(1, 5, 4\) has rank 3; pass \[out, in\]"),
    ((np.float32(1), W), r"x: a scalar has no last dim"),
    ((X, W, np.ones(4, np.float32)), r"bias \(4,\) must be \[5\], one for each row"),
    ((X, W, X[:1, :, 0]), r"bias: shape \(1, 3\) has rank 2; pass \[out\]"),
    ((X, W.astype(np.float16)), "dtypes differ: x float32, weight float16; cast"),
    ((X > 0, W > 0), "bool values cannot be multiplied"),
    ((np.full((2, 4), 1e39), W), r"x: holds 1e\+39, which does not fit float32"),
    ((X, [W]), "weight: is a list"),
]


@pytest.mark.parametrize(("args", "words"), WRONG, ids=[words for _, words in WRONG])
def test_linear_refuses_operands_that_do_not_fit(args, words):
    with pytest.raises(UsageError, match=words):
        linear(*args)


def test_layout_that_does_not_fit_raises_with_the_reason():
    with pytest.raises(UsageError, match=r"shape \(2, 3, 5\) has rank 3"):
        linear(X, W, layout=Layout(AUTO, "data", None, None, None))
    with pytest.raises(UsageError, match="size 5, which 2 shards"):
        jax.jit(lambda x: linear(x, W, layout=Layout(EXPLICIT, None, None, "model")))(X)
    x, w = (put(host(8, 8), Layout(EXPLICIT, None, "model")) for _ in range(2))
    with pytest.raises(UsageError, match="the result's type must be given: layout="):
        jax.jit(linear)(x, w)


def test_invalid_preferred_element_type_raises():
    with pytest.raises(UsageError, match="preferred_element_type: float64 would become float32"):
        linear(X, W, preferred_element_type=np.float64)
    for wrong in ("float99", object, str, "M8", "f4,f4", "(2,", "\ud800"):
        with pytest.raises(UsageError, match="is not a dtype"):
            linear(X, W, preferred_element_type=wrong)


def test_an_axis_cannot_split_two_dims_of_the_result():
    mesh = MESHES["explicit"]
    with jax.set_mesh(sharding_of(Layout(mesh)).mesh):
        x = put(np.ones((4, 2, 4), np.float32), Layout(mesh, "data", "model", None))
        w = put(np.ones((8, 4), np.float32), Layout(mesh, "model", None))
        with pytest.raises(UsageError, match=r"model would split two dims of the result.*layout="):
            jax.jit(linear)(x, w)
        layout = Layout(mesh, "data", None, "model")
        y = jax.jit(lambda x, w: linear(x, w, layout=layout))(x, w)
    assert layout_of(y) == layout


def test_host_arrays_of_the_other_byte_order():
    x, w, b = (value.astype(">f4") for value in (host(2, 4), host(3, 4), host(3)))
    np.testing.assert_allclose(linear(x, w, b), reference(x, w, b), rtol=1e-5, atol=1e-6)


WRONG_IN_XLA = [  # x, weight, the result: forwards, or in one of the derivatives
    ((None, "seq"), (None, "data"), ("data", ("model", "seq"))),
    ((("model", "seq"), "data"), ("data", None), (None, "data")),
    (("data", ("model", "seq")), (("model", "seq"), "data"), ("data", None)),
    (("data", None), ("data", ("model", "seq")), ("data", "seq")),
]


def is_right(product, x, w, cotangent):
    """Are the product and its derivatives those of NumPy?"""
    y, pull_back = jax.vjp(product, x, w)
    results = [y, *pull_back(cotangent)]
    x, w, cotangent = map(np.asarray, (x, w, cotangent))
    wanted = [x @ w.T, cotangent @ w, cotangent.T @ x]
    return all(np.allclose(a, b, atol=1e-3) for a, b in zip(results, wanted, strict=True))


@pytest.fixture(params=WRONG_IN_XLA, ids=str)
def placed(request):
    layouts = [Layout(EXPLICIT, *dims) for dims in request.param]
    with jax.set_mesh(jax_mesh(EXPLICIT)):
        values = [np.sin(np.arange(64.0) ** p).reshape(8, 8).astype(np.float32) for p in (1, 2, 3)]
        yield [put(value, layout) for value, layout in zip(values, layouts, strict=True)]


@pytest.mark.xfail(strict=True, reason="openxla/xla#40034")
def test_plain_jax_computes_wrong_products(placed):
    where = placed[-1].sharding

    def product(x, w):
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), out_sharding=where)

    assert is_right(jax.jit(product), *placed)


def test_products_that_xla_would_get_wrong_are_right(placed):
    layout = layout_of(placed[-1])
    assert is_right(jax.jit(lambda x, w: linear(x, w, layout=layout)), *placed)
    assert is_right(lambda x, w: linear(x, w, layout=layout), *placed)
