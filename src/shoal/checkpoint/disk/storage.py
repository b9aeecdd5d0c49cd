"""Folders of files: the few operations a checkpoint needs, each with a meaning after a crash.

Any failure of the system is a `StorageError` with path and errno (`StorageFullError` if out of
space). Tests may substitute a `Folder` that records, fails or loses writes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from errno import EBUSY, EEXIST, EFBIG, EINVAL, EISDIR, ENOTDIR, ENOTEMPTY, ENOTSUP
from typing import Protocol

from shoal.checkpoint.disk.direct import DirectFile
from shoal.checkpoint.disk.os_errors import storage_error, write_all
from shoal.checkpoint.store.interface import OpenFile
from shoal.paths import dangling_link, free_bytes_at, local_path

_TRIES = 100  # to make a folder that other processes remove concurrently


class Folder(Protocol):
    """One directory. Names are those of its own files, never paths."""

    @property
    def path(self) -> str: ...
    def folder(self, name: str) -> Folder:
        """A subfolder, which may not exist yet."""

    def make(self) -> None:
        """Create the directory and missing parents, durably; an existing directory is not an
        error."""

    def names(self) -> list[str]:
        """The names in it, sorted. A directory that does not exist is empty; a link to one is a
        StorageError."""

    def read(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        """Return the contents of a file; FileNotFoundError if there is none."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; FileNotFoundError if there is none."""

    def read_at(self, name: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; return the number of bytes read. Thread-safe."""

    def write_new(self, name: str, data: bytes) -> None:
        """Write a new file durably (fsync). FileExistsError; FileNotFoundError without
        directory."""

    def rewrite(self, name: str, data: bytes) -> None:
        """Replace the contents of an existing file, durably; FileNotFoundError if there is none.

        The file is truncated only after the new bytes are written.
        """

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """Create a large file for writing. FileExistsError if it exists."""

    def link(self, old: str, new: str) -> None:
        """Hard-link a file under a second name. FileExistsError, FileNotFoundError."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing any file of that name. FileNotFoundError."""

    def remove(self, name: str) -> None:
        """Remove a file; it need not exist."""

    def remove_folder(self) -> bool:
        """Remove this directory if it is empty and not a link; return whether it is gone."""

    def is_file(self) -> bool:
        """Is this a file, or a link to one, and no directory?"""

    def is_link(self) -> bool:
        """Is this a symbolic link to another folder?"""

    def remove_link(self) -> None:
        """Remove the link, durably, but not its target. It need not exist."""

    def touch(self, name: str) -> None:
        """Set a file's modification time to now. FileNotFoundError."""

    def age_s(self, name: str) -> float:
        """Seconds since a file was modified, by the storage's clock; negative if in the future.
        FileNotFoundError.
        """

    def sync(self) -> None:
        """Make the names in it durable (fsync of the folder). A directory that is gone has none."""

    def free_bytes(self) -> int | None:
        """Free space here, or where the directory would be created; None: unknown."""


class LocalFolder:
    """A directory on a file system with hard links and fsync."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(local_path(path))

    def __repr__(self) -> str:
        return f"LocalFolder({self._path!r})"

    @property
    def path(self) -> str:
        """Its absolute path."""
        return self._path

    def folder(self, name: str) -> LocalFolder:
        """See `Folder.folder`."""
        return LocalFolder(self._at(name))

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)

    def make(self) -> None:
        """See `Folder.make`."""
        for left in reversed(range(_TRIES)):
            try:
                return self._make()
            except FileNotFoundError as error:  # a parent was removed concurrently
                if not left:
                    raise storage_error(error, self._path, "make the directory") from error
        return None

    def _make(self) -> None:
        missing = []
        path = self._path
        while not os.path.isdir(path):  # at the latest, / is one
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with _refusals(path, "make the directory", FileNotFoundError):
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.mkdir(path)
                if not stat.S_ISDIR(os.stat(path).st_mode):
                    raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), path)
        changed = {os.path.dirname(path) for path in missing}
        # An existing folder may have been made by a process that has not reached the fsync of its
        # parent yet. A history and its step may both be that new.
        parent = os.path.dirname(self._path)
        above = {parent, os.path.dirname(parent)}
        for path in sorted(changed | above, key=len, reverse=True):  # inner before outer
            with _refusals(path, "fsync the directory", FileNotFoundError):
                try:
                    _sync_folder(path)
                except PermissionError:  # a parent made by another user long ago
                    if path in changed:
                        raise

    def names(self) -> list[str]:
        """See `Folder.names`."""
        with _refusals(self._path, "list the directory"):
            try:
                return sorted(os.listdir(self._path))
            except FileNotFoundError:
                if dangling_link(self._path):  # to a volume that is not mounted, for example
                    raise
                return []
        return []

    def read(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        """See `Folder.read`."""
        path = self._at(name)
        with _refusals(path, "read", FileNotFoundError), _open_to_read(path) as fd:
            if os.fstat(fd).st_size > most_bytes:
                raise OSError(EFBIG, f"more than {most_bytes:,} bytes")
            parts = []
            while part := os.read(fd, 1 << 30):
                parts.append(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        return b""

    def size(self, name: str) -> int:
        """See `Folder.size`."""
        path = self._at(name)
        with _refusals(path, "look at", FileNotFoundError), _open_to_read(path) as fd:
            return os.fstat(fd).st_size
        return 0

    def read_at(self, name: str, offset: int, into: memoryview) -> int:
        """See `Folder.read_at`."""
        path = self._at(name)
        done = 0
        with _refusals(path, "read", FileNotFoundError), _open_to_read(path) as fd:
            while done < len(into) and (more := os.preadv(fd, [into[done:]], offset + done)):
                done += more
        return done

    def write_new(self, name: str, data: bytes) -> None:
        """See `Folder.write_new`."""
        path = self._at(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        known = (FileExistsError, FileNotFoundError)
        with _refusals(path, "write", *known, needed_bytes=len(data)):
            fd = os.open(path, flags, 0o666)
            try:
                try:
                    write_all(fd, memoryview(data), 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise

    def rewrite(self, name: str, data: bytes) -> None:
        """See `Folder.rewrite`."""
        path = self._at(name)
        with _refusals(path, "write", FileNotFoundError, needed_bytes=len(data)):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                # Even equal bytes: their writer may not have reached the fsync, or it failed, and
                # then another fsync would succeed over data that was never written.
                write_all(fd, memoryview(data), 0)
                os.ftruncate(fd, len(data))
                os.fsync(fd)
            finally:
                os.close(fd)

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """See `Folder.open_new`."""
        path = self._at(name)
        with _refusals(path, "write", FileExistsError, needed_bytes=num_bytes):
            return DirectFile(path, num_bytes)
        raise FileExistsError(EEXIST, os.strerror(EEXIST), path)

    def link(self, old: str, new: str) -> None:
        """See `Folder.link`."""
        path = self._at(new)
        with _refusals(path, "link", FileExistsError, FileNotFoundError):
            os.link(self._at(old), path)

    def rename(self, old: str, new: str) -> None:
        """See `Folder.rename`."""
        path = self._at(old)
        with _refusals(path, "rename", FileNotFoundError):
            os.replace(path, self._at(new))

    def remove(self, name: str) -> None:
        """See `Folder.remove`."""
        path = self._at(name)
        with _refusals(path, "remove"), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_folder(self) -> bool:
        """See `Folder.remove_folder`."""
        with _refusals(self._path, "remove the directory"):
            try:
                os.rmdir(self._path)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno in (ENOTEMPTY, EEXIST, EBUSY) or self.is_link():
                    return False
                raise
            return True
        return False

    def is_file(self) -> bool:
        """See `Folder.is_file`."""
        return os.path.isfile(self._path)

    def is_link(self) -> bool:
        """See `Folder.is_link`."""
        return os.path.islink(self._path)

    def remove_link(self) -> None:
        """See `Folder.remove_link`."""
        with _refusals(self._path, "remove the link"), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
            _sync_folder(os.path.dirname(self._path))

    def touch(self, name: str) -> None:
        """See `Folder.touch`."""
        path = self._at(name)
        with _refusals(path, "touch", FileNotFoundError):
            os.utime(path)

    def age_s(self, name: str) -> float:
        """See `Folder.age_s`."""
        path = self._at(name)
        with _refusals(path, "look at", FileNotFoundError):
            changed = os.stat(path).st_mtime
            return self._now() - changed
        return 0.0

    def _now(self) -> float:
        """Return the time by the clock that stamps new files: on a network, the server's."""
        path = self._at(f"tmp-000000000000-{secrets.token_hex(4)}")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            raise
        except OSError:  # read-only on this host
            return time.time()
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)

    def sync(self) -> None:
        """See `Folder.sync`."""
        with _refusals(self._path, "fsync the directory"), contextlib.suppress(FileNotFoundError):
            _sync_folder(self._path)

    def free_bytes(self) -> int | None:
        """See `Folder.free_bytes`."""
        with _refusals(self._path, "look at"):
            return free_bytes_at(self._path)
        return None


@contextlib.contextmanager
def _refusals(
    path: str, doing: str, *known: type[OSError], needed_bytes: int | None = None
) -> Iterator[None]:
    """Convert OSErrors to StorageError, except those with a meaning here."""
    try:
        yield
    except OSError as error:
        if isinstance(error, known):
            raise
        raise storage_error(error, path, doing, needed_bytes) from error


@contextlib.contextmanager
def _open_to_read(path: str) -> Iterator[int]:
    """Open a regular file; reject anything else, such as a pipe that would block."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(EINVAL, "not a regular file", path)
        yield fd
    finally:
        os.close(fd)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems do not support fsync of folders: there names are durable.
        if error.errno not in (EINVAL, ENOTSUP):
            raise
    finally:
        os.close(fd)
