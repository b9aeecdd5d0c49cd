"""The findings of a process's checks, and its report, which can be sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

PROBLEM, NOTE = "problem", "note"
CLOCK_OFF_S = 10.0  # clocks that differ by more are a problem
LITTLE_DISK_BYTES = 64 << 20  # less free space is a problem


class Finding(NamedTuple):
    """A problem, or a possible problem (a note)."""

    check: str  # the check that found it: "address", "clock", …
    words: str  # what is wrong, on one line
    advice: str = ""  # what to do
    level: str = PROBLEM


class CheckResult(NamedTuple):
    """The result of one check: facts by name (plain values of JSON), and its findings.

    Names of facts that end in `_bytes` and `_s` have those units.
    """

    facts: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()


class Report(NamedTuple):
    """The report of one process: the facts of each check, and all its findings."""

    process: int | None  # None: its index is not known
    num_processes: int | None
    host: str
    pid: int
    facts: Mapping[str, Mapping[str, Any]]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return f"process {'?' if self.process is None else self.process} ({self.host})"

    def with_check(self, name: str, checked: CheckResult) -> Report:
        """Return this report and the result of one more check.

        >>> report = Report(0, 1, "a", 7, {}, ())
        >>> report.with_check("clock", CheckResult({"time_s": 3.0})).facts
        {'clock': {'time_s': 3.0}}
        """
        return self._replace(
            facts={**self.facts, name: {**self.facts.get(name, {}), **checked.facts}},
            findings=(*self.findings, *checked.findings),
        )


def problem_of(check: str, error: Exception) -> Finding:
    """Return an error as a problem: its lines, joined."""
    return Finding(check, "; ".join(str(error).splitlines()))


def unknown_variable(words: str) -> Finding:
    """Return a note about a variable that begins with SHOAL_ and does not exist."""
    return Finding("launcher", words, level=NOTE)


def packed(report: Report) -> bytes:
    """Return a report as JSON."""
    findings = [finding._asdict() for finding in report.findings]
    return json.dumps({**report._asdict(), "findings": findings}).encode()


def unpacked(data: bytes) -> Report:
    """Inverse of `packed`.

    >>> report = Report(0, 1, "a", 7, {"clock": {"time_s": 3.0}}, (Finding("clock", "late"),))
    >>> unpacked(packed(report)) == report
    True
    """
    fields = json.loads(data)
    return Report(**{**fields, "findings": tuple(Finding(**one) for one in fields["findings"])})
