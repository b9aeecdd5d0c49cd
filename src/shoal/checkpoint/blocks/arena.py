"""Memory that is kept from save to save: to be touched for the first time is what costs.

Measured: a copy into memory that was used before takes 0.06 s a GB, into fresh memory 3 s.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from shoal.checkpoint.blocks.image import Bytes, FileImage, Filler, padded
from shoal.checkpoint.blocks.threads import in_threads
from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.runtime.system.cores import num_cores

_WINDOW_BYTES = 8 << 20  # what a thread takes at a time
_MADV_WIPEONFORK = 18  # madvise(2)
_MOST_KEPT = 8
_MOST_THREADS = 8  # more do not copy faster than memory is


def pages(num_bytes: int) -> Bytes:
    """Return fresh memory that begins at a page, and is zeros in a forked process.

    Large pages where the system has them: a disk takes them a quarter faster. Those are private
    ones; shared with a fork, each would be copied when it is written again.
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
    """Return the buffers of this program that nobody uses now."""
    return []


@contextlib.contextmanager
def kept_pages(num_bytes: int) -> Iterator[Bytes]:
    """Give at least so much memory like `pages`, and keep it for the next one who asks."""
    try:
        memory = _kept().pop()
    except IndexError:
        memory = np.zeros(0, np.uint8)
    if len(memory) < num_bytes:
        memory = pages(num_bytes)
    yield memory
    if len(_kept()) < _MOST_KEPT:
        _kept().append(memory)


class Arena:
    """Memory that begins at a page, is kept from save to save, and holds whole images.

    One thread uses it at a time.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._memory: Bytes = np.zeros(0, np.uint8)
        self._held: dict[str, Bytes] = {}

    @property
    def num_bytes(self) -> int:
        """How much memory it has."""
        return len(self._memory)

    def reserve(self, num_bytes: int) -> None:
        """Have that much memory, touched, before it is needed. What it holds, it still holds."""
        self._let_go_after_fork()
        if padded(num_bytes) > len(self._memory):
            memory = pages(padded(num_bytes))
            in_threads(_touch, _windows(memory), _num_threads(memory))
            self._memory = memory

    def take(self, images: Sequence[FileImage]) -> None:
        """Copy all images in, with several threads. Afterwards their arrays are not needed."""
        sizes = [padded(image.num_bytes) for image in images]
        self._let_go_after_fork()
        self._held = {}
        if sum(sizes) > len(self._memory):
            self._memory = np.zeros(0, np.uint8)  # let go first: both may be too much
            self._memory = pages(sum(sizes))
        self._held = self._filled(images, sizes)

    def _let_go_after_fork(self) -> None:
        """A fork shares the memory of its parent, which may be writing it to disk."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._memory, self._held = np.zeros(0, np.uint8), {}

    def _filled(self, images: Sequence[FileImage], sizes: Sequence[int]) -> dict[str, Bytes]:
        work: list[tuple[Filler, Bytes, int]] = []
        held = {}
        at = 0
        for image, size in zip(images, sizes, strict=True):
            memory = held[image.name] = self._memory[at : at + size]
            at += size
            filler = Filler(image)
            for window in range(0, size, _WINDOW_BYTES):
                work.append((filler, memory[window : window + _WINDOW_BYTES], window))
        in_threads(_fill, work, min(_num_threads(self._memory[:at]), len(work)))
        return held

    def image(self, name: str) -> Bytes:
        """Return the image of that name, which was taken last, up to its last page."""
        return self._held[name]


def _num_threads(memory: Bytes) -> int:
    return max(1, min(_MOST_THREADS, num_cores(), len(memory) // _WINDOW_BYTES))


def _windows(memory: Bytes) -> list[Bytes]:
    return [memory[at : at + _WINDOW_BYTES] for at in range(0, len(memory), _WINDOW_BYTES)]


def _touch(windows: Iterator[Bytes]) -> None:
    for window in windows:
        window[::PAGE_BYTES] = 0


def _fill(work: Iterator[tuple[Filler, Bytes, int]]) -> None:
    for filler, out, begin in work:
        filler.fill(out, begin)
