"""Plans of collectives, carried out on NumPy arrays: right at every step, and near the bound."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.transfer.collectives_by_hand import (
    all_layouts,
    carried_out,
    least_bytes,
    numbered,
    shards,
)
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer.blocks import exchange_copies
from shoal.plan.transfer.collective import bases, by_seconds, count_states, every, shortest
from shoal.plan.transfer.move_steps import pairs, received_bytes

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
MIXED = Mesh({"a": 2, "b": 3, "c": 4})
TURNED = Mesh({"b": 3, "c": 4, "a": 2}, device_ids=MIXED.device_ids.transpose(1, 2, 0).ravel())
REORDERED = Mesh({"x": 4, "y": 2}, device_ids=[3, 1, 4, 0, 5, 2, 7, 6])
MESHES = [
    (CUBE, CUBE), (Mesh({"x": 2, "y": 4}), Mesh({"x": 4, "y": 2})), (CUBE, REORDERED),
    (MIXED, MIXED), (MIXED, TURNED), (MIXED, Mesh({"c": 4, "b": 3, "a": 2})),
    (Mesh({"x": 6}), Mesh({"x": 3, "y": 2})), (Mesh({}), Mesh({"x": 1})),
]  # fmt: skip


def must_be_right(source, target, shape, steps, item_bytes=4):
    """Each step leads to its layout, no device holds too much, and bytes are counted right."""
    whole = numbered(shape)
    held, most = shards(source, whole), math.prod(shape)
    most = max(math.prod(layout.shard_shape(shape)) for layout in (source, target))
    total = np.zeros(source.mesh.size, np.int64)
    for step in steps:
        held, received = carried_out([step], held, shape)
        for device, values in shards(step.after, whole).items():
            np.testing.assert_array_equal(held[device], values)
            assert values.size <= most
        counted = received_bytes(step, shape, item_bytes)
        ids = step.before.mesh.device_ids.ravel().tolist()
        assert counted.tolist() == [received.get(d, 0) * item_bytes for d in ids]
        total += counted
    for device, values in shards(target, whole).items():
        np.testing.assert_array_equal(held[device], values)
    return int(total.max())


@pytest.mark.parametrize(("here", "there"), MESHES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_each_step_leads_to_its_layout(here, there, rank):
    pairs = [(a, b) for a in all_layouts(here, rank) for b in all_layouts(there, rank)]
    shape = {1: (48,), 2: (24, 48), 3: (24, 24, 24)}[rank]
    for source, target in random.Random(rank).sample(pairs, min(len(pairs), 8)):
        steps = shortest(source, target, shape, 4)
        received = must_be_right(source, target, shape, steps)
        bound = least_bytes(source, target, shape, 4)
        assert bound <= received <= 2.34 * bound


@pytest.mark.parametrize("rank", [2, 3])
def test_on_powers_of_two_nothing_is_received_in_vain(rank):
    layouts = all_layouts(CUBE, rank)
    pairs = random.Random(rank).sample([(a, b) for a in layouts for b in layouts], 60)
    for source, target in pairs:
        shape = (8, 8, 8)[:rank]
        steps = shortest(source, target, shape, 4)
        total = sum((received_bytes(step, shape, 4) for step in steps), np.zeros(8, np.int64))
        assert total.max() == least_bytes(source, target, shape, 4)


@given(st.data())
def test_any_two_meshes_of_the_same_devices(data):
    sizes = data.draw(st.sampled_from([(2, 6), (3, 4), (12,), (2, 2, 3), (4, 3), (6, 2), (1, 12)]))
    others = data.draw(st.sampled_from([(2, 6), (3, 4), (12,), (3, 2, 2), (4, 3), (6, 2)]))
    ids = data.draw(st.permutations(range(12)))
    here = Mesh([(f"x{i}", n) for i, n in enumerate(sizes)])
    there = Mesh([(f"y{i}", n) for i, n in enumerate(others)], device_ids=ids)
    source = data.draw(st.sampled_from(all_layouts(here, 2)))
    target = data.draw(st.sampled_from(all_layouts(there, 2)))
    must_be_right(source, target, (12, 24), shortest(source, target, (12, 24), 4))


def test_array_that_is_placed_as_requested_needs_no_steps():
    grid = Mesh({"x": 4, "y": 2})
    same = Mesh({"p": 2, "q": 2, "r": 2})
    assert shortest(Layout(grid, "x"), Layout(same, ("p", "q")), (8,), 4) == ()
    assert shortest(Layout(grid, None), Layout(REORDERED, None), (8,), 4) == ()


def test_a_dim_that_few_tiles_divide_is_never_cut_unevenly():
    """Rows of 2 cannot be cut in 4 on the way."""
    grid = Mesh({"x": 4, "y": 2})
    for source in all_layouts(grid, 2):
        for target in all_layouts(grid, 2):
            if all(2 % each.num_shards(0) == 0 for each in (source, target)):
                must_be_right(source, target, (2, 8), shortest(source, target, (2, 8), 4))


def test_pending_sums_are_carried_out():
    grid = Mesh({"x": 2, "y": 4})
    terms = Layout(grid, None, "x", partial={"y": "sum"})
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 99, (4, 8, 8))
    ids = grid.device_ids
    held = {int(ids[x, y]): whole[y][:, 4 * x : 4 * x + 4] for x in range(2) for y in range(4)}
    for target in (Layout(grid, None, "x"), Layout(grid, "y", "x"), Layout(grid, ("y", "x"), None)):
        steps = shortest(terms, target, (8, 8), 4)
        after, _ = carried_out(steps, held, (8, 8))
        for device, values in shards(target, whole.sum(0)).items():
            np.testing.assert_array_equal(after[device], values)
    assert [str(step) for step in shortest(terms, Layout(grid, "y", "x"), (8, 8), 4)] == [
        "reduce_scatter over y.0+y.1 of dim 0"
    ]


def test_digits_are_merged_where_there_are_too_many():
    pod = Mesh({"data": 64, "model": 64})
    rows, columns = Layout(pod, ("data", "model"), None, None), Layout(pod, None, "model", "data")
    mine, other = bases(rows, columns, 700)
    assert mine.mesh == other.mesh
    assert count_states(len(mine.mesh.axis_names), 3) <= 700
    assert mine.mesh.size == 4096
    assert shortest(rows, columns, (4096, 64, 64), 4, most_states=700)


def test_every_state_is_listed_once():
    for digits, rank in [(0, 2), (1, 0), (3, 2), (3, 3), (4, 2)]:
        states = list(every(digits, rank))
        assert len(set(states)) == len(states) == count_states(digits, rank)


def test_seconds_weigh_what_is_far():
    """Over slow links between two hosts goes what is smallest."""
    topology = parse("v5e:4x4 x 2 slices")
    mesh = Mesh({"host": 2, "x": 4, "y": 4})
    source, target = Layout(mesh, ("host", "x"), None), Layout(mesh, None, "y")
    steps = shortest(source, target, (64, 64), 4, weigh=by_seconds(topology))
    must_be_right(source, target, (64, 64), steps)


@given(st.data())
def test_an_exchange_is_the_same_writes_on_every_device(data):
    """Also where processes make that some devices send more than others."""
    sizes = data.draw(st.sampled_from([(2, 4), (8,), (2, 2, 2), (4, 2)]))
    others = data.draw(st.sampled_from([(2, 4), (8,), (2, 2, 2)]))
    owners = data.draw(st.permutations([0, 0, 0, 0, 1, 1, 1, 1]))
    here = Mesh([(f"x{i}", n) for i, n in enumerate(sizes)], processes=owners)
    there = Mesh([(f"y{i}", n) for i, n in enumerate(others)], processes=owners)
    before = data.draw(st.sampled_from(all_layouts(here, 2)))
    after = data.draw(st.sampled_from(all_layouts(there, 2)))
    grid = [max(before.num_shards(d), after.num_shards(d)) for d in (0, 1)]
    blocks = numbered(grid)
    held, wanted = shards(before, blocks), shards(after, blocks)
    written = {d: np.full_like(wanted[d], -1) for d in range(8)}
    for each in exchange_copies(before, after):
        sent = {
            receiver: held[sender][tuple(each.reads[sender])] for sender, receiver in each.sends
        }
        assert each.receives.tolist() == [d in sent for d in range(8)]
        for device in np.flatnonzero(~each.idle):
            kept = held[device][tuple(each.keeps[device])]
            written[device][tuple(each.writes[device])] = sent.get(device, kept)
    for device in range(8):
        np.testing.assert_array_equal(written[device], wanted[device])


def test_a_permute_stays_within_processes_where_it_can():
    """Tile 0 lies on devices 0 and 2, and shall lie on 1 and 3; each process has one of each."""
    processes = [[0, 1], [1, 0]]
    mesh = Mesh({"host": 2, "x": 2}, processes=processes)
    reordered = Mesh({"host": 2, "x": 2}, device_ids=[[1, 0], [3, 2]], processes=[[1, 0], [0, 1]])
    moved = pairs(Layout(mesh, "x"), Layout(reordered, "x"))
    assert sorted(moved) == [(0, 3), (1, 2), (2, 1), (3, 0)]
