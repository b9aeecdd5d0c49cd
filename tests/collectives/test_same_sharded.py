"""`assert_same` of arrays on several devices: replicas within a process, and how regions are read.

Across processes: tests/processes/test_agreeing.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives import hashes
from shoal.collectives.hashes import FlatItems, digest_of
from shoal.collectives.same import assert_same
from shoal.errors import DivergenceError
from shoal.runtime.client.in_process import LocalJob

SHAPE = (4, 6)


def placed(values, *spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))


def with_bad_replica(device, spec=()):
    """An array of which one device holds other values than its replicas do."""
    good = placed(np.zeros(SHAPE, np.float32), *spec)
    pieces = [np.array(shard.data) for shard in good.addressable_shards]
    pieces[device][-1, -1] = 7
    devices = [shard.device for shard in good.addressable_shards]
    arrays = [jax.device_put(p, d) for p, d in zip(pieces, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(SHAPE, good.sharding, arrays)


@pytest.mark.parametrize("spec", [(), ("a",), (None, "b"), (None, ("b",)), ("a", "b")])
def test_local_placement_of_an_array_does_not_affect_the_comparison(spec):
    values = np.arange(24.0, dtype="f4").reshape(SHAPE)
    other = values.copy()
    other[1, 5] = -1
    trees = [placed(values, *spec), values, jnp.asarray(values)]
    job = LocalJob(3)
    compare = [lambda c: assert_same.on(c, trees[c.process], timeout_s=PATIENCE_S)]
    assert run_all(job, compare[0]) == [None] * 3
    trees[2] = other
    for error in run_all(job, compare[0]):
        assert error.sides == {"[1, 5] = 11.0": (0, 1), "[1, 5] = -1.0": (2,)}


@pytest.mark.parametrize(
    ("spec", "device", "shown"),
    [
        ((), 5, "[3, 5]: device 0 holds 0.0 (0x00000000), device 5 holds 7.0 (0x40e00000)"),
        (("a",), 3, "[1, 5]: device 2 holds 0.0 (0x00000000), device 3 holds 7.0 (0x40e00000)"),
    ],
)
def test_replica_that_differs_within_a_process_raises_on_all(spec, device, shown):
    bad, good = with_bad_replica(device, spec), np.zeros(SHAPE, np.float32)
    assert bad.is_fully_replicated == (not spec)
    with pytest.raises(DivergenceError, match="replicas differ within a process") as caught:
        assert_same(bad)
    assert caught.value.sides == {shown: (0,)}

    def go(client):
        tree = {"w": [good, bad, good][client.process]}
        return assert_same.on(client, tree, timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(3), go):
        assert type(error) is DivergenceError
        assert error.sides == {f"['w']{shown}": (1,)}


def test_processes_whose_replicas_differ_alike_share_a_side():
    bad, good = with_bad_replica(5), np.zeros(SHAPE, np.float32)

    def go(client):
        return assert_same.on(client, [bad, good, bad][client.process], timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(3), go):
        assert list(error.sides.values()) == [(0, 2)]


def test_keys_are_compared_by_their_words_wherever_they_lie():
    keys, others = (jax.random.split(jax.random.key(n), (4, 2)) for n in range(2))
    trees = [placed(keys, "a"), keys, placed(keys), placed(others, None, "b")]
    job = LocalJob(4)
    errors = run_all(job, lambda c: assert_same.on(c, trees[c.process], timeout_s=PATIENCE_S))
    first = [np.asarray(jax.random.key_data(k)).ravel()[0] for k in (keys, others)]
    for error in errors:
        sides = {f"[0, 0, 0] = {first[0]}": (0, 1, 2), f"[0, 0, 0] = {first[1]}": (3,)}
        assert error.sides == sides


def test_a_transfer_guard_and_a_mesh_in_context_are_no_obstacle():
    array, keys = placed(np.ones(SHAPE, "f4"), "a"), jax.random.split(jax.random.key(0), 3)
    with jax.transfer_guard("disallow"):
        assert_same([array, keys])
    with jax.set_mesh(array.sharding.mesh):
        assert_same([array, keys])


# how stretches of an array are read, against NumPy


@given(st.data())
def test_any_stretch_of_pieces_in_any_order_is_read(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    values = np.arange(math.prod(shape), dtype="u2").reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    starts = [0] * len(shape)
    pieces = []
    for part, start in zip(np.split(values, [cut], axis=dim), (0, cut), strict=True):
        order = data.draw(st.sampled_from("CF"))
        dtype = data.draw(st.sampled_from(["<u2", ">u2"]))
        where = [start if n == dim else 0 for n in range(len(starts))]
        pieces.append((where, np.asarray(part, dtype=dtype, order=order)))
    flat = FlatItems(shape, values.dtype, data.draw(st.permutations(pieces)))
    whole = FlatItems(shape, values.dtype, [(starts, values)])
    low = data.draw(st.integers(0, values.size))
    high = data.draw(st.integers(low, values.size))
    expected = values.ravel()[low:high].tobytes()
    assert flat.read(low, high).tobytes() == whole.read(low, high).tobytes() == expected
    assert digest_of(flat) == digest_of(whole)


def test_threads_do_not_change_a_digest_and_nothing_is_copied(monkeypatch):
    values = np.arange(5 << 20, dtype="u4")
    flat = FlatItems(values.shape, values.dtype, [((0,), values)])
    in_four = digest_of(flat)
    monkeypatch.setattr(hashes, "_THREADS", 1)
    assert in_four == digest_of(flat)
    assert np.shares_memory(flat.read(7, 1 << 22), values)
