"""Memory for values: of restored arrays, and of saves, which reuse it.

Page faults dominate a restore from a warm page cache; huge pages, where available, make them
several times cheaper.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shoal.checkpoint.blocks.image import Bytes, FileImage, Filler, whole_pages
from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.runtime.system.local_devices import num_cores
from shoal.runtime.system.threads import in_threads

Array = np.ndarray[Any, Any]

_LARGE_BYTES = 4 << 20
_ALIGNED_BYTES = 64  # JAX adopts memory of this alignment on CPU, and copies any other
_SMALL_BYTES = 16 << 10  # below this a copy is cheaper
_MOST_EXTRA_BYTES = 2 << 30


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array in memory of its own; contents are uninitialised."""
    items = math.prod(shape)
    num_bytes = items * dtype.itemsize
    if not dtype.itemsize:  # zero-length strings: `numpy.empty` would make them length 1
        return np.ndarray(shape, dtype, bytearray())
    if num_bytes < _SMALL_BYTES:
        return np.empty(shape, dtype)
    if num_bytes >= _LARGE_BYTES:
        try:
            # Private: writes by a forked process must not be visible here.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no memory for an array of {num_bytes:,} bytes: {error}") from None
        if hasattr(pages, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel does not support it
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
    else:
        memory = np.empty(num_bytes + _ALIGNED_BYTES, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNED_BYTES :]
    return memory[:num_bytes].view(dtype).reshape(shape)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable cyclic garbage collection for the block.

    Thousands of leaves make hundreds of thousands of live objects; rescanning them costs as much
    time as everything else together.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def extra_bytes(most_bytes: int | None) -> int:
    """Return how much memory a restore may use beside its result: a quarter of what is free."""
    if most_bytes is not None:
        return most_bytes
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not available on this system
        return _MOST_EXTRA_BYTES // 4
    return min(_MOST_EXTRA_BYTES, max(free // 4, 64 << 20))


# ---- Reserve and pre-fault memory, and reuse it from save to save.
#
# Page faults dominate the cost of a copy: 0.06 s per GB into memory already touched, 3 s per GB
# into fresh memory (measured).


_WINDOW_BYTES = 8 << 20  # copied by a thread at a time
_MADV_WIPEONFORK = 18  # madvise(2)
_MOST_KEPT = 32  # of the 4 MiB that a save fills at a time; one to a bucket uses as many
_MOST_THREADS = 8  # memory bandwidth is saturated by then


def pages(num_bytes: int) -> Bytes:
    """Return fresh page-aligned memory, which a forked child sees as zeros.

    Uses huge pages where the system has them: disk writes from them are a quarter faster. The
    mapping is private: in a shared one, every page written after a fork would be copied.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(num_bytes, PAGE_BYTES), flags=flags)
    if sys.platform == "linux":
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with contextlib.suppress(OSError):  # a kernel without it
                memory.madvise(advice)
    return np.frombuffer(memory, np.uint8)


@functools.cache
def _kept() -> list[Bytes]:
    """Return the cached buffers that are not in use."""
    return []


def reused_pages(num_bytes: int) -> Bytes:
    """Return memory like `pages`, which is used again once nothing refers to any part of it."""
    memory = None
    with contextlib.suppress(IndexError):
        memory = _kept().pop()
    if memory is None or len(memory) < num_bytes:
        memory = pages(num_bytes)
    view = memory[:num_bytes]
    weakref.finalize(view, _keep, memory).atexit = False
    # A slice of an array refers to the array at the bottom of all views; a buffer ends them.
    return np.frombuffer(view.data, np.uint8)


def _keep(memory: Bytes) -> None:
    if len(_kept()) < _MOST_KEPT:
        _kept().append(memory)


class Arena:
    """Page-aligned memory that holds whole images and is reused from save to save.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._memory: Bytes = np.zeros(0, np.uint8)
        self._held: dict[str, Bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Capacity in bytes."""
        return len(self._memory)

    def reserve(self, num_bytes: int) -> None:
        """Reserve and pre-fault memory, keeping its contents."""
        self._let_go_after_fork()
        if whole_pages(num_bytes) > len(self._memory):
            memory = pages(whole_pages(num_bytes))
            in_threads(_touch, _windows(memory), _num_threads(memory))
            self._memory = memory

    def take(self, images: Sequence[FileImage]) -> None:
        """Copy all images in, with several threads. Their arrays are not needed afterwards."""
        sizes = [whole_pages(image.num_bytes) for image in images]
        self._let_go_after_fork()
        self._held = {}
        if sum(sizes) > len(self._memory):
            self._memory = np.zeros(0, np.uint8)  # freed first: both may not fit
            self._memory = pages(sum(sizes))
        self._held = self._filled(images, sizes)

    def _let_go_after_fork(self) -> None:
        """Replace the memory in a forked child: the parent may be writing it to disk."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._memory, self._held = np.zeros(0, np.uint8), {}

    def _filled(self, images: Sequence[FileImage], sizes: Sequence[int]) -> dict[str, Bytes]:
        work: list[tuple[Filler, Bytes, int]] = []
        held = {}
        offset = 0
        for image, size in zip(images, sizes, strict=True):
            memory = held[image.name] = self._memory[offset : offset + size]
            offset += size
            filler = Filler(image)
            for window in range(0, size, _WINDOW_BYTES):
                work.append((filler, memory[window : window + _WINDOW_BYTES], window))
        in_threads(_fill, work, _num_threads(self._memory[:offset]))
        return held

    def image(self, name: str) -> Bytes:
        """Return the named image of the last `take`, padded to whole pages."""
        return self._held[name]


def _num_threads(memory: Bytes) -> int:
    return max(1, min(_MOST_THREADS, num_cores(), len(memory) // _WINDOW_BYTES))


def _windows(memory: Bytes) -> list[Bytes]:
    return [memory[begin : begin + _WINDOW_BYTES] for begin in range(0, len(memory), _WINDOW_BYTES)]


def _touch(windows: Iterator[Bytes]) -> None:
    for window in windows:
        window[::PAGE_BYTES] = 0


def _fill(work: Iterator[tuple[Filler, Bytes, int]]) -> None:
    for filler, out, begin in work:
        filler.fill(out, begin)
