"""What each process holds together of an array, against the regions of its devices one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.process_boxes import process_box
from shoal.plan.shards import region
from shoal.testing.strategies import layouts

PAIR = Mesh({"x": 2, "y": 2}, processes=[0, 0, 1, 1])


@st.composite
def shared_meshes(draw):
    """Meshes whose axes processes cut, in mesh order or in any; sometimes in no order at all."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    count = math.prod(sizes)
    blocks = [draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in sizes]
    processes = np.zeros(count, np.int64)
    for coords, size, parts in zip(np.indices(sizes).reshape(len(sizes), count), sizes, blocks,
                                   strict=True):  # fmt: skip
        processes = processes * parts + coords // (size // parts)
    how = draw(st.sampled_from(["blocks", "blocks", "permuted", "any"]))
    if how == "permuted":
        processes = processes[draw(st.permutations(range(count)))]
    elif how == "any":
        processes = np.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    ids = draw(st.permutations(range(count))) if draw(st.booleans()) else None
    axes = list(zip("abc", sizes, strict=False))
    types = {name: draw(st.sampled_from(["auto", "explicit"])) for name, _ in axes}
    return Mesh(axes, device_ids=ids, processes=processes, axis_types=types)


def held(layout, process):
    """Return the first and last index of what a process holds, or None if that is no box."""
    shape = layout.global_shape((1,) * layout.rank)
    cells = [
        tuple(piece.start for piece in region(layout, shape, device))
        for device in layout.mesh.local(process).tolist()
    ]
    first = tuple(map(min, zip(*cells, strict=True))) if layout.rank else ()
    last = tuple(map(max, zip(*cells, strict=True))) if layout.rank else ()
    spans = [range(low, high + 1) for low, high in zip(first, last, strict=True)]
    counts = {cells.count(cell) for cell in itertools.product(*spans)}
    return (first, tuple(map(len, spans))) if len(counts) == 1 and counts != {0} else None


@given(st.data())
def test_boxes_are_what_the_regions_of_the_devices_make(data):
    layout = data.draw(layouts(data.draw(shared_meshes()), max_rank=3))
    mesh = layout.mesh
    boxes = {process: held(layout, process) for process in mesh.process_indices}
    if None in boxes.values() or len({box[1] for box in boxes.values()}) > 1:
        with pytest.raises(UsageError, match="each process's devices form one block of it"):
            process_box(layout, mesh.process_indices[0])
        return
    for process, (first, shards) in boxes.items():
        box = process_box(layout, process)
        assert box.shards == shards
        assert tuple(n * s for n, s in zip(box.place, shards, strict=True)) == first
        whole = layout.global_shape((1,) * layout.rank)
        assert tuple(n * s for n, s in zip(box.boxes, shards, strict=True)) == whole
        assert box.holders == tuple(p for p, other in boxes.items() if other[0] == first)
        assert sorted(box.layout.mesh.device_ids.ravel()) == sorted(mesh.local(process))
        assert box.layout.mesh.process_indices == (process,)
        for device in mesh.local(process).tolist():
            inside = region(box.layout, shards, device)
            outside = region(layout, whole, device)
            assert [piece.start + n for piece, n in zip(inside, first, strict=True)] == [
                piece.start for piece in outside
            ]


def test_the_axes_of_the_mesh_are_kept_where_a_process_has_a_grid_of_them():
    mesh = Mesh({"x": 4, "y": 2}, processes=[0] * 4 + [1] * 4, axis_types={"y": "explicit"})
    own = process_box(Layout(mesh, ("x", "y"), None), 1).layout
    assert own.dims == (("x", "y"), None)
    assert dict(own.mesh.axes) == {"x": 2, "y": 2}
    assert dict(own.mesh.axis_types) == {"x": "auto", "y": "explicit"}
    assert own.mesh.device_ids.tolist() == [[4, 5], [6, 7]]


def test_in_another_order_there_is_an_axis_for_each_dim_that_is_cut():
    crossed = Mesh({"x": 2, "y": 4}, processes=[0, 1, 2, 3, 1, 0, 3, 2], axis_types="explicit")
    own = process_box(Layout(crossed, None, "y"), 2).layout
    assert (dict(own.mesh.axes), own.dims) == ({"y": 2}, (None, "y"))
    assert own.mesh.device_ids.tolist() == [2, 7]
    own = process_box(Layout(crossed, None, "y"), 1).layout
    assert own.mesh.device_ids.tolist() == [4, 1]  # in the order of their shards
    own = process_box(Layout(crossed, None), 0).layout
    assert (dict(own.mesh.axes), own.dims) == ({"x+y": 2}, (None,))
    assert dict(own.mesh.axis_types) == {"x+y": "explicit"}


def test_a_process_without_devices_knows_the_shape_of_a_box():
    box = process_box(Layout(PAIR, "x", "y"), 7)
    assert box.layout is None
    assert (box.shards, box.boxes, box.holders) == ((1, 2), (2, 1), ())


def test_process_box_errors_name_the_process_axes_and_device_positions():
    dealt = Mesh({"x": 4}, processes=[0, 1, 0, 1])
    with pytest.raises(UsageError) as error:
        process_box(Layout(dealt, None, "x"), 0)
    assert str(error.value).startswith(
        "process 0 holds shards 0,2 of dim 1, which x=4 cuts into 4: that is not one block (its "
        "devices are at (x) = (0), (2)) (and 1 more like it); order the mesh"
    )
    twice = Mesh({"x": 2, "y": 3}, processes=[0, 0, 1, 0, 1, 1])
    with pytest.raises(UsageError, match="lie on 2 of its devices, others on 1"):
        process_box(Layout(twice, "x"), 0)
    uneven = Mesh({"x": 3}, processes=[0, 0, 1])
    words = r"of the 3 shards of dim 0 \(x=3\) process 0 holds 2 and process 1 1, but all parts"
    with pytest.raises(UsageError, match=words):
        process_box(Layout(uneven, "x"), 1)
    with pytest.raises(UsageError, match="own different numbers of them: feed takes the rows"):
        process_box(Layout(uneven, "x"), 1)
    assert process_box(Layout(uneven, None), 1).holders == (0, 1)


@example("a", "a+")
@given(st.text("a+", min_size=1), st.text("a+", min_size=1))
def test_no_two_axes_get_one_name(one, other):
    if one == other:
        return
    mesh = Mesh({one: 2, "b": 2, other: 2}, processes=[0, 1, 1, 0, 1, 0, 0, 1])
    own = process_box(Layout(mesh, one, other), 0).layout
    assert len(own.mesh.axes) == 2
