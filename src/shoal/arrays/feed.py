"""Host batches → global arrays, read and placed ahead of the program.

Each process reads its own rows in a thread beside the program. For each batch the threads of all
processes meet once, in a lane of their own, before anything of it is placed: each says how many
rows it brings, or that its reader has ended or failed, and a digest of the rows that others bring,
too. All judge the same words (`batch_verdict`), so each batch is given on all processes or on none,
and the program gets whatever ends the feed, an error too, in the place of that batch. The meeting
is one round trip of the control plane for each batch; it is hidden behind the prefetch, and the
program itself waits for nothing but the batch. That is how readers of different lengths agree: the
first process that has no more rows says so in the meeting for the batch that it cannot bring.

That others are late counts only while the program waits for the batch (`timeout_s`): a feed that is
full waits as long as its program is busy with something else.

A feed that is closed early says so in its next meeting, which ends the threads of all. Where a
reader hangs its thread cannot be ended; it is a daemon, and does not keep Python alive.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from shoal import settings
from shoal.arrays.agreed_devices import owners_of
from shoal.arrays.batch_sources import ByNumber, InTurn, by_number
from shoal.arrays.batch_verdict import LAST
from shoal.arrays.digest import digest
from shoal.arrays.feed_steps import Given, Meeting, Options, Steps
from shoal.arrays.feed_wait import Wait
from shoal.arrays.layouts import Layouts, is_one_layout
from shoal.arrays.leave_trail import lane_offences
from shoal.arrays.local_rows import split_layout
from shoal.arrays.own_rows import Split
from shoal.arrays.prefetch import Prefetch
from shoal.arrays.sharding import sharding
from shoal.colour import logically_collective
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all
from shoal.plan.layout import Layout
from shoal.plan.rows import must_split_evenly
from shoal.runtime.callsite import callsite
from shoal.runtime.coordinator import Coordinator
from shoal.runtime.failure_words import failure_of
from shoal.runtime.process import coordinator
from shoal.runtime.trail import Entry

__all__ = ["Feed", "feed"]

_LOG = logging.getLogger("shoal")
_FORGET_S = 1.0  # how long one that is forgotten, or Python's end, waits for a reader


@logically_collective("layouts, options and the order of rows")
def feed(
    source: Iterable[Any] | Callable[[Any], Any] | Any,
    layouts: Layouts,
    *,
    batch: int | None = None,
    order: Sequence[int] | None = None,
    last: str = "drop",
    start: int = 0,
    prefetch: int = 2,
    same: bool = True,
    timeout_s: float | None = None,
    lane: str | None = None,
) -> Feed:
    """Return an iterator of batches on devices, each process having read its own rows.

    Logically collective: layouts, options and the order of rows must be equal.

    Two kinds of sources. Without `batch`, an iterable of this process's own rows: each of its
    items is a tree of arrays whose rows (dim 0) are those that `local_rows` names, one after the
    other; of a DataLoader of torch, grain or tf.data as well. With `batch`, rows that are read by
    number: the feed says which rows this process needs. One process and many work alike.

    It is impossible that a process gets a batch that another one does not get, or that it gets one
    of other rows. Whatever goes wrong is raised in the place of the first batch that cannot be
    given, on all processes.

    Args:
      source: an iterable of batches of own rows; or with `batch` arrays (one, or a tuple or dict
        of them, memory-mapped ones too), samples (what has a length and gives one by its number),
        or a function of row numbers [n] that returns a tree of arrays of n rows.
      layouts: one layout, or a prefix tree of them, as for `put`, but no function. All that have
        dims split the rows alike.
      batch: rows of a batch over all processes, which are then read by number.
      order: with `batch`, the row numbers in the order in which they are fed, equal on all
        processes: a permutation, or a range. None: all, in order.
      last: what becomes of a batch that has fewer rows, on any process, than the first one: "drop"
        it and end; "pad" it with zeros, and give with every batch a mask [rows] of the rows that
        are real, as (batch, mask); or raise an "error".
      start: how many rows of all processes were given before: the `rows` of a feed that was
        saved, on any number of processes. Rows by number begin there; of an iterable so many
        batches are passed over.
      prefetch: how many batches may be on devices before they are asked for.
      same: False: rows that several processes read are not compared.
      timeout_s: how long the program waits for a batch; None: SHOAL_TIMEOUT_S (600).
      lane: the line of execution, see `barrier`. None: that of this thread.

    Returns:
      a `Feed`. The thread starts with the first batch that is asked for, and ends with the last
      one, with `close`, or when the feed is forgotten.

    Raises:
      UsageError: on this process: an argument is wrong.

    Example:
      >>> import numpy as np, shoal
      >>> mesh = shoal.make_mesh({"data": 1}, devices=[0])
      >>> images = np.arange(10, dtype=np.float32).reshape(5, 2)
      >>> rows = shoal.Layout(mesh, "data", None)
      >>> with shoal.feed(images, rows, batch=2) as batches:
      ...     print([float(batch.sum()) for batch in batches], batches.rows)
      [6.0, 22.0] 4
    """
    offences = _offences(batch, order, last, start, prefetch, same)
    raise_all("feed", [*offences, *lane_offences(lane)])
    limit_s = settings.timeout("feed", timeout_s, "SHOAL_TIMEOUT_S")
    if not limit_s > 0:
        raise UsageError(f"feed: timeout_s={timeout_s!r} must be a positive number of seconds")
    split = Split(_rows_layout(layouts), jax.process_index())
    reads = _source(source, batch, order, last, start, split)
    options = Options(layouts, last, start, batch or 0, same, jax.config.jax_enable_x64)
    spec = _spec(reads, split, options, prefetch)
    meeting = _meeting(coordinator(), split, spec, lane, limit_s)
    steps = Steps(reads, split, options, meeting)
    line = Prefetch(steps, prefetch, meets=not meeting.is_alone)
    return Feed(line, meeting, start)


class Feed:
    """An iterator of batches on devices; made by `feed`. A context manager."""

    def __init__(self, line: Prefetch[Given], meeting: Meeting, start: int) -> None:
        self._line = line
        self._meeting = meeting
        self._rows = start
        self._batches = 0
        self._has_ended = False
        self._pid = os.getpid()
        self._forgotten = weakref.finalize(self, line.close, wait_s=_FORGET_S, tells=False)

    @property
    def rows(self) -> int:
        """How many rows of all processes were given, those before `start` included. Local.

        Saved with the state, it is the `start` of the feed that goes on. A batch counts once the
        program has it: what is only prefetched does not.
        """
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        if self._has_ended:
            raise UsageError(
                "feed: this feed has given all its batches: make one for each epoch, in its loop"
            )
        return self

    def __next__(self) -> Any:
        """Return the next batch. Collective over the mesh's processes.

        Raises:
          PeerFailedError: on all others: the reader of a process raised; on that one its error.
          DivergenceError: on all: options, leaves, or values of rows that several read differ;
            on the others: a process has closed its feed before.
          DeadlineError: no batch came within `timeout_s`.
          UsageError: the feed was closed, or rows do not make a batch.
        """
        if self._has_ended:
            raise StopIteration
        if self._line.is_closed:
            raise UsageError("feed: this feed is closed")
        if self._pid != os.getpid():
            raise UsageError("feed: this process is a fork of the one that made the feed")
        self._line.start()
        meeting = self._meeting
        given = self._line.take(Wait(meeting, self._line, self._batches).look)
        if given is None:
            self._has_ended = True
            raise StopIteration
        entry = Entry(f"batch {self._batches} of feed at {meeting.site}", "", ())
        meeting.coordinator.trails.record(entry, group=meeting.group)
        self._batches += 1
        self._rows += given.rows
        return given.value

    def close(self) -> None:
        """End the thread. Local. Others that ask for a further batch get DivergenceError."""
        self._close("")

    def _close(self, why: str) -> None:
        if self._pid != os.getpid():
            return
        self._forgotten.detach()
        if not self._line.close(why):
            _LOG.warning(
                "%s: feed (%s) was closed, but its reader goes on; its thread ends with it",
                self._meeting.me, self._meeting.site,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("" if error is None else failure_of(error, self._meeting.site).words)


def _offences(
    batch: object, order: object, last: object, start: object, prefetch: object, same: object
) -> list[str]:
    offences: list[str] = []
    least = {"batch": (batch, 1), "start": (start, 0), "prefetch": (prefetch, 1)}
    for name, (value, low) in least.items():
        if value is None and name == "batch":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            offences.append(WrongType(f"{name}={value!r} must be a whole number"))
        elif value < low:
            offences.append(f"{name}={value!r} must be at least {low}")
    if order is not None and batch is None:
        offences.append("order= is of rows that are read by number: give batch=, too")
    if not isinstance(last, str) or last not in LAST:
        offences.append(f"last={last!r} is none of {', '.join(LAST)}{nearest(last, LAST)}")
    if not isinstance(same, bool):
        offences.append(WrongType(f"same={same!r} must be True or False"))
    return offences


def _source(
    source: Any, batch: int | None, order: Any, last: str, start: int, split: Split
) -> InTurn | ByNumber:
    if batch is None:
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            what = "a function of row numbers" if callable(source) else f"{source!r}"
            raise UsageTypeError(
                f"feed: {what} is no iterable of batches; rows by number need batch="
            )
        if isinstance(source, dict | np.ndarray | jax.Array):
            raise UsageTypeError(
                f"feed: a {type(source).__name__} is no iterable of batches: give batch=, the rows "
                "of a batch over all processes, to read it by number"
            )
        return InTurn(source)
    must_split_evenly("feed: batch", split.layout, batch, 0)
    reads = by_number(source, order)
    left = max(0, reads.total - start)
    if left % batch and (last == "error" or (last == "drop" and reads.total < batch)):
        text = f"{left} rows are {left // batch} batches of {batch}, and {left % batch} more"
        raise UsageError(f"feed: {text}; last='pad' gives these with a mask")
    return reads


def _rows_layout(layouts: Layouts) -> Layout:
    """Return how rows are spread: the layout of the first dim."""
    found: dict[Layout, None] = {}
    for one in jax.tree.leaves(layouts, is_leaf=is_one_layout):
        if callable(one) or not is_one_layout(one):
            raise UsageTypeError(
                f"feed: {one!r} is no layout that is known before there are leaves: give layouts"
            )
        layout = split_layout("feed", one)
        if layout.rank:
            found[Layout(layout.mesh, layout.dims[0])] = None
    if len(found) != 1:
        raise UsageError(
            "feed: all leaves of a batch have their rows (dim 0) on the same axes of one mesh, not "
            + (" and ".join(map(repr, found)) or "none")
        )
    (layout,) = found
    sharding(layout)  # its devices exist
    return layout


def _spec(
    reads: InTurn | ByNumber, split: Split, options: Options, prefetch: int
) -> tuple[str, ...]:
    """Return what must be equal on all processes, a line each."""
    lines = [
        f"rows as {split.layout.text}",
        f"last={options.last!r} start={options.start} prefetch={prefetch} same={options.same}",
    ]
    if isinstance(reads, ByNumber):
        order = str(reads.order)
        if not isinstance(reads.order, range):
            order = f"numbers with the digest {digest(np.asarray(reads.order))}"
        lines.append(f"batch={options.batch} of {reads.total} rows, order={order}")
    return tuple(lines)


def _meeting(
    here: Coordinator, split: Split, spec: tuple[str, ...], lane: str | None, limit_s: float
) -> Meeting:
    """Return where the threads meet: a lane that no other feed has."""
    devices = sharding(split.layout).mesh.devices.ravel().tolist()
    owners = owners_of(here, devices, limit_s)
    if here.process not in owners:
        raise UsageError(
            f"feed: this process owns no device of {split.layout.mesh!r}, so it has no rows to read"
        )
    group = None if len(owners) == here.num_processes else owners
    site = callsite()
    name = here.trails.record(Entry("feed", site, spec), group=group, lane=lane)
    if not name and len(owners) > 1:
        raise UsageError(
            "feed: this thread has never met other processes, so its calls cannot be matched with "
            "theirs: name its lane="
        )
    name = name or f"alone {os.urandom(8).hex()}"
    return Meeting(here, group, f"feed: {name}", site, spec, limit_s)
