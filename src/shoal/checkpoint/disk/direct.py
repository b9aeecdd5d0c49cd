"""Write large new files with O_DIRECT where the file system supports it.

Fresh page-cache pages are slow to allocate, and a checkpoint is rarely read soon after it is
written. Where O_DIRECT is refused, at open or at the first write, it falls back to buffered writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from errno import EDQUOT, EFBIG, EINVAL, ENOSPC

from shoal.checkpoint.disk.os_errors import storage_error, write_all
from shoal.checkpoint.format.records import PAGE_BYTES

_LARGE_BYTES = 1 << 20


class DirectFile:
    """See `OpenFile`."""

    def __init__(self, path: str, num_bytes: int) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        # Not at open: tmpfs creates the file and then refuses.
        self._is_direct = num_bytes >= PAGE_BYTES and _set_direct(self._fd, True)
        if num_bytes >= _LARGE_BYTES:
            self._allocate()

    def _allocate(self) -> None:
        """Allocate all blocks up front: a full disk is found before anything is written.

        Writes that extend a file are serialized; writes into allocated space are not.
        """
        try:
            _allocate(self._fd, self._num_bytes)
        except OSError as error:
            self.discard()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            raise storage_error(error, self._path, "write", self._num_bytes) from error

    @property
    def is_direct(self) -> bool:
        """Do writes bypass the page cache? Then address, offset and length are whole pages."""
        return self._is_direct

    def write(self, data: memoryview, offset: int) -> None:
        """See `OpenFile.write`."""
        was_direct = self._is_direct
        try:
            try:
                write_all(self._fd, data, offset)
            except OSError as error:
                if error.errno != EINVAL or not was_direct:
                    raise
                self._end_direct()
                write_all(self._fd, data, offset)
        except OSError as error:
            raise storage_error(error, self._path, "write", self._num_bytes) from error

    def _end_direct(self) -> None:
        """Fall back to the page cache from now on."""
        with self._lock:  # several threads may fail at once
            if self._is_direct:
                _set_direct(self._fd, False)
                self._is_direct = False

    def finish(self, num_bytes: int) -> None:
        """See `OpenFile.finish`. An fsync that failed is never retried.

        The kernel may have dropped the pages that it could not write: a second fsync would
        succeed over a hole.
        """
        fd, self._fd = self._fd, -1
        try:
            try:
                os.ftruncate(fd, num_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, self._path, "write", num_bytes) from error

    def discard(self) -> None:
        """See `OpenFile.discard`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _allocate(fd: int, num_bytes: int) -> None:
    """Call fallocate(2). Unlike `os.posix_fallocate`, it does not fall back on writing zeros."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or ctypes.sizeof(ctypes.c_long) < 8:
        return
    if fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        code = ctypes.get_errno()
        if code in (ENOSPC, EDQUOT, EFBIG):
            raise OSError(code, os.strerror(code))


def _set_direct(fd: int, on: bool) -> bool:
    """Switch O_DIRECT on or off; return whether it is on."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError:
        return False
    return on
