"""Find the process of this machine that launched the local processes of a job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from shoal.runtime.system.process_status import status_of


def launcher_of(variables: Collection[str], daemon: str = "") -> str:
    """Return an identifier of the launcher, equal for all processes of this host that it started.

    The launcher is the nearest ancestor that was started without all of `variables` ("PMI_RANK=3"),
    which it sets for its children: wrapper scripts in between inherit them. So does a launcher that
    is started within a process of another job; it has other ones, or is known as a program called
    `daemon`. Without /proc it is the parent.
    """
    wanted = {variable.encode() for variable in variables}
    status = status_of(os.getpid())
    with contextlib.suppress(OSError):  # one of them has ended
        while status is not None:
            pid = status.parent
            if pid == 0:  # outside of this container
                return "outside"
            status = status_of(pid)
            is_launcher = pid == 1 or _name(pid) == daemon or not wanted <= environment_of(pid)
            if status is not None and is_launcher:
                return f"{pid} started {status.started_ticks}"
    return str(os.getppid())


def environment_of(pid: int) -> set[bytes]:
    """Return the variables that a process was started with; empty for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except PermissionError:
        return set()


def _name(pid: int) -> str:
    """Return the name of a process's program: at most 15 characters of it."""
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
