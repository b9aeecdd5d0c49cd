"""Find the process of this machine that launched the local processes of a job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from shoal.runtime.system.process_status import status_of


def launcher_of(variables: Collection[str]) -> str:
    """Return an identifier of the launcher, equal for all processes of this host that it started.

    The launcher is the nearest ancestor that was started without `variables` ("PMI_RANK=3"), which
    it sets for its children: wrapper scripts in between inherit them. Without /proc it is the
    parent.
    """
    wanted = {variable.encode() for variable in variables}
    status = status_of(os.getpid())
    with contextlib.suppress(OSError):  # one of them has ended
        while status is not None:
            pid = status.parent
            if pid == 0:  # outside of this container
                return "outside"
            status = status_of(pid)
            if status is not None and (pid == 1 or not wanted & _environment(pid)):
                return f"{pid} started {status.started_ticks}"
    return str(os.getppid())


def _environment(pid: int) -> set[bytes]:
    """Return the variables that a process was started with; empty for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except PermissionError:
        return set()
