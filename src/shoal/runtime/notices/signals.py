"""Watch signals without replacing the program's handlers, installed before or after.

A signal is detected in two ways. Python writes its number to a pipe (`signal.set_wakeup_fd`)
whichever handler the program has, and shoal's handler writes it to the same pipe where other code,
such as asyncio, has taken that place. A thread reads the pipe, so no handler takes a lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_OURS = 0x80  # in a byte of the pipe: written by shoal's handler, not by Python
_END = 0  # not a signal number
_JOIN_S = 1.0


class SignalWatch:
    """Watches signals; `watch` and `close` are for the main thread."""

    def __init__(self, take: Callable[[int], None]) -> None:
        """Call `take`, in a thread, with the number of each signal received."""
        self._take = take
        self._before: dict[int, Any] = {}  # the handlers before `watch`
        self._fd_before = -1
        self._is_closed = False
        self._masks = threading.local()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._run, name="shoal signals", daemon=True)
        self._thread.start()
        _keep_out_of_forked_children(self)

    def watch(self, numbers: Iterable[int]) -> None:
        """Add signals."""
        before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if before != self._write_fd:
            self._fd_before = before
        for number in numbers:
            if number not in self._before:
                self._before[number] = _handler_of_others(number)
                signal.signal(number, self._handle)
                if is_default(self._before[number]):  # else that handler should run soon
                    signal.siginterrupt(number, False)  # libraries resume interrupted reads

    def ends(self, number: int) -> bool:
        """Return whether this signal would have ended the program if it were not watched."""
        return is_default(self._before[number]) and signal.getsignal(number) == self._handle

    def close(self) -> None:
        """Restore the previous handlers, unless replaced since."""
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return  # the handler stays installed, and passes everything on
        self._restore()
        fd = signal.set_wakeup_fd(-1)
        if fd not in (-1, self._write_fd):
            signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
            return  # another library's, which may restore this one: it must stay open
        if fd == self._write_fd and self._fd_before != -1:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                signal.set_wakeup_fd(self._fd_before, warn_on_full_buffer=False)
        os.write(self._write_fd, bytes([_END]))
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._write_fd)
            os.close(self._read_fd)

    def _restore(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self._is_closed and is_default(before):
            signal.signal(number, before or signal.SIG_DFL)
            signal.raise_signal(signal.Signals(number))
            return
        fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if fd != self._write_fd:  # Python wrote to another descriptor, or to none
            self._fd_before = -1
            if fd != -1:
                signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
            with contextlib.suppress(BlockingIOError):
                os.write(self._write_fd, bytes([_OURS | number]))
        if callable(before) and not is_default(before):
            before(number, frame)

    def _run(self) -> None:
        while True:
            for byte in os.read(self._read_fd, 512):
                if byte == _END:
                    return
                number = byte & ~_OURS
                if byte == number and self._fd_before != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._fd_before, bytes([number]))
                if number in self._before and not self._is_closed:
                    self._take(number)

    # ---- forks: a child inherits handler and pipe, and its signals are not its parent's

    def _before_fork(self) -> None:
        """Block signals, so that the child does not run the parent's handlers."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)

    def _after_fork_in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _after_fork_in_child(self) -> None:
        self._restore()
        fd = signal.set_wakeup_fd(-1)
        if fd not in (-1, self._write_fd):
            signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        if not self._is_closed:
            os.close(self._write_fd)
            os.close(self._read_fd)
        self._is_closed = True
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)


def _handler_of_others(number: int) -> Any:
    """Return the current handler, or the one below a handler left by a closed watch."""
    handler = signal.getsignal(number)
    watch = getattr(handler, "__self__", None)
    if isinstance(watch, SignalWatch) and watch._is_closed:
        return watch._before[number]
    return handler


def is_default(handler: object) -> bool:
    """Return whether a handler is the default one of a Python program."""
    return handler in (None, signal.SIG_DFL, signal.default_int_handler)


def _keep_out_of_forked_children(watch: SignalWatch) -> None:
    here = weakref.ref(watch)

    def call(name: str) -> Callable[[], None]:
        def hook() -> None:
            watch = here()
            if watch is not None:
                getattr(watch, name)()

        return hook

    os.register_at_fork(
        before=call("_before_fork"),
        after_in_parent=call("_after_fork_in_parent"),
        after_in_child=call("_after_fork_in_child"),
    )
