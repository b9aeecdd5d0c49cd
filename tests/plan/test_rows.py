"""Which rows each process holds, against counting them one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.rows import check_even_split, row_holders
from shoal.plan.shards import region
from shoal.testing.strategies import layouts


@st.composite
def cases(draw: st.DrawFn):
    layout = draw(layouts().filter(lambda layout: layout.rank > 0))
    return layout, draw(st.integers(0, layout.rank - 1)), draw(st.integers(0, 3))


@given(cases())
def test_a_process_holds_what_its_devices_hold(case):
    layout, dim, each = case
    size = each * layout.num_shards(dim)
    shape = [layout.num_shards(d) for d in range(layout.rank)]
    shape[dim] = size
    held: dict[int, set[int]] = {}
    ids = layout.mesh.device_ids.ravel().tolist()
    for device, process in zip(ids, layout.mesh.processes.ravel().tolist(), strict=True):
        piece = region(layout, shape, device)[dim]
        held.setdefault(process, set()).update(range(piece.start, piece.stop))
    holders = row_holders(layout, dim)
    assert holders.num_shards == layout.num_shards(dim)
    for process in range(7):  # one without devices, too
        slices = holders.slices(size, process)
        rows = [row for piece in slices for row in range(piece.start, piece.stop)]
        assert rows == sorted(held.get(process, ()))
        ends = [edge for piece in slices for edge in (piece.start, piece.stop)]
        assert ends == sorted(set(ends)), "neighbors are one slice, and none is empty"
        shards = {row // each for row in rows} if each else set(holders.held_by(process))
        assert set(holders.held_by(process)) == shards


def test_replicas_are_all_named():
    mesh = Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4], processes=[0, 1, 2, 0, 2, 1])
    assert row_holders(Layout(mesh, "y", "x")).holders == ((0,), (1, 2), (1, 2))
    assert row_holders(Layout(mesh, None)).holders == ((0, 1, 2),)


def test_sizes_that_fit_are_named():
    layout = Layout(Mesh({"x": 2, "y": 3}), ("x", "y"))
    check_even_split("f", layout, 12, 0)
    with pytest.raises(UsageError, match=r"f: 7 rows, which 6 shards \(x=2 x y=3\) do not divide"):
        check_even_split("f", layout, 7, 0)
    with pytest.raises(UsageError, match="do not divide; 6 would fit"):
        check_even_split("f", layout, 5, 0)
