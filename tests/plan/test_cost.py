"""Costs across slices, hosts and devices alone; what costs nothing; what is refused."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from shoal.errors import UsageError, UsageTypeError
from shoal.plan.cost import COLLECTIVES, Cost, cost
from shoal.plan.hardware.links import Link, Links, links_of
from shoal.plan.mesh import Mesh
from shoal.plan.placement import place
from shoal.plan.topology import Slices, parse

BYTES = 5040
# Each stage alone: the other one's links take no time.
NEAR = Links(Link("near", 1.0, 0.0, "test"), Link("far", 1e30, 0.0, "test"))
FAR = Links(Link("near", 1e30, 0.0, "test"), Link("far", 1.0, 0.0, "test"))


def places_of(topology):
    """Return the slice (or host), and the host of each device."""
    cells = list(zip(topology.device_ids.ravel(), topology.processes.ravel(), strict=True))
    hosts = {int(n): int(process) for n, process in cells}
    if isinstance(topology, Slices):
        parts = enumerate(topology.parts())
        return {int(n): index for index, part in parts for n in part.device_ids.flat}, hosts
    return hosts, hosts


def through_ports(topology, mesh, axis):
    """Return what leaves the busiest host, and comes into it, for each collective."""
    place_of, host = places_of(topology)
    loads = {name: Counter() for name in ("all_gather", "all_to_all", "permute")}
    ids = np.moveaxis(mesh.device_ids, mesh.axis_names.index(axis), -1)
    for group in ids.reshape(-1, mesh.axes[axis]).tolist():
        counts = Counter(place_of[n] for n in group)
        for number, one in enumerate(group):
            other = group[(number + 1) % len(group)]
            if place_of[one] != place_of[other]:
                loads["permute"]["out", host[one]] += BYTES
                loads["permute"]["in", host[other]] += BYTES
            for other in group:
                if place_of[one] != place_of[other]:
                    loads["all_to_all"]["out", host[one]] += Fraction(BYTES, len(group))
            # Of what its place has to send, (k - 1) / k of the payload, each device sends its part.
            sent = Fraction(BYTES * (len(counts) - 1), len(counts) * counts[place_of[one]])
            loads["all_gather"]["out", host[one]] += sent
    return {name: math.ceil(max(load.values(), default=0)) for name, load in loads.items()}


SPREAD = ["v5e:2x4 x 2 slices", "tpu7x:2x1x1 x 3 slices", "torus:2x2 host=1x2 x 3 slices",
          "v5e:2x2 + v5e:2x4", "gpu:4 hosts x 3", "cpu:6 hosts x 1",
          "cpu:4 hosts x 2 switch=2"]  # fmt: skip


@pytest.mark.parametrize("name", SPREAD)
def test_the_busiest_port_is_that_of_counting_every_message(name):
    topology, shuffled = parse(name), np.random.default_rng(0)
    count = topology.num_devices
    for size in (n for n in range(2, count + 1) if count % n == 0):
        axes = {"a": count // size, "b": size}
        own = topology.device_ids.ravel()
        for ids in (own, *(shuffled.permutation(own) for _ in range(4))):
            mesh = Mesh(axes, device_ids=ids)
            for collective, wanted in through_ports(topology, mesh, "b").items():
                stage = cost(topology, mesh, collective, "b", BYTES, links=FAR)
                assert (stage.link_bytes if stage.link == "far" else 0) == wanted
            whole, half = (
                cost(topology, mesh, c, "b", BYTES, links=FAR) for c in ("all_reduce", "all_gather")
            )
            assert whole.seconds == pytest.approx(2 * half.seconds)
            assert whole.steps == 2 * half.steps


def test_slices_add_a_stage_to_what_they_cost_alone():
    one, two = parse("v5p:4x4x4"), parse("v5p:4x4x4 x 2 slices")
    alone = place(one, {"data": 16, "model": 4})
    both = place(two, {"data": 32, "model": 4})
    for collective in COLLECTIVES:
        near = cost(one, alone, collective, "model", BYTES)
        assert cost(two, both, collective, "model", BYTES) == near
    inside = cost(one, alone, "all_reduce", "data", 1 << 30)
    across = cost(two, both, "all_reduce", "data", 1 << 30)
    # Each device sends half of its 1/16, twice; the 4 chips of a host share 4 x 50 Gbit/s.
    sent = 4 * 2 * (1 << 30) // 16 // 2
    assert (across.link, across.link_bytes) == ("DCN", sent)
    assert across.seconds == pytest.approx(inside.seconds + sent / 25e9 + 2 * 14e-6)
    assert across.steps == inside.steps + 2


def test_slices_of_one_chip_have_only_their_network():
    topology = parse("v5e:1x1 x 4 slices")
    mesh = place(topology, {"data": 4})
    stage = cost(topology, mesh, "all_gather", "data", 4000)
    assert stage[3:5] == (2, 3000)
    assert stage.link == "DCN"


def test_slices_that_differ_have_their_own_stages():
    topology = parse("v5e:2x2 + v5e:2x4")
    mesh = Mesh({"data": 12}, device_ids=topology.device_ids.ravel())
    total = cost(topology, mesh, "all_gather", "data", BYTES, links=NEAR)
    alone = [
        cost(part, place(part, {"data": part.num_devices}), "all_gather", "data", BYTES, links=NEAR)
        for part in map(parse, ("v5e:2x2", "v5e:2x4"))
    ]
    assert total.link_bytes == max(part.link_bytes for part in alone)


def test_hosts_and_devices_alone():
    topology = parse("gpu:4 hosts x 8")
    mesh = place(topology, {"data": 4, "model": 8})
    inner = cost(topology, mesh, "all_reduce", "model", 8000)
    assert inner[3:5] == (2 * 3, 2 * 7000)
    assert inner.link == "NVLink"
    outer = cost(topology, mesh, "all_reduce", "data", 8000)  # eight groups through each host
    assert outer[3:5] == (2 * 2, 8 * 2 * 6000)
    assert outer.link == "network"
    assert outer.seconds == pytest.approx(4 * 14e-6 + 96000 / 400e9)
    flat = parse("flat:8")
    links = links_of(flat, link_bytes_per_s=1e9)
    stage = cost(flat, Mesh({"x": 8}), "all_to_all", "x", 8000, links=links)
    assert stage[3:5] == (7, 7000)
    assert stage.link == "link"


@pytest.mark.parametrize("name", ["v5e:2x4", "gpu:2 hosts x 4", "v5e:2x2 x 2 slices", "v4:2x2x2"])
def test_collectives_over_one_device_or_no_bytes_are_free(name):
    topology = parse(name)
    mesh = place(topology, {"one": 1, "data": 2, "model": 4})
    for collective in COLLECTIVES:
        free = Cost(collective, ("one",), 1 << 20, 0, 0, 0.0, "none")
        assert cost(topology, mesh, collective, "one", 1 << 20) == free
        assert cost(topology, mesh, collective, "model", 0).seconds == 0.0
        assert cost(topology, mesh, collective, ("one", "model"), 999).steps > 0


def test_permute_out_of_every_host_is_not_limited_by_host_links():
    topology = parse("gpu:2 hosts x 2")
    mesh = Mesh({"x": 4}, device_ids=[0, 2, 1, 3])  # to and fro between the hosts
    assert cost(topology, mesh, "permute", "x", 8, links=NEAR).seconds < 1e-20
    assert cost(topology, Mesh({"x": 4}), "permute", "x", 8, links=NEAR).seconds == 8.0


def test_bytes_to_one_host_are_sent_together():
    topology = parse("gpu:4 hosts x 2")
    stage = cost(topology, Mesh({"x": 8}), "all_to_all", "x", 800)
    assert stage[3:5] == (3, 2 * 600)


def test_one_byte_is_rounded_up_and_shards_are_fractions():
    topology = parse("torus:8")
    mesh, links = Mesh({"x": 8}), links_of(topology, link_bytes_per_s=1e9)
    assert cost(topology, mesh, "all_gather", "x", 1, links=links).link_bytes == 1
    assert cost(topology, mesh, "all_gather", "x", 1001, links=links).link_bytes == 876
    # 23.000000000000004 as floating point has it.
    topology = parse("torus:3x8 wrap=x")
    mesh = place(topology, {"x": 24})
    assert cost(topology, mesh, "all_gather", "x", 72, links=links).link_bytes == 23


def test_figures_are_the_published_ones_or_yours():
    assert links_of(parse("v5e:4x4")).near.bytes_per_s == 50e9  # 1600 Gbit/s over 4 links
    assert links_of(parse("v5p:4x4x4")).near.bytes_per_s == 100e9  # 1200 GB/s over 6, both ways
    assert links_of(parse("v6e:4x4 x 2 slices")).network.bytes_per_s == 4 * 12.5e9
    assert links_of(parse("v4:4x4x4 x 2 slices")).network is None
    assert links_of(parse("v5p:2x2x1 + v5e:2x2")).near.bytes_per_s == 50e9  # the slower of both
    assert links_of(parse("torus:4x4")).near is None
    assert links_of(parse("cpu:2 hosts x 4")) == Links(None, None)
    given = links_of(parse("v5e:4x4"), link_bytes_per_s=1, network_bytes_per_s=2)
    assert (given.near.bytes_per_s, given.near.source) == (1.0, "as given")
    assert given.network.bytes_per_s == 2.0
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="must be above 0"):
            links_of(parse("flat:4"), link_bytes_per_s=wrong)


@pytest.mark.parametrize(
    ("name", "axes", "collective", "axis", "count", "words"),
    [
        ("v5e:2x4", {"data": 8}, "all_redcue", "data", 1, "did you mean 'all_reduce'"),
        ("v5e:2x4", {"data": 8}, "permute", "dat", 1, "no axis 'dat' .*did you mean 'data'"),
        ("v5e:2x4", {"data": 8}, "permute", (), 1, "must be the name of an axis"),
        ("v5e:2x4", {"data": 8}, "permute", 3, 1, "must be the name of an axis"),
        ("v5e:2x4", {"data": 8}, "permute", ("data", "data"), 1, "names an axis twice"),
        ("v5e:2x4", {"data": 8}, "permute", "data", -1, "must not be negative"),
        ("v5e:2x4", {"data": 8}, "permute", "data", 1.5, "must be a whole number"),
        ("v5e:2x4", {"data": 9}, "permute", "data", 1, "devices that v5e:2x4 lacks: 8;"),
        (
            "torus:2x4",
            {"data": 8},
            "permute",
            "data",
            1,
            "speed of the links of torus:2x4 is not known",
        ),
        ("flat:8", {"data": 8}, "permute", "data", 1, "link_bytes_per_s=…"),
        ("v4:2x2x1 x 2 slices", {"data": 8}, "permute", "data", 1, "network_bytes_per_s=…"),
        ("cpu:8 hosts x 1", {"data": 8}, "permute", "data", 1, "--network to shoal plan"),
    ],
)
def test_cost_that_cannot_be_computed_raises(name, axes, collective, axis, count, words):
    with pytest.raises(UsageError, match=words):
        cost(parse(name), Mesh(axes), collective, axis, count)


def test_texts_are_neither_topologies_nor_meshes():
    with pytest.raises(TypeError, match=r"topology.parse\('v5e:2x4'\) makes one"):
        cost("v5e:2x4", Mesh({"x": 8}), "permute", "x", 1)
    with pytest.raises(TypeError, match=r"must be a jax.sharding.Mesh"):
        cost(parse("v5e:2x4"), "x=8", "permute", "x", 1)


def test_pairs_beyond_counting_are_refused():
    topology = parse("v5p:16x16x32")
    ids = np.random.default_rng(0).permutation(topology.num_devices)
    with pytest.raises(UsageError, match="pairs of devices would be routed one by one"):
        cost(topology, Mesh({"a": 2, "b": 4096}, device_ids=ids), "all_to_all", "b", 1)


def test_links_of_what_is_no_topology_or_no_speed():
    with pytest.raises(UsageTypeError, match=r"topology\.parse\('v5e:4x4'\) makes one"):
        links_of("v5e:4x4")
    for wrong in ("5", True):
        with pytest.raises(UsageTypeError, match="must be bytes per second"):
            links_of(parse("flat:4"), link_bytes_per_s=wrong)
