"""What the kernel counts of this process's control group."""

from __future__ import annotations

import os
import re

_ROOT = "/sys/fs/cgroup"


def oom_kills(proc: str = "/proc/self/cgroup", root: str = _ROOT) -> int:
    """Return how many processes of this control group were killed for want of memory.

    Groups below it count. 0 if unknown: on other systems, or if the group's files are not mounted.

    Source: `oom_kill` in `memory.events` of cgroup v2 and in `memory.oom_control` of v1
    (kernel documentation, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst).
    """
    try:
        with open(proc) as file:
            rows = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return 0
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if not controllers:  # the hierarchy of v2
            names = [f"{root}{below}/memory.events" for below in (path, "")]
        elif "memory" in controllers.split(","):
            names = [f"{root}/memory{below}/memory.oom_control" for below in (path, "")]
        else:
            continue
        for name in names:  # in a container, the group itself is mounted as the root
            if (count := _count(os.path.normpath(name))) is not None:
                return count
    return 0


def _count(name: str) -> int | None:
    try:
        with open(name) as file:
            found = re.search(r"^oom_kill (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
