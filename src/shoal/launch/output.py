"""The output of a job's processes: logged for each, and shown.

`Outlet` is one of the launcher's own streams. `Log` is one process's file. `LineStream` is one
stream of one process, and a `Display` shows it: `Lines` behind a prefix or on a terminal,
`WholeLines` or `Exactly` without a prefix. Everything works on bytes, decodable or not.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from shoal.paths import open_no_link
from shoal.runtime.failures.last_record import BEGIN, END

_ATOMIC_BYTES = 4096  # a writable pipe (poll) takes this much without blocking: pipe(7)
_LINE_BYTES = 65536  # a longer line is passed on in pieces
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
_MOST_BARS = 16


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
        self.bars = Bars(self) if self.terminal else None
        self.waiting = bytearray()
        self.open_by: Display | None = None  # the stream whose unfinished line was written last
        self.held_by: WholeLines | None = None  # the stream that passes on a line in pieces
        self.waiting_displays: list[WholeLines] = []  # what has lines to pass on, after that one
        self.broken = ""  # why nothing can be written any more

    def put(self, data: bytes) -> None:
        """Queue bytes."""
        if not self.broken:
            self.waiting += data

    def end_line(self) -> None:
        """End an unfinished line, of any stream, and make room above the progress bars."""
        if self.bars is not None:
            self.bars.erase()
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


class Bars:
    """The progress bars at the bottom of a terminal: a row for each stream that has one.

    Lines are written above them. The cursor is in the last row.
    """

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._rows: dict[Display, bytes] = {}
        self._are_drawn = False  # then no unfinished line is there
        self._most = 1  # rows

    def share_terminal(self, lines: int) -> None:
        """Allow several rows, on a terminal of so many lines to which nothing else writes."""
        self._most = min(max(lines // 2, 1), _MOST_BARS)

    def show(self, display: Display, row: bytes) -> bool:
        """Draw the row of a stream in place; return whether there is room for it."""
        if display not in self._rows and len(self._rows) >= self._most:
            return False
        if self._outlet.open_by is display:  # it was not known as a bar
            self._outlet.put(b"\r" + _CLEAR_REST)
            self._outlet.open_by = None
        if display not in self._rows or self._outlet.open_by is not None:
            self._outlet.end_line()
        self._rows[display] = row
        if self._are_drawn:
            below = len(self._rows) - 1 - [*self._rows].index(display)
            self._outlet.put(_moved(below, b"A") + _drawn(row) + _moved(below, b"B"))
        self.draw()
        return True

    def remove(self, display: Display) -> None:
        """Remove the row of a stream, if it has one."""
        if display in self._rows:
            self.erase()
            del self._rows[display]

    def erase(self) -> None:
        """Erase all rows, until `draw`."""
        if self._are_drawn:
            self._outlet.put(_moved(len(self._rows) - 1, b"A") + b"\r\x1b[J")
            self._are_drawn = False

    def draw(self) -> None:
        """Draw all rows again, unless an unfinished line is there."""
        if self._rows and not self._are_drawn and self._outlet.open_by is None:
            self._outlet.put(b"\n".join(map(_drawn, self._rows.values())))
            self._are_drawn = True


def _moved(rows: int, way: bytes) -> bytes:
    """Return what moves the cursor, A: up, B: down."""
    return b"\x1b[%d%b" % (rows, way) if rows else b""


def _drawn(row: bytes) -> bytes:
    """Return what draws a row in place; the terminal cuts what is wider than it is."""
    return b"\r\x1b[?7l" + row + _RESET + _CLEAR_REST + b"\x1b[?7h"


class Log:
    """One process's log: both of its streams, byte for byte. A full disk does not stop the job."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem = ""
        self.tail = b""  # the end of what the program wrote, for the report of a failure
        file = open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._file = open(file, "wb", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, data: bytes, *, is_of_program: bool = True) -> None:
        """Append bytes; after the first failure do nothing and keep the reason in `problem`."""
        if is_of_program:
            self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if not self.problem:
            try:
                self._file.write(data)
            except OSError as error:
                self.problem = f"{self.path} ends early: {error.strerror}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LineStream:
    """One stream of one process: logged, and shown by its display.

    The log gets whole lines: an unbuffered `print("a", 1)` writes four times, and the other stream
    would come in between.

    Args:
      display: shows it; None: not shown.
    """

    def __init__(self, display: Display | None, log: Log) -> None:
        self.due_s: float | None = None  # when the unfinished line must be shown
        self._display, self._log = display, log
        self._unlogged = b""  # of the unfinished line
        self._held = b""  # what may be the beginning of a mark
        self._for_log = 0  # blocks of `last_record.for_the_log` that are open: one per thread

    @property
    def waits(self) -> bool:
        """Whether nothing may be read now: a line of another stream is passed on in pieces."""
        return isinstance(self._display, WholeLines) and self._display.waits

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes: log and show the lines that they complete."""
        for piece in self._pieces(data):
            self._feed(piece, now_s)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield what is between the marks, which set `_for_log`."""
        data, self._held = self._held + data, b""
        while match := _MARK.search(data):
            if match.start():
                yield data[: match.start()]
            data = data[match.end() :]
            if self._display is not None:
                self._display.end_line()
            self._log_unfinished()
            self._for_log = max(0, self._for_log + (1 if match[0] == BEGIN else -1))
        start = data.find(_ESCAPE, max(0, len(data) - _MARK_BYTES))
        while start >= 0 and not any(mark.startswith(data[start:]) for mark in (BEGIN, END)):
            start = data.find(_ESCAPE, start + 1)
        if start >= 0:
            data, self._held = data[:start], data[start:]
        if data:
            yield data

    def _feed(self, data: bytes, now_s: float) -> None:
        lines, newline, self._unlogged = (self._unlogged + data).rpartition(b"\n")
        self._log.write(lines + newline, is_of_program=not self._for_log)
        if len(self._unlogged) > _LINE_BYTES:
            self._log_unfinished()
        display = self._display
        if display is not None and not self._for_log:
            display.show(data)
        if display is not None and display.holds:
            self.due_s = now_s + _FILE_PAUSE_S
        elif not self._unlogged and (display is None or not display.is_unfinished):
            self.due_s = None
        elif self.due_s is None:
            self.due_s = now_s + (_FILE_PAUSE_S if display is None else display.pause_s)

    def show_unfinished(self) -> None:
        """Log the unfinished line, and let the display show it."""
        self.due_s = None
        self._log_unfinished()
        if self._display is not None:
            self._display.pause()

    def close(self) -> None:
        """Log the rest, and show it."""
        if self._held:
            self._feed(self._held, 0.0)
            self._held = b""
        self._log_unfinished()
        if self._display is not None:
            self._display.close()
        self.due_s = None

    def _log_unfinished(self) -> None:
        self._log.write(self._unlogged, is_of_program=not self._for_log)
        self._unlogged = b""


class Display(Protocol):
    """How one stream is shown on an outlet."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a part of a line is not shown."""

    @property
    def holds(self) -> bool:
        """Whether the other streams of the outlet wait for the end of a line of this one."""

    @property
    def pause_s(self) -> float:
        """For how long a part of a line waits for the rest."""

    def show(self, data: bytes) -> None:
        """Take bytes."""

    def end_line(self) -> None:
        """Show the unfinished line as a whole one."""

    def pause(self) -> None:
        """Nothing has come for `pause_s`."""

    def close(self) -> None:
        """Nothing comes any more."""


class Exactly:
    """Shows the bytes of a process as they come."""

    is_unfinished = holds = False
    pause_s = _FILE_PAUSE_S

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def show(self, data: bytes) -> None:
        """Pass them on."""
        self._outlet.put(data)
        self._outlet.open_by = None if data.endswith(b"\n") else self

    def end_line(self) -> None:
        """Do nothing: it is passed on as it is."""

    def pause(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class WholeLines:
    """Shows one stream of several without a prefix: whole lines, unchanged, however long.

    A line that is longer than the memory for it is passed on in pieces. Until its end, or until its
    process pauses within it, it has the outlet to itself, and the other streams wait.
    """

    pause_s = _FILE_PAUSE_S

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._rest = b""  # the unfinished line; whole ones, too, while it waits
        self._has_ended = False

    @property
    def is_unfinished(self) -> bool:
        """Whether a part of a line is not shown."""
        return bool(self._rest)

    @property
    def holds(self) -> bool:
        """Whether a line of it is passed on in pieces."""
        return self._outlet.held_by is self

    @property
    def waits(self) -> bool:
        """Whether a line of another stream is passed on in pieces."""
        return self._outlet.held_by not in (None, self)

    def show(self, data: bytes) -> None:
        """Pass on whole lines, or what there is of a very long one."""
        self._rest += data
        if self.waits:
            if self not in self._outlet.waiting_displays:
                self._outlet.waiting_displays.append(self)
            return
        self._pass_on()
        if self.holds or len(self._rest) > _LINE_BYTES:
            self._outlet.held_by = self
            self._put(self._rest)
            self._rest = b""
        self._let_others()

    def end_line(self) -> None:
        """Do nothing: it is passed on as it is."""

    def pause(self) -> None:
        """Let the others go on, if its line is passed on in pieces."""
        if self.holds:
            self._outlet.held_by = None
            self._let_others()

    def close(self) -> None:
        """Pass on the rest, as it is."""
        self._has_ended = True
        self.show(b"")
        self.pause()

    def _pass_on(self) -> None:
        lines, newline, self._rest = self._rest.rpartition(b"\n")
        if newline:
            self._put(_without_notices(lines + newline))
            self._outlet.held_by = None
        if self._has_ended:
            self._put(self._rest)
            self._rest = b""

    def _put(self, data: bytes) -> None:
        if data:
            if self._outlet.open_by is not self:
                self._outlet.end_line()
            self._outlet.put(data)
            self._outlet.open_by = None if data.endswith(b"\n") else self

    def _let_others(self) -> None:
        while self._outlet.waiting_displays and self._outlet.held_by is None:
            self._outlet.waiting_displays.pop(0)._pass_on()


class Lines:
    """Shows one stream line by line, with a prefix or on a terminal.

    A carriage return goes back to the start of its line: of `10%\\r20%\\r` only `20%` is shown. A
    line with one is a progress bar: on a terminal it is redrawn in place, below what is written.
    """

    holds = False

    def __init__(self, outlet: Outlet, prefix: bytes) -> None:
        self._outlet, self._prefix = outlet, prefix
        self._rest = b""  # the unfinished line
        self._shown = b""  # the part of it that is shown
        self._redraws = False  # it is a progress bar
        self._notices = _Notices()
        self.pause_s = _TERMINAL_PAUSE_S if outlet.terminal else _FILE_PAUSE_S

    @property
    def is_unfinished(self) -> bool:
        """Whether a part of a line is not shown as a line."""
        return bool(self._rest)

    def show(self, data: bytes) -> None:
        """Show the lines that the bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._finish(line)
        self._redraws = self._redraws or b"\r" in self._rest
        if self._redraws:
            self._rest = self._rest[self._rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        while len(self._rest) > _LINE_BYTES:
            cut = _cut_between_characters(self._rest, _LINE_BYTES)
            self._finish(self._rest[:cut])
            self._rest = self._rest[cut:]

    def end_line(self) -> None:
        """Show the unfinished line as a whole one."""
        if self._rest:
            self._finish(self._rest)
            self._rest = b""

    def pause(self) -> None:
        """Show the unfinished line; in a file, only a progress bar."""
        text, bars = _visible(self._rest), self._outlet.bars
        if not text or text == self._shown:
            return
        if self._redraws and bars is not None:
            if not bars.show(self, self._prefix + text):
                return
        elif bars is not None:
            self._draw(text)
            self._outlet.open_by = self
        elif self._redraws:
            self._outlet.put(self._prefix + text + b"\n")
        else:
            return
        self._shown = text

    def close(self) -> None:
        """Show the rest as a line."""
        self.end_line()

    def _finish(self, line: bytes) -> None:
        outlet, text = self._outlet, _visible(line)
        if self._notices.take(text) and not self._shown:
            return
        bars = outlet.bars if self._redraws else None
        if bars is not None:
            bars.remove(self)
        if self._shown and text == self._shown and outlet.open_by is not self and not bars:
            pass  # it is shown already, as a line: in a file, or since another stream wrote
        elif outlet.terminal:
            self._draw(text)
            outlet.put(_RESET + b"\n" if b"\x1b" in text else b"\n")
            outlet.open_by = None
        else:
            outlet.put(self._prefix + text + b"\n")
        self._shown, self._redraws = b"", False

    def _draw(self, text: bytes) -> None:
        """Redraw the terminal's current line as `text`, without a line end."""
        outlet = self._outlet
        if outlet.open_by is not self:
            outlet.end_line()
            outlet.put(self._prefix + text)
        elif text.startswith(self._shown):
            outlet.put(text[len(self._shown) :])
        else:
            outlet.put(b"\r" + self._prefix + text + _CLEAR_REST)


def display_of(outlet: Outlet, prefix: bytes, *, is_alone: bool) -> Display:
    """Return how a stream is shown.

    Args:
      prefix: printed before each line; b"": the bytes are passed on unchanged.
      is_alone: whether the job has one process only.
    """
    if prefix or (outlet.terminal and not is_alone):
        return Lines(outlet, prefix)
    return Exactly(outlet) if is_alone else WholeLines(outlet)


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


def _without_notices(lines: bytes) -> bytes:
    if b"connected" not in lines:
        return lines
    return b"\n".join(line for line in lines.split(b"\n") if not is_notice(line))


def _visible(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _cut_between_characters(data: bytes, limit: int) -> int:
    """Return the last place ≤ limit that is not inside a UTF-8 character."""
    for cut in range(limit, limit - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return limit
