"""Device arrays of four real processes: each box is written once, by who holds it."""

from __future__ import annotations

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shoal
from checkpoint.saved_contents import CLEAN, files_of, kept, same_bits
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.saving.background import start_save
from shoal.checkpoint.saving.save import save, save_request
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.errors import ProcessLostError, SaveAbortedError
from shoal.runtime.process import client
from shoal.testing.cluster import Cluster

SPECS = {
    "rows": P(("p", "d")), "columns": P(None, ("p", "d")), "both": P("p", "d"),
    "turned": P("d", "p"), "by process": P("p"), "by device": P("d"), "all": P(),
}  # fmt: skip
VALUES = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)


def spread(spec, values=VALUES, devices=None):
    mesh = Mesh(np.array(devices or jax.devices()).reshape(-1, 2), ("p", "d"))
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(
        values.shape, sharding, lambda where: values[where], dtype=values.dtype
    )


def tree_of(index):
    """Arrays of every layout, on all devices and on some; values of the host."""
    tree = {name: spread(spec) for name, spec in SPECS.items()}
    some = [device for device in jax.devices() if device.process_index in (1, 3)]
    tree["some"] = spread(P("p"), VALUES[:4], some)
    tree["int4"] = spread(P(None, "d"), np.arange(24).reshape(3, 8).astype("int4"))
    tree["keys"] = jax.jit(
        lambda: jax.random.split(jax.random.key(5), 8), out_shardings=tree["rows"].sharding
    )()
    tree["local"] = jax.device_put(np.arange(5) + 3)
    tree["host"] = VALUES
    tree["own"] = PerProcess(index)
    return tree


def saves(root):
    """Save in front and behind; meanwhile the devices of all processes compute together."""
    index = shoal.process_index()
    tree = tree_of(index)
    save(f"{root}/front", tree, step=1)
    arena = Arena()
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    for turn in range(2):
        saving = start_save(client(), save_request(f"{root}/behind{turn}"), tree, arena=arena)
        x = tree["rows"]
        for _ in range(3):
            x = step(x)
            total = float(jax.jit(lambda x: x.sum())(x))
        shoal.barrier("meanwhile")
        saving.wait(30)
        tree["rows"] = spread(SPECS["rows"])
    return total


def test_every_layout_over_processes(tmp_path, child_env):
    with Cluster(4, start_method="fork", devices=2, env=child_env) as cluster:
        assert len({*cluster.run(saves, str(tmp_path))}) == 1
    for name in ("front", "behind0", "behind1"):
        found = kept(tmp_path / name)
        for leaf in (*SPECS, "host"):
            assert same_bits(found[leaf], VALUES), leaf
        assert same_bits(found["some"], VALUES[:4])
        assert same_bits(found["int4"], np.arange(24).reshape(3, 8).astype("int4"))
        keys = jax.random.key_data(jax.random.split(jax.random.key(5), 8))
        assert same_bits(found["keys"], keys)
        assert same_bits(found["local"], np.arange(3, 8, dtype=np.int32))
        assert found["own"] == [0, 1, 2, 3]
        assert set(files_of(tmp_path / name)) == set(CLEAN)
        # Each stored once, and evenly: what all hold makes up for what only some do.
        sizes = [file.bytes for file in open_checkpoint(LocalStore(tmp_path / name)).index.files]
        assert sum(sizes) < (len(SPECS) + 1) * VALUES.nbytes + (1 << 17)
        assert max(sizes) - min(sizes) < 3 << 20


def dies(root):
    """Save; process 2 is killed in the middle. Say how it went, and that the program goes on."""
    index = shoal.process_index()
    tree = {name: spread(spec) for name, spec in SPECS.items()}
    saving = start_save(client(), save_request(f"{root}/a"), tree, arena=Arena())
    try:
        saving.wait(30)
        told = "saved"
    except SaveAbortedError as error:
        told = f"{error.processes} {error.exit_code}"
    # The save has told nobody's main line: that is still to come.
    while not client().peer_losses.any():
        client().members(timeout_s=30)
    try:
        client().check("the next step")
    except ProcessLostError as error:
        told += f" then {sorted(error.lost)}"
    shoal.barrier("all have looked", processes=[0, 1, 3])
    os.write(1, f"\n{index}: {told}\n".encode())
    sys.stdout.flush()
    os._exit(0)


def deaths(tmp_path, child_env, point):
    with Cluster(
        4, start_method="fork", devices=2, env=child_env, faults=f"save.{point}@2:kill"
    ) as cluster:
        cluster.start(dies, str(tmp_path))
        return [one.out for one in cluster.wait()]


def test_a_death_before_its_data_is_written_aborts_the_save(tmp_path, child_env):
    said = deaths(tmp_path, child_env, "written")
    for process in (0, 1, 3):
        assert f"{process}: (2,) 71 then [2]" in said[process]
    assert files_of(tmp_path / "a") == []


def test_a_death_after_that_does_not(tmp_path, child_env):
    said = deaths(tmp_path, child_env, "parted")
    for process in (0, 1, 3):
        assert f"{process}: saved then [2]" in said[process]
    found = kept(tmp_path / "a")
    assert all(same_bits(found[leaf], VALUES) for leaf in SPECS)
