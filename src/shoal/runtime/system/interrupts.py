"""Deliver Ctrl-C in the middle of a call where the exception is not lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of the garbage
collector (JAX has one), of a weak reference or of C++, or in a destructor, it is printed and lost,
or ends the process. Inside the block it is raised only where nothing but shoal's own code, or a
wait of `threading`, lies between the block and the interrupted line. Elsewhere it is kept, and a
thread sends it again and again until it hits such a place; at the latest the end of the block
raises it. A second one is raised wherever it arrives.

A program that has a handler of its own for SIGINT keeps it.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from shoal.tracebacks import is_ours

P = ParamSpec("P")
T = TypeVar("T")

# Bookkeeping of calls, and this module: entering or leaving them, nothing is half done.
_KEPT_IN = (__name__, "shoal.runtime.client.lanes")
_AGAIN_S = 0.002  # first delay before a kept interrupt is sent again
_AGAIN_MAX_S = 0.1


class DeliveredInterrupts:
    """A block in which no interrupt is lost. No effect inside another one, or in other threads."""

    def __init__(self, base: FrameType) -> None:
        """Prepare a block of the frame `base`."""
        self._base: FrameType | None = base
        self._is_on = False
        self._is_kept = False  # an interrupt has yet to be raised
        self._was_kept = False  # so a resent signal may be on its way
        self._is_resending = False
        self._is_next_resent = False  # the next signal is a resent one
        self._lock = threading.Lock()  # the main thread takes it only at the end

    def __enter__(self) -> DeliveredInterrupts:
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._is_on = True
                signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_on:
            return
        self._close()
        if self._is_kept and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error

    def _close(self) -> None:
        """Restore the handler; a resent signal does not outlive the block."""
        self._base = None  # from here on every interrupt is kept
        if not self._was_kept:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not self._was_kept:
                return
        with self._lock:
            self._is_on = False  # nothing is resent
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while signal.SIGINT in signal.sigpending():
            signal.sigwait({signal.SIGINT})
            self._keep()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # after a resent signal
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _take(self, _number: int, frame: FrameType | None) -> None:
        is_second = self._is_kept and not self._is_next_resent
        is_new = self._keep()
        if self._base is None or not self._is_kept:
            return
        if self._may_raise(frame):
            self._is_kept = False
            raise KeyboardInterrupt
        if is_second:
            self._is_resending = False
            raise KeyboardInterrupt  # if it is lost here, the end of the block raises the first
        if is_new:
            self._is_resending = True
            with contextlib.suppress(RuntimeError):  # the program is ending: no more threads
                # Not a `Thread`: its locks may be held by the interrupted code.
                _thread.start_new_thread(self._send_again, ())

    def _keep(self) -> bool:
        """Record a signal; return whether it begins an interrupt."""
        is_resent, self._is_next_resent = self._is_next_resent, False
        if is_resent or self._is_kept:
            return False
        self._is_kept = self._was_kept = True
        return True

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Return whether an exception in this frame is sure to reach the block."""
        if frame is not self._base and frame is not None:
            if frame.f_globals.get("__name__") in _KEPT_IN:
                return False
        while frame is not None and frame is not self._base:
            if not is_ours(frame) and frame.f_globals.get("__name__") != "threading":
                return False
            frame = frame.f_back
        return frame is not None

    def _send_again(self) -> None:
        main, pause_s = threading.main_thread().ident, _AGAIN_S
        while True:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            with self._lock:
                if not (self._is_on and self._is_kept and self._is_resending) or main is None:
                    return
                self._is_next_resent = True
                signal.pthread_kill(main, signal.SIGINT)


def interrupts_delivered(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that must lose no interrupt, and calls no long code of the program."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with DeliveredInterrupts(sys._getframe()):
            return function(*args, **kwargs)

    return call
