"""From all processes' statuses of one batch to one verdict. Pure: nothing is sent here.

Every process judges the same statuses, so all reach the same verdict: the batch is delivered, or
all end, or all raise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.errors import DivergenceError, UsageError, counted
from shoal.runtime.client.outcomes import ThisProcess, disagreement, gone_error
from shoal.runtime.failures.comparison import shown_line
from shoal.runtime.failures.exception_text import departures_of
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.spec_lines import SpecLine, with_value

LAST = ("drop", "pad", "error")
_LOG = logging.getLogger("shoal")


class Status(NamedTuple):
    """One process's report on a batch."""

    kind: str = "rows"  # or "closed" early, or "failed"
    rows: int = 0  # number of rows; 0: its reader has ended
    size: int = 0  # global batch size implied by these rows; at the end: 0
    is_exact: bool = True  # do its shards divide its rows evenly?
    leaves: str = ""  # a line for each; "=": as in the previous batch
    digests: Mapping[str, list[str]] = {}  # of rows held by several: see `Batch.digests`
    held: tuple[int, ...] = ()  # its shards; sent with the first batch
    own: str = ""  # the digest of all its rows; sent with the first batch
    words: str = ""  # reason of a failure
    batches: int = 0  # taken before it was closed

    def pack(self) -> bytes:
        """Serialize it."""
        return json.dumps(self._asdict()).encode(errors="surrogatepass")

    @classmethod
    def unpack(cls, data: bytes) -> Status:
        """Deserialise the result of `pack`."""
        return cls(**json.loads(data))


class BatchVerdict(NamedTuple):
    """The decision on a batch, the same on all processes."""

    size: int  # rows of the batch; 0: all have ended
    leaves: str = ""  # their description


class BatchId(NamedTuple):
    """Identifies a batch of a feed."""

    me: ThisProcess
    words: str  # "batch 3 of feed (train.py:12 (main))"
    remainder: str
    size: int  # of all batches; 0: this is the first, which decides
    leaves: str  # of the previous batch


def judge(batch: BatchId, statuses: Mapping[int, Status]) -> BatchVerdict:
    """Return the verdict on a batch. A process whose own reader failed does not call this.

    Raises:
      PeerFailedError: the reader of another process failed.
      DivergenceError: another process wants no more batches; leaves, or the values of rows that
        several read, differ.
      UsageError: the rows do not make a batch.
    """
    failed = {p: status.words for p, status in statuses.items() if status.kind == "failed"}
    if failed:
        what = f"{batch.me}: {batch.words} is not delivered"
        raise gone_error("failed", departures_of(failed, "failed", {}), batch.me, what)
    closed = {p: status.batches for p, status in statuses.items() if status.kind == "closed"}
    if batch.me.process in closed:
        return BatchVerdict(0)
    if closed:
        raise _closed(batch, closed)
    having = {p: status for p, status in statuses.items() if status.rows}
    if not having:
        return BatchVerdict(0)
    size = batch.size or _first_size(batch, statuses, having)
    short = {
        p: status for p, status in statuses.items() if status.size != size or not status.is_exact
    }
    _check_rows(batch, size, statuses, short)
    if short and batch.remainder == "drop":
        _log_dropped(batch, statuses, having)
        return BatchVerdict(0)
    leaves = _same_leaves(batch, statuses if short else having)
    _check_values(batch, statuses, leaves)
    if not batch.size:
        _suspect_same_rows(batch, statuses)
    return BatchVerdict(size, leaves)


def _closed(batch: BatchId, closed: Mapping[int, int]) -> DivergenceError:
    sides: list[tuple[str, Any]] = [(f"asks for {batch.words}", [batch.me.process])]
    by_count: dict[int, list[int]] = {}
    for process, count in closed.items():
        by_count.setdefault(count, []).append(process)
    sides += [
        (f"closed its feed after {counted(n, 'batch', 'batches')}", who)
        for n, who in by_count.items()
    ]
    text = f"{batch.me}: processes asked a feed for different numbers of batches"
    return disagreement(text, sides, "all must leave the loop over a feed at the same batch")


def _first_size(
    batch: BatchId, statuses: Mapping[int, Status], having: Mapping[int, Status]
) -> int:
    """Return the size of all batches, which the first one decides."""
    empty = [p for p in statuses if p not in having]
    if empty:
        raise UsageError(
            f"{batch.me}: {batch.words}: the reader of {listed(empty)} is empty, that of "
            f"{listed(having)} is not; let each process read rows, or read by row index (batch=)"
        )
    sizes = {status.size for status in having.values()}
    is_whole = len(sizes) == 1 and all(status.is_exact for status in having.values())
    if batch.remainder != "pad" and not is_whole:
        raise UsageError(
            f"{batch.me}: {batch.words}: the first batch must be whole: {_rows(having)}, which "
            "their devices do not share evenly; read the same number of rows, a multiple of "
            "the shards"
        )
    return max(sizes)


def _check_rows(
    batch: BatchId, size: int, statuses: Mapping[int, Status], short: Mapping[int, Status]
) -> None:
    long = {p: status for p, status in statuses.items() if status.size > size}
    if long:
        raise UsageError(
            f"{batch.me}: {batch.words}: {_rows(long)}, more than in the first batch (of {size})"
        )
    if short and batch.remainder == "error":
        raise UsageError(
            f"{batch.me}: {batch.words} is not a whole one of {counted(size, 'row')}: "
            f"{_rows(statuses)}\n"
            "remainder='drop' leaves it out, remainder='pad' fills it up and gives a mask"
        )


def _rows(statuses: Mapping[int, Status]) -> str:
    by_count: dict[int, list[int]] = {}
    for process, status in statuses.items():
        by_count.setdefault(status.rows, []).append(process)
    return ", ".join(f"{counted(n, 'row')} of {listed(who)}" for n, who in sorted(by_count.items()))


def _log_dropped(
    batch: BatchId, statuses: Mapping[int, Status], having: Mapping[int, Status]
) -> None:
    """Log, on one process, that some readers had more batches; one short batch is expected."""
    if len(having) < len(statuses) and batch.me.process == min(statuses):
        ended = [p for p in statuses if p not in having]
        _LOG.warning(
            "%s: %s: the reader of %s has ended, that of %s has more: it is dropped "
            "(remainder='drop')",
            batch.me, batch.words, listed(ended), listed(having),
        )  # fmt: skip


def _same_leaves(batch: BatchId, statuses: Mapping[int, Status]) -> str:
    """Return the leaves, which are equal on all processes, one line each."""
    sides: dict[str, list[int]] = {}
    for process, status in statuses.items():
        sides.setdefault(batch.leaves if status.leaves == "=" else status.leaves, []).append(
            process
        )
    if len(sides) == 1:
        return next(iter(sides))
    lines = [text.split("\n") for text in sides]
    index = next((n for n, row in enumerate(zip(*lines, strict=False)) if len({*row}) > 1), -1)
    shown = [
        (shown_line(row[index]) if index >= 0 else counted(len(row), "leaf", "leaves"), who)
        for row, who in zip(lines, sides.values(), strict=True)
    ]
    raise disagreement(f"{batch.me}: processes read different leaves for {batch.words}", shown)


def _check_values(batch: BatchId, statuses: Mapping[int, Status], leaves: str) -> None:
    """Compare the rows that several processes read."""
    groups = {holders: None for status in statuses.values() for holders in status.digests}
    for holders in groups:
        digests_of = {
            p: status.digests[holders]
            for p, status in statuses.items()
            if holders in status.digests
        }
        leaves_count = len(next(iter(digests_of.values())))
        for index, line in enumerate(leaves.split("\n")[:leaves_count]):  # the tree's line follows
            sides: dict[str, list[int]] = {}
            for process, digests in digests_of.items():
                sides.setdefault(digests[index], []).append(process)
            if len(sides) > 1:
                leaf = SpecLine.of(line) or SpecLine()
                what = "values without dims" if leaf.shape == "[]" else "the same rows"
                raise disagreement(
                    f"{batch.me}: {batch.words}: processes that hold {what} (processes "
                    f"{holders}) have read different ones",
                    [(shown_line(with_value(line, text)), who) for text, who in sides.items()],
                    "local_rows says which rows each process must read; check_values=False "
                    "compares none",
                )


def _suspect_same_rows(batch: BatchId, statuses: Mapping[int, Status]) -> None:
    """Warn, on one process, if others read equal values for different rows: probably every process
    reads the whole data set from its beginning.
    """
    seen: dict[str, list[int]] = {}
    for process, status in statuses.items():
        if status.own:
            seen.setdefault(status.own, []).append(process)
    for who in seen.values():
        first = who[0]
        twins = [p for p in who[1:] if not {*statuses[p].held} & {*statuses[first].held}]
        if twins and batch.me.process == first:
            _LOG.warning(
                "%s: %s: the values of %s equal those of this process, for other rows: does each "
                "process read its own part of the data? (local_rows says which)",
                batch.me, batch.words, listed(twins),
            )  # fmt: skip
