"""The launcher's own output, and the loop that writes it."""

from __future__ import annotations

import os
import sys

from shoal.launch.loop import Loop
from shoal.launch.output import Outlet
from shoal.runtime.failures.facts import JobFailure
from shoal.runtime.failures.rendering import Style, report


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

    def report(self, failure: JobFailure) -> None:
        """Print the report of a failure."""
        self.err.end_line()
        columns = os.get_terminal_size(self.err.fd).columns if self.err.terminal else 80
        style = Style.for_stream(self.err.terminal, columns, os.environ, sys.stderr.encoding)
        for line in report(failure, style):
            self.err.put(f"{line}\n".encode(errors="replace"))


def _open_outlets() -> tuple[Outlet, Outlet]:
    """Return the outlets of stdout and stderr; one and the same if both are one terminal."""
    out, err = Outlet(1, os.environ), Outlet(2, os.environ)
    same = out.terminal and err.terminal and os.fstat(1).st_rdev == os.fstat(2).st_rdev
    return out, out if same else err
