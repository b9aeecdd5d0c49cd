"""What three processes do with feeds whose users err; each runs in every process of one job."""

from __future__ import annotations

import signal
import threading

import jax
import numpy as np

import shoal
from processes.feeding import Log, ended_threads, grid, held, layouts_on, mine, outcome, own


def play():
    """All scenes one after the other: after each, whatever went wrong, the job goes on."""
    me = shoal.process_index()
    log = Log()
    said = {}
    for scene in (other_batches, without_dims, large_replicas, other_trees, stops, other_order,
                  changing, again_and_again, interrupted, some_processes, across_columns,
                  short_first):  # fmt: skip
        said[scene.__name__] = scene(me)
        try:
            shoal.barrier(f"after {scene.__name__}")
        except shoal.DivergenceError as error:
            said.setdefault("diverged", {})[scene.__name__] = str(error)
        said["threads"] = said.get("threads", 0) + ended_threads()
    said["log"] = log.lines
    return said


def other_batches(me):
    """The reader of process p raises at batch 1 + p."""
    layouts = layouts_on(grid())

    def reader():
        yield from mine(layouts["n"], 6, [2] * (1 + me))
        raise OSError(f"the disk of {me}")

    return outcome(shoal.feed(reader(), layouts))


def without_dims(me):
    """A value without dims differs at batch 1; and where the reader of process 0 has ended."""
    mesh = grid()
    layouts = shoal.Layout(mesh, "data"), shoal.Layout(mesh)

    def reader(count, steps):
        for number in range(count):
            yield np.arange(2, dtype=np.int32) + 2 * me + 6 * number, steps[number]

    other = [0, 9 if me == 2 else 1, 2]
    return [
        outcome(shoal.feed(reader(3, other), layouts)),
        outcome(shoal.feed(reader(3, other), layouts, check_values=False))[:2],
        outcome(shoal.feed(reader(3, [5, 6, 7]), layouts))[:2],
        outcome(shoal.feed(reader(3 if me else 1, [5, 6, 7]), layouts, remainder="pad"))[:2],
    ]


def large_replicas(me):
    """All hold all rows, of many megabytes, of which one number differs."""
    layout = shoal.Layout(grid(data=3, model=2), "model", None)
    batch = np.zeros((4, 1 << 19), np.float32)
    batch[1, 777] = me == 2
    return outcome(shoal.feed([batch], layout))


def other_trees(me):
    layout = shoal.Layout(grid(), "data")
    part = np.arange(2, dtype=np.int32) + 2 * me
    return outcome(shoal.feed([[part] if me == 1 else (part,)], layout))


class Stops:
    def __iter__(self):
        raise StopIteration


def stops(me):
    """The reader of process 1 raises StopIteration where it is asked for its iterator."""
    layouts = layouts_on(grid())
    return outcome(shoal.feed(Stops() if me == 1 else mine(layouts["n"], 6, [2]), layouts))


def other_order(me):
    """Process 1 takes from two feeds in another order."""
    layouts = layouts_on(grid())
    with (
        shoal.feed(mine(layouts["n"], 6, [2] * 9), layouts) as one,
        shoal.feed(mine(layouts["n"], 6, [2] * 9), layouts) as two,
    ):
        for feed in (two, one) if me == 1 else (one, two):
            next(feed)
        try:
            shoal.barrier("both")
        except shoal.DivergenceError as error:
            return str(error)


def changing(me):
    """Batches are of another dtype from batch 1 on: of all, of process 1."""
    layout = shoal.Layout(grid(), "data")

    def reader(who):
        for number in range(3):
            dtype = np.int16 if number and me in who else np.int32
            yield np.arange(2, dtype=dtype) + 2 * me

    feed = shoal.feed(reader((0, 1, 2)), layout)
    dtypes = [str(batch.dtype) for batch in feed]
    return dtypes, outcome(shoal.feed(reader((1,)), layout))


def again_and_again(me):
    """Leave loops early, and begin others at once."""
    layouts = layouts_on(grid())
    rows = []
    for count in range(4):
        feed = shoal.feed(mine(layouts["n"], 6, [2] * 50), layouts, prefetch=3)
        for number, _ in enumerate(feed):
            if number == count:
                break
        rows.append(feed.rows)
    return rows


def interrupted(me):
    """Ctrl-C on process 0, while it waits for batch 2."""
    layouts = layouts_on(grid())
    over = threading.Event()

    def reader():
        for number, batch in enumerate(mine(layouts["n"], 6, [2] * 9)):
            if me == 0 and number == 2:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                over.wait()
            yield batch

    before = signal.signal(signal.SIGINT, signal.default_int_handler) if me == 0 else None
    try:
        with shoal.feed(reader(), layouts) as batches:
            try:
                return outcome(batches)
            finally:
                over.set()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    finally:
        if me == 0:
            signal.signal(signal.SIGINT, before)


def some_processes(me):
    """On devices of processes 0 and 2."""
    mesh = shoal.make_mesh(
        {"data": 4}, devices=[one.id for one in jax.devices() if one.process_index != 1]
    )
    layouts = layouts_on(mesh)
    if me != 1:
        with shoal.feed(mine(layouts["n"], 8, [4] * 3), layouts) as batches:
            return [sorted(held(batch).values()) for batch in batches]
    try:
        shoal.feed([], layouts)
    except shoal.UsageError as error:
        return str(error)


def across_columns(me):
    """Processes hold columns: each reads all rows."""
    layout = shoal.Layout(grid(), None, "data")
    whole = np.arange(48, dtype=np.float32).reshape(2, 4, 6)
    for number, batch in enumerate(shoal.feed(iter(whole), layout)):
        for shard in batch.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[number][shard.index])


def short_first(me):
    """The first batch of process p has p + 1 of 4 rows; a replica's rows differ in it."""
    layouts = layouts_on(grid())
    with shoal.feed(mine(layouts["n"], 12, [me + 2, 4]), layouts, remainder="pad") as batches:
        masks = [
            sum(int(np.asarray(s.data).sum()) for s in mask.addressable_shards)
            for _, mask in batches
        ]
    layout = shoal.Layout(grid(data=3, model=2), "model", None)
    batch = np.zeros((3, 1), np.float32)
    batch[2] = me == 2
    return masks, outcome(shoal.feed([batch], layout, remainder="pad"))


def goes_on(state, count, batch=12):
    """Feed filled-up batches of which the last are uneven, from `state` on; return what they were
    and where it stands."""
    layouts = layouts_on(grid())
    length = len(own(shoal.local_rows(layouts["n"], batch)))
    sizes = [length, length, max(0, length - 1 - shoal.process_index())]
    sizes += [length] * (shoal.process_index() == 0)
    feed = shoal.feed(
        mine(layouts["n"], batch, sizes), layouts, remainder="pad", start=state, prefetch=4
    )
    numbers = []
    with feed as batches:
        for _ in range(count):
            given, mask = next(batches)
            real = {
                (shard.index[0].start or 0) + row
                for shard in mask.addressable_shards
                for row in np.flatnonzero(np.asarray(shard.data))
            }
            here = held_if(given, real)
            numbers.append(sorted(here))
        return numbers, batches.state(), next(batches, None) is None


def held_if(batch, real):
    """The row numbers that this process holds, of the rows that are real."""
    return [
        int(number)
        for shard in batch["n"].addressable_shards
        for row, number in enumerate(np.asarray(shard.data))
        if (shard.index[0].start or 0) + row in real
    ]
