"""Compiled programs on disk: the entries of the compile cache, without JAX.

An entry is native code that this process will run, so it is read only from a file of this user, in
a directory that no other user can read or write::

    ROOT/NAME/KEY          NAME: what compiled it, and the processor (`name_of`); KEY: a digest of
                           JAX's key
    16 bytes               _MAGIC
    32 bytes               digest of NAME, JAX's key and the program
    …                      the program, as JAX gives it

A file is written under another name and renamed, so a reader finds all of it or nothing. What is
torn all the same (a host that lost power) or flipped has another digest: it is removed, and counts
as absent. The files of all NAMEs together have a bound; those that were used least recently go
first, and with them what an earlier JAX left.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.hashing import SEAL_BYTES, call_digest, seal
from shoal.paths import make_private

MOST_BYTES = 2 << 30  # of all entries under a root
_LEAST_BYTES = 64 << 10  # a file counts as this at least: quotas limit their number, too
_RECOUNTS = 32  # the files are counted again whenever this part of the bound has been written
_LEAVES = 0.9  # of the bound, so that not every write removes files
_MAGIC = b"shoal program 1\n"
_HEAD = len(_MAGIC) + SEAL_BYTES
_NAME = re.compile(r"jax-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]{32}(\..+)?")  # with more after it: a file that is being written
_END_BYTES = 1 << 20  # of a library, which are hashed at its start and at its end
_LIBRARY = (".so", ".dylib", ".pyd")
# The rows of /proc/cpuinfo that say what code a processor runs, on x86, Arm, RISC-V, POWER and Z.
_PROCESSOR = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU implementer",
    "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features", "isa", "uarch",
    "cpu", "revision", "features",
)  # fmt: skip


def default_root(env: Mapping[str, str]) -> str:
    """Return the directory of the entries of this user.

    Raises:
      OSError: this user has no home directory.
    """
    given = env.get("XDG_CACHE_HOME", "")
    base = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise OSError("this user has no home directory")
    return os.path.join(base, "shoal", "compile")


def name_of(versions: Sequence[str], folders: Iterable[str], processor: str) -> str:
    """Return the directory for what these libraries compile for this processor.

    It names no host, process, job or attempt: the next attempt finds it again, and so do other
    hosts of the same kind.

    Args:
      versions: of JAX and its libraries.
      folders: the directories of the libraries that compile. Two builds of one version differ.

    Raises:
      OSError: a library cannot be read.
    """
    parts = [*versions, processor, *map(_library, sorted(_libraries(folders)))]
    return f"jax-{call_digest(repr(parts).encode()).hex()[:16]}"


def _libraries(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        with os.scandir(folder) as entries:
            yield from (entry.path for entry in entries if entry.name.endswith(_LIBRARY))


def _library(path: str) -> str:
    """Return a library's name, its size, and a digest of its ends: to read all takes seconds."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        ends = call_digest(first + file.read(_END_BYTES)).hex()
    return f"{os.path.basename(path)} {size} {ends}"


def this_processor(path: str = "/proc/cpuinfo") -> str:
    """Return what is known of the model and the instructions of this host's processor."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    rows = [line.partition(":") for line in first.splitlines()]
    known = [f"{row[0].strip()}={row[2].strip()}" for row in rows if row[0].strip() in _PROCESSOR]
    return "\n".join([platform.machine(), *known])


class _File(NamedTuple):
    """A file of the cache, ordered by its last use."""

    used_ns: int
    path: str
    counted_bytes: int


class Entries:
    """The entries of one NAME, which processes of several hosts may read and write. Thread-safe.

    Args:
      root: the directory of all of them.
      name: see `name_of`.
      most_bytes: bound of all entries under `root`, of which each counts as 64 KiB at least. Each
        process that writes can exceed it by a thirty-second, until it counts the files again.

    Raises:
      OSError: its directory cannot be made, or is not this user's alone.
    """

    def __init__(self, root: str, name: str, most_bytes: int = MOST_BYTES) -> None:
        self.path = os.path.join(root, name)
        self._root, self._name, self._most_bytes = root, name, most_bytes
        self._user = os.geteuid()
        self._lock = threading.Lock()
        self._written_bytes = most_bytes  # since the files were counted: not yet
        os.makedirs(root, mode=0o700, exist_ok=True)
        make_private(self.path)

    def read(self, key: str) -> bytes | None:
        """Return the program of a key, or None. An entry that is not whole is removed."""
        path = self._path_of(key)
        try:
            content = self._content(path)
        except FileNotFoundError:
            return None
        except OSError:  # of another user, a link, on a bad block
            content = b""
        program = content[_HEAD:]
        if content[:_HEAD] != self._head(key, program):
            self.remove(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it is the last to go
        return program

    def write(self, key: str, program: bytes) -> None:
        """Store a program, unless its key has one, or it is larger than all may be.

        Raises:
          OSError: it cannot be written.
        """
        path = self._path_of(key)
        if os.path.lexists(path) or len(program) > self._most_bytes * _LEAVES:
            return
        self._make_room(len(program))
        part = f"{path}.{os.getpid()}-{os.urandom(4).hex()}"
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(file, "wb") as stream:
                stream.write(self._head(key, program))
                stream.write(program)
            with contextlib.suppress(FileNotFoundError):  # another process has made room
                os.rename(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def remove(self, key: str) -> None:
        """Remove an entry, if it is there and can be removed."""
        with contextlib.suppress(OSError):
            os.unlink(self._path_of(key))

    def remove_since(self, time_s: float) -> None:
        """Remove the entries that were read or written since then, in seconds since the epoch."""
        for file in self._files():
            if file.used_ns >= time_s * 1e9 and os.path.dirname(file.path) == self.path:
                with contextlib.suppress(OSError):  # another process has removed it
                    os.unlink(file.path)

    def _path_of(self, key: str) -> str:
        return os.path.join(self.path, call_digest(key.encode()).hex())

    def _head(self, key: str, program: bytes) -> bytes:
        """Return how the file of a program begins."""
        return _MAGIC + seal(f"{self._name}\n{key}\n".encode() + program)

    def _content(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
          OSError: it cannot be read, or is not a file of this user.
        """
        with open(path, "rb", opener=_open_entry) as stream:
            there = os.fstat(stream.fileno())
            if not stat.S_ISREG(there.st_mode) or there.st_uid != self._user:
                raise PermissionError(f"{path} is not a file of this user")
            return stream.read()

    def _make_room(self, num_bytes: int) -> None:
        """Remove what was used least recently, if a new entry would exceed the bound."""
        counted_bytes = max(num_bytes, _LEAST_BYTES)
        with self._lock:
            self._written_bytes += counted_bytes
            if self._written_bytes < self._most_bytes / _RECOUNTS:
                return
            self._written_bytes = counted_bytes
            files = sorted(self._files())
            used_bytes = sum(file.counted_bytes for file in files) + counted_bytes
            if used_bytes <= self._most_bytes:
                return
            for file in files:
                if used_bytes <= self._most_bytes * _LEAVES:
                    return
                with contextlib.suppress(OSError):  # another process has removed it
                    os.unlink(file.path)
                used_bytes -= file.counted_bytes

    def _files(self) -> Iterator[_File]:
        """Yield the files of all names; others that lie there are not shoal's."""
        for folder in [entry for entry in _scan(self._root) if _NAME.fullmatch(entry.name)]:
            for entry in _scan(folder.path):
                with contextlib.suppress(OSError):
                    if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        there = entry.stat(follow_symlinks=False)
                        yield _File(there.st_mtime_ns, entry.path, max(there.st_size, _LEAST_BYTES))


def _open_entry(path: str, flags: int) -> int:
    # Without O_NONBLOCK, a pipe in its place would block this process.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
