"""`make_mesh` over real processes: they agree, or all know on what they do not, and none hangs."""

from __future__ import annotations

import logging
import os
import signal

import jax
import pytest

import shoal
from shoal.arrays.bridge import agreed_devices
from shoal.testing.cluster import Cluster


@pytest.fixture
def cluster(child_env):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as two:
        yield two


def outcome(call):
    """Return what a call raised, in words, or the text of the mesh."""
    try:
        return text(call())
    except shoal.ShoalError as error:
        return f"{type(error).__name__}: {error}"


def text(mesh):
    return shoal.Mesh.of(mesh).text


def make_alike():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shoal").addHandler(handler)
    logging.getLogger("shoal").setLevel(logging.DEBUG)
    whole = shoal.make_mesh({"data": -1, "model": 2})
    said = [line for line in lines if "make_mesh" in line]
    ids = [device.id for device in jax.devices()]
    turned = shoal.make_mesh({"x": 4}, devices=ids[::-1])
    named = shoal.make_mesh({"x": -1}, devices="cpu", across={"x": 2})
    if shoal.process_index() == 0:  # alone: its own devices
        assert text(shoal.make_mesh({"x": 2}, devices=ids[:2])) == "x=2"
    theirs = shoal.make_mesh({"x": 2}, devices=ids[2:])  # a process without devices there, too
    assert shoal.make_mesh({"data": 2, "model": 2}) is whole
    shoal.barrier("in step")
    return [text(whole), text(turned), text(named), text(theirs), said]


def test_equal_calls_make_equal_meshes(cluster):
    one, other = cluster.run(make_alike)
    assert one[:4] == other[:4]
    assert one[0] == "data=2 model=2 | ids 0..1,2048..2049 | processes 0x2,1x2"
    assert one[1] == "x=4 | ids 2049..2048,1..0 | processes 1x2,0x2"
    for number, (line,) in enumerate((one[4], other[4])):
        assert line.startswith(f"process {number} of 2")
        assert "cpu:2 hosts x 2, 2 processes: process after process" in line


def make_otherwise():
    me, told = shoal.process_index(), []
    ids = [device.id for device in jax.devices()]
    told.append(outcome(lambda: shoal.make_mesh({"x": 2 + 2 * me, "y": -1})))
    told.append(outcome(lambda: shoal.make_mesh({"x": 4}, devices=ids[:: 1 - 2 * me])))
    told.append(outcome(lambda: shoal.make_mesh({"x": 4}, across={"x": 2} if me else None)))
    told.append(outcome(lambda: shoal.make_mesh({"x": 4}, axis_types="explicit" if me else "auto")))
    told.append(outcome(lambda: shoal.make_mesh({"x": 4}, devices=[7] if me else None)))
    line = agreed_devices._line
    if me:
        agreed_devices._line = lambda device: line(device).replace("2048", "99")
    told.append(outcome(lambda: shoal.make_mesh({"x": 4})))
    agreed_devices._line = line
    local_devices = jax.local_devices
    if me:
        jax.local_devices = lambda **named: local_devices(**named)[1:]
    told.append(outcome(lambda: shoal.make_mesh({"x": 4})))
    jax.local_devices = local_devices
    told.append(outcome(lambda: shoal.make_mesh({"x": 4})))
    shoal.barrier("in step")
    return told


def test_different_meshes_raise_on_every_process(cluster):
    one, other = cluster.run(make_otherwise)
    words = [("axes x=2 y=2", "axes x=4 y=1"), ("device 0: cpu", "device 2049: cpu"),
             ("options none", "options across={'x': 2}"),
             ("options none", "explicit axes x")]  # fmt: skip
    for number, sides in enumerate(words):
        for told in (one[number], other[number]):
            assert told.startswith("DivergenceError: process"), told
            assert all(side in told for side in sides), told
    assert one[4].startswith("PeerFailedError")
    assert "no device has the id 7" in one[4]
    assert other[4].startswith("UsageError: make_mesh: no device has the id 7")
    for told in (one[5], other[5]):
        assert "processes gave make_mesh different values" in told
        assert "device 2048: cpu, process 1" in told
        assert "device 99: cpu, process 1" in told
    for told in (one[6], other[6]):
        assert "process 1: lacks a device of the list: device 2048" in told
    assert one[7] == other[7]
    assert one[7].startswith("x=4")


def come_late():
    shoal.make_mesh({"x": 4})  # the devices have started
    told = ""
    if shoal.process_index() == 0:
        try:
            shoal.make_mesh({"x": 4}, timeout_s=0.5)
        except shoal.DeadlineError as error:
            told = [list(error.missing), str(error)]
    shoal.barrier("beside", lane="beside")
    if shoal.process_index() == 1:
        told = outcome(lambda: shoal.make_mesh({"x": 4}))
    return told


def test_process_that_does_not_call_make_mesh_is_named(cluster):
    (missing, words), late = cluster.run(come_late)
    assert missing == [1]
    assert "make_mesh" in words
    assert "process 1" in words
    assert late.startswith("DeadlineError")


def make_one():
    return text(shoal.make_mesh({"x": -1}))


@pytest.mark.parametrize("point", ["make_mesh.before_arrive", "make_mesh.after_arrive"])
def test_process_killed_in_make_mesh_raises_on_the_others(child_env, point):
    faults = f"{point}@1:kill"
    with Cluster(2, start_method="fork", faults=faults, env=child_env) as two:
        two.start(make_one)
        one, other = two.wait()
    assert other.code == -signal.SIGKILL
    if point == "make_mesh.before_arrive":
        assert (one.code, one.kind) == (71, "ProcessLostError")
    else:  # the answer had come
        assert one.value == "x=2 | ids 0,2048 | processes 0,1"


def start_on_a_platform_that_is_not_there():
    if shoal.process_index() == 1:
        jax.config.update("jax_platforms", "tpu")
    return outcome(lambda: shoal.make_mesh({"x": -1}))


def test_a_process_without_devices_is_named_at_once_while_the_others_start(cluster):
    cluster.start(start_on_a_platform_that_is_not_there)
    one, other = cluster.wait()
    assert other.value.startswith("NoDevicesError: process 1 of 2")
    assert "no TPU device was found" in other.value
    assert one.value.startswith("PeerFailedError: process 0 of 2")
    assert "process 1" in one.value
    assert "NoDevicesError" in one.value
    assert one.code == 73  # its devices still start, and never will


def start_alone():
    if shoal.process_index() == 1:
        shoal.barrier("beside", lane="beside")
        return "did not start"
    try:
        shoal.make_mesh({"x": -1}, timeout_s=0.5)
    except shoal.DeadlineError as error:
        told = [list(error.missing), str(error)]
    shoal.barrier("beside", lane="beside")
    return told


def test_process_that_does_not_start_its_devices_is_named(cluster):
    cluster.start(start_alone)
    one, _ = cluster.wait()
    missing, words = one.value
    assert missing == [1]
    assert "not there: process 1" in words
    assert "'beside'" in words


def die_at_the_start():
    if shoal.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_one()


def test_process_killed_while_the_others_start_devices_is_named(cluster):
    cluster.start(die_at_the_start)
    one, _ = cluster.wait()
    assert (one.code, one.kind) == (71, "ProcessLostError")
    assert "starting the devices" in one.error
