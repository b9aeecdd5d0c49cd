"""What three processes do with feeds; each function runs in every process of one job."""

from __future__ import annotations

import gc
import logging
import threading

import jax
import numpy as np

import shoal

WIDTH = 3


class Log(logging.Handler):
    """Keeps what shoal logs."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("shoal").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def grid(**axes):
    return shoal.make_mesh(axes or {"data": -1})


def own(slices):
    return np.concatenate([np.arange(s.start, s.stop) for s in slices]) if slices else np.arange(0)


def rows_of(numbers):
    """The rows of a data set of which row n holds n, n + 1/4 and n + 1/2."""
    return (numbers[:, None] + np.arange(WIDTH) / 4).astype(np.float32)


def mine(layout, batch, sizes):
    """Batches of a process's own rows, of which the first `size` of each are there."""
    for number, size in enumerate(sizes):
        numbers = number * batch + own(shoal.local_rows(layout, batch))
        yield {"x": rows_of(numbers[:size]), "n": numbers[:size].astype(np.int32)}


def held(batch):
    """What the devices of this process hold, by row number; each checked."""
    numbers: dict[int, int] = {}
    for shard in batch["n"].addressable_shards:
        first = shard.index[0].start or 0
        for row, number in enumerate(np.asarray(shard.data).tolist()):
            numbers[first + row] = number
    for shard in batch["x"].addressable_shards:
        first = shard.index[0].start or 0
        wanted = np.array([numbers[first + row] for row in range(len(shard.data))])
        columns = shard.index[1]
        np.testing.assert_array_equal(np.asarray(shard.data), rows_of(wanted)[:, columns])
    return numbers


def total(batch):
    """The sum of all row numbers, by a program of all processes."""
    return int(jax.jit(lambda n: n.sum(), out_shardings=shoal.named_sharding(
        shoal.Layout(shoal.layout_of(batch["n"]).mesh)))(batch["n"]))  # fmt: skip


def outcome(feed):
    """How many batches came, and what ended them."""
    count = 0
    try:
        for _ in feed:
            count += 1
    except (ValueError, shoal.ShoalError, OSError) as error:
        failed = sorted(getattr(error, "failed", ()))
        return count, type(error).__name__, str(error), failed
    return count, "", "", []


def layouts_on(mesh, rows="data", columns=None):
    return {"x": shoal.Layout(mesh, rows, columns), "n": shoal.Layout(mesh, rows)}


def ended_threads():
    """Wait until the threads of closed feeds have ended; return how many have not."""
    gc.collect()
    threads = [one for one in threading.enumerate() if one.name == "shoal feed"]
    for thread in threads:
        thread.join(30)
    return sum(thread.is_alive() for thread in threads)


def play():
    """All scenes one after the other: after each, whatever went wrong, the job goes on."""
    me = shoal.process_index()
    log = Log()
    said = {}
    for scene in (whole, uneven, failing, empty, replicas, early, by_number, alike,
                  held_up, late):  # fmt: skip
        said[scene.__name__] = scene(me)
        try:
            shoal.barrier(f"after {scene.__name__}")
        except shoal.DivergenceError as error:
            said.setdefault("diverged", {})[scene.__name__] = str(error)
        said["threads"] = said.get("threads", 0) + ended_threads()
    said["log"] = log.lines
    return said


def whole(me):
    """Every batch is what all read, on meshes of any order."""
    ids = [device.id for device in jax.devices()]
    found = []
    for mesh, rows, columns in (
        (grid(), "data", None),
        (shoal.make_mesh({"data": 6}, devices=[ids[n] for n in (5, 0, 3, 1, 4, 2)]), "data", None),
        (grid(data=2, model=3), "data", "model"),
        (grid(data=3, model=2), ("model", "data"), None),
        (grid(data=2, model=3), None, "model"),
    ):
        layouts = layouts_on(mesh, rows)
        if columns:
            layouts["x"] = shoal.Layout(mesh, rows, columns)
        count = len(own(shoal.local_rows(layouts["n"], 12)))
        with shoal.feed(mine(layouts["n"], 12, [count] * 3), layouts) as batches:
            for number, batch in enumerate(batches):
                numbers = held(batch)
                assert all(n == number * 12 + row for row, n in numbers.items()), numbers
                assert sorted(numbers) == own(shoal.local_rows(layouts["n"], 12)).tolist()
                found.append(total(batch))
        found.append(batches.rows)
    return found


def uneven(me):
    """Process p has 3 + p batches, of which the last has a row too few on process 1."""
    layouts = layouts_on(grid())
    sizes = [4] * (2 + me) + [3 if me == 1 else 4]
    said = {}
    for last in ("drop", "error"):
        said[last] = outcome(shoal.feed(mine(layouts["n"], 12, sizes), layouts, remainder=last))
    padded = []
    with shoal.feed(mine(layouts["n"], 12, sizes), layouts, remainder="pad") as batches:
        for batch, mask in batches:
            assert shoal.layout_of(mask) == layouts["n"]
            total(batch)
            padded.append(int(sum(np.asarray(s.data).sum() for s in mask.addressable_shards)))
    said["pad"] = padded
    return said


def failing(me):
    """The reader of process 1 raises at batch 2."""
    layouts = layouts_on(grid())

    def reader():
        yield from mine(layouts["n"], 6, [2, 2])
        if me == 1:
            raise OSError("the disk is on fire")
        yield from mine(layouts["n"], 6, [2, 2])

    def by_row_number(numbers):
        if me == 2 and 8 in numbers:
            raise ValueError("row 8 is torn")
        if me == 0 and 0 in numbers[1:]:
            raise StopIteration
        return {"x": rows_of(numbers), "n": numbers.astype(np.int32)}

    again = shoal.feed(reader(), layouts, prefetch=4)
    said = [outcome(again), outcome(again)]
    said.append(outcome(shoal.feed(by_row_number, layouts, batch=6, order=[0, 1, 2, 3, 4, 5, 9, 9,
                                   9, 9, 9, 8] * 2)))  # fmt: skip
    narrow = [np.full(2, 1e39) if me == 2 else np.zeros(2, np.float32)]
    said.append(outcome(shoal.feed(narrow, layouts["n"])))
    with shoal.feed(mine(layouts["n"], 6, [2] * 5), layouts) as batches:
        try:
            next(batches)
            with batches:
                if me == 0:
                    raise KeyError("the program of process 0")
                said.append(outcome(batches))
        except KeyError:
            said.append("KeyError")
    return said


def empty(me):
    layouts = layouts_on(grid())
    return [
        outcome(shoal.feed([], layouts)),
        outcome(shoal.feed(mine(layouts["n"], 6, [] if me == 2 else [2]), layouts)),
        outcome(
            shoal.feed(mine(layouts["n"], 6, [] if me == 2 else [2]), layouts, remainder="pad")
        ),
        outcome(shoal.feed((np.zeros((0, 3), np.float32),), (layouts["x"],), batch=6)),
    ]


def replicas(me):
    """Every process holds every row; process 2 reads another one at batch 1."""
    mesh = grid(data=3, model=2)
    layouts = layouts_on(mesh, "model")

    def reader():
        for number, batch in enumerate(mine(layouts["n"], 4, [4, 4, 4])):
            if me == 2 and number == 1:
                batch["x"][3, 1] += 1
            yield batch

    def shorter():
        return mine(layouts["n"], 4, [4, 4] if me else [4])

    def other_dtype():
        for batch in mine(layouts["n"], 4, [4, 4]):
            yield batch | {"x": batch["x"].astype(np.float16)} if me == 1 else batch

    return [
        outcome(shoal.feed(reader(), layouts)),
        outcome(shoal.feed(reader(), layouts, check_values=False))[:2],
        outcome(shoal.feed(shorter(), layouts, remainder="pad")),
        outcome(shoal.feed(other_dtype(), layouts)),
        outcome(shoal.feed(mine(layouts["n"], 4, [4]), layouts, prefetch=1 + (me == 2))),
    ]


def early(me):
    """All leave at once, with and without a word; then process 0 alone."""
    layouts = layouts_on(grid())
    for _ in shoal.feed(mine(layouts["n"], 6, [2] * 50), layouts):
        break
    with shoal.feed(mine(layouts["n"], 6, [2] * 50), layouts) as batches:
        for batch in batches:
            total(batch)
            if batches.rows == 18:
                break
    with shoal.feed(mine(layouts["n"], 6, [2] * 50), layouts) as batches:
        if me == 0:
            next(batches)
            return [1]
        return outcome(batches)


def by_number(me):
    """Each process reads its own rows and no others, in an order of all; and goes on in it."""
    order = np.random.default_rng(7).permutation(29)
    asked = []

    def read(numbers):
        asked.extend(numbers.tolist())
        return {"x": rows_of(numbers), "n": numbers.astype(np.int32)}

    layouts = layouts_on(shoal.make_mesh({"data": 6}, devices=list(reversed(jax.devices()))))
    found = []
    with shoal.feed(read, layouts, batch=12, order=order) as batches:
        for batch in batches:
            found.append(held(batch))
    wanted = [n for b in range(2) for n in order[b * 12 + own(shoal.local_rows(layouts["n"], 12))]]
    assert asked == wanted, (asked, wanted)
    assert all(n == order[b * 12 + row] for b, rows in enumerate(found) for row, n in rows.items())
    masks = []
    for batch, mask in shoal.feed(read, layouts, batch=12, order=order, remainder="pad", start=12):
        for rows, real in zip(batch["x"].addressable_shards, mask.addressable_shards, strict=True):
            assert np.array_equal(np.asarray(rows.data).any(axis=1), np.asarray(real.data))
        masks.append(int(sum(np.asarray(s.data).sum() for s in mask.addressable_shards)))
    return batches.rows, masks


def alike(me):
    """Every process reads the data from their beginning."""
    layouts = layouts_on(grid())
    same = ({"x": rows_of(np.arange(2)), "n": np.arange(2, dtype=np.int32)} for _ in range(2))
    return outcome(shoal.feed(same, layouts))


def held_up(me):
    """The reader of process 1 hangs at batch 1."""
    layouts = layouts_on(grid())
    over = threading.Event()

    def reader():
        for number, batch in enumerate(mine(layouts["n"], 6, [2] * 3)):
            if me == 1 and number == 1:
                over.wait()
            yield batch

    feed = shoal.feed(reader(), layouts, timeout_s=0.3)
    said = outcome(feed)
    over.set()
    feed.close()
    return said


def late(me):
    """The program of process 1 is busy for longer than a feed may wait: that is no error."""
    here = shoal.runtime.process.client()
    arrive, had_waited = here.arrive, threading.Event()

    def arrive_and_tell(point, *args, **options):
        try:
            return arrive(point, *args, **options)
        except shoal.DeadlineError:
            had_waited.set()
            raise

    layouts = layouts_on(grid())
    here.arrive = arrive_and_tell
    try:
        sizes = [2] * 6
        with shoal.feed(
            mine(layouts["n"], 6, sizes), layouts, prefetch=1, timeout_s=0.3
        ) as batches:
            next(batches)
            if me != 1:
                next(batches)
                assert had_waited.wait(60)
            shoal.barrier("process 1 has been waited for", lane="gate")
            return outcome(batches)[:2]
    finally:
        del here.arrive


def part(start, count):
    """Feed some batches of 12 rows; return their row numbers by process, and where it ended."""
    layouts = layouts_on(grid())
    length = len(own(shoal.local_rows(layouts["n"], 12)))
    read = []
    sources = (mine(layouts["n"], 12, [length] * 5), by_the_number)
    for source in sources:
        options = {"batch": 12, "order": range(60)} if source is by_the_number else {}
        with shoal.feed(source, layouts, start=start, **options) as batches:
            numbers = []
            for _ in range(count):
                batch = next(batches)
                total(batch)
                numbers.append(sorted(held(batch).values()))
            read.append((numbers, batches.rows))
    return read


def by_the_number(numbers):
    return {"x": rows_of(numbers), "n": numbers.astype(np.int32)}


def dies():
    """Process 1 is killed while the others wait for its batch."""
    import os
    import signal

    layouts = layouts_on(grid())

    def reader():
        for number, batch in enumerate(mine(layouts["n"], 6, [2] * 5)):
            if shoal.process_index() == 1 and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    said = outcome(shoal.feed(reader(), layouts))
    print("saw", said[:2], "process 1" in said[2], flush=True)


def leaves_them_open():
    """Feeds that are never closed do not keep a process from ending well."""
    layouts = layouts_on(grid())
    feeds = [shoal.feed(mine(layouts["n"], 6, [2] * 50), layouts) for _ in range(3)]
    return [sorted(held(next(feed)).values()) for feed in feeds[:2]]
