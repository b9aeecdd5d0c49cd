"""Bytes by class of link: they add up to what devices receive, and go where they must."""

import random
from collections import Counter

import numpy as np
import pytest

from plan.transfer.collectives_by_hand import all_layouts
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer.move_steps import received_bytes
from shoal.plan.transfer.plan import plan_transfer
from shoal.plan.transfer.traffic import traffic_of

HOSTS = [0, 0, 0, 1, 1, 2, 2, 2]
CUBE = Mesh({"a": 2, "b": 2, "c": 2}, processes=HOSTS)
OTHER = Mesh(
    {"x": 4, "y": 2},
    device_ids=[3, 1, 4, 0, 5, 2, 7, 6],
    processes=[HOSTS[n] for n in (3, 1, 4, 0, 5, 2, 7, 6)],
)


@pytest.mark.parametrize("there", [CUBE, OTHER])
def test_the_flows_of_a_step_are_what_its_devices_receive(there):
    pairs = [(a, b) for a in all_layouts(CUBE, 2) for b in all_layouts(there, 2)]
    for source, target in random.Random(2).sample(pairs, 40):
        plan = plan_transfer(source, target, (16, 16), 4)
        traffic = traffic_of(plan)
        assert traffic.classes == ("same host", "other host")
        for step, flow in zip(plan.steps, traffic.flows, strict=True):
            assert sum(flow.num_bytes) == received_bytes(step, (16, 16), 4).sum()
            assert flow.title == str(step)
        assert traffic.num_bytes["other host"] >= plan.bounds.total_host_bytes
        if plan.received_bytes == 0:
            assert set(traffic.num_bytes.values()) <= {0}


def test_single_sends_by_host():
    half = Mesh({"x": 4}, device_ids=[1, 3, 5, 7], processes=[HOSTS[n] for n in (1, 3, 5, 7)])
    plan = plan_transfer(Layout(CUBE, ("a", "b", "c")), Layout(half, "x"), (16,), 4)
    wanted = Counter()
    for send in (send for sends in plan.sends.rounds for send in sends):
        near = HOSTS[send.sender] == HOSTS[send.receiver]
        wanted["same host" if near else "other host"] += send.num_bytes
    traffic = traffic_of(plan)
    assert traffic.num_bytes == wanted
    assert [flow.title for flow in traffic.flows] == [
        f"round {n}" for n in range(len(traffic.flows))
    ]
    assert sum(wanted.values()) == plan.sends.total_bytes > 0


def test_all_gather_counted_by_hand():
    plan = plan_transfer(Layout(CUBE, ("a", "b", "c")), Layout(CUBE, None), (8,), 4)
    sizes = np.bincount(HOSTS)
    near = int((sizes * (sizes - 1)).sum()) * 4
    assert traffic_of(plan).num_bytes == {"same host": near, "other host": 8 * 7 * 4 - near}


def test_slices_and_switches_are_classes_of_their_own():
    eight = Mesh({"x": 8})
    plan = plan_transfer(Layout(eight, "x"), Layout(eight, None), (8,), 4)
    traffic = traffic_of(plan, parse("v5e:2x2 x 2 slices"))
    assert traffic.classes == ("same host", "other host", "other slice")
    assert traffic.num_bytes == {"same host": 96, "other host": 0, "other slice": 128}
    assert str(traffic).endswith("same host 96 B, other slice 128 B")
    with pytest.raises(UsageError, match="lacks: 4, 5, 6, 7"):
        traffic_of(plan, parse("v5e:2x2"))


def test_traffic_is_zero_if_nothing_is_sent():
    plan = plan_transfer(Layout(CUBE, None), Layout(CUBE, "a"), (8,), 4)
    assert traffic_of(plan).num_bytes == {"same host": 0, "other host": 0}
    assert "nothing is sent" in str(traffic_of(plan))
    same = plan_transfer(Layout(CUBE, "a"), Layout(CUBE, "a"), (8,), 4)
    assert traffic_of(same).num_bytes == {"same host": 0, "other host": 0}
