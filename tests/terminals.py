"""A terminal, and what a program wrote to it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios


def open_terminal() -> tuple[int, int]:
    """Open a terminal of 24 lines and 80 columns; return our end, and that of programs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return ours, theirs


def read_to_end(ours: int) -> bytes:
    """Read our end of a terminal until its last process has closed it, and close ours."""
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:  # EIO: no process has the other end open any more
        pass
    os.close(ours)
    return shown


def screen(shown: bytes, columns: int = 80) -> list[str]:
    """Return the lines of a terminal, without blanks at their ends, nor empty last lines.

    It knows what programs of these tests write: movements, erasures, whether lines are wrapped.
    """
    lines, row, column, wraps = [""], 0, 0, True
    for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|[^\x1b]", shown.decode()):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
        elif part in ("\x1b[?7l", "\x1b[?7h"):
            wraps = part.endswith("h")
        elif part.startswith("\x1b") and part[-1] in "AB":
            rows = int(part[2:-1])
            row = max(0, row - rows if part[-1] == "A" else row + rows)
        elif part in ("\x1b[K", "\x1b[J"):
            lines[row] = lines[row][:column]
            del lines[row + 1 if part[-1] == "J" else len(lines) :]
        elif len(part) == 1:
            if column == columns and wraps:
                row, column = row + 1, 0
            column = min(column, columns - 1)
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    lines = [line.rstrip() for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return lines
