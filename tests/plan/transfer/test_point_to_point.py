"""Plans of single sends, run round by round on arrays of element numbers."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.transfer.moves import Move, moves
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region
from shoal.plan.topology import parse
from shoal.plan.transfer.bounds import bounds
from shoal.plan.transfer.point_to_point import PointToPoint, Send, point_to_point

EIGHT = Mesh({"a": 2, "b": 2, "c": 2})
ALL = ("a", "b", "c")
MISSING = -1


def inside(box):
    """Return a box as slices."""
    return tuple(slice(first, end) for first, end in box)


def shards(layout, array):
    """Return device id → its shard, in an array of the whole shape that is empty elsewhere."""
    shard_of = {}
    for device in layout.mesh.device_ids.ravel().tolist():
        own = region(layout, array.shape, device)
        shard_of[device] = np.full_like(array, MISSING)
        shard_of[device][own] = array[own]
    return shard_of


def run(plan: PointToPoint, move: Move, item_bytes=1):
    """Carry a plan out; check each send, and return what every device received, and every host."""
    array = np.arange(np.prod(move.shape, dtype=int)).reshape(move.shape)
    host_of = dict(plan.hosts)
    source, wanted = shards(move.source, array), shards(move.target, array)
    holds = {device: np.full_like(array, MISSING) for device in host_of}
    for device, box, num_bytes in plan.keeps:
        assert num_bytes == array[inside(box)].size * item_bytes > 0
        holds[device][inside(box)] = source[device][inside(box)]
        assert (holds[device][inside(box)] != MISSING).all()
    received, entered = Counter(), Counter()
    for sends in plan.rounds:
        assert sends
        assert len({send.sender for send in sends}) == len(sends)
        assert len({send.receiver for send in sends}) == len(sends)
        carried = []
        for sender, _, box, num_bytes in sends:
            here, old = holds[sender][inside(box)], source.get(sender)
            values = np.where(here == MISSING, MISSING if old is None else old[inside(box)], here)
            assert (values != MISSING).all()
            assert num_bytes == values.size * item_bytes > 0
            carried.append(values)
        for (sender, receiver, box, num_bytes), values in zip(sends, carried, strict=True):
            assert sender != receiver
            assert (holds[receiver][inside(box)] == MISSING).all()
            assert (wanted[receiver][inside(box)] != MISSING).all()
            holds[receiver][inside(box)] = values
            received[receiver] += num_bytes
            if host_of[sender] != host_of[receiver]:
                entered[host_of[receiver]] += num_bytes
    for device, values in wanted.items():
        np.testing.assert_array_equal(holds[device], values)
    return received, entered


def degree(edges):
    """Return the most sends, or receives, of one device."""
    busy = Counter((end, send[end]) for send in edges for end in (0, 1))
    return max(busy.values(), default=0)


def sends_of(plan):
    """Return all sends."""
    return [send for sends in plan.rounds for send in sends]


@given(moves(), st.integers(1, 9))
def test_every_device_ends_with_its_shard_at_the_bound(move, item_bytes):
    plan, least = point_to_point(*move, item_bytes), bounds(*move, item_bytes)
    received, entered = run(plan, move, item_bytes)
    assert (
        plan.received_bytes
        == least.received_bytes
        == {device: received[device] for device in least.received_bytes}
    )
    assert (
        plan.host_bytes
        == dict(least.host_bytes)
        == {host: entered[host] for host in dict(least.host_bytes)}
    )
    assert plan.total_bytes == least.total_bytes == sum(plan.sent_bytes.values())
    assert plan.largest_bytes == least.largest_bytes
    assert plan.hosts == tuple((bound.device, bound.host) for bound in least.devices)


@given(moves())
def test_a_sender_is_as_near_as_can_be(move):
    plan = point_to_point(*move, 1)
    host_of, array = dict(plan.hosts), np.zeros(move.shape, int)
    source = shards(move.source, array)
    for send in sends_of(plan):
        if host_of[send.sender] != host_of[send.receiver]:
            near = [held for device, held in source.items()
                    if host_of[device] == host_of[send.receiver]]  # fmt: skip
            assert all((held[inside(send.box)] == MISSING).all() for held in near)


@given(moves())
def test_rounds_are_few(move):
    plan = point_to_point(*move, 1)
    edges, held = sends_of(plan), shards(move.source, np.zeros(move.shape, int))
    assert plan.num_rounds >= degree(edges)
    if all(send.sender in held and (held[send.sender][inside(send.box)] != MISSING).all()
           for send in edges):  # fmt: skip
        assert plan.num_rounds == degree(edges)
    else:  # a wave sends each box that is still needed, so there are no more than it has needers
        most = max(Counter(send.box for send in edges).values())
        assert plan.num_rounds <= most * degree(edges)


KNOWN = [  # 8 devices on 2 hosts: source, target, rounds
    (Layout(EIGHT, ALL, None), Layout(EIGHT, None, ALL), 7),
    (Layout(EIGHT, ALL, None), Layout(EIGHT, None, None), 7),
    (Layout(EIGHT, "a", "b"), Layout(EIGHT, "b", "a"), 2),  # into a host, and on inside it
    (Layout(EIGHT, "c", "b"), Layout(EIGHT, ("c", "b", "a"), None), 1),
    (Layout(EIGHT, ALL, None), Layout(EIGHT, "a", ("b", "c")), 3),
]


@pytest.mark.parametrize(("source", "target", "rounds"), KNOWN)
def test_known_rounds(source, target, rounds):
    hosts = parse("gpu:2 hosts x 4")
    plan = point_to_point(source, target, (64, 64), 4, topology=hosts)
    assert plan.num_rounds == degree(sends_of(plan)) == rounds
    assert len(set(plan.sent_bytes.values())) <= 2
    run(plan, Move(source, target, (64, 64)), 4)


@pytest.mark.parametrize("hosts", [1, 2, 4, 8, 16])
def test_a_broadcast_doubles(hosts):
    one = Mesh({}, device_ids=[0])
    many = Mesh({"x": 64}, processes=np.arange(64) * hosts // 64)
    plan = point_to_point(Layout(one, None), Layout(many, None), (3,), 4)
    assert [len(sends) for sends in plan.rounds] == [1, 2, 4, 8, 16, 32]
    run(plan, Move(Layout(one, None), Layout(many, None), (3,)), 4)


def test_several_broadcasts_at_once_double():
    one = Mesh({"m": 8})
    many = Mesh({"r": 16, "m": 8}, processes=np.arange(128) // 8)
    plan = point_to_point(Layout(one, "m"), Layout(many, "m"), (64,), 4)
    assert [len(sends) for sends in plan.rounds] == [8, 16, 32, 64]


def test_a_slice_is_entered_once():
    topology = parse("v5e:4x4 x 2 slices")
    ids = topology.device_ids.reshape(2, 16)
    source = Layout(Mesh({"x": 16}, device_ids=ids[0]), "x")
    target = Layout(Mesh({"x": 16}, device_ids=ids[1]), None)
    plan = point_to_point(source, target, (16,), 4, topology=topology)
    crossing = [send for send in sends_of(plan) if send.sender in ids[0]]
    assert sorted(send.box for send in crossing) == [((i, i + 1),) for i in range(16)]
    run(plan, Move(source, target, (16,)), 4)


def test_senders_of_the_own_slice_come_first():
    topology = parse("v5e:4x4 x 2 slices")  # hosts of 4 or 8 chips: several in a slice
    ids = topology.device_ids.reshape(2, 16)
    held = Layout(Mesh({"r": 2}, device_ids=[ids[0, 0], ids[1, 0]]), None)
    needed = Layout(Mesh({"r": 2, "x": 16}, device_ids=ids), None)
    plan = point_to_point(held, needed, (3,), 4, topology=topology)
    assert not [s for s in sends_of(plan) if (s.sender in ids[0]) != (s.receiver in ids[0])]


def test_replicas_share_the_sending():
    source = Layout(Mesh({"r": 4}, processes=range(4)), None)
    target = Layout(Mesh({"x": 4}, device_ids=[4, 5, 6, 7], processes=range(4, 8)), "x")
    plan = point_to_point(source, target, (8,), 4)
    assert plan.num_rounds == 1
    assert set(list(plan.sent_bytes.values())[:4]) == {8}


def test_entries_are_spread_over_a_host():
    source = Layout(Mesh({"x": 4}, processes=[0] * 4), "x")
    target = Layout(Mesh({"r": 4}, device_ids=[4, 5, 6, 7], processes=[1] * 4), None)
    plan = point_to_point(source, target, (8,), 4)
    entries = [send.receiver for send in sends_of(plan) if send.sender < 4]
    assert sorted(entries) == [4, 5, 6, 7]
    assert plan.num_rounds == 4


def test_4096_devices():
    mesh = Mesh({"a": 16, "b": 16, "c": 16}, processes=np.arange(4096) // 8)
    turned = Layout(mesh, "c", "b", "a")
    plan = point_to_point(Layout(mesh, *ALL), turned, (32, 32, 32), 2)
    assert (plan.num_rounds, plan.num_sends) == (1, 3840)
    assert plan.largest_bytes == 16
    least = bounds(Layout(mesh, *ALL), turned, (32, 32, 32), 2)
    assert plan.received_bytes == least.received_bytes
    assert plan.host_bytes == dict(least.host_bytes)
    every = point_to_point(Layout(Mesh({}), None), Layout(mesh, None), (4096,), 2)
    assert (every.num_rounds, every.num_sends) == (12, 4095)


def test_a_plan_is_a_value_that_prints():
    mesh = Mesh({"x": 2}, processes=[0, 1])
    source, target = Layout(mesh, "x"), Layout(mesh, None)
    plan, same = (point_to_point(source, target, (6,), 4) for _ in range(2))
    assert plan == same
    assert hash(plan) == hash(same)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan != point_to_point(source, target, (4,), 4)
    assert plan.rounds == ((Send(0, 1, ((0, 3),), 12), Send(1, 0, ((3, 6),), 12)),)
    assert repr(plan) == "PointToPoint(2 sends in 1 round, 24 B; 2 devices on 2 processes)"
    assert str(plan).splitlines() == [
        repr(plan),
        "round  sends  between processes  bytes  largest",
        "    0      2                  2     24       12",
    ]
    nothing = point_to_point(target, source, (6,), 4)
    assert str(nothing) == "PointToPoint(0 sends in 0 rounds, 0 B; 2 devices on 2 processes)"
    assert nothing.num_rounds == nothing.total_bytes == nothing.largest_bytes == 0


def test_a_long_table_is_cut():
    mesh = Mesh({"x": 40})
    plan = point_to_point(Layout(mesh, "x"), Layout(mesh, None), (40,), 1)
    assert plan.num_rounds == 39
    assert str(plan).splitlines()[-1] == "and 7 rounds more"


def test_bad_requests_are_refused():
    layout = Layout(EIGHT, None)
    pending = Layout(EIGHT, None, partial={"b": "sum", "c": "max"})
    with pytest.raises(UsageError) as caught:
        point_to_point(pending, pending, (8,), 4)
    assert len(caught.value.problems) == 2
    assert "sum over 'b', max over 'c'" in str(caught.value)
    assert "reduce it first" in str(caught.value)
    with pytest.raises(UsageError, match="keeps the dims"):
        point_to_point(layout, Layout(EIGHT), (8,), 4)
    mesh = Mesh({"x": 2048})
    with pytest.raises(UsageError, match="takes 4,192,256 sends"):
        point_to_point(Layout(mesh, "x"), Layout(mesh, None), (2048,), 4)
