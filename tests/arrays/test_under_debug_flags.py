"""What places and moves arrays, under JAX's debugging flags: shoal's own programs are exempt."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal import Layout

FLAGS = {"debug_nans": jax.debug_nans, "debug_infs": jax.debug_infs, "disable_jit": jax.disable_jit}
MESH = shoal.Mesh({"data": 4, "model": 2})
TYPED = shoal.Mesh({"data": 4, "model": 2}, axis_types="explicit")
LEFT, RIGHT = (shoal.Mesh({"x": 4}, device_ids=ids) for ids in ([0, 1, 2, 3], [4, 5, 6, 7]))
ROWS, COLUMN, ALL = Layout(MESH, "data", None), Layout(MESH, None, "model"), Layout(MESH)
VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)
VALUE[0, 0], VALUE[1, 1] = np.nan, np.inf


@functools.cache
def given():
    """Return arrays that were made before a flag was set."""
    return {
        "rows": shoal.put(VALUE, ROWS),
        "narrow": shoal.put(VALUE.astype(jnp.bfloat16), ROWS),
        "left": shoal.put(VALUE, Layout(LEFT, "x", None)),
        "typed": shoal.put(VALUE, Layout(TYPED, "data", None)),
        "keys": shoal.put(jax.random.split(jax.random.key(0), 8), Layout(MESH, "data")),
        "weak": jnp.full((8, 8), np.nan),
        "placed_weak": jax.device_put(jnp.full((8, 8), np.nan), shoal.named_sharding(ROWS)),
    }


def moved(name, layout, **options):
    return lambda _: shoal.relayout(given()[name], layout, **options)


def saved(path):
    shoal.save(path, given())
    return shoal.restore(path)


def normal(key):
    return jax.random.normal(key, (8, 4))


def repeated(weak, number):
    return jax.lax.fori_loop(0, 3, lambda _, x: x + number, jnp.zeros_like(weak))


CASES = {
    "put": lambda _: shoal.put(VALUE, ROWS),
    "put, numbers": lambda _: shoal.put({"a": np.nan, "b": np.float32(np.inf)}, ALL),
    "put, weak": lambda _: shoal.put(given()["weak"], ROWS),
    "put, elsewhere": lambda _: shoal.put(given()["rows"], COLUMN),
    "relayout": moved("rows", COLUMN),
    "relayout, a gather": moved("rows", Layout(MESH, None, None), way="collectives"),
    "relayout, exchanged axes": moved("rows", Layout(MESH, "model", "data"), way="collectives"),
    "relayout, staged": moved("rows", COLUMN, staged=True),
    "relayout, narrow": moved("narrow", COLUMN, way="collectives"),
    "relayout, keys": moved("keys", Layout(MESH, "model")),
    "relayout, weak": moved("placed_weak", COLUMN),
    "relayout, to others": moved("left", Layout(RIGHT, None, "x"), way="collectives"),
    "relayout, derived": lambda _: jax.vjp(lambda x: shoal.relayout(x, COLUMN), given()["rows"])[0],
    "plan_relayout": lambda _: shoal.plan_relayout(given()["rows"], COLUMN).default_peak_bytes,
    "create": lambda _: shoal.create(normal, jax.random.key(0), layouts=COLUMN),
    "create, no arguments": lambda _: shoal.create(lambda: jnp.ones((8, 4)), layouts=COLUMN),
    "create, of a NaN": lambda _: shoal.create(repeated, given()["weak"], 2.0, layouts=ROWS),
    "pack": lambda _: shoal.compat.pack(np.split(VALUE, 8), Layout(MESH, ("data", "model"), None)),
    "unpack": lambda _: shoal.compat.unpack(given()["rows"]),
    "from_host_local": lambda _: shoal.from_host_local(VALUE, COLUMN),
    "from_host_local, derived": lambda _: jax.vjp(
        lambda x: shoal.from_host_local(x, COLUMN), VALUE
    )[0],
    "to_host_local": lambda _: shoal.to_host_local(given()["rows"], ROWS),
    "feed": lambda _: list(shoal.feed([VALUE, VALUE + 1], ROWS)),
    "constrain": lambda _: shoal.constrain(given()["rows"], COLUMN),
    "constrain, Explicit": lambda _: shoal.constrain(given()["typed"], Layout(TYPED, None, "data")),
    "constrain, host": lambda _: shoal.constrain(VALUE, COLUMN),
    "constrain, None": lambda _: shoal.constrain(given()["rows"], None),
    "constrain, derived": lambda _: jax.vjp(lambda x: shoal.constrain(x, COLUMN), VALUE)[0],
    "shard_alike": lambda _: shoal.shard_alike(given()["rows"], VALUE),
    "fence": lambda _: shoal.compat.fence(given()["rows"]),
    "allgather": lambda _: shoal.allgather(given()["rows"], tiled=True),
    "broadcast": lambda _: shoal.broadcast(given()["rows"]),
    "assert_same": lambda _: shoal.assert_same(given()["rows"]),
    "check_finite": lambda _: shoal.check_finite(given()["keys"]),
    "check_replicas": lambda _: shoal.check_replicas(given()["rows"]),
    "sync_devices": lambda _: shoal.sync_devices(MESH),
    "save": saved,
    "restore": lambda path: (
        shoal.save(path, given()),
        shoal.restore(path, {**given(), "rows": COLUMN}),
    )[1],
}  # fmt: skip


def facts(tree):
    """Return what must be equal of the leaves of a tree, bits among it."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        is_array = isinstance(leaf, jax.Array)
        about = (leaf.sharding, leaf.committed, str(leaf.aval)) if is_array else ()
        is_key = is_array and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaves.append((*about, np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()))
    return leaves


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_equal_with_and_without_the_debug_flag(name, flag, tmp_path):
    given()
    without = facts(CASES[name](tmp_path / "without"))
    with FLAGS[flag](True):
        within = facts(CASES[name](tmp_path / "within"))
    assert within == without


def test_the_checks_of_an_initializer_are_its_authors():
    def wrong():
        return jnp.log(-jnp.ones((8, 4)))

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in log") as raised:
        shoal.create(wrong, layouts=COLUMN)
    assert "bug in shoal" not in "".join(getattr(raised.value, "__notes__", ()))
    assert np.isnan(shoal.create(wrong, layouts=COLUMN)).all()
