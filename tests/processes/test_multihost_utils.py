"""`shoal.compat.multihost_utils` in two processes of two devices each, beside JAX's own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils as theirs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shoal
from meta import documents
from meta.source import ROOT
from shoal.compat import multihost_utils as ours
from shoal.errors import DivergenceError, PeerFailedError, UsageError
from shoal.testing.cluster import Cluster

BOTH = (ours, theirs)


def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))


def whole(spec, shape=(4, 6)):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    sharding = NamedSharding(mesh(), spec)
    return jax.make_array_from_callback(shape, sharding, lambda where: values[where])


def said(error, call):
    with pytest.raises(error) as caught:
        call()
    return caught.value


def values_go_from_one_to_all(me):
    value = {"a": np.arange(4, dtype=np.float32) + 10 * me, "b": np.uint8(me), "c": 3.5 + me}
    for module in BOTH:
        for source in (None, 1):
            flag = None if source is None else me == source
            came = module.broadcast_one_to_all(value, is_source=flag)
            assert came["a"].tolist() == [10.0 * (source or 0) + n for n in range(4)]
            assert (came["b"].dtype, came["b"].shape, int(came["b"])) == (np.uint8, (), source or 0)
            assert float(came["c"]) == 3.5 + (source or 0)
    bits = np.array([-0.0, 1e-42], np.float32)
    assert ours.broadcast_one_to_all(bits).tobytes() == bits.tobytes()
    assert theirs.broadcast_one_to_all(bits).tobytes() != bits.tobytes()  # its defect
    far = np.array([1 << 40]) + me
    assert ours.broadcast_one_to_all(far).tolist() == [1 << 40]
    if me == 0:  # calls at different places are one
        ours.broadcast_one_to_all(1)
    else:
        assert ours.broadcast_one_to_all(0) == 1
    none = said(DivergenceError, lambda: ours.broadcast_one_to_all(value, is_source=False))
    two = said(DivergenceError, lambda: ours.broadcast_one_to_all(value, is_source=True))
    assert [error.sides for error in (none, two)] == [
        {"is_source=False": (0, 1)}, {"is_source=True": (0, 1)}
    ]  # fmt: skip
    assert ours.broadcast_one_to_all(whole(P())).shape == (4, 6)
    for module in BOTH:
        error = said(RuntimeError, lambda m=module: m.broadcast_one_to_all(whole(P("x"))))
        assert isinstance(error, UsageError) == (module is ours)


def values_are_gathered(me):
    value = {"a": jnp.ones((2, 3)) * me, "b": np.arange(3) + me, "n": np.array(me), "s": 1.5}
    for tiled in (False, True):
        mine, yours = (module.process_allgather(value, tiled) for module in BOTH)
        jax.tree.map(np.testing.assert_array_equal, mine, yours)
        assert jax.tree.map(np.shape, mine) == jax.tree.map(np.shape, yours)
    rows = np.ones((1 + me, 2), np.float32)
    assert ours.process_allgather(rows, tiled=True).shape == (3, 2)
    for spec in (P("x"), P("y", "x"), P(), P(("y", "x"))):
        mine, yours = (module.process_allgather(whole(spec), tiled=True) for module in BOTH)
        np.testing.assert_array_equal(mine, yours)
    for module in BOTH:
        with pytest.raises(ValueError, match="Gathering global non-fully-addressable arrays only "):
            module.process_allgather(whole(P("x")))
        loss = jax.jit(lambda x: x.sum())(whole(P("x")))
        assert module.process_allgather(loss, tiled=True).shape == ()
    replicated = {"w": whole(P()), "loss": loss, "own": np.arange(3) + me, "n": me, "s": "text"}
    for tiled in (False, True):
        came = ours.process_allgather(replicated, tiled)
        np.testing.assert_array_equal(came["w"], np.asarray(whole(P())), strict=True)
        np.testing.assert_array_equal(came["loss"], np.asarray(loss), strict=True)
        assert came["own"].shape == ((6,) if tiled else (2, 3))
        assert came["own"].ravel().tolist() == [0, 1, 2, 1, 2, 3]
        assert (came["n"].tolist(), came["s"]) == ([0, 1], ["text", "text"])
    differ = {"w": whole(P()), "own": np.zeros(3 + me)}
    said(DivergenceError, lambda: ours.process_allgather(differ))


def points_and_equality(me):
    for module in BOTH:
        module.sync_global_devices("again")
        module.sync_global_devices("again")
        with pytest.raises(AssertionError):
            module.sync_global_devices(f"test message {me}")
        module.assert_equal({"w": np.ones(3), "n": 4, "global": whole(P())})
        with pytest.raises(AssertionError, match=r"at the start\. "):
            module.assert_equal({"w": np.float32([1, 2 + me])}, "at the start")
    names = ("plumless", "buckeroo")  # of one crc32, so that JAX takes them for one name
    assert len({zlib.crc32(name.encode()) for name in names}) == 1
    theirs.sync_global_devices(names[me])
    said(AssertionError, lambda: ours.sync_global_devices(names[me]))
    error = said(ours.UnequalError, lambda: ours.assert_equal({"w": np.float32([1, 2 + me])}))
    assert isinstance(error, DivergenceError)
    assert error.sides == {"['w'][1] = 2.0": (0,), "['w'][1] = 3.0": (1,)}
    assert str(error).startswith("assert_equal: process ")
    assert "assert_same" in str(error)
    ours.assert_equal(np.float32([np.nan]))
    ours.assert_equal(whole(P("x", "y")))
    far = np.array([(1 << 40) + me])  # JAX passes on process 0 and raises on 1
    said(AssertionError, lambda: ours.assert_equal(far))
    said(AssertionError, lambda: ours.assert_equal({"w": 1} if me else {"v": 1}))
    error = said(AssertionError, lambda: ours.sync_global_devices(f"{me}"))
    assert "sync_global_devices('0')" in str(error)
    assert "sync_global_devices('1')" in str(error)


def parts_become_whole_and_back(me):
    mine = np.arange(8, dtype=np.float32).reshape(4, 2) + 8 * me
    for spec in (P("x"), P(None, "x"), P(("x", "y")), P("x", "y"), P("y", "x")):
        made = [module.host_local_array_to_global_array(mine, mesh(), spec) for module in BOTH]
        assert made[0].sharding == made[1].sharding
        assert made[0].shape == made[1].shape
        for one, other in zip(*(array.addressable_shards for array in made), strict=True):
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))
        back = [m.global_array_to_host_local_array(made[0], mesh(), spec) for m in BOTH]
        assert back[0].sharding == back[1].sharding
        np.testing.assert_array_equal(np.asarray(back[0]), mine)
        again = ours.host_local_array_to_global_array(back[0], mesh(), spec)
        for one, other in zip(again.addressable_shards, made[0].addressable_shards, strict=True):
            assert one.data.unsafe_buffer_pointer() == other.data.unsafe_buffer_pointer()
    for module in BOTH:
        given = whole(P("x"))
        for spec in (P("x"), P("y"), P(None, "x")):  # global already
            assert module.host_local_array_to_global_array(given, mesh(), spec) is given
        own = module.global_array_to_host_local_array(whole(P("x", "y")), mesh(), P("x"))
        assert own.sharding == NamedSharding(mesh().local_mesh, P("x"))
        np.testing.assert_array_equal(own, np.arange(24).reshape(4, 6)[2 * me : 2 * me + 2])
    crossed = Mesh(np.array(jax.devices())[[0, 2, 3, 1]].reshape(2, 2), ("x", "y"))
    with pytest.raises(UsageError, match=r"host_local_array_to_global_array: .*one block of it"):
        ours.host_local_array_to_global_array(mine, crossed, P("x", "y"))


def slopes_are_right(me):
    mine = jnp.arange(4.0, dtype="float32") + 4 * me

    def loss(x):
        total = jax.jit(lambda g: (g**3).sum())(
            ours.host_local_array_to_global_array(x, mesh(), P("x"))
        )
        return ours.global_array_to_host_local_array(total, mesh(), P())

    np.testing.assert_allclose(jax.grad(loss)(mine), 3 * mine**2)
    rows = jnp.stack([mine, 2 * mine, 3 * mine])
    batch = jax.vmap(lambda x: ours.host_local_array_to_global_array(x, mesh(), P("x")))(rows)
    assert batch.shape == (3, 8)
    back = jax.vmap(lambda x: ours.global_array_to_host_local_array(x, mesh(), P("x")))(batch)
    np.testing.assert_array_equal(back, rows)
    odd = ours.host_local_array_to_global_array(np.float32([me]), mesh(), P())  # not one value
    assert odd.shape == (1,)
    said(DivergenceError, lambda: shoal.barrier("replicas are compared here"))


def inside_jit_what_is_no_part_passes_through():
    value = np.arange(4, dtype=np.float32)
    for name in ("host_local_array_to_global_array", "global_array_to_host_local_array"):
        for module in BOTH:
            convert = getattr(module, name)
            for given in (value, whole(P("x"))):  # of a process alone, and global
                found = jax.jit(lambda a, convert=convert: convert(a, mesh(), P("y")))(given)
                assert found.sharding.device_set == jnp.asarray(given).sharding.device_set
                assert found.shape == given.shape
            with pytest.raises(ValueError, match="inside jit" if module is ours else "lower"):
                jax.jit(lambda a, convert=convert: convert(a, mesh(), P("x")))(value)


def blocks_are_left_in_one_way(me):
    for _ in range(2):
        with ours.live_devices(jax.devices()) as alive:
            assert alive == jax.devices()
    with ours.live_devices(jax.local_devices()) as alive:
        assert alive == jax.local_devices()
    others = ours.live_devices([device for device in jax.devices() if device.process_index != me])
    with pytest.raises(UsageError, match="do not have any local devices"), others:
        pytest.fail("entered")

    def one_raises():
        with ours.live_devices(jax.devices()):
            if me == 0:
                raise KeyError("mine")
            ours.sync_global_devices("to which process 0 does not come")

    said((DivergenceError, PeerFailedError) if me else KeyError, one_raises)

    def one_raises_and_nobody_waits():
        with ours.live_devices(jax.devices()):
            if me == 0:
                raise KeyError("mine")

    error = said(PeerFailedError if me else KeyError, one_raises_and_nobody_waits)
    assert not me or [*error.failed] == [0]


def examples_of_jax_hold(me):
    """What the docstrings of JAX's functions show, as they show it."""
    global_mesh = Mesh(jax.devices(), "x")
    arr = ours.host_local_array_to_global_array(np.arange(4) * me, global_mesh, P("x"))
    assert ours.process_allgather(arr, tiled=True).tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    devices = np.array(jax.devices()).reshape(jax.process_count(), jax.local_device_count())
    hosts = Mesh(devices, ["host", "dev"])
    arr = ours.host_local_array_to_global_array(np.arange(4) * me, hosts, P("host"))
    assert ours.process_allgather(arr, tiled=True).tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert {shard.data.shape for shard in arr.addressable_shards} == {(4,)}
    arr = ours.host_local_array_to_global_array(np.arange(4), hosts, P())
    assert np.asarray(arr).tolist() == [0, 1, 2, 3]
    local = {"x": np.arange(4.0, dtype="f4") + me}
    global_inputs = ours.host_local_array_to_global_array(local, hosts, P("host"))
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(global_inputs)
    host_local_output = ours.global_array_to_host_local_array(doubled, hosts, P("host"))
    assert host_local_output["x"].tolist() == (2 * local["x"]).tolist()


def program_of_the_page(*, is_changed):
    """Return the losses that the program prints, before or after the change."""
    page = (ROOT / "docs" / "coming-from" / "multihost_utils.md").read_text(encoding="utf-8")
    (program,) = (block.code for block in documents.blocks("page", page, "py"))
    (change,) = (block.code for block in documents.blocks("page", page, "diff"))
    old, new = ("".join(lines_of(change, sign)) for sign in "-+")
    assert old in program
    if is_changed:
        program = program.replace(old, new)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def lines_of(change, sign):
    """Yield the lines of one side of a diff."""
    for line in change.splitlines(keepends=True):
        if line[0] in (" ", "\n", sign):
            yield line.removeprefix(" ").removeprefix(sign)


def before(address):
    """Run as a program that knows nothing of shoal, with what a launcher would tell it."""
    jax.config.update("jax_num_cpu_devices", 2)
    mine = int(os.environ["SHOAL_PROCESS_ID"])
    jax.distributed.initialize = partial(jax.distributed.initialize, address, 2, mine)
    return program_of_the_page(is_changed=False)


def all_stop_at_one_step(me):
    told = [module.reached_preemption_sync_point(step) for module in BOTH for step in range(3)]
    assert told == [False] * 6
    if me == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    step = 3
    while not theirs.reached_preemption_sync_point(step):  # shoal's agreement, too
        step += 10
    assert all(module.reached_preemption_sync_point(step + 1) for module in BOTH)
    return shoal.preemption.notice().step


def everything():
    """Run in both processes."""
    me = shoal.process_index()
    values_go_from_one_to_all(me)
    values_are_gathered(me)
    points_and_equality(me)
    parts_become_whole_and_back(me)
    slopes_are_right(me)
    inside_jit_what_is_no_part_passes_through()
    examples_of_jax_hold(me)
    blocks_are_left_in_one_way(me)
    return program_of_the_page(is_changed=True), all_stop_at_one_step(me)


def one_dies():
    """Process 1 dies inside a block; process 0 says what it learns of that, and goes on."""
    me = shoal.process_index()
    try:
        with ours.live_devices(jax.devices()) as alive:
            assert alive == jax.devices()
            if me == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except ours.ProcessFailureError as error:
        failed = sorted(device.id for device in error.failed_devices)
        told = [failed, [*error.lost], str(error)]
    with ours.live_devices(jax.devices()) as alive:
        return [*told, alive == jax.local_devices()]


def test_two_processes():
    with Cluster(2, devices=2, start_method="fork") as cluster:
        results = cluster.run(everything)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        printed = cluster.run(before, address, initialize=False)
    assert results[0] == results[1]
    assert printed == [results[0][0]] * 2
    losses = json.loads(printed[0])
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_one_dies_inside_a_block():
    with Cluster(2, devices=2, start_method="fork") as cluster:
        cluster.start(one_dies)
        first, second = cluster.wait()
    assert second.code == -signal.SIGKILL
    assert not first.error, first.error
    failed, lost, told, goes_on = first.value
    assert (len(failed), lost, goes_on) == (2, [1], True)
    assert "live_devices" in told
    assert "process 1 died or left inside" in told
