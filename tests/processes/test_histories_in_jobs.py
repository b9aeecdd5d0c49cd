"""Histories of a job of two, on a disk and in a bucket: all processes decide alike."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import NamedSharding, P

import shoal
from checkpoint.bucket import servers
from checkpoint.saved_contents import damage
from shoal.checkpoint.bucket.object_store import ObjectStore
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.errors import DivergenceError, NotCommittedError, RestoreMismatchError
from shoal.retention import Best, Last, LastSeconds, Multiples
from shoal.testing.cluster import Cluster


class Scaled:
    """A class of the program's own, which is a node: values and a scale for each row."""

    def __init__(self, values, scale):
        self.values, self.scale = values, scale


jax.tree_util.register_pytree_node(
    Scaled, lambda one: ((one.values, one.scale), None), lambda _, arrays: Scaled(*arrays)
)


@pytest.fixture(scope="module")
def job():
    with Cluster(2, start_method="fork", devices=2) as job:
        yield job


@pytest.fixture(scope="module")
def server():
    with servers.moto() as address:
        servers.make_bucket(address, "runs")
        yield address


@pytest.fixture(params=["disk", "moto"])
def place(request, tmp_path):
    """Where a history is to be: an address, and the options of its bucket."""
    if request.param == "disk":
        return str(tmp_path / "run"), {}
    address = request.getfixturevalue("server")
    return f"s3://runs/{tmp_path.name}", servers.options(address)


def at(place):
    address, options = place
    return shoal.Bucket(address, **options) if options else address


def spread(*entries):
    return NamedSharding(shoal.make_mesh({"data": -1}), P(*entries))


def state(step):
    arrays = {"w": np.full((8, 4), step, np.float32), "b": np.full(8, step, np.float32)}
    return shoal.put(arrays, spread("data"))


def value(array):
    """Return the only value that a process's shards have."""
    (found,) = {float(one) for shard in array.addressable_shards for one in np.unique(shard.data)}
    return found


@contextlib.contextmanager
def data_reads():
    """Collect the names of data files that this process reads."""
    names, stores = [], {store: store.read_at for store in (LocalStore, ObjectStore)}

    def counting(read_at):
        def read(store, name, offset, parts):
            names.extend([name] if name.startswith("data-") else [])
            return read_at(store, name, offset, parts)

        return read

    for store, read_at in stores.items():
        store.read_at = counting(read_at)
    try:
        yield names
    finally:
        for store, read_at in stores.items():
            store.read_at = read_at


def with_targets(place):
    """Restore with targets that are refused on all processes, and with one of a part."""
    me, found = shoal.process_index(), []
    with shoal.Checkpoints(at(place)) as ckpts:
        ckpts.save(7, state(7))
        ckpts.wait()
        for calls in (
            lambda target: ckpts.restore(7, target),
            lambda target: ckpts.resume(target, None),
        ):
            for entries in (("data", None), (None, "data")):
                with data_reads() as names, pytest.raises(RestoreMismatchError) as wide:
                    calls(spread(*entries))
                found.append((str(wide.value).splitlines()[0], names))
            with data_reads() as names, pytest.raises(DivergenceError) as apart:
                calls({"w": spread("data") if me == 0 else spread(None, "data"), "b": spread()})
            found.append(("different layouts" in str(apart.value), names))
        part = {"w": spread(None, "data")}
        with pytest.raises(RestoreMismatchError, match="only='!b' leaves it out"):
            ckpts.restore(7, part)
        with data_reads() as names:
            back = ckpts.restore(7, part, only="target")
            again, first = ckpts.resume(part, None, only="target")
        assert names, "reads are counted"
        assert back["w"].sharding == part["w"]
        ckpts.save(8, again)
    return [*found, [*back], [*again], value(back["w"]), value(again["w"]), first]


def test_targets_are_refused_alike_before_a_byte_is_read(job, place):
    first, second = job.run(with_targets, place)
    assert first == second
    *refused, back, again, restored, resumed, following = first
    for wide, turned, apart in (refused[:3], refused[3:]):
        for (words, names), entries in ((wide, "'data', None"), (turned, "None, 'data'")):
            assert names == []
            assert f"b: P({entries}) has 2 entries for 1 dim" in words
        assert apart == (True, [])
    assert (back, again, restored, resumed, following) == (["w"], ["w"], 7.0, 7.0, 8)


def all_damaged(place):
    """Resume where no step is intact."""
    with shoal.Checkpoints(at(place)) as ckpts:
        for step in (100, 200):
            ckpts.save(step, state(step))
        ckpts.wait()
        if shoal.process_index() == 0:
            damage(at(place), 100)
            damage(at(place), 200)
        shoal.barrier("damaged")
        called = []
        with pytest.raises(NotCommittedError) as caught:
            ckpts.resume(spread("data"), lambda: called.append(1), skip_corrupt=True)
        shoal.barrier("in step")
        return str(caught.value), called, ckpts.all_steps()


def test_a_run_of_damaged_steps_is_begun_anew_by_none(job, place):
    first, second = job.run(all_damaged, place)
    assert first == second
    assert "no intact step is saved: 100, 200 are damaged" in first[0]
    assert first[1:] == ([], (100, 200))


def kept(place):
    """Save with policies; the clock of process 1 is a day ahead, and counts for nothing."""
    from shoal.checkpoint.saving import request

    seconds = iter(range(0, 6000, 60))
    ahead = 86400 * shoal.process_index()
    clock = SimpleNamespace(
        time_ns=lambda: (next(seconds) + ahead) * 10**9, monotonic=time.monotonic
    )
    ours, request.time = request.time, clock
    found = []
    try:
        for keep in (Best(2, "loss"), Best(2, "loss") | Last(1), LastSeconds(120) | Multiples(8)):
            with shoal.Checkpoints(at(place), keep=keep) as ckpts:
                first = (ckpts.latest() or 0) + 1
                for step in range(first, first + 6):
                    metrics = {"loss": 1.0 / step} if step % 2 == 0 else None
                    ckpts.save(step, state(step), metrics=metrics)
            found.append(ckpts.all_steps())
    finally:
        request.time = ours
    return found


def test_steps_are_kept_alike(job, place):
    best = (1, 3, 4, 5, 6)  # all without the metric, and the best two of 2, 4 and 6
    joined = (10, 12)
    recent = (16, 17, 18)
    assert job.run(kept, place) == [[best, joined, recent]] * 2


def uploaded(place, asynchronous):
    """Call a function at each commit, which restores the step alone; once it raises."""
    calls, threads = [], set()

    def on_commit(step, path):
        alone = {"w": spread_here(), "b": spread_here()}
        back = shoal.restore(path, alone, processes=[0], lane="evaluation")
        calls.append((step, ckpts.all_steps(), value(back["w"])))
        threads.add(threading.current_thread())
        ckpts.pin(step)
        if step == 2:
            raise OSError("no uplink")

    with shoal.Checkpoints(
        at(place), keep=1, on_commit=on_commit, asynchronous=asynchronous
    ) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, state(step))
            if step == 3:
                ckpts.wait()
                back = ckpts.restore(3, spread("data"))
    shoal.barrier("in step")
    return calls, threading.current_thread() in threads, ckpts.all_steps(), value(back["w"])


def spread_here():
    return NamedSharding(jax.sharding.Mesh(np.array(jax.local_devices()), "data"), P("data"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_process_0_calls_a_function_at_each_commit(job, place, asynchronous):
    first, second = job.run(uploaded, place, asynchronous)
    calls = [(step, tuple(range(1, step + 1)), float(step)) for step in (1, 2, 3)]
    assert first == (calls, not asynchronous, (1, 2, 3), 3.0)
    assert second == ([], False, (1, 2, 3), 3.0)


def of_own_classes(place):
    """Begin a run and resume it twice; its state has a class of the program's own."""
    rows, me, found = spread("data"), shoal.process_index(), []
    target = {"w": Scaled(rows, rows), "seen": shoal.PerProcess(None)}

    def init():
        made = state(0)
        return {"w": Scaled(made["w"], made["b"]), "seen": shoal.PerProcess({"of": me, "n": 0})}

    for _ in range(3):
        with shoal.Checkpoints(at(place)) as ckpts:
            now, first = ckpts.resume(target, init)
            seen = now["seen"].value
            found.append((first, type(now["w"]).__name__, seen, value(now["w"].values)))
            step = state(first + 1)
            seen = shoal.PerProcess({"of": me, "n": first + 1})
            ckpts.save(first, {"w": Scaled(step["w"], step["b"]), "seen": seen})
    return found


def test_a_class_of_ones_own_is_resumed(job, place):
    found = job.run(of_own_classes, place)
    for me, one in enumerate(found):
        steps = [(step, "Scaled", {"of": me, "n": step}, float(step)) for step in range(3)]
        assert one == steps
