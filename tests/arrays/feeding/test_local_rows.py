"""Which rows of a batch a process reads."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from arrays.device_grids import grids
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.feeding.local_rows import local_rows
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.testing.strategies import layouts

MESH = Mesh({"data": 4, "model": 2}, processes=[0, 0, 1, 1, 2, 2, 0, 0])


@given(layouts(grids(), max_rank=2), st.integers(1, 3))
def test_local_rows_are_those_of_the_addressable_devices(layout, each):
    if not layout.rank:
        return
    size = each * layout.num_shards(0)
    shape = (size, *(layout.num_shards(dim) for dim in range(1, layout.rank)))
    wanted: set[int] = set()
    for index in sharding_of(layout).addressable_devices_indices_map(shape).values():
        wanted.update(np.arange(size)[index[0]].tolist())
    pieces = local_rows(layout, size)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == sorted(wanted)
    assert local_rows(sharding_of(layout), size) == pieces


def test_every_form_of_a_layout():
    layout = Layout(MESH, "data", None)
    wanted = (slice(0, 8), slice(24, 32))
    assert local_rows(layout, 32, process=0) == wanted
    with use_mesh(MESH):
        for given_ in (P("data"), ("data", None), ("data",), "data"):
            assert local_rows(given_, 32, process=0) == wanted
        assert local_rows(None, 32, process=0) == local_rows((), 32, process=1) == (slice(0, 32),)
    assert local_rows(layout, 32, process=7) == ()
    assert local_rows(Layout(MESH, None, "data"), 32, dim=-1, process=1) == (slice(8, 16),)
    assert local_rows(layout, np.int64(0), process=0) == ()
    assert jax.process_index() == 0


@pytest.mark.parametrize(
    ("layout", "batch", "options", "kind", "words"),
    [
        (Layout(MESH, "data"), 30, {}, UsageError, r"30 rows, which 4 shards \(data=4\) do not"),
        (MESH, 8, {}, UsageError, "gives every device every row"),
        (Layout(MESH, "data"), 8, {"dim": -2}, UsageError, "dim=-2: Layout.* has rank 1"),
        (Layout(MESH, "data"), -4, {}, UsageError, "must not be negative"),
        (Layout(MESH, "data"), (8, 4), {}, UsageTypeError, "must be a whole number"),
        (Layout(MESH, "data"), True, {}, UsageTypeError, "must be a whole number"),
        (Layout(MESH, "data"), np.zeros(2, int), {}, UsageTypeError, "must be a whole number"),
        (Layout(MESH, "data"), 8, {"process": -1}, UsageError, "process=-1 must not be negative"),
        ([Layout(MESH, "data")], 8, {}, UsageTypeError, "is not one layout"),
        (lambda path, leaf: None, 8, {}, UsageTypeError, "is not one layout"),
        (P("data"), 8, {}, UsageError, "local_rows: .*needs a mesh"),
    ],
)
def test_local_rows_refuses_invalid_requests(layout, batch, options, kind, words):
    with pytest.raises(kind, match=words):
        local_rows(layout, batch, **options)
