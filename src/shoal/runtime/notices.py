"""The notice sources of this process: signals, files, and functions that are polled."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from os import PathLike
from types import FrameType
from typing import Any

from shoal.arguments import seconds
from shoal.errors import UsageError, UsageTypeError, WrongType, raise_all
from shoal.paths import local_path
from shoal.runtime.exit.main_program import write_open_files
from shoal.runtime.rules.stopping import ReceivedNotice

_LOG = logging.getLogger("shoal")
_WRITTEN_S = 0.05  # a new file's first line is written within this
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)

Ask = Callable[[], object]


class FileNotice:
    """A notice while a file exists; called periodically.

    >>> FileNotice("/no/such/file")() is None
    True
    """

    def __init__(self, path: str, grace_s: float | None = None) -> None:
        self.path = path
        self.source = f"file {path}"
        self._grace_s = grace_s
        self._reason: str | None = None

    def __call__(self) -> tuple[str, float | None] | None:
        """Return the first line that the file had when it appeared."""
        if not os.path.exists(self.path):
            self._reason = None
            return None
        if self._reason is None:
            self._reason = self._first_line()
            if not self._reason:
                time.sleep(_WRITTEN_S)
                self._reason = self._first_line() or "the file exists"
        return self._reason, self._grace_s

    def _first_line(self) -> str:
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                return file.readline(1000).strip()
        except OSError as error:  # a folder, or unreadable: it exists all the same
            return f"the file exists ({error.strerror})"


class Sources:
    """The sources of this process. Each function has its own thread, so that none delays others."""

    def __init__(
        self, give: Callable[[ReceivedNotice], bool], has_losses: Callable[[], bool]
    ) -> None:
        """Create an empty set of sources.

        `give` takes a notice, and returns whether it is new; `has_losses` returns whether a
        process of the job is gone.
        """
        self.pid = os.getpid()
        self.is_set_up = False
        self._has_warned = False
        self._give = give
        self._has_losses = has_losses
        self._signals: SignalWatch | None = None
        self._grace_s: dict[int, float | None] = {}
        self._is_closed = threading.Event()
        self._speaking = threading.RLock()
        self._is_silent = False  # the interpreter is ending

    def watch(
        self,
        signals: Iterable[str | int],
        files: Iterable[str | PathLike[str]],
        poll: Iterable[Ask],
        every_s: float,
        grace_s: float | None,
    ) -> None:
        """Implement `preemption.watch`."""
        problems: list[str] = []
        numbers = [_number(source, problems) for source in _listed("signals", signals, problems)]
        paths = [_path(source, problems) for source in _listed("files", files, problems)]
        functions = list(_listed("poll", poll, problems))
        problems += [
            WrongType(f"poll: {source!r} cannot be called")
            for source in functions
            if not callable(source)
        ]
        every_s = seconds("every_s", every_s, problems, is_finite=True)
        if grace_s is not None:
            grace_s = seconds("grace_s", grace_s, problems, is_finite=True)
        if numbers and threading.current_thread() is not threading.main_thread():
            text = "signals can only be watched from the main thread; this is thread "
            problems.append(
                f"{text}{threading.current_thread().name!r}: signals=() leaves them out"
            )
        raise_all("preemption.watch", problems)
        if not self.is_set_up:
            # Threads that outlive the program's names hold its functions, and so its open files.
            atexit.register(self._write_files)
            atexit.register(self.fall_silent)
        self.is_set_up = True
        for number in numbers:
            self._grace_s[number] = grace_s
        if numbers:
            self._signals = self._signals or SignalWatch(self._take)
            self._signals.watch(numbers)
        for source in [*(FileNotice(path, grace_s) for path in paths), *functions]:
            name = f"shoal notices: {_source_of(source)}"
            arguments = (source, every_s)
            threading.Thread(target=self._poll, args=arguments, name=name, daemon=True).start()

    def watch_by_default(self) -> None:
        """Watch SIGTERM, unless it is ignored. Only possible in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "preempted() was first called in thread %r, which cannot watch for SIGTERM: "
                    "call preemption.watch() in the main thread",
                    threading.current_thread().name,
                )
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            self.watch(signals=[signal.SIGTERM], files=(), poll=(), every_s=1.0, grace_s=None)
        self.is_set_up = True

    def close(self) -> None:
        """Stop watching, and restore the previous handlers."""
        self._is_closed.set()
        if self._signals is not None:
            self._signals.close()

    def _write_files(self) -> None:
        if os.getpid() == self.pid:  # else these are a fork's copies
            write_open_files()

    def fall_silent(self) -> None:
        """Write no further log message. Waits for the one that is being written.

        Python aborts if a thread is writing to stderr when the interpreter is torn down.
        """
        if os.getpid() == self.pid:  # else the thread that holds the lock may not exist here
            with self._speaking:
                self._is_silent = True

    def _log(self, text: str, *values: object, exc_info: bool = False) -> None:
        with self._speaking:
            if not self._is_silent:
                _LOG.warning(text, *values, exc_info=exc_info)

    def _take(self, number: int) -> None:
        """Handle a signal."""
        watch = self._signals
        if watch is not None and watch.ends(number) and self._has_losses():
            os._exit(128 + number)  # as if unwatched, except that the exit status names no signal
        reason = signal.strsignal(number) or f"signal {number}"
        self._report(ReceivedNotice(reason, signal.Signals(number).name, self._grace_s.get(number)))

    def _poll(self, ask: Ask, every_s: float) -> None:
        source, last, has_failed = _source_of(ask), None, False
        while not self._is_closed.is_set():
            try:
                given = _given(ask(), source)
            except Exception as error:  # noqa: BLE001 - a source of the user's
                if not has_failed:
                    self._log("notices: %s: %s: %s", source, type(error).__name__, error)
                has_failed = True
            else:
                if given is not None and given.reason != last:
                    self._report(given)
                last = None if given is None else given.reason
            self._is_closed.wait(every_s)

    def _report(self, given: ReceivedNotice) -> None:
        if self._is_closed.is_set():
            return
        try:
            is_new = self._give(given)
        except Exception:  # noqa: BLE001 - or the thread would end, and with it all that follows
            self._log("notice from %s: it could not be sent", given.source, exc_info=True)
            return
        with contextlib.suppress(Exception):  # handlers and filters may raise
            left = "" if given.deadline_s is None else f"; {given.deadline_s:.0f} s left"
            if is_new:
                self._log("notice from %s: %s%s", given.source, given.reason, left)


def _given(answer: Any, source: str) -> ReceivedNotice | None:
    """Parse a function's answer."""
    if answer is None:
        return None
    try:
        reason, deadline_s = (answer, None) if isinstance(answer, str) else answer
        is_right = isinstance(reason, str) and (deadline_s is None or deadline_s >= 0)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise UsageTypeError(f"{answer!r} is not None, text, or (text, seconds left)")
    return ReceivedNotice(reason, source, None if deadline_s is None else float(deadline_s))


def _source_of(ask: Any) -> str:
    name = getattr(ask, "source", None) or getattr(ask, "__qualname__", None)
    return str(name or type(ask).__qualname__)


def _listed(name: str, given: Any, problems: list[str]) -> Iterable[Any]:
    if isinstance(given, str | bytes | PathLike) or not isinstance(given, Iterable):
        problems.append(WrongType(f"{name}={given!r} must be a list"))
        return ()
    return given


def _number(given: Any, problems: list[str]) -> int:
    try:
        number = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        problems.append(f"signals: there is no signal {given!r}; names are like 'SIGTERM'")
        return 0
    if number in _UNCATCHABLE:
        problems.append(f"signals: {number.name} cannot be watched by any program")
    return int(number)


def _path(given: Any, problems: list[str]) -> str:
    try:
        return os.path.abspath(local_path(given, f"files: {given!r}"))
    except UsageError as error:
        is_typed = isinstance(error, UsageTypeError)
        problems.append(WrongType(error) if is_typed else str(error))
        return ""


# ---- Watch signals without replacing the program's handlers, installed before or after.
#
# A signal is detected in two ways. Python writes its number to a pipe (`signal.set_wakeup_fd`)
# whichever handler the program has, and shoal's handler writes it to the same pipe where other
# code, such as asyncio, has taken that place. A thread reads the pipe, so no handler takes a
# lock.


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
