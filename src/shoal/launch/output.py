"""The output of a job's processes: logged for each, shown line by line behind a prefix.

`Outlet` is one of the launcher's own streams. `Log` is one process's file. `LineStream` is one
stream of one process: it cuts bytes into lines. Everything works on bytes, so that any output
passes through unchanged, decodable or not.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping

from shoal.paths import open_no_link
from shoal.runtime.failures.last_record import BEGIN, END

_ATOMIC_BYTES = 4096  # a writable pipe (poll) takes this much without blocking: pipe(7)
_LINE_BYTES = 65536  # a longer line is shown in pieces
_TAIL_BYTES = 32768
_TERMINAL_PAUSE_S = 0.1  # an unfinished line (a prompt, a progress bar) is shown after this
_FILE_PAUSE_S = 5.0  # a progress bar leaves a line in a file or pipe this often; in a log, all
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # red is for errors
# gloo prints this for every new group of devices, without a switch: kept in the logs only
_NOTICE = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. "
    rb"Expected number of connected peer ranks is : (\d+)"
)
_NOTICE_BEGINS = b"[Gloo] Rank "
_PIECES_OF_NOTICES = re.compile(
    rb"(?:\[Gloo\] Rank | is connected to | peer ranks\. |"
    rb"Expected number of connected peer ranks is : |\d)+"
)
_MARK = re.compile(re.escape(BEGIN) + b"|" + re.escape(END))
_ESCAPE, _MARK_BYTES = BEGIN[:1], max(len(BEGIN), len(END))
_RESET = b"\x1b[0m"
_CLEAR_REST = b"\x1b[K"


def paint_prefixes(num_processes: int, *, colour: bool, shown: bool = True) -> list[bytes]:
    """Return `p0| `, `p1| `…, aligned, each in its own colour if `colour` is true."""
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
    """One of the launcher's own streams, with a buffer for bytes not yet written."""

    def __init__(self, fd: int, env: Mapping[str, str]) -> None:
        self.fd = fd
        self.terminal = os.isatty(fd)
        self.colour = self.terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        self.waiting = bytearray()
        self.open_by: LineStream | None = None  # the stream whose unfinished line the cursor is on
        self.broken = ""  # why nothing can be written any more

    def put(self, data: bytes) -> None:
        """Queue bytes."""
        if not self.broken:
            self.waiting += data

    def end_line(self) -> None:
        """End an unfinished line, of any stream."""
        if self.open_by is not None:
            self.put(b"\n")
            self.open_by = None

    def write_some(self) -> None:
        """Write as much as a writable stream takes without blocking."""
        try:
            written = os.write(self.fd, self.waiting[:_ATOMIC_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self.broken = "the output has no reader"
            if error.errno != errno.EPIPE:
                self.broken = f"the output cannot be written: {error.strerror}"
            self.waiting.clear()
        else:
            del self.waiting[:written]


class Log:
    """One process's log: both of its streams, byte for byte. A full disk does not stop the job."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.trouble = ""
        self.tail = b""  # its end, for the report of a failure
        file = open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._file = open(file, "wb", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, data: bytes) -> None:
        """Append bytes; after the first failure do nothing and keep the reason in `trouble`."""
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if not self.trouble:
            try:
                self._file.write(data)
            except OSError as error:
                self.trouble = f"{self.path} ends early: {error.strerror}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LineStream:
    """One stream of one process, cut into lines.

    A carriage return goes back to the start of its line: of `10%\\r20%\\r` only `20%` is shown. On
    a terminal it is redrawn in place, until another stream writes. The log gets whole lines: an
    unbuffered `print("a", 1)` writes four times, and the other stream would come in between.

    Args:
      outlet: the stream that shows it; None: not shown.
      prefix: printed before each line.
    """

    def __init__(self, outlet: Outlet | None, prefix: bytes, log: Log) -> None:
        self.due_s: float | None = None  # when the unfinished line must be shown
        self._outlet, self._prefix, self._log = outlet, prefix, log
        self._unlogged = b""  # of the unfinished line
        self._rest = b""  # the unfinished line
        self._shown = b""  # the part of it that is shown
        self._held = b""  # what may be the beginning of a mark
        self._for_log = 0  # blocks of `last_record.for_the_log` that are open: one per thread
        self._redraws = False  # it is a progress bar
        self._notices = _Notices()

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes: log and show the lines that they complete."""
        for piece in self._pieces(data):
            self._feed(piece, now_s)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield what is between the marks, which set `_for_log`."""
        data, self._held = self._held + data, b""
        while found := _MARK.search(data):
            if found.start():
                yield data[: found.start()]
            data = data[found.end() :]
            if self._rest and self._outlet is not None:
                self._finish(self._outlet, self._rest)
                self._rest = b""
            self._for_log = max(0, self._for_log + (1 if found[0] == BEGIN else -1))
        at = data.find(_ESCAPE, max(0, len(data) - _MARK_BYTES))
        while at >= 0 and not any(mark.startswith(data[at:]) for mark in (BEGIN, END)):
            at = data.find(_ESCAPE, at + 1)
        if at >= 0:
            data, self._held = data[:at], data[at:]
        if data:
            yield data

    def _feed(self, data: bytes, now_s: float) -> None:
        lines, newline, self._unlogged = (self._unlogged + data).rpartition(b"\n")
        self._log.write(lines + newline)
        if len(self._unlogged) > _LINE_BYTES:
            self._log_unfinished()
        if self._outlet is not None and not self._for_log:
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
        """Log the unfinished line, and show it; in a file, only a progress bar."""
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
        """Log the rest, and show it as a line."""
        if self._held:
            self._feed(self._held, 0.0)
            self._held = b""
        self._log_unfinished()
        if self._rest and self._outlet is not None:
            self._finish(self._outlet, self._rest)
        self._rest, self.due_s = b"", None

    def _log_unfinished(self) -> None:
        self._log.write(self._unlogged)
        self._unlogged = b""

    def _finish(self, outlet: Outlet, line: bytes) -> None:
        text = _visible(line)
        if self._notices.take(text) and not self._shown:
            return
        if self._shown and text == self._shown and outlet.open_by is not self:
            pass  # it is shown already, as a line: in a file, or since another stream wrote
        elif outlet.terminal:
            self._draw(outlet, text)
            outlet.put(_RESET + b"\n" if b"\x1b" in text else b"\n")
            outlet.open_by = None
        else:
            outlet.put(self._prefix + text + b"\n")
        self._shown, self._redraws, self.due_s = b"", False, None

    def _draw(self, outlet: Outlet, text: bytes) -> None:
        """Redraw the terminal's current line as `text`, without a line end."""
        if outlet.open_by is not self:
            outlet.end_line()
            outlet.put(self._prefix + text)
        elif text.startswith(self._shown):
            outlet.put(text[len(self._shown) :])
        else:
            outlet.put(b"\r" + self._prefix + text + _CLEAR_REST)


class _Notices:
    """The notices of gloo among the lines of a stream, also those torn by its threads.

    One that has printed its words into the line of another prints its last number and its line end
    later: `[Gloo] Rank 0 … is : [Gloo] Rank 0 … is : 1`, and then `1`.
    """

    def __init__(self) -> None:
        self._owed = 0  # line ends of notices that have begun

    def take(self, line: bytes) -> bool:
        """Return whether a line is of notices alone."""
        if is_notice(line):
            self._owed = max(0, self._owed + line.count(_NOTICE_BEGINS) - 1)
            return True
        if not self._owed or line.strip(b"0123456789"):
            return False
        self._owed -= 1
        return True


def is_notice(text: bytes) -> bool:
    """Return whether this line is gloo's notice: equal counts, or several mixed by its threads."""
    if b"connected" not in text:
        return False
    whole = _NOTICE.fullmatch(text)
    return whole[1] == whole[2] if whole else _PIECES_OF_NOTICES.fullmatch(text) is not None


def _visible(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _cut_between_characters(data: bytes, limit: int) -> int:
    """Return the last place ≤ limit that is not inside a UTF-8 character."""
    for cut in range(limit, limit - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return limit
