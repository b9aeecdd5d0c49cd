"""This host: its name, memory, disk and shared folders; what is installed."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from shoal.errors import InitializeError
from shoal.paths import free_bytes_at, why_refused
from shoal.runtime.doctor.findings import (
    CLOCK_OFF_S,
    LITTLE_DISK_BYTES,
    NOTE,
    PROBLEM,
    CheckResult,
    Finding,
    Report,
)
from shoal.runtime.doctor.reachability import resolve
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.system.local_devices import num_cores
from shoal.runtime.system.own_name import ADVICE, unresolved
from shoal.runtime.wire.sockets import LOOPBACK_ADVICE, why_no_loopback

_LITTLE_MEMORY_BYTES = 512 << 20
_RESOLVE_S = 5.0


def check_host() -> CheckResult:
    """Return the name of this host, and its addresses by that name."""
    name = socket.gethostname()
    resolved = resolve(name, _RESOLVE_S)
    facts = {"name": name, "addresses": list(resolved.addresses), "cores": num_cores()}
    problem = why_no_loopback()
    findings = (Finding("host", problem, LOOPBACK_ADVICE),) if problem else ()
    return CheckResult(
        facts if resolved.addresses else {**facts, "error": resolved.error}, findings
    )


def check_name(report: Report) -> CheckResult:
    """Check that the host's name resolves: CPU devices of several processes connect by it."""
    host, devices = report.facts["host"], report.facts.get("devices", {})
    if host["addresses"]:
        return CheckResult({})
    connects_by_it = devices.get("platform") == "cpu" and (report.num_processes or 1) > 1
    level = PROBLEM if connects_by_it else NOTE
    problem = unresolved(host["name"], host["error"])
    advice = f"{ADVICE} (on one host shoal.initialize does without; other programs may not)"
    return CheckResult({}, (Finding("host", problem, advice, level),))


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
            problem = f"there is no directory {purpose}: {error.strerror}"
            findings.append(Finding("disk", problem, level=NOTE))
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


# ---- Versions of this process's packages.


_PACKAGES = ("shoal", "jax", "jaxlib", "numpy")
_DRIVERS = (
    "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin", "jax-rocm60-plugin",
)  # fmt: skip
_VARIABLES = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


def check_versions(env: Mapping[str, str]) -> CheckResult:
    """Return the versions of Python and its packages, and the variables that change programs."""
    versions = {name: _version(name) for name in (*_PACKAGES, *_DRIVERS)}
    missing = [name for name in _PACKAGES if versions[name] is None and name != "shoal"]
    facts = {"python": platform.python_version()}
    facts |= {name: version for name, version in versions.items() if version is not None}
    facts |= {name: env[name] for name in _VARIABLES if env.get(name)}
    findings = [
        Finding("versions", f"{name} is not installed in {sys.executable}", f"pip install {name}")
        for name in missing
    ]
    if not missing:
        findings += _of_jax()
    return CheckResult(facts, tuple(findings))


def _of_jax() -> list[Finding]:
    """Return what `initialize` would say of this JAX."""
    try:
        line = jax_runtime.check_version()
    except InitializeError as error:
        problem, advice = str(error).splitlines()
        return [Finding("versions", problem, advice)]
    except ImportError:  # the probe of the devices says what is wrong
        return []
    return [Finding("versions", line, level=NOTE)] if line else []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---- Check that all processes see each other's files in a folder, and find its file system.


_LOOK_S = 5.0  # a shared file system may show a new file late
_PAUSE_S = 0.1


class FolderMarks:
    """This process's file in each directory, from `write` until `remove`."""

    def __init__(self, folders: Iterable[str], name: str) -> None:
        self.folders, self.name = tuple(dict.fromkeys(folders)), name

    def write(self) -> CheckResult:
        """Write them; return the facts of each directory, by the path that was given."""
        facts, findings = {}, []
        for folder in self.folders:
            path = Path(folder, self._file(self.name))
            try:
                path.touch(mode=0o600, exist_ok=False)
                ahead_s = path.stat().st_mtime - time.time()
                free = free_bytes_at(folder)
            except OSError as error:
                problem = f"no file can be written in {folder}: {why_refused(error, folder)}"
                findings.append(Finding("folders", problem))
                continue
            facts[folder] = {
                "file_system": file_system(os.path.abspath(folder)),
                "free_bytes": free,
            }
            if abs(ahead_s) > CLOCK_OFF_S:
                problem = f"the clock of {folder} is {ahead_s:+.0f} s from that of this host"
                findings.append(Finding("clock", problem, "synchronize both (chrony, ntpd)"))
            if free is not None and free < LITTLE_DISK_BYTES:
                findings.append(Finding("folders", f"only {free >> 20} MiB are free in {folder}"))
        return CheckResult(facts, tuple(findings))

    def see(self, names: Mapping[int, str]) -> dict[str, list[int]]:
        """Return, for each directory, the processes whose files are not seen there.

        Args:
          names: of the marks of all processes, which have written them.
        """
        deadline = time.monotonic() + _LOOK_S
        while True:
            hidden = {folder: self._hidden(folder, names) for folder in self.folders}
            if not any(hidden.values()) or time.monotonic() >= deadline:
                return hidden
            time.sleep(_PAUSE_S)

    def remove(self) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                Path(folder, self._file(self.name)).unlink(missing_ok=True)

    def _hidden(self, folder: str, names: Mapping[int, str]) -> list[int]:
        try:
            there = set(os.listdir(folder))
        except OSError:
            there = set()
        return [process for process, name in names.items() if self._file(name) not in there]

    @staticmethod
    def _file(name: str) -> str:
        return f".shoal-doctor-{name}"


def file_system(folder: str, mounts: str = "/proc/self/mounts") -> str:
    """Return the type of the file system of a directory ("nfs4", "ext4"); "" if unknown."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines():
            point, its_kind = line.split()[1:3]
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= best:
                best, kind = len(point), its_kind
    return kind
