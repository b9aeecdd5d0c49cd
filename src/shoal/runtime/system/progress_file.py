"""The progress of a process, in a file, for a launcher that restarts the program.

Three numbers in mapped memory, so that recording a step costs no system call, and the numbers
survive if the process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

from shoal import settings

VARIABLE = "SHOAL_PROGRESS_FILE"
_FIELDS = struct.Struct("<qq")
_SAVES = struct.Struct("<q")  # how many saves are running; follows the other fields
_SIZE = _FIELDS.size + _SAVES.size
_MOST = (1 << 63) - 1


class Reached(NamedTuple):
    """The highest step that was begun, and the highest that was saved; -1: none."""

    step: int = -1
    saved: int = -1

    def joined(self, other: Reached) -> Reached:
        """Return the higher numbers of both."""
        return Reached(max(self.step, other.step), max(self.saved, other.saved))


def prepare(path: str) -> None:
    """Write a file for a process that has not reached any step yet."""
    with open(path, "wb") as file:
        file.write(_FIELDS.pack(*Reached()) + _SAVES.pack(0))


def read(path: str) -> Reached:
    """Return the steps that a process has reached; none if the file is gone."""
    try:
        with open(path, "rb") as file:
            return Reached(*_FIELDS.unpack_from(file.read()))
    except (OSError, struct.error):
        return Reached()


def is_saving(path: str) -> bool:
    """Return whether a save of a process is running; False if the file is gone."""
    try:
        with open(path, "rb") as file:
            (count,) = _SAVES.unpack_from(file.read(), _FIELDS.size)
            return bool(count > 0)
    except (OSError, struct.error):
        return False


def take(path: str) -> Reached:
    """Return the steps that a process has reached, and remove the file."""
    reached = read(path)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return reached


def note_step(number: int) -> None:
    """Record that this process begins a step."""
    if (file := _own_file()) is not None:
        _write(file, Reached(step=min(number, _MOST)))


def note_saved(number: int) -> None:
    """Record that a step is saved."""
    if (file := _own_file()) is not None:
        _write(file, Reached(saved=min(number, _MOST)))


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Record that a save is running, in the block."""
    _count_save(1)
    try:
        yield
    finally:
        _count_save(-1)


def _count_save(change: int) -> None:
    if (file := _own_file()) is not None:
        with _saves_lock():
            _SAVES.pack_into(file, _FIELDS.size, _SAVES.unpack_from(file, _FIELDS.size)[0] + change)


def _write(file: mmap.mmap, reached: Reached) -> None:
    _FIELDS.pack_into(file, 0, *Reached(*_FIELDS.unpack_from(file)).joined(reached))


@functools.cache
def _saves_lock() -> threading.Lock:
    return threading.Lock()


@functools.cache
def _own_file() -> mmap.mmap | None:
    """Return this process's file; None if its launcher provided none."""
    path = settings.text(VARIABLE)
    if not path:
        return None
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), _SIZE)
    except (OSError, ValueError):
        return None
