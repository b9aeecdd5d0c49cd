"""Write images to files: header and chunks → memory → disk, hashed on the way.

An *image* is the contents of a data file, block by block, assembled from the arrays it holds.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.blocks.image import Bytes, FileImage, Filler, digests, whole_pages
from shoal.checkpoint.blocks.memory import Arena, reused_pages
from shoal.checkpoint.format.records import BLOCK_BYTES
from shoal.checkpoint.store.interface import OpenFile, Store
from shoal.errors import ShoalError
from shoal.runtime.system.local_devices import num_cores
from shoal.runtime.system.threads import in_threads

# Few, small buffers: faulting one in costs more than writing it.
_WINDOW_BYTES = 4 << 20  # per write; a multiple of BLOCK_BYTES
_WRITES = 4  # in flight at a time
_MOST_FILLS = 4

Hashes = NDArray[np.uint64]


class _Window(NamedTuple):
    """A byte range of a file that one thread writes at a time."""

    file: OpenFile
    hashes: Hashes  # of the whole file
    begin: int
    num_bytes: int  # up to the last page of the file
    real_bytes: int  # without padding, which is truncated at the end
    source: Filler | Bytes  # what fills it, or the memory that holds it already
    turn: threading.Lock  # to fill and hash: the writing thread needs a core, too


def write_files(
    store: Store,
    images: Sequence[FileImage],
    arena: Arena | None,
    progress: Callable[[int], None],
) -> list[Hashes]:
    """Write the files durably, and return the hash of every block of each.

    Their names become durable when the caller writes the part.
    If anything fails, none of the files remains.

    Args:
      arena: already holds the images (`take`); None: the arrays are read while the files are
        written, through a few buffers.
      progress: called with the number of further bytes written, from any thread.
    """
    opened: list[OpenFile] = []
    hashes = [np.zeros(-(-image.num_bytes // BLOCK_BYTES), np.uint64) for image in images]
    fills = max(1, min(_MOST_FILLS, num_cores() // 2))
    # Not a semaphore: that is Python code, and an interrupt inside it would lose a slot for ever.
    turns = itertools.cycle([threading.Lock() for _ in range(fills)])
    try:
        work: list[_Window] = []
        for image, own in zip(images, hashes, strict=True):
            opened.append(store.open_new(image.name, image.num_bytes))
            work += _windows(image, file=opened[-1], hashes=own, arena=arena, turns=turns)

        def write(windows: Iterator[_Window]) -> None:
            for window in windows:
                _write(window)
                progress(window.real_bytes)

        in_threads(write, work, _WRITES + fills)
        for image, file in zip(images, opened, strict=True):
            file.finish(image.num_bytes)
    except BaseException:
        for image, file in zip(images, opened, strict=False):
            file.discard()
            with contextlib.suppress(ShoalError, OSError):
                store.remove(image.name)
        raise
    return hashes


def _windows(
    image: FileImage,
    file: OpenFile,
    hashes: Hashes,
    arena: Arena | None,
    turns: Iterator[threading.Lock],
) -> Iterator[_Window]:
    size = whole_pages(image.num_bytes)
    source = arena.image(image.name) if arena else Filler(image)
    for begin in range(0, size, _WINDOW_BYTES):
        num_bytes = min(_WINDOW_BYTES, size - begin)
        real_bytes = min(num_bytes, image.num_bytes - begin)
        yield _Window(file, hashes, begin, num_bytes, real_bytes, source, turn=next(turns))


def _write(window: _Window) -> None:
    begin, end, source = window.begin, window.begin + window.num_bytes, window.source
    with window.turn:
        if isinstance(source, Filler):
            memory = reused_pages(window.num_bytes)
            source.fill(memory, begin)
        else:
            memory = source[begin:end]
        hashes = list(digests([memory[: window.real_bytes]]))
        first = begin // BLOCK_BYTES
        window.hashes[first : first + len(hashes)] = hashes
    # The last page is written whole, and truncated when the file is finished.
    window.file.write(memory.data, begin)
