"""SVG of topologies, by structure: what is there, how often, and that nothing is cut off."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from draw.wired_topologies import (
    LARGE,
    NAMESPACE,
    SAMPLE,
    elements,
    points_outside,
    scene_of,
    texts_outside,
)
from shoal.draw.media.palette import style
from shoal.draw.wiring.mesh_scene import draw_wires
from shoal.draw.wiring.wires_svg import wires_svg
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse


@pytest.mark.parametrize("text", SAMPLE)
def test_all_of_a_scene_is_drawn(text):
    scene = scene_of(text, SAMPLE[text])
    svg = wires_svg(scene)
    assert len(elements(svg, "g", "chip")) == len(scene.chips)
    assert len(elements(svg, "rect", "host")) == len(scene.hosts)
    assert len(elements(svg, "path", "link")) == sum(not link.wraps for link in scene.links)
    wraps = sum(part.wraps for part in (*scene.links, *scene.bundles))
    assert len(elements(svg, "path", "wrap")) == wraps
    assert len(elements(svg, "path", "bundle")) == len(scene.bundles)
    assert len(elements(svg, "g", "arrow")) == len(scene.arrows)
    shown = [element.text for element in elements(svg, "text", "id")]
    assert sorted(map(int, shown)) == sorted(d.id for c in scene.chips for d in c.devices)


@pytest.mark.parametrize("text", [*SAMPLE, *LARGE])
def test_nothing_reaches_beyond_the_picture(text):
    svg = wires_svg(scene_of(text, {**SAMPLE, **LARGE}[text]))
    assert texts_outside(svg) == []
    assert points_outside(svg) == []
    assert len(svg) < 2_500_000


def test_4096_chips_are_small_and_all_there():
    scene = scene_of("v4:16x16x16", LARGE["v4:16x16x16"])
    svg = wires_svg(scene)
    assert len(elements(svg, "g", "chip")) == 4096
    assert elements(svg, "text", "id") == []
    assert len(elements(svg, "g", "arrow")) == 128
    # a mark for the sides of each plane, in two dims, and the links from the last to the first
    assert len(elements(svg, "path", "wrap")) == 2 * 16 + 1
    assert float(ET.fromstring(svg).get("width")) < 1400


def test_hovering_a_chip_says_what_it_is():
    svg = wires_svg(scene_of("v5e:4x8 x 2 slices", SAMPLE["v5e:4x8 x 2 slices"]))
    titles = [element.find(NAMESPACE + "title").text for element in elements(svg, "g", "chip")]
    assert titles[-1] == "chip at (3, 7) of slice 1\ndevice 63, process 15: data=3 model=8"
    arrow = elements(svg, "g", "arrow")[0].find(NAMESPACE + "title").text
    assert arrow == "data: 0 to 2, 2 links"


def test_svg_has_an_aria_label_that_describes_the_picture():
    root = ET.fromstring(wires_svg(scene_of("v5e:2x4", SAMPLE["v5e:2x4"])))
    assert root.get("role") == "img"
    label = root.get("aria-label")
    assert label.startswith(
        "v5e:2x4: data=2 model=4, 8 chips, 2 hosts. data=2: 2 hops, the longest"
    )
    assert "Same fill: same ring of model, 2 in all." in label


def test_same_fill_means_same_ring():
    scene = scene_of("v5p:4x4x4", SAMPLE["v5p:4x4x4"])
    fills = {}
    for group, chip in zip(elements(wires_svg(scene), "g", "chip"), scene.chips, strict=True):
        fills.setdefault(group.find(NAMESPACE + "rect").get("class"), set()).add(
            chip.devices[0].group
        )
    assert sorted(map(sorted, fills.values())) == [[0], [1], [2], [3]]


def test_names_that_markup_obeys_are_escaped():
    name = "<a&\"b'\x1b\n"
    svg = wires_svg(draw_wires(parse("v5e:2x2"), Mesh({name: 4})))
    assert any("<a&" in element.text for element in elements(svg, "text"))
    assert "\x1b" not in svg


def test_there_is_a_colour_by_day_and_by_night_for_every_class():
    sheet = style()
    day, night = sheet.split("@media (prefers-color-scheme:dark)")
    for selector in (".paper", ".host", ".link", ".g0", ".g31", ".a0 path", ".none"):
        assert f".shoal {selector}{{" in day
        assert f".shoal {selector}{{" in night
