"""Allocate memory for restored arrays: cheap to fault in, and aligned so that devices can adopt it.

Page faults dominate a restore from a warm page cache; huge pages, where available, make them
several times cheaper.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

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
