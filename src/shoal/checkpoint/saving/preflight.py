"""Checks that fail before anything is written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.checkpoint.disk import committing, saved_steps, step_folder
from shoal.checkpoint.disk.refusal import refused
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.checkpoint.planning.who_writes import Own, box_bytes
from shoal.errors import StorageFullError

_ENTRY_BYTES = 100  # of a header, without the name
_SPARE = 1.05  # headers, indexes, and other concurrent writes


def bytes_needed(own: Sequence[Own]) -> int:
    """Estimate the size of the files that hold these boxes."""
    data_bytes = sum(box_bytes(one.held.dtype, one.box.extent) for one in own)
    return data_bytes + sum(_ENTRY_BYTES + len(one.held.name) for one in own) + PAGE_BYTES


def check_folder(folder: Folder) -> int | None:
    """Return how many bytes may be written there; None: unknown.

    Raises:
      StepAlreadyCommittedError: something is saved there.
      CorruptCheckpointError: something is saved there, and damaged.
      UsageError: it is a history of steps.
      StorageError: it is not a folder and cannot become one, or is not writable.
    """
    commit = step_folder.committed(folder)
    if commit is not None:
        raise committing.taken(folder, commit)
    saved_steps.check_single(folder)
    _check_writable(folder.path)
    return folder.free_bytes()


def _check_writable(path: str) -> None:
    """Reject paths that cannot be a folder writable by this process. Creates nothing."""
    there = path
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        why = errno.ENOTDIR
    elif os.access(there, os.W_OK | os.X_OK):
        return
    else:
        is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        why = errno.EROFS if is_read_only else errno.EACCES
    doing = "write to" if there == path else "make a folder in"
    raise refused(OSError(why, os.strerror(why)), there, doing)


def check_space(folder: Folder, answers: Mapping[int, bytes]) -> None:
    """Raise on all processes if their files together do not fit.

    Args:
      answers: JSON of each process: its "bytes" to write, and the bytes "free", null if unknown.

    Raises:
      StorageFullError: says how much is needed, and how much is free.
    """
    said: dict[bytes, Any] = {text: json.loads(text) for text in {*answers.values()}}
    needed = int(_SPARE * sum(said[text]["bytes"] for text in answers.values()))
    known = [one["free"] for one in said.values() if one["free"] is not None]
    if known and needed > (free := min(known)):
        raise StorageFullError(
            f"{folder.path}: the save needs {needed} bytes, and {free} are free\n"
            "remove something, or save elsewhere; nothing was written",
            path=folder.path,
            needed_bytes=needed,
            free_bytes=free,
        )
