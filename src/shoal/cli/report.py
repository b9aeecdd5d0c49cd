"""`shoal report`: the report of a job that failed, from its failure.json."""

from __future__ import annotations

import json
import os
import sys
from glob import escape, glob
from typing import Annotated

import typer

from shoal.errors import UsageError
from shoal.launch.log_dir import FAILURE_FILE
from shoal.runtime.failures.facts import UNREADABLE, JobFailure, of_json
from shoal.runtime.failures.rendering import Style, report

_HELP = """\
Show the report of a job that failed, again.

PATH is a failure.json, or the log directory of shoal run. Default: the directory ./logs, or this
one. If the job was restarted, the report of each attempt is shown.

\b
Examples:
  shoal report                      of the job whose logs are here
  shoal report logs                 of shoal run --log-dir logs
  shoal report logs/failure.json    of this file

\b
The report is as wide as the terminal, and in color there (NO_COLOR,
FORCE_COLOR and COLUMNS work as usual). Programs should read the file itself:
docs/stopping.md lists its fields.

\b
Exit code:
  0      shown
  2      no failure.json there, or it cannot be read
"""

Path = Annotated[str | None, typer.Argument(metavar="PATH", hidden=True)]


def show_report(path: Path = None) -> None:
    """Show the report of a job that failed, again."""
    failures = [read_failure(file) for file in failure_files(path)]
    columns = os.get_terminal_size().columns if sys.stdout.isatty() else 80
    style = Style.for_stream(sys.stdout.isatty(), columns, os.environ, sys.stdout.encoding)
    for failure in failures:
        print("\n".join(report(failure, style)))


show_report.__doc__ = _HELP


def failure_files(path: str | None) -> list[str]:
    """Return the files that PATH means, those of attempts in order.

    Raises:
      UsageError: there is none.
    """
    if path is not None and not os.path.isdir(path):
        return [path]
    folders = ["logs", "."] if path is None else [path]
    for folder in folders:
        attempts = glob(os.path.join(escape(folder), "attempt*", FAILURE_FILE))
        attempts.sort(key=lambda file: (len(file), file))
        if attempts or os.path.exists(os.path.join(folder, FAILURE_FILE)):
            return attempts or [os.path.join(folder, FAILURE_FILE)]
    where = "in ./logs or here" if path is None else f"in {path}"
    raise UsageError(
        f"report: there is no {FAILURE_FILE} {where}: shoal run writes it next to the logs of "
        "a job "
        "that fails"
    )


def read_failure(file: str) -> JobFailure:
    """Return the facts in a failure.json.

    Raises:
      UsageError: it cannot be read, or is something else.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            return of_json(JobFailure, json.load(stream))
    except OSError as error:
        raise UsageError(f"report: {file}: {error.strerror}") from None
    except UNREADABLE as error:
        raise UsageError(f"report: {file} is no {FAILURE_FILE}: {error}") from None
