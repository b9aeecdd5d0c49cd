"""relayout between different devices of three processes with two devices each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import shoal
from shoal import Layout
from shoal.plan.compiled import received_bytes_of
from shoal.testing.cluster import Cluster

VALUES = np.random.default_rng(0).integers(0, 1 << 32, (8, 8), np.uint32).view(np.float32)


def mesh_of(*processes, **axes):
    """Return a mesh of all devices of some processes: nothing is sent for it."""
    devices = [device for device in jax.devices() if device.process_index in processes]
    return shoal.Mesh(
        axes or {"x": len(devices)},
        device_ids=[device.id for device in devices],
        processes=[device.process_index for device in devices],
    )


def holds(array, values, layout):
    """Are these the bits that this process is to hold?"""
    assert shoal.layout_of(array) == layout
    own = [device for device in jax.local_devices() if device.id in layout.mesh.device_ids]
    assert {shard.device for shard in array.addressable_shards} == {*own}
    for shard in array.addressable_shards:
        wanted = np.ascontiguousarray(values[shard.index])
        assert np.asarray(shard.data).tobytes() == wanted.tobytes()
    return True


def moves():
    """The moves to try: rows of a source, to tiles of a target."""
    first, last = mesh_of(0, 1), mesh_of(1, 2, y=2, z=2)
    return [
        (Layout(first, "x", None), Layout(last, "z", "y")),
        (Layout(mesh_of(0), "x", None), Layout(mesh_of(2), None, "x")),
        (Layout(mesh_of(0, 1, 2), None, None), Layout(mesh_of(1), "x", None)),
        (Layout(last, ("y", "z"), None), Layout(mesh_of(0, 1, 2, a=3, b=2), None, "b")),
    ]


def move_all(me):
    """Make each move in the processes that own devices of it, and none in the others."""
    told = []
    for source, target in moves():
        if me not in {*source.mesh.process_indices, *target.mesh.process_indices}:
            told.append(None)
            continue
        array = shoal.put(VALUES, source)
        plan = shoal.plan_relayout(array, target)
        devices = len(plan.transfer.bounds.devices)
        counted = received_bytes_of(plan.program().as_text(), devices)
        assert counted == plan.received_bytes == plan.bound_bytes
        moved = shoal.relayout(array, target, donate=True)
        assert holds(moved, VALUES, target)
        assert array.is_deleted()
        told.append([plan.way, plan.received_bytes, str(plan)])
    return told


def move_trees(me):
    """Leaves that stay, that move among the same devices and that move to others, at once."""
    first, last = mesh_of(0, 1), mesh_of(1, 2)
    rows, columns, there = Layout(first, "x", None), Layout(first, None, "x"), Layout(last, "x")
    keys = jax.random.split(jax.random.key(3), 8)
    narrow = VALUES.view("bfloat16")[0]  # among them NaNs of every kind
    tree = {
        "stays": shoal.put(VALUES, rows),
        "turns": shoal.put(VALUES, rows),
        "keys": shoal.put(keys, Layout(first, "x")),
        "narrow": shoal.put(narrow, Layout(first, "x")),
        "number": shoal.put(np.float32(2.5), Layout(first)),
    }
    wanted = {"stays": rows, "turns": columns, "keys": there, "narrow": there,
              "number": Layout(last)}  # fmt: skip
    moved = shoal.relayout(tree, wanted)
    assert moved["stays"] is tree["stays"]
    assert holds(moved["turns"], VALUES, columns)
    assert shoal.layout_of(moved["keys"]) == there
    data = np.asarray(jax.random.key_data(keys))
    assert holds(jax.random.key_data(moved["keys"]), data, Layout(last, "x", None))
    assert holds(moved["narrow"], narrow, there)
    assert holds(moved["number"], np.float32(2.5)[None].reshape(()), Layout(last))


def move_in_parts(me):
    """Of 96 MiB a device, which goes part by part, from two devices to two others."""
    if me == 1:
        return 0
    source, target = Layout(mesh_of(0), "x", None), Layout(mesh_of(2), None, "x")
    large = np.arange(48 << 20, dtype=np.uint32).reshape(6 << 10, 8 << 10)
    array = shoal.put(large, source)
    plan = shoal.plan_relayout(array, target)
    assert holds(shoal.relayout(array, target), large, target)
    return plan.parts


def refused_in_words():
    """Errors that every process raises before anything moves."""
    array = shoal.put(VALUES, Layout(mesh_of(0, 1), "x", None))
    target = Layout(mesh_of(1, 2), "x", None)
    with pytest.raises(shoal.UsageError, match="is being differentiated, and is to move to other"):
        jax.grad(lambda x: shoal.relayout(x, target).sum())(array)
    with pytest.raises(shoal.UsageError, match="has size 8, which 6 shards"):
        shoal.relayout(array, Layout(mesh_of(0, 1, 2), "x", None))


def differ(me):
    """Other dims, then other devices in process 1."""
    array, told = shoal.put(VALUES, Layout(mesh_of(0, 1), "x", None)), []
    for one, other in [
        (Layout(mesh_of(1, 2), "x", None), Layout(mesh_of(1, 2), None, "x")),
        (Layout(mesh_of(1, 2), "x", None), Layout(mesh_of(0), "x", None)),
    ]:
        with pytest.raises(shoal.DivergenceError) as caught:
            shoal.relayout(array, other if me == 1 else one)
        told.append(str(caught.value))
        shoal.barrier("again")
    return told


def lose():
    """Process 1 is killed as it comes; the others are told, and go on without it."""
    source, target = moves()[0]
    with pytest.raises(shoal.ProcessLostError) as told:
        shoal.relayout(shoal.put(VALUES, source), target)
    assert sorted(told.value.lost) == [1]
    assert shoal.live_processes() == (0, 2)
    source, target = moves()[1]  # between the survivors
    moved = shoal.relayout(shoal.put(VALUES, source), target)
    assert holds(moved, VALUES, target)
    shoal.barrier("moved", processes=[0, 2])  # a sender that ends takes with it what is on its way


def all_of_it(path):
    me = shoal.process_index()
    told = [move_all(me), move_trees(me), move_in_parts(me), refused_in_words()]
    shoal.barrier("all have come")
    told += differ(me)
    Path(path, f"{me}.json").write_text(json.dumps(told), encoding="utf-8")
    shoal.barrier("all have told")
    lose()


def test_arrays_move_between_any_devices_of_the_job(child_env, tmp_path):
    turn = 3 + 1 + 2 + 1  # of process 1: three moves, a tree, two that differ, and its last
    faults = f"relayout.before_arrive@1#{turn}:kill"
    with Cluster(3, start_method="fork", devices=2, env=child_env, services="stand-alone",
                 faults=faults) as cluster:  # fmt: skip
        cluster.start(all_of_it, str(tmp_path))
        ended = cluster.wait()
    assert [one.code for one in ended] == [0, -9, 0], [one.error for one in ended]
    first, second, third = (json.loads((tmp_path / f"{n}.json").read_text()) for n in range(3))
    check_moves(first[0], second[0], third[0])
    assert (first[2], second[2], third[2]) == (6, 0, 6)
    check_differences(first[4:], second[4:], third[4:])


def check_moves(first, second, third):
    """Each process said the same of each move that it was part of."""
    assert [second[1], *[told is None for told in (first[1], third[1])]] == [None, False, False]
    assert third[2] == second[2] == first[2]
    assert first[0] == second[0] == third[0]
    assert [told[:2] for told in first] == [
        ["permutes", 64], ["permutes", 128], ["permutes", 0], ["permutes", 128],
    ]  # fmt: skip
    assert "PointToPoint(4 sends in 2 rounds, 256 B; 4 devices on 2 processes)" in first[1][2]


def check_differences(first, second, third):
    """Process 1 is one of the sides, whoever of the others came before it and who later."""
    for dims, devices in (first, second, third):
        assert "relayout among processes 0-2" in dims
        assert "cycle" in devices
    assert re.search(r"process(es)? [02, ]+: float32\[8,8\] as \(x, -\)", second[0])
    assert "process 1: float32[8,8] as (-, x)" in second[0]
    assert "relayout needs the same tree, shapes, dtypes, layouts and options" in second[0]
    assert "process 1: relayout among processes 0-1 at " in second[1]
    assert "relayout among processes 0-2 at " in second[1]
