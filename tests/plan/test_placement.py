"""Meshes on described wires, judged by hops on the wires themselves."""

import itertools
import math

import numpy as np
import pytest

from plan.described_devices import row
from plan.jax_cases import CASES, check, devices_of, of, shapes_of
from shoal.errors import UsageError
from shoal.plan.orders import dtensor_order, jax_order
from shoal.plan.orders.dtensor_order import Rings
from shoal.plan.placement import place
from shoal.plan.schedules.ring import best_walk
from shoal.plan.topology import Torus, from_devices, parse
from shoal.plan.torus_order import _best, _sides

NAMES = "abcdefgh"


def axes_of(sizes):
    return list(zip(NAMES, sizes, strict=False))


def judged(torus, ids):
    """Return (longest, total) of the hops of each axis's rings, at the worst group [axes].

    Between the cores of a chip there is none.
    """
    verdict = []
    chips = {n: at[:-1] for at, n in np.ndenumerate(torus.device_ids)}
    coords = np.array([chips[n] for n in ids.ravel()]).reshape(*ids.shape, -1)
    rings = np.where(torus.wrap, torus.shape, 0)
    for axis in range(ids.ndim):
        apart = np.abs(coords - np.roll(coords, -1, axis=axis))
        hops = np.minimum(apart, np.where(rings > 0, rings - apart, apart)).sum(axis=-1)
        verdict.append((int(hops.max(axis=axis).max()), int(hops.sum(axis=axis).max())))
    return verdict


@of("create_")
def test_jaxs_cases(case):
    sizes, outer = case["mesh_shape"], case.get("dcn_mesh_shape") or []
    if outer and len(outer) != len(sizes):
        return  # JAX aligns them at the end, in silence; here each axis has both
    totals = [size * part for size, part in itertools.zip_longest(sizes, outer, fillvalue=1)]
    topology = from_devices(devices_of(case))
    across = dict(axes_of(outer)) if outer else None
    known = ("allow_split_physical_axes", "contiguous_submeshes")
    options = {name: value for name, value in case["kwargs"].items() if name in known}

    def make():
        axes = axes_of(totals)
        return place(topology, axes, across=across, compatible_with="jax", **options).device_ids

    check(case, make)


SLICES = ["v4:2x2x1", "v4:2x2x4", "v5e:2x4", "v5e:1x8", "v5e:4x4", "v5p:2x2x2", "v5p:4x4x4",
          "v6e:4x8", "torus:3x3x3", "torus:6x5", "v3:2x2", "tpu7x:2x2x1"]  # fmt: skip


def peers(torus, sizes):
    """Yield the orders of JAX and DTensor, with all options that change one."""
    for split in (False, True):
        try:
            yield jax_order.order(torus, sizes, allow_split_physical_axes=split)
        except UsageError:
            continue
    for options in ({}, {"dims": -1}, {"dims": len(sizes)}):
        for is_built in (False, True):
            yield dtensor_order.order(
                torus, sizes, Rings(**options, build_ring_across_rings=is_built)
            )


@pytest.mark.parametrize("name", SLICES)
def test_no_shape_is_refused_and_no_peer_is_ever_better(name):
    torus = parse(name)
    for sizes in shapes_of(torus.num_devices):
        mesh = place(torus, axes_of(sizes))
        assert mesh.shape == tuple(sizes)
        assert sorted(mesh.device_ids.ravel().tolist()) == sorted(torus.device_ids.ravel().tolist())
        ours = judged(torus, mesh.device_ids)
        for order in peers(torus, sizes):
            theirs = judged(torus, order)
            assert ours[-1] <= theirs[-1], (sizes, ours, theirs)
            pairs = list(zip(ours, theirs, strict=True))
            worse = all(b[0] <= a[0] and b[1] <= a[1] for a, b in pairs)
            assert not worse or ours == theirs, (sizes, ours, theirs)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("v5e:1x8", (2, 14)), ("torus:3x3x3", (2, 28)), ("v6e:2x4", (1, 8)), ("v5p:2x2x2", (1, 8)),
     ("v5e:4x4", (1, 16)), ("v5e:16x16", (1, 256)), ("torus:8 wrap=x", (1, 8))],
)  # fmt: skip
def test_one_axis_over_all_is_a_ring_where_there_is_one(name, wanted):
    torus = parse(name)
    mesh = place(torus, {"x": torus.num_devices})
    assert judged(torus, mesh.device_ids) == [wanted]


def test_the_cores_of_a_chip_are_nearest():
    for name, sizes in [("v3:2x2", (4, 2)), ("tpu7x:4x4x4", (8, 8, 2)), ("v2:2x4", (2, 4, 2))]:
        torus = parse(name)
        ids = place(torus, axes_of(sizes)).device_ids
        assert (ids % 2 == np.arange(2)).all()
        assert (ids[..., 0] + 1 == ids[..., 1]).all()
        assert judged(torus, ids)[-1] == (0, 0)
    assert judged(torus, place(torus, {"x": 16}).device_ids) == [(1, 8)]


def test_jax_refuses_and_shoal_places():
    for name, sizes in [
        ("v4:2x2x4", (2, 2, 4)),
        ("v4:4x4x16", (4, 4, 16)),
        ("v4:8x8x64", (8, 8, 64)),
    ]:
        with pytest.raises(UsageError, match="allow_split_physical_axes=True"):
            place(parse(name), axes_of(sizes), compatible_with="jax")
        mesh = place(parse(name), axes_of(sizes), allow_split_physical_axes=False)
        assert mesh.shape == sizes


def test_offset_slices_are_as_those_at_the_origin():
    case = next(c for c in CASES if c["id"] == "v5e-2x2-at-offset")
    torus = from_devices(devices_of(case))
    assert judged(torus, place(torus, {"x": 4}).device_ids) == [(1, 4)]


def test_slices_lie_across_the_axis_that_is_named_else_the_first():
    topology = parse("v5e:4x4 x 4 slices")
    slice_of = {
        n: part for part, torus in enumerate(topology.parts()) for n in torus.device_ids.flat
    }
    for across, wanted in [
        (None, (4, 1)),
        ({"a": 4}, (4, 1)),
        ({"a": 2, "b": 2}, (2, 2)),
        ({"b": 4}, (1, 4)),
    ]:
        ids = place(topology, {"a": 8, "b": 8}, across=across).device_ids
        slices = np.vectorize(slice_of.get)(ids)
        blocks = slices.reshape(wanted[0], 8 // wanted[0], wanted[1], 8 // wanted[1])
        assert (blocks == np.arange(4).reshape(wanted[0], 1, wanted[1], 1)).all()
    torus = next(topology.parts())
    ids = place(topology, {"a": 8, "b": 8}).device_ids[:2]
    assert judged(torus, ids)[1] == (1, 8)


def test_hosts_hold_the_last_axes():
    mesh = place(parse("gpu:4 hosts x 8"), {"data": 4, "model": 8})
    assert (mesh.processes == np.arange(4)[:, None]).all()
    assert mesh.kind == "gpu"
    turned = place(parse("gpu:4 hosts x 8"), {"data": 8, "model": 4}, across={"model": 4})
    assert (turned.processes == np.arange(4)).all()


def test_host_blocks_of_a_torus_are_granules_when_asked_for():
    mesh = place(parse("v4:4x4x1"), {"a": 4, "b": 4}, across={"a": 4})
    assert (mesh.processes == np.arange(4)[:, None]).all()
    assert judged(parse("v4:4x4x1"), mesh.device_ids)[1] == (1, 4)


TWO = "v5e:2x2 x 2 slices"


@pytest.mark.parametrize(
    ("text", "axes", "options", "words"),
    [
        ("v5p:4x4x4", {"data": 8, "model": 16}, {},
         "128 devices, and v5p:4x4x4 has 64; these fit: data=4 model=16, or data=8 model=8"),
        ("flat:4", {"x": 2.5}, {}, "2.5"),
        ("flat:4", {"x": [4]}, {}, "must be an integer"),
        ("flat:4", "22", {}, "axes"),
        ("flat:4", {"x": 4}, {"compatible_with": "torch"}, "mean 'torch_xla'"),
        ("v5e:3x4", {"a": 6, "b": 2}, {"allow_split_physical_axes": False}, "whole dims"),
        (TWO, {"data": 8}, {"across": {"dat": 2}}, "did you mean"),
        (TWO, {"data": 8}, {"across": {"data": 4}}, f"makes 4, and {TWO} has 2 slices"),
        (TWO, {"data": 8}, {"across": {"data": 3}}, "does not divide"),
        ("v5e:2x2 x 3 slices", {"a": 4, "b": 3}, {"across": {"a": 3}}, "does not divide"),
        ("v5e:2x2 + v5e:2x4", {"a": 2, "b": 6}, {}, "6 devices here; they hold 4, 8"),
        ("v5e:2x2 + v5e:2x4", {"a": 3, "b": 4}, {"across": {"a": 3}}, "makes 3"),
        ("v5e:2x2 + v5e:2x4", {"a": 6, "b": 2}, {"across": {"a": 2}}, "those of .* hold 4, 8"),
    ],
)  # fmt: skip
def test_axes_that_do_not_fit_the_topology_raise_with_the_reason(text, axes, options, words):
    with pytest.raises(UsageError, match=words):
        place(parse(text), axes, **options)


def test_hosts_that_differ_are_not_called_slices():
    owners = [0, 0, 0, 0, 1, 1]
    hosts = [row(n, owner, None, None, None, "gpu", "A") for n, owner in enumerate(owners)]
    with pytest.raises(UsageError, match=r"each host must hold 1x3 = 3 devices; those of .* 4, 2"):
        place(from_devices(hosts), {"data": 2, "model": 3}, across={"data": 2})


def test_a_text_is_no_topology():
    with pytest.raises(UsageError, match=r"topology.parse\('v5p:4x4x4'\) makes one"):
        place("v5p:4x4x4", {"x": 64})


def test_one_size_is_what_the_others_leave():
    torus = parse("v5e:4x4")
    assert place(torus, {"data": -1, "model": 2}) == place(torus, {"data": 8, "model": 2})
    assert place(torus, {"data": -1}).axes == {"data": 16}
    with pytest.raises(UsageError, match="size -1 must be at least 1"):
        place(torus, {"data": -1, "model": -1})
    with pytest.raises(UsageError, match="has 15 devices, and v5e:4x4 has 16; these fit"):
        place(torus, {"data": -1, "model": 3})


def test_many_chips():
    mesh = place(parse("v5p:16x16x32 x 16 slices"), {"data": 64, "fsdp": 128, "model": 16})
    assert np.unique(mesh.device_ids).size == math.prod(mesh.shape) == 131_072


def all_ways(grid, sizes):
    """All ways to give axes parts of dims, by brute force [axis][dim]."""
    divisors = [[n for n in range(1, size + 1) if size % n == 0] for size in grid]
    for taken in itertools.product(itertools.product(*divisors), repeat=len(sizes)):
        rows = [math.prod(row) for row in taken]
        dims = [math.prod(part) for part in zip(*taken, strict=True)]
        if (rows, dims) == ([*sizes], [*grid]):
            yield taken


def cost(taken, grid, wraps):
    """Return (longest, total) of each axis, the last one first."""
    return [best_walk(_sides(taken, n, grid, wraps))[:2] for n in reversed(range(len(taken)))]


@pytest.mark.parametrize("wraps", [(False,) * 3, (True, False, False), (True,) * 3], ids=str)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("grid", [(4, 2, 2), (6, 4, 1), (2, 2, 8)], ids=str)
def test_no_way_to_share_the_dims_is_better(grid, split, wraps):
    for sizes in shapes_of(math.prod(grid)):
        ways = [
            taken for taken in all_ways(grid, sizes)
            if split or all(p in (1, g) for row in taken for p, g in zip(row, grid, strict=True))
        ]  # fmt: skip

        best = _best(grid, wraps, sizes, split)
        assert (best is None) == (not ways)
        if ways:
            assert best in ways
            assert cost(best, grid, wraps) == min(cost(taken, grid, wraps) for taken in ways)


def test_a_torus_of_two_cores_keeps_them_together():
    torus = Torus((2, 2, 1), "tpu7x")
    assert judged(torus, place(torus, {"x": 8}).device_ids)[0][0] == 1


@pytest.mark.parametrize("sizes", [(3, 4), (6, 2), (12,), (1, 3, 4), (3, 2, 2), (12, 1)])
def test_slices_that_differ_hold_whole_rows_of_the_first_axis(sizes):
    pair = parse("v5e:2x2 + v5e:2x4")
    ids = place(pair, [(f"a{axis}", size) for axis, size in enumerate(sizes)]).device_ids
    assert sorted(ids.ravel().tolist()) == list(range(12))
    first = next(axis for axis, size in enumerate(sizes) if size > 1)
    rows = ids.reshape(sizes[first], -1)
    for torus in pair.parts():
        own = np.isin(rows, torus.device_ids).all(axis=1)
        assert own.sum() * rows.shape[1] == torus.num_devices


def test_a_program_for_several_slices_runs_on_one():
    for across in ({}, {"data": 1}):
        mesh = place(parse("v5e:2x4"), {"data": 2, "model": 4}, across=across)
        assert mesh == place(parse("v5e:2x4"), {"data": 2, "model": 4})


def test_shapes_that_fit_are_named_however_many_axes_are_wrong():
    with pytest.raises(UsageError, match="these fit: data=4 model=4, or"):
        place(parse("v5e:4x4"), {"data": 5, "model": 5})
    with pytest.raises(UsageError, match="a mesh of no axes has 1 device, and"):
        place(parse("v5e:4x4"), {})


def test_as_many_axes_as_a_mesh_can_have():
    axes = {f"x{n}": 1 for n in range(40)} | {"a": 16}
    mesh = place(parse("v5e:4x4"), axes)
    assert (
        mesh.device_ids.ravel().tolist() == place(parse("v5e:4x4"), {"a": 16}).device_ids.tolist()
    )
