"""The launcher's event loop: pipes in, two streams out, ended children, timers.

One thread, and nothing in it blocks: a terminal or pipe that is read slowly makes the processes
wait, not the loop, so deadlines and signals stay prompt.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO

from shoal.launch.github_actions import ReportFiles, annotated
from shoal.launch.output import LineStream, Outlet
from shoal.runtime.failures.facts import JobFailure
from shoal.runtime.failures.rendering import Style, report

_READ_BYTES = 65536
_WAITING_BYTES = 1 << 20  # with this much unread output, the processes have to wait

Feed = Callable[[bytes, float], None]
Close = Callable[[], None]


class Loop:
    """Calls back on input; `turn` returns after an event."""

    def __init__(self, outlets: Sequence[Outlet]) -> None:
        self.outlets = outlets
        # poll() accepts regular files, unlike epoll; on macOS it does not accept terminals.
        poll = selectors.PollSelector if sys.platform == "linux" else selectors.SelectSelector
        self._selector = poll()
        self._sources: dict[int, tuple[IO[bytes], Feed, Close]] = {}
        self._never_paused: set[int] = set()
        self._streams: dict[int, LineStream] = {}
        self._paused: set[int] = set()
        self._on_signal: Callable[[signal.Signals], None] = lambda number: None
        self._woken_fd = _wake_on_signals()
        self._selector.register(self._woken_fd, selectors.EVENT_READ, self._wake)

    @property
    def has_input(self) -> bool:
        """Whether any pipe given to `listen` is still open."""
        return bool(self._sources)

    @property
    def is_full(self) -> bool:
        """Whether so much output is unread that the processes have to wait."""
        return any(len(outlet.waiting) > _WAITING_BYTES for outlet in self.outlets)

    @property
    def writes(self) -> bool:
        """Whether output is still unwritten."""
        return any(outlet.waiting for outlet in self.outlets)

    @property
    def broken(self) -> str:
        """Why one of the outlets cannot be written, or an empty string."""
        return next((outlet.broken for outlet in self.outlets if outlet.broken), "")

    def read_orders(self, fd: int, call: Callable[[bytes], None]) -> None:
        """Call `call` with bytes read from `fd`, until `ignore`; with b"" once, at its end.

        Never paused.
        """

        def read() -> None:
            data = os.read(fd, _READ_BYTES)
            if not data:
                self._selector.unregister(fd)
            call(data)

        self._selector.register(fd, selectors.EVENT_READ, read)

    def read_signals(self, call: Callable[[signal.Signals], None]) -> None:
        """Call `call` with each signal to this process that has a handler."""
        self._on_signal = call

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call `call` whenever `fd` is readable, until `ignore`. Never paused."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def ignore(self, fd: int) -> None:
        """Undo `watch` or `read_orders`; no effect on another descriptor."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def listen(self, pipe: IO[bytes], feed: Feed, close: Close, *, always: bool = False) -> None:
        """Call `feed` with bytes read from `pipe`, and `close` at its end. Closes the pipe.

        While too much output is unread, only pipes with `always` are read.
        """
        self._sources[pipe.fileno()] = (pipe, feed, close)
        if always:
            self._never_paused.add(pipe.fileno())
        self._resume(pipe.fileno())

    def listen_to(self, pipe: IO[bytes], stream: LineStream) -> None:
        """Pass `pipe` to a stream, and show its unfinished line when due."""
        self._streams[pipe.fileno()] = stream
        self.listen(pipe, stream.feed, stream.close)

    def turn(self, until_s: float) -> None:
        """Wait for events, at most until `until_s`, and handle them."""
        for outlet in self.outlets:
            if outlet.bars is not None:
                outlet.bars.draw()
            self._register(outlet)
        self._pause(self._blocked())
        # A stream that is not read is not known to pause.
        streams = [] if self.is_full else [*self._streams.values()]
        due_s = min((v.due_s for v in streams if v.due_s is not None), default=until_s)
        wait_s = max(0.0, min(due_s, until_s) - time.monotonic())
        for key, _ in self._selector.select(min(wait_s, 3600.0)):
            key.data()
        now_s = time.monotonic()
        for stream in streams:
            if stream.due_s is not None and stream.due_s <= now_s:
                stream.show_unfinished()

    def silence(self) -> None:
        """Close every pipe that is still open."""
        for fd in list(self._sources):
            self._forget(fd)

    def _resume(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._read(fd))

    def _read(self, fd: int) -> None:
        data = os.read(fd, _READ_BYTES)
        if data:
            self._sources[fd][1](data, time.monotonic())
        else:
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        if fd not in self._paused:
            self._selector.unregister(fd)
        self._paused.discard(fd)
        self._never_paused.discard(fd)
        self._streams.pop(fd, None)
        pipe, _, close = self._sources.pop(fd)
        pipe.close()
        close()

    def _blocked(self) -> set[int]:
        """Return the pipes that must not be read now."""
        if self.is_full:
            return {*self._sources} - self._never_paused
        if any(outlet.held_by for outlet in self.outlets):
            return {fd for fd, stream in self._streams.items() if stream.waits}
        return set()

    def _pause(self, blocked: set[int]) -> None:
        for fd in blocked - self._paused:
            self._selector.unregister(fd)
        for fd in self._paused - blocked:
            self._resume(fd)
        self._paused = blocked

    def _register(self, outlet: Outlet) -> None:
        registered = outlet.fd in self._selector.get_map()
        if outlet.waiting and not registered:
            self._selector.register(outlet.fd, selectors.EVENT_WRITE, outlet.write_some)
        elif registered and not outlet.waiting:
            self._selector.unregister(outlet.fd)

    def _wake(self) -> None:
        for number in os.read(self._woken_fd, _READ_BYTES):
            if number != signal.SIGCHLD:
                self._on_signal(signal.Signals(number))


def _wake_on_signals() -> int:
    """Return a descriptor from which the numbers of signals with a handler are read, and that of
    SIGCHLD, when a child ends (signal.set_wakeup_fd)."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _do_nothing)
    return read_fd


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal only has to wake the loop."""


# ---- The launcher's own output, and the loop that writes it.


class Console:
    """The launcher's stdout and stderr, written by its event loop."""

    def __init__(self) -> None:
        self.out, self.err = _open_outlets()
        self.loop = Loop([self.out] if self.out is self.err else [self.out, self.err])

    def print(self, *lines: str) -> None:
        """Print lines of the launcher; a line that starts with a space continues the last one."""
        self.err.end_line()
        for line in lines:
            named = line if line.startswith(" ") else f"shoal run: {line}"
            self.err.put(f"{named}\n".encode(errors="replace"))

    def report(self, failure: JobFailure, files: ReportFiles) -> None:
        """Print the report of a failure, in GitHub Actions with an annotation and logs."""
        self.err.end_line()
        columns = 80
        with contextlib.suppress(OSError):  # the terminal may be closed
            columns = os.get_terminal_size(self.err.fd).columns
        style = Style.for_stream(self.err.terminal, columns, os.environ, sys.stderr.encoding)
        lines = report(failure, style, reported_by=files.reported_by)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            lines = [*annotated(failure, lines, files, os.environ.get("GITHUB_WORKSPACE", ""))]
        for line in lines:
            self.err.put(f"{line}\n".encode(errors="replace"))


def _open_outlets() -> tuple[Outlet, Outlet]:
    """Return the outlets of stdout and stderr; one and the same if both are one terminal, file or
    pipe."""
    out, err = Outlet(1, os.environ), Outlet(2, os.environ)
    if not _are_one():
        return out, err
    if out.bars is not None:
        out.bars.share_terminal(os.get_terminal_size(out.fd).lines)
    return out, out


def _are_one() -> bool:
    try:
        out, err = os.fstat(1), os.fstat(2)
    except OSError:  # closed
        return False
    is_same_terminal = os.isatty(1) and os.isatty(2) and out.st_rdev == err.st_rdev
    return is_same_terminal or os.path.samestat(out, err)
