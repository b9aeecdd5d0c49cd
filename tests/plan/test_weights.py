"""Orders for given amounts of traffic, against every order that lays axes onto boxes of chips."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.plan.cost import cost
from shoal.plan.hardware.links import Link, Links, links_of
from shoal.plan.mesh import Mesh
from shoal.plan.placement import place
from shoal.plan.topology import parse

NAMES = "abc"


def named(sizes):
    return dict(zip(NAMES, sizes, strict=False))


def seconds(torus, mesh, weights):
    links = links_of(torus)
    if links.near is None:  # then times count in proportion alone
        links = Links(Link("link", 1.0, 0.0, ""), None)
    return sum(
        cost(torus, mesh, "all_reduce", name, int(weight), links=links).seconds
        for name, weight in weights.items()
    )


def shares_of(grid, sizes, left=None):
    """Yield how much of each dim each axis takes [axis][dim], in any way."""
    left = grid if left is None else left
    if not sizes:
        if math.prod(left) == 1:
            yield ()
        return
    for share in itertools.product(*[[n for n in range(1, s + 1) if s % n == 0] for s in left]):
        if math.prod(share) == sizes[0]:
            rest = tuple(size // part for size, part in zip(left, share, strict=True))
            yield from ((share, *more) for more in shares_of(grid, sizes[1:], rest))


def every_order(torus, sizes):
    """Yield a mesh for each way to share the dims, and each nesting of the axes in each dim."""
    axes, dims = range(len(sizes)), range(len(torus.grid))
    for shares in shares_of(torus.grid, sizes):
        for nest in itertools.permutations(axes):
            parts = [shares[axis][dim] for dim in dims for axis in nest]
            order = [dim * len(sizes) + nest.index(axis) for axis in axes for dim in dims]
            ids = torus.device_ids.reshape(parts).transpose(order).reshape(sizes)
            yield Mesh(named(sizes), device_ids=ids.ravel())


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("v5p:2x2x4", (4, 4)), ("v5e:4x8", (4, 8)), ("v5p:4x4x2", (2, 4, 4)), ("v5e:2x8", (4, 2, 2)),
     ("torus:4x4 wrap=x", (2, 8)), ("v5e:16x2", (8, 4)), ("torus:2x2x2 cores=2", (4, 4)),
     ("torus:8x4 wrap=xy", (2, 2, 8))],
)  # fmt: skip
def test_no_order_of_boxes_takes_less_time(text, sizes):
    torus = parse(text)
    orders = list(every_order(torus, sizes))
    for weights in itertools.product([0, 1 << 14, 1 << 28], repeat=len(sizes)):
        if any(weights):
            busy = named(weights)
            ours = seconds(torus, place(torus, named(sizes), weights=busy), busy)
            least = min(seconds(torus, mesh, busy) for mesh in orders)
            assert ours <= least * (1 + 1e-9), (weights, ours, least)


def test_the_busy_axis_has_the_wires_wherever_it_stands():
    torus = parse("v5p:4x4x8")
    last = place(torus, {"idle": 8, "busy": 16}, weights={"busy": 1 << 30})
    first = place(torus, {"busy": 16, "idle": 8}, weights={"busy": 1 << 30})
    assert first.axis_names == ("busy", "idle")
    assert (first.device_ids == last.device_ids.T).all()


def test_slices_lie_across_the_idle_axis():
    topology = parse("v5e:4x4 x 2 slices")
    first, second = (set(torus.device_ids.ravel().tolist()) for torus in topology.parts())
    for weights, across in [({"a": 1.0}, 1), ({"b": 1.0}, 0), ({"a": 2.0, "b": 3.0}, 0)]:
        ids = place(topology, {"a": 4, "b": 8}, weights=weights).device_ids
        for axis in (0, 1):
            line = set(np.moveaxis(ids, axis, 0)[:, 0].tolist())
            assert (line <= first or line <= second) == (axis != across)


def test_axis_of_the_largest_weight_is_placed_within_hosts():
    hosts = parse("gpu:4 hosts x 8")
    mesh = place(hosts, {"model": 8, "data": 4}, weights={"model": 1.0, "data": 0.1})
    assert all(len({*column}) == 1 for column in mesh.processes.T.tolist())
    assert place(hosts, {"data": 4, "model": 8}, weights={"model": 1}) == place(
        hosts, {"data": 4, "model": 8}
    )


def test_weights_of_many_axes_place_every_device_once():
    torus = parse("v5p:4x4x4")
    mesh = place(torus, {"a": 2, "b": 4, "c": 2, "d": 4}, weights={"a": 1e9, "d": 1.0})
    assert sorted(mesh.device_ids.ravel().tolist()) == list(range(64))


def test_whole_dims_only():
    torus = parse("v5e:4x8")
    mesh = place(torus, {"a": 4, "b": 8}, weights={"a": 1.0}, allow_split_physical_axes=False)
    assert mesh.shape == (4, 8)
    with pytest.raises(UsageError, match="whole dims"):
        place(torus, {"a": 16, "b": 2}, weights={"a": 1.0}, allow_split_physical_axes=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"modl": 1}}, "did you mean 'model'"),
        ({"weights": {"model": -1}}, "must be a number of bytes"),
        ({"weights": {"model": math.inf}}, "must be a number of bytes"),
        ({"weights": {"model": math.nan}}, "must be a number of bytes"),
        ({"weights": {"model": "1 GiB"}}, "must be a number of bytes"),
        ({"weights": {"model": True}}, "must be a number of bytes"),
        ({"weights": {"model": 0}}, "all are 0"),
        ({"weights": {}}, "all are 0"),
        ({"weights": 3}, "must be a dict"),
        ({"weights": {"model": 1}, "compatible_with": "jax"}, "cannot be combined"),
        ({"weights": {"model": 1}, "contiguous_submeshes": True}, "cannot be combined"),
    ],
)
def test_weights_that_say_nothing(options, words):
    with pytest.raises(UsageError, match=words):
        place(parse("v5e:2x4"), {"data": 2, "model": 4}, **options)
