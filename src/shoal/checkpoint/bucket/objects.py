"""Objects below a prefix: the few requests that a checkpoint needs, and a bucket in memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from shoal.checkpoint.store.interface import Left, OpenFile
from shoal.errors import StorageError


class UnclearError(StorageError):
    """A write may have happened or not: its answer did not come."""


class ObjectInfo(NamedTuple):
    """What a bucket says of an object without its contents."""

    name: str
    bytes: int
    version: str  # other contents have another one; equal contents may have the same
    modified_s: float  # by the bucket's clock


class PrefixContents(NamedTuple):
    """What is below a prefix."""

    infos: list[ObjectInfo]  # of the objects directly there, by name
    folders: list[str]  # the next components of longer prefixes, sorted


class FoundPart(NamedTuple):
    """What a read of a part of an object has found."""

    num_bytes: int  # fewer than asked for: the object ends there
    size: int  # of the whole object


class Objects(Protocol):
    """The objects below one prefix. Names have no slash; `below` leads to longer prefixes.

    Any failure is a `StorageError`, and an `UnclearError` if the request may have been carried out.
    """

    @property
    def url(self) -> str:
        """The address, as messages show it, without credentials."""

    @property
    def server(self) -> str:
        """The server, where it is not the cloud's own; "" otherwise."""

    def limited(self, left: Left) -> Objects:
        """Return the same objects; see `Store.limited`."""

    def below(self, name: str) -> Objects:
        """Return the objects below a longer prefix."""

    def listed(self) -> PrefixContents:
        """Return all that is here, in one request."""

    def listed_below(self, start: str, first: str = "") -> dict[str, list[ObjectInfo]]:
        """Return the objects in all folders here whose names begin with `start`, by folder.

        Those before the folder `first` are left out.
        """

    def info(self, name: str) -> ObjectInfo:
        """Return an object's size, version and time; FileNotFoundError if there is none."""

    def read(self, name: str) -> tuple[bytes, str]:
        """Return an object's contents and version; FileNotFoundError if there is none."""

    def read_at(self, name: str, offset: int, parts: Sequence[memoryview]) -> FoundPart:
        """Fill buffers, one after the other, from `offset`, in one request. Thread-safe.

        Raises:
          FileNotFoundError: there is no such object.
        """

    def put(self, name: str, data: bytes) -> None:
        """Write an object, whole or not at all, in place of any of that name."""

    def put_new(self, name: str, data: bytes) -> None:
        """Write an object if there is none of that name; FileExistsError if perhaps there is."""

    def put_over(self, name: str, data: bytes, version: str) -> None:
        """Write an object if it still has this version; FileExistsError if perhaps it has not."""

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """Write a large object: it appears, whole, when the file is finished."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; they need not exist."""


class _Kept(NamedTuple):
    data: bytes
    version: str
    modified_s: float


class _Bucket:
    """All objects of a bucket in memory, by full name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.kept: dict[str, _Kept] = {}
        self.versions = itertools.count(1)

    def put(self, path: str, data: bytes, allowed: Callable[[_Kept | None], bool]) -> None:
        with self.lock:
            if not allowed(self.kept.get(path)):
                raise FileExistsError(path)
            self.kept[path] = _Kept(bytes(data), str(next(self.versions)), self.clock())


class MemoryObjects:
    """See `Objects`: a bucket in this process's memory, for tests and simulations."""

    def __init__(
        self, url: str = "memory://bucket", *, clock: Callable[[], float] = time.time
    ) -> None:
        self._url, self._bucket = url, _Bucket(clock)

    @property
    def url(self) -> str:
        """See `Objects.url`."""
        return self._url

    @property
    def server(self) -> str:
        """See `Objects.server`."""
        return ""

    def limited(self, left: Left) -> MemoryObjects:
        """See `Objects.limited`."""
        return self

    def below(self, name: str) -> MemoryObjects:
        """See `Objects.below`."""
        there = MemoryObjects(f"{self._url}/{name}")
        there._bucket = self._bucket
        return there

    def _at(self, name: str) -> str:
        return f"{self._url}/{name}"

    def _here(self) -> list[str]:
        """Return what follows this prefix in the names of objects."""
        start = self._at("")
        with self._bucket.lock:
            paths = sorted(self._bucket.kept)
        return [path[len(start) :] for path in paths if path.startswith(start)]

    def listed(self) -> PrefixContents:
        """See `Objects.listed`."""
        folders = {name.partition("/")[0] for name in self._here() if "/" in name}
        return PrefixContents(self._infos(), sorted(folders))

    def _infos(self) -> list[ObjectInfo]:
        infos = []
        for name in self._here():
            kept = self._bucket.kept.get(self._at(name))
            if "/" not in name and kept is not None:
                infos.append(ObjectInfo(name, len(kept.data), kept.version, kept.modified_s))
        return infos

    def _kept(self, name: str) -> _Kept:
        kept = self._bucket.kept.get(self._at(name))
        if kept is None:
            raise FileNotFoundError(self._at(name))
        return kept

    def listed_below(self, start: str, first: str = "") -> dict[str, list[ObjectInfo]]:
        """See `Objects.listed_below`."""
        names = {name.partition("/")[0] for name in self._here() if "/" in name}
        wanted = sorted(name for name in names if name.startswith(start) and name >= first)
        return {name: self.below(name)._infos() for name in wanted}

    def info(self, name: str) -> ObjectInfo:
        """See `Objects.info`."""
        kept = self._kept(name)
        return ObjectInfo(name, len(kept.data), kept.version, kept.modified_s)

    def read(self, name: str) -> tuple[bytes, str]:
        """See `Objects.read`."""
        kept = self._kept(name)
        return kept.data, kept.version

    def read_at(self, name: str, offset: int, parts: Sequence[memoryview]) -> FoundPart:
        """See `Objects.read_at`."""
        kept = self._kept(name)
        num_bytes = scattered(memoryview(kept.data)[offset:], parts)
        return FoundPart(num_bytes, len(kept.data))

    def put(self, name: str, data: bytes) -> None:
        """See `Objects.put`."""
        self._bucket.put(self._at(name), data, lambda _: True)

    def put_new(self, name: str, data: bytes) -> None:
        """See `Objects.put_new`."""
        self._bucket.put(self._at(name), data, lambda kept: kept is None)

    def put_over(self, name: str, data: bytes, version: str) -> None:
        """See `Objects.put_over`."""
        self._bucket.put(
            self._at(name), data, lambda kept: kept is not None and kept.version == version
        )

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """See `Objects.open_new`."""
        return _MemoryFile(self, name, num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """See `Objects.remove`."""
        with self._bucket.lock:
            for name in names:
                self._bucket.kept.pop(self._at(name), None)


def scattered(data: memoryview, parts: Sequence[memoryview]) -> int:
    """Copy data into buffers, one after the other; return the number of bytes copied."""
    done = 0
    for part in parts:
        into = np.frombuffer(part, np.uint8)  # NumPy copies without the interpreter's lock
        from_ = np.frombuffer(data[done : done + len(into)], np.uint8)
        into[: len(from_)] = from_
        done += len(from_)
    return done


class _MemoryFile:
    """See `OpenFile`."""

    def __init__(self, objects: MemoryObjects, name: str, num_bytes: int) -> None:
        self._objects, self._name = objects, name
        self._data = bytearray(num_bytes)

    def write(self, data: memoryview, offset: int) -> None:
        """See `OpenFile.write`."""
        part = data.cast("B")[: max(0, len(self._data) - offset)]
        self._data[offset : offset + len(part)] = part

    def finish(self, num_bytes: int) -> None:
        """See `OpenFile.finish`."""
        self._objects.put(self._name, bytes(self._data[:num_bytes]))

    def discard(self) -> None:
        """See `OpenFile.discard`."""
        self._data = bytearray()
