"""The files beside the logs: the address of a running job, and the facts of its failure."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Mapping, Sequence

from shoal.launch.environment import Addresses
from shoal.paths import write_private
from shoal.runtime.failures.facts import JobFailure, to_json

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
        "meeting_place": addresses.meeting_place,
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


def remove_failure(log_dir: str) -> None:
    """Remove the files of an earlier job, and of its attempts."""
    for path in (log_dir, *glob.glob(os.path.join(glob.escape(log_dir), "attempt*"))):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, FAILURE_FILE))
