"""The error of a process that belongs to a job of several and has not joined it."""

from __future__ import annotations

from shoal.errors import InitializeError
from shoal.runtime.startup.launchers import ShownJob

BY_JAX = "jax.distributed.initialize"


def not_joined(shown: ShownJob) -> InitializeError:
    """Return the error of a process of several that has not called `initialize`."""
    if shown.num_processes is None:
        return InitializeError(
            f"{shown.words} shows that this process is in a job, but not its number of processes\n"
            "call shoal.initialize(num_processes=…, process_id=…, coordinator_address=…) first, or "
            "initialize(num_processes=1) for a job of one"
        )
    if shown.words == BY_JAX:
        return InitializeError(
            f"{BY_JAX} made this process one of {shown.num_processes}, but it has not joined them "
            "in shoal: call shoal.initialize() after it"
        )
    return InitializeError(
        f"this process is one of {shown.num_processes} ({shown.words}) and has not joined them: "
        "call shoal.initialize() first, or initialize(num_processes=1) for a job of one"
    )
