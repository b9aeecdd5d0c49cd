"""Plan which bytes of which files to read for a set of boxes. Reads nothing.

Reads are whole blocks, since each block has a hash. Nearby blocks are read together: gaps that
cost less to read than another request are read through.

Worked example, blocks of 4 bytes: a chunk of uint8[4, 8] at byte 8 of a file, wanted [1:3, 2:4].
Its rows are the bytes 18..20 and 26..28: blocks 4 and 6 (16..20 and 24..28). If gaps of 4 bytes
are read through, they are one request, 16..28; otherwise two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal.checkpoint.format.records import BLOCK_BYTES, Chunks, IntArray

GAP_BYTES = BLOCK_BYTES  # a request costs about as much as reading this
REQUEST_BYTES = 4 << 20  # stays in cache between reading, hashing and copying
_MOST_PAIRS = 1 << 21  # boxes x chunks compared at a time


class Boxes(NamedTuple):
    """Boxes of leaves, one per row; padded as in `Chunks`: origin 0 and extent 1 at the end."""

    leaf: IntArray  # [boxes]
    origin: IntArray  # [boxes, rank]
    extent: IntArray  # [boxes, rank]


class Items(NamedTuple):
    """The element sizes of each leaf."""

    num_bytes: IntArray  # in memory [leaves]
    per_byte: IntArray  # elements per byte in files: 1, or 2 or 4 if packed [leaves]


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The reads, and which parts of them are wanted.

    A *piece* is the intersection of a box and a chunk. A *request* is one read: whole blocks of one
    file, except at its end. No byte is in two requests.
    """

    file: IntArray  # of each request, by file and begin [requests]
    begin: IntArray  # [requests]
    end: IntArray  # [requests]
    box: IntArray  # of each piece [pieces]
    chunk: IntArray  # [pieces]
    origin: IntArray  # of the piece in the leaf [pieces, rank]
    extent: IntArray  # [pieces, rank]
    first: IntArray  # first byte of the piece in the file [pieces]
    last: IntArray  # one past its last [pieces]
    needed_bytes: int  # of all pieces, without gaps

    @property
    def num_requests(self) -> int:
        """Number of reads."""
        return len(self.file)

    @cached_property
    def read_bytes(self) -> int:
        """Number of bytes read."""
        return int((self.end - self.begin).sum())

    @property
    def files(self) -> list[int]:
        """The numbers of the files to read, in order."""
        return [int(file) for file in np.unique(self.file)]

    def pieces_of_requests(self, file_of_chunk: IntArray) -> tuple[IntArray, IntArray]:
        """Return the pieces with bytes in each request, and the offset of each in it.

        Those of request r are `row[starts[r] : starts[r + 1]]`.
        """
        files = file_of_chunk[self.chunk]
        top = int(max(self.end.max(initial=0), self.last.max(initial=0))) + 1
        from_ = np.searchsorted(self.file * top + self.end, files * top + self.first, "right")
        to = np.searchsorted(self.file * top + self.begin, files * top + self.last, "left")
        piece, step = _counted(to - from_)
        request = from_[piece] + step
        order = np.argsort(request, kind="stable")
        starts = np.searchsorted(request[order], np.arange(self.num_requests + 1))
        return piece[order], starts.astype(np.int64)


def plan_reads(
    chunks: Chunks,
    file_bytes: IntArray,
    items: Items,
    boxes: Boxes,
    *,
    most_request_bytes: int = REQUEST_BYTES,
    gap_bytes: int = GAP_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> ReadPlan:
    """Plan the reads of `boxes`.

    It is impossible that a byte of a box is in no request, or any byte in two.

    Args:
      chunks: sorted by leaf.
      file_bytes: length of each file [files].
      most_request_bytes: limit of a request, unless one block is longer.
      gap_bytes: gaps between blocks up to this are read through.
    """
    box, chunk, origin, extent = _meetings(chunks, boxes)
    leaf = boxes.leaf[box]
    item, per_byte = items.num_bytes[leaf], items.per_byte[leaf]
    strides = suffixes(chunks.extent[chunk], item)
    start = ((origin - chunks.origin[chunk]) * strides).sum(axis=1)
    stop = start + ((extent - 1) * strides).sum(axis=1) + item
    begin = chunks.begin[chunk]
    piece, run_start, run = _runs(extent, strides, item, gap_bytes * per_byte)
    run_start = run_start + start[piece]
    runs = _merged(
        file=chunks.file[chunk[piece]],
        begin=begin[piece] + run_start // per_byte[piece],
        end=begin[piece] - (-(run_start + run) // per_byte[piece]),
        file_bytes=file_bytes,
        gap=gap_bytes,
        block=block_bytes,
    )
    needed = -(-extent.prod(axis=1) * item // per_byte)
    most = max(most_request_bytes // block_bytes, 1) * block_bytes
    return ReadPlan(
        *_split(*runs, most),
        box=box,
        chunk=chunk,
        origin=origin,
        extent=extent,
        first=begin + start // per_byte,
        last=begin - (-stop // per_byte),
        needed_bytes=int(needed.sum()),
    )


def suffixes(extent: IntArray, item: IntArray) -> IntArray:
    """Return the stride of each dim in bytes, in C order [rows, rank]."""
    strides = np.empty_like(extent)
    step = np.array(item, dtype=np.int64)
    for dim in range(extent.shape[1] - 1, -1, -1):
        strides[:, dim] = step
        step = step * extent[:, dim]
    return strides


def _counted(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Repeat each number n counts[n] times, paired with 0, 1, … counts[n] - 1."""
    counts = np.maximum(counts, 0)
    index = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return index, np.arange(len(index), dtype=np.int64) - first[index]


def _meetings(chunks: Chunks, boxes: Boxes) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return box, chunk, origin and extent of every piece, sorted by box, then chunk."""
    low = np.searchsorted(chunks.leaf, boxes.leaf, "left").astype(np.int64)
    high = np.searchsorted(chunks.leaf, boxes.leaf, "right").astype(np.int64)
    pieces: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    begin, upto = 0, np.cumsum(high - low)
    while begin < len(low) or not pieces:
        past = upto[begin - 1] if begin else 0
        end = max(int(np.searchsorted(upto, past + _MOST_PAIRS, "right")), begin + 1)
        end = min(end, len(low))
        index, step = _counted((high - low)[begin:end])
        box = index + begin
        pieces.append(_overlaps(chunks, boxes, box, low[box] + step))
        begin = max(end, 1)
    box, chunk, origin, extent = map(np.concatenate, zip(*pieces, strict=True))
    return box, chunk, origin, extent


def _overlaps(
    chunks: Chunks, boxes: Boxes, box: IntArray, chunk: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Keep the (box, chunk) pairs that intersect."""
    origin = np.maximum(boxes.origin[box], chunks.origin[chunk])
    box_end = boxes.origin[box] + boxes.extent[box]
    end = np.minimum(box_end, chunks.origin[chunk] + chunks.extent[chunk])
    kept = (end > origin).all(axis=1)
    return box[kept], chunk[kept], origin[kept], (end - origin)[kept]


def _runs(
    extent: IntArray, strides: IntArray, item: IntArray, gap: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return byte runs that cover the pieces: piece, offset of the first byte, length.

    From the last dim outwards, rows that lie near each other form one run, gaps included. From the
    first dim where they do not, each row is a run of its own.
    """
    run = np.array(item, dtype=np.int64)
    rows = np.ones_like(extent)  # number of runs along each dim
    is_open = np.ones(len(run), dtype=bool)
    for dim in range(extent.shape[1] - 1, -1, -1):
        size, stride = extent[:, dim], strides[:, dim]
        is_open &= (size == 1) | (stride - run <= gap)
        run = np.where(is_open, (size - 1) * stride + run, run)
        rows[:, dim] = np.where(is_open, 1, size)
    piece, row = _counted(rows.prod(axis=1))
    start = np.zeros(len(piece), dtype=np.int64)
    for dim in range(extent.shape[1] - 1, -1, -1):
        count = rows[piece, dim]
        start += row % count * strides[piece, dim]
        row = row // count
    return piece, start, run[piece]


def _merged(
    file: IntArray, begin: IntArray, end: IntArray, file_bytes: IntArray, gap: int, block: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Widen runs to blocks, and join those that touch or lie near each other."""
    if not len(file):
        none = np.zeros(0, dtype=np.int64)
        return none, none, none
    begin = begin // block * block
    end = np.minimum(-(-end // block) * block, file_bytes[file])
    lengths = -(-file_bytes // block) * block + 2 * gap + 1  # so that files never touch
    base = np.cumsum(lengths) - lengths
    low, high = base[file] + begin, base[file] + end
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    is_first = np.ones(len(low), dtype=bool)
    is_first[1:] = low[1:] - high[:-1] > gap
    is_last = np.append(is_first[1:], True)
    file = file[order][is_first]
    return file, low[is_first] - base[file], high[is_last] - base[file]


def _split(
    file: IntArray, begin: IntArray, end: IntArray, most: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Split requests longer than `most`."""
    run, step = _counted(-(-(end - begin) // most))
    first = begin[run] + step * most
    return file[run], first, np.minimum(first + most, end[run])
