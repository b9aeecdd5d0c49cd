"""Whatever was saved on one mesh comes back on any other, bit for bit."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from checkpoint import hand_written
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.placing.put import put
from shoal.checkpoint.restoring.restore import plan_restore, restore
from shoal.checkpoint.saving.save import save
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

SHAPE = (16, 24)
BOTH = ("x", "y")
SPLITS = {
    1: [("x", None), (None, "x"), (None, None)],
    2: [("x", "y"), ("y", "x"), (BOTH, None), (None, ("y", "x")), (None, "y"), (None, None)],
}
GRIDS = [(1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2)]


def layouts(grid: tuple[int, ...]) -> list[Layout]:
    mesh = Mesh(list(zip("xy", grid, strict=False)), kind="cpu")
    return [Layout(mesh, *dims) for dims in SPLITS[len(grid)]]


@functools.cache
def values() -> dict[str, np.ndarray]:
    """One array for each layout that it is saved in; all have bits that arithmetic would lose."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, (8, *SHAPE, 4), np.uint8)
    return {f"{n}": one.view(np.float32)[..., 0] for n, one in enumerate(bits)}


def same(array: jax.Array, wanted: np.ndarray) -> None:
    """Every shard has the bits of its region."""
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes()


@pytest.fixture(scope="module", params=GRIDS, ids=str)
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix") / "saved"
    arrays = {
        name: put(values()[name], layout)
        for name, layout in zip(values(), layouts(request.param), strict=False)
    }
    save(path, arrays)
    return path, {name: array.sharding for name, array in arrays.items()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_layout_to_every_other(saved, grid):
    path, names = saved
    for layout in layouts(grid):
        back = restore(path, layout)
        assert list(back) == list(names)
        for name in names:
            assert back[name].sharding.is_equivalent_to(sharding_of(layout), 2)
            same(back[name], values()[name])


@pytest.mark.parametrize("cuts", [(3, 5), (1, 7), (16, 1), (5,)], ids=str)
def test_chunks_that_are_cut_unevenly(cuts, tmp_path):
    hand_written.write(tmp_path / "saved", values(), hand_written.grid(*cuts), processes=2)
    for grid in GRIDS:
        for layout in layouts(grid):
            for name, array in restore(tmp_path / "saved", layout).items():
                same(array, values()[name])


def test_each_byte_is_read_once_whatever_the_layout(saved):
    path, names = saved
    for layout in layouts((2, 4)):
        plan = plan_restore(path, layout)
        assert plan.needed_bytes == len(names) * values()["0"].nbytes
        assert plan.mode == "direct"


def test_the_stored_layouts(saved):
    path, names = saved
    back = restore(path, "stored")
    for name, saved_in in names.items():
        assert back[name].sharding.is_equivalent_to(saved_in, 2)
        assert {d.id for d in back[name].devices()} == {d.id for d in saved_in.device_set}
        same(back[name], values()[name])
