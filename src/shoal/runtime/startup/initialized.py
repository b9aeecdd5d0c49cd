"""The arguments of `initialize`, kept for a repeated call: a notebook cell that is run again, a
library that makes sure of the job, or a program whose test bench has already joined it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from shoal.arguments import not_texts
from shoal.errors import InitializeError, raise_all
from shoal.runtime.startup.addresses import meets_at
from shoal.runtime.startup.launchers import JobPlace, decide
from shoal.runtime.startup.membership import find_cluster
from shoal.runtime.startup.options import (
    Arguments,
    bind_host,
    device_ids,
    host_devices,
    virtual_devices,
    whole,
)
from shoal.runtime.system.callsite import line_of

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
_NUMBERS = ("process", "num_processes", "address")  # whose source is one: arguments or a launcher


class Initialized(NamedTuple):
    """The call that joined the job."""

    arguments: Arguments
    cluster: JobPlace  # the result of the arguments and the environment
    is_attached: bool
    site: str

    def check_same(self, arguments: Arguments) -> None:
        """Raise InitializeError if these arguments contradict those of the call that joined.

        What is not given contradicts nothing, unless the environment describes another job by now.

        Raises:
          UsageError: an argument is malformed.
        """
        now = self._given(arguments)
        fixed = {*now, *(_NUMBERS if now.keys() & {*_NUMBERS[:2]} else ())}
        again = (
            find_cluster(self.arguments)[0]
            if self.is_attached
            else decide(self.arguments, os.environ)
        )
        now = {field: getattr(again, field) for field in _COMPARED if field not in fixed} | now
        differing = [
            f"{name}: {_shown(before)} before, {_shown(now[field])} now"
            for field, name in _COMPARED.items()
            if field in now and (before := getattr(self.cluster, field)) != now[field]
        ]
        if not differing:
            return
        cluster, lines = self.cluster, "\n".join(differing)
        raise InitializeError(
            f"initialize was called before, with other arguments ({line_of(self.site)})\n"
            f"before: {_call(self.arguments)}\nnow:    {_call(arguments)}\n{lines}\n"
            f"this is process {cluster.process} of {cluster.num_processes}; call shutdown() first "
            "to join another job"
        )

    def _given(self, arguments: Arguments) -> dict[str, object]:
        """Return what these arguments say, without the environment, by the field of `JobPlace`."""
        address, count, process = arguments[:3]
        texts = {"coordinator_address": address}
        texts["coordinator_bind_address"] = arguments.coordinator_bind_address
        problems = not_texts(**texts)
        found = {
            "process": None if process is None else whole("process_id", process, 0, problems),
            "num_processes": None if count is None else whole("num_processes", count, 1, problems),
            "address": None if address is None else meets_at(address, {}, None, problems).address,
            "bind_host": bind_host(arguments, {}, problems),
            "virtual_devices": virtual_devices(arguments, {}, problems),
            "local_device_ids": device_ids(arguments, {}, problems),
            "host_devices": host_devices(arguments, problems),
        }
        raise_all("initialize", problems)
        given: dict[str, object] = {
            field: value for field, value in found.items() if value is not None
        }
        if self.is_attached or given.get("num_processes", self.cluster.num_processes) == 1:
            given.pop("address", None)  # of no effect
        return given


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _call(arguments: Arguments) -> str:
    given = arguments._asdict().items()
    return f"initialize({', '.join(f'{k}={v!r}' for k, v in given if v is not None)})"
