"""Every mesh and layout to every other, over 1, 2 and 4 processes: bit for bit."""

from __future__ import annotations

import math

import numpy as np

import shoal
from shoal.testing.cluster import Cluster

SHAPE = (8, 16)
SPLITS = {
    1: [("x", None), (None, "x"), (None, None)],
    2: [("x", "y"), ("y", "x"), (("x", "y"), None), (None, ("y", "x")), (None, "y"), (None, None)],
}
GRIDS = [(1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2)]


def layouts(grid):
    """The layouts of a mesh whose devices are spread over the processes as far as they go."""
    everywhere = shoal.Mesh.of(shoal.make_mesh({"all": -1}))
    ids = everywhere.device_ids.ravel()[:: 8 // math.prod(grid)]
    processes = everywhere.processes.ravel()[:: 8 // math.prod(grid)]
    axes = list(zip("xy", grid, strict=False))
    mesh = shoal.Mesh(axes, device_ids=ids.tolist(), processes=processes.tolist(), kind="cpu")
    return [shoal.Layout(mesh, *dims) for dims in SPLITS[len(grid)]]


def saved_as():
    """One array for each layout that it is saved in; all have bits that arithmetic would lose."""
    lie = [layout for grid in GRIDS for layout in layouts(grid)]
    bits = np.random.default_rng(0).integers(0, 256, (len(lie), *SHAPE, 4), np.uint8)
    return {f"w{i}": (lie[i], one.view(np.float32)[..., 0]) for i, one in enumerate(bits)}


def save_all(path):
    rows = saved_as()
    shoal.save(path, {name: shoal.put(values, layout) for name, (layout, values) in rows.items()})


def restore_all(*paths):
    """Each array as it was saved in one layout, in all of the others."""
    restored = 0
    rows = saved_as()
    for path in paths:
        for layout, _ in rows.values():
            back = shoal.restore(path, dict.fromkeys(rows, layout))
            restored += len(back)
            for name, array in back.items():
                assert shoal.layout_of(array) == layout
                for shard in array.addressable_shards:
                    region = rows[name][1][shard.index]
                    assert np.asarray(shard.data).tobytes() == region.tobytes()
    return restored


def test_every_layout_to_every_other(tmp_path):
    one, two, four = (tmp_path / text for text in ("1", "2", "4"))
    pairs = sum(len(SPLITS[len(grid)]) for grid in GRIDS) ** 2
    save_all(one)
    with Cluster(2, start_method="fork", devices=4) as cluster:
        cluster.run(save_all, two)
        assert cluster.run(restore_all, one) == [pairs] * 2
    with Cluster(4, start_method="fork", devices=2) as cluster:
        cluster.run(save_all, four)
        assert cluster.run(restore_all, two, four) == [2 * pairs] * 4
    assert restore_all(four) == pairs
