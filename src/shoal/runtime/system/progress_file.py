"""The progress of a process, in a file, for a launcher that restarts the program.

Numbers in mapped memory, so that recording a step costs no system call, and the numbers
survive if the process is killed. Each is written by itself: threads record steps and saves at the
same time.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shoal import settings
from shoal.paths import open_no_link

VARIABLE = "SHOAL_PROGRESS_FILE"
_FIELDS = struct.Struct("<qqq")  # of `StepProgress`
_NUMBER = struct.Struct("<q")
_SAVES_AT = _FIELDS.size  # how many saves are running
_DONE_AT = _SAVES_AT + _NUMBER.size  # 1: see `note_done`
_DEVICES_AT = _DONE_AT + _NUMBER.size  # 1: they exist
_LOADED_AT = _DEVICES_AT + _NUMBER.size  # 1: code that the compile cache had
_SIZE = _LOADED_AT + _NUMBER.size
_MOST = (1 << 63) - 1


class StepProgress(NamedTuple):
    """The highest step that was begun, that was saved, and that has ended; -1: none."""

    step: int = -1
    saved: int = -1
    ended: int = -1

    def joined(self, other: StepProgress) -> StepProgress:
        """Return the higher numbers of both, which are of one process or of two attempts."""
        return StepProgress(*map(max, self, other))


def reached_together(each: Iterable[StepProgress]) -> StepProgress:
    """Return how far the processes of one attempt, or of its hosts, have come together.

    The step that has ended is the lowest of those that note steps: the others may have gone further
    by chance, or have started work on devices that did not finish.

    >>> reached_together([StepProgress(9, 3, 8), StepProgress(7, -1, 6), StepProgress()])
    StepProgress(step=9, saved=3, ended=6)
    """
    each = list(each)
    step, saved, _ = functools.reduce(StepProgress.joined, each, StepProgress())
    return StepProgress(
        step, saved, min((progress.ended for progress in each if progress.step >= 0), default=-1)
    )


def prepare(path: str) -> None:
    """Write a file for a process that has not reached any step yet."""
    with open(open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(_FIELDS.pack(*StepProgress()) + bytes(_SIZE - _FIELDS.size))


def read(path: str) -> StepProgress:
    """Return the steps that a process has reached; none if the file is gone."""
    try:
        with open(path, "rb") as file:
            return StepProgress(*_FIELDS.unpack_from(file.read()))
    except (OSError, struct.error):
        return StepProgress()


def is_saving(path: str) -> bool:
    """Return whether a save of a process is running; False if the file is gone."""
    return _read_number(path, _SAVES_AT) > 0


def is_done(path: str) -> bool:
    """Return whether a program is done, and waits for the others; False if the file is gone."""
    return _read_number(path, _DONE_AT) > 0


def has_devices(path: str) -> bool:
    """Return whether a process has noted that its devices exist; False if the file is gone."""
    return _read_number(path, _DEVICES_AT) > 0


def has_loaded(path: str) -> bool:
    """Return whether a process has loaded code of the compile cache; False if the file is gone."""
    return _read_number(path, _LOADED_AT) > 0


def _read_number(path: str, offset: int) -> int:
    try:
        with open(path, "rb") as file:
            return int(_NUMBER.unpack_from(file.read(), offset)[0])
    except (OSError, struct.error):
        return 0


def take(path: str) -> StepProgress:
    """Return the steps that a process has reached, and remove the file."""
    reached = read(path)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return reached


def note_step(step: int) -> None:
    """Record that this process begins a step."""
    _raise(0, step)


def note_saved(step: int) -> None:
    """Record that a step is saved."""
    _raise(1, step)


def note_ended(step: int) -> None:
    """Record that this process has ended a step."""
    _raise(2, step)


def note_turn(step: int) -> None:
    """Record that this process is between two steps, and that the one before `step` has ended."""
    if _own_file() is not None:  # under no launcher, as fast as can be: called in each turn
        _raise(0, step)
        _raise(2, step - 1)


def note_done() -> None:
    """Record that the program is done, and that this process only waits for the others."""
    file = _own_file()
    if file is not None:
        _NUMBER.pack_into(file, _DONE_AT, 1)


def note_devices() -> None:
    """Record that the devices of this process exist, so that it can join no job any more."""
    file = _own_file()
    if file is not None:
        _NUMBER.pack_into(file, _DEVICES_AT, 1)


def note_loaded() -> None:
    """Record that this process loads code from the compile cache."""
    file = _own_file()
    if file is not None:
        _NUMBER.pack_into(file, _LOADED_AT, 1)


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Record that a save is running, in the block."""
    _count_save(1)
    try:
        yield
    finally:
        _count_save(-1)


def _count_save(change: int) -> None:
    file = _own_file()
    if file is not None:
        with _saves_lock():
            _NUMBER.pack_into(file, _SAVES_AT, _NUMBER.unpack_from(file, _SAVES_AT)[0] + change)


def _raise(field: int, step: int) -> None:
    """Write a number of `StepProgress`, if it is higher than the one there."""
    file = _own_file()
    if file is not None:
        offset = field * _NUMBER.size
        if step > _NUMBER.unpack_from(file, offset)[0]:
            _NUMBER.pack_into(file, offset, min(step, _MOST))


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
