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
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from shoal import settings
from shoal.arguments import count, integer, not_flags
from shoal.arrays.bridge.agreed_devices import owners_of
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    is_layout_function,
    is_one_layout,
    not_a_layout,
    whole_rows,
)
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.feeding.batch_sources import IndexedSource, IterableSource, ReaderState, by_number
from shoal.arrays.feeding.batch_verdict import LAST
from shoal.arrays.feeding.feed_steps import FedBatch, FeedMeeting, FeedOptions, Steps
from shoal.arrays.feeding.local_rows import split_layout
from shoal.arrays.feeding.own_rows import Split
from shoal.arrays.feeding.prefetch import MEETING, READING, Prefetch
from shoal.arrays.host.digest import digest
from shoal.arrays.host.record_call import lane_problems
from shoal.colour import logically_collective
from shoal.errors import (
    DeadlineError,
    UsageError,
    UsageTypeError,
    WrongType,
    counted,
    nearest,
    raise_all,
    with_article,
)
from shoal.plan.layout import Layout
from shoal.plan.rows import check_even_split
from shoal.runtime.client.interface import JobClient
from shoal.runtime.failures.exception_text import failure_of
from shoal.runtime.process import client
from shoal.runtime.rules.call_record import RecordedCall
from shoal.runtime.system.callsite import Caller, callsite, line_of
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
    remainder: str = "drop",
    start: int | Mapping[str, Any] = 0,
    skip: bool | None = None,
    prefetch: int = 2,
    check_values: bool = True,
    timeout_s: float | None = None,
    lane: str | None = None,
) -> Feed:
    """Return an iterator of batches on devices, of which each process reads its local rows.

    Logically collective: layouts, options and the order of rows must be equal.

    There are two kinds of sources. Without `batch`, an iterable of this process's local rows, such
    as a DataLoader of torch, grain or tf.data: each item is a pytree of arrays whose rows (dim 0)
    are those that `local_rows` names, concatenated. With `batch`, an indexed source: the feed
    chooses the rows that this process needs. One process and many work alike.

    No process ever gets a batch that another does not get, or one of other rows. Any error is
    raised on all processes, in place of the first batch that cannot be delivered.

    Args:
      source: an iterable of batches of local rows; or with `batch` arrays (one, or a tuple or dict
        of them, also memory-mapped), samples (an indexable object with a length), or a function of
        row numbers [n] that returns a tree of arrays of n rows.
      layouts: one layout, or a prefix tree of them, as for `put`, but no function and no mesh. All
        those with dims split the rows in the same way.
      batch: global batch size, for indexed sources.
      order: with `batch`, the row numbers in feeding order, equal on all processes: a permutation,
        or a range. None: all, in order.
      remainder: how to handle a batch that has fewer rows, on any process, than the first one:
        "drop" it and end; "pad" it with zeros, and yield with every batch a mask [rows] of the rows
        that are real, as (batch, mask); or raise an "error".
      start: the position of another feed: its `state()`, saved on any number of processes; or how
        many rows (of all processes) were delivered before. An indexed source starts there; an
        iterable is first read up to there.
      skip: False: the iterable is already at `start`: skip nothing. Required for iterables that can
        restore their own position (grain, torchdata).
      prefetch: how many batches to place on devices ahead of the program.
      check_values: False: do not compare rows that several processes read, and scalars.
      timeout_s: how long the program waits for a batch; None: SHOAL_TIMEOUT_S (600).
      lane: the lane, see `barrier`. None: that of this thread.

    Returns:
      A `Feed`. Its thread starts at once, and ends with the last batch, with `close`, or when the
      feed is garbage-collected.

    Raises:
      UsageError: on this process: an argument is wrong; `start` is the state of a feed that had
        its rows in another order.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"data": 1}, devices=[0])
      >>> images = np.arange(10, dtype=np.float32).reshape(5, 2)
      >>> rows = NamedSharding(mesh, P("data"))
      >>> with shoal.feed(images, rows, batch=2) as batches:
      ...     print([float(batch.sum()) for batch in batches], batches.rows)
      [6.0, 22.0] 4
    """
    problems: list[str] = []
    batch = None if batch is None else count("batch", batch, problems, least=1)
    prefetch = count("prefetch", prefetch, problems, least=1)
    problems += problems_of(batch, order, remainder, check_values, skip)
    problems += lane_problems(lane)
    raise_all("feed", problems)
    limit_s = settings.timeout("feed", timeout_s, "SHOAL_TIMEOUT_S")
    split = Split(rows_layout(layouts), jax.process_index())
    reads = source_of(source, batch, order, split)
    mark = mark_of(order_text(reads)) if isinstance(reads, IndexedSource) else 0
    rows = rows_before(start, mark)
    check_skip(source, reads, rows, skip)
    options = FeedOptions(
        layouts=layouts,
        remainder=remainder,
        start=rows,
        batch=batch or 0,
        check_values=check_values,
        x64=jax.config.jax_enable_x64,
        caller=Caller.here(),
        skip=skip is not False,
    )
    check_last_batch(reads, options)
    spec = feed_spec(reads, split, options, prefetch)
    meeting = _meeting(
        here=client(), split=split, spec=spec, start=rows, lane=lane, limit_s=limit_s
    )
    prefetched = Prefetch(
        Steps(reads, split, options, meeting), prefetch, meets=not meeting.is_alone
    )
    result = Feed(prefetched, meeting, mark)
    prefetched.start()
    return result


class Feed:
    """An iterator of batches on devices; made by `feed`. A context manager."""

    def __init__(self, prefetch: Prefetch[FedBatch], meeting: FeedMeeting, mark: int) -> None:
        self._prefetch = prefetch
        self._meeting = meeting
        self._mark = mark
        self._rows = meeting.start
        self._reader: ReaderState | None = None  # as of the last delivered batch
        self._batches = 0
        self._turn = threading.Lock()  # serializes threads of the program
        self._has_ended = False
        self._pid = os.getpid()
        self._forgotten = weakref.finalize(self, prefetch.close, wait_s=_FORGET_S, announces=False)

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
          >>> from jax import NamedSharding, P
          >>> rows = NamedSharding(shoal.make_mesh({"data": 1}, devices=[0]), P("data"))
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
        another number, begin the iterable again, with `skip=True`.

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
          PeerFailedError: on all others: the reader of a process raised; on that process its error.
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
        if self._prefetch.is_closed:
            raise UsageError("feed: this feed is closed")
        meeting = self._meeting
        wait = BatchWait(meeting, self._prefetch, self._batches)
        progress = meeting.client.progress
        progress.reads = wait.is_for_reader
        try:
            given = self._prefetch.take(wait.look)
        finally:
            progress.reads = None
        if given is None and self._prefetch.is_closed:
            raise UsageError("feed: this feed was closed during the wait for a batch")
        if given is None:
            self._has_ended = True
            raise StopIteration
        batch = f"batch {self._batches} of feed at {meeting.site}"
        entry = RecordedCall(batch, "", (), step=progress.step)
        meeting.client.call_records.record(entry, group=meeting.group)
        progress.turns += 1
        self._batches += 1
        self._rows += given.rows
        self._reader = given.reader
        return given.value

    def close(self) -> None:
        """End the thread. Local. Processes that request a further batch get DivergenceError; while
        an exception is handled here, PeerFailedError, which names it."""
        self._close(sys.exception())

    def _close(self, error: BaseException | None) -> None:
        if self._pid != os.getpid():
            return
        why = "" if error is None else failure_of(error, self._meeting.site).words
        self._forgotten.detach()
        if not self._prefetch.close(why):
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
        self._close(error)


def _meeting(
    *,
    here: JobClient,
    split: Split,
    spec: tuple[str, ...],
    start: int,
    lane: str | None,
    limit_s: float,
) -> FeedMeeting:
    """Return how the threads meet: in a lane that no other feed uses."""
    devices = sharding_of(split.layout).mesh.devices.ravel().tolist()
    owners = owners_of(here, devices, limit_s)
    if here.process not in owners:
        raise UsageError(
            f"feed: this process owns no device of {split.layout.mesh!r}, so it has no rows to read"
        )
    group = None if len(owners) == here.num_processes else owners
    site = callsite()
    entry = RecordedCall("feed", site, spec, step=here.progress.step)
    name = here.call_records.record(entry, group=group, lane=lane)
    if not name and len(owners) > 1:
        raise UsageError(
            "feed: this thread has never synchronized with other processes, so its calls "
            "cannot be matched with theirs: name its lane="
        )
    name = name or f"alone {os.urandom(8).hex()}"
    return FeedMeeting(
        client=here,
        group=group,
        lane=f"feed: {name}",
        site=site,
        spec=spec,
        timeout_s=limit_s,
        start=start,
    )


# The saved position of a feed, and whether another feed can continue from it.

_NAMES = ("order", "rows")
_MOST_MARK = 0x7FFF_FFFF  # an int32: it may be placed on devices


def mark_of(order: str) -> int:
    """Return a positive number that identifies an order of rows."""
    return (zlib.crc32(order.encode()) & _MOST_MARK) or 1


def position_of(rows: int, mark: int) -> dict[str, int]:
    """Return the state to save.

    Args:
      rows: number of rows delivered, of all processes.
      mark: of the order of rows read by number; else 0.
    """
    return {"order": mark, "rows": rows}


def rows_before(start: Any, mark: int) -> int:
    """Return how many rows were delivered before, from `start=`.

    Args:
      start: a number of rows, or the result of `position_of`, perhaps restored from a checkpoint.
      mark: identifies the order of the feed that is to continue.

    Raises:
      UsageError: it is neither, or was saved by a feed of another order.
    """
    if not isinstance(start, Mapping):
        return integer("feed", "start", start, least=0)
    if sorted(start) != [*_NAMES]:
        raise UsageError(
            f"feed: start={start!r} must be a number of rows, or what the state() of a feed "
            'returned: {"order": …, "rows": …}'
        )
    was, rows = (integer("feed", f"start[{name!r}]", start[name], least=0) for name in _NAMES)
    if rows and was != mark:
        raise UsageError(
            f"feed: start= was saved by a feed of {_words(was)}; this one is of {_words(mark)}\n"
            f"pass it the order of that epoch, or start={rows} to continue anyway"
        )
    return rows


def _words(mark: int) -> str:
    return f"rows by index in order {mark:08x}" if mark else "an iterable"


# Wait for a batch: which process is late, and when lateness becomes an error.


class BatchWait:
    """One wait for a batch. The meeting names other processes that are late; this concerns the
    reader of this process.
    """

    def __init__(self, meeting: FeedMeeting, prefetch: Prefetch[FedBatch], number: int) -> None:
        self._meeting = meeting
        self._prefetch = prefetch
        self._batch = f"{meeting.batch(number)} ({line_of(meeting.site)})"
        self._has_logged = False

    def is_for_reader(self) -> bool:
        """Whether this process's own reader has not returned yet."""
        return self._prefetch.phase[0] == READING

    def look(self, since: float) -> None:
        """Called periodically while the program waits, with the time since it began.

        Raises:
          DeadlineError: the reader of this process took too long.
          ProcessLostError, PeerFailedError: a process was lost or failed meanwhile.
        """
        here = self._meeting.client
        if here.peer_losses.any():
            here.check(self._batch)
        phase, began = self._prefetch.phase
        if phase == MEETING:
            return
        waited_s = time.monotonic() - max(since, began)
        text = f"{self._meeting.me}: {self._batch}: its own reader has returned no batch"
        if waited_s >= self._meeting.timeout_s:
            raise DeadlineError(
                f"{text} within {self._meeting.timeout_s:g} s\n"
                "if it is only slow, raise timeout_s=, or set SHOAL_TIMEOUT_S",
                name=self._batch,
                waited_s=waited_s,
                missing=[here.process],
            )
        if not self._has_logged and waited_s >= settings.seconds("SHOAL_WARN_AFTER_S"):
            self._has_logged = True
            _LOG.warning("%s for %.0f s", text, waited_s)


# Check the arguments of a feed, and list what must be equal on all processes.


def problems_of(
    batch: int | None, order: object, remainder: object, check_values: object, skip: object
) -> list[str]:
    """Return what is wrong with the other arguments, each by itself or beside `batch`."""
    problems: list[str] = []
    if order is not None and batch is None:
        problems.append("order= is for rows read by row index: pass batch=, too")
    if not isinstance(remainder, str) or remainder not in LAST:
        problems.append(
            f"remainder={remainder!r} is not one of {', '.join(LAST)}{nearest(remainder, LAST)}"
        )
    problems += not_flags(check_values=check_values)
    if skip is not None and not isinstance(skip, bool):
        problems.append(WrongType(f"skip={skip!r} must be True, False or None"))
    if skip is not None and batch is not None:
        problems.append("skip= is for iterables; rows by index (batch=) are never skipped")
    return problems


def source_of(
    source: Any, batch: int | None, order: Any, split: Split
) -> IterableSource | IndexedSource:
    """Return the batch source: an iterable, or rows by number.

    Raises:
      UsageError: it is neither, or a batch cannot be split evenly.
    """
    if batch is None:
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            what = "a function of row numbers" if callable(source) else f"{source!r}"
            raise UsageTypeError(
                f"feed: {what} is not an iterable of batches; rows by index need batch="
            )
        if isinstance(source, dict | np.ndarray | jax.Array):
            raise UsageTypeError(
                f"feed: {with_article(type(source).__name__)} is not an iterable of batches: "
                "pass batch=, the rows of a batch over all processes, to read it by number"
            )
        return IterableSource(source)
    check_even_split("feed: batch", split.layout, batch, 0)
    return by_number(source, order)


def check_last_batch(reads: IterableSource | IndexedSource, options: FeedOptions) -> None:
    """Raise if the last batch by number is incomplete and `remainder` does not allow it."""
    if isinstance(reads, IterableSource):
        return
    batch, left = options.batch, max(0, reads.total - options.start)
    is_nothing = options.remainder == "drop" and reads.total < batch
    if left % batch and (options.remainder == "error" or is_nothing):
        verb = "does" if left == 1 else "do"
        text = f"{counted(left, 'row')} {verb} not fill one batch of {batch}"
        if left > batch:
            batches = counted(left // batch, "batch", "batches")
            text = f"{left} rows fill {batches} of {batch} and leave {left % batch}"
        raise UsageError(f"feed: {text}; remainder='pad' pads the last batch, with a mask")


def check_skip(
    source: Any, reads: IterableSource | IndexedSource, rows: int, skip: bool | None
) -> None:
    """Reject an iterable that may already be past the rows to skip."""
    can_be_set = any(hasattr(source, name) for name in ("set_state", "load_state_dict"))
    if rows and skip is None and can_be_set and isinstance(reads, IterableSource):
        raise UsageError(
            f"feed: start= is after {counted(rows, 'row')}, and "
            f"{with_article(type(source).__name__)} can be set to where it was\n"
            "skip=False if it was (to reader_state()); skip=True if it begins anew, and "
            "that many rows are to be skipped"
        )


def rows_layout(layouts: Layouts) -> Layout:
    """Return the layout of the rows: that of the first dim."""
    raise_all("feed", whole_rows(layouts))
    layouts_seen: dict[Layout, None] = {}
    without_dims: dict[Layout, None] = {}  # of leaves without rows, if others have rows
    for given in jax.tree.leaves(layouts, is_leaf=is_one_layout):
        if not is_one_layout(given):
            raise UsageTypeError(f"feed: {not_a_layout(given)}")
        if is_layout_function(given):
            raise UsageTypeError(
                f"feed: {given!r} cannot be resolved before there are leaves: pass layouts"
            )
        layout = split_layout("feed", given)
        rows = Layout(layout.mesh, layout.dims[0])
        if isinstance(given, Layout) and not given.rank:
            without_dims[rows] = None
        else:
            layouts_seen[rows] = None
    layouts_seen = layouts_seen or without_dims
    if len(layouts_seen) != 1:
        raise UsageError(
            "feed: all leaves of a batch have their rows (dim 0) on the same axes of one mesh, not "
            + (" and ".join(map(repr, layouts_seen)) or "none")
        )
    (layout,) = layouts_seen
    sharding_of(layout)  # checks that its devices exist
    return layout


def feed_spec(
    reads: IterableSource | IndexedSource, split: Split, options: FeedOptions, prefetch: int
) -> tuple[str, ...]:
    """Return the lines that must be equal on all processes."""
    lines = [
        f"rows as {split.layout.text}",
        f"remainder={options.remainder!r} start={options.start} prefetch={prefetch} "
        f"check_values={options.check_values}" + ("" if options.skip else " skip=False"),
    ]
    if isinstance(reads, IndexedSource):
        lines.append(f"batch={options.batch} of {order_text(reads)}")
    return tuple(lines)


def order_text(reads: IndexedSource) -> str:
    """Return a text that identifies an order of rows."""
    order = str(reads.order)
    if not isinstance(reads.order, range):
        order = f"numbers with the digest {digest(np.asarray(reads.order), whole=True)}"
    return f"{reads.total} rows, order={order}"
