"""This host: its name, memory and disk."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from shoal.paths import free_bytes_at
from shoal.runtime.doctor.findings import (
    LITTLE_DISK_BYTES,
    NOTE,
    PROBLEM,
    CheckResult,
    Finding,
    Report,
)
from shoal.runtime.doctor.reachability import resolve
from shoal.runtime.system.cores import num_cores
from shoal.runtime.system.own_name import ADVICE, unresolved
from shoal.runtime.wire.listening import LOOPBACK_ADVICE, why_no_loopback

_LITTLE_MEMORY_BYTES = 512 << 20
_RESOLVE_S = 5.0


def check_host() -> CheckResult:
    """Return the name of this host, and its addresses by that name."""
    name = socket.gethostname()
    found = resolve(name, _RESOLVE_S)
    facts = {"name": name, "addresses": list(found.addresses), "cores": num_cores()}
    words = why_no_loopback()
    findings = (Finding("host", words, LOOPBACK_ADVICE),) if words else ()
    return CheckResult(facts if found.addresses else {**facts, "error": found.error}, findings)


def check_name(report: Report) -> CheckResult:
    """Check that the host's name resolves: CPU devices of several processes connect by it."""
    host, devices = report.facts["host"], report.facts.get("devices", {})
    if host["addresses"]:
        return CheckResult({})
    connects_by_it = devices.get("platform") == "cpu" and (report.num_processes or 1) > 1
    level = PROBLEM if connects_by_it else NOTE
    words = unresolved(host["name"], host["error"])
    advice = f"{ADVICE} (on one host shoal.initialize does without; other programs may not)"
    return CheckResult({}, (Finding("host", words, advice, level),))


def check_memory(root: str = "/") -> CheckResult:
    """Return the memory of this host, or of its container, that is available.

    Args:
      root: where `proc` and `sys` are mounted.
    """
    rows = (line.split() for line in _text(root, "proc/meminfo").splitlines())
    kilobytes = {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
    total = kilobytes.get("MemTotal", 0) << 10
    free = kilobytes.get("MemAvailable", 0) << 10
    limit = _text(root, "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = _text(root, "sys/fs/cgroup/memory.current").strip()
        total = min(total, int(limit)) if total else int(limit)
        free = max(0, min(free, int(limit) - int(used or 0)))
    if not total:  # not Linux
        return CheckResult({})
    facts = {"available_bytes": free, "total_bytes": total}
    if free >= _LITTLE_MEMORY_BYTES:
        return CheckResult(facts)
    return CheckResult(facts, (Finding("memory", f"only {free >> 20} MiB of memory are free"),))


def check_disk() -> CheckResult:
    """Return the free space where temporary files lie, and in the current directory."""
    facts, findings, directories = {}, [], []
    finds = {"for temporary files": tempfile.gettempdir, "where this process runs": os.getcwd}
    for purpose, find in finds.items():
        try:
            directories.append(find())
        except OSError as error:
            words = f"there is no directory {purpose}: {error.strerror}"
            findings.append(Finding("disk", words, level=NOTE))
    for directory in dict.fromkeys(directories):
        free = free_bytes_at(directory)
        facts[directory] = {"free_bytes": free}
        if free is not None and free < LITTLE_DISK_BYTES:
            findings.append(Finding("disk", f"only {free >> 20} MiB are free in {directory}"))
    return CheckResult(facts, tuple(findings))


def _text(root: str, path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(root, path).read_text(encoding="ascii")
    return ""
