"""What a relayout says of itself beforehand, against the program that runs."""

import random

import jax
import numpy as np
import pytest

from arrays.planned_moves import run
from plan.transfer.collectives_by_hand import all_layouts, least_bytes
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.moving.plan_relayout import plan_relayout
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.put import put
from shoal.draw.ribbons import ribbons_of
from shoal.errors import UsageError
from shoal.plan.compiled import received_bytes_of
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer import move_steps
from shoal.plan.transfer.move_steps import CHUNK_BYTES
from shoal.plan.transfer.plan import plan_transfer

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
ROWS, COLUMNS = Layout(CUBE, ("a", "b", "c"), None), Layout(CUBE, None, ("a", "b", "c"))


@pytest.mark.parametrize("rank", [2, 3])
def test_its_claims_are_those_of_the_program(rank):
    pairs = [(a, b) for a in all_layouts(CUBE, rank) for b in all_layouts(CUBE, rank)]
    shape = (16, 8, 8)[:rank]
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    ways = set()
    for source, target in random.Random(5).sample(pairs, 12):
        array = put(values, source)
        plan = plan_relayout(array, target, way="collectives")
        ways.add(plan.way)
        assert plan.bound_bytes == least_bytes(source, target, shape, 4) <= plan.received_bytes
        if plan.way != "none":
            assert received_bytes_of(plan.program().as_text(), 8) == plan.received_bytes
            assert plan.default_received_bytes >= plan.received_bytes
            assert plan.peak_bytes >= plan.transfer.bounds.peak_bytes
        moved = relayout(array, target, way="collectives")
        np.testing.assert_array_equal(np.asarray(moved), values)
    assert "collectives" in ways


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ROWS, COLUMNS),
        (Layout(CUBE, "c", "b"), Layout(CUBE, ("c", "b", "a"), None)),
        (Layout(CUBE, ("a", "b"), None), Layout(CUBE, None, "c")),
        (Layout(CUBE, "a", None), Layout(CUBE, None, "b")),
    ],
)
def test_a_large_array_needs_no_more_than_a_chunk_beside_both_shards(source, target):
    """Of 256 MiB a device, on the side that holds more: compiled, not run."""
    fewest = min(layout.num_shards(0) * layout.num_shards(1) for layout in (source, target))
    shape = (8192, 8192 * fewest)
    x = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding_of(source))
    plan = plan_relayout(x, target, way="collectives")
    assert plan.way == "collectives"
    assert max(plan.transfer.shard_bytes) == 256 << 20
    assert plan.peak_bytes <= sum(plan.transfer.shard_bytes) + CHUNK_BYTES
    assert received_bytes_of(plan.program().as_text(), 8) == plan.received_bytes


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((8 * 2039, 16 * 1031), (None, ("a", "c")), (("b", "c"), None)),  # dims of primes
        ((8 * 2039, 16 * 1031), (("a", "c"), "b"), (("a", "b"), None)),
        ((8, 1 << 25), (None, "a"), (("a", "b", "c"), None)),  # only a later dim can be cut
        ((56, 56, 85600), (None, None, ("b", "a")), (("c", "a"), None, None)),
        ((56, 56, 85528), (None, "b", "c"), (("a", "b"), "c", None)),
        ((8, 8, 1 << 22), ("a", "b", "c"), (("a", "b"), None, "c")),
        ((104, 1608, 1592), ("b", "a", None), (("b", "c"), None, None)),  # one row each, else
    ],
)
def test_moves_of_divisible_dims_are_cut_into_chunks(shape, source, target):
    """Of 128 to 512 MiB a device: compiled, not run."""
    layouts = Layout(CUBE, *source), Layout(CUBE, *target)
    array = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding_of(layouts[0]))
    plan = plan_relayout(array, layouts[1], way="collectives")
    assert plan.peak_bytes <= sum(plan.transfer.shard_bytes) + CHUNK_BYTES
    assert received_bytes_of(plan.program().as_text(), 8) == plan.received_bytes


@pytest.mark.parametrize("shape", [(96,), (104,), (96, 48), (104, 56), (96, 48, 24), (8, 56, 88)])
def test_chunk_by_chunk_every_item_comes_to_its_place(shape, monkeypatch):
    monkeypatch.setattr(move_steps, "CHUNK_BYTES", 256)
    rank = len(shape)
    pairs = [(a, b) for a in all_layouts(CUBE, rank) for b in all_layouts(CUBE, rank)]
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for source, target in random.Random(7).sample(pairs, 5):
        steps = plan_transfer(source, target, shape, 4).steps
        moved, texts = run(jax.device_put(values, sharding_of(source)), source, target, steps)
        np.testing.assert_array_equal(np.asarray(moved), values)
        if move_steps.chunks_of(steps, shape, 4) is not None:
            assert "known_trip_count" in texts[0]


def test_plan_relayout_takes_abstract_arrays():
    shape = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding_of(ROWS))
    plan = plan_relayout(shape, COLUMNS, way="collectives")
    assert (plan.way, plan.received_bytes, plan.bound_bytes) == ("xla", 1792, 1792)
    assert [str(step) for step in plan.steps] == ["all_to_all over a+b+c of dim 0 → dim 1"]
    assert plan.seconds(parse("v5e:2x4")) > 0
    assert str(plan).startswith("way xla\nLayout(a+b+c, - @ a=2 b=2 c=2)\n→ Layout(-, a+b+c")
    assert str(plan).count("way") == 1


def test_devices_that_share_memory_are_planned_as_a_copy():
    array = put(np.ones((64, 64), np.float32), ROWS)
    plan = plan_relayout(array, COLUMNS)
    assert (plan.way, plan.received_bytes) == ("copy", 1792)
    assert plan.peak_bytes == sum(plan.transfer.shard_bytes)
    assert "all_to_all over a+b+c of dim 0 → dim 1" in str(plan)
    other = plan_relayout(array, COLUMNS, way="collectives")
    assert plan != other
    assert plan.program().as_text() == other.program().as_text()


def test_traffic_of_a_plan_counts_bytes_between_hosts():
    plan = plan_relayout(put(np.ones((64, 64), np.float32), ROWS), COLUMNS)
    traffic = plan.traffic(parse("gpu:2 hosts x 4"))
    assert traffic.num_bytes == {"same host": 8 * 3 * 256, "other host": 8 * 4 * 256}
    assert plan.traffic().num_bytes == {"same host": 8 * 7 * 256, "other host": 0}
    assert "other host 8 KiB" in " ".join(ribbon.words for ribbon in ribbons_of(traffic))


def test_where_nothing_moves_no_program_runs():
    plan = plan_relayout(put(np.ones((8, 8), np.float32), ROWS), ROWS)
    assert (plan.way, plan.received_bytes, plan.peak_bytes) == ("none", 0, 2 * 32)
    with pytest.raises(UsageError, match="runs 0 programs"):
        plan.program()


def test_between_devices_that_differ():
    half = Layout(Mesh({"x": 4}), "x", None)
    plan = plan_relayout(put(np.ones((8, 8), np.float32), ROWS), half)
    assert plan.way == "copy"
    assert plan.received_bytes == plan.bound_bytes == 64
    assert plan == plan_relayout(put(np.zeros((8, 8), np.float32), ROWS), half)
    assert "JAX copies it" in str(plan)
    with pytest.raises(UsageError, match="cost model does not cover"):
        plan.seconds(parse("v5e:2x4"))
    with pytest.raises(UsageError, match="same devices in one order"):
        _ = plan.default_received_bytes


def test_where_xla_gathers_everything():
    array = put(np.ones((64, 64), np.float32), Layout(CUBE, "c", "b"))
    plan = plan_relayout(array, Layout(CUBE, ("c", "b", "a"), None), way="collectives")
    assert plan.received_bytes * 12 == plan.default_received_bytes
    assert plan.peak_bytes < plan.default_peak_bytes / 3


@pytest.mark.parametrize(
    ("x", "layout", "words"),
    [
        (np.ones((8, 8)), ROWS, "not on devices yet"),
        ({"a": 1}, ROWS, r"\['a'\]: an int is not on devices yet"),
        (jax.random.split(jax.random.key(0), 8), ROWS, "PRNG keys move as XLA"),
        (jax.ShapeDtypeStruct((8, 8), np.float32), ROWS, "names no sharding"),
        (
            jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding_of(ROWS)),
            "a",
            "needs a mesh",
        ),
        (
            jax.ShapeDtypeStruct((8, 9), np.float32, sharding=sharding_of(ROWS)),
            COLUMNS,
            "8 or 16 would fit",
        ),
    ],
)
def test_plan_relayout_refuses_invalid_requests(x, layout, words):
    with pytest.raises(UsageError, match=words):
        plan_relayout(x, layout)


def test_a_tree_has_a_plan_for_each_leaf_and_all_problems_are_named():
    array = put(np.ones((8, 8), np.float32), ROWS)
    plans = plan_relayout({"a": array, "b": [array, array]}, {"a": COLUMNS, "b": ROWS})
    assert plans == {"a": plan_relayout(array, COLUMNS), "b": [plan_relayout(array, ROWS)] * 2}
    narrow = jax.ShapeDtypeStruct((8, 9), np.float32, sharding=sharding_of(ROWS))
    with pytest.raises(UsageError) as caught:
        plan_relayout({"a": narrow, "b": narrow, "c": array}, COLUMNS)
    assert [line.split(":")[0] for line in caught.value.problems] == ["['a']", "['b']"]


def test_only_a_way_can_be_asked_for():
    array = put(np.ones((8, 8), np.float32), ROWS)
    for function in (plan_relayout, relayout):
        with pytest.raises(UsageError, match="pass 'collectives', or nothing"):
            function(array, COLUMNS, way="fast")


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_of_a_value_inside_jit_grad_or_vmap_one_line_says_what_to_write(transform):
    array = put(np.ones((64, 64), np.float32), ROWS)
    with pytest.raises(UsageError, match="is a value inside jit, grad or vmap: plan") as caught:
        transform(lambda x: (plan_relayout(x, COLUMNS), x.sum())[1])(array)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)
