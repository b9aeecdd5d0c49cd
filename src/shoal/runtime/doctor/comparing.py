"""Compare the reports of all processes of a job: what differs, and where."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from shoal.runtime.doctor.findings import CLOCK_OFF_S, NOTE, PROBLEM, Finding, Report
from shoal.runtime.system.failure_words import listed

_MUST_BE_EQUAL = ("shoal", "jax", "jaxlib")
_SHOWN = 5


def compare(reports: Sequence[Report]) -> tuple[Finding, ...]:
    """Return what differs between processes.

    Compared are versions, program, clocks (read at one moment), devices, folders and
    addresses. Each finding names the processes.

    >>> one = Report(0, 2, "a", 7, {"versions": {"jax": "0.10.2"}}, ())
    >>> two = Report(1, 2, "b", 7, {"versions": {"jax": "0.9.0"}}, ())
    >>> compare([one, two])[0].words
    'jax differs: 0.10.2 on process 0; 0.9.0 on process 1'
    """
    checks: tuple[Callable[[Sequence[Report]], list[Finding]], ...] = (
        _versions, _programs, _clocks, _devices, _folders, _loopbacks,
    )  # fmt: skip
    return tuple(finding for check in checks for finding in check(reports))


def groups(reports: Sequence[Report], check: str, name: str) -> dict[Any, list[int]]:
    """Return {value: processes} of one fact, the most frequent value first; None: absent."""
    found: dict[Any, list[int]] = {}
    for at, report in enumerate(reports):
        value = report.facts.get(check, {}).get(name)
        key = tuple(value) if isinstance(value, list) else value
        found.setdefault(key, []).append(at if report.process is None else report.process)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def sides(found: dict[Any, list[int]]) -> str:
    """Return `0.10.2 on processes 0, 1; 0.9.0 on process 2`."""
    rows = [
        f"{'not set' if value is None else value} on {listed(at)}" for value, at in found.items()
    ]
    more = len(rows) - _SHOWN
    return "; ".join(rows[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _versions(reports: Sequence[Report]) -> list[Finding]:
    names = dict.fromkeys(name for one in reports for name in one.facts.get("versions", {}))
    findings = []
    for name in names:
        found = groups(reports, "versions", name)
        if len(found) > 1:
            level = PROBLEM if name in _MUST_BE_EQUAL else NOTE
            advice = "install the same everywhere" if level == PROBLEM else ""
            findings.append(Finding("versions", f"{name} differs: {sides(found)}", advice, level))
    return findings


def _programs(reports: Sequence[Report]) -> list[Finding]:
    found = groups(reports, "program", "digest")
    if len(found) == 1:
        return []
    path = next(report.facts["program"]["path"] for report in reports if "program" in report.facts)
    words = f"the program {path} differs: digest {sides(found)}"
    return [Finding("program", words, "copy the same program to all hosts")]


def _clocks(reports: Sequence[Report]) -> list[Finding]:
    times = {at: one.facts["clock"]["time_s"] for at, one in enumerate(reports)
             if "time_s" in one.facts.get("clock", {})}  # fmt: skip
    if len(times) < 2:
        return []
    middle = statistics.median_low(times.values())
    off = {
        at: time_s - middle for at, time_s in times.items() if abs(time_s - middle) > CLOCK_OFF_S
    }
    if not off:
        return []
    rows = [f"that of {reports[at]} is {_apart(off_s)}" for at, off_s in off.items()]
    words = "clocks differ: " + "; ".join(rows[:_SHOWN])
    words += f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    others = [report for at, report in enumerate(reports) if at in times and at not in off]
    words += f", compared with {others[0]}"
    return [Finding("clock", words, "synchronise the clocks of the hosts (chrony, ntpd)")]


def _apart(off_s: float) -> str:
    much = abs(off_s)
    amount = f"{much / 60:.1f} min" if much >= 60 else f"{much:.0f} s"
    return f"{amount} {'ahead' if off_s > 0 else 'behind'}"


def _devices(reports: Sequence[Report]) -> list[Finding]:
    here = [report for report in reports if "platform" in report.facts.get("devices", {})]
    platforms = groups(here, "devices", "platform")
    if len(platforms) > 1:
        words = f"the platform of the devices differs: {sides(platforms)}"
        return [Finding("devices", words, "does a host lack its driver, or JAX's plugin for it?")]
    counts = groups(here, "devices", "count")
    if len(counts) > 1:
        words = f"the number of devices differs: {sides(counts)}"
        return [Finding("devices", words, level=NOTE)]
    return []


def _folders(reports: Sequence[Report]) -> list[Finding]:
    """Find folders whose files are not seen, among the processes that could write there."""
    findings = []
    folders = dict.fromkeys(name for one in reports for name in one.facts.get("folders", {}))
    for folder in folders:
        writers = [one for one in reports if folder in one.facts.get("folders", {})]
        wrote = {one.process for one in writers}
        hidden = [(one, one.facts.get("hidden", {}).get(folder, ())) for one in writers]
        blind = [(one, at) for one, all_at in hidden if (at := [p for p in all_at if p in wrote])]
        if blind:
            rows = [f"{one} does not see the files of {listed(at)}" for one, at in blind[:_SHOWN]]
            more = f"; and {len(blind) - _SHOWN} more" if len(blind) > _SHOWN else ""
            words = f"{folder} is not shared: {'; '.join(rows)}{more}"
            advice = "mount one file system there on all hosts"
            findings.append(Finding("folders", words, advice))
    return findings


def _loopbacks(reports: Sequence[Report]) -> list[Finding]:
    """Find an address that refers to a different host on each host."""
    hosts = {report.host for report in reports}
    addresses = groups(reports, "address", "resolves_to")
    local = [
        at for at in addresses if at and all(one.startswith("127.") or one == "::1" for one in at)
    ]
    if len(hosts) < 2 or not local:
        return []
    address = next(iter(groups(reports, "address", "address")))
    words = f"{address} is the loopback of each host, and the processes are on {len(hosts)} hosts"
    return [Finding("address", words, "give the address by which other hosts reach process 0")]
