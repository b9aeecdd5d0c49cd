"""What survivors of a killed process do: agree, exchange values, save, restore; others read it."""

from __future__ import annotations

import os
import signal

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shoal
from checkpoint.saved_contents import kept, same_bits
from shoal.testing.cluster import Cluster

VALUES = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
LARGE = np.arange(20 << 20, dtype=np.uint8)  # 20 MB


def spread(spec, processes, values=VALUES):
    """Lay values over the devices of some processes."""
    devices = [device for device in jax.devices() if device.process_index in processes]
    mesh = Mesh(np.array(devices).reshape(len(processes), -1), ("p", "d"))
    return jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, spec), lambda where: values[where], dtype=values.dtype
    )


def tree_of(everybody):
    """What is left of a state when process 1 is gone: it lies on all, and is whole without it."""
    whole = spread(P(), everybody)
    split = jax.jit(lambda: jax.random.split(jax.random.key(5), 4), out_shardings=whole.sharding)
    return {
        "whole": whole,
        "by device": spread(P("d"), everybody),
        "columns": spread(P(None, "d"), everybody),
        "keys": split(),
        "mine": spread(P("p"), (0, 2)),
        "host": VALUES,
        "own": shoal.PerProcess({"of": shoal.process_index()}),
    }


def values_go_round(alive):
    me = shoal.process_index()
    assert shoal.broadcast({"seed": me}, 2, processes=alive) == {"seed": 2}
    came = shoal.broadcast(LARGE if me == 2 else np.empty_like(LARGE), 2, processes=alive)
    assert np.array_equal(came, LARGE)
    rows = shoal.allgather({"x": np.float32(me), "big": LARGE[me:][:1000]}, processes=alive)
    assert rows["x"].tolist() == [0.0, 2.0]
    assert np.array_equal(rows["big"], [LARGE[:1000], LARGE[2:1002]])
    both = shoal.allgather(LARGE[: 1 << 20] + np.uint8(me), to=0, processes=alive)
    assert (both is None) == (me == 2)
    assert both is None or np.array_equal(both, [LARGE[: 1 << 20], LARGE[: 1 << 20] + np.uint8(2)])


def arrays_are_read_where_they_are(alive, tree):
    """Replicas come from survivors, and no device of the dead is asked."""
    whole = shoal.allgather(
        {"w": tree["by device"], "m": tree["mine"]}, tiled=True, processes=alive
    )
    assert same_bits(whole["w"], VALUES)
    assert same_bits(whole["m"], VALUES)
    shoal.assert_same(tree | {"own": 0}, processes=alive)
    with pytest.raises(shoal.DivergenceError) as told:
        shoal.assert_same({"n": shoal.process_index()}, processes=alive)
    assert sorted(told.value.sides.values()) == [(0,), (2,)]


def saved_and_restored(root, alive, tree):
    shoal.save(f"{root}/one", tree, processes=alive)
    target = {
        name: NamedSharding(tree["mine"].sharding.mesh, spec)
        for name, spec in (("whole", P("p", "d")), ("by device", P()), ("columns", P("d")))
    }
    back = shoal.restore(f"{root}/one", target, only=tuple(target), processes=alive)
    for array in back.values():
        for shard in array.addressable_shards:
            assert same_bits(shard.data, VALUES[shard.index])
    own = shoal.restore(f"{root}/one", only="own", processes=alive)["own"]
    assert own.value == {"of": shoal.process_index()}


def refused_in_words(root, alive, lost):
    words = "by processes 0, 2: rows: 348160 of its 1044480 values are held only by other processes"
    with pytest.raises(shoal.UsageError, match=words):
        shoal.save(f"{root}/lost", {"rows": lost, "n": 1}, processes=alive)
    assert not os.path.exists(f"{root}/lost")
    everywhere = {"host": NamedSharding(lost.sharding.mesh, P())}
    words = "host: its layout has devices of process 1, which do not take part"
    with pytest.raises(shoal.UsageError, match=words):
        shoal.restore(f"{root}/one", everywhere, only="host", processes=alive)


def survive(root):
    me = shoal.process_index()
    everybody = (0, 1, 2)
    tree = tree_of(everybody)
    lost = spread(P(("p", "d")), everybody, VALUES[:1020])
    big = shoal.broadcast(LARGE if me == 0 else np.empty_like(LARGE))  # over the devices of all
    ckpts = shoal.Checkpoints(f"{root}/run", keep=1)
    ckpts.save(1, tree)
    ckpts.wait()
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(shoal.ProcessLostError) as told:
        shoal.barrier("a step")
    assert sorted(told.value.lost) == [1]
    alive = shoal.live_processes()
    assert alive == (0, 2)
    values_go_round(alive)
    arrays_are_read_where_they_are(alive, tree)
    saved_and_restored(root, alive, tree)
    refused_in_words(root, alive, lost)
    with shoal.Checkpoints(f"{root}/run", keep=1, processes=alive) as ckpts:
        assert ckpts.resume(None, None, only="host")[1] == 2
        ckpts.save(2, tree)
        assert not shoal.preempted(3)
    assert ckpts.all_steps() == (2,)
    return int(big[1])


def test_survivors_go_on_and_what_they_save_is_whole(tmp_path, child_env):
    """As on several hosts: large values went over the devices while all were alive."""
    env = child_env | {"SHOAL_SHARED_MEMORY": "0"}
    with Cluster(3, start_method="fork", devices=2, env=env, services="stand-alone") as cluster:
        cluster.start(survive, str(tmp_path))
        ended = cluster.wait()
    assert [one.code for one in ended] == [0, -9, 0], ended
    for path in (tmp_path / "one", tmp_path / "run" / "step_000000000002"):
        found = kept(path)
        assert all(same_bits(found[name], VALUES) for name in
                   ("whole", "by device", "columns", "mine", "host"))  # fmt: skip
        assert found["own"] == [{"of": 0}, {"of": 2}]
        assert found["keys"].shape == (4, 2)
