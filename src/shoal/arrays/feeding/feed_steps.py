"""The steps of a feed's thread for each batch: read, meet the other processes' threads, place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from shoal.arrays.bridge.leaf_layouts import Layouts
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.feeding.batch_sources import IndexedSource, IterableSource, ReaderState
from shoal.arrays.feeding.batch_verdict import BatchId, BatchVerdict, Status, judge
from shoal.arrays.feeding.own_rows import Batch, Split, checked_batch, place_rows
from shoal.arrays.feeding.prefetch import MEETING, PLACING, READING, Prefetch
from shoal.errors import DeadlineError, ShoalError, UsageError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.exception_text import failure_of
from shoal.runtime.failures.last_record import record
from shoal.runtime.system.callsite import Caller, line_of

T = TypeVar("T")


class FeedOptions(NamedTuple):
    """The options of a feed."""

    layouts: Layouts
    remainder: str
    start: int  # rows (of all processes) delivered before
    batch: int  # rows of all processes; 0: decided by the first batch
    check_values: bool
    x64: bool
    caller: Caller
    skip: bool = True  # must an iterable skip the rows before `start`?


class FeedMeeting(NamedTuple):
    """How the threads of a feed meet."""

    client: JobClient
    group: tuple[int, ...] | None
    lane: str
    site: str
    spec: tuple[str, ...]
    timeout_s: float
    start: int = 0

    @property
    def me(self) -> ThisProcess:
        """This process."""
        return ThisProcess(self.client.process, self.client.hosts)

    @property
    def is_alone(self) -> bool:
        """Is this the only process?"""
        return len(self.group or self.client.hosts) == 1

    def batch(self, number: int) -> str:
        """Return the name of a batch, counted from 0 in this feed, for messages."""
        return f"batch {number} of feed" + (f" from row {self.start}" if self.start else "")


class FedBatch(NamedTuple):
    """One delivered batch."""

    value: Any
    rows: int  # of the batch, of all processes
    reader: ReaderState  # of this process, right after it read the batch


class Steps:
    """The batches of one feed."""

    def __init__(
        self,
        source: IterableSource | IndexedSource,
        split: Split,
        options: FeedOptions,
        meeting: FeedMeeting,
    ) -> None:
        self._source = source
        self._split = split
        self._options = options
        self._meeting = meeting
        self._number = 0  # of the batch, counted from the first of this feed
        self._size = options.batch
        self._leaves = ""  # as agreed for the previous batch
        self._like: Batch | None = None
        self._next_row = options.start
        self._must_skip = options.start > 0 and options.skip and isinstance(source, IterableSource)

    def step(self, prefetch: Prefetch[FedBatch]) -> FedBatch | None:
        """Make one batch; None at the end.

        Raises:
          The reader's error, on this process; otherwise as `judge` and `agree`.
        """
        with jax.enable_x64(self._options.x64):
            return self._step(prefetch)

    def _step(self, prefetch: Prefetch[FedBatch]) -> FedBatch | None:
        batch = self._own(prefetch, READING, self._read)
        source = self._source
        if batch is not None and not self._size and (self._must_skip or self._is_padded):
            # If the first batch may be short, only its size decides which rows belong to which
            # process, and how many batches were delivered before.
            self._size, self._leaves = self._meet(prefetch, self._status(batch))
            if self._must_skip and isinstance(source, IterableSource):
                batch = self._own(prefetch, READING, lambda: self._after_skipped(source))
            elif not self._size:
                return None
        if batch is None:
            return None
        verdict = self._meet(prefetch, self._status(batch))
        if not verdict.size:
            return None
        self._size, self._leaves = verdict
        self._number += 1
        value = self._own(prefetch, PLACING, lambda: self._placed(batch))
        if value is None:
            return None
        self._next_row += self._size
        reader = source.state if isinstance(source, IterableSource) else ReaderState()
        return FedBatch(value[0], self._size, reader)

    def _own(self, prefetch: Prefetch[FedBatch], phase: str, act: Callable[[], T]) -> T | None:
        """Run local work; let the other processes know if it fails or is closed."""
        try:
            result = act() if prefetch.enter(phase) else None
        except BaseException as error:
            self._announce_failure(prefetch, error)
            raise
        if result is None or prefetch.is_closed:
            self.leave(prefetch)
            return None
        return result

    def leave(self, prefetch: Prefetch[FedBatch]) -> None:
        """See `Work.leave`."""
        prefetch.enter(MEETING)
        kind = "failed" if prefetch.why else "closed"
        status = Status(kind, words=prefetch.why, batches=prefetch.taken)
        with contextlib.suppress(ShoalError):
            self._exchange(status)

    def finish(self) -> None:
        """See `Work.finish`."""
        if isinstance(self._source, IterableSource):
            self._source.close()
        self._like = None
        client, group, lane = self._meeting[:3]
        with contextlib.suppress(ShoalError), client.call(
            "feed", lane, group, ends_lane=True
        ):  # fmt: skip
            pass

    def _read(self) -> Batch:
        """Return this process's batch; without rows at the end."""
        if isinstance(self._source, IndexedSource):
            return self._read_by_number(self._source)
        read = self._source.read()
        if read is None:
            return _no_batch() if self._like is None else self._like
        batch = self._checked(read[0])
        if not batch.rows:
            raise UsageError(f"feed: batch {self._number} has no rows; leave such batches out")
        wanted = self._split.own_rows(self._size) if self._size else batch.rows
        if batch.rows < wanted and self._options.remainder == "drop":
            # This batch is dropped and ends the feed, which is right only for the last one. The
            # item that this reads is not lost: nothing is fed after a short batch.
            is_last = self._source.read() is None
            if not is_last:
                raise UsageError(
                    f"feed: batch {self._number} has {batch.rows} of {wanted} rows and is not the "
                    "last one; remainder='pad' fills such batches up and gives a mask"
                )
        self._like = batch.empty()
        return batch

    def _checked(self, tree: Any) -> Batch:
        return checked_batch(tree, self._options.layouts, self._split, self._options.caller)

    def _read_by_number(self, source: IndexedSource) -> Batch:
        """Read by number: rows past the end are dropped, unless the batch is padded."""
        left = self._rows_left
        if left <= 0 or (left < self._size and self._options.remainder == "drop"):
            return _no_batch()
        rows = source.read(self._next_row, self._split.slices(self._size))
        batch = self._checked(rows)
        wanted = self._split.own_rows(self._size)
        if batch.rows != wanted:
            text = f"the reader gave {batch.rows} rows for {wanted} numbers"
            raise UsageError(f"feed: batch {self._number}: {text}")
        return batch

    def _after_skipped(self, source: IterableSource) -> Batch:
        """Skip the batches delivered before, of which one is already read; return the next.

        If batches are padded, one process's reader may end before the others'.
        """
        self._must_skip = False
        start, size, passed = self._options.start, self._size, self._size
        if size and start % size:
            raise UsageError(
                f"feed: start={start} is not a number of whole batches, which have {size} rows"
            )
        while passed < start:
            if not size or source.read() is None:
                if size and self._is_padded:
                    break
                raise UsageError(f"feed: start={start}, but the reader ended after {passed} rows")
            passed += size
        return self._read()

    def _status(self, batch: Batch) -> Status:
        """Return this process's report on a batch."""
        text = batch.text
        is_as_before = bool(text) and text == self._leaves
        status = Status(
            rows=batch.rows,
            size=self._split.size_of(batch.rows),
            is_exact=self._split.is_exact(batch.rows),
            leaves="=" if is_as_before else text,
        )
        is_by_number = isinstance(self._source, IndexedSource)
        if is_by_number and batch.rows:  # the number of rows is known to all
            status = status._replace(is_exact=self._rows_left >= self._size)
        size = self._size or status.size
        if self._options.check_values and size and (self._size or status.is_exact):
            status = status._replace(digests=batch.digests(self._split, size))
        if not self._leaves and batch.rows and not is_by_number:
            status = status._replace(held=self._split.held, own=batch.digest())
        return status

    @property
    def _is_padded(self) -> bool:
        """Are batches padded?"""
        return self._options.remainder == "pad"

    @property
    def _rows_left(self) -> int:
        """Number of rows from the beginning of this batch, if read by number."""
        return self._source.total - self._next_row if isinstance(self._source, IndexedSource) else 0

    def _meet(self, prefetch: Prefetch[FedBatch], status: Status) -> BatchVerdict:
        prefetch.enter(MEETING)
        meeting = self._meeting
        batch_id = BatchId(
            meeting.me,
            words=f"{meeting.batch(self._number)} ({line_of(meeting.site)})",
            remainder=self._options.remainder,
            size=self._size,
            leaves=self._leaves,
        )
        return judge(batch_id, self._exchange(status, prefetch))

    def _exchange(
        self, status: Status, prefetch: Prefetch[FedBatch] | None = None
    ) -> Mapping[int, Status]:
        """Meet, and return the reports of all processes.

        Lateness of others is an error only if the program has waited for them for the whole
        time-out: they may be busy elsewhere, as it may be itself. Otherwise the process meets
        again; a late process finds as many expired meetings as the others have given up.
        """
        meeting = self._meeting
        size = f"rows of a batch: {self._size or 'as the first one has'}"
        call = Call(meeting.batch(self._number), None, meeting.site, (*meeting.spec, size))
        while True:
            try:
                answers = agree(
                    meeting.client,
                    call,
                    status.pack(),
                    timeout_s=meeting.timeout_s,
                    group=meeting.group,
                    lane=meeting.lane,
                )
            except DeadlineError:
                if prefetch is None or prefetch.is_closed or prefetch.waited_s >= meeting.timeout_s:
                    raise
            else:
                return {process: Status.unpack(data) for process, data in answers.items()}

    def _announce_failure(self, prefetch: Prefetch[FedBatch], error: BaseException) -> None:
        """Make the other processes raise at this batch, too."""
        prefetch.enter(MEETING)
        reason = failure_of(error, self._meeting.site).words
        record(error, thread=threading.current_thread().name)  # it may be ended before it knows
        with contextlib.suppress(ShoalError):
            self._exchange(Status("failed", words=reason), prefetch)

    def _placed(self, batch: Batch) -> tuple[Any]:
        """Return the batch on devices, in a 1-tuple."""
        split, size = self._split, self._size
        own = split.own_rows(size)
        if not self._is_padded:
            return (batch.arrays(split, size),)
        rows = batch.rows
        if isinstance(self._source, IndexedSource):  # past the end it repeated the last row
            ends = [(piece.start, min(piece.stop, self._rows_left)) for piece in split.slices(size)]
            rows = sum(max(0, stop - start) for start, stop in ends)
        value = batch.first(rows).padded(own).arrays(split, size)
        is_row = np.arange(own) < rows
        return ((value, place_rows(is_row, sharding_of(split.layout), split, size)),)


def _no_batch() -> Batch:
    """Return a batch without leaves and rows."""
    return Batch([], jax.tree.structure(()), 0)
