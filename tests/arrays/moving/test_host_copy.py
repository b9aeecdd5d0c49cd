"""Moves within the memory of one process."""

import gc
import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.moving.host_copy import can_copy, copied
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.put import put
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
WHOLE, ROWS, COLUMNS = (
    Layout(MESH, *dims) for dims in [(None, None), ("data", None), (None, "data")]
)
GREAT = (2048, 1024)  # float32: so much that threads copy it


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize(("source", "target"), [(ROWS, COLUMNS), (COLUMNS, WHOLE), (WHOLE, ROWS)])
def test_large_arrays(source, target):
    values = np.arange(np.prod(GREAT), dtype=np.int32).reshape(GREAT)
    moved = relayout(put(values, source), target)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def test_a_tile_in_one_piece_is_not_written():
    array = put(np.ones(GREAT, np.float32), WHOLE)
    held = pointers(array)
    assert all(
        any(begin <= tile < begin + array.nbytes for begin in held)
        for tile in pointers(copied(array, sharding_of(ROWS)))
    )
    assert (
        len(set(pointers(copied(put(np.ones(GREAT, np.float32), ROWS), sharding_of(WHOLE))))) == 1
    )


@pytest.mark.parametrize("first", ["source", "result"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_buffer_leaves_those_that_share_it_alone(first):
    source = put(np.ones(GREAT, np.float32), WHOLE)
    result = copied(source, sharding_of(ROWS))
    donated, other = (source, result) if first == "source" else (result, source)
    overwritten = jax.jit(lambda x: x - 3, donate_argnums=0)(donated)
    np.testing.assert_array_equal(np.asarray(overwritten), -2)
    for shard in other.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), 1)


def test_replicas_that_share_memory_are_donated_apart():
    result = copied(put(np.ones(GREAT, np.float32), ROWS), sharding_of(WHOLE))
    shards = [shard.data for shard in result.addressable_shards]
    jax.jit(lambda x: x * 0, donate_argnums=0)(shards[0]).block_until_ready()
    np.testing.assert_array_equal(np.asarray(shards[1]), 1)


def test_arrays_that_device_put_would_change_are_not_copied():
    target = sharding_of(COLUMNS)
    with jax.enable_x64(True):
        wide = put(np.full((8, 8), 1 + 2**-40), ROWS)
    assert not can_copy(wide, target)
    moved = relayout(wide, COLUMNS)
    assert moved.dtype == np.float64
    assert (np.asarray(moved) == 1 + 2**-40).all()
    assert not can_copy(jax.random.split(jax.random.key(0), (8, 8)), target)
    assert not can_copy(jnp.full((8, 8), 1), target)  # weakly typed
    assert can_copy(put(np.ones((8, 8), "bfloat16"), ROWS), target)


@pytest.mark.parametrize(
    "dtype", ["int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
)
def test_packed_elements_are_copied_too(dtype):
    values = np.random.default_rng(0).integers(0, 2, (16, 24)).astype(dtype)
    ends = [ROWS, COLUMNS, WHOLE, Layout(MESH, "model", "data"), Layout(MESH, None, "model")]
    for source, target in itertools.permutations(ends, 2):
        array = put(values, source)
        assert can_copy(array, sharding_of(target))
        moved = relayout(array, target)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
        if not dtype.endswith("int1"):  # XLA does not compute with those
            doubled = jax.jit(lambda x: x + x)(moved)  # packed as programs expect
            np.testing.assert_array_equal(np.asarray(doubled), values + values)


def test_the_source_keeps_no_unpacked_copy():
    source, other = (jax.jit(lambda x: x + 1)(put(np.ones(GREAT, "int4"), ROWS)) for _ in range(2))
    jax.block_until_ready(relayout(other, COLUMNS))  # whatever is kept for good, is
    tracemalloc.start()
    try:
        jax.block_until_ready(relayout(source, COLUMNS))
        gc.collect()  # JAX lets go of host memory then
        assert tracemalloc.get_traced_memory()[0] < source.size // 8
    finally:
        tracemalloc.stop()
