"""What devices of a manual region may hold differently, against what they then hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import axis_index, cond, pcast, pmax, pmin, ppermute, psum, while_loop

from shoal.arrays.traced.manual import manual
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
ROWS, ALL, ONE = Layout(MESH, "data", None), Layout(MESH, None, None), Layout(MESH)
VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)
HALVES = [[0, 1], [2, 3]]
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def place(_):
    return axis_index("data")


def rounds(stop):
    return while_loop(lambda n: n < stop, lambda n: n + 1, jnp.int32(0))


def told(by):
    return jax.pure_callback(np.int32, jax.ShapeDtypeStruct((), np.int32), by)


# What decides differs along data; JAX's types say that the result does not.
DIFFERING = {
    "cond": lambda x: cond(place(x) > 1, lambda: jnp.int32(3), lambda: jnp.int32(4)),
    "switch": lambda x: jax.lax.switch(place(x), [lambda n=n: jnp.int32(n) for n in range(4)]),
    "while": lambda x: rounds(place(x)),
    "argsort": lambda x: jnp.argsort(jnp.where(place(x) > 1, -x[:, 0], x[:, 0]))[0],
    "callback": lambda x: told(place(x)),
    "in a function": lambda x: jax.jit(lambda stop: rounds(stop))(place(x)) + 1,
    "in a loop": lambda x: jax.lax.scan(
        lambda c, _: (c + rounds(place(x)), None), jnp.int32(0), length=2
    )[0],
    "after a loop": lambda x: jax.lax.scan(
        lambda c, _: ((c[1], rounds(place(x))), None), (jnp.int32(0), jnp.int32(0)), length=2
    )[0][0],
    "decided twice": lambda x: cond(
        rounds(place(x)) > 1, lambda: jnp.int32(3), lambda: jnp.int32(4)
    ),
    "by a barrier": lambda x: jax.lax.optimization_barrier((jnp.int32(1), rounds(place(x))))[1],
    "checkpointed": lambda x: jax.checkpoint(lambda stop: rounds(stop))(place(x)),
    "the most of each group": lambda x: pmax(place(x), "data", axis_index_groups=HALVES),
    "the least of each group": lambda x: pmin(place(x), "data", axis_index_groups=HALVES),
    "several of each group": lambda x: pmax(
        (place(x), jnp.int32(2)), "data", axis_index_groups=HALVES
    )[0],
}


@pytest.mark.parametrize("name", DIFFERING)
def test_values_that_differ_by_device_are_refused_as_replicated(name):
    fn = DIFFERING[name]
    with pytest.raises(UsageError, match=r"may differ along data \(by its [a-z_ ]+, of which"):
        manual(fn, ROWS, ONE)(VALUE)
    each = manual(lambda x: fn(x)[None], ROWS, Layout(MESH, "data"))(VALUE)
    assert len({*each.tolist()}) > 1  # and so they do
    largest = manual(lambda x: pmax(fn(x), "data"), ROWS, ONE)(VALUE)
    assert [int(shard.data) for shard in largest.addressable_shards] == [max(each.tolist())] * 8


def total(x):
    return psum(x, "data")


# As above, but what decides is one value for all, or each result has an origin of its own.
ALIKE = {
    "cond": lambda x: cond(pmax(place(x), "data") > 1, lambda: total(x), lambda: 0 * total(x)),
    "groups": lambda x: (
        total(x)
        + pmax(pmax(x, "data", axis_index_groups=HALVES), "data", axis_index_groups=[[0, 1, 2, 3]])
    ),
    "while": lambda x: total(x) + rounds(pmax(place(x), "data")).astype(x.dtype),
    "other axis": lambda x: total(x) + psum(rounds(axis_index("model")), "model").astype(x.dtype),
    "function": lambda x: jax.jit(lambda a, b: (b, a))(place(x), total(x))[0],
    "sort": lambda x: jnp.sort(total(x)),
    "loop": lambda x: jax.lax.scan(
        lambda c, _: (c + pmax(rounds(place(x)), "data").astype(x.dtype), None), total(x), length=2
    )[0],
    "shown": lambda x: (jax.debug.callback(lambda _: None, place(x)), total(x))[1],
}


@pytest.mark.parametrize("name", ALIKE)
def test_values_equal_on_all_devices_are_accepted_as_replicated(name):
    y = manual(ALIKE[name], ROWS, ALL)(VALUE)
    assert len({np.asarray(shard.data).tobytes() for shard in y.addressable_shards}) == 1


def test_gradients_of_what_devices_decide_over():
    def chosen(x, a):
        return psum(cond(x[0, 0] > 9, lambda: a, lambda: 2 * a), "data")

    with pytest.raises(UsageError, match=r"uses a float32\[\] that does not: .*pcast.*'data'"):
        manual(chosen, (ROWS, ONE), ONE)(VALUE, np.float32(1))
    by = manual(lambda x, a: chosen(x, pcast(a, ("data",), to="varying")), (ROWS, ONE), ONE)
    slope = jax.grad(by, 1)(VALUE, jnp.float32(1))
    assert [float(shard.data) for shard in slope.addressable_shards] == [6.0] * 8
    table = np.ones(3, np.float32)  # has no gradient

    def looked_up(x):
        constant = jnp.asarray(table) + jnp.arange(3.0, dtype=np.float32)
        return psum(cond(x[0, 0] > 9, lambda: constant[0], lambda: constant[2]), "data")

    assert float(manual(looked_up, ROWS, ONE)(VALUE)) == 8


@pytest.mark.parametrize("wait", [
    lambda x: cond(place(x) > 1, lambda: ppermute(x, "data", RING), lambda: x),
    lambda x: jax.lax.fori_loop(0, place(x), lambda _, c: ppermute(c, "data", RING), x),
    lambda x: cond(place(x) > 1, jax.jit(lambda x: x * psum(x, "data")), lambda x: x, x),
    lambda x: while_loop(lambda c: psum(c, "data").sum() < x.sum(), lambda c: c + 1, x),
])  # fmt: skip
def test_a_collective_to_which_only_some_would_come_is_refused(wait):
    with pytest.raises(UsageError, match=r"over data inside a (cond|while loop) whose .* waiting"):
        manual(wait, ROWS, ROWS)(VALUE)
    along = manual(lambda x: cond(place(x) > 1, lambda: psum(x, "model") * 1.0, lambda: 2 * x),
                   Layout(MESH, "data", None), ROWS)  # fmt: skip
    np.testing.assert_array_equal(along(VALUE), 2 * VALUE)
