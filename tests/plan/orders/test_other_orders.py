"""The device orders of torch_xla and of DTensor, against what these libraries return."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from plan.jax_cases import shapes_of
from shoal.errors import UsageError
from shoal.plan.orders import jax_order
from shoal.plan.orders.dtensor_order import Rings
from shoal.plan.placement import place
from shoal.plan.topology import parse

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "cases/torch_xla_mesh.jsonl").read_text().splitlines()
]


def of(kind):
    chosen = [case for case in CASES if case["kind"] == kind]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


def named(sizes):
    return [(f"a{number}", size) for number, size in enumerate(sizes)]


@of("hybrid_mesh")
def test_hybrid_mesh(case):
    dims = "x".join(map(str, case["slice_dims_xyz"]))
    slices = f" x {case['num_slices']} slices" if case["num_slices"] > 1 else ""
    across = case["dcn_mesh_shape"] and dict(named(case["dcn_mesh_shape"]))
    mesh = place(
        parse(f"torus:{dims}{slices}"),
        named(case["mesh_shape"]),
        across=across,
        compatible_with="torch_xla",
    )
    assert mesh.device_ids.tolist() == case["expected"]["logical_mesh"]


@of("nd_torus")
def test_nd_torus(case):
    shape = case["physical_mesh_shape"]
    physical = np.arange(np.prod(shape)).reshape(shape)
    ids, taken = jax_order.torus_order(physical, case["mesh_shape"], allow_split=True)
    assert ids.tolist() == case["expected"]["logical_mesh"]
    assert taken.tolist() == case["expected"]["assignment"]
    if case["expected_no_split"] == "same":
        whole, _ = jax_order.torus_order(physical, case["mesh_shape"], allow_split=False)
        assert whole.tolist() == ids.tolist()
    else:
        with pytest.raises(UsageError):
            jax_order.torus_order(physical, case["mesh_shape"], allow_split=False)


def test_before_axes_could_share_a_dim():
    slice_ = parse("torus:4x4")
    assert place(slice_, named((2, 8)), compatible_with="torch_xla").shape == (2, 8)
    with pytest.raises(UsageError, match="whole dims"):
        place(slice_, named((2, 8)), compatible_with="torch_xla", allow_split_physical_axes=False)


@pytest.mark.parametrize(
    ("text", "across", "words"),
    [
        ("gpu:2 hosts x 4", None, "is for TPUs"),
        ("cpu:8 hosts x 1", None, "is for TPUs"),
        ("flat:8", None, "is for TPUs"),
        ("v5e:2x2 x 2 slices", None, "Provide dcn_mesh_shape"),
        ("v5e:2x4", {"a0": 1}, None),
        ("torus:2x4 host=2x2", {"a0": 2}, "single slice"),
        ("v3:2x2", None, "one device a chip"),
    ],
)
def test_where_hybrid_mesh_fails(text, across, words):
    if words is None:
        place(parse(text), named((8,)), across=across, compatible_with="torch_xla")
        return
    with pytest.raises(UsageError, match=words):
        place(parse(text), named((8,)), across=across, compatible_with="torch_xla")


def places_of(text):
    """Read 'xyzc xyzc …'; chips of two digits stand for x and y."""
    return [tuple(map(int, word)) for word in text.split()]


def dtensor(text, sizes, **options):
    """Return the places (x, y, z, core) of the devices in DTensor's order."""
    torus = parse(text)
    ids = place(torus, named(sizes), compatible_with="dtensor", rings=Rings(**options)).device_ids
    whole = (*(*torus.shape, 1, 1)[:3], torus.cores)
    at = np.argsort(torus.device_ids, axis=None)[ids.ravel()]
    return list(zip(*(row.tolist() for row in np.unravel_index(at, whole)), strict=True))


def chips_of(text, cores):
    return [(x, y, 0, core) for x, y in places_of(text) for core in range(cores)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("torus:2x2", "0000 1000 1100 0100"),
        ("torus:2x2 cores=2", "0000 0001 1000 1001 1100 1101 0100 0101"),
        (
            "torus:2x2x2 cores=2",
            "1000 1001 1100 1101 0100 0101 0111 0110 1111 1110 1011 1010 0010 0011 0000 0001",
        ),
    ],
)
def test_one_ring_of_dtensor(text, wanted):
    wanted = places_of(wanted)
    assert dtensor(text, (1, len(wanted))) == wanted


def test_one_ring_of_dtensor_over_a_plane():
    wanted = chips_of("00 10 20 30 31 21 11 12 22 32 33 23 13 03 02 01", 2)
    assert dtensor("torus:4x4 cores=2", (1, 32)) == wanted


def test_one_ring_of_dtensor_over_two_planes():
    out = chips_of("10 20 30 31 21 11 12 22 32 33 23 13 03 02 01", 2)
    back = [(x, y, 1, core) for x, y, _, core in reversed(out)]
    corner = [(0, 0, z, core) for z in (1, 0) for core in (0, 1)]
    assert dtensor("torus:4x4x2 cores=2", (1, 64)) == [*out, *back, *corner]


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        (
            "torus:4x4 cores=2 host=2x2",
            {"axes": ("core", "y", "z", "x"), "can_split_host_across_rings": False},
            "00 01 10 11 02 03 12 13 20 21 30 31 22 23 32 33",
        ),
        (
            "torus:4x4 cores=2",
            {"bounds": (2, 2, 1, 2)},
            "00 10 01 11 20 30 21 31 02 12 03 13 22 32 23 33",
        ),
        (
            "torus:4x4 cores=2",
            {"axes": ("core", "y", "z", "x")},
            "00 01 02 03 10 11 12 13 20 21 22 23 30 31 32 33",
        ),
    ],
)
def test_the_rings_of_dtensor_hold_the_chips_that_it_enumerates(text, options, wanted):
    """Which chips a ring has; their order in it is another matter."""
    ring_order = dtensor(text, (4, 8), **options)
    wanted = chips_of(wanted, 2)
    for begin in range(0, 32, 8):
        assert sorted(ring_order[begin : begin + 8]) == sorted(wanted[begin : begin + 8])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [*range(16)]),
        ({"build_ring_across_rings": True}, [0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7]),
        ({"build_ring_across_rings": True, "rotate_ring_across_rings": True}, [*range(16)]),
        (
            {"can_split_host_across_rings": False},
            [0, 1, 5, 4, 2, 3, 7, 6, 8, 9, 13, 12, 10, 11, 15, 14],
        ),
        ({"bounds": (2, 2, 1, 1)}, [0, 1, 5, 4, 2, 3, 7, 6, 8, 9, 13, 12, 10, 11, 15, 14]),
        (
            {"bounds": (2, 2, 1, 1), "build_ring_across_rings": True},
            [0, 1, 5, 4, 2, 3, 7, 6, 10, 11, 15, 14, 8, 9, 13, 12],
        ),
        (
            {"axes": ("core", "y", "x", "z")},
            [0, 12, 8, 4, 1, 13, 9, 5, 2, 14, 10, 6, 3, 15, 11, 7],
        ),
        ({"dims": 2}, [0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4]),
        ({"dims": 0}, [*range(16)]),
    ],
)
def test_the_options_of_create_tpu_mesh(options, wanted):
    mesh = place(
        parse("torus:4x4 host=2x2"),
        named((4, 4)),
        compatible_with="dtensor",
        rings=Rings(**options),
    )
    assert mesh.device_ids.ravel().tolist() == wanted


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((16,), [*range(16)]),
        ((1, 16), [0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4]),
        ((2, 8), [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11, 15, 14, 13, 12]),
    ],
)
def test_the_rings_that_create_tpu_mesh_makes_by_default(sizes, wanted):
    mesh = place(parse("torus:4x4"), named(sizes), compatible_with="dtensor")
    assert mesh.device_ids.ravel().tolist() == wanted


def test_rings_across_rings_turn_as_in_dtensor():
    """Four rings of 2x2 chips, in the order of their corners, or rotated."""
    options = {"bounds": (2, 2, 1, 2), "build_ring_across_rings": True}
    blocks = {
        corner: chips_of(" ".join(f"{corner[0] + x}{corner[1] + y}" for x, y in snake), 2)
        for corner in ((0, 0), (2, 0), (2, 2), (0, 2))
        for snake in [[(0, 0), (1, 0), (1, 1), (0, 1)]]
    }
    plain = [chip for corner in ((0, 0), (2, 0), (2, 2), (0, 2)) for chip in blocks[corner]]
    rotated = [chip for corner in ((0, 0), (0, 2), (2, 2), (2, 0)) for chip in blocks[corner]]
    assert dtensor("torus:4x4 cores=2", (4, 8), **options) == plain
    options["rotate_ring_across_rings"] = True
    assert dtensor("torus:4x4 cores=2", (4, 8), **options) == rotated


@pytest.mark.parametrize(
    ("text", "sizes", "options", "words"),
    [
        ("torus:4x4", (4, 4), {"dims": 3}, "dims=3"),
        ("torus:4x4", (4, 4), {"dims": (9,)}, "whole number of axes"),
        ("torus:4x4", (4, 4), {"axes": ("x", "y", "z")}, "each once"),
        ("torus:4x4", (4, 4), {"bounds": (2, 2)}, "four numbers"),
        ("torus:4x4", (4, 4), {"bounds": (3, 9, 1, 1)}, "must divide"),
        ("torus:4x4 cores=4", (8, 8), {}, "one or two cores"),
        ("torus:4x4", (16, 1), {"can_split_host_across_rings": False}, "smaller than a host"),
        ("torus:4x1", (1, 4), {"can_split_host_across_rings": False}, "splits hosts"),
        ("v5e:2x2 x 2 slices", (8,), {}, "a single TPU slice"),
        ("gpu:2 hosts x 4", (8,), {}, "a single TPU slice"),
    ],
)
def test_where_create_tpu_mesh_fails(text, sizes, options, words):
    with pytest.raises(UsageError, match=words):
        place(parse(text), named(sizes), compatible_with="dtensor", rings=Rings(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compatible_with": "dtensr"}, "did you mean 'dtensor'"),
        ({"rings": Rings()}, "rings requires compatible_with='dtensor'"),
        ({"compatible_with": "torch_xla", "contiguous_submeshes": True}, "has no effect"),
        ({"compatible_with": "dtensor", "allow_split_physical_axes": True}, "has no effect"),
        ({"compatible_with": "dtensor", "rings": {"dims": 1}}, "must be a placement.Rings"),
        ({"compatible_with": "dtensor", "across": {"a0": 2}}, "across has no effect"),
    ],
)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(UsageError, match=words):
        place(parse("torus:2x2 host=1x2"), named((4,)), **options)


@pytest.mark.parametrize("text", ["torus:4x4", "torus:2x4x2", "torus:3x3", "v5e:4x2"])
def test_orders_of_others_hold_each_device_once(text):
    torus = parse(text)
    for sizes in shapes_of(torus.num_devices):
        for options in ({"compatible_with": "torch_xla"}, {"compatible_with": "dtensor"}):
            mesh = place(torus, named(sizes), **options)
            assert sorted(mesh.device_ids.ravel().tolist()) == sorted(torus.device_ids.ravel())
