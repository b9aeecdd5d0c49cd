"""Find the descendants of a process by the kernel's parent links (Linux).

A job's grandchildren may leave their process group, their session, or lose their parent (a double
fork). With `adopt_orphans` the kernel makes this process the parent of every orphan below it
(PR_SET_CHILD_SUBREAPER, prctl(2)), so that none can leave the tree. Elsewhere (macOS, or where
/proc does not show the processes of this pid namespace) nothing is found here, and only process
groups created by the launcher can be ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from shoal.runtime.system.process_status import all_statuses

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

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int, *, without: Collection[int] = ()) -> list[Relative]:
    """Return the living descendants of `root`, except the trees rooted in `without`."""
    children: defaultdict[int, list[Relative]] = defaultdict(list)
    for pid, status in all_statuses():
        if not status.has_ended:
            children[status.parent].append(Relative(pid, status.session))
    found: list[Relative] = []
    parents = [root]
    while parents:
        for relative in children.pop(parents.pop(), ()):
            if relative.pid not in without:
                found.append(relative)
                parents.append(relative.pid)
    return found


def send(relatives: Collection[Relative], number: signal.Signals) -> None:
    """Send a signal to each; ignore processes that have ended meanwhile."""
    for relative in relatives:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(relative.pid, number)


def kill_all(*, within_s: float, beyond_session: int | None = None) -> None:
    """Kill and reap all descendants of this process; give up after `within_s` seconds.

    Repeated until none is left, because a process may fork in between.

    Args:
      within_s: a process in an uninterruptible wait cannot be killed, nor waited for.
      beyond_session: spare the processes of this session. 0 is one, too: in a container, that of
        processes whose session leader is outside (pid_namespaces(7)).
    """
    deadline_s = time.monotonic() + within_s
    while True:
        below = [r for r in descendants(os.getpid()) if r.session != beyond_session]
        send(below, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not below or time.monotonic() > deadline_s:
            return
        time.sleep(_POLL_S)
