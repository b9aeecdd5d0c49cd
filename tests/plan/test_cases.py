"""The predecessors' worked cases: the same answers, and errors where they had errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.plan.hlo import (
    ShardingType,
    group_assignment,
    hlo_text,
    replication_groups,
    sharding_type,
    tile_assignment,
)
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region, replica_index

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases" / "torch_xla.jsonl").read_text().splitlines()
]


def of_kind(*kinds):
    chosen = [case for case in CASES if case["kind"] in kinds]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


def mesh_of(case):
    names = case["axis_names"] or [f"axis{i}" for i in range(len(case["mesh_shape"]))]
    return Mesh(list(zip(names, case["mesh_shape"], strict=True)), device_ids=case["device_ids"])


def layout_of(case, mesh):
    """The predecessor also takes axes by number; shoal by name only."""

    def dim(entry):
        if isinstance(entry, list):
            return tuple(map(dim, entry))
        is_number = isinstance(entry, int) and not isinstance(entry, bool)
        return mesh.axis_names[entry] if is_number and entry < len(mesh.shape) else entry

    return Layout(mesh, *map(dim, case["partition_spec"]))


def is_about_the_world(case):
    """Errors that come only from the number of devices in the world do not apply to a plan."""
    return "global number of devices" in case["expected"].get("error_message", "")


@of_kind("op_sharding", "op_sharding_list_spec")
def test_op_sharding(case):
    mesh, expected = mesh_of(case), case["expected"]
    if "error_type" in expected:
        with pytest.raises((ValueError, TypeError)):
            layout_of(case, mesh).check_shape(case["tensor_shape"])
        return
    layout = layout_of(case, mesh)
    assert hlo_text(layout) == expected["op_sharding"]
    assert sharding_type(layout) == expected["sharding_type"]
    # an empty tuple equals None for us; the predecessor takes it for a split by nothing
    if [] not in case["partition_spec"] and "requested_type" in expected:
        check_requested(layout, expected)
    for device, replica, slices in expected.get("shards_device_replica_indices", []):
        check_shard(layout, case["tensor_shape"], device, replica, slices)


def check_requested(layout, expected):
    requested = sharding_type(layout, requested=True)
    assert requested == expected["requested_type"]
    assert tile_assignment(layout).tolist() == expected["tile_assignment"]
    assert replication_groups(layout).tolist() == expected["replication_groups"]
    assert group_assignment(layout).tolist() == expected["group_assignment"]


def check_shard(layout, shape, device, replica, slices):
    own = region(layout, shape, device)
    assert [[s.start, s.stop] for s in own] == (
        [[0, size] for size in shape] if slices == "..." else slices
    )
    # the predecessor numbers replicas by ascending id within a group, shoal in mesh order
    groups = replication_groups(layout).tolist() or [[device]]
    if sharding_type(layout) == ShardingType.REPLICATED:
        groups = [layout.mesh.device_ids.ravel().tolist()]
    group = next(group for group in groups if device in group)
    assert sorted(group)[replica] == device
    assert group[replica_index(layout, shape, device)] == device


@of_kind("mesh_ctor")
def test_mesh_ctor(case):
    expected = case["expected"]
    if "error_type" in expected and not is_about_the_world(case):
        with pytest.raises((ValueError, TypeError)):
            mesh_of(case)
        return
    mesh = mesh_of(case)
    if "error_type" not in expected:
        assert mesh.size == expected["size"]
        assert mesh.device_ids.tolist() == expected["logical"]
        assert list(mesh.shape) == [size for _, size in expected["shape"]]


@of_kind("sharding_spec")
def test_sharding_spec(case):
    mesh, expected = mesh_of(case), case["expected"]
    if "error_type" in expected:
        with pytest.raises(UsageError):
            layout_of(case, mesh)
        return
    layout = layout_of(case, mesh)
    assert tile_assignment(layout).tolist() == expected["tile_assignment"]
    assert sharding_type(layout, requested=True) == expected["sharding_type"]


@of_kind("dtensor_local_shape_offset")
def test_dtensor_local_shape_offset(case):
    layout = layout_of(case, mesh_of(case))
    shape = case["tensor_shape"]
    for position, (local, offset) in enumerate(case["expected"]["rank_local_shape_and_offset"]):
        own = region(layout, shape, position, uneven="axis_by_axis")
        assert [s.stop - s.start for s in own] == local
        assert [s.start for s in own] == offset


def test_the_cases_are_all_used():
    kinds = {case["kind"] for case in CASES}
    assert kinds <= {
        "op_sharding", "op_sharding_list_spec", "mesh_ctor", "sharding_spec",
        "dtensor_local_shape_offset",
    }  # fmt: skip
    assert np.array([case["id"] for case in CASES]).size == len({case["id"] for case in CASES})
