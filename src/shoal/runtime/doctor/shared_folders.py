"""Check that all processes see each other's files in a folder, and find its file system."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.paths import free_bytes_at, why_refused
from shoal.runtime.doctor.findings import CLOCK_OFF_S, LITTLE_DISK_BYTES, CheckResult, Finding

_LOOK_S = 5.0  # a shared file system may show a new file late
_PAUSE_S = 0.1


class FolderMarks:
    """This process's file in each folder, from `write` until `remove`."""

    def __init__(self, folders: Iterable[str], name: str) -> None:
        self.folders, self.name = tuple(dict.fromkeys(folders)), name

    def write(self) -> CheckResult:
        """Write them; return the facts of each folder, by the path that was given."""
        facts, findings = {}, []
        for folder in self.folders:
            path = Path(folder, self._file(self.name))
            try:
                path.touch(mode=0o600, exist_ok=False)
                ahead_s = path.stat().st_mtime - time.time()
                free = free_bytes_at(folder)
            except OSError as error:
                words = f"no file can be written in {folder}: {why_refused(error, folder)}"
                findings.append(Finding("folders", words))
                continue
            facts[folder] = {
                "file_system": file_system(os.path.abspath(folder)),
                "free_bytes": free,
            }
            if abs(ahead_s) > CLOCK_OFF_S:
                words = f"the clock of {folder} is {ahead_s:+.0f} s from that of this host"
                findings.append(Finding("clock", words, "synchronise both (chrony, ntpd)"))
            if free is not None and free < LITTLE_DISK_BYTES:
                findings.append(Finding("folders", f"only {free >> 20} MiB are free in {folder}"))
        return CheckResult(facts, tuple(findings))

    def see(self, names: Mapping[int, str]) -> dict[str, list[int]]:
        """Return, for each folder, the processes whose files are not seen there.

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
    """Return the type of the file system of a folder ("nfs4", "ext4"); "" if unknown."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines():
            point, its_kind = line.split()[1:3]
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= best:
                best, kind = len(point), its_kind
    return kind
