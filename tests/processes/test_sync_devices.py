"""`sync_devices` over real processes: all of a mesh, and nobody else."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import jax

import shoal
from shoal.testing.cluster import Cluster

PATIENCE_S = 60.0


def hold_device():
    """Let JAX believe in an array that is not computed before the event that is returned is set."""
    live_arrays, done = jax.live_arrays, threading.Event()
    array = SimpleNamespace(
        devices=lambda: {jax.local_devices()[0]},
        is_deleted=lambda: False,
        is_ready=done.is_set,
        block_until_ready=lambda: done.wait(PATIENCE_S),
    )
    jax.live_arrays = lambda platform=None: [*live_arrays(platform), array]
    return done


def drain_all_and_parts():
    me = shoal.process_index()
    whole = shoal.make_mesh({"x": -1})
    shoal.sync_devices(whole)
    pair = shoal.make_mesh({"x": 4}, devices=jax.devices()[:4])
    third = shoal.make_mesh({"x": 2}, devices=jax.devices()[4:])
    for turn in range(3 if me == 2 else 1):  # as often as they like, at the same time
        shoal.sync_devices(third if me == 2 else pair, name=f"turn {turn}")
    refused = ""
    if me == 2:
        try:
            shoal.sync_devices(pair)
        except shoal.UsageError as error:
            refused = str(error)
    shoal.sync_devices(whole, name="again")
    shoal.barrier("after")
    return refused


def test_a_mesh_of_some_processes_involves_only_those(child_env):
    with Cluster(3, start_method="fork", devices=2, env=child_env) as cluster:
        first, second, third = cluster.run(drain_all_and_parts)
    assert (first, second) == ("", "")
    assert "process 2 has no device in" in third


def wait_for_the_others_work(path):
    mesh = shoal.make_mesh({"x": -1})
    if shoal.process_index() == 1:
        done = hold_device()

        def finish():
            Path(path).touch()
            done.set()

        threading.Timer(0.3, finish).start()
    shoal.sync_devices(mesh)
    return Path(path).exists()


def test_all_wait_for_the_slowest(child_env, tmp_path):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as cluster:
        assert cluster.run(wait_for_the_others_work, str(tmp_path / "done")) == [True, True]


def drain_busy(timeout_s):
    mesh = shoal.make_mesh({"x": -1})
    done = threading.Event()
    if shoal.process_index() == 1:  # its own deadline does not count: that of process 0 is earlier
        done = hold_device()
        timeout_s = 10 * PATIENCE_S
    try:
        shoal.sync_devices(mesh, timeout_s=timeout_s)
    except shoal.DeadlineError as error:
        return [list(error.missing), str(error)]
    finally:
        done.set()
    return None


def test_the_busy_device_of_another_process_is_named(child_env):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as cluster:
        told = cluster.run(drain_busy, 1.0)
    for missing, words in told:
        assert missing == [1]
        assert "process 1 late: " in words
        assert "not finished" in words


def drain_other_meshes():
    me = shoal.process_index()
    shape = {"x": 2, "y": 2} if me else {"x": 4}
    mesh = shoal.Mesh(shape, device_ids=[device.id for device in jax.devices()],
                      processes=[0, 0, 1, 1])  # fmt: skip
    try:
        shoal.sync_devices(mesh)
    except shoal.DivergenceError as error:
        return str(error)
    return ""


def test_different_meshes_raise_on_every_process(child_env):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as cluster:
        for words in cluster.run(drain_other_meshes):
            assert "mesh: x=4 |" in words
            assert "mesh: x=2 y=2 |" in words


def drain_all():
    shoal.sync_devices(shoal.make_mesh({"x": -1}))


def test_process_killed_in_sync_devices_raises_on_the_others(child_env):
    for point in ("sync_devices.before_arrive", "sync_devices.after_arrive"):
        with Cluster(
            3, start_method="fork", devices=1, faults=f"{point}@1:kill", env=child_env
        ) as cluster:
            cluster.start(drain_all)
            ended = cluster.wait()
        assert [ended[0].code, ended[2].code] == [71, 71], point
        assert [ended[0].kind, ended[2].kind] == ["ProcessLostError"] * 2
