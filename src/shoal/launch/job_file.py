"""The file beside the logs with the address of a running job, for observers outside the job."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence

from shoal.launch.environment import Addresses

JOB_FILE = "job.json"  # in the log directory, as long as the job runs


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
    path = os.path.join(log_dir, JOB_FILE)
    temporary = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, "w") as stream:
            stream.write(json.dumps(posted) + "\n")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove_job_file(log_dir: str) -> None:
    """Remove it: the job has ended."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(log_dir, JOB_FILE))
