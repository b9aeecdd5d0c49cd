"""Lower bounds, held against sets of elements and a search for the fewest messages."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.transfer.moves import Move, elements, moves, terms
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer.bounds import Bounds, bounds
from shoal.plan.transfer.places import places

EIGHT = Mesh({"a": 2, "b": 2, "c": 2})
TWO_BY_FOUR = Mesh({"x": 2, "y": 4})
FOUR_BY_TWO = Mesh({"x": 4, "y": 2})


def union(sets):
    """Return what is in any of them."""
    return frozenset(itertools.chain(*sets))


@given(moves(), st.integers(1, 9))
def test_bounds_are_those_of_sets_of_elements(move: Move, item_bytes):
    held, needed = elements(move.source, move.shape), elements(move.target, move.shape)
    computed = bounds(*move, item_bytes)
    devices = sorted({*held, *needed})
    assert [bound.device for bound in computed.devices] == devices
    for device, host, received, peak, donated in computed.devices:
        before, after = held.get(device, frozenset()), needed.get(device, frozenset())
        assert received == len(after - before) * item_bytes
        assert peak == (len(before) + len(after)) * item_bytes
        assert donated == max(len(before), len(after)) * item_bytes
        assert host == move.host_of[device]
    assert computed.total_bytes == sum(computed.received_bytes.values())
    assert computed.largest_bytes == max(computed.received_bytes.values())
    assert computed.peak_bytes == max(bound.peak_bytes for bound in computed.devices)
    assert computed.donated_peak_bytes == max(
        bound.donated_peak_bytes for bound in computed.devices
    )
    inside = {host: [d for d in devices if move.host_of[d] == host] for host in
              sorted(set(move.host_of.values()))}  # fmt: skip
    entering = {
        host: len(
            union(needed.get(d, ()) for d in own) - union(held.get(d, ()) for d in own)
        ) * item_bytes
        for host, own in inside.items()
    }  # fmt: skip
    assert computed.host_bytes == tuple(entering.items())
    assert computed.total_host_bytes == sum(entering.values())
    assert computed.largest_host_bytes == max(entering.values())


def fewest_messages(groups, needers):
    """Search for the fewest messages after which each needer has heard of every term.

    A message says all that its sender has heard, which is no less than one value can say.
    """
    devices = sorted({*itertools.chain(*groups), *needers})
    masks = tuple(sum(1 << t for t, row in enumerate(groups) if d in row) for d in devices)
    whole, states, count = (1 << len(groups)) - 1, {masks}, 0
    wanted = [devices.index(needer) for needer in needers]
    while not any(all(state[at] == whole for at in wanted) for state in states):
        states = {
            (*state[:to], state[to] | state[at], *state[to + 1 :])
            for state in states
            for at, to in itertools.permutations(range(len(devices)), 2)
        }
        count += 1
    return count


@given(moves(partial=True))
def test_a_pending_reduction_brings_every_device_all_of_its_shard(move: Move):
    held, needed = elements(move.source, move.shape), elements(move.target, move.shape)
    term_of = terms(move.source)
    rows = set(term_of.values())
    computed = bounds(*move, 2)
    if len(rows) == 1:
        return
    for device, received in computed.received_bytes.items():
        assert received == 2 * len(needed.get(device, ()))
    for host, entered in computed.host_bytes:
        own = [device for device in computed.received_bytes if move.host_of[device] == host]
        known = [union(held.get(d, ()) for d in own if term_of.get(d) == row) for row in rows]
        wanted = union(needed.get(device, ()) for device in own)
        assert entered == 2 * len(wanted - frozenset.intersection(*known))
    assert computed.total_bytes >= sum(computed.received_bytes.values())


SUMS = [  # the axes of the source, its pending axis, the ids of the source and of the target
    ((2,), "a", (0, 1), (0,)),
    ((2,), "a", (0, 1), (2,)),
    ((3,), "a", (0, 1, 2), (0, 1, 2)),
    ((3,), "a", (0, 1, 2), (0,)),
    ((3,), "a", (0, 1, 2), (2, 3)),
    ((3,), "a", (0, 1, 2), (3,)),
    ((2, 2), "a", (0, 1, 2, 3), (0, 3)),
    ((2, 2), "a", (0, 1, 2, 3), (0, 1, 2, 3)),
    ((2, 2), "b", (0, 1, 2, 3), (4,)),
]


@pytest.mark.parametrize(("sizes", "axis", "ids", "needers"), SUMS)
def test_the_total_of_a_pending_sum_is_the_fewest_messages(sizes, axis, ids, needers):
    source = Mesh(dict(zip("ab", sizes, strict=False)), device_ids=ids)
    target = Mesh({"n": len(needers)}, device_ids=needers)
    rows = np.moveaxis(source.device_ids, "ab".index(axis), 0).reshape(source.axes[axis], -1)
    computed = bounds(Layout(source, partial={axis: "sum"}), Layout(target), (), 1)
    assert computed.total_bytes == fewest_messages(rows.tolist(), needers)


CUBE, ALL = (64, 64, 64), ("a", "b", "c")
KNOWN = [  # of f32 64^3 on 8 devices: source, target, the largest part that a device receives
    (Layout(EIGHT, ALL, None, None), Layout(EIGHT, None, ALL, None), 7 / 64),
    (Layout(EIGHT, "a", "b", "c"), Layout(EIGHT, "c", "b", "a"), 1 / 8),
    (Layout(TWO_BY_FOUR, "x", "y", None), Layout(TWO_BY_FOUR, "y", "x", None), 1 / 8),
    (Layout(TWO_BY_FOUR, "x", "y", None), Layout(FOUR_BY_TWO, "x", "y", None), 1 / 8),
    (Layout(EIGHT, ALL, None, None), Layout(EIGHT, "a", "b", "c"), 3 / 32),
    (Layout(TWO_BY_FOUR, "x", None, None), Layout(TWO_BY_FOUR, None, "y", None), 1 / 8),
    (Layout(EIGHT, "a", "b", "c"), Layout(EIGHT, ALL, None, None), 3 / 32),
    (Layout(EIGHT, "c", "b", None), Layout(EIGHT, ("c", "b", "a"), None, None), 1 / 16),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "part"), KNOWN)
def test_known_bounds(source, target, part):
    assert bounds(source, target, CUBE, 4).largest_bytes == part * math.prod(CUBE) * 4


def test_a_topology_says_the_hosts():
    source = Layout(Mesh({"x": 8}), "x")
    target = Layout.replicated(Mesh({"x": 8}), 1)
    assert bounds(source, target, (8,), 4).host_bytes == ((0, 0),)
    hosts = parse("gpu:4 hosts x 2")
    computed = bounds(source, target, (8,), 4, topology=hosts)
    assert computed.host_bytes == tuple((host, 24) for host in range(4))
    assert [bound.host for bound in computed.devices] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_slices_and_switches():
    mesh = Mesh({"x": 8})
    for text, expected in (
        ("v5e:2x2 x 2 slices", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("gpu:4 hosts x 2 switch=2", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("gpu:4 hosts x 2", [0] * 8),
        ("flat:9", [0] * 8),
    ):
        assert places("test", mesh, mesh, parse(text)).slices.tolist() == expected


def test_a_torus_numbers_its_devices_by_its_own_rule():
    topology = parse("v5e:4x4")
    mesh = Mesh({"x": 16})
    numbered = places("test", mesh, mesh, topology)
    assert numbered.hosts.tolist() == topology.process_of(np.arange(16)).tolist()


def test_4096_devices():
    mesh = Mesh({"a": 16, "b": 16, "c": 16}, processes=np.arange(4096) // 8)
    source, target = Layout(mesh, "a", "b", "c"), Layout(mesh, "c", None, ("a", "b"))
    computed = bounds(source, target, (32, 32, 512), 2)
    assert len(computed.host_bytes) == 512
    assert computed.largest_bytes == (2 * 32 * 2) * 2
    assert computed.total_bytes >= computed.total_host_bytes > 0


def test_bounds_are_values_that_print():
    source, target = Layout(EIGHT, "a", "b"), Layout(EIGHT, "b", "a")
    computed = bounds(source, target, (8, 8), 4)
    assert computed == bounds(source, target, (8, 8), 4)
    assert hash(computed) == hash(bounds(source, target, (8, 8), 4))
    assert isinstance(computed, Bounds)
    assert str(computed).splitlines() == [
        "lower bounds      8 devices, 1 process",
        "device receives   64 B at most",
        "devices receive   256 B in all",
        "process receives  0 B at most",
        "processes receive 0 B in all",
        "device holds      128 B at most",
        "  if donated      64 B at most",
    ]


def test_bad_requests_are_refused():
    layout = Layout(EIGHT, "a")
    with pytest.raises(UsageTypeError, match=r"item_bytes=2\.0 must be an int"):
        bounds(layout, layout, (8,), 2.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="item_bytes=0 must be 1 or more"):
        bounds(layout, layout, (8,), 0)
    with pytest.raises(UsageError, match=r"of 8 bytes an element has more than 2\^62 bytes"):
        bounds(layout, layout, (1 << 60,), 8)
    with pytest.raises(UsageTypeError, match=r"topology\.parse\('v5e:2x4'\) makes one"):
        bounds(layout, layout, (8,), 4, topology="v5e:2x4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="lacks: 4, 5, 6, 7; its ids are 0 to 3"):
        bounds(layout, layout, (8,), 4, topology=parse("v5e:2x2"))
    other = Layout(Mesh({"a": 2}, device_ids=[7, 1], processes=[3, 0]), "a")
    with pytest.raises(UsageError, match="different processes for the same devices: 7;"):
        bounds(layout, other, (8,), 4)
