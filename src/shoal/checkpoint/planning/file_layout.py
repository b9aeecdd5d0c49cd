"""Lay out the boxes that a process writes in its files, before any value is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shoal.checkpoint.format import header
from shoal.checkpoint.format.records import Chunks, IntArray, data_name
from shoal.checkpoint.format.table_files import data_metadata
from shoal.checkpoint.planning.who_writes import WriteBox
from shoal.checkpoint.tree import names
from shoal.checkpoint.tree.dtypes import Storage, dtype_of, entry_shape, storage_of

_MAX_ENTRIES = 500_000  # per file, and
_MAX_NAME_BYTES = 20 << 20  # of their names: safetensors limits headers to 100 MB


@dataclass(frozen=True, eq=False)
class FilePlan:
    """One data file before its values are known."""

    name: str
    header: bytes  # length, JSON and padding: a multiple of PAGE_BYTES
    num_bytes: int  # of the whole file
    rows: tuple[int, ...]  # of the part's chunks, in the order in which they lie in the file


@dataclass(frozen=True, eq=False)
class PartPlan:
    """The planned part of one process."""

    files: tuple[FilePlan, ...]
    chunks: Chunks  # `file` counts this process's files from 0


def lay_out(
    own: Sequence[WriteBox], attempt: str, *, process: int, num_processes: int, max_file_bytes: int
) -> PartPlan:
    """Return the files that hold the boxes of `own`, which are sorted by leaf and origin.

    All processes apply the same rule. It is impossible that an element is written twice, not at
    all, or by a process that does not hold it.

    A file holds up to `max_file_bytes` of data, or one box.
    """
    chunks = _rows(own)
    files: list[FilePlan] = []
    storages = [_storage(write.record.dtype) for write in own]
    sizes = [write.num_bytes for write in own]
    entries = [_entry(write, process) for write in own]
    order = sorted(range(len(own)), key=lambda row: -storages[row].align)  # stable
    for rows in _files(order, sizes, entries, max_file_bytes):
        ends = np.cumsum([0, *(sizes[row] for row in rows)])
        places = ends.tolist()
        described = [
            header.Entry(
                name=entries[row],
                dtype=storages[row].entry,
                shape=_shape(own[row]),
                begin=begin,
                end=end,
            )
            for row, begin, end in zip(rows, places[:-1], places[1:], strict=True)
        ]
        head = header.build_header(described, data_metadata(attempt))
        chunks.file[rows] = len(files)
        chunks.begin[rows], chunks.end[rows] = ends[:-1] + len(head), ends[1:] + len(head)
        name = data_name(attempt, process, num_processes, len(files))
        files.append(FilePlan(name, head, len(head) + places[-1], tuple(rows)))
    return PartPlan(tuple(files), chunks)


def _files(
    order: Sequence[int], sizes: Sequence[int], entries: Sequence[str], max_bytes: int
) -> Iterator[list[int]]:
    rows: list[int] = []
    held_bytes = name_bytes = 0
    for row in order:
        held_bytes += sizes[row]
        name_bytes += len(entries[row])
        is_full = held_bytes > max_bytes or name_bytes > _MAX_NAME_BYTES
        if rows and (is_full or len(rows) >= _MAX_ENTRIES):
            yield rows
            rows, held_bytes, name_bytes = [], sizes[row], len(entries[row])
        rows.append(row)
    if rows:
        yield rows


def _rows(own: Sequence[WriteBox]) -> Chunks:
    """Return the table without file positions: origins and extents padded to the highest rank."""
    rank = max((len(write.box.origin) for write in own), default=1) or 1
    pad: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
        dims: ((0,) * (rank - dims), (1,) * (rank - dims)) for dims in range(rank + 1)
    }
    boxes = [write.box for write in own]
    origins = itertools.chain.from_iterable(b.origin + pad[len(b.origin)][0] for b in boxes)
    extents = itertools.chain.from_iterable(b.extent + pad[len(b.extent)][1] for b in boxes)
    return Chunks(
        leaf=np.array([write.leaf for write in own], np.int64),
        file=np.zeros(len(own), np.int64),
        begin=np.zeros(len(own), np.int64),
        end=np.zeros(len(own), np.int64),
        origin=_table(origins, len(own), rank),
        extent=_table(extents, len(own), rank),
    )


def _table(numbers: Iterator[int], rows: int, rank: int) -> IntArray:
    return np.fromiter(numbers, np.int64, rows * rank).reshape(rows, rank)


def _entry(write: WriteBox, process: int) -> str:
    record, box = write.record, write.box
    if record.kind == "per_process":
        return names.entry_of_process(record.name, process)
    return names.entry(record.name, None if box.extent == record.stored_shape else box.origin)


def _shape(write: WriteBox) -> tuple[int, ...]:
    return _entry_shape(write.record.dtype, write.box.extent)


@lru_cache(maxsize=1 << 12)
def _entry_shape(dtype: str, extent: tuple[int, ...]) -> tuple[int, ...]:
    return entry_shape(dtype_of(dtype), extent)


@lru_cache(maxsize=256)
def _storage(dtype: str) -> Storage:
    return storage_of(dtype_of(dtype))
