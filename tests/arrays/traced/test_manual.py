"""Regions in which the code is one device, against one device and finite differences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.placing.put import put
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.manual import manual
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

AXES = {"data": 4, "model": 2}
AUTO, EXPLICIT = Mesh(AXES), Mesh(AXES, axis_types="explicit")
MIXED = Mesh(AXES, axis_types={"data": "explicit"})
MESHES = {"auto": AUTO, "explicit": EXPLICIT, "mixed": MIXED}
psum = jax.lax.psum


def host(*shape):
    return np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def matmul(x, w):
    """Rows of x over data, the dim that is summed over model."""
    return psum(x @ w, "model")


def product(mesh, **options):
    return manual(
        matmul,
        (Layout(mesh, "data", "model"), Layout(mesh, "model", None)),
        Layout(mesh, "data", None),
        **options,
    )


@pytest.fixture(params=MESHES)
def mesh(request):
    """Each kind of mesh, in force: on Explicit axes JAX asks for that when it derives."""
    with jax.set_mesh(jax_mesh(MESHES[request.param])):
        yield MESHES[request.param]


@pytest.mark.parametrize("axes", [None, ["data", "model"], "model"], ids=str)
@pytest.mark.parametrize("how", ["jit", "call"])
def test_shards_go_in_and_a_whole_comes_out(mesh, axes, how):
    run = product(mesh, axes=axes)
    y = (jax.jit(run) if how == "jit" else run)(host(8, 4), host(4, 6))
    np.testing.assert_allclose(y, host(8, 4) @ host(4, 6), rtol=1e-5, atol=1e-6)
    assert layout_of(y) == Layout(mesh, "data", None)


@pytest.mark.parametrize("axes", [None, "model"], ids=str)
def test_derivatives_are_those_of_one_device(mesh, axes):
    def loss(run):
        return lambda x, w: (jnp.tanh(run(x, w)) ** 2).sum()

    x, w = (put(v, Layout(mesh, None, None)) for v in (host(8, 4), host(4, 6)))
    ours, single = loss(product(mesh, axes=axes)), loss(jnp.matmul)
    for both in ((0, 1), (1,)):
        slopes = jax.jit(jax.grad(ours, both))(x, w)
        expected = jax.grad(single, both)(jnp.asarray(host(8, 4)), jnp.asarray(host(4, 6)))
        for slope, wanted in zip(slopes, expected, strict=True):
            np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-5)
    if mesh is AUTO:
        check_grads(jax.jit(ours), (x, w), order=1, modes=["fwd", "rev"], rtol=0.05, atol=0.05)


def test_replicated_argument_gets_the_sum_of_its_gradients():
    scale = manual(
        lambda s, x: psum((s * x).sum(), ("data", "model")),
        (Layout(AUTO), Layout(AUTO, ("data", "model"))),
        Layout(AUTO),
    )
    slope = jax.grad(scale)(jnp.float32(2), jnp.arange(16.0))
    assert float(slope) == 120
    check_grads(jax.jit(scale), (jnp.float32(2), jnp.arange(16.0)), order=2, rtol=0.01)


@pytest.mark.parametrize("axes", [(0, None), (1, 0), (None, 2)])
def test_batches(axes):
    shapes = [(8, 4), (4, 6)]
    full = [
        s if a is None else tuple(np.insert(s, a, 3)) for s, a in zip(shapes, axes, strict=True)
    ]
    x, w = (host(*shape) for shape in full)
    run, single = product(AUTO), jnp.matmul
    for wrap in (lambda f: f, lambda f: jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))):
        ours = jax.jit(jax.vmap(wrap(run), in_axes=axes))(x, w)
        wanted = jax.vmap(wrap(single), in_axes=axes)(x, w)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, wanted
        )


def test_batches_that_an_axis_splits():
    total = manual(lambda x: psum(x.sum(), "model"), Layout(AUTO, "model"), Layout(AUTO))
    spread = jax.jit(jax.vmap(total, spmd_axis_name="data"))
    np.testing.assert_allclose(spread(host(8, 4)), host(8, 4).sum(1), rtol=1e-5)
    assert "f32[2,2]" in spread.lower(host(8, 4)).compile().as_text()


def test_loops_and_regions_in_regions():
    def inner(x):
        here = manual(
            lambda x: psum(x, "model"), Layout(AUTO, None, "model"), Layout(AUTO, None, None)
        )
        assert here(x).shape == (2, 2)
        return here(x) * jax.lax.axis_index("data").astype(x.dtype)

    outer = manual(inner, Layout(AUTO, "data", None), Layout(AUTO, "data", None), axes="data")
    y = jax.jit(outer)(host(8, 4))
    summed = host(8, 4).reshape(8, 2, 2).sum(1)
    np.testing.assert_allclose(y, summed * np.repeat(np.arange(4), 2)[:, None], rtol=1e-5)

    rows = Layout(AUTO, "data", None)
    ring = manual(
        lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), rows, rows
    )
    last, _ = jax.jit(lambda x: jax.lax.scan(lambda c, _: (ring(c), None), x, length=3))(host(8, 4))
    np.testing.assert_array_equal(last, np.roll(host(8, 4), 6, axis=0))


SCANNED = {
    "grad": lambda f: jax.grad(f),
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1]),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
}


@pytest.mark.parametrize("transform", SCANNED)
def test_derivatives_of_a_scan_over_nested_regions(transform):
    rows, columns = Layout(AUTO, "data", None), Layout(AUTO, None, "model")
    inner = manual(lambda y: y * 2, columns, columns, axes="model")
    outer = manual(lambda x: jnp.tanh(inner(x)), rows, rows, axes="data")

    def loss(step):
        return lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, length=3)[0].sum()

    x = host(8, 4)
    slope, wanted = (
        jax.jit(SCANNED[transform](loss(step)))(x) for step in (outer, lambda x: jnp.tanh(2 * x))
    )
    np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-5)


def test_the_other_axes_stay_the_compilers_and_are_pinned():
    def body(x):
        assert x.shape == (2, 8)
        return constrain(x * 2, Layout(AUTO, None, "model"))

    wide = Layout(AUTO, "data", "model")
    y = manual(body, wide, wide, axes=["data"])(host(8, 8))
    np.testing.assert_array_equal(y, 2 * host(8, 8))
    assert layout_of(y) == wide
    both = Layout(AUTO, ("data", "model"), None)
    y = manual(lambda x: x + 1, both, both, axes=["data"])(host(8, 8))
    assert layout_of(y) == both
    program = jax.jit(manual(lambda x: x + 1, wide, wide, axes=["data"])).lower(host(8, 8))
    assert 'manual_axes={"data"}' in program.as_text()
    assert program.as_text().count('[{"data"}, {"model"}]') >= 2


def test_trees_keys_integers_none_and_specs():
    def draw(tree, keys):
        tree["u"] = jax.vmap(jax.random.uniform)(keys)
        return tree, keys

    keys = jax.random.split(jax.random.key(0), 8)
    tree = {"n": None, "i": np.arange(8, dtype=np.int8)}
    with use_mesh(AUTO):
        run = manual(
            draw, (P("data"), ("data",)), ({"i": "data", "n": None, "u": "data"}, P("data"))
        )
        out, same = run(tree, keys)
    np.testing.assert_array_equal(out["u"], jax.vmap(jax.random.uniform)(keys))
    np.testing.assert_array_equal(out["i"], tree["i"])
    np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(keys))
    axes = Layout(AUTO, "data")
    assert manual(lambda: jax.lax.axis_index("data")[None], (), axes)().tolist() == [0, 1, 2, 3]
    assert manual(lambda x: {"one": 1.0, "no": None}, axes, Layout(AUTO))(host(8)) == {
        "one": 1,
        "no": None,
    }
    assert manual(dict, (), Layout(AUTO))() == {}
    assert manual(lambda x: x, sharding_of(axes), axes)(host(8)).shape == (8,)


def test_outside_jit_it_is_compiled_once():
    traces = []

    def body(x, by):
        traces.append(x.shape)
        return x * by

    run = manual(functools.partial(body, by=2), Layout(AUTO, "data"), Layout(AUTO, "data"))
    for _ in range(3):
        run(host(8))
    assert traces == [(2,)]
    with jax.disable_jit():
        np.testing.assert_array_equal(run(host(8)), 2 * host(8))


def test_manual_uses_the_default_mesh():
    run = manual(lambda x: x * jax.lax.axis_size("x"), "x", "x")
    for size in (2, 4):
        with use_mesh(Mesh({"x": size})):
            np.testing.assert_array_equal(run(host(8)), size * host(8))
    with pytest.raises(UsageError, match="no layout names a mesh"):
        run(host(8))


ROWS, ALL = Layout(AUTO, "data", None), Layout(AUTO, None, None)
WRONG = {
    "results of body: the array: may differ along data, .*lax.psum": lambda: manual(
        body, ROWS, ALL
    ),
    r"results of body: the array: shape \(2, 8\) has rank 2": lambda: manual(
        body, ROWS, Layout(AUTO, "data", None, None)
    ),
    r"arguments of body: \[0\]: shape \(8, 8\) has rank 2": lambda: manual(
        body, Layout(AUTO, "data", None, None), ROWS
    ),
    r"\[0\]: dim 1 of \(8, 8\) has size 8, which 3 shards": lambda: manual(
        body, Layout(Mesh({"x": 3}), None, "x"), Layout(Mesh({"x": 3}), None, "x")
    ),
    "one region is on one mesh": lambda: manual(body, ROWS, Layout(MIXED, None, None)),
    "axes: no axis 'dat'.*did you mean 'data'": lambda: manual(body, ROWS, ROWS, axes="dat"),
    "axes: none is left": lambda: manual(body, ROWS, ROWS, axes=()),
    r"the Manual axes \(model\) must come first": lambda: manual(
        body, Layout(AUTO, ("data", "model"), None), ROWS, axes="model"
    ),
    "partial over data; values are never partial": lambda: manual(
        body, Layout(EXPLICIT, None, None, partial={"data": "sum"}), Layout(EXPLICIT, None, None)
    ),
    "in_layouts|a layout, but no leaf": lambda: manual(body, (ROWS, ROWS), ROWS),
}


def body(x):
    return x * 2


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.parametrize("how", ["jit", "call"])
def test_errors_use_the_names_of_the_program(words, how):
    run = WRONG[words]()
    with pytest.raises(UsageError, match=words):
        (jax.jit(run) if how == "jit" else run)(host(8, 8))


def test_manual_refuses_other_invalid_arguments():
    with pytest.raises(UsageTypeError, match="must be a function"):
        manual(3, ROWS, ROWS)
    with pytest.raises(UsageTypeError, match="positional arguments: x"):
        manual(body, ROWS, ROWS)(x=host(8, 8))
    with pytest.raises(UsageError, match="not functions of paths"):
        manual(body, ROWS, lambda path, x: ROWS)
    with pytest.raises(UsageError, match="holds 1e\\+39, which does not fit float32"):
        manual(body, ROWS, ROWS)(np.full((8, 8), 1e39))
    with pytest.raises(UsageError, match=r"\[0\]: is on other devices.*relayout"):
        manual(body, ROWS, ROWS)(jax.device_put(host(8, 8), jax.devices()[3]))
    with (
        jax.set_mesh(jax_mesh(Mesh({"z": 8}))),
        pytest.raises(UsageError, match="in force here is z=8"),
    ):
        manual(body, ROWS, ROWS)(host(8, 8))
    with jax.set_mesh(jax_mesh(EXPLICIT)), pytest.raises(UsageError, match="data=4 Explicit"):
        manual(body, ROWS, ROWS)(host(8, 8))
    with pytest.raises(UsageTypeError, match="axes=3 must be names of axes"):
        manual(body, ROWS, ROWS, axes=3)(host(8, 8))
    with pytest.raises(
        UsageError,
        match=r"the layouts are in other containers: \(\[\*, \*\]\) for \(\(\*, \*\)\)",
    ):
        manual(lambda x: (x, x), ROWS, [ROWS, ROWS])(host(8, 8))
    again = manual(manual(body, ROWS, ROWS, axes="data"), ROWS, ROWS, axes="data")
    with pytest.raises(UsageError, match="axes: data is Manual here already"):
        again(host(8, 8))
    inside = manual(manual(body, ROWS, ROWS, axes="model"), ROWS, ROWS, axes="data")
    with pytest.raises(UsageError, match="split by data, and here values are shards along"):
        inside(host(8, 8))


def test_a_gathered_result_is_one_that_all_have():
    gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
    y = manual(lambda x: gather(x, to="invarying"), ROWS, ALL)(host(8, 8))
    np.testing.assert_array_equal(y, host(8, 8))
    with pytest.raises(UsageError, match="to='invarying'"):
        manual(gather, ROWS, ALL)(host(8, 8))


@pytest.mark.parametrize("wrong", [3, object()])
def test_values_that_are_not_layouts_are_shown(wrong):
    with pytest.raises(UsageTypeError, match=r"manual: in_layouts: .* is not a layout"):
        manual(body, wrong, ROWS)
    with pytest.raises(UsageTypeError, match=r"manual: out_layouts: .* is not a layout"):
        manual(body, ROWS, wrong)
