"""Files as images: header and chunks → memory → disk, hashed on the way.

An *image* is a data file as it will be, block by block, filled from the arrays that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.storage import Folder

__all__ = ["Arena", "FileImage", "Piece", "write_files"]

Array = np.ndarray[Any, Any]


class Piece(NamedTuple):
    """Values that fill a box of a chunk in an image: one shard of what a process writes."""

    begin: int  # of the chunk in the file, bytes
    extent: tuple[int, ...]  # of the chunk
    dtype: np.dtype[Any]  # as it lies in memory, unpacked
    per_byte: int  # 1; 2 or 4 where elements are packed
    where: tuple[slice, ...]  # the box in the chunk that `values` fills
    values: Callable[[], Array]  # C order or not; called once, as late as possible


class FileImage(NamedTuple):
    """One data file before it is written."""

    name: str
    header: bytes
    num_bytes: int
    pieces: tuple[Piece, ...]  # by `begin`


class Arena:
    """Memory that begins at a page, is kept from save to save, and holds whole images."""

    def __init__(self) -> None:
        raise NotImplementedError

    def reserve(self, num_bytes: int) -> None:
        """Have that much memory, touched, before it is needed."""

    def take(self, images: Sequence[FileImage]) -> None:
        """Copy all images in, with several threads. Afterwards their arrays are not needed."""


def write_files(
    folder: Folder,
    images: Sequence[FileImage],
    arena: Arena | None,
    progress: Callable[[int], None],
) -> list[NDArray[np.uint64]]:
    """Write the files durably, and return the hash of every block of each.

    Args:
      arena: holds the images already (`take`); None: the arrays are read while the files are
        written, through a few buffers.
      progress: is told how many more bytes are written, from any thread.
    """
    raise NotImplementedError
