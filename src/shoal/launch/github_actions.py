"""A report as GitHub Actions shows it: an annotation at the program's line, logs that fold."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.runtime.failures.facts import CallPlace, Cause, JobFailure
from shoal.runtime.failures.shortening import printable
from shoal.runtime.rules.stopping import REQUEUE

_GROUPS = 4  # logs that are shown
_LOG_LINES, _LOG_BYTES = 200, 256 << 10  # of each


class ReportFiles(NamedTuple):
    """Files of a job on this host."""

    logs: Mapping[int, str]  # of each process
    root: str  # of imports: the files of frames are relative to it
    reported_by: str = ""  # the node whose launcher prints the report; empty: this one


def annotated(
    failure: JobFailure, lines: Sequence[str], files: ReportFiles, workspace: str
) -> Iterator[str]:
    """Yield an annotation, logs in groups that fold, and the report.

    The runner obeys a command in any line, also one of a log or of the report. `stop-commands`
    turns that off until a line with a random token, which no log can know.

    Args:
      failure: what is reported.
      lines: its report.
      files: where the logs and the program are.
      workspace: the directory to which the runner takes files as relative.
    """
    if failure.causes and failure.exit_code != REQUEUE:
        place = next(filter(None, map(_place_of, failure.causes)), None)
        properties = _at(place, files.root, workspace) if place is not None else ""
        yield f"::error {properties}title=shoal run::{_escaped(printable(failure.headline))}"
    first = dict.fromkeys(cause.processes[0] for cause in failure.causes if cause.processes)
    for process in [p for p in first if p in files.logs][:_GROUPS]:
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
        places = [group.place for group in (*cause.wait.missing, *cause.wait.arrived)]
    if cause.frames:
        return cause.frames[-1].file, cause.frames[-1].line
    known = (place for place in (*places, cause.place) if place is not None and place.file)
    return next(((place.file, place.line) for place in known), None)


def _at(place: tuple[str, int], root: str, workspace: str) -> str:
    """Return the properties of an annotation for a place."""
    file, line = place
    path = os.path.join(root, file)
    if workspace and os.path.exists(path):
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
