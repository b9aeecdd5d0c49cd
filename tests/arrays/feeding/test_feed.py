"""Feeding in one process: what comes, in which order, and what ends it."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from arrays.device_grids import grids
from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.feeding.own_rows import Split, checked_batch
from shoal.errors import DeadlineError, DtypeWarning, UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.system.callsite import Caller
from shoal.testing.strategies import layouts

MESH = Mesh({"data": 4, "model": 2})
ROWS = {"x": Layout(MESH, "data", "model"), "n": Layout(MESH, "data")}
DATA = {"x": np.arange(88, dtype=np.float32).reshape(44, 2), "n": np.arange(44, dtype=np.int32)}


def parts(*sizes):
    """Batches of so many rows."""
    first = 0
    for size in sizes:
        yield {name: column[first : first + size] for name, column in DATA.items()}
        first += size


def numbers(batches):
    return [np.asarray(batch["n"]).tolist() for batch in batches]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "shoal feed"]


@given(layouts(grids(), max_rank=3).filter(lambda layout: layout.rank > 0), st.data())
def test_rows_lie_where_the_layout_says(layout, data):
    shards = [layout.num_shards(dim) for dim in range(layout.rank)]
    batch = shards[0] * data.draw(st.integers(1, 3))
    count = data.draw(st.integers(batch, 3 * batch))
    order = data.draw(st.permutations(range(count)))
    values = np.arange(count * np.prod(shards[1:], dtype=int)).astype(np.int16)
    column = values.reshape(count, *shards[1:])
    given_order = order if data.draw(st.booleans()) else None
    wanted = column[order] if given_order else column
    with shoal.feed(column, layout, batch=batch, order=given_order, remainder="pad") as batches:
        for number, (array, mask) in enumerate(batches):
            assert layout_of(array) == layout
            assert layout_of(mask) == Layout(layout.mesh, layout.dims[0])
            rows = wanted[number * batch : (number + 1) * batch]
            np.testing.assert_array_equal(np.asarray(mask), np.arange(batch) < len(rows))
            for shard in array.addressable_shards:
                whole = np.zeros((batch, *rows.shape[1:]), rows.dtype)
                whole[: len(rows)] = rows
                np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
    assert batches.rows == -(-count // batch) * batch


def test_batches_come_in_order_and_count_when_they_are_given():
    with shoal.feed(parts(8, 8, 8), ROWS, prefetch=8) as batches:
        assert batches.rows == 0
        first = next(batches)
        assert batches.rows == 8
        assert layout_of(first["x"]) == ROWS["x"]
        assert numbers([first, *batches]) == [[*range(n, n + 8)] for n in (0, 8, 16)]
        assert batches.rows == 24
    assert threads() == []


@pytest.mark.parametrize("last", ["drop", "pad", "error"])
def test_the_last_batch(last):
    feed = shoal.feed(parts(8, 8, 5), ROWS, remainder=last)
    if last == "pad":
        batch, mask = list(feed)[-1]
        assert np.asarray(mask).tolist() == [True] * 5 + [False] * 3
        assert np.asarray(batch["n"]).tolist() == [16, 17, 18, 19, 20, 0, 0, 0]
    elif last == "drop":
        assert numbers(feed) == [[*range(8)], [*range(8, 16)]]
    else:
        assert numbers([next(feed), next(feed)]) == [[*range(8)], [*range(8, 16)]]
        with pytest.raises(
            UsageError, match=r"batch 2 of feed .* not a whole one of 8 rows: 5 rows"
        ):
            next(feed)


def test_short_batches_in_the_middle():
    with pytest.raises(UsageError, match="batch 1 has 5 of 8 rows and is not the last one"):
        list(shoal.feed(parts(8, 5, 8), ROWS))
    masks = [np.asarray(m).sum() for _, m in shoal.feed(parts(8, 5, 8), ROWS, remainder="pad")]
    assert masks == [8, 5, 8]
    assert [int(np.asarray(m).sum()) for _, m in shoal.feed(parts(3), ROWS, remainder="pad")] == [3]
    with pytest.raises(UsageError, match=r"batch 0 .* the first batch must be whole: 3 rows of"):
        next(shoal.feed(parts(3), ROWS))
    with pytest.raises(
        UsageError, match=r"batch 1 .* 12 rows of process 0, more than in the first"
    ):
        list(shoal.feed(parts(8, 12), ROWS))
    with pytest.raises(UsageError, match="batch 1 has no rows; leave such batches out"):
        list(shoal.feed(parts(8, 0, 8), ROWS))


def test_errors_come_after_the_batches_before_them_and_stay():
    def reader():
        yield from parts(8, 8)
        raise OSError("the disk is on fire")

    feed = shoal.feed(reader(), ROWS, prefetch=8)
    assert len([next(feed), next(feed)]) == 2
    for _ in range(2):
        with pytest.raises(OSError, match="on fire"):
            next(feed)
    with pytest.raises(UsageError, match="raised StopIteration; order= sets the end"):
        next(shoal.feed(lambda rows: next(iter([])), ROWS, batch=8, order=range(8)))
    assert threads() == []


def test_a_second_epoch_needs_a_feed_of_its_own():
    feed = shoal.feed([np.ones(4, np.float32)], ROWS["n"])
    assert len(list(feed)) == 1
    assert next(feed, "nothing") == "nothing"
    with pytest.raises(UsageError, match="is exhausted: make one for each epoch"):
        list(feed)


def test_a_batch_that_cannot_be_placed_comes_after_those_before_it():
    (part,) = parts(8)
    wide = part | {"x": np.ones((8, 3), np.float32)}
    feed = shoal.feed([part, part, wide, part], ROWS, prefetch=4)
    assert numbers([next(feed), next(feed)]) == [[*range(8)]] * 2
    for _ in range(2):
        with pytest.raises(UsageError, match=r"dim 1 of \(8, 3\) has size 3"):
            next(feed)
    assert feed.rows == 16


class Stops:
    """What raises StopIteration where nothing expects it."""

    def __iter__(self):
        raise StopIteration


def test_a_reader_that_stops_before_it_began_ends_no_loop_in_silence():
    feed = shoal.feed(Stops(), ROWS)
    for _ in range(2):
        with pytest.raises(UsageError, match="the reader raised StopIteration"):
            next(feed)


def test_feed_starts_reading_when_created():
    has_read = threading.Event()

    def reader():
        has_read.set()
        yield from parts(8)

    with shoal.feed(reader(), ROWS):
        assert has_read.wait(60)


def test_placeholder_of_an_ended_reader_keeps_no_batch_memory():
    (part,) = parts(8)
    batch = checked_batch(part, ROWS, Split(ROWS["n"], 0), Caller.here()).empty()
    assert [leaf.value.shape for leaf in batch.leaves] == [(0,), (0, 2)]
    assert [leaf.value.base for leaf in batch.leaves] == [None, None]


def test_several_threads_may_take_turns():
    taken, count = [], 60

    def take():
        taken.extend(numbers(batches))

    with shoal.feed(({"x": DATA["x"][:4], "n": np.full(4, n, np.int32)} for n in range(count)),
                    ROWS) as batches:  # fmt: skip
        takers = [threading.Thread(target=take) for _ in range(3)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join(60)
        assert batches.rows == 4 * count
    assert sorted(n for n, *_ in taken) == [*range(count)]


def test_a_feed_is_not_copied():
    with shoal.feed(parts(8), ROWS) as batches:
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(
                UsageTypeError, match=r"cannot be copied or pickled; save its state"
            ):
                act(batches)


def test_closing_a_feed_ends_the_wait_for_its_batch():
    over, said = threading.Event(), []

    def reader():
        over.wait()
        yield from parts(8)

    def take():
        try:
            next(feed)
        except UsageError as error:
            said.append(str(error))

    feed = shoal.feed(reader(), ROWS)
    taker = threading.Thread(target=take)
    taker.start()
    while not feed._prefetch.waited_s:
        pass
    feed._prefetch.is_closed = True  # as close does, before it waits for the reader
    over.set()
    taker.join(60)
    feed.close()
    assert said == ["feed: this feed was closed during the wait for a batch"]


def test_feed_that_is_left_or_closed_ends_its_thread():
    for _ in shoal.feed(parts(*[8] * 5), ROWS):
        break
    assert threads() == []
    with shoal.feed(parts(*[8] * 5), ROWS) as batches:
        next(batches)
    assert threads() == []
    with pytest.raises(UsageError, match="this feed is closed"):
        next(batches)
    batches.close()
    closed = shoal.feed(parts(8), ROWS)
    closed.close()
    assert threads() == []


def test_generators_are_closed_with_it():
    seen = []

    def reader():
        try:
            yield from parts(8, 8, 8, 8)
        finally:
            seen.append(threading.current_thread().name)

    with shoal.feed(reader(), ROWS) as batches:
        next(batches)
    assert seen == ["shoal feed"]


def test_host_memory_may_be_used_again():
    """A reader that fills the same array each time."""
    raw = np.empty(4 * (1 << 23) + 64, np.uint8)  # so large that it is copied while Python runs
    buffer = raw[-raw.ctypes.data % 64 :][: 4 * (1 << 23)].view(np.float32).reshape(-1, 2)

    def reader():
        for number in range(6):
            buffer[:] = number
            yield buffer

    batches = [np.asarray(a) for a in shoal.feed(reader(), Layout(MESH, None, None), prefetch=6)]
    assert [(a.min(), a.max()) for a in batches] == [(n, n) for n in range(6)]


def test_a_default_mesh_and_wide_values_hold_in_the_thread():
    with use_mesh(MESH), jax.enable_x64(True):
        feed = shoal.feed([np.arange(8)], "data")
    assert next(feed).dtype == np.int64
    assert next(shoal.feed([np.arange(8)], ROWS["n"])).dtype == np.int32


def test_rounded_floats_warn_at_the_call_of_feed():
    with pytest.warns(DtypeWarning, match="feed: the array: float64 becomes float32") as warned:
        batches = [*shoal.feed([np.full(8, 0.1)] * 3, ROWS["n"])]
    code = test_rounded_floats_warn_at_the_call_of_feed.__code__
    assert {(warning.lineno, warning.filename) for warning in warned} == {
        (code.co_firstlineno + 2, __file__)
    }
    assert [batch.dtype for batch in batches] == [np.float32] * 3
    with pytest.raises(UsageError, match=r"feed: the array: holds 1e\+39, which does not fit"):
        next(shoal.feed([np.full(8, 1e39)], ROWS["n"]))


def test_a_reader_that_hangs_has_a_deadline():
    over = threading.Event()

    def reader():
        yield from parts(8)
        over.wait()

    feed = shoal.feed(reader(), ROWS, timeout_s=0.01)
    try:
        next(feed)
        with pytest.raises(
            DeadlineError, match=r"batch 1 of feed .*: its own reader has returned no batch"
        ):
            next(feed)
    finally:
        over.set()
        feed.close()


ENDS = """
import sys, threading
import numpy as np, shoal
mesh = shoal.make_mesh({"data": -1})
hangs = threading.Event()

def reader():
    for number in range(100):
        if number == 5 and "hang" in sys.argv:
            hangs.wait()
        yield np.ones(8, np.float32)

feed = shoal.feed(reader(), shoal.Layout(mesh, "data"), prefetch=4)
first = next(feed)
if "raise" in sys.argv:
    raise KeyError("of the program")
"""


@pytest.mark.parametrize("how", ["return", "raise", "hang"])
def test_python_ends_with_a_feed_that_is_open(how, child_env, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    done = subprocess.run(
        [sys.executable, script, how],
        env={**child_env, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "terminate" in done.stderr) == (how == "raise", False), done.stderr


def test_a_fork_does_not_feed():
    feed = shoal.feed(parts(8), ROWS)
    feed._pid = os.getpid() + 1
    with pytest.raises(UsageError, match="is a fork of the one that made the feed"):
        next(feed)
    feed._pid = os.getpid()
    feed.close()


@pytest.mark.parametrize("order", [None, [3, 1, 0, 2, 7, 6, 5, 4]])
def test_deleted_columns_are_named(order):
    data = {"x": jax.numpy.ones((8, 2)), "n": np.arange(8, dtype=np.int32)}
    fed = iter(shoal.feed(data, ROWS, batch=4, order=order, prefetch=1))
    data["x"].delete()
    words = r"^feed: \['x'\]: was deleted"
    with pytest.raises(UsageError, match=words):
        [*fed, *shoal.feed(data, ROWS, batch=4, order=order)]
    with pytest.raises(UsageError, match=words):
        shoal.feed(data, ROWS, batch=4, order=order)
    samples = [{"x": data["x"], "n": 0}] * 8
    with pytest.raises(UsageError, match=r"\['x'\]: was deleted"):
        next(iter(shoal.feed(samples, ROWS, batch=4)))
