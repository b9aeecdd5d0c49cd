"""`shoal watch`: the processes of a running job: where each one is, and since when."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import IO, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from shoal.cli.observer import Observer, find
from shoal.draw.media.terminal import plain
from shoal.draw.roll import ORDERS, Roll, render_roll, slowness_of, standing
from shoal.errors import ProcessLostError, UsageError, nearest, raise_all
from shoal.paths import local_path

_HELP = """\
Show where each process of a running job is, and since when.

WHERE is host:port of the job's coordinator, or the log directory of shoal run (with its
job.json). Default: SHOAL_COORDINATOR, else your only running job on this host. The command
only observes. The job is not affected.

\b
Examples:
  shoal watch                       the job on this host, live
  shoal watch logs                  the one of shoal run --log-dir logs
  shoal watch 10.0.0.1:8476 --all   a row for every process, however many
  shoal watch --sort time           slowest first
  shoal watch --json                all facts, once, for programs
  shoal watch --log watch.jsonl     also a line of JSON for each refresh

\b
Read it from the top. Processes that are not at the same call as the majority
come first, because the others are waiting for them. Lost, failed, stopped and
silent processes lead, then slow ones (1.5 times the median or more), then
those furthest behind. If the rows do not fit, processes at the same call
share a row, with their largest compute time, time there and memory.
  step time     the median of a process's last 64 steps (in the summary)
  compute time  the step time without waits for other processes in shoal
                calls, and its ratio to the median over all processes
  waits at barrier 'x' (train.py:31)  in a call that waits for other processes
  last at barrier 'x' (train.py:31)   its last shoal call, which has returned
  stopped                             frozen by a signal (SIGSTOP, a debugger)
  silent                              runs, but sends no heartbeats

\b
The command exits when the job is over, or with Ctrl-C.
Without a terminal it prints plain text: once, unless --every or --log is
given.
Exit code:
  0      the job is over, or it was shown once
  2      wrong usage, or no such job
  71     the coordinator closed before its first answer
  73     the coordinator does not answer: frozen or disconnected
  74     nothing listens there, or the token is wrong
  130    ended by Ctrl-C
"""

_STALE_S = 2.0  # an older answer is marked as stale
_PLAIN_ROWS = 40
_PLAIN_COLUMNS = 400  # wide enough for all rows

_LIVE: Mapping[str, Any] = {"auto_refresh": False, "screen": True, "vertical_overflow": "crop"}

Where = Annotated[str | None, typer.Argument(metavar="WHERE", hidden=True)]
Token = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="The token; default: job.json's, SHOAL_TOKEN, or yours."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead, once.")]
_All = Annotated[bool, typer.Option("--all", help="A row for every process.")]
_Sort = Annotated[str, typer.Option(metavar="KEY", help=f"One of {', '.join(ORDERS)}.")]
_Log = Annotated[
    str | None, typer.Option(metavar="FILE", help="Append a line of JSON for each refresh.")
]
_Every = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Interval of refreshes.  [default: 1]"),
]
_Once = Annotated[bool, typer.Option("--once", help="Show it once and exit.")]
_Table = Annotated[
    bool, typer.Option("--table/--no-table", help="With --log: also show the table.")
]


class _View:
    """The output of the table, and its options."""

    def __init__(self, terminal: Console | None, all_rows: bool, order: str) -> None:
        self._terminal = terminal  # None: plain text
        self._all_rows = all_rows
        self._order = order
        self._last: RenderableType | None = None
        self._code: int | None = None  # with which to exit, once SIGTERM has come

    def print(self, roll: Roll, note: str = "", end: str = "\n") -> None:
        """Print it below earlier output."""
        table = self._render(roll, note)
        if self._terminal is not None:
            self._terminal.print(table)
        else:
            print(plain(table, _PLAIN_COLUMNS), end=end, flush=True)

    @contextlib.contextmanager
    def screen(self, *, is_shown: bool) -> Iterator[Callable[[Roll, str], None]]:
        """Yield a function that shows a table in place of the previous one."""
        if not is_shown:
            yield lambda roll, note: None
        elif self._terminal is None:
            yield lambda roll, note: self.print(roll, note, end="\n\n")
        else:
            with self._restored(), Live(console=self._terminal, **_LIVE) as live:
                yield lambda roll, note: self._show(live, roll, note)

    def _show(self, live: Live, roll: Roll, note: str) -> None:
        if self._code is not None:  # and a destructor took the exception of the handler
            sys.exit(self._code)
        live.update(self._render(roll, note), refresh=True)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        self._code = 128 + number
        sys.exit(self._code)

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore the terminal on SIGTERM, too; the last table stays below."""
        before = signal.signal(signal.SIGTERM, self._end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if self._last is not None and self._terminal is not None:
                self._terminal.print(self._last)

    def _render(self, roll: Roll, note: str) -> RenderableType:
        """Return a table that fits, unless all rows are requested."""
        terminal = self._terminal
        height = _PLAIN_ROWS if terminal is None else terminal.height - 1
        most = None if self._all_rows else height
        while True:
            width = None if terminal is None else terminal.width
            self._last = render_roll(
                roll, order=self._order, most_rows=most, note=note, width=width
            )
            if terminal is None or most is None or most == 1:
                return self._last
            extra = len(terminal.render_lines(self._last)) - height
            if extra <= 0:
                return self._last
            most = max(1, most - (extra + 1) // 2)


def watch(
    where: Where = None,
    token: Token = None,
    as_json: _AsJson = False,
    all_rows: _All = False,
    sort: _Sort = "urgency",
    log: _Log = None,
    every: _Every = None,
    once: _Once = False,
    table: _Table = True,
) -> None:
    """Show the processes of a running job: where each one is, and since when."""
    log = _check(sort, every, log, table)
    try:
        with (
            contextlib.closing(Observer("watch", find("watch", where, token))) as observer,
            _opened(log) as file,
        ):
            console = Console()
            is_live = console.is_terminal and not console.is_dumb_terminal
            view = _View(console if is_live else None, all_rows, sort)
            if as_json or once or not (is_live or every or log):
                roll = observer.roll()
                _write(file, roll)
                print(json.dumps(facts_of(roll))) if as_json else view.print(roll)
                return
            with view.screen(is_shown=table) as show:
                over = _follow(observer, show, file, every or 1.0)
            print(over)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


watch.__doc__ = _HELP


def _check(sort: str, every: float | None, log: str | None, table: bool) -> str | None:
    """Check the options; return the path of the log."""
    problems = []
    try:
        log = local_path(log, f"--log {log!r}") if log else None
    except UsageError as error:
        problems.append(str(error))
    if sort not in ORDERS:
        problems.append(f"--sort {sort} is not one of {', '.join(ORDERS)}{nearest(sort, ORDERS)}")
    if every is not None and not 0 < every < math.inf:
        problems.append(f"--every {every:g} must be a positive number of seconds")
    if not (table or log):
        problems.append("--no-table shows nothing; pass --log FILE")
    raise_all("watch", problems)
    return log


def _follow(
    observer: Observer,
    show: Callable[[Roll, str], None],
    file: IO[bytes] | None,
    every_s: float,
) -> str:
    """Show and log each answer until the job is over; return the final message."""
    roll: Roll | None = None
    tick_at = time.monotonic()
    try:
        while True:
            observer.query()
            tick_at = max(tick_at + every_s, time.monotonic())
            # Also after an answer: the end of the connection is noticed at once.
            while (now := time.monotonic()) < tick_at:
                answer = observer.answer(min(tick_at, now + _STALE_S))
                if answer is not None:
                    roll = answer
                    _write(file, roll)
                    show(roll, "")
                    if roll.is_over:
                        return f"the job is over: {_counted(roll)}"
                elif roll is not None and (silent_s := observer.waits_s()) >= _STALE_S:
                    show(roll, _stale(silent_s))
    except ProcessLostError:
        seen = f"; last seen: {_counted(roll)}" if roll is not None else ""
        return f"the job is over: its coordinator at {observer.place.address} has closed{seen}"


def _stale(silent_s: float) -> str:
    return f"the coordinator has not answered for {silent_s:.0f} s: frozen or disconnected"


def _counted(roll: Roll) -> str:
    return ", ".join(f"{count} {state}" for state, count in roll.counts.items())


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[IO[bytes] | None]:
    """Open the file of --log for appending."""
    if path is None:
        yield None
        return
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UsageError(f"watch: --log {path!r}: {error.strerror}") from None
    with file:
        yield file


def _write(file: IO[bytes] | None, roll: Roll) -> None:
    if file is None:
        return
    try:
        file.write(json.dumps(facts_of(roll)).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"watch: --log {file.name!r}: {error.strerror}") from None


def facts_of(roll: Roll) -> dict[str, Any]:
    """Return the state of a job, as written by `--json` and `--log`."""
    median_own_s = roll.median_own_s
    return {
        "time": utc_text(),
        "address": roll.address,
        "num_processes": len(roll.members),
        "counts": roll.counts,
        "median_step_s": roll.median_step_s,
        "median_own_s": median_own_s,
        "processes": [
            member._asdict()
            | {
                "own_s": member.own_s,
                "slowness": slowness_of(member, median_own_s),
                "where": standing(member),
            }
            for member in roll.members
        ],
        "services": [service._asdict() for service in roll.services],
        "programs": [*roll.programs],
    }


def utc_text() -> str:
    """Return the time as `2026-01-31T12:00:00.000Z`."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
