"""Fresh memory for what is restored: quickly touched, and placed so that devices can take it over.

Most of the time of a restore from a warm cache goes into touching memory for the first time;
large pages make that a few times faster where the system has them.
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
_ALIGNED_BYTES = 64  # JAX shares such memory with its CPU devices, and copies any other
_SMALL_BYTES = 16 << 10  # a copy is cheaper than keeping them
_MOST_EXTRA_BYTES = 2 << 30


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array whose memory nobody else has; what it holds is anything."""
    items = math.prod(shape)
    num_bytes = items * dtype.itemsize
    if not dtype.itemsize:  # text of length 0, of which `numpy.empty` makes length 1
        return np.ndarray(shape, dtype, bytearray())
    if num_bytes < _SMALL_BYTES:
        return np.empty(shape, dtype)
    if num_bytes >= _LARGE_BYTES:
        try:
            # Private: what a forked process writes to it must not show here.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no memory for an array of {num_bytes:,} bytes: {error}") from None
        if hasattr(pages, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
    else:
        memory = np.empty(num_bytes + _ALIGNED_BYTES, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNED_BYTES :]
    return memory[:num_bytes].view(dtype).reshape(shape)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no cyclic garbage inside.

    Thousands of leaves make hundreds of thousands of objects that all live on. To look through
    them again and again costs as much time as all else together.
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
    except (ValueError, OSError):  # not on this system
        return _MOST_EXTRA_BYTES // 4
    return min(_MOST_EXTRA_BYTES, max(free // 4, 64 << 20))
