"""The arguments of `initialize`, kept for a repeated call: a notebook cell that is run again, or a
program whose test bench has already joined the job.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from shoal.errors import InitializeError
from shoal.runtime.startup.launchers import JobPlace, decide
from shoal.runtime.startup.membership import find_cluster
from shoal.runtime.startup.options import Arguments

# The job and this process's place in it; not their source, nor the secret.
_COMPARED = {
    "process": "process_id",
    "num_processes": "num_processes",
    "address": "coordinator_address",
    "bind_host": "coordinator_bind_address",
    "virtual_devices": "virtual_devices",
    "local_device_ids": "local_device_ids",
    "host_devices": "host_devices",
}


class Initialized(NamedTuple):
    """The call that joined the job."""

    arguments: Arguments
    cluster: JobPlace  # the result of the arguments and the environment
    is_attached: bool
    site: str

    def check_same(self, arguments: Arguments) -> None:
        """Raise InitializeError if these arguments differ from those of the call that joined."""
        now = find_cluster(arguments)[0] if self.is_attached else decide(arguments, os.environ)
        differing = [
            f"{name}: {_shown(before)} before, {_shown(after)} now"
            for field, name in _COMPARED.items()
            if (before := getattr(self.cluster, field)) != (after := getattr(now, field))
        ]
        if not differing:
            return
        cluster, lines = self.cluster, "\n".join(differing)
        raise InitializeError(
            f"initialize was called before, with other arguments ({self.site})\n"
            f"before: {_call(self.arguments)}\nnow:    {_call(arguments)}\n{lines}\n"
            f"this is process {cluster.process} of {cluster.num_processes}; call shutdown() first "
            "to join another job"
        )


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _call(arguments: Arguments) -> str:
    given = arguments._asdict().items()
    return f"initialize({', '.join(f'{k}={v!r}' for k, v in given if v is not None)})"
