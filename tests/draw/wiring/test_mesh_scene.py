"""What is seen of topologies: every chip, host, link and hop once, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draw.wired_topologies import LARGE, SAMPLE, scene_of
from shoal.draw.wiring.mesh_scene import Most, draw_wires
from shoal.errors import UsageError
from shoal.plan.mesh import Mesh
from shoal.plan.placement import place
from shoal.plan.schedules.ring import Side, hops
from shoal.plan.topology import Torus, parse

TORI = st.builds(
    lambda pairs, cores: Torus(
        tuple(size for size, _ in pairs), wrap=tuple(wraps for _, wraps in pairs), cores=cores
    ),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3),
    st.integers(1, 2),
)


def chips_apart(torus, one, other):
    """Count the links between two chips, dim by dim, both ways round."""
    links = 0
    for a, b, size, wraps in zip(one, other, torus.shape, torus.wrap, strict=True):
        ways = [abs(a - b)] + [abs(a - b + turn) for turn in (size, -size) if wraps]
        links += min(ways)
    return links


@given(TORI)
def test_every_chip_and_every_link_of_a_torus_is_there_once(torus):
    scene = draw_wires(torus)
    places = {chip.coords: (chip.panel, chip.column, chip.row) for chip in scene.chips}
    assert set(places) == set(itertools.product(*map(range, torus.shape)))
    assert len(set(places.values())) == len(scene.chips) == torus.num_chips
    ids = {chip.coords: [device.id for device in chip.devices] for chip in scene.chips}
    assert all(ids[at] == torus.device_ids[at].tolist() for at in ids)
    plain = wrapping = 0
    for dim, size in enumerate(torus.shape):
        lines = torus.num_chips // size
        plain += (size - 1) * lines
        wrapping += torus.wrap[dim] * lines
    drawn = [(link.wraps, 1) for link in scene.links]
    drawn += [(bundle.wraps, bundle.links) for bundle in scene.bundles]
    assert sum(links for wraps, links in drawn if not wraps) == plain
    assert sum(links for wraps, links in drawn if wraps) == wrapping
    assert len({(link.panel, link.start, link.end) for link in scene.links}) == len(scene.links)


@given(TORI, st.randoms(use_true_random=False))
def test_hop_lengths_of_any_device_order_are_correct(torus, random):
    order = list(range(torus.num_devices))
    random.shuffle(order)
    scene = draw_wires(torus, Mesh({"x": torus.num_devices}, device_ids=order, kind="tpu"))
    coords = {device.id: chip.coords for chip in scene.chips for device in chip.devices}
    lengths = [
        chips_apart(torus, coords[one], coords[other])
        for one, other in zip(order, [*order[1:], order[0]], strict=True)
    ]
    (axis,) = scene.axes
    assert (axis.longest, axis.total, axis.crossings) == (max(lengths), sum(lengths), 0)
    if axis.size > 1:
        assert [arrow.links for arrow in scene.arrows] == lengths
        sides = [Side(s, ring=s * w) for s, w in zip(torus.shape, torus.wrap, strict=True)]
        assert hops(np.array([coords[device] for device in order]), sides).tolist() == lengths


@pytest.mark.parametrize("text", SAMPLE)
def test_arrows_follow_the_first_ring_of_every_axis(text):
    scene = scene_of(text, SAMPLE[text])
    middles = {}
    for chip in scene.chips:
        for core, device in enumerate(chip.devices):
            aside = (core + 0.5) / len(chip.devices) - 0.5
            middles[device.id] = (chip.panel, chip.column + aside, chip.row)
    mesh = place(parse(text), SAMPLE[text])
    assert sorted(middles) == sorted(mesh.device_ids.ravel().tolist())
    for number, (name, size) in enumerate(mesh.axes.items()):
        others = {other: 0 for other in mesh.axis_names if other != name}
        ring = mesh.submesh(**others).device_ids.tolist()
        arrows = [arrow for arrow in scene.arrows if arrow.axis == number]
        assert scene.axes[number].ring == tuple(ring)
        assert len(arrows) == (size if size > 1 else 0)
        assert [arrow.start for arrow in arrows] == [middles[device] for device in ring][
            : len(arrows)
        ]
        assert [arrow.end for arrow in arrows] == [arrow.start for arrow in arrows[1:]] + [
            arrow.start for arrow in arrows[:1]
        ]


@pytest.mark.parametrize("text", SAMPLE)
def test_an_outline_holds_the_chips_of_its_host_and_no_others(text):
    scene = scene_of(text, SAMPLE[text])
    owners = {device.process for chip in scene.chips for device in chip.devices}
    assert {host.process for host in scene.hosts} == (set() if "flat" in text else owners)
    for host in scene.hosts:
        inside = {
            device.process
            for chip in scene.chips
            if chip.panel == host.panel
            and host.left <= chip.column <= host.right
            and host.top <= chip.row <= host.bottom
            for device in chip.devices
        }
        assert inside == {host.process}


@pytest.mark.parametrize("text", SAMPLE)
def test_groups_are_the_rings_of_the_last_axis(text):
    scene = scene_of(text, SAMPLE[text])
    mesh = place(parse(text), SAMPLE[text])
    last = next(a for a in reversed(range(len(mesh.shape))) if mesh.shape[a] > 1)
    rings = np.moveaxis(mesh.device_ids, last, -1).reshape(-1, mesh.shape[last])
    groups = {d.id: d.group for chip in scene.chips for d in chip.devices}
    assert scene.num_groups == len(rings)
    assert [{groups[device] for device in ring} for ring in rings.tolist()] == [
        {number} for number in range(len(rings))
    ]
    positions = {d.id: d.position for chip in scene.chips for d in chip.devices}
    assert all(mesh.device_ids[at] == device_id for device_id, at in positions.items())


def test_hops_that_wrap_say_which_way():
    (axis,) = scene_of("torus:4 wrap=x", {"x": 4}).axes
    assert (axis.longest, axis.far) == (1, "4 hops of 1 link")
    arrows = scene_of("torus:4 wrap=x", {"x": 4}).arrows
    assert [arrow.around[0] for arrow in arrows] == [0, 0, 0, 1]
    assert scene_of("torus:8", {"x": 8}).axes[0].far == "8 hops, the longest 2 links, 14 in all"


def test_words_of_slices_hosts_and_cores():
    far = {text: [axis.far for axis in scene_of(text, axes).axes] for text, axes in SAMPLE.items()}
    assert far["v5e:4x8 x 2 slices"][0] == (
        "2 hops, the longest 2 links, 4 in all; 2 between slices"
    )
    assert far["v5e:4x4 + v5e:2x8"][0] == "2 hops, all between slices"
    assert far["gpu:4 hosts x 8"] == ["4 hops, 4 between hosts", "8 hops, all within a host"]
    cores = draw_wires(parse("torus:2 cores=2"), Mesh({"x": 4}))
    assert cores.axes[0].far == "4 hops of 1 link or within a chip, 2 links in all"
    assert far["flat:24"] == ["24 hops"]
    assert far["torus:4x6 wrap=y host=2x2"][2] == "no hops"


@pytest.mark.parametrize("text", LARGE)
def test_omitted_devices_are_noted(text):
    scene = scene_of(text, LARGE[text])
    count = sum(len(chip.devices) for chip in scene.chips)
    assert count <= 11_000
    assert (count < parse(text).num_devices) == bool(scene.notes)
    assert scene_of("v4:16x16x16", LARGE["v4:16x16x16"]).notes == ()


def test_less_is_shown_where_less_fits():
    scene = draw_wires(parse("torus:9x9"), None, Most(columns=4, rows=3))
    (panel,) = scene.panels
    assert (panel.columns, panel.rows) == ((0, 1, None, 8), (0, None, 8))
    assert scene.notes == ("3 of 9 columns are shown", "2 of 9 rows are shown")
    assert {chip.coords for chip in scene.chips} == set(itertools.product((0, 1, 8), (0, 8)))


def test_meshes_of_other_devices_and_too_many_devices_are_refused():
    with pytest.raises(UsageError, match=r"devices 8..9 of the mesh are not in the topology"):
        draw_wires(parse("v5e:2x4"), Mesh({"x": 10}))
    with pytest.raises(UsageError, match="at most 4194304 can be drawn"):
        draw_wires(parse("flat:99999999"))


def test_a_mesh_of_some_devices_leaves_the_others_plain():
    scene = draw_wires(parse("v5e:2x4"), Mesh({"x": 3}, device_ids=[0, 2, 3]))
    groups = {d.id: d.group for chip in scene.chips for d in chip.devices}
    assert groups == {0: 0, 2: 0, 3: 0, 1: -1, 4: -1, 5: -1, 6: -1, 7: -1}
