"""The directory of a job's logs, used by one job at a time, and the files beside them.

The launcher and its supervisor hold a lock on `job.lock` there: the kernel releases it when both
have ended, in any way. The file names the job, and is removed when the job ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.errors import UsageError
from shoal.launch.environment import Addresses
from shoal.paths import local_path, open_no_link, why_refused, write_private
from shoal.runtime.failures.facts import JobFailure, to_json

_LOCK = "job.lock"
_LETTERS = 200  # of a command in a message
_WRITTEN_S = 1.0  # the owner of a lock writes its identity as soon as it has it
_PAUSE_S = 0.01
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def open_log_dir(
    folder: str | None, command: Sequence[str], node: int | None = None
) -> Iterator[str]:
    """Yield the absolute path of a directory that belongs to this job alone during the block,
    without the files of an earlier one.

    The launchers of a job on several hosts may share it: each has a lock of its own.

    Args:
      folder: None: a new temporary directory.
      command: that of this job, shown to another job that requests the same directory.
      node: of this launcher, in a job on several hosts.

    Raises:
      UsageError: it is not writable, or another running job writes there.
    """
    if folder is None:
        try:
            path = os.path.abspath(tempfile.mkdtemp(prefix="shoal-run-"))
        except OSError as error:
            problem = f"no temporary directory for the logs ({error.strerror}); pass --log-dir"
            raise UsageError(f"run: {problem}") from None
        yield path
        return
    folder = local_path(folder, f"run: --log-dir {folder!r}")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        lock = _LOCK if node is None else f"job.node{node}.lock"
        lock_fd = _lock(folder, lock, command)
    except OSError as error:
        why = why_refused(error, folder)
        raise UsageError(f"run: --log-dir {folder!r}: {why}") from None
    path = os.path.abspath(folder)
    if not node or not _is_shared(path, lock):  # node 0 writes first, and before it the others none
        _remove_earlier(path)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # it may have been removed, with all its logs
            os.unlink(os.path.join(path, lock))
        os.close(lock_fd)


def _lock(folder: str, name: str, command: Sequence[str]) -> int:
    """Return a descriptor that holds a lock of a directory."""
    path = os.path.join(folder, name)
    while True:
        try:
            fd = open_no_link(path, os.O_RDWR | os.O_CREAT, 0o600)  # arguments may hold secrets
        except PermissionError:
            raise _refusal(folder, path, "another user") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # the file system does not support locks
                os.close(fd)
                if not isinstance(error, BlockingIOError):
                    raise
                raise _refusal(folder, path) from None
        if _is_at(path, fd):
            break
        os.close(fd)  # its owner has ended meanwhile, and removed it
    owner = {
        "command": shlex.join(command),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(fd, 0)
    with contextlib.suppress(PermissionError):  # left by another user
        os.fchmod(fd, 0o600)
    os.pwrite(fd, json.dumps(owner).encode() + b"\n", 0)
    return fd


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _refusal(folder: str, path: str, owner_text: str = "another running job") -> UsageError:
    """Return the error that names the job that owns a directory."""
    owner = _owner(path) if os.access(path, os.R_OK) else {}
    if owner:
        where = "" if owner["host"] == socket.gethostname() else f" on {owner['host']}"
        quoted = str(owner["command"])
        quoted = quoted if len(quoted) <= _LETTERS else f"{quoted[:_LETTERS]}…"
        owner_text = f"`{quoted}` (pid {owner['pid']}{where}), running since {owner['since']}"
    advice = "use a separate directory for each job, or wait until that one has ended"
    return UsageError(f"run: --log-dir {folder!r} holds the logs of {owner_text}\n{advice}")


def _owner(path: str) -> dict[str, Any]:
    """Return what the owner of a lock wrote; wait for one that has just acquired it."""
    until_s = time.monotonic() + _WRITTEN_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            with open(path, encoding="utf-8") as file:
                owner: dict[str, Any] = json.load(file)
            if owner["host"] != socket.gethostname() or _runs(owner["pid"]):
                _ = owner["command"], owner["since"]
                return owner
        time.sleep(_PAUSE_S)
    return {}


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# ---- The files beside the logs: the address of a running job, and the facts of its failure.


JOB_FILE = "job.json"  # in the log directory, as long as the job runs
FAILURE_FILE = "failure.json"  # of the last job there, if it failed


def write_job_file(
    log_dir: str,
    addresses: Addresses,
    token: str,
    *,
    services: Mapping[str, int],
    processes: Sequence[int],
) -> None:
    """Write the job's address and pids.

    The file holds the token, with which the job can be controlled, so only this user may read it.

    Raises:
      OSError: it cannot be written.
    """
    posted = {
        "coordinator": addresses.coordinator,
        "jax_service": addresses.jax_service,
        "token": token,
        "launcher": os.getppid(),
        "services": dict(services),
        "processes": list(processes),
    }
    write_private(os.path.join(log_dir, JOB_FILE), json.dumps(posted))


def remove_job_file(log_dir: str) -> None:
    """Remove it: the job has ended."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(log_dir, JOB_FILE))


def write_failure(log_dir: str, failure: JobFailure) -> str:
    """Write the facts of a failure; return why they cannot be written, or ""."""
    path = os.path.join(log_dir, FAILURE_FILE)
    try:
        write_private(path, json.dumps(to_json(failure), ensure_ascii=False))
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


def shown_path(folder: str) -> str:
    """Return a directory as a report shows it: relative to this one where it is within that."""
    try:
        here = os.path.relpath(folder)
    except OSError:  # this directory was removed
        return folder
    return folder if here.startswith(os.pardir) else min(folder, here, key=len)


# ---- What an earlier job has left, perhaps with more processes or attempts than this one.


_WRITTEN = re.compile(  # by shoal: logs, what processes recorded, and the files above
    r"p\d{4,}\.log|\.p\d{4,}\.(progress|record|record\.fault)|(coordinator|jax_service)\.log"
    r"|(job|failure)\.json(\.\d+)?"
)
_ATTEMPT = re.compile(r"attempt\d+")


def _remove_earlier(folder: str) -> None:
    """Remove what earlier jobs have written there, and nothing else."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _ATTEMPT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _remove_earlier(entry.path)
                with contextlib.suppress(OSError):  # it holds other files
                    os.rmdir(entry.path)
            elif _WRITTEN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _is_shared(folder: str, lock: str) -> bool:
    """Return whether a launcher of another node has a lock there."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"job\.node\d+\.lock", name)]
    return names != [lock]
