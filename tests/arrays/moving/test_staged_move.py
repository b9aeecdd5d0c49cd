"""Moves by way of host memory: the same values, and never both shards on a device."""

import functools
import gc
import random
from collections import Counter

import jax
import numpy as np
import pytest

from plan.transfer.collectives_by_hand import all_layouts
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.moving import staged_move
from shoal.arrays.moving.plan_relayout import compiled_programs, plan_relayout
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.pack import pack
from shoal.arrays.placing.put import put
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.transfer import staging

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
MIXED = Mesh({"x": 2, "y": 3}, device_ids=[5, 0, 3, 1, 4, 2])
TURNED = Mesh({"x": 3, "y": 2})
ROWS, TILES = Layout(CUBE, ("a", "b", "c"), None), Layout(CUBE, "c", "b")
CHUNK = 8192


@pytest.fixture(params=["one process", "as between processes"])
def way(request, monkeypatch):
    """Both ways; the one between processes with chunks of 8 KiB."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)
    if request.param != "one process":
        monkeypatch.setattr(staged_move, "by_host_alone", lambda source, target: False)
        monkeypatch.setattr("shoal.arrays.moving.plan_relayout.by_host_alone", lambda *_: False)
    return request.param


def held_bytes():
    """Return what every device holds: what only a cycle keeps alive is held, too."""
    held, seen = Counter(), set()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            where = shard.data.unsafe_buffer_pointer()
            if where not in seen:
                seen.add(where)
                held[shard.device.id] += shard.data.nbytes
    return held


@pytest.mark.parametrize(
    ("here", "there", "shape"),
    [(CUBE, CUBE, (56, 80)), (CUBE, CUBE, (8, 24, 16)), (MIXED, TURNED, (66, 30)),
     (MIXED, MIXED, (36,))],
)  # fmt: skip
@pytest.mark.parametrize("donate", [True, False])
def test_every_value_comes_to_its_place(way, here, there, shape, donate):
    rank = len(shape)
    pairs = [(a, b) for a in all_layouts(here, rank) for b in all_layouts(there, rank)]
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for source, target in random.Random(rank).sample(pairs, 6):
        array = put(values, source)
        moved = relayout(array, target, donate=donate, staged=True)
        assert moved.sharding == sharding_of(target)
        np.testing.assert_array_equal(np.asarray(moved), values)
        assert array.is_deleted() == (donate and plan_relayout(moved, source).way != "none")


@pytest.mark.parametrize("dtype", ["bool", "int8", "complex64", "bfloat16", "float8_e5m2", "int4"])
def test_bits_survive(way, dtype):
    words = np.random.default_rng(0).integers(0, 256, (64, 64 * np.dtype(dtype).itemsize), np.uint8)
    words = {"int4": words % 16, "bool": words % 2}.get(dtype, words)
    array = put(words.view(dtype), ROWS)
    as_put = np.asarray(array).view(np.uint8)
    moved = relayout(array, TILES, donate=True, staged=True)
    assert moved.dtype == dtype
    np.testing.assert_array_equal(np.asarray(moved).view(np.uint8), as_put)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize(
    ("source", "target"),
    [(ROWS, TILES), (TILES, ROWS), (Layout(CUBE, None, "a"), Layout(CUBE, None, "b"))],
)  # fmt: skip
def test_staged_move_stays_below_its_planned_peak(way, source, target, donate, monkeypatch):
    plan = plan_relayout(put(np.ones((104, 88), np.float32), source), target)
    claimed = plan.staged_peak_bytes(donate=donate)
    gc.collect()  # what other tests left; not again, for it takes longer than the move
    before, peaks = held_bytes(), []
    array = put(np.ones((104, 88), np.float32), source)
    first = held_bytes() - before

    def watch(name, beside=lambda part: 0):
        """Measure whenever a function has run, its program's own memory included."""
        inner = getattr(staged_move, name)

        def run(*arguments):
            result = inner(*arguments)
            peaks.append(max((held_bytes() - before).values()) + beside(arguments[1]))
            return result

        monkeypatch.setattr(staged_move, name, run)

    @functools.cache
    def temp_bytes(part):
        stats = [each.memory_analysis() for each in compiled_programs(part, np.dtype(np.float32))]
        return max(each.temp_size_in_bytes for each in stats)

    watch("move_as_planned", temp_bytes)
    watch("upload")
    moved = relayout(array, target, donate=donate, staged=True)
    shards = plan.transfer.shard_bytes
    assert set(first.values()) == {shards[0]}
    assert set((held_bytes() - before).values()) == {shards[1] + (0 if donate else shards[0])}
    assert max([*peaks, shards[0]]) <= claimed
    assert claimed <= (max(shards) if donate else sum(shards)) + CHUNK
    assert len(peaks) > (3 if way != "one process" else 0)
    np.testing.assert_array_equal(np.asarray(moved), 1)


def test_staged_move_of_keys_and_of_placed_arrays(way):
    keys = put(jax.random.split(jax.random.key(0), 8), Layout(CUBE, "a"))
    tree = {"keys": keys, "right": put(np.ones((8, 8), np.float32), ROWS)}
    wanted = np.asarray(jax.random.key_data(keys))
    moved = relayout(tree, {"keys": Layout(CUBE, "b"), "right": ROWS}, staged=True, donate=True)
    assert moved["right"] is tree["right"]
    assert not moved["right"].is_deleted()
    assert keys.is_deleted()
    np.testing.assert_array_equal(jax.random.key_data(moved["keys"]), wanted)


def test_array_twice_in_a_tree_is_freed_after_its_last_use(way):
    tied = put(np.ones((8, 8), np.float32), ROWS)
    moved = relayout([tied, tied, tied], [TILES, ROWS, TILES], donate=True, staged=True)
    assert moved[1] is tied
    assert not tied.is_deleted()
    moved = relayout([tied, tied], [TILES, Layout(CUBE, None, "a")], donate=True, staged=True)
    assert tied.is_deleted()
    for array in moved:
        np.testing.assert_array_equal(np.asarray(array), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pending_sum_is_carried_out(way, dtype):
    mesh = Mesh({"x": 4, "y": 2}, axis_types="explicit")
    for target in (Layout(mesh, "x"), Layout(mesh, None), Layout(Mesh({"z": 8}), "z")):
        terms = pack([np.full(2, n, dtype) for n in range(8)],
                     Layout(mesh, "x", partial={"y": "sum"}))  # fmt: skip
        whole = relayout(terms, target, staged=True, donate=True)
        assert np.asarray(whole).tolist() == [1, 1, 5, 5, 9, 9, 13, 13]
        assert layout_of(whole) == target
        assert terms.is_deleted()


def test_scalars_other_devices_and_arrays_of_no_items():
    half = Layout(Mesh({"x": 4}, device_ids=[7, 1, 2, 0]), None, "x")
    for value, source, target in (
        (np.float32(3), Layout(CUBE), Layout(Mesh({"x": 8}, device_ids=range(7, -1, -1)))),
        (np.ones((0, 8), np.float32), ROWS, Layout(CUBE, None, "a")),
        (np.arange(64, dtype=np.float32).reshape(8, 8), ROWS, half),
    ):
        moved = relayout(put(value, source), target, staged=True)
        assert moved.sharding == sharding_of(target)
        np.testing.assert_array_equal(np.asarray(moved), value)


def test_weakly_typed_arrays_stay_so(way):
    weak = jax.device_put(jax.numpy.full((8, 8), 1.5), sharding_of(ROWS))
    assert relayout(weak, TILES, staged=True, donate=True).weak_type


def test_refused_staged_move_leaves_the_arrays_intact(monkeypatch):
    array = put(np.ones((8, 8), np.float32), ROWS)
    with pytest.raises(UsageError, match="is being differentiated, and staged=True moves nothing"):
        jax.grad(lambda x: relayout(x, TILES, staged=True).sum())(array)
    with pytest.raises(UsageError, match="chooses the way: omit way="):
        relayout(array, TILES, staged=True, way="collectives")
    half = Layout(Mesh({"x": 4}), "x", None)
    monkeypatch.setattr(staged_move, "by_host_alone", lambda source, target: False)
    with pytest.raises(UsageError, match=r"\['w'\]: cannot be staged: there are no collectives"):
        relayout({"w": array, "v": array}, {"w": half, "v": TILES}, staged=True, donate=True)
    assert not array.is_deleted()


def test_staged_peak_of_a_large_array_agrees_with_the_compiler(monkeypatch):
    """256 MiB a device, dims with large primes: compiled, not run."""
    monkeypatch.setattr("shoal.arrays.moving.plan_relayout.by_host_alone", lambda *_: False)
    source, target = Layout(CUBE, ("a", "b"), None), Layout(CUBE, "c", ("b", "a"))
    shape = (8 * 2003, 8 * 2089)
    plan = plan_relayout(
        jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding_of(source)), target
    )
    largest = max(plan.transfer.shard_bytes)
    assert largest > 250 << 20
    assert plan.staged_peak_bytes(donate=True) == largest
    assert plan.staged_peak_bytes(donate=False) <= sum(plan.transfer.shard_bytes)
