"""The planning core says what JAX does, on 8 virtual devices."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shoal.plan.hlo import hlo_text
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import owners, region, replica_index

GRIDS = [(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8), (8, 1), (2, 1, 4), (2, 1, 2, 2), (3, 2), (5,)]


@st.composite
def layouts_on_devices(draw, *, pending=False):
    """A layout, and the same as a NamedSharding."""
    grid = draw(st.sampled_from(GRIDS))
    names = tuple("abcd"[: len(grid)])
    order = draw(st.permutations(range(8)))[: int(np.prod(grid))]
    rank = draw(st.integers(0, 4))
    dims, sums = [[] for _ in range(rank)], []
    for axis in draw(st.permutations(names)):
        place = draw(st.integers(-2 if pending else -1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            sums.append(axis)
    spec = [tuple(dim) for dim in dims]
    layout = Layout(
        Mesh(list(zip(names, grid, strict=True)), device_ids=order),
        *spec,
        partial=dict.fromkeys(sums, "sum"),
    )
    devices = np.array(jax.devices("cpu"))[np.array(order)].reshape(grid)
    kinds = (AxisType.Explicit if pending else AxisType.Auto,) * len(grid)
    mesh = jax.sharding.Mesh(devices, names, axis_types=kinds)
    spec = PartitionSpec(*(dim or None for dim in spec), unreduced=set(sums))
    return layout, NamedSharding(mesh, spec)


@given(layouts_on_devices(), st.data())
def test_regions_and_replicas_are_those_of_jax(case, data):
    layout, sharding = case
    shard = tuple(data.draw(st.integers(0, 3)) for _ in range(layout.rank))
    shape = layout.global_shape(shard)
    held = owners(layout, shape)
    array = jax.device_put(np.zeros(shape, np.int8), sharding)
    assert array.sharding.shard_shape(shape) == layout.shard_shape(shape)
    for piece in array.addressable_shards:
        own = region(layout, shape, piece.device.id)
        theirs = [s.indices(size)[:2] for s, size in zip(piece.index, shape, strict=True)]
        assert [(s.start, s.stop) for s in own] == theirs
        assert replica_index(layout, shape, piece.device.id) == piece.replica_id
        position = layout.mesh.position(piece.device.id)
        assert held.replica[position] == piece.replica_id


@given(layouts_on_devices(pending=True))
def test_hlo_text_is_what_jax_prints(case):
    layout, sharding = case
    assert hlo_text(layout, version=2) == str(sharding._to_xla_hlo_sharding(layout.rank))


def test_there_are_eight_devices():
    if len(jax.devices("cpu")) != 8:
        pytest.fail("these tests need 8 virtual CPU devices: see tests/conftest.py")
