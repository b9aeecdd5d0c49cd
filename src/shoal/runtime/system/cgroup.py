"""What the kernel counts of this process's control group."""

from __future__ import annotations

import os
import re

_ROOT = "/sys/fs/cgroup"


def oom_kills(proc: str = "/proc/self/cgroup", root: str = _ROOT) -> int | None:
    """Return how many processes of this control group were killed for want of memory.

    Groups below it count. None if unknown: on other systems, or if the group's files are not
    mounted.

    Source: `oom_kill` in `memory.events` of cgroup v2 and in `memory.oom_control` of v1
    (kernel documentation, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst).
    """
    names = ("memory.events", "memory.oom_control")
    return _first(names, r"^oom_kill (\d+)$", proc, root)


def memory_peak(proc: str = "/proc/self/cgroup", root: str = _ROOT) -> int | None:
    """Return the most bytes that this control group has used; None if unknown.

    Source: as of `oom_kills`, `memory.peak` and `memory.max_usage_in_bytes`.
    """
    return _first(("memory.peak", "memory.max_usage_in_bytes"), r"^(\d+)$", proc, root)


def memory_limit(proc: str = "/proc/self/cgroup", root: str = _ROOT) -> int | None:
    """Return how many bytes this control group may use; None if unknown or without a limit."""
    return _first(("memory.max", "memory.limit_in_bytes"), r"^(\d+)$", proc, root)


def _first(names: tuple[str, str], pattern: str, proc: str, root: str) -> int | None:
    """Return a number from the group's file: `names` of version 2 and of version 1."""
    try:
        with open(proc) as file:
            rows = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if not controllers:  # the hierarchy of v2
            files = [f"{root}{below}/{names[0]}" for below in (path, "")]
        elif "memory" in controllers.split(","):
            files = [f"{root}/memory{below}/{names[1]}" for below in (path, "")]
        else:
            continue
        for name in files:  # in a container, the group itself is mounted as the root
            if (number := _number(os.path.normpath(name), pattern)) is not None:
                return number
    return None


def _number(name: str, pattern: str) -> int | None:
    try:
        with open(name) as file:
            found = re.search(pattern, file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
