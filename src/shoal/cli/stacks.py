"""`shoal stacks`: the Python stacks of a running job's processes."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import re
from typing import Annotated, Any

import typer

from shoal.cli.observer import Observer, find
from shoal.cli.watch import Token, Where, utc_text
from shoal.draw.amounts import in_seconds
from shoal.draw.roll import GONE, Roll, standing
from shoal.errors import UsageError, raise_all
from shoal.runtime.rules.point import Member
from shoal.runtime.system.failure_words import listed
from shoal.runtime.system.stacks import OWN_THREAD

_HELP = """\
Show the Python stacks of a running job's processes.

WHERE is host:port of the job's meeting place, or the log directory of shoal run (with its
job.json). Default: SHOAL_COORDINATOR, else your only running job on this host. PROCESSES are
ranks, as in 3 or 0-7,12; default: all.

\b
Examples:
  shoal stacks                     all processes of the job on this host
  shoal stacks 3                   rank 3
  shoal stacks logs 0-7,12         some ranks, of shoal run --log-dir logs
  shoal stacks 10.0.0.1:8476       of the job with this meeting place
  shoal stacks --json              everything, for programs

\b
Processes whose main threads are at the same line are shown once: the calls
of the program, innermost first, then those of libraries. shoal's own threads
are omitted (--json has them, and full stacks). A process answers even while
its main thread hangs in native code, such as a collective. It cannot answer
while it is frozen, cut off, or native code holds its interpreter lock: such
processes are listed last. A debugger on their host (py-spy, gdb) may show
more.

\b
Exit code:
  0      shown, even if some did not answer
  2      wrong usage, or no such job
  71     the meeting place closed before it answered
  73     the meeting place does not answer: frozen or cut off
  74     nothing listens there, or the token is wrong
"""

_INDICES = re.compile(r"\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*")
_SHOAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The processes may run elsewhere, shoal's code too (a zip file, a checkout, a link): only the paths
# are known, and what lies in this package.
_PARTS = [
    rf"{part.name}/" if part.ispkg else rf"{part.name}\.py\""
    for part in pkgutil.iter_modules([_SHOAL])
]
_LIBRARY = re.compile(
    r'^  File "(?:<frozen |.*/lib(?:64)?/python[\d.]+/|.*/(?:site|dist)-packages/|'
    rf".*/shoal/(?:{'|'.join(_PARTS)}|__init__\.py\")|" + re.escape(_SHOAL + os.sep) + ")"
)
_MAY_BE = "frozen, cut off, or native code holds its interpreter lock"
_MOST_PROCESSES = 1 << 20

_Processes = Annotated[str | None, typer.Argument(metavar="PROCESSES", hidden=True)]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def stacks(
    where: Where = None,
    processes: _Processes = None,
    token: Token = None,
    as_json: _AsJson = False,
) -> None:
    """Show the Python stacks of a running job's processes."""
    if processes is None and where and _INDICES.fullmatch(where) and not os.path.exists(where):
        where, processes = None, where
    wanted = None if processes is None else read_processes(processes)
    try:
        observer = Observer("stacks", find("stacks", where, token))
        with contextlib.closing(observer):
            roll = observer.roll()
            chosen = _chosen(roll, wanted)
            answers = observer.stacks(None if wanted is None else [m.process for m in chosen])
            roll = observer.roll()  # their state now, after the wait for silent ones
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    chosen = _chosen(roll, wanted)
    if as_json:
        print(json.dumps(_facts(roll, chosen, answers)))
    else:
        print("\n\n".join(_paragraphs(chosen, answers)))


stacks.__doc__ = _HELP


def read_processes(text: str) -> list[int]:
    """Parse ranks such as `0-7,12`; return them sorted.

    Raises:
      UsageError: it is malformed.
    """
    if not _INDICES.fullmatch(text):
        raise UsageError(f"stacks: {text!r} is not a list of ranks; give ranks, as in 3 or 0-7,12")
    found: set[int] = set()
    problems = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        begin, end = int(first), int(last or first)
        if end < begin:
            problems.append(f"{part.strip()!r} is a reversed range")
        elif end >= _MOST_PROCESSES:
            problems.append(f"{part.strip()!r} is not a valid rank")
        else:
            found.update(range(begin, end + 1))
    raise_all("stacks", problems)
    return sorted(found)


def _chosen(roll: Roll, wanted: list[int] | None) -> list[Member]:
    count = len(roll.members)
    if wanted is None:
        return list(roll.members)
    if outside := [process for process in wanted if process >= count]:
        known = f"the job has processes 0 to {count - 1}" if count > 1 else "the job has process 0"
        raise UsageError(f"stacks: {known}, not {listed(outside).partition(' ')[2]}")
    return [roll.members[process] for process in wanted]


def _paragraphs(chosen: list[Member], answers: dict[int, str]) -> list[str]:
    """Return one paragraph for each main-thread stack, rarest first; then silent processes."""
    alike: dict[str, list[Member]] = {}
    for member in chosen:
        if member.process in answers:
            main = next(iter(_threads(answers[member.process])), "no thread runs Python")
            alike.setdefault(main, []).append(member)
    groups = sorted(alike.items(), key=lambda item: (len(item[1]), item[1][0].process))
    paragraphs = [_paragraph(main, members, answers) for main, members in groups]
    silent = [member for member in chosen if member.process not in answers]
    if silent:
        paragraphs.append("\n".join(_why_silent(member) for member in silent))
    return paragraphs or ["there are no processes"]


def _threads(text: str) -> list[str]:
    """Return the stack of each thread, the main thread's first."""
    return [block.strip("\n") for block in text.split("\n\n") if block.strip()]


def _paragraph(main: str, members: list[Member], answers: dict[int, str]) -> str:
    """Return the main thread's stack of some processes, and their other threads, each once."""
    hosts = sorted({member.host for member in members})
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    head = f"{listed(member.process for member in members)} ({where}): {_last_words(members)}"
    others: dict[str, list[int]] = {}
    for member in members:
        for thread in _threads(answers[member.process])[1:]:
            if not thread.startswith(OWN_THREAD):
                others.setdefault(thread, []).append(member.process)
    blocks = [main]
    for thread, processes in others.items():
        whose = "" if len(processes) == len(members) else f"in {listed(processes)}: "
        blocks.append(whose + thread)
    lines = [line for block in blocks for line in _program_first(block)]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _program_first(block: str) -> list[str]:
    """Return the lines of a thread: the frames of the program, then those of libraries."""
    head, *frames = block.splitlines()
    of_libraries = [frame for frame in frames if _LIBRARY.search(frame)]
    of_program = [frame for frame in frames if frame not in of_libraries]
    if not (of_libraries and of_program):
        return [head, *frames]
    return [head, *of_program, "  in libraries:", *of_libraries]


def _last_words(members: list[Member]) -> str:
    """Return the last words of these processes, on one line."""
    places = {standing(member) for member in members}
    if len(members) == 1:
        return members[0].last_words
    if len(places) > 1:
        return f"at {len(places)} places"
    return f"{next(iter(places))}, up to {in_seconds(max(m.since_s for m in members))}"


def _why_silent(member: Member) -> str:
    """Return a line about a process that does not answer, with the reason if known."""
    name = f"process {member.process}" + (f" ({member.host})" if member.host else "")
    if member.state in GONE or member.state == "absent":
        verb = "has" if member.state in ("failed", "left") else "is"
        return f"{name} {verb} {member.state}: {standing(member)}"
    pid = f"pid {member.pid}: " if member.pid else ""
    may = [] if member.state == "stopped" else [_MAY_BE]  # a stopped process needs no guess
    reasons = "; ".join([*may, *filter(None, [member.last_words])])
    return f"{name} does not answer: {pid}{reasons}"


def _facts(roll: Roll, chosen: list[Member], answers: dict[int, str]) -> dict[str, Any]:
    return {
        "time": utc_text(),
        "address": roll.address,
        "num_processes": len(roll.members),
        "processes": [
            member._asdict()
            | {
                "where": standing(member),
                "answers": member.process in answers,
                "why_not": "" if member.process in answers else _why_silent(member),
                "stacks": answers.get(member.process),
            }
            for member in chosen
        ],
    }
