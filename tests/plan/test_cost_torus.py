"""Costs on a torus, against bytes counted link by link, and against published formulas."""

import itertools
import math

import numpy as np
import pytest

from plan import links_by_hand as by_hand
from plan.jax_cases import shapes_of
from shoal.plan.cost import COLLECTIVES, box_seconds, cost
from shoal.plan.hardware.links import links_of
from shoal.plan.mesh import Mesh
from shoal.plan.placement import place
from shoal.plan.topology import parse
from shoal.plan.torus_order import _best, _sides

NAMES = "abcdefgh"
TORI = ["torus:6", "torus:8", "torus:6 wrap=x", "torus:5x2 wrap=x", "torus:4x3 wrap=x",
        "torus:2x4 wrap=xy", "torus:2x2x3", "torus:4x4 wrap=xy", "torus:2x3 cores=2",
        "torus:4x2 wrap=x cores=2"]  # fmt: skip
LINKS = links_of(parse("v5p:2x2x1"))
BYTES = 5040  # divides by what these groups have


def costs(torus, mesh, collective, axis, num_bytes=BYTES):
    return cost(torus, mesh, collective, axis, num_bytes, links=LINKS)


def meshes(torus, seed):
    """Yield placed meshes of all shapes of two axes, and as many in a random order."""
    ids = np.random.default_rng(seed)
    for sizes in shapes_of(torus.num_devices):
        if len(sizes) == 2:
            mesh = place(torus, list(zip(NAMES, sizes, strict=False)))
            yield mesh
            yield Mesh(mesh.axes, device_ids=ids.permutation(mesh.device_ids.ravel()))


def is_box(groups):
    """Whether groups are boxes of one size."""
    counts = {tuple(len(set(column)) for column in zip(*group, strict=True)) for group in groups}
    return len(counts) == 1 and len(groups[0]) == math.prod(*counts)


@pytest.mark.parametrize("name", TORI)
def test_the_busiest_link_is_that_of_counting_hop_by_hop(name):
    torus, kinds = parse(name), set()
    for mesh in meshes(torus, 0):
        for axis in mesh.axis_names:
            groups = by_hand.chips_of(torus, mesh, axis)
            if len(groups[0]) == 1:
                continue
            gather = by_hand.bucket_gather if is_box(groups) else by_hand.ring_gather
            for collective, count in (
                ("permute", by_hand.permuted),
                ("all_to_all", by_hand.all_to_all),
                ("all_gather", gather),
            ):
                num_bytes, steps = count(torus, groups, BYTES)
                estimate = costs(torus, mesh, collective, axis)
                assert estimate.steps == steps, (collective, groups)
                assert num_bytes - 1e-6 <= estimate.link_bytes < num_bytes + 1, (collective, groups)
            kinds.add(gather)
    assert by_hand.bucket_gather in kinds
    assert len(kinds) == 2 or len(torus.shape) == 1


def test_three_dims_share_the_load_as_well_as_can_be():
    for name in ("torus:4x2x3 wrap=x", "torus:2x3x4 wrap=z cores=2"):
        torus = parse(name)
        mesh = place(torus, {"a": torus.num_devices})
        groups = by_hand.chips_of(torus, mesh, "a")
        estimate = costs(torus, mesh, "all_gather", "a", 10**9)
        assert estimate.link_bytes == pytest.approx(by_hand.bucket_gather(torus, groups, 10**9)[0])


PLACED = ["v5p:4x4x8", "v5e:4x8", "v5e:16x2", "tpu7x:2x2x2", "v3:4x2", "torus:3x3x3 wrap=xyz"]


@pytest.mark.parametrize("name", PLACED)
def test_a_box_costs_what_its_mesh_costs(name):
    torus = parse(name)
    wraps = (*torus.wrap, False)
    for sizes in shapes_of(torus.num_devices):
        mesh = place(torus, list(zip(NAMES, sizes, strict=False)))
        taken = _best(torus.grid, wraps, tuple(sizes), True)
        for axis, size in enumerate(sizes):
            if size > 1:
                sides = _sides(taken, axis, torus.grid, wraps)
                seconds = box_seconds(sides, LINKS.near, 1 << 24, cores=torus.cores)
                estimate = costs(torus, mesh, "all_reduce", NAMES[axis], 1 << 24)
                assert estimate.seconds == pytest.approx(seconds, rel=1e-12), (sizes, axis)


@pytest.mark.parametrize("name", ["v5e:4x4", "torus:6 wrap=x"])
def test_laws(name):
    torus = parse(name)
    for mesh in meshes(torus, 1):
        for axis in (*mesh.axis_names, mesh.axis_names):
            estimates = {
                c: [costs(torus, mesh, c, axis, n) for n in (1, 999, 10**6)] for c in COLLECTIVES
            }
            for rising in estimates.values():
                assert [c.seconds for c in rising] == sorted(c.seconds for c in rising)
                assert [c.link_bytes for c in rising] == sorted(c.link_bytes for c in rising)
            rows = (estimates[c][2] for c in ("all_reduce", "all_gather", "reduce_scatter"))
            whole, gathered, scattered = rows
            assert whole.seconds == pytest.approx(gathered.seconds + scattered.seconds)
            assert whole.steps == gathered.steps + scattered.steps
            assert gathered[3:] == scattered[3:]
            assert estimates["broadcast"][2][3:] == whole[3:]


def test_wrap_halves_what_gathers_and_shortens_the_way():
    for size in (4, 8, 16):
        line, ring = (parse(f"torus:{size}{wrap}") for wrap in ("", " wrap=x"))
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            open_line, closed_ring = (
                costs(t, place(t, {"a": size}), collective, "a") for t in (line, ring)
            )
            assert closed_ring.link_bytes * 2 == pytest.approx(open_line.link_bytes, abs=2)
            assert closed_ring.steps < open_line.steps
        open_line, closed_ring = (
            costs(t, place(t, {"a": size}), "all_to_all", "a") for t in (line, ring)
        )
        assert closed_ring.link_bytes * 2 == open_line.link_bytes


def test_the_times_of_the_scaling_book():
    """Chapter "Sharded matrices": an all-gather takes V / (2 W k), an all-to-all a quarter."""
    torus, volume = parse("v5p:8x8x8"), 1 << 40
    speed = links_of(torus).near.bytes_per_s
    mesh = Mesh({"x": 8, "y": 8, "z": 8}, device_ids=torus.device_ids.ravel())
    for axes in (("x",), ("x", "y"), ("x", "y", "z")):
        estimate = cost(torus, mesh, "all_gather", axes, volume)
        received = 1 - 1 / 8 ** len(axes)
        assert estimate.seconds == pytest.approx(
            volume / (2 * speed * len(axes)) * received, rel=1e-4
        )
    exchanged = cost(torus, mesh, "all_to_all", "x", volume // 8)
    assert exchanged.seconds == pytest.approx(volume / (2 * speed) / 4, rel=1e-4)


def test_an_order_of_single_hops_is_never_costlier():
    """Gathers of boxes do not depend on the order; permutes and rings do."""
    shuffled = np.random.default_rng(2)
    for name in ("v5e:4x4", "torus:3x4 wrap=x", "v5p:2x2x2"):
        torus = parse(name)
        best = place(torus, {"a": torus.num_devices})
        for _ in range(20):
            other = Mesh(best.axes, device_ids=shuffled.permutation(best.device_ids.ravel()))
            for collective in COLLECTIVES:
                ours, theirs = (costs(torus, mesh, collective, "a") for mesh in (best, other))
                assert ours.seconds <= theirs.seconds
            assert costs(torus, best, "permute", "a").steps == 1


def test_lines_far_apart_share_the_links():
    """Axis b lies within axis a: its groups' rings have strides, and share every link."""
    torus = parse("torus:16 wrap=x")
    mesh = Mesh({"a": 4, "b": 4}, device_ids=torus.device_ids.ravel())
    near, far = (costs(torus, mesh, "all_gather", axis) for axis in "ba")
    # b: lines of four beside each other, 3 shards over the last link. a: rings of four, four to a
    # link, each with 3/2 shards.
    assert near.link_bytes == 3 * BYTES // 4
    assert far.link_bytes == 4 * 3 * BYTES // 8
    assert (near.steps, far.steps) == (3, 2 * 4)


def test_cores_share_the_links_of_their_chip():
    single, double = parse("torus:4 wrap=x"), parse("torus:4 wrap=x cores=2")
    single_core = costs(
        single, Mesh({"x": 4}, device_ids=single.device_ids.ravel()), "all_gather", "x"
    )
    mesh = Mesh({"x": 4, "core": 2}, device_ids=double.device_ids)
    assert costs(double, mesh, "all_gather", "x").link_bytes == 2 * single_core.link_bytes
    inner = costs(double, mesh, "all_gather", "core")
    assert (inner.link_bytes, inner.link, inner.steps) == (0, "in chip", 1)


def test_part_of_the_devices_leaves_links_to_the_rest():
    torus = parse("torus:4x4 wrap=xy")
    mesh = Mesh({"x": 4}, device_ids=torus.device_ids[:, 0, 0])
    half = Mesh({"a": 2, "x": 2}, device_ids=torus.device_ids[:, 0, 0])
    assert costs(torus, mesh, "all_gather", "x").link == "ICI x"
    assert costs(torus, half, "all_to_all", "x").link_bytes == BYTES // 2


def test_the_link_that_binds():
    torus = parse("torus:4x4 wrap=x")
    mesh = Mesh({"x": 4, "y": 4}, device_ids=torus.device_ids.ravel())
    links = [costs(torus, mesh, "all_reduce", axes).link for axes in ("x", "y", ("x", "y"))]
    assert links == ["ICI x", "ICI y", "ICI xy"]


def test_any_order_of_many_chips_is_judged():
    torus = parse("v5p:16x16x16")
    ids = np.random.default_rng(3).permutation(torus.num_devices)
    mesh = Mesh({"a": 64, "b": 64}, device_ids=ids)
    placed = place(torus, mesh.axes)
    for collective, axis in itertools.product(COLLECTIVES, "ab"):
        ours, theirs = (costs(torus, m, collective, axis) for m in (placed, mesh))
        assert 0 < ours.seconds < theirs.seconds
