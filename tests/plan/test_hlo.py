"""Layouts in XLA's words, where the worked cases do not reach."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from shoal.plan.shards import owners
from shoal.testing.strategies import layouts, meshes


def read(text, ids):
    """What an HLO text says: the device of every tile [dims of the tile array], and its tail."""
    dims, order, tail = re.fullmatch(r"\{devices=\[([\d,]+)\](\S+?)( .*)?\}", text).groups()
    shape = [int(size) for size in dims.split(",")]
    if order.startswith("<="):
        reshape, _, transpose = re.fullmatch(r"<=\[([\d,]+)\](T\(([\d,]+)\))?", order).groups()
        grid = np.asarray(ids).reshape([int(size) for size in reshape.split(",")])
        if transpose:
            grid = grid.transpose([int(place) for place in transpose.split(",")])
        return grid.reshape(shape), tail
    return np.array([int(i) for i in order.split(",")]).reshape(shape), tail


@given(layouts(meshes(max_devices=16)))
def test_both_versions_place_what_owners_says(layout):
    mesh = layout.mesh
    texts = [hlo_text(layout, version) for version in (1, 2)]
    if layout.is_replicated:
        assert texts == ["{replicated}", "{replicated}"]
        return
    shape = layout.global_shape((1,) * layout.rank)
    held = owners(layout, shape)
    expected: dict[tuple[int, ...], set[int]] = {}
    for position, device_id in enumerate(mesh.device_ids.ravel().tolist()):
        tile = tuple(held.start[position].tolist())
        expected.setdefault(tile, set()).add(device_id)
    for text in texts:
        tiles, tail = read(text, mesh.device_ids.ravel())
        replicated = tail == " last_tile_dim_replicate"
        assert tiles.ndim == layout.rank + replicated
        for tile, devices in expected.items():
            assert set(np.atleast_1d(tiles[tile]).tolist()) == devices


@given(layouts(meshes(max_devices=16)))
def test_groups_and_tiles_hold_every_device_once(layout):
    ids = sorted(layout.mesh.device_ids.ravel().tolist())
    assert sorted(tile_assignment(layout).ravel().tolist()) == ids
    groups, numbers = replication_groups(layout), group_assignment(layout)
    if sharding_type(layout, requested=True) != ShardingType.PARTIAL:
        assert groups.size == numbers.size == 0
        return
    assert sorted(groups.ravel().tolist()) == ids
    assert numbers.size == len(groups)
    held = owners(layout, layout.global_shape((1,) * layout.rank))
    position = {i: at for at, i in enumerate(layout.mesh.device_ids.ravel().tolist())}
    for tile in np.ndindex(*numbers.shape):
        for device_id in groups[int(numbers[tile])].tolist():
            assert tuple(held.start[position[device_id]].tolist()) == tile


@given(layouts(meshes(max_devices=16)), st.booleans())
def test_a_type_is_one_of_four(layout, requested):
    kind = sharding_type(layout, requested)
    assert kind in (0, 1, 3, 5)
    if not requested:
        assert (kind == ShardingType.REPLICATED) == (hlo_text(layout) == "{replicated}")
        assert (kind == ShardingType.PARTIAL) == hlo_text(layout).endswith("replicate}")


def test_sharding_type_of_one_device_depends_on_requested():
    layout = Layout(Mesh({"x": 1}), "x")
    assert sharding_type(layout, requested=True) is ShardingType.MAXIMAL
    assert sharding_type(layout) is ShardingType.REPLICATED


def test_pending_sums_are_unreduced():
    mesh = Mesh({"x": 4, "y": 2})
    assert hlo_text(Layout(mesh, "x", partial={"y": "sum"}), 2) == (
        "{devices=[4,2]<=[8] last_tile_dims={unreduced}}"
    )
    assert hlo_text(Layout(mesh, partial={"x": "sum", "y": "sum"}), 2) == "{unreduced}"
    with pytest.raises(UsageError, match="only pending sums"):
        hlo_text(Layout(mesh, "x", partial={"y": "max"}))


def test_version_2_costs_nothing_per_device():
    mesh = Mesh({"a": 1 << 20, "b": 1 << 20, "c": 1 << 20})
    layout = Layout(mesh, ("c", "a"), None)
    tiles = f"{1 << 40},1,{1 << 20}"
    assert hlo_text(layout, 2) == (  # a and b stay neighbors: one axis
        f"{{devices=[{tiles}]<=[{1 << 40},{1 << 20}]T(1,0) last_tile_dim_replicate}}"
    )


def test_any_rank():
    mesh = Mesh({f"a{i}": 2 for i in range(9)})
    layout = Layout(mesh, *mesh.axis_names)
    assert hlo_text(layout, 2) == "{devices=[2,2,2,2,2,2,2,2,2]<=[512]}"
    assert hlo_text(layout).startswith("{devices=[2,2,2,2,2,2,2,2,2]0,1,2,")


def test_unknown_version_is_refused():
    with pytest.raises(UsageError, match="1 or 2"):
        hlo_text(Layout(Mesh({"x": 2}), "x"), 3)
