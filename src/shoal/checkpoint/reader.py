"""Reading what is committed: every block that is read is verified before a value is returned."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.checkpoint.format import Commit, Index, Manifest
from shoal.checkpoint.storage import Folder

__all__ = ["Checkpoint", "Want", "open_checkpoint", "open_folder", "read", "verify"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A committed checkpoint; its manifest and index are verified."""

    folder: Folder
    commit: Commit
    manifest: Manifest
    index: Index


class Want(NamedTuple):
    """A box of a leaf, and the memory that it goes to."""

    leaf: int
    origin: tuple[int, ...]
    out: Array  # its shape is the box's extent; dtype as stored, unpacked; need not be contiguous


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open what is committed at `path`.

    Raises:
      NotCommitted: nothing is.
      CorruptCheckpoint, UnsupportedCheckpoint, StorageError.
    """
    raise NotImplementedError


def open_folder(folder: Folder) -> Checkpoint:
    """Do what `open_checkpoint` does."""
    raise NotImplementedError


def read(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    *,
    most_bytes: int,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Fill the memory of all wants; return the bytes read.

    Args:
      most_bytes: of memory beside that of the wants.

    Raises:
      CorruptCheckpoint: names file, leaf and offset.
    """
    raise NotImplementedError


def verify(checkpoint: Checkpoint, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Read every byte of every file; return what is wrong, in words. Raises nothing for it."""
    raise NotImplementedError
