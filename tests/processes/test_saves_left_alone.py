"""Saves that only some processes make, and states in which each process has arrays of its own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shoal
from shoal.errors import UsageError
from shoal.testing.cluster import Cluster

ALONE = "was ended because process 1 did not call it: every process must call save\n"


def summed(rows):
    return float(jax.jit(jnp.sum)(rows))


def saves_alone(root, with_checkpoints, others):
    """Save on process 0 alone, and return how that ended."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    array = jax.make_array_from_callback((4,), rows, lambda where: np.ones(4, np.float32)[where])
    assert summed(array) == 4.0  # the program is compiled, its devices are connected
    checkpoints = shoal.Checkpoints(f"{root}/run") if with_checkpoints else None
    if shoal.process_index() == 0:
        timeout_s = 1 if others == "compute" else None
        save = partial(shoal.save, f"{root}/model")
        if checkpoints is not None:
            save = partial(checkpoints.save, 1)
        with pytest.raises(shoal.ShoalError) as caught:
            save({"w": array}, timeout_s=timeout_s)
        if others == "compute":
            summed(array)
        error, cause = caught.value, caught.value.__cause__
        blamed = getattr(error, "processes", None)
        return type(error).__name__, error.exit_code, str(error), type(cause).__name__, blamed
    if others == "wait":
        with pytest.raises(shoal.DivergenceError):
            shoal.barrier("saved")
    elif others == "compute":
        summed(array)
    return None


@pytest.mark.parametrize("with_checkpoints", [False, True])
@pytest.mark.parametrize("others", ["wait", "leave", "compute"])
def test_a_save_by_process_0_alone(tmp_path, child_env, with_checkpoints, others):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as cluster:
        told, _ = cluster.run(saves_alone, str(tmp_path), with_checkpoints, others)
    kind, code, text, cause, blamed = told
    if others == "wait":
        assert (kind, code) == ("DivergenceError", 70)
        assert "'saved' at " in text
        return
    assert (kind, blamed) == ("SaveAbortedError", (1,))
    assert ALONE in text
    assert "nothing of it is kept, and earlier saves are unaffected\n" in text
    expected = {"leave": ("PeerFailedError", 72), "compute": ("DeadlineError", 73)}
    assert (cause, code) == expected[others]


def replicated(tree):
    """Return what `flax.jax_utils.replicate` returns."""
    devices = jax.local_devices()
    mesh = Mesh(np.array(devices), ("_device_put_sharded",))
    rows = NamedSharding(mesh, PartitionSpec("_device_put_sharded"))
    return jax.tree.map(lambda x: jax.device_put(np.stack([x] * len(devices)), rows), tree)


def saves_of_pmap(root):
    """Try to save such states; return the texts."""
    state = {"params": {"w": np.ones((4, 2), np.float32)}, "step": np.zeros((), np.int32)}
    copies = replicated(state)
    own = jax.pmap(lambda x: x + 1, axis_name="batch")(np.ones((2, 3), np.float32))
    texts = []
    for saves in (
        lambda: shoal.save(f"{root}/copies", copies),
        lambda: shoal.save(f"{root}/pmap", {"own": own, "epoch": 3}),
    ):
        with pytest.raises(UsageError) as caught:
            saves()
        texts.append((str(caught.value), list(caught.value.problems)))
    with shoal.Checkpoints(f"{root}/run") as checkpoints:
        with pytest.raises(UsageError) as caught:
            checkpoints.resume(copies, lambda: copies)
        texts.append((str(caught.value), list(caught.value.problems)))
        with pytest.raises(UsageError) as caught:
            checkpoints.save(0, copies)
        texts.append((str(caught.value), list(caught.value.problems)))
        assert checkpoints.latest() is None
    one = jax.tree.map(lambda x: x.addressable_shards[0].data[0], copies)
    tree = {"one": one, "own": shoal.PerProcess(jax.device_get(own))}
    shoal.save(f"{root}/well", tree)
    return texts, shoal.restore(f"{root}/well")["one"]["params"]["w"].tolist()


def test_the_state_of_pmap_is_refused_with_its_leaves_and_the_way_out(tmp_path, child_env):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as cluster:
        one, other = cluster.run(saves_of_pmap, str(tmp_path))
    assert one == other
    texts, back = one
    assert back == [[1.0, 1.0]] * 4
    (copies, leaves), (own, its), (resume, names), (step, _) = texts
    detail = "dim 0 of (2, 4, 2) is an axis of this process's devices, as made by jax.pmap or flax"
    assert f"copies'): params/w (and 1 more): {detail}" in copies
    assert leaves == names == ["params/w", "step"]
    assert its == ["own"]
    assert "own: dim 0 of (2, 3) is an axis" in own
    assert resume.startswith("resume: params/w (and 1 more): dim 0 of (2, 4, 2)")
    assert "step_000000000000'): params/w (and 1 more)" in step
    for text, _ in texts:
        for way in ("unreplicate(state)", "from_host_local", "PerProcess"):
            assert way in text
