"""The output of `shoal doctor`: the facts of all processes on one screen, then the findings."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.doctor.facts import facts_lines
from shoal.cli.tables import print_json, safe
from shoal.draw.media.terminal import plain
from shoal.runtime.doctor.findings import PROBLEM, Diagnosis, Finding, Report
from shoal.runtime.system.failure_words import listed

_PLAIN_COLUMNS = 100
_MOST_FINDINGS = 12
_STYLES = {True: "bold red", False: "yellow"}


def print_diagnosis(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Print it: coloured on a terminal, plain in a pipe."""
    if as_json:
        print_json(json_of(diagnosis))
    elif sys.stdout.isatty():
        Console().print(render(diagnosis))
    else:
        print(plain(render(diagnosis), _PLAIN_COLUMNS), flush=True)


def json_of(diagnosis: Diagnosis) -> dict[str, object]:
    """Return everything, for programs."""
    findings = [
        {**finding._asdict(), "processes": processes}
        for finding, processes in grouped(diagnosis).items()
    ]
    return {
        "is_complete": diagnosis.is_complete,
        "findings": sorted(findings, key=lambda one: one["level"] != PROBLEM),
        "processes": [
            {name: value for name, value in report._asdict().items() if name != "findings"}
            for report in diagnosis.reports
        ],
    }


def grouped(diagnosis: Diagnosis) -> dict[Finding, list[int | None]]:
    """Return each finding once, problems first, with the processes that found it.

    A difference between processes is found by none of them; its text names them.
    """
    found: dict[Finding, list[int | None]] = {}
    for report, finding in diagnosis.findings:
        found.setdefault(finding, []).extend([] if report is None else [report.process])
    order = sorted(found, key=lambda finding: finding.level != PROBLEM)
    return {finding: found[finding] for finding in order}


def render(diagnosis: Diagnosis) -> RenderableType:
    """Return the text of a console."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, words in facts_lines(diagnosis.reports):
        facts.add_row(Text(name, style="cyan"), Text(safe_lines(words)))
    return Group(Text(_title(diagnosis.reports), style="bold"), facts, *_findings(diagnosis))


def safe_lines(words: str) -> str:
    """Escape unprintable characters, except line ends."""
    return "\n".join(safe(line) for line in words.split("\n"))


def _title(reports: tuple[Report, ...]) -> str:
    if not reports:
        return "shoal doctor: no process reported"
    hosts = list(dict.fromkeys(report.host for report in reports))
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else hosts[0]
    if len(reports) > 1:
        return f"shoal doctor: {len(reports)} processes on {safe(where)}"
    report = reports[0]
    index = "?" if report.process is None else report.process
    return f"shoal doctor: process {index} of {report.num_processes or '?'} on {safe(where)}"


def _findings(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    found = grouped(diagnosis)
    problems = sum(finding.level == PROBLEM for finding in found)
    if not problems:
        yield Text("no problem found", style="bold green")
    else:
        yield Text(f"{problems} problem{'s' * (problems > 1)}", style=_STYLES[True])
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding, processes in list(found.items())[:_MOST_FINDINGS]:
        whose = _whose(diagnosis.reports, [one for one in processes if one is not None])
        words = Text(safe(f"{finding.check}: {whose}{finding.words}"))
        if finding.advice:
            words.append(f"\n-> {safe(finding.advice)}", style="green")
        label = Text(f"  {finding.level}", style=_STYLES[finding.level == PROBLEM])
        table.add_row(label, words)
    yield table
    if len(found) > _MOST_FINDINGS:
        yield Text(f"  and {len(found) - _MOST_FINDINGS} more (--json has all)")


def _whose(reports: tuple[Report, ...], processes: Iterable[int]) -> str:
    whose = list(processes)
    if not whose or len(reports) == 1:
        return ""
    hosts = {str(report) for report in reports if report.process in whose}
    return f"{hosts.pop() if len(hosts) == 1 else listed(whose)}: "
