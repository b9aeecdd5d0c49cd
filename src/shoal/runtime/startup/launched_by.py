"""Find the process of this machine that launched the local processes of a job."""

from __future__ import annotations

import os
from collections.abc import Collection


def launcher_of(variables: Collection[str]) -> str:
    """Return an identifier of the launcher, equal for all processes of this host that it started.

    The launcher is the nearest ancestor that was started without `variables` ("PMI_RANK=3"), which
    it sets for its children: wrapper scripts in between inherit them. Without /proc it is the
    parent.
    """
    wanted = {variable.encode() for variable in variables}
    pid = os.getpid()
    try:
        while True:
            pid, _ = _parent_and_start(pid)
            if pid <= 1 or not wanted & _environment(pid):
                return f"{pid} started {_parent_and_start(pid)[1]}" if pid > 0 else "outside"
    except OSError:
        return str(os.getppid())


def _parent_and_start(pid: int) -> tuple[int, int]:
    """Return the parent's pid, 0 if it is outside of this container, and the start of `pid`."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[19])


def _environment(pid: int) -> set[bytes]:
    """Return the variables that a process was started with; empty for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except PermissionError:
        return set()
