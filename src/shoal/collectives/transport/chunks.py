"""Scattered bytes, cut into chunks of few fixed sizes.

A device program is compiled for one size. Two sizes suffice: the large one carries most bytes with
little overhead, the small one keeps a short value, or a short rest, from costing a large one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

Buffer = Any  # C-contiguous, with the buffer protocol: bytes, a memoryview, an array
ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

LARGE_BYTES = 4 << 20
SMALL_BYTES = 256 << 10
CHUNKS = (LARGE_BYTES, SMALL_BYTES)
_ALIGNED_TO = 64  # on CPU, JAX adopts host arrays of this alignment
_MOST_SMALL = 4  # this many small chunks cost about as much as a large one


class Run(NamedTuple):
    """Consecutive chunks of one size; the last may be partly filled."""

    begin: int  # of the first chunk, byte offset in the value
    chunk_bytes: int
    num_chunks: int

    @property
    def begins(self) -> range:
        """Byte offset of each chunk in the value."""
        return range(self.begin, self.begin + self.num_chunks * self.chunk_bytes, self.chunk_bytes)


def runs(num_bytes: int) -> tuple[Run, ...]:
    """Cut a value into large chunks and, for the rest, a few small ones or one large one.

    >>> [(run.chunk_bytes >> 10, run.num_chunks) for run in runs(9 << 20)]
    [(4096, 2), (256, 4)]
    >>> [(run.chunk_bytes >> 10, run.num_chunks) for run in runs((5 << 20) + 1)]
    [(4096, 2)]
    """
    large, rest = divmod(num_bytes, LARGE_BYTES)
    small = -(-rest // SMALL_BYTES)
    if small > _MOST_SMALL:
        large, small = large + 1, 0
    both = [Run(0, LARGE_BYTES, large), Run(large * LARGE_BYTES, SMALL_BYTES, small)]
    return tuple(run for run in both if run.num_chunks)


class Bytes:
    """Several buffers, read and written as one. Only what is requested is copied.

    >>> value = Bytes([b"sho", b"al"])
    >>> value.read(1, 4).tobytes()
    b'hoal'
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        views = [_view(buffer) for buffer in buffers]
        self._views = [view for view in views if view.size]
        self._begins = list(accumulate((view.size for view in self._views), initial=0))

    @property
    def num_bytes(self) -> int:
        """Total size in bytes."""
        return self._begins[-1]

    def read(self, begin: int, num_bytes: int, place: ByteArray | None = None) -> ByteArray:
        """Return the bytes from `begin`, zero-padded past the end of the value.

        A view if they are in one buffer with an alignment that a CPU device can read; else a copy,
        in `place` if given.
        """
        pieces = [view[first:last] for view, first, last in self._pieces(begin, num_bytes)]
        if len(pieces) == 1 and pieces[0].size == num_bytes and _misfit(pieces[0]) == 0:
            return pieces[0]
        joined = aligned(num_bytes) if place is None else place[:num_bytes]
        joined[self.fill(joined, begin) :] = 0
        return joined

    def fill(self, place: ByteArray, begin: int) -> int:
        """Copy bytes from `begin` into `place` until it is full; return how many."""
        end = 0
        for view, first, last in self._pieces(begin, place.size):
            place[end : end + last - first] = view[first:last]
            end += last - first
        return end

    def pieces(self) -> Iterator[tuple[int, ByteArray]]:
        """Yield each buffer with its offset."""
        yield from zip(self._begins, self._views, strict=False)

    def write(self, begin: int, values: ByteArray) -> None:
        """Write `values` at `begin`; excess bytes are dropped."""
        place = 0
        for view, first, last in self._pieces(begin, values.size):
            view[first:last] = values[place : place + last - first]
            place += last - first

    def _pieces(self, begin: int, num_bytes: int) -> Iterator[tuple[ByteArray, int, int]]:
        end = min(begin + num_bytes, self.num_bytes)
        index = bisect_right(self._begins, begin) - 1
        while begin < end:
            view, start = self._views[index], self._begins[index]
            last = min(view.size, end - start)
            yield view, begin - start, last
            begin, index = start + last, index + 1


class Outgoing:
    """A value sent chunk by chunk; a chunk stays valid until the next but one is read.

    Construct it in the caller's thread: a new thread's memory is fresh, with a fault for each page.
    """

    def __init__(self, value: Bytes) -> None:
        self._value = value
        sizes = [
            run.chunk_bytes for run in runs(value.num_bytes) for _ in range(min(2, run.num_chunks))
        ]
        self._places = [aligned(sizes[0]) for _ in sizes[:2]]  # the first are the largest

    def read(self, begin: int, num_bytes: int) -> ByteArray:
        """Return a chunk, as `Bytes.read` does."""
        self._places.reverse()
        fits = self._places and self._places[0].size >= num_bytes
        return self._value.read(begin, num_bytes, self._places[0] if fits else None)


def aligned(num_bytes: int) -> ByteArray:
    """Return memory aligned for CPU devices."""
    memory = np.empty(num_bytes + _ALIGNED_TO, np.uint8)
    return memory[-_misfit(memory) % _ALIGNED_TO :][:num_bytes]


def _misfit(array: ByteArray) -> int:
    return int(array.ctypes.data) % _ALIGNED_TO


def _view(buffer: Buffer) -> ByteArray:
    """Return an array as bytes: not every dtype has the buffer protocol."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    flat = memoryview(buffer)
    return np.frombuffer(flat, np.uint8) if flat.nbytes else np.empty(0, np.uint8)
