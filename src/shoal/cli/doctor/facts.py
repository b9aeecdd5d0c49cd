"""The facts of one process or of many as lines of text; equal facts are listed once."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.draw.amounts import in_bytes, in_seconds
from shoal.runtime.doctor.findings import Report
from shoal.runtime.system.failure_words import listed

_MOST_GROUPS = 4


def facts_lines(reports: Sequence[Report]) -> list[tuple[str, str]]:
    """Return (check, words) for each check that has facts."""
    lines = [] if not reports else [("launcher", _launcher(reports[0].facts.get("launcher", {})))]
    for check, words_of in _WORDS.items():
        if any(check in report.facts for report in reports):
            lines.append((check, _each(reports, check, words_of)))
    for check, words_of_all in _TOGETHER.items():
        facts = [report.facts[check] for report in reports if report.facts.get(check)]
        if facts:
            lines.append((check, words_of_all(facts)))
    return [(check, words) for check, words in lines if words]


def _each(
    reports: Sequence[Report], check: str, words_of: Callable[[Mapping[str, Any]], str]
) -> str:
    found: dict[str, list[int]] = {}
    for at, report in enumerate(reports):
        words = words_of(report.facts.get(check, {})) or "unknown"
        found.setdefault(words, []).append(at if report.process is None else report.process)
    if len(found) == 1:
        return next(iter(found))
    rows = [f"{listed(at)}: {words}" for words, at in found.items()]
    more = len(rows) - _MOST_GROUPS
    return "\n".join(rows[:_MOST_GROUPS] + ([f"and {more} more"] if more > 0 else []))


def _launcher(facts: Mapping[str, Any]) -> str:
    """Return the rule of one process: the first of the job."""
    rules = facts.get("rules", [])
    lines = [str(facts.get("rule", "no rule holds"))]
    lines += [
        f"not used: {rule['launcher']}: {rule['why']}"
        for rule in rules
        if rule["is_seen"] and not rule["is_used"]
    ]
    absent = [rule["launcher"] for rule in rules if not rule["is_seen"]]
    lines += [f"not set: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def _address(facts: Mapping[str, Any]) -> str:
    if directory := facts.get("directory"):
        words = f"process 0 publishes it in {directory}"
    elif "address" in facts:
        to = ", ".join(facts["resolves_to"]) or "nothing"
        words = f"{facts['address']}, which resolves to {to}"
    else:
        return "none needed"
    if "connecting" in facts:
        words += f": {facts['connecting']}"
    if service := facts.get("jax_service"):
        words += f"; JAX's service at {service}: {facts['connecting_to_jax_service']}"
    return words


def _versions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts.items())


def _program(facts: Mapping[str, Any]) -> str:
    if "digest" not in facts:
        return f"{facts.get('path', '')}: unreadable"
    return f"{facts['path']}, {in_bytes(facts['size_bytes'])}, digest {facts['digest']}"


def _devices(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    words = f"{facts['count']} × {facts['platform']}"
    return words if facts["kind"] == facts["platform"] else f"{words} ({facts['kind']})"


def _host(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    addresses = ", ".join(facts["addresses"]) or "no address"
    return f"{facts['name']} ({addresses}), {facts['cores']} cores"


def _folders(facts: Mapping[str, Any]) -> str:
    rows = (f"{path}: {one['file_system'] or 'unknown file system'}" for path, one in facts.items())
    return ", ".join(rows) or "none given (--shared)"


def _proxy(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items()) or "none"


def _memory(facts: Sequence[Mapping[str, Any]]) -> str:
    free = _span([one["available_bytes"] for one in facts])
    return f"{free} available of {_span([one['total_bytes'] for one in facts])}"


def _disk(facts: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, list[int]] = {}
    for one in facts:
        for directory, room in one.items():
            known = [room["free_bytes"]] if room["free_bytes"] is not None else []
            found.setdefault(directory, []).extend(known)
    rows = {
        directory: f"{_span(room)} free" if room else "unknown free space"
        for directory, room in found.items()
    }
    return ", ".join(f"{directory}: {words}" for directory, words in rows.items())


def _clock(facts: Sequence[Mapping[str, Any]]) -> str:
    times = [one["time_s"] for one in facts]
    first = datetime.datetime.fromtimestamp(min(times), datetime.UTC)
    words = first.isoformat(timespec="seconds").replace("+00:00", "Z")
    return words if len(times) == 1 else f"{words}, {in_seconds(max(times) - min(times))} apart"


def _span(amounts: Sequence[int]) -> str:
    least, most = in_bytes(min(amounts)), in_bytes(max(amounts))
    return least if least == most else f"{least} to {most}"


_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "address": _address,
    "versions": _versions,
    "program": _program,
    "devices": _devices,
    "host": _host,
    "folders": _folders,
    "proxy": _proxy,
}
_TOGETHER: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "memory": _memory,
    "disk": _disk,
    "clock": _clock,
}
