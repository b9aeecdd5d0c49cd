"""What was read becomes arrays: the boxes of each process, and the way over the devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import PartitionSpec

from arrays.device_grids import placements
from checkpoint import hand_written
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.placing.put import put
from shoal.checkpoint.blocks.memory import empty
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.restoring import read_strategy
from shoal.checkpoint.restoring.filling import fill
from shoal.checkpoint.restoring.placing import (
    exchanged,
    geometry,
    intermediates,
    on_devices,
    spread_of,
)
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.restoring.target import LeafRequest
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

ONCE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def same(array, wanted):
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes()


def values_of(shape):
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


@given(placements())
def test_the_boxes_of_a_process_are_those_of_its_devices(placement):
    layout, shape = placement
    place = sharding_of(layout)
    spread = spread_of(place, shape, jax.process_index())
    boxes = set(zip(spread.origins, spread.extents, strict=True))
    assert len(boxes) == len(spread.origins)
    for index in place.addressable_devices_indices_map(shape).values():
        ranges = [cut.indices(size) for cut, size in zip(index, shape, strict=True)]
        box = tuple(r[0] for r in ranges), tuple(r[1] - r[0] for r in ranges)
        number = spread.number[tuple((cut.start, cut.stop) for cut in index)]
        assert (spread.origins[number], spread.extents[number]) == box
        boxes.discard(box)
    assert not boxes
    assert spread_of(place, shape, 99).origins == ()


@ONCE
@given(placements())
def test_any_placement_is_restored_and_exchanged(tmp_path, placement):
    layout, shape = placement
    value = values_of(shape)
    path = tmp_path / str(abs(hash((layout, shape))))
    if not path.exists():
        hand_written.write(path, {"a": value}, hand_written.grid(2, 3))
    place = sharding_of(layout)
    same(restore(path, layout)["a"], value)
    checkpoint = open_checkpoint(LocalStore(path))
    for intermediate in intermediates(place, shape):
        filling = on_devices(checkpoint, LeafRequest(0, place, None), intermediate)
        ((array,), _) = fill(checkpoint, [filling], 1 << 22)
        assert array.sharding == intermediate
        (moved,) = exchanged([array], [place])
        assert moved.sharding == place
        same(moved, value)


def test_an_intermediate_sharding_cuts_one_dim_over_all_devices_in_order():
    mesh = Mesh({"x": 2, "y": 4}, device_ids=[7, 6, 5, 4, 3, 2, 1, 0], kind="cpu")
    found = intermediates(sharding_of(Layout(mesh, "x", None, "y")), (2, 16, 24))
    assert [one.spec for one in found] == [
        PartitionSpec(None, "all"),
        PartitionSpec(None, None, "all"),
    ]
    assert [device.id for device in found[0].mesh.devices] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert intermediates(sharding_of(Layout(mesh, "x", None, "y")), (2, 3, 4)) == []
    assert intermediates(jax.sharding.SingleDeviceSharding(jax.devices()[0]), (8,)) == []


def test_moves_to_devices_are_done_in_bounded_batches(monkeypatch):
    from shoal.arrays.moving import move as moving_move
    from shoal.checkpoint.restoring import placing

    mesh = Mesh({"x": 8}, kind="cpu")
    rows, columns = Layout(mesh, "x", None), Layout(mesh, None, "x")
    monkeypatch.setattr(placing, "_MOVED_BYTES", 100)
    arrays = [put(values_of((8, 8 * n)), rows) for n in (1, 2, 30, 1, 1)]
    counts = []
    move = moving_move.move
    monkeypatch.setattr(placing, "move", lambda m, donate: counts.append(len(m)) or move(m))
    moved = placing.exchanged(arrays, [sharding_of(columns)] * 5)
    assert counts == [2, 1, 2]
    for array, n in zip(moved, (1, 2, 30, 1, 1), strict=True):
        same(array, values_of((8, 8 * n)))


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 1 << 14, (1 << 14) + 1, 4 << 20, (4 << 20) + 3])
def test_memory_is_fresh_and_lies_well(num_bytes):
    one, other = (empty((num_bytes,), np.dtype(np.uint8)) for _ in range(2))
    assert one.nbytes == num_bytes
    one[...], other[...] = 1, 2
    assert (one == 1).all()
    if num_bytes >= 1 << 14:
        assert one.ctypes.data % 64 == 0
    assert one.flags.writeable


class Pretended:
    """Four processes of two devices each, without any: what `read_strategy` must know of them."""

    def __init__(self, dim):
        self.dim = dim  # along which an array is cut over all devices; None: whole everywhere


def boxes(place, shape, process):
    if place.dim is None:
        return [(0,) * len(shape)], [shape]
    found = []
    for device in (2 * process, 2 * process + 1):
        cut = shape[place.dim] // 8
        origin = [0] * len(shape)
        extent = list(shape)
        origin[place.dim], extent[place.dim] = device * cut, cut
        found.append((tuple(origin), tuple(extent)))
    return [o for o, _ in found], [e for _, e in found]


def geometry_of_four():
    def cuts(place, shape):
        return [Pretended(dim) for dim, size in enumerate(shape) if size % 8 == 0]

    return read_strategy.Geometry(boxes, lambda place: range(4), cuts)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Saved by rows: large, small, and one that nothing divides."""
    path = tmp_path_factory.mktemp("rows") / "saved"
    tree = {
        "large": np.zeros((2048, 4096), np.float32),
        "odd": np.zeros((1001, 1003), np.float32),
        "small": np.zeros((8, 8), np.float32),
    }
    hand_written.write(path, tree, hand_written.grid(8), processes=4)
    return open_checkpoint(LocalStore(path))


@pytest.mark.parametrize(("mode", "dim", "moved"), [
    ("auto", 0, ()), ("auto", 1, ("large",)), ("auto", None, ("large",)),
    ("direct", 1, ()), ("exchange", 0, ("large", "small")), ("exchange", None, ("large", "small")),
])  # fmt: skip
def test_the_way_of_each_leaf(rows, mode, dim, moved):
    place = Pretended(dim)
    requests = [
        LeafRequest(0, place, None),
        LeafRequest(1, Pretended(None), None),
        LeafRequest(2, place, None),
    ]
    strategy = read_strategy.choose(rows, requests, mode, geometry_of_four())
    names = tuple(
        rows.manifest.leaves[requests[n].leaf].name for n in sorted(strategy.intermediate)
    )
    assert names == moved
    assert all(
        intermediate.dim == 0 for intermediate in strategy.intermediate.values()
    )  # as it lies


def test_plan_for_four_processes_counts_bytes_of_each_mode(rows):
    requests = [LeafRequest(0, Pretended(1), None)]
    size = 2048 * 4096 * 4
    for mode, least, most in (("direct", 4, 4.2), ("auto", 1, 1.1)):
        strategy = read_strategy.choose(rows, requests, mode, geometry_of_four())
        plan = read_strategy.plan_all(rows, requests, strategy, geometry_of_four(), range(4))
        assert plan.needed_bytes == plan.leaves_bytes == size
        assert [one.memory_bytes for one in plan.processes] == [size // 4] * 4
        assert least * size <= plan.read_bytes <= most * size
        lines = str(plan).splitlines()
        assert len(lines) == 7
        assert lines[-1].split()[0] == "all"
    assert plan.exchanged == ("large",)


def test_devices_of_this_process():
    place = sharding_of(Layout(Mesh({"x": 8}, kind="cpu"), "x"))
    here = geometry()
    assert here.processes(place) == (0,)
    assert here.boxes(place, (8,), 0) == (tuple((n,) for n in range(8)), ((1,),) * 8)
