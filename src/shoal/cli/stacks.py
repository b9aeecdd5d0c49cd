"""`shoal stacks`: the Python stacks of a running job's processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Annotated, Any

import typer

from shoal.cli.observer import Observer, find
from shoal.cli.watch import Token, Where, utc_text
from shoal.draw.amounts import in_seconds
from shoal.draw.roll import GONE, Roll, standing
from shoal.errors import UsageError, raise_all
from shoal.runtime.failures.process_text import listed, numbers_of
from shoal.runtime.failures.stack_text import threads_of
from shoal.runtime.rules.point import Member

_HELP = """\
Show the Python stacks of a running job's processes.

WHERE is host:port of the job's coordinator, or the log directory of shoal run (with its
job.json). Default: SHOAL_COORDINATOR, else your only running job on this host. PROCESSES are
ranks, as in 3 or 0-7,12; default: all.

\b
Examples:
  shoal stacks                     all processes of the job on this host
  shoal stacks 3                   rank 3
  shoal stacks logs 0-7,12         some ranks, of shoal run --log-dir logs
  shoal stacks 10.0.0.1:8476       of the job with this coordinator
  shoal stacks --json              everything, for programs

\b
Processes whose main threads are at the same line are shown once, as Python
shows a traceback: the calls of the program, the innermost last, and the
number of frames of each library below (SHOAL_TRACEBACK=full shows all).
shoal's own threads are omitted (--json has them, and full stacks). A process
answers even while its main thread hangs in native code, such as a collective.
It cannot answer while it is frozen or disconnected, or while native code
holds its interpreter lock. Such processes are listed last. A debugger on
their host (py-spy, gdb) may show more.

\b
Exit code:
  0      shown, even if some did not answer
  2      wrong usage, or no such job
  71     the coordinator closed before it answered
  73     the coordinator does not answer: frozen or disconnected
  74     nothing listens there, or the token is wrong
"""

_INDICES = re.compile(r"\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*")
_MAY_BE = "frozen, disconnected, or native code holds its interpreter lock"
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
        print("\n\n".join(paragraphs_of(chosen, answers)))


stacks.__doc__ = _HELP


def read_processes(text: str) -> list[int]:
    """Parse ranks such as `0-7,12`; return them sorted.

    Raises:
      UsageError: it is malformed.
    """
    if not _INDICES.fullmatch(text):
        raise UsageError(f"stacks: {text!r} is not a list of ranks; pass ranks, as in 3 or 0-7,12")
    processes: set[int] = set()
    problems = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        begin, end = int(first), int(last or first)
        if end < begin:
            problems.append(f"{part.strip()!r} is a reversed range")
        elif end >= _MOST_PROCESSES:
            problems.append(f"{part.strip()!r} is not a valid rank")
        else:
            processes.update(range(begin, end + 1))
    raise_all("stacks", problems)
    return sorted(processes)


def _chosen(roll: Roll, wanted: list[int] | None) -> list[Member]:
    count = len(roll.members)
    if wanted is None:
        return list(roll.members)
    outside = [process for process in wanted if process >= count]
    if outside:
        known = f"the job has processes 0 to {count - 1}" if count > 1 else "the job has process 0"
        raise UsageError(f"stacks: {known}, not {numbers_of(outside)}")
    return [roll.members[process] for process in wanted]


def paragraphs_of(chosen: list[Member], answers: dict[int, str]) -> list[str]:
    """Return one paragraph for each main-thread stack, rarest first; then silent processes."""
    blocks = {m.process: _blocks(answers[m.process]) for m in chosen if m.process in answers}
    alike: dict[str, list[Member]] = {}
    for member in chosen:
        if member.process in answers:
            alike.setdefault(blocks[member.process][0], []).append(member)
    groups = sorted(alike.values(), key=lambda members: (len(members), members[0].process))
    paragraphs = [_paragraph(members, blocks) for members in groups]
    silent = [member for member in chosen if member.process not in answers]
    if silent:
        is_known = any(member.state == "failed" and not member.follows for member in silent)
        lines = []
        for member in silent:
            if is_known and member.follows:
                lines.append(_because_of(member))
            else:
                lines.append(_why_silent(member))
        paragraphs.append("\n".join(lines))
    return paragraphs or ["there are no processes"]


def _blocks(text: str) -> list[str]:
    """Return the stack of each of the program's threads, the main thread's first."""
    threads = [thread for thread in threads_of(text) if not thread.is_own]
    if not threads:
        return [text.strip() or "no thread runs Python"]
    main, *others = (thread.lines() for thread in threads)
    blocks = [main]
    for thread, lines in zip(threads[1:], others, strict=True):
        blocks.append([f"Thread '{thread.name}':", *(f"  {line}" for line in lines)])
    return ["\n".join(block) for block in blocks]


def _paragraph(members: list[Member], blocks: dict[int, list[str]]) -> str:
    """Return the main thread's stack of some processes, and their other threads, each once."""
    hosts = sorted({member.host for member in members})
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    head = f"{listed(member.process for member in members)} ({where}): {_last_words(members)}"
    main, others = "", dict[str, list[int]]()
    for member in members:
        main, *threads = blocks[member.process]
        for thread in threads:
            others.setdefault(thread, []).append(member.process)
    lines = main.splitlines()
    for thread, processes in others.items():
        whose = "" if len(processes) == len(members) else f"in {listed(processes)}: "
        lines += f"{whose}{thread}".splitlines()
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _last_words(members: list[Member]) -> str:
    """Return the last words of these processes, on one line."""
    places = {standing(member) for member in members}
    if len(members) == 1:
        return members[0].last_words
    if len(places) > 1:
        return f"at {len(places)} places"
    return f"{next(iter(places))}, up to {in_seconds(max(m.since_s for m in members))}"


def _name(member: Member) -> str:
    host = f" ({member.host})" if member.host else ""
    return f"process {member.process}{host}"


def _why_silent(member: Member) -> str:
    """Return a line about a process that does not answer, with the reason if known."""
    name = _name(member)
    if member.state in GONE or member.state == "absent":
        verb = "has" if member.state in ("failed", "left") else "is"
        return f"{name} {verb} {member.state}: {standing(member)}"
    pid = f"pid {member.pid}: " if member.pid else ""
    may = [] if member.state == "stopped" else [_MAY_BE]  # a stopped process needs no guess
    reasons = "; ".join([*may, *filter(None, [member.last_words])])
    return f"{name} does not answer: {pid}{reasons}"


def _because_of(member: Member) -> str:
    """Return a line about a process that failed because of another, which has its own line."""
    where = f", at {member.place}" if member.place else ""
    return f"{_name(member)} has failed because of another process{where}"


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
