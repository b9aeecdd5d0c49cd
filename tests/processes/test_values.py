"""Values between real processes with unequal numbers of devices: right, or an error on each."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import os
import threading
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shoal
from shoal.errors import (
    DeadlineError,
    DivergenceError,
    PeerFailedError,
    SaveAbortedError,
    UsageError,
    UsageTypeError,
)
from shoal.testing.cluster import Cluster

WORDS = np.array([0x80000000, 1, 0x7FA00001, 0xFFC12345, 0x7F800000], np.uint32)
ODD = WORDS.view(np.float32)  # -0.0, subnormal, signalling NaN, NaN with payload, infinity
BIG = (1 << 62) + 1


def join(devices):
    """Join with as many devices as the list says for this process; return which it is."""
    shoal.initialize(virtual_devices=devices[int(os.environ["SHOAL_PROCESS_ID"])])
    return shoal.process_index()


def tree_of(process, rows):
    return {
        "odd": np.ones_like(ODD) if process else ODD,
        "int": np.full((rows, 3), BIG + process),
        "device": jax.device_put(np.arange(4) + process),
        "key": jax.random.key(process),
        "n": 10**30 + process,
        "text": ["no", "\udcff yes"][process],
        "none": None,
        "scalar": np.float16(process),
    }


def broadcasts_are_right(index, rows):
    for source in (0, 1):
        tree, wanted = shoal.broadcast(tree_of(index, rows), source), tree_of(source, rows)
        assert tree["odd"].tobytes() == wanted["odd"].tobytes(), tree["odd"]
        assert tree["int"].dtype == np.int64
        assert (tree["int"] == wanted["int"]).all()
        assert type(tree["device"]) is np.ndarray
        assert tree["device"][0] == source
        assert np.asarray(jax.random.key_data(tree["key"]))[1] == source
        assert (tree["n"], tree["text"], tree["none"]) == (10**30 + source, wanted["text"], None)
        assert type(tree["scalar"]) is np.float16


def broadcasts_to_nothing_are_right(index, rows):
    """The idiom of mpi4py and torch."""
    for source in (0, 1):
        tree = tree_of(source, rows) if index == source else None
        tree, wanted = shoal.broadcast(tree, source), tree_of(source, rows)
        assert tree.keys() == wanted.keys()
        assert tree["odd"].tobytes() == wanted["odd"].tobytes(), tree["odd"]
        assert (tree["int"] == wanted["int"]).all()
        assert (tree["n"], tree["text"], tree["none"]) == (10**30 + source, wanted["text"], None)
        assert np.asarray(jax.random.key_data(tree["key"]))[1] == source
    assert shoal.broadcast({"a": [index]} if index else None, is_source=index == 1) == {"a": [1]}
    assert shoal.broadcast(None) is None


def gathers_are_right(index, rows):
    for to in (None, 0, 1):
        both = shoal.allgather(tree_of(index, rows), to=to)
        if to not in (None, index):
            assert both is None
            continue
        assert both["odd"].view(np.uint32)[0].tolist() == WORDS.tolist()
        assert both["int"][:, 0, 0].tolist() == [BIG, BIG + 1]
        assert both["int"].shape == (2, rows, 3)
        assert both["n"] == [10**30, 10**30 + 1]
        assert both["key"].shape == (2,)
        assert both["scalar"].tolist() == [0, 1]
    ragged = shoal.allgather([np.full((rows + index, 2), index), np.int8(index)], tiled=True)
    assert ragged[0][:, 0].tolist() == [0] * rows + [1] * (rows + 1)
    assert ragged[1].tolist() == [0, 1]
    assert ragged[1].dtype == np.int8


def arrays_in_parts_are_gathered(index, mesh, size, spec):
    value = np.arange(np.prod(size), dtype=np.int32).reshape(size)
    placed = jax.make_array_from_callback(size, NamedSharding(mesh, spec), lambda i: value[i])
    assert not placed.is_fully_addressable
    for to in (None, 0, 1):
        whole = shoal.allgather({"a": placed}, tiled=True, to=to)
        assert whole is None if to not in (None, index) else (whole["a"] == value).all()
    if placed.is_fully_replicated:
        assert (shoal.broadcast(placed, 1) == value).all()
        assert shoal.allgather(placed).shape == (2, *size)
        return []
    calls = shoal.broadcast, shoal.allgather
    return [refused(functools.partial(call, {"a": placed})) for call in calls]


def refused(call, error=UsageError):
    try:
        got = call()
    except error as refusal:
        return str(refusal)
    raise AssertionError(f"not refused: {got}")


def values_are_right():
    """Small and large values, global arrays; nothing is compiled for a new shape."""
    index = join([3, 1])
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    explicit = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    tree_of(0, 1), tree_of(1, 1)  # JAX compiles what makes the keys
    del compiled[:]
    broadcasts_are_right(index, 2)
    broadcasts_to_nothing_are_right(index, 2)
    gathers_are_right(index, 2)
    assert not compiled, compiled
    broadcasts_are_right(index, 1 << 16)  # large, for the first time
    broadcasts_to_nothing_are_right(index, 1 << 16)
    gathers_are_right(index, 1 << 16)
    assert bool(compiled) == (os.environ["SHOAL_SHARED_MEMORY"] == "0"), compiled
    key = jax.random.key(index)
    del compiled[:]
    with jax.set_mesh(explicit), jax.transfer_guard("disallow"):
        for rows in (5, 9999, 1 << 17):
            mine = shoal.broadcast(np.full((rows, 7), index), 1)
            assert mine.shape == (rows, 7)
            assert mine.min() == 1
            assert shoal.allgather(mine)[1, -1, -1] == 1
            assert shoal.broadcast(key, 1).is_fully_addressable
            assert shoal.allgather(key).shape == (2,)
    assert not compiled, compiled
    told = []
    for size, spec in (((8, 4), P("x")), ((8, 4), P(None, "x")), ((4000, 8), P("x")), ((8,), P())):
        told += arrays_in_parts_are_gathered(index, mesh, size, spec)
    keys = jax.random.split(jax.random.key(5), 8)
    placed = jax.jit(lambda k: k, out_shardings=NamedSharding(mesh, P("x")))(keys)
    whole = shoal.allgather(placed, tiled=True)
    assert (jax.random.key_data(whole) == jax.random.key_data(keys)).all()
    zero = jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: np.float32(2))
    assert shoal.allgather(zero, tiled=True).tolist() == [2, 2]
    return told


def lanes_stream_at_once():
    """Large values in three lanes at the same time; a lane's bits are its own."""
    index = join([2, 1])

    def go(lane):
        rng = np.random.default_rng([index, *lane.encode()])
        mine = rng.integers(0, 256, (3 << 20) + index, np.uint8)
        for turn in range(3):
            whole = shoal.allgather(mine, tiled=True, lane=lane)
            part = whole[(3 << 20) * index :][: len(mine)]
            assert (part == mine).all(), (lane, turn)
            given = whole if index == turn % 2 else np.zeros_like(whole)
            there = shoal.broadcast(given, source=turn % 2, lane=lane)
            assert (there == whole).all(), (lane, turn)
        return zlib.crc32(whole)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(go, ["main", "save", "log"]))


def go_on_after_a_deadline(timeout_s):
    """A process is too late in the middle of a value; then other values follow at once."""
    index = join([1, 1])
    values = [np.random.default_rng(turn).integers(0, 256, 6 << 20, np.uint8) for turn in range(4)]

    def broadcast(turn, **options):
        given = np.zeros_like(values[turn]) if index else values[turn]
        return (shoal.broadcast(given, **options) == values[turn]).all()

    assert broadcast(0)
    refused(lambda: broadcast(1, timeout_s=timeout_s), DeadlineError)
    assert broadcast(2)  # while a thread of process 1 still waits to move the value before
    print("is right", flush=True)
    for thread in threading.enumerate():
        if thread.name == "shoal's work on devices":
            thread.join()
    assert broadcast(3)


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def added_mib(call, warm, value):
    """How much memory a call adds at its peak; `warm`: for whatever the first call loads."""
    call(warm)
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak begins anew: proc(5)
    call(value)
    return (status("VmHWM") - before) / 2**20


def memory_of_large_values():
    """Return the MiB that each way adds, and those that its result has."""
    index = join([2, 2])
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    value = np.ones(16 << 20, np.float32)
    warm = value[: 1 << 20]

    def parts(array):
        placed = NamedSharding(mesh, P("x"))
        return jax.make_array_from_callback(array.shape, placed, lambda i: array[i])

    gather = functools.partial(shoal.allgather, tiled=True)
    return {
        "broadcast": (added_mib(shoal.broadcast, warm, value), 64),
        "from the other": (added_mib(lambda x: shoal.broadcast(x, 1), warm, value), 64),
        "allgather": (added_mib(shoal.allgather, warm, value), 128),
        "to one": (added_mib(lambda x: shoal.allgather(x, to=0), warm, value), 128 * (not index)),
        "in parts": (added_mib(gather, parts(warm), parts(value)), 64),
    }


def swapped(index, call):
    """Both broadcast both, one of them the second one first."""

    def first():
        return call(np.zeros(3))

    def second():
        return call(np.ones(3))

    return second() if index else first()


def what_must_be_equal_is_not():
    """Each process says what it was told of calls that differ."""
    index = join([1, 1])
    x, y = np.zeros(3, np.float32), np.ones(3, np.float32)
    calls = [
        lambda: swapped(index, shoal.broadcast),
        lambda: swapped(index, shoal.allgather),
        lambda: (shoal.allgather if index else shoal.broadcast)(x),
        lambda: shoal.broadcast(x[: 3 - index]),
        lambda: shoal.allgather(x[: 3 - index]),
        lambda: shoal.broadcast(x.astype("f8") if index else x),
        lambda: shoal.broadcast({"a": x} if index else {"b": x}),
        lambda: shoal.broadcast([x, y] if index else (x, y)),
        lambda: shoal.broadcast(x, source=index),
        lambda: shoal.allgather(x, to=index),
        lambda: shoal.allgather(x, tiled=bool(index)),
        lambda: shoal.broadcast(np.zeros(1 << (20 + index))),
        lambda: shoal.broadcast(x, name=f"n{index}"),
    ]
    told = [refused(call, DivergenceError) for call in calls]
    assert shoal.broadcast(index + 5, 1) == 6  # the next call is none the worse for it
    return told


SAID = [
    *[("(swapped.<locals>.first)", "(swapped.<locals>.second)")] * 2,
    ("broadcast", "allgather"),
    ("float32[3]", "float32[2]"),
    ("float32[3]", "float32[2]"),
    ("float32[3]", "float64[3]"),
    ("['b']", "['a']"),
    ("(*, *)", "[*, *]"),
    ("source=0", "source=1"),
    ("to=0", "to=1"),
    ("tiled=False", "tiled=True"),
    ("float64[1048576]", "float64[2097152]"),
    ("n0", "n1"),
]


@pytest.fixture(params=["0", "1"], ids=["over devices", "through memory of the host"])
def env(request, child_env):
    return child_env | {"SHOAL_SHARED_MEMORY": request.param}


def test_values_are_right(env):
    with Cluster(2, start_method="fork", devices=None, env=env) as cluster:
        for told in cluster.run(values_are_right, initialize=False):
            assert len(told) == 6
            for words in told:
                assert "['a']: is distributed over several processes" in words


def what_is_mapped():
    """Return how many windows of the host's memory this process has mapped."""
    return sum("memfd:shoal" in line for line in Path("/proc/self/maps").read_text().splitlines())


def shutdown_frees():
    """Pass a large value in a job and leave it; return whether anything was mapped meanwhile, and
    what is mapped and on devices afterwards."""
    shoal.initialize(virtual_devices=2)
    shoal.broadcast(np.ones(3 << 20, np.float32))
    during = what_is_mapped()
    shoal.shutdown()
    gc.collect()
    return during > 0, what_is_mapped(), len(jax.live_arrays())


@pytest.mark.parametrize("in_memory", [True, False])
def test_shutdown_frees_what_passed_large_values(child_env, in_memory):
    env = child_env | {"SHOAL_SHARED_MEMORY": str(int(in_memory))}
    with Cluster(2, start_method="fork", devices=None, env=env) as cluster:
        for told in cluster.run(shutdown_frees, initialize=False):
            assert tuple(told) == (in_memory, 0, 0)


def test_arguments_that_differ_raise_on_each_process(child_env):
    with Cluster(2, start_method="fork", devices=None, env=child_env) as cluster:
        for told in cluster.run(what_must_be_equal_is_not, initialize=False):
            for words, (first, second) in zip(told, SAID, strict=True):
                assert first in words, words
                assert second in words, words


def test_lanes_that_stream_at_once_keep_their_bits(env):
    with Cluster(2, start_method="fork", devices=None, env=env) as cluster:
        first, second = cluster.run(lanes_stream_at_once, initialize=False)
        assert first == second
        assert len(set(first)) == 3


def test_late_chunk_is_not_taken_for_the_next_value(child_env):
    env = child_env | {"SHOAL_SHARED_MEMORY": "0"}
    # the first value has two chunks; the second one stops at its second
    with Cluster(
        2, start_method="fork", devices=None, faults="stream.before_chunk@1#4:pause", env=env
    ) as cluster:
        cluster.start(go_on_after_a_deadline, 2.0, initialize=False)
        for process in (0, 1):
            cluster.wait_for("is right", process)
        cluster.release("stream.before_chunk")
        assert [one.code for one in cluster.wait()] == [0, 0]


def test_memory_is_that_of_the_result_and_a_few_chunks(env):
    with Cluster(2, start_method="fork", devices=None, env=env) as cluster:
        for added in cluster.run(memory_of_large_values, initialize=False):
            for way, (peak_mib, result_mib) in added.items():
                # What was given back before may be used again: it does not count anew.
                assert result_mib / 2 <= peak_mib <= result_mib + 48, (way, peak_mib, result_mib)


def refused_calls(root):
    """Calls that meet others, and the keywords or arguments with which Python refuses them."""
    from shoal.compat import dtensor, multihost_utils

    here = shoal.make_mesh({"x": -1})
    half = [jax.devices()[0], jax.devices()[-1]]
    there = shoal.Layout(shoal.make_mesh({"x": 2}, devices=half), "x")
    array = shoal.put(np.arange(8.0, dtype=np.float32), shoal.Layout(here, "x"))
    mesh = dtensor.Mesh.from_shoal(here)
    unknown = {"onyl": 1}
    return {
        "save": (lambda **more: shoal.save(f"{root}/a", {"w": 1}, **more), unknown),
        "restore": (lambda **more: shoal.restore(f"{root}/none", **more), unknown),
        "live_processes": (lambda **more: shoal.live_processes(**more), unknown),
        "make_mesh": (lambda **more: shoal.make_mesh({"x": -1}, **more), unknown),
        "make_mesh of some": (
            lambda **more: shoal.make_mesh({"x": 2}, devices=half, **more), unknown),
        "relayout": (lambda **more: shoal.relayout(array, there, **more), unknown),
        "relayout so": (lambda **more: shoal.relayout(array, there, **more), {"donate": "x"}),
        "assert_same_program": (
            lambda **more: shoal.assert_same_program(jax.jit(abs), 1.0, **more), {"name": 1}),
        "sync": (lambda *more: multihost_utils.sync_global_devices(*more, "x"), [1]),
        "gather": (lambda **more: multihost_utils.process_allgather(1.0, **more), unknown),
        "living": (
            lambda *more: multihost_utils.live_devices(*more, jax.devices()).__enter__(), [1]),
        "named": (lambda *more: dtensor.name_based_save(mesh, f"{root}/b", *more, {"x": 1.0}), [1]),
        "barrier": (lambda *more: dtensor.barrier(mesh, "x", *more), [1, 2]),
    }  # fmt: skip


def left_before_it_began(root):
    index = shoal.process_index()
    for name, (call, wrong) in refused_calls(root).items():
        try:
            if not index:
                call()
            else:
                call(**wrong) if isinstance(wrong, dict) else call(*wrong)
            told = "returned"
        except Exception as error:  # noqa: BLE001 - compared
            told = type(error)
        expected = (TypeError, UsageTypeError) if index else (PeerFailedError, SaveAbortedError)
        assert issubclass(told, expected), (name, told)
        for again in "ab":
            shoal.barrier(f"{again} after {name}", timeout_s=20)
    return "in step"


def test_a_call_that_python_refuses_on_one_process_fails_on_the_other(tmp_path, child_env):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as job:
        assert job.run(left_before_it_began, str(tmp_path)) == ["in step"] * 2
