"""What the processes of a job say: kept in a log each, shown line by line behind a prefix.

`Outlet` is one of the launcher's own streams. `Log` is one process's file. `Voice` is one stream
of one process: it cuts bytes into lines. All of it works on bytes: whatever a process writes comes
out unchanged, decodable or not.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping

_ATOMIC_BYTES = 4096  # a pipe that poll() calls writable takes so much without blocking: pipe(7)
_LINE_BYTES = 65536  # a longer line is shown in pieces
_TAIL_BYTES = 32768
_TRACEBACK = b"Traceback (most recent call last)"
_TERMINAL_PAUSE_S = 0.1  # an unfinished line (a prompt, a progress bar) is shown after so long
_FILE_PAUSE_S = 5.0  # in a file or pipe, a progress bar leaves one line in so long; in a log, all
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # red is for errors
# gloo says so to stdout for every new group of devices, and has no switch: kept in the logs only
_NOTICE = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. "
    rb"Expected number of connected peer ranks is : (\d+)"
)
_PIECES_OF_NOTICES = re.compile(
    rb"(?:\[Gloo\] Rank | is connected to | peer ranks\. |"
    rb"Expected number of connected peer ranks is : |\d)+"
)
_RESET = b"\x1b[0m"
_CLEAR_REST = b"\x1b[K"


def paint_prefixes(num_processes: int, *, colour: bool, shown: bool = True) -> list[bytes]:
    """Return `p0| `, `p1| `…, aligned, each in a colour of its own where `colour` is true."""
    if not shown:
        return [b""] * num_processes
    width = len(f"p{num_processes - 1}|")
    prefixes = []
    for process in range(num_processes):
        text = f"p{process}|".ljust(width)
        shade = _COLOURS[process % len(_COLOURS)]
        prefixes.append((f"\x1b[{shade}m{text}\x1b[0m " if colour else f"{text} ").encode())
    return prefixes


class Outlet:
    """One of the launcher's own streams; what its reader has not taken yet waits here."""

    def __init__(self, fd: int, env: Mapping[str, str]) -> None:
        self.fd = fd
        self.terminal = os.isatty(fd)
        self.colour = self.terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        self.waiting = bytearray()
        self.open_by: Voice | None = None  # whose unfinished line the cursor stands behind
        self.broken = ""  # why nothing can be written any more

    def put(self, data: bytes) -> None:
        """Queue bytes."""
        if not self.broken:
            self.waiting += data

    def end_line(self) -> None:
        """Leave an unfinished line, whosesoever it is."""
        if self.open_by is not None:
            self.put(b"\n")
            self.open_by = None

    def write_some(self) -> None:
        """Write what a stream that is ready to write takes without blocking."""
        try:
            written = os.write(self.fd, self.waiting[:_ATOMIC_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self.broken = "nobody reads the output"
            if error.errno != errno.EPIPE:
                self.broken = f"the output cannot be written: {error.strerror}"
            self.waiting.clear()
        else:
            del self.waiting[:written]


class Log:
    """One process's file: both of its streams, byte for byte. A full disk does not stop the job."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.trouble = ""
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, data: bytes) -> None:
        """Append bytes; after the first failure do nothing and keep the reason in `trouble`."""
        if not self.trouble:
            try:
                self._file.write(data)
            except OSError as error:
                self.trouble = f"{self.path} ends early: {error.strerror}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Voice:
    """One stream of one process, cut into lines.

    A carriage return goes back to the start of its line: of `10%\\r20%\\r` only `20%` is shown. On
    a terminal it is redrawn in place, as long as nobody else speaks. The log gets whole lines: an
    unbuffered `print("a", 1)` writes four times, and the other stream would come between.

    Args:
      outlet: where it is shown; None: nowhere.
      prefix: what stands before each line.
    """

    def __init__(self, outlet: Outlet | None, prefix: bytes, log: Log) -> None:
        self.tail = b""  # the last that was said, for the report of a failure
        self.traceback_s: float | None = None  # when the last traceback began
        self.due_s: float | None = None  # when the unfinished line is to be dealt with
        self._outlet, self._prefix, self._log = outlet, prefix, log
        self._unlogged = b""  # of the unfinished line
        self._rest = b""  # the unfinished line
        self._shown = b""  # how much of it is shown
        self._redraws = False  # it is a progress bar

    def hear(self, data: bytes, now_s: float) -> None:
        """Take bytes: log and show the lines that they complete."""
        lines, newline, self._unlogged = (self._unlogged + data).rpartition(b"\n")
        self._log.write(lines + newline)
        if len(self._unlogged) > _LINE_BYTES:
            self._log_unfinished()
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if _TRACEBACK in self.tail[-len(data) - len(_TRACEBACK) + 1 :]:
            self.traceback_s = now_s
        if self._outlet is not None:
            self._show_lines(self._outlet, data)
        if not self._rest and not self._unlogged:
            self.due_s = None
        elif self.due_s is None:
            at_once = self._outlet is not None and self._outlet.terminal
            self.due_s = now_s + (_TERMINAL_PAUSE_S if at_once else _FILE_PAUSE_S)

    def _show_lines(self, outlet: Outlet, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._finish(outlet, line)
        self._redraws = self._redraws or b"\r" in self._rest
        if self._redraws:
            self._rest = self._rest[self._rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        while len(self._rest) > _LINE_BYTES:
            cut = _cut_between_characters(self._rest, _LINE_BYTES)
            self._finish(outlet, self._rest[:cut])
            self._rest = self._rest[cut:]

    def show_unfinished(self) -> None:
        """Log the line that is not finished yet, and show it; in a file, only a progress bar."""
        self.due_s = None
        self._log_unfinished()
        text = _visible(self._rest)
        if self._outlet is None or not text or text == self._shown:
            return
        if self._outlet.terminal:
            self._draw(self._outlet, text)
            self._outlet.open_by = self
        elif self._redraws:
            self._outlet.put(self._prefix + text + b"\n")
        else:
            return
        self._shown = text

    def close(self) -> None:
        """Log what is left, and show it as a line."""
        self._log_unfinished()
        if self._rest and self._outlet is not None:
            self._finish(self._outlet, self._rest)
        self._rest, self.due_s = b"", None

    def _log_unfinished(self) -> None:
        self._log.write(self._unlogged)
        self._unlogged = b""

    def _finish(self, outlet: Outlet, line: bytes) -> None:
        text = _visible(line)
        if _is_notice(text) and not self._shown:
            return
        if self._shown and text == self._shown and outlet.open_by is not self:
            pass  # it stands there, as a line: in a file, or since another spoke
        elif outlet.terminal:
            self._draw(outlet, text)
            outlet.put(_RESET + b"\n" if b"\x1b" in text else b"\n")
            outlet.open_by = None
        else:
            outlet.put(self._prefix + text + b"\n")
        self._shown, self._redraws, self.due_s = b"", False, None

    def _draw(self, outlet: Outlet, text: bytes) -> None:
        """Bring the terminal's current line to `text`, without the end of line."""
        if outlet.open_by is not self:
            outlet.end_line()
            outlet.put(self._prefix + text)
        elif text.startswith(self._shown):
            outlet.put(text[len(self._shown) :])
        else:
            outlet.put(b"\r" + self._prefix + text + _CLEAR_REST)


def _is_notice(text: bytes) -> bool:
    """Return whether it is gloo's: one with equal counts, or some that its threads have mixed."""
    if b"connected" not in text:
        return False
    whole = _NOTICE.fullmatch(text)
    return whole[1] == whole[2] if whole else _PIECES_OF_NOTICES.fullmatch(text) is not None


def _visible(line: bytes) -> bytes:
    """Return what a terminal would leave of a line that goes back to its start."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _cut_between_characters(data: bytes, limit: int) -> int:
    """Return the last place ≤ limit that is not inside a UTF-8 character."""
    for cut in range(limit, limit - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return limit
