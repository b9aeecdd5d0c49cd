"""Turn an OSError into a `StorageError` that says at which path, why, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping

from shoal.errors import StorageError, StorageFullError
from shoal.paths import dangling_link, free_bytes_at

_MOST_BYTES = 1 << 30  # per call: Linux writes at most 2 GiB - 4 KiB

_WHAT_TO_DO: Mapping[int, str] = {
    errno.EACCES: "this user has no permission there",
    errno.EPERM: "the file system does not permit or support this",
    errno.EROFS: "the file system is mounted read-only; save somewhere else",
    errno.ENOTDIR: "a component of the path is a file, not a directory",
    errno.EISDIR: "this is a directory where a file of a checkpoint belongs; move it away",
    errno.EIO: "the device failed: see the kernel's log; do not trust this disk",
    errno.EMFILE: "this process has too many open files: see `ulimit -n`",
    errno.ENFILE: "the system has too many open files",
    errno.ENAMETOOLONG: "a name of the path is too long for this file system",
    errno.ELOOP: "the path contains a loop of symbolic links",
    errno.ESTALE: "stale file handle: remount this file system",
    errno.EFBIG: "the file exceeds the size limit of this file system or user",
    errno.ENOENT: "its directory was removed concurrently",
}
_NO_LINKS = (
    "this file system may not support hard links, which a commit needs; save to one that does, "
    "such as ext4, xfs, NFS or Lustre"
)
_MAY_BE_A_LINK = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST)  # that leads nowhere
_FULL: Mapping[int, str] = {
    errno.ENOSPC: "free some space, or keep fewer steps",
    errno.EDQUOT: "your quota is used up: free some space, or have it raised",
}


def storage_error(
    error: OSError, path: str, doing: str, needed_bytes: int | None = None
) -> StorageError:
    """Return the `StorageError` for an error; a `StorageError` is returned unchanged."""
    if isinstance(error, StorageError):
        return error
    why = error.strerror or str(error)
    code = error.errno or 0
    if code in _FULL:
        free_bytes = None
        with contextlib.suppress(OSError):
            free_bytes = free_bytes_at(os.path.dirname(path))
        facts = [f"cannot {doing} {path}: {why}"]
        if needed_bytes is not None:
            facts.append(f"{needed_bytes:,} bytes are to be written")
        if free_bytes is not None:
            facts.append(f"{free_bytes:,} are free")
        return StorageFullError(
            f"{'; '.join(facts)}\n{_FULL[code]}; whatever was committed before is intact",
            path=path, errno=error.errno, needed_bytes=needed_bytes, free_bytes=free_bytes,
        )  # fmt: skip
    hint = _WHAT_TO_DO.get(code)
    if code in _MAY_BE_A_LINK:
        link = dangling_link(path)
        if link:
            why = os.strerror(errno.ENOENT)
            hint = f"{link}; mount or create that, or pass another path"
    if doing == "link" and code in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
        hint = _NO_LINKS
    return StorageError(
        f"cannot {doing} {path}: {why}" + (f"\n{hint}" if hint else ""),
        path=path,
        errno=error.errno,
    )


def absent(folder: str, name: str) -> str:
    """Return how a file is not there: it "is missing", or is a link that leads nowhere."""
    link = dangling_link(os.path.join(folder, name))
    return f"is missing: {link}" if link else "is missing"


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`: the system may write less per call."""
    data = data.cast("B")
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _MOST_BYTES], offset + done)
