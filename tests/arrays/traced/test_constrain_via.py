"""Planned moves inside `jit`: the same values, the planned bytes, and right derivatives."""

import contextlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from plan.transfer.collectives_by_hand import all_layouts
from shoal.arrays.bridge.devices import jax_mesh
from shoal.errors import UsageError
from shoal.plan.compiled import received_bytes_of
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
GATHERED = Layout(CUBE, "c", "b"), Layout(CUBE, ("c", "b", "a"), None)  # by XLA left alone


def plan_of(source, target, shape):
    return shoal.plan_relayout(
        jax.ShapeDtypeStruct(shape, np.float32, sharding=shoal.named_sharding(source)), target
    )


RESHARD = """
import jax, numpy as np, shoal
mesh = shoal.make_mesh({"a": 2, "b": 3, "c": 2})
rows, columns = shoal.Layout(mesh, ("a", "b"), None), shoal.Layout(mesh, None, ("b", "c", "a"))
x = shoal.put(np.arange(48.0 * 48, dtype=np.float32).reshape(48, 48), rows)
plan = %s
y = jax.jit(lambda x: shoal.constrain(x + 1, columns, via=plan) * 2)(x)
np.testing.assert_array_equal(y, (np.asarray(x) + 1) * 2)
"""


@pytest.mark.parametrize(
    "plan",
    [
        "shoal.plan_relayout(x, columns, way='collectives')",
        pytest.param(
            "None",
            marks=pytest.mark.xfail(
                jax.__version_info__ >= (0, 11), strict=True,
                reason="XLA aborts: Check failed: sliced.has_value() Could not slice dimension",
            ),
        ),
    ],
    ids=["planned", "by XLA"],
)  # fmt: skip
def test_a_reshard_at_which_xla_ends_the_process(child_env, plan):
    env = {**child_env, "JAX_NUM_CPU_DEVICES": "12", "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", RESHARD % plan], env=env, check=True)


@pytest.mark.parametrize("is_set", [False, True])
def test_the_plan_is_what_runs(is_set):
    layouts = all_layouts(CUBE, 2)
    pairs = random.Random(3).sample([(a, b) for a in layouts for b in layouts], 4)
    values = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
    for source, target in [GATHERED, *pairs]:
        plan = plan_of(source, target, (16, 16))
        moved = jax.jit(lambda x, t=target, p=plan: shoal.constrain(x * 2, t, via=p) + 1)
        x = shoal.put(values, source)
        context = (
            jax.set_mesh(shoal.named_sharding(source).mesh) if is_set else contextlib.nullcontext()
        )
        with context:
            y = moved(x)
            text = moved.lower(x).compile().as_text()
        np.testing.assert_array_equal(np.asarray(y), values * 2 + 1)
        assert y.sharding.is_equivalent_to(shoal.named_sharding(target), 2)
        assert received_bytes_of(text, 8) == plan.received_bytes


WIDE, PAIR = Mesh({"x": 8}), Mesh({"a": 4, "b": 2})
SPLIT = {  # the plan splits axes, whose digits make another mesh
    "an axis": (Layout(WIDE, "x", None), Layout(WIDE, None, "x")),
    "one of two": (Layout(PAIR, ("a", "b"), None), Layout(PAIR, "b", "a")),
}


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("name", SPLIT)
def test_a_plan_that_splits_axes_runs_under_any_mesh(name, is_set):
    source, target = SPLIT[name]
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    x = shoal.put(values, source)
    with jax.set_mesh(jax_mesh(source.mesh) if is_set else None):
        plan = shoal.plan_relayout(x, target, way="collectives")

        def loss(x):
            return (shoal.constrain(x * 1, target, via=plan) ** 2).sum()

        y = jax.jit(lambda x: shoal.constrain(x * 2, target, via=plan))(x)
        np.testing.assert_array_equal(y, 2 * values)
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), 2 * values)
        second = jax.jit(jax.grad(lambda x: jax.grad(loss)(x).sum()))(x)
        np.testing.assert_array_equal(second, 0 * values + 2)
        assert plan.peak_bytes > 0
        (moved,) = jax.tree.leaves(plan.program()(x))
        np.testing.assert_array_equal(moved, values)


@pytest.mark.parametrize("value", [1.5, 3, 2j])
def test_weak_type_is_kept_by_constrain_via(value):
    source, target = GATHERED
    plan = plan_of(source, target, (16, 16))
    weak = jax.device_put(jnp.full((16, 16), value), shoal.named_sharding(source))
    moved = jax.jit(lambda x: shoal.constrain(x, target, via=plan))(weak)
    assert weak.weak_type
    assert moved.weak_type
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(weak))


def test_derivatives_go_the_same_way_and_back():
    source, target = GATHERED
    plan = plan_of(source, target, (16, 16))
    values = np.arange(256, dtype=np.float32).reshape(16, 16)
    weights = shoal.put(np.cos(values), target)
    x = shoal.put(values, source)

    def loss(x):
        return (shoal.constrain(x * x, target, via=plan) * weights).sum()

    slope = jax.jit(jax.grad(loss), out_shardings=shoal.named_sharding(source))
    np.testing.assert_allclose(np.asarray(slope(x)), 2 * values * np.cos(values), rtol=1e-6)
    back = plan_of(target, source, (16, 16))
    assert received_bytes_of(slope.lower(x).compile().as_text(), 8) == back.received_bytes
    _, tangent = jax.jit(lambda x: jax.jvp(loss, (x,), (jnp.ones_like(x),)))(x)
    np.testing.assert_allclose(tangent, (2 * values * np.cos(values)).sum(), rtol=1e-3)


EXCHANGED = Layout(PAIR, "a", None), Layout(PAIR, "b", "a")


@pytest.mark.parametrize("ends", [GATHERED, EXCHANGED, *SPLIT.values()])
def test_higher_derivatives_of_a_checkpointed_function(ends):
    """An exchange of blocks has tables, which are constants of the program."""
    source, target = ends
    x = shoal.put(np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8), source)
    plan = plan_of(source, target, (8, 8))

    def derivative(order, move):
        def loss(x):
            y = move(jnp.tanh(x))
            return (jnp.sin(y) * y).sum()

        found = jax.checkpoint(loss)
        for _ in range(order):
            found = (lambda of: lambda x: (jax.grad(of)(x) ** 2).sum())(found)
        return jax.jit(jax.grad(found))(x)

    for order in (1, 2):
        found = derivative(order, lambda y: shoal.constrain(y, target, via=plan))
        np.testing.assert_allclose(found, derivative(order, lambda y: y), rtol=1e-4, atol=1e-4)


def test_constrain_via_refuses_plans_that_do_not_apply():
    source, target = GATHERED
    plan = plan_of(source, target, (16, 16))
    x = shoal.put(np.ones((16, 16), np.float32), source)
    explicit = Mesh({"a": 2, "b": 4}, axis_types="explicit")
    turned = Layout(Mesh({"x": 8}, device_ids=[7, 6, 5, 4, 3, 2, 1, 0]), "x", None)
    ends = Layout(explicit, "a", None), Layout(explicit, "b", None)
    for refused, words in {
        lambda: shoal.constrain(x, target, via=plan): "is for values inside jit",
        lambda: jax.jit(lambda x: shoal.constrain(x, source, via=plan))(x): "leads to",
        lambda: jax.jit(lambda x: shoal.constrain(x[:8], target, via=plan))(x): "for the shape",
        lambda: jax.jit(lambda x: shoal.constrain([x, x], target, via=plan))(x): "2 leaves",
        lambda: jax.jit(lambda x: shoal.constrain(x, target, via="fast"))(x): "plan_relayout",
        lambda: jax.jit(jax.vmap(lambda x: shoal.constrain(x, target, via=plan)))(
            x[None] * np.ones((2, 1, 1), np.float32)
        ): "under vmap this is a batch",
        lambda: jax.jit(jax.jacrev(lambda x: shoal.constrain(x, target, via=plan)))(x): "jacrev",
        lambda: jax.jit(
            lambda x: shoal.constrain(x, turned, via=plan_of(source, turned, (16, 16)))
        )(x): "order of devices",
        lambda: jax.jit(lambda x: shoal.constrain(x, ends[1], via=plan_of(*ends, (16, 16))))(
            shoal.put(np.ones((16, 16), np.float32), ends[0])
        ): "Auto axes only",
    }.items():
        with pytest.raises(UsageError, match=words):
            refused()
