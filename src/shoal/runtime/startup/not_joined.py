"""The errors of a process that belongs to a job of several and has not joined it.

Or that seems to: the children of a member inherit its launcher's variables. So a member leaves a
mark in its environment, which they inherit too: its index, its pid, when it began, its pid
namespace, and what identifies the job. It does not count once that process has ended, in another
namespace, or in the process itself, after an exec; and it is of no consequence to a child that
joins another job, as one that a launcher started within the member has other variables.

A child that was started before its parent joined has no mark. Where the job has an address, the
coordinator refuses the second process of one index. A directory is empty once the job has begun,
and the child would wait there: so a member whose job met in one of this host listens at a socket
whose name is made of the directory and its index.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import NamedTuple

from shoal.errors import InitializeError, ShoalError
from shoal.hashing import short_digest
from shoal.runtime.startup.launcher_table import LAUNCHERS, environment_of
from shoal.runtime.startup.launchers import JobPlace, ShownJob, decide
from shoal.runtime.startup.options import Arguments
from shoal.runtime.system.process_status import pid_namespace, shows_own_pids, status_of
from shoal.runtime.wire.sockets import connect_unix, listen_unix, peer_pid

BY_JAX = "jax.distributed.initialize"
_MARK = "SHOAL_MEMBER"
_ADVICE = (
    "put initialize() below `if __name__ == '__main__':`, or pass num_processes=1 for a job of "
    "its own, or start it with shoal run for one of several processes"
)


class _MarkedMember(NamedTuple):
    """The mark of a member."""

    process: int
    pid: int
    started_ticks: int  # 0: unknown
    namespace: str
    jobs: frozenset[str]  # each identifies the job: by where it meets, by a launcher's variables

    @property
    def is_another(self) -> bool:
        """Return whether it is a living process other than this one."""
        if self.pid == os.getpid() or self.namespace != _digest(pid_namespace()):
            return False
        status = status_of(self.pid)
        if status is not None:
            return status.started_ticks == self.started_ticks and not status.has_ended
        return not shows_own_pids() and _exists(self.pid)


def mark_member(cluster: JobPlace) -> None:
    """Leave a mark for the children of this process, which has joined its job."""
    status = status_of(os.getpid())
    jobs = {*_jobs(cluster), *_jobs(_launched())}
    numbers = (cluster.process, os.getpid(), status.started_ticks if status else 0)
    fields = [*map(str, numbers), _digest(pid_namespace()), *sorted(jobs)]
    os.environ[_MARK] = " ".join(fields)


def unmark_member() -> None:
    """Remove the mark: this process has left its job."""
    os.environ.pop(_MARK, None)


def claim_index(cluster: JobPlace) -> socket.socket | None:
    """Return a socket by which others of this host learn that this process has joined its job."""
    with contextlib.suppress(OSError):
        name = _claim_of(cluster)
        if name:
            return listen_unix(name)
    return None


def refuse_child(cluster: JobPlace) -> None:
    """Raise InitializeError if this process is a child of a member, about to join the same job."""
    if cluster.num_processes == 1:
        return
    member = _marked()
    if member is not None and member.is_another and member.jobs & _jobs(cluster):
        raise _child_of(member.process, member.pid)
    if _is_main_imported():
        parent = _parent()
        if _is_launched(parent):
            raise _child_of(cluster.process, parent)  # that was started before there was a mark
    pid = _claimed_by(cluster)
    if pid not in (0, os.getpid()):
        raise InitializeError(
            f"process {cluster.process} of this job has joined it already (pid {pid}), and this "
            f"one has the same variables, as a child of it has: {_ADVICE}"
        )


def refuse_launched_child() -> None:
    """Raise InitializeError if this process is a child of a member, with the same launcher."""
    cluster = _launched()
    if cluster is not None:
        refuse_child(cluster)


def not_joined(shown: ShownJob) -> InitializeError:
    """Return the error of a process of several that has not called `initialize`."""
    if shown.num_processes is None:
        return InitializeError(
            f"{shown.words} shows that this process is in a job, but not its number of processes\n"
            "call shoal.initialize(num_processes=…, process_id=…, coordinator_address=…) first, or "
            "initialize(num_processes=1) for a job of one"
        )
    if shown.by_jax:
        return InitializeError(
            f"{BY_JAX} made this process one of {shown.num_processes}, but it has not joined them "
            "in shoal: call shoal.initialize() after it"
        )
    return InitializeError(
        f"this process is one of {shown.num_processes} ({shown.words}) and has not joined them: "
        "call shoal.initialize() first, or initialize(num_processes=1) for a job of one"
    )


def _child_of(process: int, pid: int) -> InitializeError:
    return InitializeError(f"this is a child of process {process} (pid {pid}) of a job: {_ADVICE}")


def _claim_of(cluster: JobPlace) -> str:
    """Return the name of a member's socket; "" unless its job met in a directory of this host.

    Later jobs may use any other directory while this one runs.
    """
    meets = cluster.rendezvous
    if meets is None or not meets.on_one_host:
        return ""
    return f"shoal-{_digest(f'{meets.base}/{meets.name}/{cluster.process}')}"


def _claimed_by(cluster: JobPlace) -> int:
    """Return the pid of the process of this host that has joined with this one's index, or 0."""
    with contextlib.suppress(OSError):
        name = _claim_of(cluster)
        if name:
            with connect_unix(name) as sock:
                return peer_pid(sock)
    return 0


def _marked() -> _MarkedMember | None:
    """Return the mark that this process has inherited."""
    try:
        process, pid, started_ticks, namespace, *jobs = os.environ.get(_MARK, "").split(" ")
        return _MarkedMember(
            process=int(process),
            pid=int(pid),
            started_ticks=int(started_ticks),
            namespace=namespace,
            jobs=frozenset(jobs),
        )
    except ValueError:
        return None


def _launched() -> JobPlace | None:
    """Return the place that the environment gives, without asking a TPU's metadata server."""
    with contextlib.suppress(ShoalError):
        return decide(Arguments(), {**os.environ, "JAX_PLATFORMS": "cpu"})
    return None


def _jobs(cluster: JobPlace | None) -> set[str]:
    """Return what identifies a job of several."""
    if cluster is None or cluster.num_processes == 1:
        return set()
    meets = cluster.rendezvous
    where = cluster.address or (os.path.join(meets.base, meets.name) if meets else "")
    keys = [where]
    if meets is not None and meets.on_one_host and cluster.launched:
        keys.append(cluster.launched)  # its directory is found by its ancestors, which may be gone
    return {_digest(key) for key in keys}


def _digest(text: str) -> str:
    return short_digest(text.encode(errors="surrogateescape")).hex()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _is_main_imported() -> bool:
    """Return whether `multiprocessing` imports the main module of the parent, which calls this."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "__mp_main__" and frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_launched(pid: int) -> bool:
    """Return whether a process was started with this process's numbers, instead of setting them."""
    names = [name for launcher in LAUNCHERS for name in (*launcher.indices, *launcher.counts)]
    own = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    with contextlib.suppress(OSError):
        return bool(own) and own <= environment_of(pid)
    return False


def _parent() -> int:
    """Return the pid of the process that has started this worker, perhaps by a fork server."""
    pid = os.getppid()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        status = status_of(pid) if b"multiprocessing.forkserver" in file.read() else None
        return status.parent if status else pid
    return pid
