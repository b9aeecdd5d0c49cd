"""Pages, layouts and bars: one file each, the same in words, nothing from elsewhere."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draw.wired_topologies import NAMESPACE, SAMPLE, elements, scene_of, texts_outside
from shoal.draw.bars import Bar, bars_svg
from shoal.draw.layout import draw_layout
from shoal.draw.media.svg import picture_svg
from shoal.draw.mesh import draw_mesh
from shoal.draw.page import picture_page, wires_page
from shoal.draw.wiring.mesh_scene import draw_wires
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.testing.strategies import layouts, meshes

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps what is inside."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(text):
    reader = Reader(text)
    assert reader.open == []
    return reader


@pytest.mark.parametrize("text", ["v5e:2x4", "v5e:4x8 x 2 slices", "gpu:4 hosts x 8", "flat:24"])
def test_a_page_of_wires_is_whole_and_fetches_nothing(text):
    scene = scene_of(text, SAMPLE[text])
    reader = read(wires_page(scene))
    assert reader.tags.count("svg") == 1
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert {name for name, _ in reader.attributes} & {"src", "href"} == set()
    page = wires_page(scene).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//|url\(|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert ("role", "img") in reader.attributes
    rows = page.partition("<details>")[2].count("<tr>") - 1
    assert rows == sum(len(chip.devices) for chip in scene.chips)
    for axis in scene.axes:
        assert axis.far in reader.words


def test_names_that_markup_obeys_are_escaped():
    mesh = Mesh({"<b>&": 4})
    pages = [
        wires_page(draw_wires(parse("v5e:2x2"), mesh)),
        picture_page(draw_mesh(mesh)),
        picture_page(draw_layout(Layout(mesh, "<b>&"))),
    ]
    for page in pages:
        reader = read(page)
        assert "b" not in reader.tags
        assert any("<b>&" in word for word in reader.words)


def test_a_page_lists_what_fits():
    page = wires_page(scene_of("v4:16x16x16", {"data": 64, "model": 64}))
    assert page.partition("<details>")[2].count("<tr>") == 1 + 1024 + 1


@given(layouts(meshes(max_devices=8), max_rank=4))
def test_blocks_of_a_layout_are_drawn_and_only_replicas_share_a_fill(layout):
    picture = draw_layout(layout)
    svg = picture_svg(picture)
    cells = [c for panel in picture.panels for _, row in panel.rows for c in row if c.colour >= 0]
    blocks = elements(svg, "g", "chip")
    assert len(blocks) == len(cells)
    fills = [block.find(NAMESPACE + "rect").get("class") for block in blocks]
    numbers = [cell.colour for cell in cells]
    assert len(set(zip(fills, numbers, strict=True))) == len(set(numbers)) == len(set(fills))
    shown = [element.text for element in elements(svg, "text", "id")]
    assert shown == [line for cell in cells for line in cell.text.split("\n")]
    assert texts_outside(svg) == []
    read(picture_page(picture))


def test_a_layout_says_its_bytes_and_its_places():
    layout = Layout(Mesh({"data": 4, "model": 2}), "data", "model")
    svg = picture_svg(draw_layout(layout, (8, 4), 2, "bfloat16"))
    assert "8 B per device, 64 B in all; each block on 1 device" in ET.fromstring(svg).get(
        "aria-label"
    )
    titles = [element.find(NAMESPACE + "title").text for element in elements(svg, "g", "chip")]
    assert titles[1] == "0:2, 2:4\n1"


def test_large_pictures_stay_small_and_whole():
    mesh = Mesh({"a": 64, "x": 64, "y": 64}, processes=3)
    for picture in (draw_mesh(mesh), draw_layout(Layout(mesh, "a", "x", "y"))):
        svg = picture_svg(picture)
        assert texts_outside(svg) == []
        assert len(svg) < 300_000


ROWS = [("data", 0.002, "2 ms"), ("model", 0.008, "8 ms"), ("seq", 0.0, "nothing")]


def test_bars_are_as_long_as_their_values():
    svg = bars_svg("Time per axis", ROWS)
    wide = [float(element.get("width")) for element in elements(svg, "rect", "bar")]
    assert wide == [90.0, 360.0]  # and none for nothing
    assert len(elements(svg, "rect", "track")) == 3
    assert texts_outside(svg) == []
    assert "data: 2 ms; model: 8 ms; seq: nothing." in svg


@given(st.lists(st.tuples(st.text("abc", max_size=9), st.floats(0, 1e9), st.just("1 s"))))
def test_any_bars_are_drawn(rows):
    ET.parse(io.StringIO(bars_svg("Time", rows)))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_values_that_no_bar_shows_are_refused(value):
    with pytest.raises(UsageError, match="'x' has"):
        bars_svg("", [Bar("x", value, "?")])
