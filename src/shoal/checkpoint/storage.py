"""A folder of files: the few operations that a checkpoint needs, each with a meaning after a crash.

Whatever the system refuses is a `StorageError` with path and errno (`StorageFull` if it is full).
A test may put another `Folder` in its place that records, fails or forgets.
"""

from __future__ import annotations

import os
from typing import Protocol

from shoal.checkpoint.format import PAGE_BYTES

__all__ = ["Folder", "LocalFolder", "OpenFile", "PAGE_BYTES"]


class OpenFile(Protocol):
    """A new file that is being written."""

    @property
    def is_direct(self) -> bool:
        """Writes pass the page cache by: memory, offset and length are multiples of PAGE_BYTES."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. From several threads at once, if you like."""

    def finish(self, num_bytes: int) -> None:
        """Cut the file to its length, make it durable (fsync) and close it."""

    def discard(self) -> None:
        """Close it, whatever is there."""


class Folder(Protocol):
    """One folder. Names are of its own files, never paths."""

    @property
    def path(self) -> str: ...
    def folder(self, name: str) -> Folder:
        """A folder in it, which may not exist yet."""
    def make(self) -> None:
        """Make the folder and the parents that are missing, durably; one that is there is fine."""
    def names(self) -> list[str]:
        """What is in it, sorted. A folder that does not exist is empty."""
    def read(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        """Return a whole file; FileNotFoundError if there is none."""
    def size(self, name: str) -> int:
        """Return the bytes of a file; FileNotFoundError if there is none."""
    def read_at(self, name: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; return how many bytes there were. From several threads."""
    def write_new(self, name: str, data: bytes) -> None:
        """Write a new file durably (fsync). FileExistsError if there is one."""
    def rewrite(self, name: str, data: bytes) -> None:
        """Write the content of a file that exists, durably; FileNotFoundError if there is none."""
    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """Begin a large new file. FileExistsError if there is one."""
    def link(self, old: str, new: str) -> None:
        """Give a file a second name. FileExistsError, FileNotFoundError; else it is there."""
    def rename(self, old: str, new: str) -> None:
        """Give a file another name; what bore that is gone. FileNotFoundError."""
    def remove(self, name: str) -> None:
        """Remove a file; none is fine."""
    def remove_folder(self) -> bool:
        """Remove this folder if it is empty; say whether it is gone."""
    def touch(self, name: str) -> None:
        """Set a file's time of change to now. FileNotFoundError."""
    def age_s(self, name: str) -> float:
        """Seconds since a file's time of change, by the clock of the storage. FileNotFoundError."""
    def sync(self) -> None:
        """Make the names in it durable (fsync of the folder)."""
    def free_bytes(self) -> int:
        """How much may still be written here (or where the folder would be made)."""


class LocalFolder:
    """A folder of a file system that has link and fsync."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        raise NotImplementedError
