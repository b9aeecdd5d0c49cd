"""How the main program ended, and what it left in the buffers of its files.

The outermost frame of the main thread is that of the program (or of its runner). It is kept, so
that the end can be read from it: whether it returned, and whether the exception that Python stored
in `sys.last_traceback`, before it called `sys.excepthook`, propagated out of it. The remaining
case is a SystemExit, of which Python keeps nothing, neither its code nor its text.
"""

from __future__ import annotations

import contextlib
import gc
import io
import opcode
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import FrameType

from shoal.runtime.failures.exception_text import is_of_program
from shoal.runtime.system.callsite import site_of


class MainProgram:
    """The program that runs in the main thread."""

    def __init__(self) -> None:
        frames = [*_main_frames()]
        self._frame = next(reversed(frames), None)
        self._own = next(filter(is_of_program, reversed(frames)), self._frame)

    def is_running(self) -> bool:
        """Return whether it is on the main thread's stack."""
        return self._frame is not None and _outermost() is self._frame

    def has_returned(self) -> bool:
        """Return whether it ended without an exception. Python's exit code is then 0."""
        frame = self._frame
        if frame is None or frame.f_lasti < 0 or self.is_running() or _is_interactive():
            return False
        return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")

    def has_exited(self) -> bool:
        """Return whether a SystemExit ended it, whether raised by `sys.exit` or not."""
        if self._frame is None or self.is_running() or _is_interactive():
            return False
        return not self.has_returned() and self.uncaught() is None

    def uncaught(self) -> BaseException | None:
        """Return the exception that ended it, even if another excepthook received it."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        trace = getattr(sys, "last_traceback", None)
        if trace is None or trace.tb_frame is not self._frame or self.is_running():
            return None
        if not isinstance(error, BaseException) or _is_interactive():
            return None
        return error

    def joins_threads(self) -> bool:
        """Return whether it has ended and Python joins its remaining threads."""
        frame = _outermost()
        return frame is not None and frame.f_code.co_name == "_shutdown"  # of `threading`

    def forget(self) -> None:
        """Let go of its frame, so that Python's end deletes, and so flushes, what it has open."""
        self._frame = self._own = None

    @property
    def place(self) -> str:
        """The place where it is or ended: file:line (function), in its outermost frame."""
        if self._own is None:
            return ""
        return site_of(self._own, self._own.f_lineno)


def _main_frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _outermost() -> FrameType | None:
    return next(iter(deque(_main_frames(), maxlen=1)), None)


def _is_interactive() -> bool:
    """Return whether this is a session, which outlives exceptions and the end of its script."""
    return hasattr(sys, "ps1")


# ---- Write what a program has left in the buffers of its open files.
#
# Python does so when it deletes the program's names at its end. That never happens if
# the process exits without teardown, or if a thread that lives longer holds a function of the
# program.


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def write_open_files() -> None:
    """Flush all open regular files of this process; a full disk is ignored.

    Not pipes or sockets, which may block. Call it in the main thread: in another one, a lock of a
    file that the main thread is writing may never be free.
    """
    # `type`: `isinstance` would ask a lazy proxy for its class, and so load what it stands for.
    files = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), _BUFFERED)]
    for file in files:  # in any order: a text file flushes its buffer, too
        with contextlib.suppress(Exception):
            if file.writable() and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.flush()
