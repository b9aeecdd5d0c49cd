"""Leaves that JAX may move come back so: a state as `tx.init(params)` makes it trains on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.moving.relayout import relayout
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save

LEAVES = {
    "count": lambda: jnp.int32(3),
    "scale": lambda: jnp.zeros((), jnp.bfloat16),
    "table": lambda: jnp.arange(6.0, dtype=jnp.float32).reshape(2, 3),
    "none": lambda: jnp.zeros((0, 2), jnp.float32),
    "key": lambda: jax.random.key(7),
    "old_key": lambda: jax.random.PRNGKey(7),
}


def state():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, PartitionSpec("x")))
    return {"w": w, **{name: make() for name, make in LEAVES.items()}}


def described(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


FORMS = {
    "arrays": lambda given: given,
    "descriptions": lambda given: jax.tree.map(described, given),
    "shardings": lambda given: jax.tree.map(lambda leaf: leaf.sharding, given),
    "layouts": lambda given: jax.tree.map(layout_of, given),
    "a function": lambda given: lambda name, x: given[name].sharding,
    "functions": lambda given: {name: lambda name, x: given[name].sharding for name in given},
}


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def same(one, other):
    if is_key(one):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


@jax.jit
def everything(tree):
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else leaf + leaf, tree)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("uncommitted") / "saved"
    save(path, state())
    return path


@pytest.mark.parametrize("form", FORMS)
def test_uncommitted_arrays_are_restored_uncommitted_for_any_target(path, form):
    given = state()
    back = restore(path, FORMS[form](given))
    for name in LEAVES:
        assert same(back[name], given[name]), name
        assert not back[name].committed, name
        assert back[name].sharding == given[name].sharding, name
    assert back["w"].committed
    everything(back)  # JAX itself refuses committed leaves on one device beside `w`


@pytest.mark.parametrize("name", LEAVES)
def test_committed_arrays_are_restored_committed(path, name):
    for device in (jax.devices()[0], jax.devices()[5]):
        given = jax.device_put(LEAVES[name](), device)
        back = restore(path, {name: given}, only=name)[name]
        assert back.committed
        assert back.devices() == {device}
        assert same(back, given)


def test_another_device_than_the_default_one_is_a_choice(path):
    place = SingleDeviceSharding(jax.devices()[5])
    assert restore(path, {"count": place}, only="count")["count"].committed
    with jax.default_device(jax.devices()[5]):  # what is computed later is not in this block
        back = restore(path, {"count": place}, only="count")["count"]
    assert back.committed
    assert back.sharding == place


@pytest.mark.parametrize("name", LEAVES)
def test_an_uncommitted_array_stays_on_its_device(path, name):
    with jax.default_device(jax.devices()[5]):
        given = LEAVES[name]()
    back = restore(path, {name: given}, only=name)[name]
    assert not back.committed
    assert back.devices() == given.devices() == {jax.devices()[5]}


def test_a_mesh_of_one_device_with_axes_is_a_choice(path):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    back = restore(path, {"count": place}, only="count")["count"]
    assert back.committed
    assert back.sharding == place


def test_casts_and_numbers_too(tmp_path):
    save(tmp_path / "saved", {"step": 5, "rate": np.float32(0.5)})
    target = {"step": jnp.int32(0), "rate": jnp.zeros((), jnp.bfloat16)}
    back = restore(tmp_path / "saved", target, dtype="any")
    assert [(leaf.dtype, float(leaf), leaf.committed) for leaf in jax.tree.leaves(back)] == [
        (jnp.bfloat16, 0.5, False),
        (jnp.int32, 5.0, False),
    ]


def test_every_run_of_a_loop_trains_on(tmp_path):
    for run in range(3):
        with Checkpoints(tmp_path) as checkpoints:
            trained, first = checkpoints.resume(state(), state)
            assert first == run
            checkpoints.save(first, everything(trained))


def test_relayout_to_where_they_are_leaves_them_free():
    given = state()
    moved = relayout(given, jax.tree.map(layout_of, given))
    assert {name for name, leaf in moved.items() if leaf.committed} == {"w"}
    everything(moved)
