"""Images: the contents of a data file, assembled window by window from the arrays it holds."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.format.records import BLOCK_BYTES, PAGE_BYTES
from shoal.hashing import block_hash, block_hasher
from shoal.plan.shards import boxes

Array = np.ndarray[Any, Any]
Bytes = NDArray[np.uint8]

# Copy bits: integers of the same size copy fastest, and NaNs keep their payload.
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Piece(NamedTuple):
    """Values that fill a box of a chunk in an image: one shard of what this process writes."""

    begin: int  # of the chunk in the file, bytes
    extent: tuple[int, ...]  # of the chunk
    dtype: np.dtype[Any]  # in memory, unpacked
    per_byte: int  # 1; 2, 4 or 8 where elements are packed
    where: tuple[slice, ...]  # the box in the chunk that `values` fills
    values: Callable[[], Array]  # in any memory order; called once, as late as possible


class FileImage(NamedTuple):
    """The planned contents of one data file."""

    name: str
    header: bytes
    num_bytes: int
    pieces: tuple[Piece, ...]  # by `begin`


def whole_pages(num_bytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class Filler:
    """Fill windows of one image; several threads may fill different windows at once.

    Every byte is filled by exactly one window, so values that span several windows are read once
    and released after the last of them.
    """

    def __init__(self, image: FileImage) -> None:
        self._header = image.header
        self._pieces = [piece for piece in image.pieces if _num_bytes(piece)]
        self._begins = [piece.begin for piece in self._pieces]
        self._ends = [piece.begin + _num_bytes(piece) for piece in self._pieces]
        self._spans = [_span(piece) for piece in self._pieces]
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}

    def fill(self, out: Bytes, begin: int) -> None:
        """Fill `out` with the image's bytes from `begin` on, and with zeros past its end."""
        end = begin + len(out)
        header = self._header
        filled = begin
        if begin < len(header):
            filled = min(end, len(header))
            out[: filled - begin] = np.frombuffer(header, np.uint8)[begin:filled]
        index = bisect.bisect_right(self._ends, begin)
        last = bisect.bisect_left(self._begins, end)
        while index < last:
            first, low = index, self._begins[index]
            while index < last and self._begins[index] == low:
                index += 1
            low, high = max(begin, low), min(end, self._ends[first])
            if low < high:
                if low > filled:
                    out[filled - begin : low - begin] = 0
                self._fill_chunk(range(first, index), out[low - begin : high - begin], low)
                filled = high
        out[filled - begin :] = 0

    def _fill_chunk(self, numbers: range, out: Bytes, low: int) -> None:
        """Fill a byte range of one chunk from its pieces."""
        piece = self._pieces[numbers[0]]
        skip = low - piece.begin
        if piece.per_byte == 1:
            for index in numbers:
                self._fill_piece(index, out, skip)
            return
        per_byte = piece.per_byte
        loose = np.zeros(len(out) * per_byte, np.uint8)
        for index in numbers:
            self._fill_piece(index, loose, skip * per_byte)
        _pack(loose, per_byte, out)

    def _fill_piece(self, index: int, out: Bytes, skip: int) -> None:
        """Fill part of a chunk's byte range (unpacked, from byte `skip` on) from one piece."""
        piece, span = self._pieces[index], self._spans[index]
        begin, end = max(span.begin, skip), min(span.end, skip + len(out))
        if begin >= end:
            return
        is_all = begin == span.begin and end == span.end
        values = piece.values() if is_all else self._values(index, end - begin)
        run = out[begin - skip : end - skip]
        if span.is_solid and values.flags.c_contiguous:
            flat = _bits(values, piece.dtype).reshape(-1).view(np.uint8)
            run[:] = flat[begin - span.begin : end - span.begin]
        else:
            _scatter(piece, values, run, begin)

    def _values(self, index: int, num_bytes: int) -> Array:
        """Return a piece's values and release them once all bytes of its span are filled."""
        with self._lock:
            held = self._held.get(index)
            if held is None:
                span = self._spans[index]
                held = self._held[index] = _Held(span.end - span.begin)
            held.left_bytes -= num_bytes
            if not held.left_bytes:
                del self._held[index]
        with held.lock:  # the first thread reads; the others wait
            if held.values is None:
                held.values = self._pieces[index].values()
            return held.values


class _Held:
    """Values shared by several windows."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes
        self.lock = threading.Lock()
        self.values: Array | None = None


class _Span(NamedTuple):
    """The byte range of a piece in its chunk, unpacked."""

    begin: int
    end: int
    is_solid: bool  # contiguous: every byte of the range is the piece's


def _span(piece: Piece) -> _Span:
    stride = piece.dtype.itemsize
    begin, end, items = 0, stride, 1
    for cut, size in reversed(list(zip(piece.where, piece.extent, strict=True))):
        low, high, _ = cut.indices(size)
        begin += low * stride
        end += (high - 1) * stride
        items *= max(high - low, 0)
        stride *= size
    if not items:
        return _Span(0, 0, is_solid=True)
    return _Span(begin, end, end - begin == items * piece.dtype.itemsize)


def _num_bytes(piece: Piece) -> int:
    return -(-math.prod(piece.extent) * piece.dtype.itemsize // piece.per_byte)


def _bits(values: Array, dtype: np.dtype[Any], as_bytes: bool = False) -> Array:
    """Return values as little-endian words of the same size, or as bytes if the size is odd.

    In the second case the result has one more dim.
    """
    if values.dtype.byteorder == ">":
        values = values.astype(dtype.newbyteorder("<"))
    word = _WORDS.get(dtype.itemsize)
    if word is not None and not as_bytes:
        return values.view(word)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(*values.shape, -1)


def _scatter(piece: Piece, values: Array, out: Bytes, skip: int) -> None:
    """Copy the part of a box that falls into a byte range of the chunk."""
    # A window may begin inside an element: pairs of words are aligned to a word.
    is_cut = bool(skip % piece.dtype.itemsize or len(out) % piece.dtype.itemsize)
    bits = _bits(values, piece.dtype, as_bytes=is_cut)
    extent = piece.extent + bits.shape[len(piece.extent) :]
    item_bytes = bits.dtype.itemsize
    box = [part.indices(size)[:2] for part, size in zip(piece.where, piece.extent, strict=True)]
    box += [(0, size) for size in extent[len(box) :]]
    run = out.view(bits.dtype)
    first, start = skip // item_bytes, 0
    for part in boxes(extent, first, first + len(run)):
        sizes = [high - low for low, high in part]
        stop = start + math.prod(sizes)
        target = run[start:stop].reshape(sizes)
        start = stop
        into, source = [], []
        for (low, high), (begin, end) in zip(part, box, strict=True):
            lower, upper = max(low, begin), min(high, end)
            into.append(slice(lower - low, max(lower, upper) - low))
            source.append(slice(lower - begin, max(lower, upper) - begin))
        target[tuple(into)] = bits[tuple(source)]


def _pack(loose: Bytes, per_byte: int, out: Bytes) -> None:
    """Pack `per_byte` elements into each byte, the first into the lowest bits."""
    bits = 8 // per_byte
    mask = (1 << bits) - 1
    np.bitwise_and(loose[::per_byte], mask, out=out)
    for index in range(1, per_byte):
        out |= (loose[index::per_byte] & mask) << (index * bits)


# ---- Hash the blocks of a file as they are written and read.


def digests(parts: Sequence[Bytes]) -> Iterator[int]:
    """Yield the hash of each block of the concatenation of several buffers."""
    state, room = block_hasher(), BLOCK_BYTES
    for part in parts:
        offset = 0
        while offset < len(part):
            run = part[offset : offset + room].data
            offset += len(run)
            if len(run) == BLOCK_BYTES:
                yield block_hash(run)
                continue
            state.update(run)
            room -= len(run)
            if not room:
                yield state.intdigest()
                state, room = block_hasher(), BLOCK_BYTES
    if room < BLOCK_BYTES:
        yield state.intdigest()
