"""All that works inside jit, under every transformation, against one device and differences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax.lax import psum
from jax.test_util import check_grads

from arrays.device_grids import placements
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.fence import fence
from shoal.arrays.traced.linear import linear
from shoal.arrays.traced.manual import manual
from shoal.arrays.traced.shard_alike import shard_alike
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
ROWS, BOTH = Layout(MESH, "data", None), Layout(MESH, "data", "model")
X = np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4)
WEIGHT = np.cos(np.arange(12, dtype=np.float32)).reshape(3, 4)


def plain(x):
    return jnp.sin(x) * jnp.cos(x) * jnp.cos(x)


def alike(gradient):
    def function(x):
        a, b = shard_alike(jnp.sin(x), jnp.cos(x), gradient=gradient)
        return a * b * b

    return function


def fenced(x):
    a, b, _ = fence((jnp.sin(x), jnp.cos(x), 3))
    return a * b * b


def layer(p, x, *, scale):
    return {"y": jnp.sin(p["w"]) * jnp.cos(x) ** scale}


def shards(x):
    """Each device has rows, and along model a part of the dims; the sum is that of all."""
    return jnp.sin(x) * psum(x.sum(), ("data", "model"))


def inner(x):
    part = Layout(MESH, None, "model")
    return manual(lambda x: jnp.sin(x) * psum(x.sum(), "model"), part, part, axes="model")(x)


def region_in_region(x):
    return inner(x) * psum(x.sum(), "data")


def one_in_one(x):
    own = x.reshape(4, -1).sum(1).repeat(x.shape[0] // 4)[:, None]
    return jnp.sin(x) * own * x.sum()


# ours, and the same on one device; both of [8, 4] or more dims before it
FUNCTIONS = {
    "constrain": (lambda x: constrain(plain(x), ROWS), plain),
    "constrain, gradient": (lambda x: constrain(plain(x), BOTH, gradient=True), plain),
    "clear": (lambda x: constrain(constrain(plain(x), ROWS), None), plain),
    "shard_alike": (alike(False), plain),
    "shard_alike, gradient": (alike(True), plain),
    "fence": (fenced, plain),
    "fence, backward": (
        lambda x: fence(layer, backward=True)({"w": x, "n": np.int32(2)}, x, scale=2)["y"],
        plain,
    ),
    "linear": (
        lambda x: jnp.sin(linear(x, WEIGHT, WEIGHT[:, 0], layout=ROWS)),
        lambda x: jnp.sin(x @ WEIGHT.T + WEIGHT[None, :, 0]),
    ),
    "manual": (manual(shards, BOTH, BOTH), lambda x: jnp.sin(x) * x.sum()),
    "manual, some axes": (
        manual(lambda x: jnp.sin(x) * psum(x.sum(), "data"), BOTH, BOTH, axes="data"),
        lambda x: jnp.sin(x) * x.sum(),
    ),
    "manual in manual": (manual(region_in_region, ROWS, ROWS, axes="data"), one_in_one),
    "fence in manual": (manual(fenced, ROWS, ROWS), plain),
    "shard_alike in manual": (manual(alike(True), ROWS, ROWS), plain),
}


def loss(function):
    return lambda x: (function(x) ** 2).sum()


def custom(function):
    own = jax.custom_vjp(function)
    own.defvjp(lambda x: (function(x), x), lambda x, slope: jax.vjp(function, x)[1](slope))
    return own


DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(loss(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "second": lambda f: lambda x: jax.jvp(jax.grad(loss(f)), (x,), (x,))[1],
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f))),
    "custom": lambda f: jax.grad(loss(custom(f))),
}
LOOPS = {
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x[0, 1] > 0, loss(f), loss(f), x)),
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c + loss(f)(x) * c, None), jnp.float32(1), length=3)[0]
    ),
    "while": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + loss(f)(x), 0.0),
}


def alike(ours, single):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours, single)


BATCHES = {
    "of slopes": lambda f: jax.vmap(jax.grad(loss(f)), in_axes=1, out_axes=2),
    "slopes of": lambda f: jax.grad(loss(jax.vmap(f, in_axes=1))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_transformation(name):
    def results(function, how, x):
        return {kind: wrap(function)(x) for kind, wrap in how.items()}

    x = jnp.asarray(X / 3)
    batch = jnp.stack([x, x + 1, x * 2], axis=1)
    for how, value in ((DERIVATIVES, x), (LOOPS, x), (BATCHES, batch)):
        ours, single = (jax.jit(functools.partial(results, f, how)) for f in FUNCTIONS[name])
        alike(ours(value), single(value))
    slopes = [jax.grad(loss(f))(x) for f in FUNCTIONS[name]]  # without jit
    alike(*slopes)


# each gets the argument itself, without an operation of JAX before it
FIRST = {
    "constrain": lambda x: constrain(x, ROWS),
    "constrain, gradient": lambda x: constrain(x, ROWS, gradient=True),
    "relayout": lambda x: relayout(x, ROWS),
    "shard_alike": lambda x: shard_alike(x, X, gradient=True)[0],
    "fence": lambda x: fence((x, 3))[0],
    "linear": lambda x: linear(x, WEIGHT),
    "manual": manual(jnp.sin, ROWS, ROWS),
}


@pytest.mark.parametrize("how", ["grad", "jvp", "linearize", "second"])
@pytest.mark.parametrize("name", FIRST)
def test_a_host_value_has_the_derivatives_of_an_array_outside_jit(name, how):
    function = DERIVATIVES[how](FIRST[name])
    alike(function(X), function(jnp.asarray(X)))


@pytest.mark.parametrize("name", FIRST)
def test_the_derivative_of_a_host_value_inside_jit(name):
    if name == "relayout":  # inside jit it is `constrain`
        with pytest.raises(UsageError, match="constrain pins it there"):
            jax.jit(lambda: DERIVATIVES["grad"](FIRST[name])(X))()
    else:
        alike(jax.jit(lambda: DERIVATIVES["grad"](FIRST[name])(X))(),
              DERIVATIVES["grad"](FIRST[name])(jnp.asarray(X)))  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_finite_differences(name):
    ours, _ = FUNCTIONS[name]
    check_grads(jax.jit(loss(ours)), (X / 3,), order=1, modes=["fwd", "rev"], rtol=0.03, atol=0.03)


@settings(max_examples=12)
@given(placements())
def test_regions_over_any_layout(placement):
    layout, shape = placement
    if "explicit" in layout.mesh.axis_types.values():
        layout = Layout(Mesh(layout.mesh.axes, device_ids=layout.mesh.device_ids), *layout.dims)
    assume(layout.mesh.axes)  # else there is nothing to be manual over
    used = tuple(axis for dim in layout.axes_of_dims for axis in dim)
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape).astype(np.float32))
    run = manual(lambda x: jnp.sin(x) * (psum(x.sum(), used) if used else x.sum()), layout, layout)

    def one(x):
        return jnp.sin(x) * x.sum()

    alike(jax.jit(jax.value_and_grad(loss(run)))(x), jax.value_and_grad(loss(one))(x))
