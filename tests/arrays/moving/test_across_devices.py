"""Moves to other devices by permutes, as between processes, on the devices of this one."""

from __future__ import annotations

import random
from functools import partial

import jax
import numpy as np
import pytest

from plan.transfer.collectives_by_hand import all_layouts, least_bytes
from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.moving import across_devices, agreed_move
from shoal.arrays.moving.across_devices import programs_across
from shoal.arrays.moving.plan_relayout import plan_relayout as plan_any_way
from shoal.arrays.moving.relayout import relayout as relayout_any_way
from shoal.arrays.placing.pack import pack
from shoal.arrays.placing.put import put
from shoal.errors import UsageError
from shoal.plan.compiled import received_bytes_of
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer import move_steps
from shoal.plan.transfer.move_steps import CHUNK_BYTES

FIRST, SECOND = Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "b": 2}, device_ids=[4, 5, 6, 7])
TURNED, MIXED = (
    Mesh({"x": 4}, device_ids=[7, 5, 6, 4]),
    Mesh({"a": 2, "b": 2}, device_ids=[5, 2, 3, 4]),
)
ALL, THREE, ONE = (
    Mesh({"a": 2, "b": 2, "c": 2}),
    Mesh({"x": 3}, device_ids=[6, 0, 3]),
    Mesh({}, device_ids=[5], processes=0),
)
ROWS, COLUMNS = Layout(FIRST, ("a", "b"), None), Layout(SECOND, None, ("a", "b"))


relayout = partial(relayout_any_way, way="collectives")
plan_relayout = partial(plan_any_way, way="collectives")


def same_bits(array, values):
    return all(
        np.asarray(shard.data).tobytes() == np.ascontiguousarray(values[shard.index]).tobytes()
        for shard in array.addressable_shards
    )


def sample(number, *, rank=2):
    """Layouts of pairs of meshes of different devices, in an order that is always the same."""
    meshes = [FIRST, SECOND, TURNED, MIXED, ALL, THREE, ONE]
    pairs = [
        (source, target)
        for here in meshes
        for there in meshes
        if {*here.device_ids.flat} != {*there.device_ids.flat}
        for source in all_layouts(here, rank)
        for target in all_layouts(there, rank)
    ]
    return random.Random(3).sample(pairs, number)


@pytest.mark.parametrize(("source", "target"), sample(14))
def test_each_pair_moves_the_least_bytes_that_the_plan_and_the_program_say(source, target):
    shape = (24, 24)
    values = np.random.default_rng(0).integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    array = put(values, source)
    plan = plan_relayout(array, target)
    assert plan.way == "permutes"
    assert plan.received_bytes == plan.bound_bytes == least_bytes(source, target, shape, 4)
    num_devices = len(plan.transfer.bounds.devices)
    assert received_bytes_of(plan.program().as_text(), num_devices) == plan.received_bytes
    moved = relayout(array, target)
    assert moved.sharding == sharding_of(target)
    assert same_bits(moved, values)
    assert not array.is_deleted()


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float4_e2m1fn", "int4", "uint2",
     "bool", "int8", "uint16", "complex64", "float32"],
)  # fmt: skip
def test_all_bits_of_all_dtypes_come_over(dtype):
    bits = {"int4": 4, "float4_e2m1fn": 4, "uint2": 2, "bool": 1}.get(dtype, 8)
    size = np.dtype(dtype).itemsize
    words = np.random.default_rng(0).integers(0, 1 << bits, (16, 32 * size), np.uint8)
    values = words.view(dtype)
    array = put(values, ROWS)
    plan = plan_relayout(array, COLUMNS)
    assert same_bits(relayout(array, COLUMNS), values)
    assert received_bytes_of(plan.program().as_text(), 8) == plan.received_bytes == 4 * 32 * size


@pytest.mark.parametrize("dtype", ["bfloat16", "float4_e2m1fn", "complex64"])
def test_bits_survive_the_cutting_of_parts(dtype, monkeypatch):
    bits = 4 if dtype == "float4_e2m1fn" else 8
    words = np.random.default_rng(0).integers(0, 1 << bits, (16, 256), np.uint8)
    array = put(words.view(dtype), ROWS)
    monkeypatch.setattr(move_steps, "CHUNK_BYTES", words.nbytes // 4 - 1)
    programs_across.cache_clear()
    assert plan_relayout(array, COLUMNS).parts > 1
    assert same_bits(relayout(array, COLUMNS), words.view(dtype))
    programs_across.cache_clear()


def test_keys_scalars_and_arrays_without_items():
    keys = jax.random.split(jax.random.key(0), 8)
    moved = relayout(put(keys, Layout(FIRST, ("a", "b"))), Layout(THREE, None))
    assert layout_of(moved) == Layout(THREE, None)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
    moved = relayout(put(keys, Layout(FIRST, "b")), Layout(TURNED, "x"))
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
    number = relayout(put(np.float32(2.5), Layout(FIRST)), Layout(SECOND))
    assert (number.shape, float(number), layout_of(number)) == ((), 2.5, Layout(SECOND))
    plan = plan_relayout(put(np.float32(2.5), Layout(FIRST)), Layout(SECOND))
    assert received_bytes_of(plan.program().as_text(), 8) == plan.received_bytes == 4
    for empty in (np.ones((0, 8), np.float32), np.ones((8, 0), "bfloat16")):
        moved = relayout(put(empty, ROWS), COLUMNS)
        assert (moved.shape, moved.dtype, layout_of(moved)) == (empty.shape, empty.dtype, COLUMNS)


@pytest.mark.parametrize(("source", "target"), sample(3) + sample(4, rank=3))
def test_part_by_part_every_item_comes_to_its_place(source, target, monkeypatch):
    shape = (192, 192, 48)[: source.rank]
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    array = put(values, source)
    plan = plan_relayout(array, target)
    assert plan.parts == 1
    monkeypatch.setattr(move_steps, "CHUNK_BYTES", max(plan.transfer.shard_bytes) - 1)
    programs_across.cache_clear()
    assert plan.parts > 1
    assert f"in {plan.parts} parts" in str(plan)
    each = received_bytes_of(plan.program().as_text(), len(plan.transfer.bounds.devices))
    assert each * plan.parts == plan.received_bytes == plan.bound_bytes
    assert same_bits(relayout(array, target, donate=True), values)
    assert array.is_deleted()
    programs_across.cache_clear()


@pytest.mark.parametrize(
    ("source", "target"),
    [(ROWS, COLUMNS), (ROWS, Layout(SECOND, ("b", "a"), None)),
     (Layout(ALL, ("a", "b", "c"), None), Layout(MIXED, "a", "b")),
     (Layout(FIRST, "a", None), Layout(ALL, None, ("a", "b", "c")))],
)  # fmt: skip
def test_a_device_holds_its_own_shards_and_a_chunk(source, target):
    """Of 256 MiB a device, on the side that holds more: compiled, not run."""
    fewest = min(layout.num_shards(0) * layout.num_shards(1) for layout in (source, target))
    shape = (8192, 8192 * fewest)
    plan = plan_relayout(
        jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding_of(source)), target
    )
    assert max(plan.transfer.shard_bytes) == 256 << 20
    most = max(
        sum(size for size, layout in zip(plan.transfer.shard_bytes, (source, target), strict=True)
            if device in layout.mesh.device_ids)
        for device in range(8)
    )  # fmt: skip
    assert plan.transfer.bounds.peak_bytes == most
    assert most < plan.peak_bytes <= most + CHUNK_BYTES


def test_a_small_array_goes_at_once():
    plan = plan_relayout(put(np.ones((64, 64), np.float32), ROWS), COLUMNS)
    assert plan.parts == 1
    assert max(plan.transfer.shard_bytes) < plan.peak_bytes <= 4 * max(plan.transfer.shard_bytes)


def test_the_plan_reads_well():
    plan = plan_relayout(put(np.ones((64, 64), np.float32), ROWS), COLUMNS)
    assert str(plan).splitlines() == [
        "way permutes",
        "Layout(a+b, - @ a=2 b=2)",
        "→ Layout(-, a+b @ Mesh(a=2, b=2; 4 cpu devices, 1 process, ids 4..7, auto axes))",
        "shape (64, 64), 4 bytes an element",
        "a device receives 4,096 B at most; no plan can receive less than 4,096 B",
        "PointToPoint(16 sends in 4 rounds, 16,384 B; 8 devices on 1 process)",
        "round  sends  between processes  bytes  largest",
        *(f"    {n}      4                  0  4,096    1,024" for n in range(4)),
    ]
    assert plan.steps == ()
    assert plan.seconds(parse("v5e:2x4")) > 0
    with pytest.raises(UsageError, match="same devices in one order"):
        _ = plan.default_received_bytes


def test_the_same_move_is_compiled_once():
    array = put(np.ones((16, 16), np.float32), ROWS)
    relayout(array, COLUMNS)
    misses = programs_across.cache_info().misses
    relayout([array, array], COLUMNS)
    assert programs_across.cache_info().misses == misses


def test_nothing_passes_through_the_host():
    array = put(np.arange(64, dtype=np.float32).reshape(8, 8), ROWS)
    jax.block_until_ready(relayout(array, COLUMNS))  # compiled
    with jax.transfer_guard("disallow_explicit"):
        moved = relayout(array, COLUMNS)
    assert layout_of(moved) == COLUMNS


def test_donated_trees_in_which_some_arrays_stay():
    tied = put(np.ones((8, 8), np.float32), ROWS)
    moved = relayout({"a": tied, "b": tied, "c": tied}, {"a": COLUMNS, "b": ROWS, "c": COLUMNS},
                     donate=True)  # fmt: skip
    assert moved["b"] is tied
    assert not tied.is_deleted()
    alone = put(np.ones((8, 8), np.float32), ROWS)
    moved = relayout([alone, alone], [COLUMNS, Layout(ALL, "a", None)], donate=True)
    assert alone.is_deleted()
    assert all(same_bits(array, np.ones((8, 8), np.float32)) for array in moved)


def test_a_pending_sum_is_carried_out_first():
    mesh = Mesh({"x": 4, "y": 2}, axis_types="explicit")
    terms = pack([np.full(2, n, np.float32) for n in range(8)],
                 Layout(mesh, "x", partial={"y": "sum"}))  # fmt: skip
    moved = relayout(terms, Layout(TURNED, "x"), donate=True)
    assert layout_of(moved) == Layout(TURNED, "x")
    assert np.asarray(moved).tolist() == [1, 1, 5, 5, 9, 9, 13, 13]
    assert terms.is_deleted()


@pytest.mark.parametrize("mesh", [FIRST, ALL])
def test_the_mesh_of_jax_set_mesh_does_not_matter(mesh):
    array = put(np.ones((8, 8), np.float32), ROWS)
    with jax.set_mesh(jax_mesh(mesh)):
        assert same_bits(relayout(array, COLUMNS), np.ones((8, 8), np.float32))


def test_under_differentiation_it_is_refused_between_processes(monkeypatch):
    arrays = [put(np.ones((8, 8), np.float32), ROWS) for _ in range(2)]

    def loss(tree):
        return relayout_any_way(tree, [Layout(FIRST, None, "a"), COLUMNS], donate=True)[1].sum()

    monkeypatch.setattr(across_devices, "_are_of_several_processes", lambda devices: True)
    with pytest.raises(
        UsageError, match=r"\[1\]: is being differentiated, and is to move to other"
    ):
        jax.grad(loss)(arrays)
    assert not any(array.is_deleted() for array in arrays)
    assert plan_any_way(arrays[0], COLUMNS).by_permutes


def test_within_one_process_cotangents_travel_back():
    array = put(np.arange(64, dtype=np.float32).reshape(8, 8), ROWS)
    slope = jax.grad(lambda x: (relayout(x, COLUMNS) ** 2).sum())(array)
    np.testing.assert_array_equal(slope, 2 * np.asarray(array))


def test_move_of_too_many_permutes_is_refused(monkeypatch):
    monkeypatch.setattr(agreed_move, "MOST_PERMUTES", 2)
    array = put(np.ones((8, 8), np.float32), ROWS)
    with pytest.raises(UsageError, match=r"would take 4 permutes to reach .* may take 2; go by"):
        relayout(array, COLUMNS)
    with pytest.raises(UsageError, match="plan_relayout: the array: would take 4 permutes"):
        plan_relayout(array, COLUMNS)
    assert same_bits(relayout(array, Layout(SECOND, ("a", "b"), None)), np.ones((8, 8), np.float32))
