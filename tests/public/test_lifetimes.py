"""What a call has taken and returned lives no longer than its caller keeps it.

Arrays in a reference cycle would fill a device, or a host, until Python collects garbage.
"""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest

import shoal
from shoal.checkpoint.blocks.memory import uncollected
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
ROWS, COLUMNS = Layout(MESH, "data", None), Layout(MESH, None, ("data", "model"))


def on_devices():
    return {name: shoal.put(np.full((16, 16), 1.5, np.float32), ROWS) for name in ("w", "b")}


def on_host():
    return {name: np.full((16, 16), 1.5, np.float32) for name in ("w", "b")}


def restored(tree, tmp_path, target):
    shoal.save(tmp_path / "step", tree)
    return shoal.restore(tmp_path / "step", target)


def restored_from_run(tree, tmp_path):
    with shoal.Checkpoints(tmp_path) as run:
        run.save(1, tree)
        run.wait()
        return run.restore(1, jax.tree.map(lambda leaf: leaf.sharding, tree))


CALLS = {
    "save": (on_devices, lambda tree, tmp_path: shoal.save(tmp_path / "step", tree)),
    "restore": (on_devices, lambda tree, tmp_path: restored(tree, tmp_path, tree)),
    "restore on the host": (on_host, lambda tree, tmp_path: restored(tree, tmp_path, None)),
    "Checkpoints": (on_devices, restored_from_run),
    "put": (on_host, lambda tree, _: shoal.put(tree, COLUMNS)),
    "relayout": (on_devices, lambda tree, _: shoal.relayout(tree, COLUMNS)),
    "shard_alike": (on_devices, lambda tree, _: shoal.shard_alike(tree["w"], tree["b"])),
    "to_host_local": (on_devices, lambda tree, _: shoal.to_host_local(tree, ROWS)),
    "from_host_local": (on_host, lambda tree, _: shoal.from_host_local(tree, ROWS)),
    "feed": (on_host, lambda tree, _: next(iter(shoal.feed([tree], ROWS)))),
    "allgather": (on_host, lambda tree, _: shoal.allgather(tree)),
    "broadcast": (on_host, lambda tree, _: shoal.broadcast(tree)),
    "assert_same": (on_host, lambda tree, _: shoal.assert_same(tree)),
    "check_finite": (on_devices, lambda tree, _: shoal.check_finite(tree)),
    "check_replicas": (on_devices, lambda tree, _: shoal.check_replicas(tree)),
    "describe": (on_devices, lambda tree, _: shoal.describe(tree)),
}


def alive(references):
    return [one() for one in references if one() is not None]


def references(tree):
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray))
    return [weakref.ref(one) for one in arrays]


@pytest.mark.parametrize("name", CALLS)
def test_arrays_are_freed_without_a_collection(name, tmp_path):
    make, call = CALLS[name]
    call(make(), tmp_path / "first")  # programs are compiled, and what is cached is cached
    gc.collect()
    with uncollected():
        tree = make()
        taken = references(tree)
        result = jax.block_until_ready(call(tree, tmp_path / "second"))
        returned = references(result)
        del tree, result
        assert alive(taken) == []
        assert alive(returned) == []


def test_an_error_that_was_caught_holds_no_arrays(tmp_path):
    with shoal.Checkpoints(tmp_path, asynchronous=False) as run:
        run.save(1, on_host())
    (tmp_path / "step_000000000001" / "COMMIT").write_text("{")

    def look():
        state = on_host()
        with pytest.raises(shoal.errors.CorruptCheckpointError):
            run.all_steps()
        return references(state)

    gc.collect()
    with uncollected():
        assert alive(look()) == []
