"""Random programs of what works inside `jit`, to third order, against the same without a mesh.

Forty in the suite, sixteen where XLA optimizes; `pytest --hypothesis-profile=explore` draws more.
"""

from __future__ import annotations

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.lax import psum

import shoal
from shoal import Layout, Mesh
from shoal.arrays.bridge.devices import jax_mesh

AXES = {"batch": 2, "data": 2, "model": 2}
MESHES = {
    "auto": Mesh(AXES),
    "explicit": Mesh(AXES, axis_types="explicit"),
    "mixed": Mesh(AXES, axis_types={"data": "explicit"}),
}
DIMS = [(None, None), ("data", None), ("model", "data"), (None, "model"), (None, ("data", "model"))]
VALUES = np.sin(np.arange(64.0)).reshape(8, 8)
WEIGHT = np.cos(np.arange(64.0)).reshape(8, 8) / 4
IS_QUICK = "optimization_level=0" in os.environ.get("XLA_FLAGS", "")  # most of the time compiles
LEAVES = ["tanh", "constrain", "clear", "shard_alike", "fence", "manual", "part", "linear"]
AROUND = ["scan", "loop", "remat", "vmap", "jit", "custom_vjp"]


@st.composite
def steps(draw, depth=1):
    """A tree of operations: (name, dims of its layout, the operations inside)."""
    chosen = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(LEAVES + AROUND if depth else LEAVES))
        inside = draw(steps(depth=depth - 1)) if name in AROUND else []
        chosen.append((name, draw(st.sampled_from(DIMS)), inside))
    return chosen


class Ours:
    """The operations on a mesh."""

    def __init__(self, mesh):
        self.mesh, self.home = mesh, Layout(mesh, "data", None)
        self.has_types = any(kind == "explicit" for kind in mesh.axis_types.values())

    def layout(self, dims):
        return Layout(self.mesh, *dims)

    def tanh(self, x, dims):
        return jnp.tanh(x)

    def constrain(self, x, dims):
        return shoal.constrain(x, self.layout(dims), gradient=dims[0] is None)

    def clear(self, x, dims):
        return x if self.has_types else shoal.constrain(x, None)

    def shard_alike(self, x, dims):
        return shoal.shard_alike(x, jnp.sin(x))[1]

    def fence(self, x, dims):
        return shoal.compat.fence((jnp.cos(x), 3))[0]

    def manual(self, x, dims):
        body = lambda s: jnp.sin(s) * psum(s.sum(), ("data", "model")) / 9  # noqa: E731
        tiles = self.layout(("data", "model"))
        return shoal.manual(body, tiles, tiles)(x)

    def part(self, x, dims):
        body = lambda s: s - psum(s.sum(1, keepdims=True), "model") / 8  # noqa: E731
        columns = self.layout((None, "model"))
        return shoal.manual(body, columns, columns, axes="model")(x)

    def linear(self, x, dims):
        return shoal.compat.linear(x, WEIGHT.astype(x.dtype), layout=self.home)

    def keep(self, x):
        """Return it where all operations expect it: layouts may be part of the type."""
        return shoal.constrain(x, self.home)

    def vmap(self, function, names):
        # JAX's shard_map over some axes cannot be batched along another, nor along one of the types
        # that the batch does not have (jax 0.10 to 0.12).
        is_named = not self.has_types and "part" not in names
        return jax.vmap(function, spmd_axis_name="batch" if is_named else None)


class Plain(Ours):
    """The same without a mesh."""

    def __init__(self):
        self.has_types = False

    def constrain(self, x, dims):
        return x

    clear = constrain

    def shard_alike(self, x, dims):
        return jnp.sin(x)

    def fence(self, x, dims):
        return jnp.cos(x)

    def manual(self, x, dims):
        return jnp.sin(x) * x.sum() / 9

    def part(self, x, dims):
        return x - x.sum(1, keepdims=True) / 8

    def linear(self, x, dims):
        return x @ WEIGHT.T.astype(x.dtype)

    def keep(self, x):
        return x

    def vmap(self, function, names):
        return jax.vmap(function)


def run(ops, program, x):
    for name, dims, inside in program:
        if name in LEAVES:
            x = ops.keep(getattr(ops, name)(x, dims))
        else:
            x = ops.keep(around(ops, name, inside, x))
    return x


def around(ops, name, inside, x):
    def inner(x):
        return run(ops, inside, x)

    if name == "scan":
        return jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]
    if name == "loop":
        return jax.lax.fori_loop(0, 2, lambda _, c: inner(c), x)
    if name == "remat":
        return jax.checkpoint(inner)(x)
    if name == "vmap":
        return ops.vmap(inner, {one for one, _, _ in inside})(jnp.stack([x, x / 2])).sum(0)
    if name == "jit":
        return jax.jit(inner)(x)

    @jax.custom_vjp
    def with_rule(x):
        return inner(x)

    with_rule.defvjp(lambda x: (inner(x), x), lambda x, g: (ops.keep(g * jnp.cos(x)),))
    return with_rule(x)


def loss_of(ops, program, order):
    """Return the program's loss, or the loss of its gradient, of the gradient's gradient, …"""

    def loss(x):
        return (run(ops, program, x) * jnp.cos(x)).sum()

    for _ in range(order):
        loss = lambda x, f=loss: (jax.grad(f)(x) * jnp.sin(x)).sum()  # noqa: E731
    return loss


@pytest.mark.parametrize("order", range(4))
@settings(
    max_examples=settings.default.max_examples // (10 if IS_QUICK else 25),
    suppress_health_check=list(HealthCheck),
)
@given(
    steps(),
    st.sampled_from([*MESHES]),
    st.sampled_from(DIMS),
    st.booleans(),
)
def test_a_program_computes_what_it_computes_without_a_mesh(order, program, kind, dims, is_set):
    mesh = MESHES[kind]
    ours = Ours(mesh)
    is_set = is_set or ours.has_types  # JAX computes with types under set_mesh only
    with jax.enable_x64(True):
        expected = jax.jit(jax.value_and_grad(loss_of(Plain(), program, order)))(VALUES)
        with jax.set_mesh(jax_mesh(mesh)) if is_set else contextlib.nullcontext():
            x = shoal.relayout(shoal.put(VALUES, Layout(mesh, *dims)), ours.home)
            found = jax.jit(jax.value_and_grad(loss_of(ours, program, order)))(x)
        for one, other in zip(found, expected, strict=True):
            scale = 1 + float(np.abs(np.asarray(other)).max())
            np.testing.assert_allclose(
                np.asarray(one) / scale, np.asarray(other) / scale, atol=1e-9
            )
