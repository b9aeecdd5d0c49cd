"""What the kernel says of processes: their status, their descendants, their control group.

Linux: proc_pid_stat(5).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple


class ProcessStatus(NamedTuple):
    """The kernel's record of one process."""

    state: str  # one letter: R running, S sleeping, T and t stopped, Z zombie, X dead, …
    parent: int  # its pid
    session: int
    started_ticks: int  # since boot; tells apart processes that reuse a pid
    num_threads: int = 1

    @property
    def has_ended(self) -> bool:
        """Return whether it is dead, reaped or not.

        One whose main thread has ended is a zombie, too, but lives on, with its files and ports.
        """
        return self.state in "ZX" and self.num_threads <= 1

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped it."""
        return self.state in "Tt"


class Seen(NamedTuple):
    """What another process of its host has seen of a process that gives no heartbeat.

    `stacks.DumpFile` shows it, and `stacks.seen` reads it there. Sent: one field more is a higher
    PROTOCOL, and is read by `stalls.seen_of`.
    """

    site: str = ""  # where it stands in its program; empty: its signal handler did not answer
    share: float = 1.0  # of a core, used by its main thread since its watcher last ran
    limit_s: float = math.inf  # after which it is stuck; inf also where it is unknown


def shows_own_pids() -> bool:
    """Return whether /proc shows the processes of this pid namespace, by the pids they have in it.

    One that was left by `unshare --pid` without --mount-proc, or mounted into a sandbox from
    outside, has other processes under the same numbers.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def pid_namespace() -> str:
    """Return an id shared by processes that see each other's pids; empty: unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def status_of(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None: there is no such process, or it cannot be seen."""
    return _read(pid) if shows_own_pids() else None


def _read(pid: int) -> ProcessStatus | None:
    try:
        fields = _fields(f"/proc/{pid}/stat")
        parent, session, num_threads, started = (int(fields[index]) for index in (1, 3, 17, 19))
        return ProcessStatus(
            state=fields[0].decode(),
            parent=parent,
            session=session,
            started_ticks=started,
            num_threads=num_threads,
        )
    except (OSError, IndexError):
        return None  # it has ended, perhaps meanwhile


def _fields(path: str) -> list[bytes]:
    """Return the fields of such a file from the third on.

    pid (name, of any characters) state ppid pgrp session … utime stime, the 14th and 15th, …
    num_threads, the 20th, … starttime, the 22nd.
    """
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def main_thread_s(pid: int) -> float:
    """Return the processor time of a process's main thread, seconds.

    Raises:
      OSError: there is no such process, or it cannot be seen.
    """
    used, in_kernel = _fields(f"/proc/{pid}/task/{pid}/stat")[11:13]
    return (int(used) + int(in_kernel)) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process. False if it is not seen."""
    status = status_of(pid)
    return status is not None and status.is_stopped


def all_statuses() -> Iterator[tuple[int, ProcessStatus]]:
    """Yield the pid and the status of every process of this machine that can be seen."""
    for name in os.listdir("/proc") if shows_own_pids() else ():
        if not name.isdigit():
            continue
        status = _read(int(name))
        if status:
            yield int(name), status


# ---- What the kernel counts of this process's control group.


_ROOT = "/sys/fs/cgroup"
_NO_LIMIT_BYTES = 1 << 62


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
    """Return how many bytes this control group may use; None if unknown or without a limit.

    Version 1 writes "no limit" as 2^63, rounded down to a page.
    """
    limit = _first(("memory.max", "memory.limit_in_bytes"), r"^(\d+)$", proc, root)
    if limit is None or limit >= _NO_LIMIT_BYTES:
        return None
    return limit


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
            number = _number(os.path.normpath(name), pattern)
            if number is not None:
                return number
    return None


def _number(name: str, pattern: str) -> int | None:
    try:
        with open(name) as file:
            match = re.search(pattern, file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


# ---- Find the descendants of a process by the kernel's parent links (Linux).
#
# A job's grandchildren may leave their process group, their session, or lose their parent (a
# double fork). With `adopt_orphans` the kernel makes this process the parent of every orphan
# below it (PR_SET_CHILD_SUBREAPER, prctl(2)), so that none can leave the tree. Elsewhere (macOS,
# or where /proc does not show the processes of this pid namespace) nothing is found here, and
# only process groups created by the launcher can be ended.


_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01


class Relative(NamedTuple):
    """A living descendant of this process."""

    pid: int
    session: int


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process. Linux only; else does nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int, *, without: Collection[int] = ()) -> list[Relative]:
    """Return the living descendants of `root`, except the trees rooted in `without`."""
    children: defaultdict[int, list[Relative]] = defaultdict(list)
    for pid, status in all_statuses():
        if not status.has_ended:
            children[status.parent].append(Relative(pid, status.session))
    relatives: list[Relative] = []
    parents = [root]
    while parents:
        for relative in children.pop(parents.pop(), ()):
            if relative.pid not in without:
                relatives.append(relative)
                parents.append(relative.pid)
    return relatives


def send(relatives: Collection[Relative], number: signal.Signals) -> None:
    """Send a signal to each; ignore processes that have ended meanwhile."""
    for relative in relatives:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(relative.pid, number)


def kill_all(
    *, within_s: float, beyond_session: int | None = None, without: Collection[int] = ()
) -> None:
    """Kill and reap all descendants of this process; give up after `within_s` seconds.

    Repeated until none is left, because a process may fork in between.

    Args:
      within_s: a process in an uninterruptible wait cannot be killed, nor waited for.
      beyond_session: spare the processes of this session. 0 is one, too: in a container, that of
        processes whose session leader is outside (pid_namespaces(7)).
      without: spare the trees rooted in these, too.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        all_below = descendants(os.getpid(), without=without)
        below = [relative for relative in all_below if relative.session != beyond_session]
        send(below, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not below or time.monotonic() > deadline_s:
            return
        time.sleep(_POLL_S)
