"""Feed host batches to devices as global arrays, prefetched by a thread.

Each process reads its own rows in a thread. For each batch, before any of it is placed, the threads
of all processes meet once in a lane of their own: each reports how many rows it has, or that its
reader has ended or failed, and a digest of the rows that other processes also have. All judge the
same statuses (`batch_verdict`), so a batch is delivered on all processes or on none, and whatever
ends the feed, errors included, takes the place of that batch. The meeting is one round trip of the
control plane per batch, hidden behind the prefetch: the program waits for nothing but the batch.
Readers of different lengths agree in the same way: the first process to run out of rows says so in
the meeting for the batch that it cannot supply.

Lateness of other processes counts only while the program waits for the batch (`timeout_s`): a full
feed waits as long as its program is busy elsewhere.

A feed that is closed early announces that in its next call, which ends the threads of all. If
a reader hangs, its thread cannot be ended; it is a daemon, and does not keep Python alive.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax

from shoal import settings
from shoal.arguments import integer
from shoal.arrays.bridge.agreed_devices import owners_of
from shoal.arrays.bridge.leaf_layouts import Layouts
from shoal.arrays.bridge.sharding import sharding
from shoal.arrays.feeding.batch_sources import ByNumber, ReaderState
from shoal.arrays.feeding.feed_arguments import (
    check_last_batch,
    check_skip,
    feed_spec,
    order_text,
    problems_of,
    rows_layout,
    source_of,
)
from shoal.arrays.feeding.feed_state import mark_of, position_of, rows_before
from shoal.arrays.feeding.feed_steps import FedBatch, FeedMeeting, FeedOptions, Steps
from shoal.arrays.feeding.feed_wait import BatchWait
from shoal.arrays.feeding.own_rows import Split
from shoal.arrays.feeding.prefetch import Prefetch
from shoal.arrays.host.record_trail import lane_problems
from shoal.colour import logically_collective
from shoal.errors import UsageError, UsageTypeError, raise_all
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.process import coordinator
from shoal.runtime.rules.trail import TrailEntry
from shoal.runtime.system.callsite import Caller, callsite
from shoal.runtime.system.failure_words import failure_of
from shoal.tracebacks import at_caller

_LOG = logging.getLogger("shoal")
_FORGET_S = 1.0  # limit on waiting for a reader at garbage collection or interpreter exit


@logically_collective("layouts, options and the order of rows")
def feed(
    source: Iterable[Any] | Callable[[Any], Any] | Any,
    layouts: Layouts,
    *,
    batch: int | None = None,
    order: Sequence[int] | None = None,
    last: str = "drop",
    start: int | Mapping[str, Any] = 0,
    skip: bool | None = None,
    prefetch: int = 2,
    same: bool = True,
    timeout_s: float | None = None,
    lane: str | None = None,
) -> Feed:
    """Return an iterator of batches on devices, each process having read its own rows.

    Logically collective: layouts, options and the order of rows must be equal.

    There are two kinds of sources. Without `batch`, an iterable of this process's own rows, such as
    a DataLoader of torch, grain or tf.data: each item is a tree of arrays whose rows (dim 0) are
    those that `local_rows` names, concatenated. With `batch`, rows indexed by number: the feed
    knows which rows this process needs. One process and many work alike.

    It is impossible that a process gets a batch that another one does not get, or one of other
    rows. Any error is raised in place of the first batch that cannot be delivered, on all
    processes.

    Args:
      source: an iterable of batches of own rows; or with `batch` arrays (one, or a tuple or dict of
        them, also memory-mapped), samples (an indexable object with a length), or a function of row
        numbers [n] that returns a tree of arrays of n rows.
      layouts: one layout, or a prefix tree of them, as for `put`, but no function. All those
        with dims split the rows in the same way.
      batch: global batch size, for sources indexed by number.
      order: with `batch`, the row numbers in feeding order, equal on all processes: a permutation,
        or a range. None: all, in order.
      last: how to handle a batch that has fewer rows, on any process, than the first one: "drop"
        it and end; "pad" it with zeros, and yield with every batch a mask [rows] of the rows that
        are real, as (batch, mask); or raise an "error".
      start: the position of another feed: its `state()`, saved on any number of processes; or how
        many rows (of all processes) were delivered before. Rows by number begin there; an iterable
        is read that far first.
      skip: False: the iterable is already at `start`: skip nothing. Required for iterables that can
        restore their own position (grain, torchdata).
      prefetch: how many batches to place on devices ahead of the program.
      same: False: do not compare rows that several processes read, and scalars.
      timeout_s: how long the program waits for a batch; None: SHOAL_TIMEOUT_S (600).
      lane: the line of execution, see `barrier`. None: that of this thread.

    Returns:
      A `Feed`. Its thread starts at once, and ends with the last batch, with `close`, or when the
      feed is garbage-collected.

    Raises:
      UsageError: on this process: an argument is wrong; `start` is the state of a feed that had
        its rows in another order.

    Example:
      >>> import numpy as np, shoal
      >>> mesh = shoal.make_mesh({"data": 1}, devices=[0])
      >>> images = np.arange(10, dtype=np.float32).reshape(5, 2)
      >>> rows = shoal.Layout(mesh, "data", None)
      >>> with shoal.feed(images, rows, batch=2) as batches:
      ...     print([float(batch.sum()) for batch in batches], batches.rows)
      [6.0, 22.0] 4
    """
    problems = problems_of(batch, order, last, prefetch, same, skip)
    raise_all("feed", [*problems, *lane_problems(lane)])
    batch = None if batch is None else integer("feed", "batch", batch)
    prefetch = integer("feed", "prefetch", prefetch)
    limit_s = settings.timeout("feed", timeout_s, "SHOAL_TIMEOUT_S")
    split = Split(rows_layout(layouts), jax.process_index())
    reads = source_of(source, batch, order, split)
    mark = mark_of(order_text(reads)) if isinstance(reads, ByNumber) else 0
    rows = rows_before(start, mark)
    check_skip(source, reads, rows, skip)
    x64, passes = jax.config.jax_enable_x64, skip is not False
    options = FeedOptions(layouts, last, rows, batch or 0, same, x64, Caller.here(), passes)
    check_last_batch(reads, options)
    spec = feed_spec(reads, split, options, prefetch)
    meeting = _meeting(coordinator(), split, spec, lane, limit_s)._replace(start=rows)
    line = Prefetch(Steps(reads, split, options, meeting), prefetch, meets=not meeting.is_alone)
    made = Feed(line, meeting, mark)
    line.start()
    return made


class Feed:
    """An iterator of batches on devices; made by `feed`. A context manager."""

    def __init__(self, line: Prefetch[FedBatch], meeting: FeedMeeting, mark: int) -> None:
        self._line = line
        self._meeting = meeting
        self._mark = mark
        self._rows = meeting.start
        self._reader: ReaderState | None = None  # as of the last delivered batch
        self._batches = 0
        self._turn = threading.Lock()  # serialises threads of the program
        self._has_ended = False
        self._pid = os.getpid()
        self._forgotten = weakref.finalize(self, line.close, wait_s=_FORGET_S, tells=False)

    @property
    def rows(self) -> int:
        """Number of rows (of all processes) delivered, including those before `start`. Local.

        A batch counts once the program has it, not when it is prefetched.
        """
        return self._rows

    def state(self) -> dict[str, int]:
        """Return the position of the feed, for `start=` of a later one. Local.

        Two ints, equal on all processes, counting delivered batches; before the first one,
        and for `restore`, `{"order": 0, "rows": 0}` is valid. "order" identifies the order of rows
        by number, which must be the same in the later feed; for iterables it is 0.

        Example:
          >>> import numpy as np, shoal
          >>> rows = shoal.Layout(shoal.make_mesh({"data": 1}, devices=[0]), "data")
          >>> labels = np.arange(6, dtype=np.int32)
          >>> with shoal.feed(labels, rows, batch=2) as batches:
          ...     _ = next(batches)
          ...     state = batches.state()
          >>> with shoal.feed(labels, rows, batch=2, start=state) as batches:
          ...     print([batch.tolist() for batch in batches])
          [[2, 3], [4, 5]]
        """
        return position_of(self._rows, self._mark)

    def reader_state(self) -> Any:
        """Return the state of this process's iterable, as of the last delivered batch. Local.

        The iterable itself would report the last batch that was prefetched. This is what
        `get_state` (grain) or `state_dict` (torchdata) returned right after the delivered batch was
        read. It differs between processes: save it as `shoal.PerProcess`. On the same number of
        processes, restore an iterable to it, and feed that with `start=` and `skip=False`; on
        another number, begin the iterable anew, with `skip=True`.

        Raises:
          UsageError: there was no batch yet, or the iterable has no state.
        """
        if self._reader is None:
            raise UsageError("feed: no batch was delivered yet, so the reader has no state")
        if not self._reader.is_known:
            raise UsageError(
                "feed: this reader has no state of its own (neither get_state nor state_dict); "
                "state() is enough: start= skips the rows delivered before"
            )
        if self._reader.error is not None:
            raise self._reader.error
        return self._reader.value

    def __iter__(self) -> Iterator[Any]:
        if self._has_ended:
            raise UsageError("feed: this feed is exhausted: make one for each epoch, in its loop")
        return self

    @at_caller
    def __next__(self) -> Any:
        """Return the next batch. Collective over the mesh's processes.

        Raises:
          PeerFailedError: on all others: the reader of a process raised; on that one its error.
          DivergenceError: on all: options, leaves, or values of rows that several read differ;
            on the others: a process has closed its feed early.
          DeadlineError: no batch came within `timeout_s`.
          UsageError: the feed was closed, or rows do not make a batch.
        """
        if self._pid != os.getpid():
            raise UsageError("feed: this process is a fork of the one that made the feed")
        with self._turn:
            return self._next()

    def _next(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if self._line.is_closed:
            raise UsageError("feed: this feed is closed")
        meeting = self._meeting
        given = self._line.take(BatchWait(meeting, self._line, self._batches).look)
        if given is None and self._line.is_closed:
            raise UsageError("feed: this feed was closed during the wait for a batch")
        if given is None:
            self._has_ended = True
            raise StopIteration
        entry = TrailEntry(f"batch {self._batches} of feed at {meeting.site}", "", ())
        meeting.coordinator.trails.record(entry, group=meeting.group)
        meeting.coordinator.progress.turns += 1
        self._batches += 1
        self._rows += given.rows
        self._reader = given.reader
        return given.value

    def close(self) -> None:
        """End the thread. Local. Processes that request a further batch get DivergenceError."""
        self._close("")

    def _close(self, why: str) -> None:
        if self._pid != os.getpid():
            return
        self._forgotten.detach()
        if not self._line.close(why):
            _LOG.warning(
                "%s: feed (%s) was closed, but its reader still runs; its thread ends with it",
                self._meeting.me, self._meeting.site,
            )  # fmt: skip

    def __reduce__(self) -> Any:
        raise UsageTypeError("feed: a feed cannot be copied or pickled; save its state()")

    def __enter__(self) -> Self:
        return self

    @at_caller
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("" if error is None else failure_of(error, self._meeting.site).words)


def _meeting(
    here: Coordinator, split: Split, spec: tuple[str, ...], lane: str | None, limit_s: float
) -> FeedMeeting:
    """Return how the threads meet: in a lane that no other feed uses."""
    devices = sharding(split.layout).mesh.devices.ravel().tolist()
    owners = owners_of(here, devices, limit_s)
    if here.process not in owners:
        raise UsageError(
            f"feed: this process owns no device of {split.layout.mesh!r}, so it has no rows to read"
        )
    group = None if len(owners) == here.num_processes else owners
    site = callsite()
    name = here.trails.record(TrailEntry("feed", site, spec), group=group, lane=lane)
    if not name and len(owners) > 1:
        raise UsageError(
            "feed: this thread has never met other processes, so its calls cannot be matched with "
            "theirs: name its lane="
        )
    name = name or f"alone {os.urandom(8).hex()}"
    return FeedMeeting(here, group, f"feed: {name}", site, spec, limit_s)
