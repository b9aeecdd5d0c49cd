"""A tree of arrays as a picture."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from arrays.device_grids import placements
from shoal.draw.describe import Placed, draw_tree
from shoal.draw.media.svg import picture_svg
from shoal.draw.media.terminal import to_text
from shoal.draw.page import picture_page
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import owners

MESH = Mesh({"data": 4, "model": 2})


def init():
    layer = {"kernel": np.ones((64, 256), np.float32), "bias": np.ones(64, np.float32)}
    return {"layers": [layer] * 3, "head": np.ones((8, 8), np.float16), "step": 7}


SHAPES = jax.eval_shape(init)
LAYOUTS = shoal.match_layouts({"**/kernel": ("data", "model"), "**": ()}, SHAPES, mesh=MESH)


def test_a_tree_of_layouts_and_shapes():
    assert (
        shoal.describe(LAYOUTS, shape=SHAPES)
        == """\
8 leaves on data=4 model=2
┌────────────────────┬─────────────────┬───────────────┬────────────┬─────────┬────────┐
│ leaf               │      array      │    layout     │ per device │ in all  │ copies │
├────────────────────┼─────────────────┼───────────────┼────────────┼─────────┼────────┤
│ head               │  float16[8,8]   │    (-, -)     │   128 B    │  128 B  │   8    │
├────────────────────┼─────────────────┼───────────────┼────────────┼─────────┼────────┤
│ layers/*/bias ×3   │   float32[64]   │      (-)      │   768 B    │  768 B  │   8    │
├────────────────────┼─────────────────┼───────────────┼────────────┼─────────┼────────┤
│ layers/*/kernel ×3 │ float32[64,256] │ (data, model) │   24 KiB   │ 192 KiB │   1    │
├────────────────────┼─────────────────┼───────────────┼────────────┼─────────┼────────┤
│ step               │     int32[]     │      ()       │    4 B     │   4 B   │   8    │
└────────────────────┴─────────────────┴───────────────┴────────────┴─────────┴────────┘
24.88 KiB per device, 192.9 KiB in all; 24.11 KiB without replication
whole on every device: 900 B in 5 of 8 leaves"""
    )


def test_arrays_are_described_as_their_layouts_and_shapes():
    state = shoal.create(init, layouts=LAYOUTS)
    assert shoal.describe(state) == shoal.describe(LAYOUTS, shape=SHAPES)
    jax.tree.map(lambda array: array.delete(), state)
    assert shoal.describe(state) == shoal.describe(LAYOUTS, shape=state)


def test_a_prefix_of_layouts_and_values_of_the_host():
    text = shoal.describe(Layout(MESH, "data", None), shape=(8, 8))
    assert "[8, 8] as Layout(data, -" in text
    array = shoal.put(np.ones((8, 8), np.float32), Layout(MESH, "data", None))
    text = shoal.describe({"x": array, "epoch": 3})
    assert "on the host" in text
    assert "256 B in all" in text


def test_describe_refuses_trees_that_do_not_fit_their_shapes():
    with pytest.raises(UsageError, match="has no sizes; pass the tree of shapes, too"):
        shoal.describe(LAYOUTS)
    with pytest.raises(UsageError, match=r"describe: \['head'\]: shape \(8, 8\) has rank 2"):
        shoal.describe(LAYOUTS | {"head": Layout(MESH, None, None, None)}, shape=SHAPES)
    with pytest.raises(UsageError, match=r"\['haed'\]: a layout, but no leaf; did you mean"):
        shoal.describe({"haed": Layout(MESH)}, shape={"head": SHAPES["head"]})


def test_the_same_picture_as_svg_and_as_a_page():
    leaves = [Placed("w", (8, 4), "float32", 4, Layout(MESH, "data", None))]
    picture = draw_tree(leaves)
    assert "float32[8,4]" in picture_svg(picture)
    assert "32 B per device, 128 B in all; 16 B without replication" in picture_page(picture)


def test_a_tree_of_many_kinds_of_leaves_is_cut():
    leaves = [Placed(f"w{n}", (n,), "int8", 1, Layout(MESH, None)) for n in range(100)]
    picture = draw_tree(leaves)
    assert len(picture.panels[0].rows) == 60
    assert picture.notes[-1] == "59 of 100 rows are shown"
    assert draw_tree([]).notes == ["nothing is placed on devices"]


@given(st.lists(placements(), max_size=4))
def test_sums_are_those_of_all_devices(pairs):
    leaves = [Placed(f"w{n}", shape, "int8", 1, layout) for n, (layout, shape) in enumerate(pairs)]
    held: dict[int, int] = {}
    for layout, shape in pairs:
        who = owners(layout, shape)
        sizes = np.prod(who.stop - who.start, axis=1, dtype=int)
        for device, size in zip(layout.mesh.device_ids.ravel().tolist(), sizes, strict=True):
            held[device] = held.get(device, 0) + int(size)
    if not held:
        return
    low, high = min(held.values()), max(held.values())
    said = f"{high} B per device" if low == high else f"{low} B to {high} B per device"
    assert draw_tree(leaves).notes[0].startswith(said)


def test_leaf_on_one_device_is_not_counted_as_replicated():
    one = Placed("a", (3,), "float32", 4, Layout(Mesh({}, device_ids=[5]), None))
    split = Placed("b", (8,), "float32", 4, Layout(Mesh({"x": 8}), "x"))
    assert "whole on every device" not in to_text(draw_tree([one, split]))
    whole = Placed("c", (8,), "float32", 4, Layout(Mesh({"x": 8}), None))
    assert "whole on every device: 32 B in 1 of 3 leaves" in to_text(draw_tree([one, split, whole]))
