"""Who holds what, against a brute force that assigns every element by itself."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import choose_writers, owners, region, replica_index
from shoal.testing.strategies import layouts, meshes, shapes


def pieces(indices, count):
    """Cut a list as people would: ceil-sized pieces until nothing is left."""
    length = math.ceil(len(indices) / count)
    cut = [indices[i : i + length] for i in range(0, len(indices), length)] if length else []
    return cut + [[] for _ in range(count - len(cut))]


def held_along(layout, dim, size, coords, uneven):
    """The indices of a dim that a device at `coords` (by axis) holds."""
    axes = layout.axes_of_dims[dim]
    if uneven == "ceil":
        all_coords = itertools.product(*(range(layout.mesh.axes[axis]) for axis in axes))
        number = list(all_coords).index(tuple(coords[axis] for axis in axes))
        return pieces(list(range(size)), layout.num_shards(dim))[number]
    indices = list(range(size))
    for axis in axes:
        indices = pieces(indices, layout.mesh.axes[axis])[coords[axis]]
    return indices


def brute_force(layout, shape, uneven):
    """For each device in mesh order, the set of the elements that it holds."""
    mesh, held = layout.mesh, []
    for index in np.ndindex(mesh.shape):
        coords = dict(zip(mesh.axis_names, index, strict=True))
        rows = [held_along(layout, dim, size, coords, uneven) for dim, size in enumerate(shape)]
        held.append(tuple(tuple(row) for row in rows))
    return held


cases = layouts(meshes(max_devices=16), max_rank=3).flatmap(
    lambda layout: st.tuples(st.just(layout), shapes(layout))
)
rules = st.sampled_from(["ceil", "axis_by_axis"])


@given(cases, rules)
def test_regions_are_those_of_the_brute_force(case, uneven):
    layout, shape = case
    ids = layout.mesh.device_ids.ravel().tolist()
    for device_id, rows in zip(ids, brute_force(layout, shape, uneven), strict=True):
        own = region(layout, shape, device_id, uneven)
        assert [list(range(s.start, s.stop)) for s in own] == [list(row) for row in rows]
        assert all(0 <= s.start <= s.stop <= n for s, n in zip(own, shape, strict=True))
        assert all(s.start == n for s, n in zip(own, shape, strict=True) if s.start == s.stop)


@given(cases, rules)
def test_owners_agree_with_region_and_replica_index(case, uneven):
    layout, shape = case
    held = owners(layout, shape, uneven)
    seen: dict[int, int] = {}
    regions: dict[int, tuple] = {}
    for position, device_id in enumerate(layout.mesh.device_ids.ravel().tolist()):
        own = region(layout, shape, device_id, uneven)
        assert held.start[position].tolist() == [s.start for s in own]
        assert held.stop[position].tolist() == [s.stop for s in own]
        box = int(held.box[position])
        assert held.replica[position] == seen.get(box, 0)
        assert replica_index(layout, shape, device_id, uneven) == held.replica[position]
        seen[box] = seen.get(box, 0) + 1
        corners = tuple((s.start, s.stop) for s in own)
        assert regions.setdefault(box, corners) == corners
    assert sorted(regions) == list(range(held.num_boxes))


@given(cases, rules)
def test_boxes_tile_the_array(case, uneven):
    layout, shape = case
    held = owners(layout, shape, uneven)
    count = np.zeros(shape, dtype=int)
    for box in range(held.num_boxes):
        position = int(np.flatnonzero(held.box == box)[0])
        corner = zip(held.start[position], held.stop[position], strict=True)
        count[tuple(slice(start, stop) for start, stop in corner)] += 1
    assert (count == 1).all()


@given(layouts(meshes(max_devices=16), max_rank=3), st.data())
def test_even_boxes_are_numbered_row_major(layout, data):
    held = owners(layout, data.draw(shapes(layout, even=True)))
    firsts = [
        held.start[np.flatnonzero(held.box == box)[0]].tolist() for box in range(held.num_boxes)
    ]
    assert firsts == sorted(firsts)


@given(cases)
def test_each_box_is_written_by_one_process_that_holds_it(case):
    layout, shape = case
    held = owners(layout, shape)
    processes = layout.mesh.processes.ravel()
    for box, writer in enumerate(held.writer.tolist()):
        assert writer in processes[held.box == box]


def best_possible(candidates, sizes):
    """The least maximal load, by trying every choice."""
    loads = []
    for choice in itertools.product(*candidates):
        load: dict[int, int] = {}
        for process, size in zip(choice, sizes, strict=True):
            load[process] = load.get(process, 0) + size
        loads.append(max(load.values()))
    return min(loads)


@given(
    st.integers(1, 4).flatmap(
        lambda k: st.lists(
            st.tuples(st.lists(st.integers(0, 4), min_size=k, max_size=k), st.integers(0, 5)),
            min_size=1,
            max_size=5,
        )
    )
)
def test_writers_are_balanced_within_twice_the_best(rows):
    holders = np.array([row for row, _ in rows])
    sizes = np.array([size for _, size in rows])
    writer = choose_writers(holders, sizes)
    load = np.bincount(writer, weights=sizes)
    for box, process in enumerate(writer.tolist()):
        assert process in holders[box]
    assert load.max() <= 2 * best_possible([sorted(set(row)) for row, _ in rows], sizes)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 40))
def test_equal_boxes_are_spread_as_evenly_as_can_be(copies, split, devices_per_process):
    mesh = Mesh(
        {"copies": copies, "split": split},
        processes=np.arange(copies * split) // devices_per_process,
    )
    held = owners(Layout(mesh, "split"), (split * 3,))
    holders = [set(mesh.processes.ravel()[held.box == box].tolist()) for box in range(split)]
    distinct = {frozenset(row) for row in holders}
    if all(not (a & b) for a, b in itertools.combinations(distinct, 2)):
        for kind in distinct:
            written = [w for w, row in zip(held.writer, holders, strict=True) if row == kind]
            counts = [written.count(process) for process in kind]
            assert max(counts) - min(counts) <= 1


def test_writers_of_far_apart_process_numbers():
    holders = np.array([[10**12, 5], [10**12, 5]])
    assert sorted(choose_writers(holders, np.array([1, 1])).tolist()) == [5, 10**12]


def test_uneven_sizes_within_a_class_go_back_and_forth():
    holders = np.tile([7, 8, 9], (5, 1))
    assert choose_writers(holders, np.array([5, 5, 5, 4, 4])).tolist() == [7, 8, 9, 9, 8]


def test_the_two_rules_differ_where_two_axes_split_an_uneven_dim():
    layout = Layout(Mesh({"x": 4, "y": 2}), ("x", "y"))
    at_once = [region(layout, (9,), d)[0] for d in range(8)]
    in_turn = [region(layout, (9,), d, uneven="axis_by_axis")[0] for d in range(8)]
    assert [s.stop - s.start for s in at_once] == [2, 2, 2, 2, 1, 0, 0, 0]
    assert [s.stop - s.start for s in in_turn] == [2, 1, 2, 1, 2, 1, 0, 0]


def test_position_and_id_are_two_things():
    mesh = Mesh({"x": 4}, device_ids=[30, 10, 20, 0], processes=[1, 1, 0, 0])
    layout = Layout(mesh, "x")
    assert region(layout, (8,), 30) == (slice(0, 2),)
    assert region(layout, (8,), 0) == (slice(6, 8),)
    assert owners(layout, (8,)).writer.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("ask", [region, replica_index])
def test_unknown_device_is_refused(ask):
    with pytest.raises(UsageError, match="device 9 is not in"):
        ask(Layout(Mesh({"x": 2}), "x"), (4,), 9)


def test_scarce_holders_write_what_only_they_can_take_over():
    mesh = Mesh({"a": 2, "b": 3}, processes=[0, 0, 0, 1, 2, 2])
    assert sorted(owners(Layout(mesh, "b"), (12,)).writer.tolist()) == [0, 1, 2]


def test_sizes_beyond_64_bits():
    layout = Layout(Mesh({"x": 8}, processes=[0, 0, 0, 0, 1, 1, 1, 1]), None, "x", None)
    shape = (1 << 61, (1 << 62) - 1, 1 << 62)
    for uneven in ("ceil", "axis_by_axis"):
        held = owners(layout, shape, uneven)
        for device in range(8):
            own = region(layout, shape, device, uneven)
            assert held.start[device].tolist() == [s.start for s in own]
            assert held.stop[device].tolist() == [s.stop for s in own]
    copies = Layout(Mesh({"r": 2, "x": 4}, processes=[0] * 4 + [1] * 4), "x", *[None] * 20)
    writer = owners(copies, (4,) + (1 << 62,) * 20).writer
    assert sorted(writer.tolist()) == [0, 0, 1, 1]
    assert region(Layout(Mesh({"x": 8}), "x"), (1 << 80,), 7) == (slice(7 << 77, 1 << 80),)
    with pytest.raises(UsageError, match=r"more than 2\^62"):
        owners(Layout(Mesh({"x": 8}), "x"), (1 << 63,))


def test_as_many_axes_as_a_mesh_can_have():
    mesh = Mesh({f"a{i}": 2 if i in (0, 63) else 1 for i in range(64)})
    layout = Layout(mesh, "a63", tuple(mesh.axis_names[:63]))
    assert owners(layout, (4, 4)).start.tolist() == [[0, 0], [2, 0], [0, 2], [2, 2]]


def test_bad_requests_are_refused():
    layout = Layout(Mesh({"x": 2}), "x")
    with pytest.raises(UsageError, match="rank 2"):
        owners(layout, (4, 4))
    with pytest.raises(UsageError, match="did you mean 'ceil'"):
        region(layout, (4,), 0, uneven="cei")
    with pytest.raises(UsageError, match="'ceil' or 'axis_by_axis'"):
        owners(layout, (4,), uneven="pad")
    with pytest.raises(UsageError, match="'ceil' or 'axis_by_axis'"):
        region(layout, (4,), 0, uneven=["ceil"])
    with pytest.raises(UsageError, match="partial"):
        owners(Layout(Mesh({"x": 2}), None, partial={"x": "sum"}), (4,))
