"""Pictures: every block is shown with the devices that hold it, at any rank and size."""

import re
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.draw.describe import describe
from shoal.draw.layout import draw_layout
from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, elide
from shoal.draw.media.terminal import plain, render, to_text
from shoal.draw.mesh import draw_mesh
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.notation.words import Words
from shoal.plan.shards import region
from shoal.testing.strategies import layouts, meshes, shapes


def devices_of(text):
    """The ids in a cell: '0,2' or 'p0: 0..3' on each of its lines."""
    ids = []
    for line in text.splitlines():
        words = Words(line.rpartition(": ")[2], "Cell")
        ids += words.runs(10**6).tolist()
    return ids


@given(layouts(meshes(max_devices=8), max_rank=4), st.data())
def test_every_device_is_drawn_once_in_the_block_that_it_holds(layout, data):
    assume(len(layout.mesh.process_indices) <= 4)  # more are cut to what people can see
    shape = data.draw(shapes(layout))
    picture = draw_layout(layout, shape, item_bytes=4, name="x")
    ids = []
    for panel in picture.panels:
        for _, cells in panel.rows:
            assert len(cells) == len(panel.columns)
            for cell in cells:
                assert cell != GAP
                held = devices_of(cell.text)
                ids += held
                assert len({str(region(layout, shape, device)) for device in held}) == 1
    if len(picture.panels) < 4:
        assert sorted(ids) == sorted(layout.mesh.device_ids.ravel().tolist())
    to_text(picture)


@given(meshes(max_devices=8))
def test_every_device_of_a_mesh_is_drawn(mesh):
    picture = draw_mesh(mesh)
    ids = [
        int(cell.text.split()[0])
        for panel in picture.panels
        for _, cells in panel.rows
        for cell in cells
    ]
    if len(picture.panels) < 4:
        assert ids == mesh.device_ids.ravel().tolist()
    to_text(picture)


def test_a_layout_over_two_processes():
    mesh = Mesh({"data": 2, "model": 2}, processes=[0, 0, 1, 1])
    assert to_text(draw_layout(Layout(mesh, None, "model"), (4, 6), 2, "w ")) == (
        "w [4, 6] as Layout(-, model @ data=2 model=2 | processes 0x2,1x2)\n"
        "┌──────────────────────────────────┬───────┬───────┐\n"
        "│ dim 0 (whole) ↓  dim 1 (model) → │  0:3  │  3:6  │\n"
        "├──────────────────────────────────┼───────┼───────┤\n"
        "│ 0:4                              │ p0: 0 │ p0: 1 │\n"
        "│                                  │ p1: 2 │ p1: 3 │\n"
        "└──────────────────────────────────┴───────┴───────┘\n"
        "24 B per device, 48 B in all; each block on 2 devices"
    )


def test_a_mesh_over_two_processes():
    mesh = Mesh({"data": 2, "model": 2}, device_ids=[3, 2, 1, 0], processes=[0, 0, 1, 1])
    assert describe(mesh) == (
        "Mesh(data=2, model=2; 4 cpu devices, 2 processes, ids 3..0, auto axes)\n"
        "┌────────┬─────────┬─────────┐\n"
        "│        │ model 0 │ model 1 │\n"
        "├────────┼─────────┼─────────┤\n"
        "│ data 0 │  3 p0   │  2 p0   │\n"
        "├────────┼─────────┼─────────┤\n"
        "│ data 1 │  1 p1   │  0 p1   │\n"
        "└────────┴─────────┴─────────┘\n"
        "p: the process that owns the device"
    )


def test_large_things_are_cut_to_what_people_can_see():
    mesh = Mesh({"a": 64, "x": 64, "y": 64})
    for text in (describe(mesh), describe(Layout(mesh, "a", "x", "y"), shape=(128, 128, 640))):
        assert "4 of 64 panels are shown" in text
        assert "…" in text
        assert len(text.splitlines()) < 200
    assert "each block on 4096 devices" in describe(Layout(mesh, "x"))


def test_a_mesh_costs_what_is_drawn_of_it():
    text = describe(Mesh({"x": 1 << 20, "y": 1 << 20}, processes=3))
    assert "1099511627775" in text
    with pytest.raises(UsageError, match="cannot be drawn"):
        describe(Layout(Mesh({"x": 1 << 40}), "x"))


def test_names_that_terminals_obey_are_quoted():
    mesh = Mesh({"a\nb\x1b[31m": 2, "x\ny": 2})
    texts = [describe(mesh), describe(mesh.submesh()), describe(Layout(mesh, *mesh.axis_names))]
    texts.append(describe(Layout(mesh, None, partial={"a\nb\x1b[31m": "sum"})))
    for text in texts:
        assert "\x1b" not in text
        assert "\nb" not in text.replace("\\n", "")


def test_scalars_rows_and_pending_sums():
    mesh = Mesh({"x": 4})
    assert re.search(r"│ 0\.\.3 │", describe(Layout(mesh)))
    assert "dim 0 (x) →" in describe(Layout(mesh, "x"))
    assert "\ndim 0 (whole) →\n" in describe(Layout(mesh, None))  # wider than its table
    assert "pending: sum over x" in describe(Layout(mesh, None, partial={"x": "sum"}))


@given(
    st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=12),
    st.text("xy", max_size=9),
    st.text("vw", max_size=9),
    st.integers(1, 60),
)
def test_columns_that_do_not_fit_are_left_out_and_counted(columns, label, corner, width):
    corner = corner if label else ""  # without labels there is no corner
    panel = CellTable("", corner, columns, [(label, [Cell(name.upper()) for name in columns])])
    text = plain(render(Picture("", [panel], []), width), 1000)
    table = [line for line in text.splitlines() if line[:1] in tuple("┌│├└")]
    assert max(map(len, table), default=0) <= width
    shown = re.findall(r"[AB]+", text)
    count = len(shown)
    head, tail = columns[: (count + 1) // 2], columns[len(columns) - count // 2 :]
    assert shown == [name.upper() for name in (*head, *tail)]
    assert (f"{count} of {len(columns)} columns are shown" in text) == (0 < count < len(columns))
    least = 1 + (len(label) + 3) * bool(label) + len(columns[0]) + 3 + 4 * (len(columns) > 1)
    whole = 1 + (len(label) + 3) * bool(label) + sum(len(name) + 3 for name in columns)
    assert (count == 0) == (width < min(least, whole))
    assert (count == len(columns)) == (width >= whole)
    assert (f"{min(least, whole)} are needed" in text) == (count == 0)


@pytest.mark.parametrize("width", [20, 40, 80])
@given(layouts(meshes(max_devices=16), max_rank=3), st.sampled_from([1, 1000, 10**7]))
def test_nothing_is_cut_in_a_small_terminal(width, layout, factor):
    shape = layout.global_shape((factor,) * layout.rank)
    for picture in (draw_layout(layout, shape, 4, "x"), draw_mesh(layout.mesh)):
        cells = {label for panel in picture.panels for label, _ in panel.rows}
        for panel in picture.panels:
            cells |= {*panel.columns, panel.corner}
            cells |= {
                line for _, row in panel.rows for cell in row for line in cell.text.split("\n")
            }
        for line in to_text(picture, width).splitlines():
            if line.startswith("│"):
                assert {part.strip() for part in line.strip("│").split("│")} <= {*cells, "", "…"}


def test_omitted_rows_and_columns_of_a_picture_are_noted():
    mesh = Mesh({"data": 2, "model": 32})
    assert "13 of 32 columns are shown" in describe(mesh)
    assert "13 of 32 columns are shown" in describe(mesh)._repr_html_()
    text = to_text(draw_mesh(mesh), 40)
    assert "2 of 32 columns are shown" in text
    assert "│ model 0 │ … │ model 31 │" in text
    tall = describe(Layout(Mesh({"x": 64, "y": 64}), "x", "y"))
    assert "15 of 64 rows and 7 of 64 columns are shown" in tall


def test_a_picture_is_as_wide_as_the_terminal(monkeypatch):
    layout = Layout(Mesh({"data": 2, "model": 8}), "data", "model")
    monkeypatch.setenv("COLUMNS", "40")
    assert "columns are shown" not in describe(layout)  # into a file or a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = describe(layout)
    assert "4 of 8 columns are shown" in text
    assert max(map(len, text.splitlines())) <= 40


@given(st.lists(st.integers()), st.integers(3, 9))
def test_elide(items, limit):
    shown = elide(items, limit, None)
    assert len(shown) <= max(limit, 3)
    if len(items) <= limit:
        assert shown == items
    else:
        head, tail = shown[: shown.index(None)], shown[shown.index(None) + 1 :]
        assert head == items[: len(head)]
        assert tail == items[len(items) - len(tail) :]


def test_describe_refuses_unsupported_values_and_shapes():
    with pytest.raises(UsageError, match="not 3"):
        describe(3)
    with pytest.raises(UsageError, match="rank 2"):
        describe(Layout(Mesh({"x": 2}), "x"), shape=(4, 4))
