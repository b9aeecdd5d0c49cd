"""The report of a failure: what a person sees, from the facts.

A report is at most LINES lines: the headline, the evidence, what the other processes did, advice,
and the exit code with the log. What does not fit goes in a fixed order: see `_LADDER`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import counted
from shoal.runtime.failures.evidence import end_of_all, evidence, in_step, others
from shoal.runtime.failures.facts import (
    CallPlace,
    Cause,
    CheckpointFacts,
    Difference,
    ErrorFacts,
    JobFailure,
    ProcessSet,
    Wait,
)
from shoal.runtime.failures.headline import (
    FILE_COLUMNS,
    HOST_COLUMNS,
    NAME_COLUMNS,
    TYPE_COLUMNS,
    seconds,
)
from shoal.runtime.failures.page import (
    LINES,
    WORD_CODES,
    Line,
    Page,
    Shown,
    Span,
    Style,
    painted,
    wrapped,
)
from shoal.runtime.failures.shortening import (
    HIDDEN,
    capital,
    columns,
    is_secret_leaf,
    path_end,
    printable,
    process_ranges,
    sentence,
    shortened,
    without_secrets,
)

__all__ = [
    "Line", "Span", "Style", "facts_without_secrets", "plain_text",
    "process_ranges", "report", "without_secrets",
]  # fmt: skip

_EDGE_LINES = 6  # of a headline, of a last line
_NUMBERS = re.compile(r"(?:np\.)?(?:bool|u?int|b?float|complex|key<)[\w<>]*")  # dtypes of numbers
_KEEPS_LINES = ("message", "notes")
_POINT = {"call": NAME_COLUMNS, "name": NAME_COLUMNS}
_NAMES: Mapping[type, Mapping[str, int]] = {  # fields that a sentence names -> columns
    CallPlace: _POINT,
    Wait: _POINT,
    Difference: _POINT,
    Cause: {"thread": NAME_COLUMNS},
    CheckpointFacts: {"leaf": NAME_COLUMNS},
    ErrorFacts: {"type": TYPE_COLUMNS},
}
_LADDER = (
    Shown(),
    Shown(output=0),
    Shown(output=0, advice=0),
    Shown(output=0, advice=0, others=1),
    Shown(output=0, advice=0, others=1, frames=3),
    Shown(output=0, advice=0, others=1, frames=3, message=3),
    Shown(output=0, advice=0, others=1, frames=3, message=3, groups=2),
    Shown(output=0, advice=0, others=1, frames=1, message=3, groups=2),
    Shown(output=0, advice=0, others=1, frames=1, message=3, groups=2, causes=1),
)


def report(
    failure: JobFailure, style: Style, program: str = "shoal run", reported_by: str = ""
) -> list[str]:
    """Return the lines of a report, painted: the headline first, the exit code last.

    Never raises: if the facts cannot be shown, these two lines remain.

    Args:
      failure: its facts, with the headline.
      style: of the stream.
      program: what prints it. "shoal" is a process of the job itself: it has no log to name.
      reported_by: the node whose launcher prints the whole report; this one names it instead.
    """
    try:
        if reported_by:
            lines = pointed_out(failure, style, program, reported_by)
        else:
            lines = laid_out(failure, style, program)
        return [painted(line, style) for line in lines]
    except Exception:  # noqa: BLE001 (a report that cannot be laid out must not hide the failure)
        headline = without_secrets(str(getattr(failure, "headline", "")))
        code = getattr(failure, "exit_code", "unknown")
        return [
            f"{program}: failed: {printable(headline, only_ascii=True)}",
            f"  Exit code {code}.",
        ]


def laid_out(failure: JobFailure, style: Style, program: str = "shoal run") -> list[Line]:
    """Return the lines of a report as spans; raises what `report` catches."""
    facts = _printable_facts(facts_without_secrets(failure), style)
    for limits in _LADDER:
        lines, last = _lines(facts, style, program, limits)
        if len(lines) + len(last) <= LINES:
            return [*lines, *last]
    left = len(lines) + len(last) + 1 - LINES
    note = Span(f"  {style.dots} {counted(left, 'more line')}", "quiet")
    return [*lines[:-left], [note], *last]


def pointed_out(failure: JobFailure, style: Style, program: str, node: str) -> list[Line]:
    """Return the headline, and where the report is: for the launchers of all nodes but one."""
    facts = _printable_facts(facts_without_secrets(failure), style)
    lines, after = _headline_lines(facts, style, program)
    text = f"Exit code {facts.exit_code}{after}. Report: {node}."
    if facts.logs:
        text += f" Logs of this host: {facts.logs}"
    return [*lines, *_last_lines(text, facts, style)]


def plain_text(failure: JobFailure, program: str = "shoal run") -> str:
    """Return the report as printed to a file: 80 columns, no colour."""
    return "\n".join(report(failure, Style(), program))


def facts_without_secrets(failure: JobFailure) -> JobFailure:
    """Return the facts with credentials hidden in every text: for `failure.json`.

    Of a leaf whose path names a secret the values are hidden, too.
    """
    hidden: JobFailure = _changed(failure, lambda text, _: without_secrets(text), _hide_leaf)
    return hidden


def _hide_leaf(fact: Any) -> Any:
    """Hide values whose path names a secret, but numbers: attention has a kernel `key`."""
    if not isinstance(fact, Difference) or fact.what not in ("value", "tree"):
        return fact
    sides = []
    for side in fact.sides:
        is_number = _NUMBERS.fullmatch(side.dtype) is not None
        if is_secret_leaf(fact.path or side.path) and not is_number:
            side = dataclasses.replace(side, said=HIDDEN, value=HIDDEN)
        sides.append(side)
    return dataclasses.replace(fact, sides=tuple(sides))


def _printable_facts(failure: JobFailure, style: Style) -> JobFailure:
    """Return the facts escaped, and with names no longer than a sentence takes."""

    def escape(text: str, keeps_lines: bool) -> str:
        return printable(text, only_ascii=style.ascii, keeps_lines=keeps_lines)

    def bound(fact: Any) -> Any:
        limits = _NAMES.get(type(fact), {})
        names = {n: shortened(getattr(fact, n), limits[n], style.dots) for n in limits}
        if isinstance(fact, CallPlace):
            names["file"] = path_end(fact.file, FILE_COLUMNS, style.dots)
        if not names:
            return fact
        return dataclasses.replace(fact, **names)

    facts: JobFailure = _changed(failure, escape, bound)
    return facts


def _changed(
    value: Any,
    change_text: Callable[[str, bool], str],
    change_fact: Callable[[Any], Any],
    keeps_lines: bool = False,
) -> Any:
    """Return facts with every text changed, then every fact."""
    if isinstance(value, str):
        return change_text(value, keeps_lines)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {
            name: _changed(getattr(value, name), change_text, change_fact, name in _KEEPS_LINES)
            for name in names
        }
        return change_fact(dataclasses.replace(value, **fields))
    if isinstance(value, Mapping):
        pairs = ((key, _changed(item, change_text, change_fact)) for key, item in value.items())
        return {change_text(key, False): item for key, item in pairs}
    if isinstance(value, tuple) and not isinstance(value, ProcessSet):
        return tuple(_changed(item, change_text, change_fact, keeps_lines) for item in value)
    return value


def _headline_lines(failure: JobFailure, style: Style, program: str) -> tuple[list[Line], str]:
    """Return the headline, and the time if that is left for the last line.

    Where the host does not fit in the headline, it has a line of its own.
    """
    word, rest = "failed", f": {failure.headline}"
    if failure.kind in WORD_CODES and failure.headline.startswith(failure.kind):
        word, rest = failure.kind, failure.headline.removeprefix(failure.kind)
    before = ""
    if failure.as_before:
        before = " as before"
    time, later = _after(failure), ""

    def length(time: str, rest: str) -> int:
        return columns(f"{program}: {word}{time}{before}{rest}")

    host = ""
    if length(time, rest) > style.width:
        time, later = "", time
    if length(time, rest) > style.width:
        host = next((h for h in failure.hosts if f" ({shortened(h, HOST_COLUMNS)})" in rest), "")
        if host:
            rest = rest.replace(f" ({shortened(host, HOST_COLUMNS)})", "", 1)
    if length(time, rest) > style.width:
        total = failure.num_processes
        rest = re.sub(rf"(process(?:es)? \d[\d, -]*) of {total}\b", r"\1", rest, count=1)
    rest = shortened(rest, (_EDGE_LINES - 1) * style.width, style.dots)
    spans = [
        Span(f"{program}: ", "cause"),
        Span(word, "failed"),
        Span(time + before + rest, "cause"),
    ]
    lines = wrapped(spans, style.width, 2, is_hard=False)[:_EDGE_LINES]
    if host:
        lines += Page(style, Shown()).text(f"On host {host}.")
    return lines, later


def _after(failure: JobFailure) -> str:
    if failure.failed_after_s is None:
        return ""
    return f" after {seconds(failure.failed_after_s)}"


def _lines(
    failure: JobFailure, style: Style, program: str, limits: Shown
) -> tuple[list[Line], list[Line]]:
    """Return a report: all but the last line, and the last line."""
    page = Page(style, limits)
    lines, after = _headline_lines(failure, style, program)
    last = _last_words(failure, program, after)
    step = in_step(failure)
    if failure.as_before and step:
        lines += page.text(step)
    elif not failure.as_before:
        for text in failure.programs[: limits.programs]:
            lines += page.text(sentence(text), "cause", most=3)
        more = len(failure.programs) - limits.programs
        if more > 0:
            lines += page.text(f"{capital(counted(more, 'more such program'))}.", "quiet")
        lines += evidence(failure, page)
        if failure.kind == "preempted":
            pass  # it ended as it should
        elif failure.kind == "interrupted" and (end := end_of_all(failure)):
            if columns(f"  {end} {last}") <= style.width:
                last = f"{end} {last}"
            else:
                lines += page.text(end)
        else:
            lines += others(failure, page)
    for advice in failure.advice[: limits.advice]:
        lines += page.text(advice, most=2)
    return lines, _last_lines(last, failure, style)


def _last_words(failure: JobFailure, program: str, time: str) -> str:
    if program != "shoal run":
        return f"{_exit_words(failure)} (of this process){time}."
    text, logs = f"{_exit_words(failure)}{time}.", _logs(failure)
    if not logs:
        return text
    return f"{text} {logs}"


def _exit_words(failure: JobFailure) -> str:
    return f"Exit code {failure.exit_code}"


def _last_lines(text: str, failure: JobFailure, style: Style) -> list[Line]:
    """Return the last line, all of it quiet but the number."""
    text = shortened(text, (_EDGE_LINES - 1) * style.width, style.dots)
    before, code, after = text.partition(_exit_words(failure))
    exit_code = str(failure.exit_code)
    spans = [
        Span("  "),
        Span(before + code.removesuffix(exit_code), "quiet"),
        Span(exit_code if code else ""),
        Span(after, "quiet"),
    ]
    return wrapped(spans, style.width, 4, is_hard=False)[:_EDGE_LINES]


def _logs(failure: JobFailure) -> str:
    """Return where the logs are, "" if there are none."""
    folder, hosts = failure.logs, failure.hosts
    lost = [host for cause in failure.causes if cause.kind == "host_lost" for host in hosts
            if set(hosts[host]) <= set(cause.processes)]  # fmt: skip
    if lost and folder:
        left = [host for host in hosts if host not in lost]
        where = f"{folder}, on each host"
        if len(left) == 1:
            where = f"{left[0]}:{folder}"
        if len(lost) > 1:
            return f"Logs: {where}"
        return f"Logs: {where}; what is left on {lost[0]}: {lost[0]}:{folder}"
    logs = list(dict.fromkeys(_log(cause.log, failure) for cause in failure.causes if cause.log))
    if len(logs) == 1:
        cause = next(cause for cause in failure.causes if cause.log)
        if cause.first is None or len(cause.processes) == 1:
            return f"Log: {logs[0]}"
        return f"Log: {logs[0]} (process {cause.first} was the first)"
    if len(logs) == 2 or (logs and not folder):
        text = f"Logs: {', '.join(logs[:2])}"
        if len(logs) > 2:
            text += f" and {len(logs) - 2} more"
        return text
    if not folder:
        return ""
    if len(hosts) > 1:
        return f"Logs: {folder}, on each host"
    return f"Logs: {folder}"


def _log(log: str, failure: JobFailure) -> str:
    host, colon, file = log.partition(":")
    if colon and host in failure.hosts:
        return f"{host}:{os.path.join(failure.logs, file)}"
    return os.path.join(failure.logs, log)
