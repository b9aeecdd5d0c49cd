"""What JAX's own tests say of `multihost_utils`, as far as one process of 8 devices can show it."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shoal.compat import multihost_utils

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
PAIRS = np.arange(16, dtype=np.float32).reshape(8, 2) * 3


def mesh(*shape, names="xyz", order=None):
    ids = np.arange(8) if order is None else np.array(order)
    return Mesh(np.array(jax.devices())[ids].reshape(shape), [*names[: len(shape)]])


def spread(value, mesh, spec):
    """Return an array over a mesh, made of its parts."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda where: value[where])


def holds(array, value):
    """Check that each device has its own part of the value."""
    assert array.shape == value.shape
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])


GATHERED = [
    np.ones((3, 2), np.float32),
    jnp.full((4, 3, 2), 2.0),
    np.arange(5),
    np.array(7),
    jnp.arange(6, dtype=jnp.int8),
]


@pytest.mark.parametrize("value", GATHERED, ids=repr)
def test_gathered_values_are_stacked(value):
    found = multihost_utils.process_allgather(value, tiled=False)
    assert found.shape == (jax.process_count(), *np.shape(value))
    np.testing.assert_array_equal(found, np.stack([value] * jax.process_count()))


@pytest.mark.parametrize("value", GATHERED, ids=repr)
def test_gathered_values_are_concatenated(value):
    found = multihost_utils.process_allgather(value, tiled=True)
    rows = np.atleast_1d(value)
    assert found.shape == (len(rows) * jax.process_count(), *rows.shape[1:])
    np.testing.assert_array_equal(found, np.concatenate([rows] * jax.process_count()))


@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5, 6, 7, 0], [*range(7, -1, -1)]])
def test_the_mesh_of_the_program_does_not_matter(order):
    with jax.set_mesh(mesh(8, 1, 1, order=order)):
        found = multihost_utils.process_allgather(jnp.full((2, 3), 4.0), tiled=True)
        np.testing.assert_array_equal(found, np.full((2, 3), 4.0))
        pair = multihost_utils.broadcast_one_to_all((np.arange(5), np.array(9)))
        assert [one.tolist() for one in pair] == [[0, 1, 2, 3, 4], 9]
        multihost_utils.sync_global_devices("in a mesh")
        multihost_utils.assert_equal(jnp.arange(3))


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
def test_processes_meet_in_the_block_of_a_mesh():
    multihost_utils.sync_global_devices("outside")
    with mesh(2, 2, order=range(4)):
        multihost_utils.sync_global_devices("inside")


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float32])
def test_what_is_sent_keeps_its_tree_values_and_dtype(dtype):
    value = np.arange(6).astype(dtype)
    found = multihost_utils.broadcast_one_to_all((value, {"again": value, "one": dtype(3)}))
    assert jax.tree.structure(found) == jax.tree.structure((value, {"again": value, "one": 3}))
    for one, wanted in zip(jax.tree.leaves(found), (value, value, np.array(3)), strict=True):
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")])
def test_an_array_over_all_devices_equals_itself(spec):
    square = np.arange(64).reshape(8, 8).astype(np.float32)
    multihost_utils.assert_equal(spread(square, mesh(8), spec))


@pytest.mark.differs("`process_allgather` of host arrays compiles")
def test_gathering_compiles_nothing(caplog):
    one, other = jnp.ones((2, 3)), jnp.arange(6.0).reshape(2, 3)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = [multihost_utils.process_allgather(value) for value in (one, other)]
    assert "Compiling" not in caplog.text
    for value, gathered in zip((one, other), found, strict=True):
        np.testing.assert_array_equal(gathered, [value])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((mesh(8), P("x")), (mesh(4, 2, order=[*range(7, -1, -1)]), P("x", "y"))),
        ((mesh(8), P()), (mesh(4, 2, order=[*range(7, -1, -1)]), P("x", "y"))),
        ((mesh(8), P("x")), (mesh(4, 2, order=[*range(7, -1, -1)]), P())),
        ((mesh(8), P()), (mesh(4, 2, order=[*range(7, -1, -1)]), P())),
        ((mesh(4, 2), P("x", "y")), (mesh(2, 4), P("y"))),
        ((mesh(8), P("x")), (mesh(2, 2, 2, order=[2, 5, 7, 0, 4, 1, 6, 3]), P("x", "y"))),
    ],
    ids=["turned", "was whole", "becomes whole", "whole", "same devices", "in three axes"],
)
def test_arrays_in_another_layout_are_moved(before, after):
    arrays = [spread(PAIRS, *before) for _ in range(2)]
    moved = multihost_utils.global_array_to_host_local_array(arrays, *after)
    for array in moved:
        assert isinstance(array.sharding, NamedSharding)
        assert array.sharding.is_equivalent_to(NamedSharding(*after), 2)
        holds(array, PAIRS)


def test_an_array_over_a_mesh_is_gathered_whole():
    array = spread(PAIRS, mesh(4, 2), P("x", "y"))
    np.testing.assert_array_equal(multihost_utils.process_allgather(array, tiled=True), PAIRS)


@pytest.mark.parametrize("spec", [P("x", "y"), P("x"), P()])
def test_an_array_that_is_global_passes_through(spec):
    array = spread(PAIRS, mesh(4, 2), spec)
    assert multihost_utils.host_local_array_to_global_array(array, mesh(4, 2), spec) is array


def test_parts_in_the_layout_of_the_whole_are_not_copied():
    part = spread(PAIRS, mesh(4, 2).local_mesh, P("x", "y"))
    whole = multihost_utils.host_local_array_to_global_array(part, mesh(4, 2), P("x", "y"))
    holds(whole, PAIRS)
    for one, other in zip(part.addressable_shards, whole.addressable_shards, strict=True):
        assert one.data.unsafe_buffer_pointer() == other.data.unsafe_buffer_pointer()


@pytest.mark.parametrize("device", [0, 5])
def test_a_part_on_one_device_is_spread(device):
    part = jax.device_put(PAIRS, jax.devices()[device])
    whole = multihost_utils.host_local_array_to_global_array(part, mesh(4, 2), P("x", "y"))
    assert whole.sharding == NamedSharding(mesh(4, 2), P("x", "y"))
    holds(whole, PAIRS)


def test_a_part_that_no_axis_splits_is_the_same_everywhere():
    value = jnp.arange(6.0).reshape(2, 3)
    whole = multihost_utils.host_local_array_to_global_array(value, mesh(8), P())
    assert whole.shape == value.shape
    assert len(whole.addressable_shards) == jax.local_device_count()
    np.testing.assert_array_equal(whole, value)


def test_a_part_may_lie_whole_on_each_device_of_its_process():
    hosts = mesh(1, 8, names=["host", "device"])
    value = jnp.arange(6.0).reshape(2, 3)
    whole = multihost_utils.host_local_array_to_global_array(value, hosts, P("host", None))
    assert whole.shape == (2 * jax.process_count(), 3)
    shards = whole.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 3)] * 8
    assert all(shard.index == shards[0].index for shard in shards)
    holds(whole, np.asarray(value))


def test_the_part_of_a_process_is_on_its_own_devices():
    array = spread(PAIRS, mesh(4, 2), P("x", "y"))
    part = multihost_utils.global_array_to_host_local_array(array, mesh(4, 2), P("x"))
    assert part.sharding == NamedSharding(mesh(4, 2).local_mesh, P("x"))
    holds(part, PAIRS)


@pytest.mark.parametrize(
    "name", ["host_local_array_to_global_array", "global_array_to_host_local_array"]
)
def test_none_is_no_spec(name):
    with pytest.raises(ValueError, match="`None` is not a valid input to the pspecs argument"):
        getattr(multihost_utils, name)(ROWS, mesh(4, 2), None)


def test_all_devices_live():
    with multihost_utils.live_devices(jax.devices()) as alive:
        assert set(alive) == set(jax.devices())
