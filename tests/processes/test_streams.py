"""Large values between the devices of real processes, and what happens if one of them stops."""

from __future__ import annotations

import os
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shoal
from shoal.collectives.transport.chunks import LARGE_BYTES, SMALL_BYTES
from shoal.collectives.transport.stream import broadcast_bytes, gather_bytes
from shoal.runtime.process import client
from shoal.runtime.system import fault_points
from shoal.testing.cluster import Cluster

SIZES = (0, 1, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, LARGE_BYTES - 1, LARGE_BYTES,
         LARGE_BYTES + 1, 5 * LARGE_BYTES + 3)  # fmt: skip


def join(devices):
    """Join with as many devices as the list says for this process; return which it is."""
    shoal.initialize(virtual_devices=devices[int(os.environ["SHOAL_PROCESS_ID"])])
    return shoal.process_index()


def value_of(process, num_bytes):
    return np.random.default_rng([process, num_bytes]).integers(0, 256, num_bytes, dtype=np.uint8)


def spreads_to_all(source, num_bytes):
    value = value_of(source, num_bytes)
    is_source = shoal.process_index() == source
    data = np.split(value, [num_bytes // 3]) if is_source else None
    came = np.empty(num_bytes, np.uint8)
    into = [] if is_source else [came]
    broadcast_bytes(client(), source, data, num_bytes, into=into, timeout_s=60)
    assert is_source or (came == value).all()


def collects(sizes, to):
    me = shoal.process_index()
    values = [value_of(p, size) for p, size in enumerate(sizes)]
    came = [np.empty(size, np.uint8) for size in sizes if to in (None, me)]
    into = [[row] for row in came]
    gather_bytes(client(), [values[me]], sizes, into=into, timeout_s=60)
    assert all(map(np.array_equal, came, values))


def move_all_sizes(devices):
    me, count = join(devices), len(devices)
    for num_bytes in SIZES:
        for source in range(count):
            spreads_to_all(source, num_bytes)
        collects([num_bytes] * count, None)
        collects([num_bytes, 1000, 0][:count], count - 1)
    collects([0, LARGE_BYTES + 5, SMALL_BYTES][:count], 0)
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    used = {shard.device for array in arrays for shard in array.addressable_shards}
    assert len(used) == 1, used
    return me


@pytest.fixture
def over_devices(child_env):
    """What makes the processes of one host use their devices, as those of several would."""
    return child_env | {"SHOAL_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("devices", [[2, 1, 3], [1, 4]])
def test_every_size_from_every_source_over_unequal_devices(devices, over_devices):
    with Cluster(len(devices), start_method="fork", devices=None, env=over_devices) as cluster:
        done = cluster.run(move_all_sizes, devices, initialize=False)
    assert done == [*range(len(devices))]


def move_in_hostile_contexts():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    spreads_to_all(0, 100)
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"), jax.default_device(jax.devices()[0]):
        spreads_to_all(1, LARGE_BYTES + 1)
        collects([5, SMALL_BYTES], None)
    with jax.set_mesh(jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        spreads_to_all(0, LARGE_BYTES + 1)
        summed = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), in_specs=P("x"),
                                       out_specs=P()))  # fmt: skip
        with jax.disable_jit():
            collects([5, SMALL_BYTES], None)
    assert summed is not None
    jax.config.update("jax_transfer_guard", "disallow")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_jit", True)
    spreads_to_all(1, 3 * SMALL_BYTES)
    jax.config.update("jax_disable_jit", False)
    with jax.thread_guard(True):
        spreads_to_all(1, 3 * SMALL_BYTES)
    return True


def test_what_a_program_has_in_its_context_does_not_matter(over_devices):
    with Cluster(2, start_method="fork", devices=2, env=over_devices) as cluster:
        assert cluster.run(move_in_hostile_contexts) == [True, True]


def count_compilations():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    )
    spreads_to_all(0, 1)
    collects([1, 1], None)
    first = len(compiled)
    for num_bytes in SIZES:
        spreads_to_all(0, num_bytes)
        collects([num_bytes, 1 + num_bytes // 2], None)
        collects([num_bytes, 5], 1)
    return first, len(compiled) - first


def test_no_shape_compiles_anything_after_the_first_call(over_devices):
    with Cluster(2, start_method="fork", devices=2, env=over_devices) as cluster:
        for first, later in cluster.run(count_compilations):
            assert first > 0
            assert later == 0


def broadcast_40_mb():
    try:
        spreads_to_all(0, 10 * LARGE_BYTES)
    except shoal.ProcessLostError as error:
        print(f"lost {sorted(error.lost)}", flush=True)
        raise


def lost_settings(env):
    more = {"SHOAL_HEARTBEAT_S": "0.2", "SHOAL_LOST_AFTER_S": "1", "SHOAL_HANG_TIMEOUT_S": "20"}
    return env | more


@pytest.mark.parametrize(("victim", "kind"), [(0, "kill"), (1, "kill"), (1, "stop")])
def test_process_lost_between_two_chunks_is_named(victim, kind, over_devices):
    faults = f"stream.before_chunk@{victim}#4:{kind}"
    with Cluster(3, start_method="fork", devices=2, faults=faults, env=lost_settings(over_devices),
                 services="stand-alone") as cluster:  # fmt: skip
        cluster.start(broadcast_40_mb)
        for process in {0, 1, 2} - {victim}:
            assert cluster.wait_for(f"lost [{victim}]", process)
        if kind == "stop":
            cluster.kill(victim)
        ended = cluster.wait()
    assert [one.code for one in ended if one.process != victim] == [71, 71]


def broadcast_in_time(timeout_s):
    value = value_of(0, 10 * LARGE_BYTES)
    data = [value] if shoal.process_index() == 0 else None
    into = [np.empty_like(value)]
    shoal.barrier("ready")
    began = time.monotonic()
    try:
        broadcast_bytes(
            client(), 0, data, value.size, into=into, timeout_s=timeout_s, name="params"
        )
    except shoal.DeadlineError as error:
        is_others = "the deadline of process" in str(error)  # who came first gives up first
        assert is_others or time.monotonic() - began >= timeout_s
        print(f"late {error}", flush=True)
        raise


def test_a_deadline_ends_it_on_all(over_devices):
    with Cluster(
        2, start_method="fork", devices=1, faults="stream.before_chunk@1#4:pause", env=over_devices
    ) as cluster:
        cluster.start(broadcast_in_time, 2.0)
        lines = [cluster.wait_for("late ", process) for process in (0, 1)]
        cluster.release("stream.before_chunk")
        assert [one.code for one in cluster.wait()] == [73, 73]
    for line in lines:
        assert "'params' (" in line or "params (" in line, line
        assert "bytes were moved" in line


def give_up_and_end(timeout_s):
    with pytest.raises(shoal.DeadlineError):
        broadcast_in_time(timeout_s)
    fault_points.reach("given.up", shoal.process_index())


def test_work_that_was_given_up_and_goes_on_ends_without_an_abort(over_devices):
    """Process 1 has not sent its chunk when the program of process 0 has ended.

    If it ended first, as it may on a slow machine, the work of process 0 would end by that.
    """
    faults = "stream.before_chunk@1#4:pause; given.up@1:pause"
    with Cluster(2, start_method="fork", devices=1, faults=faults, env=over_devices) as cluster:
        cluster.start(give_up_and_end, 2.0)
        cluster.wait_for_pause("given.up", 1)
        cluster.wait(only=[0])
        cluster.release("given.up")
        ended = cluster.wait()
    assert [one.code for one in ended] == [73, 73]
    assert all("work on its devices that continues" in one.err for one in ended)
