"""The order of a new mesh's devices: placed as planned, on devices that are none."""

from __future__ import annotations

import numpy as np
import pytest
from jax.experimental import mesh_utils

from plan.described_devices import as_jax, generated, row
from shoal.arrays.make_mesh import OrderRequest, order_problems, ordered
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.mesh import Mesh
from shoal.plan.placement import Rings, place
from shoal.plan.topology import from_devices, parse

V5P = generated(4, 4, 4, "TPU v5")
SLICES = generated(4, 4, 1, "TPU v5 lite", num_slices=2)
CORES = generated(2, 2, 1, "TPU v3", one_device_per_chip=False)


def hosts(platform, counts):
    """List the devices of hosts without coordinates, numbered as JAX does for CPUs."""
    return [
        row(2048 * process + n, process, None, None, None, platform, platform)
        for process, count in enumerate(counts)
        for n in range(count)
    ]


def made(rows, axes, ordering=None, *, given=False, **named):
    named.setdefault("kind", rows[0]["platform"])
    pairs = list(axes.items())
    return ordered(pairs, as_jax(rows), ordering or OrderRequest(), given=given, **named)


@pytest.mark.parametrize(
    ("rows", "axes", "asked"),
    [
        (V5P, {"data": 4, "model": 16}, {}),
        (V5P[::-1], {"data": 4, "model": 16}, {}),
        (SLICES, {"data": 2, "model": 16}, {}),
        (SLICES, {"data": 4, "model": 8}, {"across": {"model": 2}}),
        (CORES, {"a": 2, "b": 4}, {}),
        (generated(2, 4, 1, "TPU v5 lite"), {"a": 8}, {}),
        (V5P, {"a": 4, "b": 16}, {"compatible_with": "dtensor", "rings": Rings(dims=1)}),
    ],
)  # fmt: skip
def test_tpus_are_placed_as_planned(rows, axes, asked):
    order = made(rows, axes, OrderRequest(**asked), label="pod", axis_types="explicit")
    planned = place(from_devices(rows), axes, **asked)
    assert (order.mesh.device_ids == planned.device_ids).all()
    owners = {row["id"]: row["process"] for row in rows}
    assert all(owners[device_id] == order.mesh.processes.flat[index]
               for index, device_id in enumerate(order.mesh.device_ids.flat))  # fmt: skip
    assert (order.mesh.kind, order.mesh.label) == ("tpu", "pod")
    assert set(order.mesh.axis_types.values()) == {"explicit"}


SEVENTH = generated(2, 2, 2, "TPU7x", one_device_per_chip=False)  # ordered anew by JAX 0.12


@pytest.mark.parametrize(
    ("rows", "axes", "asked"),
    [
        (V5P, {"x": 4, "y": 4, "z": 4}, {}),
        (V5P[::-1], {"a": 64}, {}),
        (SEVENTH, {"data": 2, "model": 8}, {}),
        (generated(2, 4, 1, "TPU v5 lite"), {"a": 8}, {}),
        (V5P, {"a": 8, "b": 8}, {"allow_split_physical_axes": True}),
        (SLICES, {"data": 4, "model": 8}, {"across": {"data": 2},
                                           "allow_split_physical_axes": True}),
        (hosts("cpu", (4, 4)), {"data": 2, "model": 4}, {"across": {"data": 2}}),
    ],
)  # fmt: skip
def test_the_order_of_jax_is_that_of_the_installed_one(rows, axes, asked):
    order = made(rows, axes, OrderRequest(compatible_with="jax", **asked))
    devices, sizes = as_jax(rows), tuple(axes.values())
    split = {"allow_split_physical_axes": "allow_split_physical_axes" in asked}
    if "across" in asked:
        outer = [asked["across"].get(name, 1) for name in axes]
        inner = [size // part for size, part in zip(sizes, outer, strict=True)]
        is_host = rows[0]["slice"] is None
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, process_is_granule=is_host, **split
        )
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices, **split)
    assert order.mesh.device_ids.ravel().tolist() == [device.id for device in grid.ravel()]


def test_shape_that_jax_refuses_raises_with_its_reason():
    with pytest.raises(UsageError, match=r"make_mesh: JAX .* makes no mesh of \(8, 8\)"):
        made(V5P, {"a": 8, "b": 8}, OrderRequest(compatible_with="jax"))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("counts", [(8,), (4, 4), (2, 6), (1, 1, 1, 1, 1, 1, 1, 1)])
def test_hosts_stand_process_after_process(platform, counts):
    rows = hosts(platform, counts)
    order = made(rows, {"a": 2, "b": 4})
    ids, owners = ([row[name] for row in rows] for name in ("id", "process"))
    assert order.mesh == Mesh({"a": 2, "b": 4}, device_ids=ids, processes=owners, kind=platform)
    assert made(rows[::-1], {"a": 2, "b": 4}).mesh == order.mesh


def test_across_counts_processes_where_there_are_no_slices():
    rows = hosts("gpu", (4, 4))
    mesh = made(rows, {"data": 4, "model": 2}, OrderRequest(across={"model": 2})).mesh
    assert mesh.processes.tolist() == [[0, 1]] * 4


def test_listed_devices_keep_their_order_unless_placement_is_requested():
    listed = [V5P[n] for n in np.random.default_rng(0).permutation(64)]
    ids = [row["id"] for row in listed]
    axes = {"a": 8, "b": 8}
    planned = place(from_devices(V5P), axes).device_ids.ravel().tolist()
    assert ids != planned
    for ordering, wanted in (
        (OrderRequest(), ids),
        (OrderRequest(order="given"), ids),
        (OrderRequest(order="wires"), planned),
        (OrderRequest(allow_split_physical_axes=True), planned),
        (OrderRequest(order="wires", allow_split_physical_axes=True), planned),
    ):
        got = made(listed, axes, ordering, given=True).mesh.device_ids.ravel().tolist()
        assert got == wanted


def test_a_part_of_a_pod_is_a_topology_of_its_own():
    part = [row for row in V5P if row["coords"][2] == 1]
    order = made(part, {"a": 16}, OrderRequest(order="wires"), given=True)
    assert order.topology.text == "v5p:4x4x1"
    assert (order.mesh.device_ids == place(from_devices(part), {"a": 16}).device_ids).all()


def test_a_part_of_a_slice_has_not_the_links_of_the_whole():
    tall = generated(4, 4, 8, "TPU v5p")
    half = [row for row in tall if row["coords"][2] < 4]
    for present, wanted in ((tall, "v5p:4x4x4 wrap=xy"), (hosts("cpu", (64,)), "v5p:4x4x4")):
        order = made(
            half, {"a": 64}, OrderRequest(order="wires"), given=True, present=as_jax(present)
        )
        assert order.topology.text == wanted


def test_chosen_order_comes_with_its_reason():
    why = made(SLICES, {"data": 2, "model": 16}).why
    assert "v5e:4x4 x 2 slices" in why
    assert "8 processes: placed to match the interconnect" in why
    assert "data has hops of 0 links at most, over 2 slices" in why
    assert why.endswith("model has hops of 1 link at most")
    assert "process after process" in made(hosts("cpu", (4, 4)), {"a": 8}).why
    assert (
        "compatible_with='jax' asks for"
        in made(V5P, {"a": 64}, OrderRequest(compatible_with="jax")).why
    )
    assert "given by devices=" in made(V5P, {"a": 64}, given=True).why


@pytest.mark.parametrize(
    ("rows", "axes", "ordering", "message"),
    [
        (SLICES, {"a": 32}, OrderRequest(across={"b": 2}), "make_mesh: across: no axis 'b'"),
        (SLICES, {"a": 32}, OrderRequest(across={"a": 4}), "make_mesh: across: .* has 2 slices"),
        (SLICES, {"a": 32}, OrderRequest(across="a"), "make_mesh: "),
        (
            V5P,
            {"a": 8, "b": 8},
            OrderRequest(allow_split_physical_axes=False),
            "make_mesh: 8x8 on v5p",
        ),
        (
            V5P,
            {"a": 64},
            OrderRequest(compatible_with="jacks"),
            "make_mesh: compatible_with='jacks'",
        ),
        ([*V5P, V5P[0]], {"a": 65}, OrderRequest(), "(?s)make_mesh: .*ids occur twice"),
        (
            V5P[:-1] + hosts("cpu", (1,)),
            {"a": 64},
            OrderRequest(),
            "(?s)make_mesh: .*have no coordinates",
        ),
    ],
)
def test_planner_errors_name_make_mesh(rows, axes, ordering, message):
    with pytest.raises(UsageError, match=message) as caught:
        made(rows, axes, ordering)
    assert "place:" not in str(caught.value)
    assert caught.value.problems


def test_orders_that_cannot_be():
    assert "must be 'wires' or 'given'" in order_problems(OrderRequest("best"), is_listed=True)[0]
    assert "needs a list of devices=" in order_problems(OrderRequest("given"), is_listed=False)[0]
    told = order_problems(OrderRequest("given", across={"a": 2}), is_listed=True)
    assert told == ["order='given' leaves nothing for across to choose"]
    for ordering in (OrderRequest(), OrderRequest("wires"), OrderRequest("wires", {"a": 2})):
        assert order_problems(ordering, is_listed=False) == []
    assert order_problems(OrderRequest("given"), is_listed=True) == []


def test_a_device_that_is_none():
    with pytest.raises(UsageTypeError, match=r"is neither a device"):
        ordered([("a", 1)], [type("Odd", (), {"id": None, "process_index": 0})()], OrderRequest(),
                given=False)  # fmt: skip


def test_incomplete_slice_is_treated_as_flat():
    part = parse("v5p:4x4x4")
    assert part.num_devices == 64
    order = made(V5P[:-1], {"a": 63})
    assert order.topology.text == "flat:63 on=tpu"
    assert "for no links are known" in order.why


STANDING = [  # a topology's text, its devices, how many a host has
    ("v5e:4x4", generated(4, 4, 1, "TPU v5 lite"), 4),
    ("v5e:4x4 x 2 slices", generated(4, 4, 1, "TPU v5 lite", num_slices=2), 4),
    ("v5p:2x2x4", generated(2, 2, 4, "TPU v5"), 4),
    ("v3:4x4", generated(4, 4, 1, "TPU v3", one_device_per_chip=False), 8),
    ("gpu:3 hosts x 2", hosts("gpu", [2, 2, 2]), 2),
]


@pytest.mark.parametrize(("text", "real", "count"), STANDING, ids=[row[0] for row in STANDING])
@pytest.mark.parametrize(
    "ordering", [OrderRequest(), OrderRequest(compatible_with="dtensor", rings=Rings())]
)
def test_cpu_devices_stand_for_others_in_their_order(text, real, count, ordering):
    if ordering.rings is not None and not (text[0] == "v" and "slices" not in text):
        pytest.skip("rings are those of one slice of TPUs")
    cpus = hosts("cpu", [count] * (len(real) // count))
    axes = {"data": len(real) // 2, "model": 2}
    virtual = made(cpus, axes, ordering, described=text).mesh
    meant = made(real, axes, ordering).mesh
    place_of = {row["id"]: place for place, row in enumerate(real)}
    places = [place_of[number] for number in meant.device_ids.ravel().tolist()]
    assert virtual.device_ids.ravel().tolist() == [cpus[place]["id"] for place in places]
    assert virtual.kind == "cpu"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (hosts("cpu", [8, 8]), r"has 16 devices on 4 hosts, and this job 16 on 2: .* -n 4 --dev"),
        (hosts("cpu", [4, 4]), "and this job 8 on 2: shoal run -n 4 --devices 4 starts as many"),
        (hosts("gpu", [4, 4, 4, 4]), "only CPU devices stand for others"),
    ],
)
def test_devices_that_cannot_stand_for_a_topology_are_refused(rows, words):
    with pytest.raises(UsageError, match=f"make_mesh: SHOAL_TOPOLOGY='v5e:4x4'.*{words}"):
        made(rows, {"data": len(rows)}, described="v5e:4x4")
