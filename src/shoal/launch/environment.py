"""The environment variables that give a process of the job its place."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal import settings
from shoal.runtime.startup import inherited
from shoal.runtime.system import local_devices
from shoal.runtime.system.child_process import uninspected
from shoal.runtime.system.local_devices import chosen_devices, cpu_threads, without_devices
from shoal.runtime.wire.frames import split_address

# Variables of an outer launcher that would contradict shoal's, or that JAX would add.
_STALE = (
    "JAX_COORDINATOR_PORT",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_PARTITION_INDEX",
    "JAX_SLICE_INDEX",
    "SHOAL_CACHE_SUSPECT_SINCE",
    "SHOAL_MEMBER",  # the launcher may run within a member of another job
    "SHOAL_PROGRESS_FILE",
    "SHOAL_RECORD_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",  # torch would wait for a store that only torchrun starts
)


class Addresses(NamedTuple):
    """The addresses of a job, each host:port: the coordinator, JAX's service, torch's store."""

    coordinator: str
    jax_service: str
    master: str

    @classmethod
    def of(cls, services: Sequence[str], master: str) -> Addresses:
        """Return the addresses of the two services, and torch's."""
        coordinator, jax_service = services
        return cls(coordinator, jax_service, master)


class HostShare(NamedTuple):
    """The processes of a job that run on this host."""

    node: int
    first: int
    processes: int


class JobStart(NamedTuple):
    """What the processes of this host need to start."""

    share: HostShare
    total: int  # processes of the whole job
    addresses: Addresses
    token: str
    attempt: int = 0


def variables(
    outer: Mapping[str, str],
    *,
    process: int,
    start: JobStart,
    devices: int | None,
    stdin: int | None = None,
    progress_file: str = "",
    record_file: str = "",
    may_restart: bool = False,
    suspect_since_s: float | None = None,
) -> dict[str, str]:
    """Return the whole environment of one process: `outer`, updated with the job's variables.

    JAX's and torch's variables are included, so that unmodified programs find each other.

    Args:
      stdin: the process that reads standard input; None: the only one.
      may_restart: whether another attempt may follow this one.
      suspect_since_s: since when the entries of the compile cache are suspect; None: they are not.
    """
    ours = _place(process, start) | {
        "SHOAL_TOKEN": start.token,
        "SHOAL_ATTEMPT": str(start.attempt),
        "SHOAL_JOB": job_name(),
        "PYTHONUNBUFFERED": "1",  # unbuffered lines, also from Python grandchildren
    }
    env = {name: value for name, value in outer.items() if name not in _STALE}
    unknown = settings.unknown_variables(outer)
    if unknown:  # the launcher has reported them
        ours["SHOAL_REPORTED"] = ",".join([*unknown, outer.get("SHOAL_REPORTED", "")])
    if progress_file:
        ours["SHOAL_PROGRESS_FILE"] = progress_file
    if record_file:
        ours["SHOAL_RECORD_FILE"] = record_file
    if suspect_since_s is not None:
        ours["SHOAL_CACHE_SUSPECT_SINCE"] = str(int(suspect_since_s))
    if may_restart and not outer.get("SHOAL_COMPILE_CACHE", "").strip():
        ours["SHOAL_COMPILE_CACHE"] = "1"
    if devices is not None:
        ours |= {
            "SHOAL_VIRTUAL_DEVICES": str(devices),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
        }
        if "XLA_FLAGS" in env:
            ours["XLA_FLAGS"] = without_devices(env["XLA_FLAGS"])
    env |= ours
    gpus = _share_of_gpus(env)
    if gpus:
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, gpus))  # read by JAX alone, too
    if not has_input(process, start, stdin):
        env = uninspected(env)
    if stdin not in (None, process):  # breakpoint() stops where there is input
        env["PYTHONBREAKPOINT"] = "0"
    env |= cpu_threads(chosen_devices(env), outer)
    return env | {inherited.VARIABLE: inherited.note_of(env)}


def has_input(process: int, start: JobStart, stdin: int | None) -> bool:
    """Return whether a process reads standard input; the others have /dev/null."""
    return process == stdin or (stdin is None and start.total == 1)


def _place(process: int, start: JobStart) -> dict[str, str]:
    """Return the variables of a process's place in the job."""
    share, addresses = start.share, start.addresses
    master_host, master_port = split_address(addresses.master)
    index, count = str(process), str(start.total)
    return {
        "SHOAL_COORDINATOR": addresses.coordinator,
        "SHOAL_JAX_SERVICE": addresses.jax_service,
        "SHOAL_NUM_PROCESSES": count,
        "SHOAL_PROCESS_ID": index,
        "JAX_COORDINATOR_ADDRESS": addresses.jax_service,
        "JAX_NUM_PROCESSES": count,
        "JAX_PROCESS_ID": index,
        "RANK": index,
        "WORLD_SIZE": count,
        "LOCAL_RANK": str(process - share.first),
        "LOCAL_WORLD_SIZE": str(share.processes),
        "GROUP_RANK": str(share.node),
        "MASTER_ADDR": master_host,
        "MASTER_PORT": str(master_port),
    }


def _share_of_gpus(env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the GPUs of the process with this environment; (): all, or `initialize` refuses."""
    if env.get("SHOAL_VIRTUAL_DEVICES"):
        return ()
    place = local_devices.LocalPlace(
        int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"]), "", devices_bound=False
    )
    return local_devices.chosen(place, env, problems=[]) or ()


def job_name() -> str:
    """Return the name of this launcher's job, which `ps` shows with its own processes."""
    return f"shoal-run-{os.getppid()}"  # of the process that the user has started


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now. Another process may take it before its use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
