"""Shared-memory transport of large values between processes of one host.

Each process has a *window*, anonymous memory (memfd_create(2)) that disappears with the process,
however it ends. A value passes through its holder's window piece by piece, in two alternating
slots: while the others copy one piece, the next is written. Nothing is compiled, no device takes
part, and all waiting happens at the coordinator, under the deadline.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shoal import settings
from shoal.collectives.transport.chunks import ByteArray, Bytes
from shoal.collectives.transport.device_transfer import DeviceTransfer
from shoal.runtime.agreement import Call
from shoal.runtime.client.hello import host_id
from shoal.runtime.system import fault_points

_PIECE_BYTES = 4 << 20
WINDOW_BYTES = 2 * _PIECE_BYTES
_MARK_BYTES = 16
_MOST_PROCESSES = 64  # each opens every window
_MOST_GROUPS = 4  # with windows of their own, beside the whole job's


class WindowTransfer(NamedTuple):
    """A transfer as one process sees it."""

    value: Bytes | None  # this process's value
    places: Mapping[int, Bytes]  # destinations of wanted values, by holder
    sizes: Mapping[int, int]  # bytes of each process with a value

    @property
    def num_bytes(self) -> int:
        """Total size of all values."""
        return sum(self.sizes.values())


class Windows:
    """The windows of a job or group, as one process sees them."""

    def __init__(self, process: int, windows: Mapping[int, ByteArray]) -> None:
        self._process, self._windows = process, windows

    def lay_out(self, window_transfer: WindowTransfer, begin: int) -> None:
        """Write a piece of this process's value for the others to read."""
        slot = begin % (2 * _PIECE_BYTES)
        if window_transfer.value is not None:
            window_transfer.value.fill(
                self._windows[self._process][slot : slot + _PIECE_BYTES], begin
            )

    def pass_on(self, transfer: DeviceTransfer, window_transfer: WindowTransfer) -> None:
        """Send each process's value to all that want it, from the first piece, for which all have
        met.

        Slot 0 is rewritten once all have met for the piece in slot 1, which no process does before
        it has copied the piece in slot 0.
        """
        total = window_transfer.num_bytes
        for begin in range(0, max(window_transfer.sizes.values()), _PIECE_BYTES):
            fault_points.reach("stream.before_chunk", self._process)
            if begin:
                self.lay_out(window_transfer, begin)
                transfer.meet(f"bytes from {begin} of {total}")
            slot = begin % (2 * _PIECE_BYTES)
            for process, place in window_transfer.places.items():
                count = max(0, min(_PIECE_BYTES, window_transfer.sizes[process] - begin))
                place.write(begin, self._windows[process][slot : slot + count])
                transfer.moved_bytes += count
            transfer.log_progress()
            fault_points.reach("stream.after_chunk", self._process)
        transfer.meet(f"the last bytes of {total}")


def meet_at_windows(transfer: DeviceTransfer, window_transfer: WindowTransfer) -> Windows | None:
    """Return the windows of a transfer's processes, with the first piece; None if they cannot be
    shared.

    The first time, these processes announce where their windows are, try to open them, and report
    the result. A process interrupted meanwhile does not know the state of the others; it reports
    that at the next call, and they start over.
    """
    known: dict[tuple[int, ...] | None, Windows | None]  # by group; None: the whole job
    known = transfer.client.kept.setdefault("windows", {})
    windows = known.get(transfer.group)
    if windows is not None:
        windows.lay_out(window_transfer, 0)
    stage = f"bytes from 0 of {window_transfer.num_bytes}"
    if not any(transfer.meet(stage, b"" if transfer.group in known else b"?").values()):
        return windows
    known.pop(transfer.group, None)
    groups = sum(group is not None and shared is not None for group, shared in known.items())
    has_room = len(transfer.members) <= _MOST_PROCESSES
    has_room = has_room and (transfer.group is None or groups < _MOST_GROUPS)
    windows = known[transfer.group] = _look(transfer, has_room)
    if windows is not None:
        windows.lay_out(window_transfer, 0)
        transfer.meet(f"{stage}, laid out")
    return windows


def _look(transfer: DeviceTransfer, has_room: bool) -> Windows | None:
    def meet(stage: str, answer: object) -> dict[int, Any]:
        name = transfer.call.name or transfer.call.operation  # named in errors
        call = Call("windows", name, transfer.call.site, (f"memory of the host: {stage}",))
        answers = transfer.agree(call, json.dumps(answer).encode())
        return {process: json.loads(answers[process]) for process in transfer.members}

    with contextlib.ExitStack() as opened:
        own = _own_window(opened) if has_room else None
        rows = meet("where they are", own and own[1])
        if None in rows.values() or len({row["host"] for row in rows.values()}) > 1:
            return None
        windows = {process: _window_of(row) for process, row in rows.items()}
        seen = {process: window for process, window in windows.items() if window is not None}
        if not all(meet("who sees them", len(seen) == len(rows)).values()):
            return None
    return Windows(transfer.client.process, seen)


def _own_window(opened: contextlib.ExitStack) -> tuple[int, dict[str, Any]] | None:
    """Create a window, open until `opened` ends; return its file, and where others find it."""
    host = host_id()
    if settings.number("SHOAL_SHARED_MEMORY") == 0 or not host:
        return None
    mark = secrets.token_bytes(_MARK_BYTES)
    try:
        file = os.memfd_create("shoal", os.MFD_CLOEXEC)
        opened.callback(os.close, file)
        os.posix_fallocate(file, 0, WINDOW_BYTES)  # so that no write to it can fail
        os.pwrite(file, mark, 0)
    except (OSError, AttributeError):  # unsupported platform, or out of memory
        return None
    return file, {"host": host, "pid": os.getpid(), "file": file, "mark": mark.hex()}


def _window_of(row: dict[str, Any]) -> ByteArray | None:
    """Open another process's window, if visible to this process and the right one."""
    try:
        file = os.open(f"/proc/{row['pid']}/fd/{row['file']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(file, _MARK_BYTES, 0).hex() != row["mark"]:
            return None
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return np.frombuffer(mmap.mmap(file, WINDOW_BYTES, flags=flags), np.uint8)
    except OSError:
        return None
    finally:
        os.close(file)
