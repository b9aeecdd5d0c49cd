"""A file system in memory that records what is done, and forgets in a crash what was not synced.

What an fsync of a file has not made durable is old, new or a mix of both after a crash. Of the
names that were given, changed or taken since the host that did it synced the folder, any may be
lost and any may be kept: no order is promised. A rename is lost or kept as one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.checkpoint.disk.storage import Folder, OpenFile


class Names(NamedTuple):
    """Names of a folder given to files or folders, or taken: all or none of them."""

    host: str
    folder: int
    changes: tuple[tuple[str, int | None], ...]


class Content(NamedTuple):
    """A file got other bytes."""

    file: int
    data: bytes


class SyncedFile(NamedTuple):
    file: int


class SyncedNames(NamedTuple):
    host: str
    folder: int


Event = Names | Content | SyncedFile | SyncedNames
ROOT = 0


@dataclass
class Disk:
    """What hosts see now, and all that happened since the disk was whole."""

    contents: dict[int, bytes] = field(default_factory=dict)  # of files
    tables: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})  # of folders
    times: dict[int, float] = field(default_factory=dict)
    now: float = 1000.0
    log: list[Event] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    muted: Callable[[], bool] = lambda: False  # says which syncs of folders do nothing

    def folder(self, path: str, host: str = "one") -> MemoryFolder:
        return MemoryFolder(self, path, host)

    def note(self, event: Event) -> None:
        """Let it happen, and record it."""
        self.log.append(event)
        if isinstance(event, Names):
            _rename(self.tables, event)
        elif isinstance(event, Content):
            self.contents[event.file] = event.data
            self.times[event.file] = self.now

    def frozen(self) -> object:
        """Return all that can be seen, as a value."""

        def look(number: int) -> object:
            if number in self.contents:
                return self.contents[number]
            return tuple((name, look(to)) for name, to in sorted(self.tables[number].items()))

        return look(ROOT)


def _rename(tables: dict[int, dict[str, int]], event: Names) -> None:
    table = tables.setdefault(event.folder, {})
    for name, number in event.changes:
        if number is None:
            table.pop(name, None)
        else:
            table[name] = number


class Crash(NamedTuple):
    """What may be lost when all hosts lose power after `length` events of a log."""

    start: Disk
    log: tuple[Event, ...]
    pending: tuple[int, ...]  # positions of names that may be lost
    versions: dict[int, tuple[bytes, ...]]  # of files whose bytes may be lost: old, mixed, new

    @property
    def num_outcomes(self) -> int:
        count = 2 ** len(self.pending)
        for versions in self.versions.values():
            count *= len(versions)
        return count

    def outcome(self, number: int) -> Disk:
        """Return the disk after the crash; 0 loses all that may be lost, the last one nothing."""
        kept = set()
        for position in self.pending:
            number, bit = divmod(number, 2)
            if bit:
                kept.add(position)
        contents = dict(self.start.contents)
        tables = {key: dict(table) for key, table in self.start.tables.items()}
        for position, event in enumerate(self.log):
            if isinstance(event, Content):
                contents[event.file] = event.data
            elif isinstance(event, Names) and (position in kept or position not in self.pending):
                _rename(tables, event)
        for file, versions in self.versions.items():
            number, choice = divmod(number, len(versions))
            contents[file] = versions[choice]
        for table in list(tables.values()):
            for to in table.values():
                if to not in contents:
                    tables.setdefault(to, {})
        times = dict.fromkeys(contents, 1000.0)
        return Disk(contents, tables, times, numbers=self.start.numbers)


def crash(start: Disk, log: list[Event], length: int) -> Crash:
    """Return the crash after the first `length` events of what happened since `start`."""
    past = tuple(log[:length])
    pending: dict[int, Names] = {}
    versions: dict[int, list[bytes]] = {}
    last = dict(start.contents)
    for position, event in enumerate(past):
        if isinstance(event, Names):
            pending[position] = event
        elif isinstance(event, Content):
            old = last.get(event.file, b"")
            half = len(event.data) // 2
            mixed = event.data[:half] + old[half:]
            zeros = bytes(len(event.data))
            versions.setdefault(event.file, [old]).extend([mixed, zeros, event.data])
            last[event.file] = event.data
        elif isinstance(event, SyncedFile):
            versions.pop(event.file, None)
        else:
            pending = {
                at: one for at, one in pending.items()
                if (one.host, one.folder) != (event.host, event.folder)
            }  # fmt: skip
    distinct = {file: tuple(dict.fromkeys(some)) for file, some in versions.items()}
    return Crash(start, past, tuple(pending), distinct)


class MemoryFolder:
    """A folder of a Disk, as one host uses it. See `storage.Folder`."""

    def __init__(self, disk: Disk, path: str, host: str) -> None:
        self.disk, self.path, self.host = disk, path, host

    def folder(self, name: str) -> Folder:
        return MemoryFolder(self.disk, f"{self.path}/{name}", self.host)

    @property
    def _parts(self) -> list[str]:
        return [part for part in self.path.split("/") if part]

    def _chain(self) -> list[int]:
        """Return the folders from the root down to this one, as far as they exist."""
        chain = [ROOT]
        for name in self._parts:
            number = self.disk.tables[chain[-1]].get(name)
            if number is None:
                break
            chain.append(number)
        return chain

    def _number(self) -> int | None:
        chain = self._chain()
        return chain[-1] if len(chain) == 1 + len(self._parts) else None

    def _table(self) -> dict[str, int]:
        number = self._number()
        return {} if number is None else self.disk.tables[number]

    def _file(self, name: str) -> int:
        try:
            return self._table()[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    def _note_names(self, **changes: int | None) -> None:
        number = self._number()
        if number is None:
            raise FileNotFoundError(self.path)
        self.disk.note(Names(self.host, number, tuple(changes.items())))

    def make(self) -> None:
        for depth, name in enumerate(self._parts):
            parent = self._chain()[depth]
            if name not in self.disk.tables[parent]:
                number = next(self.disk.numbers)
                self.disk.tables[number] = {}
                self.disk.note(Names(self.host, parent, ((name, number),)))
        for parent in self._chain()[-2::-1]:
            self._sync(parent)

    def names(self) -> list[str]:
        return sorted(self._table())

    def read(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        return self.disk.contents[self._file(name)]

    def size(self, name: str) -> int:
        return len(self.read(name))

    def read_at(self, name: str, offset: int, into: memoryview) -> int:
        data = self.read(name)[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def write_new(self, name: str, data: bytes) -> None:
        file = self.open_new(name, len(data))
        file.write(memoryview(data), 0)
        file.finish(len(data))

    def rewrite(self, name: str, data: bytes) -> None:
        number = self._file(name)
        self.disk.note(Content(number, data))
        self.disk.note(SyncedFile(number))

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        if name in self._table():
            raise FileExistsError(name)
        number = next(self.disk.numbers)
        self.disk.note(Content(number, b""))
        self._note_names(**{name: number})
        return _OpenFile(self.disk, number)

    def link(self, old: str, new: str) -> None:
        number = self._file(old)
        if new in self._table():
            raise FileExistsError(new)
        self._note_names(**{new: number})

    def rename(self, old: str, new: str) -> None:
        self._note_names(**{new: self._file(old), old: None})

    def remove(self, name: str) -> None:
        if name in self._table():
            self._note_names(**{name: None})

    def remove_folder(self) -> bool:
        number = self._number()
        if number is None:
            return True
        if self.disk.tables[number]:
            return False
        self.disk.note(Names(self.host, self._chain()[-2], ((self._parts[-1], None),)))
        return True

    def is_file(self) -> bool:
        return False

    def is_link(self) -> bool:
        return False

    def remove_link(self) -> None:
        raise NotImplementedError

    def touch(self, name: str) -> None:
        self.disk.times[self._file(name)] = self.disk.now

    def age_s(self, name: str) -> float:
        return self.disk.now - self.disk.times[self._file(name)]

    def sync(self) -> None:
        number = self._number()
        if number is not None:
            self._sync(number)

    def _sync(self, number: int) -> None:
        if not self.disk.muted():
            self.disk.note(SyncedNames(self.host, number))

    def free_bytes(self) -> int:
        return 1 << 40


class _OpenFile:
    """See `storage.OpenFile`."""

    def __init__(self, disk: Disk, number: int) -> None:
        self.disk, self.number = disk, number
        self.is_direct = True
        self.lock = threading.Lock()

    def write(self, data: memoryview, offset: int) -> None:
        with self.lock:
            old = self.disk.contents[self.number]
            new = old[:offset].ljust(offset, b"\0") + bytes(data) + old[offset + len(data) :]
            self.disk.note(Content(self.number, new))

    def finish(self, num_bytes: int) -> None:
        self.disk.note(Content(self.number, self.disk.contents[self.number][:num_bytes]))
        self.disk.note(SyncedFile(self.number))

    def discard(self) -> None:
        pass
