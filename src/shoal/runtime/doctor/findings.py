"""The findings of each process's checks, its report, and what differs between reports."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.runtime.failures.process_text import listed

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
        index = "?" if self.process is None else self.process
        return f"process {index} ({self.host})"

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


def problem_of(check: str, error: Exception | str) -> Finding:
    """Return an error, or its text, as a problem: its lines, joined."""
    return Finding(check, "; ".join(str(error).splitlines()))


def unknown_variable(message: str) -> Finding:
    """Return a note about a variable that begins with SHOAL_ and does not exist."""
    return Finding("launcher", message, level=NOTE)


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
    return Report(
        **{**fields, "findings": tuple(Finding(**finding) for finding in fields["findings"])}
    )


# ---- The reports of a job's processes, and what differs between them.


class Diagnosis(NamedTuple):
    """The knowledge of one process at the end: process 0 of a job that met has all reports."""

    reports: tuple[Report, ...]
    differences: tuple[Finding, ...]
    process: int | None
    is_complete: bool  # whether all processes of the job met, and process 0 shows their reports
    has_problem: bool  # in any report of the job, as far as this process knows

    @property
    def findings(self) -> tuple[tuple[Report | None, Finding], ...]:
        """All findings, each with its process; None: it is about several."""
        own = ((report, finding) for report in self.reports for finding in report.findings)
        return (*((None, finding) for finding in self.differences), *own)


def of_processes(reports: tuple[Report, ...]) -> Diagnosis:
    """Return the diagnosis of a whole job."""
    differences = compare(reports)
    findings = [*differences, *(finding for report in reports for finding in report.findings)]
    has_problem = any(finding.level == PROBLEM for finding in findings)
    return Diagnosis(
        reports, differences, reports[0].process, is_complete=True, has_problem=has_problem
    )


def of_one(report: Report) -> Diagnosis:
    """Return the diagnosis of a process that met no other."""
    is_complete = report.num_processes == 1
    return of_processes((report,))._replace(is_complete=is_complete)


# ---- Compare the reports of all processes of a job: what differs, and where.


_MUST_BE_EQUAL = ("shoal", "jax", "jaxlib")
_SHOWN = 5


def compare(reports: Sequence[Report]) -> tuple[Finding, ...]:
    """Return what differs between processes.

    Compared are versions, clocks (read at one moment), devices, directories and addresses.
    Each finding names the processes.

    >>> one = Report(0, 2, "a", 7, {"versions": {"jax": "0.10.2"}}, ())
    >>> two = Report(1, 2, "b", 7, {"versions": {"jax": "0.9.0"}}, ())
    >>> compare([one, two])[0].words
    'jax differs: 0.10.2 on process 0; 0.9.0 on process 1'
    """
    checks: tuple[Callable[[Sequence[Report]], list[Finding]], ...] = (
        _versions, _clocks, _devices, _folders, _loopbacks,
    )  # fmt: skip
    return tuple(finding for check in checks for finding in check(reports))


def groups(reports: Sequence[Report], check: str, name: str) -> dict[Any, list[int]]:
    """Return {value: processes} of one fact, the most frequent value first; None: absent."""
    processes_of: dict[Any, list[int]] = {}
    for index, report in enumerate(reports):
        value = report.facts.get(check, {}).get(name)
        key = tuple(value) if isinstance(value, list) else value
        processes_of.setdefault(key, []).append(index if report.process is None else report.process)
    return dict(sorted(processes_of.items(), key=lambda item: -len(item[1])))


def sides(groups: dict[Any, list[int]]) -> str:
    """Return `0.10.2 on processes 0, 1; 0.9.0 on process 2`."""
    rows = []
    for value, processes in groups.items():
        shown = "not set" if value is None else value
        rows.append(f"{shown} on {listed(processes)}")
    more = len(rows) - _SHOWN
    return "; ".join(rows[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _versions(reports: Sequence[Report]) -> list[Finding]:
    names = dict.fromkeys(name for report in reports for name in report.facts.get("versions", {}))
    findings = []
    for name in names:
        versions = groups(reports, "versions", name)
        if len(versions) > 1:
            level = PROBLEM if name in _MUST_BE_EQUAL else NOTE
            advice = "install the same everywhere" if level == PROBLEM else ""
            findings.append(
                Finding("versions", f"{name} differs: {sides(versions)}", advice, level)
            )
    return findings


def _clocks(reports: Sequence[Report]) -> list[Finding]:
    times = {index: report.facts["clock"]["time_s"] for index, report in enumerate(reports)
             if "time_s" in report.facts.get("clock", {})}  # fmt: skip
    if len(times) < 2:
        return []
    middle = statistics.median_low(times.values())
    off = {
        index: time_s - middle
        for index, time_s in times.items()
        if abs(time_s - middle) > CLOCK_OFF_S
    }
    if not off:
        return []
    rows = [f"that of {reports[index]} is {_apart(off_s)}" for index, off_s in off.items()]
    problem = "clocks differ: " + "; ".join(rows[:_SHOWN])
    problem += f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    others = [report for index, report in enumerate(reports) if index in times and index not in off]
    problem += f", compared with {others[0]}"
    return [Finding("clock", problem, "synchronize the clocks of the hosts (chrony, ntpd)")]


def _apart(off_s: float) -> str:
    much = abs(off_s)
    amount = f"{much / 60:.1f} min" if much >= 60 else f"{much:.0f} s"
    return f"{amount} ahead" if off_s > 0 else f"{amount} behind"


def _devices(reports: Sequence[Report]) -> list[Finding]:
    here = [report for report in reports if "platform" in report.facts.get("devices", {})]
    platforms = groups(here, "devices", "platform")
    if len(platforms) > 1:
        problem = f"the platform of the devices differs: {sides(platforms)}"
        return [Finding("devices", problem, "does a host lack its driver, or JAX's plugin for it?")]
    counts = groups(here, "devices", "count")
    if len(counts) > 1:
        problem = f"the number of devices differs: {sides(counts)}"
        return [Finding("devices", problem, level=NOTE)]
    return []


def _folders(reports: Sequence[Report]) -> list[Finding]:
    """Find directories whose files are not seen, among the processes that could write there."""
    findings = []
    folders = dict.fromkeys(name for report in reports for name in report.facts.get("folders", {}))
    for folder in folders:
        writers = [report for report in reports if folder in report.facts.get("folders", {})]
        wrote = {report.process for report in writers}
        hidden = [(report, report.facts.get("hidden", {}).get(folder, ())) for report in writers]
        blind = [
            (report, unseen)
            for report, all_unseen in hidden
            if (unseen := [p for p in all_unseen if p in wrote])
        ]
        if blind:
            rows = [
                f"{report} does not see the files of {listed(unseen)}"
                for report, unseen in blind[:_SHOWN]
            ]
            more = f"; and {len(blind) - _SHOWN} more" if len(blind) > _SHOWN else ""
            problem = f"{folder} is not shared: {'; '.join(rows)}{more}"
            advice = "mount one file system there on all hosts"
            findings.append(Finding("folders", problem, advice))
    return findings


def _loopbacks(reports: Sequence[Report]) -> list[Finding]:
    """Find an address that refers to a different host on each host."""
    hosts = {report.host for report in reports}
    addresses = groups(reports, "address", "resolves_to")
    local = [
        ips for ips in addresses if ips and all(ip.startswith("127.") or ip == "::1" for ip in ips)
    ]
    if len(hosts) < 2 or not local:
        return []
    address = next(iter(groups(reports, "address", "address")))
    problem = f"{address} is the loopback of each host, and the processes are on {len(hosts)} hosts"
    return [Finding("address", problem, "pass the address by which other hosts reach process 0")]
