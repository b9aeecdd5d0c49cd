"""The launcher's own output, and the loop that writes it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.launch.loop import Loop
from shoal.launch.output import Outlet
from shoal.runtime.failures.facts import CallPlace, Cause, JobFailure
from shoal.runtime.failures.rendering import Style, report
from shoal.runtime.failures.shortening import printable
from shoal.runtime.rules.stopping import REQUEUE

_GROUPS = 4  # logs that a report in GitHub Actions shows
_LOG_LINES, _LOG_BYTES = 200, 256 << 10  # of each


class ReportFiles(NamedTuple):
    """Files of a job on this host."""

    logs: Mapping[int, str]  # of each process
    root: str  # of imports: the files of frames are relative to it
    reported_by: str = ""  # the node whose launcher prints the report; empty: this one


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
        columns = os.get_terminal_size(self.err.fd).columns if self.err.terminal else 80
        style = Style.for_stream(self.err.terminal, columns, os.environ, sys.stderr.encoding)
        lines = report(failure, style, reported_by=files.reported_by)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            lines = [*annotated(failure, lines, files, os.environ.get("GITHUB_WORKSPACE", ""))]
        for line in lines:
            self.err.put(f"{line}\n".encode(errors="replace"))


def annotated(
    failure: JobFailure, lines: Sequence[str], files: ReportFiles, workspace: str
) -> Iterator[str]:
    """Yield a report for GitHub Actions: an annotation, logs in groups that fold, the report.

    The runner obeys a command in any line, also one of a log or of the report. `stop-commands`
    turns that off until a line with a random token, which no log can know.

    Args:
      failure: what is reported.
      lines: its report.
      files: where the logs and the program are.
      workspace: the folder to which the runner takes files as relative.
    """
    if failure.causes and failure.exit_code != REQUEUE:
        place = next(filter(None, map(_place_of, failure.causes)), None)
        at = _at(place, files.root, workspace) if place is not None else ""
        yield f"::error {at}title=shoal run::{_escaped(printable(failure.headline))}"
    first = dict.fromkeys(cause.processes[0] for cause in failure.causes if cause.processes)
    for process in [one for one in first if one in files.logs][:_GROUPS]:
        yield f"::group::log of process {process}"
        yield from _without_commands(_last_lines(files.logs[process]))
        yield "::endgroup::"
    yield from _without_commands(lines)


def _without_commands(lines: Sequence[str]) -> Iterator[str]:
    token = os.urandom(16).hex()  # `secrets` would import hashlib
    yield f"::stop-commands::{token}"
    yield from lines
    yield f"::{token}::"


def _place_of(cause: Cause) -> tuple[str, int] | None:
    """Return the file and the line at which a failure is shown."""
    places: list[CallPlace | None] = []
    if cause.difference is not None:
        places = [side.place for side in cause.difference.sides]
    if cause.wait is not None:
        places = [one.place for one in (*cause.wait.missing, *cause.wait.arrived)]
    if cause.frames:
        return cause.frames[-1].file, cause.frames[-1].line
    known = (one for one in (*places, cause.place) if one is not None and one.file)
    return next(((one.file, one.line) for one in known), None)


def _at(place: tuple[str, int], root: str, workspace: str) -> str:
    """Return the properties of an annotation for a place."""
    file, line = place
    if workspace and os.path.exists(path := os.path.join(root, file)):
        file = os.path.relpath(os.path.realpath(path), os.path.realpath(workspace))
    file = _escaped(printable(file)).replace(":", "%3A").replace(",", "%2C")
    return f"file={file},line={line},"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _last_lines(path: str) -> list[str]:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
    return []


def _open_outlets() -> tuple[Outlet, Outlet]:
    """Return the outlets of stdout and stderr; one and the same if both are one terminal."""
    out, err = Outlet(1, os.environ), Outlet(2, os.environ)
    same = out.terminal and err.terminal and os.fstat(1).st_rdev == os.fstat(2).st_rdev
    return out, out if same else err
