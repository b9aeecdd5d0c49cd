"""Moves by way of host memory between real processes."""

from __future__ import annotations

import gc
from collections import Counter

import jax
import numpy as np
import pytest

import shoal
from shoal import Layout
from shoal.arrays.moving import planned_move, staged_move
from shoal.errors import DivergenceError, UsageError
from shoal.plan.transfer import staging
from shoal.testing.cluster import Cluster

CHUNK = 8192
VALUE = np.arange(80 * 56, dtype=np.float32).reshape(80, 56)
PEAKS: list[int] = []


def set_up():
    """Move in small chunks, and note what the fullest device holds after each."""
    inner = planned_move.move_as_planned

    def watched(*arguments):
        moved = inner(*arguments)
        PEAKS.append(held_bytes())
        return moved

    staging.CHUNK_BYTES = CHUNK
    staged_move.move_as_planned = watched
    cube = shoal.make_mesh({"a": 2, "b": 2, "c": 2})
    ids = [device.id for device in jax.devices()]
    mixed = shoal.make_mesh({"rows": -1}, devices=[ids[n] for n in (5, 0, 7, 2, 4, 1, 6, 3)])
    return cube, mixed, shoal.make_mesh({"x": 4}, devices=jax.devices()[:4])


def held_bytes():
    gc.collect()
    buffers = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    total = Counter()
    for (device, _), count in buffers.items():
        total[device] += count
    return max(total.values(), default=0)


def holds(array, wanted, layout):
    assert shoal.layout_of(array) == layout
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])


def move_in_chunks():
    cube, mixed, first = set_up()
    rows, tiles = Layout(cube, ("a", "b", "c"), None), Layout(cube, "c", "b")
    for source, target, donate in (
        (rows, tiles, True),
        (tiles, Layout(mixed, "rows", None), False),
        (Layout(cube, None, "a"), Layout(cube, "b", None), True),
    ):
        array = shoal.put(VALUE, source)
        plan = shoal.plan_relayout(array, target)
        shards = plan.transfer.shard_bytes
        assert held_bytes() == shards[0]
        PEAKS.clear()
        moved = shoal.relayout(array, target, donate=donate, staged=True)
        holds(moved, VALUE, target)
        assert array.is_deleted() is donate
        assert len(PEAKS) > 1
        bound = (max(shards) if donate else sum(shards)) + CHUNK
        assert max(PEAKS) <= plan.staged_peak_bytes(donate=donate) <= bound
        del array, moved
    move_what_is_special(cube, rows, tiles)
    PEAKS.clear()
    alone = shoal.put(VALUE, Layout(first, "x", None))  # one process owns it, and needs no other
    columns = Layout(first, None, "x")
    holds(shoal.relayout(alone, columns, staged=True), VALUE, columns)
    array = shoal.put(VALUE, rows)
    with pytest.raises(UsageError) as refused:
        shoal.relayout({"w": array, "v": array}, {"w": columns, "v": tiles}, staged=True)
    assert not PEAKS
    shoal.relayout(array, rows, staged=jax.process_index() == 0)  # which sends nothing
    with pytest.raises(DivergenceError) as differs:
        shoal.barrier("compared")
    return str(refused.value), str(differs.value)


def move_what_is_special(cube, rows, tiles):
    """Narrow dtypes, PRNG keys, weakly typed arrays."""
    for dtype in ("bfloat16", "float8_e4m3fn", "int4"):
        words = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
        values = (words % 16 if dtype == "int4" else words).view(dtype)
        wanted = {s.device: np.asarray(s.data) for s in shoal.put(values, tiles).addressable_shards}
        moved = shoal.relayout(shoal.put(values, rows), tiles, donate=True, staged=True)
        for shard in moved.addressable_shards:
            got, want = (np.asarray(x).view(np.uint8) for x in (shard.data, wanted[shard.device]))
            np.testing.assert_array_equal(got, want)
    keys = jax.random.split(jax.random.key(3), 16)
    moved = shoal.relayout(shoal.put(keys, Layout(cube, "a")), Layout(cube, "b"), staged=True)
    holds(
        jax.random.key_data(moved), np.asarray(jax.random.key_data(keys)), Layout(cube, "b", None)
    )
    weak = jax.jit(lambda: jax.numpy.full((8, 8), 1.5), out_shardings=shoal.named_sharding(rows))()
    flat = Layout(shoal.make_mesh({"x": 8}), "x", None)  # the same shards
    assert weak.weak_type
    assert shoal.relayout(weak, flat).weak_type
    assert shoal.relayout(weak, tiles).weak_type
    assert shoal.relayout(weak, tiles, staged=True).weak_type


def test_two_processes_move_through_their_hosts():
    with Cluster(2, devices=4, start_method="fork") as cluster:
        (refused, differs), other = cluster.run(move_in_chunks)
    assert other[0] == refused
    assert "['w']: cannot be staged: there are no collectives from its sharding" in refused
    assert "staged=True" in differs
