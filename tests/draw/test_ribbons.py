"""What a move sends, as a table and as ribbons: the same figures in both."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from shoal.draw.describe import describe
from shoal.draw.ribbons import ribbons_of, ribbons_svg
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer.plan import plan_transfer
from shoal.plan.transfer.traffic import traffic_of

GRID = Mesh({"a": 2, "b": 4})
SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture):
    """Return the height of each ribbon by its words."""
    groups = picture.iter(f"{SVG}g")
    return {group.findtext(f"{SVG}title"): float(group.find(f"{SVG}rect").get("height"))
            for group in groups}  # fmt: skip


def test_the_table():
    plan = plan_transfer(Layout(GRID, ("a", "b"), None), Layout(GRID, None, "b"), (64, 64), 4)
    lines = describe(traffic_of(plan, parse("gpu:2 hosts x 4"))).splitlines()
    assert lines[0] == "(a+b, -) → (-, b), 64×64, 4 bytes each"
    assert [word.strip() for word in lines[2].strip("│").split("│")] == [
        "step", "same host", "other host", "in all"
    ]  # fmt: skip
    rows = [[w.strip() for w in line.strip("│").split("│")] for line in lines if "over" in line]
    traffic = traffic_of(plan, parse("gpu:2 hosts x 4"))
    assert [row[0] for row in rows] == [str(step) for step in plan.steps]
    assert len(rows) == len(traffic.flows) == 2
    assert rows[0][1:] == ["12 KiB", "-", "12 KiB"]
    assert rows[1][1:] == ["-", "16 KiB", "16 KiB"]


@pytest.mark.parametrize("text", ["gpu:2 hosts x 4", "gpu:4 hosts x 2", "v5e:2x2 x 2 slices"])
def test_a_ribbon_is_as_wide_as_its_bytes(text):
    plan = plan_transfer(Layout(GRID, ("a", "b"), None), Layout(GRID, None, None), (64, 64), 4)
    traffic = traffic_of(plan, parse(text))
    picture = ET.fromstring(ribbons_svg(traffic))
    ribbons = ribbons_of(traffic)
    assert {ribbon.words for ribbon in ribbons} == {*boxes(picture)}
    for ribbon in ribbons:
        share = ribbon.num_bytes / sum(traffic.num_bytes.values())
        assert boxes(picture)[ribbon.words] == pytest.approx(max(18, 120 * share), abs=0.1)
        assert ribbon.words in picture.get("aria-label")
    assert sum(ribbon.num_bytes for ribbon in ribbons) == sum(traffic.num_bytes.values())


def test_transfer_that_sends_nothing_is_drawn_without_ribbons():
    cut = traffic_of(plan_transfer(Layout(GRID, None), Layout(GRID, "a"), (8,), 4))
    none = traffic_of(plan_transfer(Layout(GRID, "a"), Layout(GRID, "a"), (8,), 4))
    for traffic in (cut, none):
        assert "Nothing is sent" in ET.fromstring(ribbons_svg(traffic)).get("aria-label")
        assert not ribbons_of(traffic)
    assert "nothing is sent" in describe(none)


def test_many_rounds_are_cut_short():
    many, one = Mesh({"x": 32}), Mesh({}, device_ids=[40])
    traffic = traffic_of(plan_transfer(Layout(many, "x"), Layout(one, None), (32,), 4))
    assert len(traffic.flows) == 32
    assert "8 more rounds are not shown" in ribbons_svg(traffic)
    assert "…" in describe(traffic)
    assert "in all" in describe(traffic).splitlines()[-2]
