"""DTensor's configuration API: process numbers and devices."""

from __future__ import annotations

import os
import re

import jax

from shoal.colour import local
from shoal.compat.arguments import or_none, takes, whole
from shoal.compat.dtensor.mesh import devices_of
from shoal.compat.dtensor.refused import StartError
from shoal.compat.dtensor.text import DeviceSpec
from shoal.errors import UsageError, nearest
from shoal.runtime.process import client, is_initialized
from shoal.runtime.startup.launcher_table import jobs_of
from shoal.runtime.startup.launchers import numbers_of

__all__ = [
    "client_id",
    "full_job_name",
    "gpu_use_nccl_communication",
    "heartbeat_enabled",
    "is_local_mode",
    "job_name",
    "jobs",
    "local_devices",
    "num_clients",
    "num_global_devices",
    "num_local_devices",
    "preferred_device_type",
    "type_of",
    "use_multi_device_mode",
]

_TYPES = ("CPU", "GPU", "TPU")


def _numbers() -> tuple[int, int]:
    """Return the process number and count of the job, or of the one about to be joined."""
    if is_initialized():
        here = client()
        return here.process, here.num_processes
    return numbers_of(os.environ)


@local
def client_id() -> int:
    """Return which process of the job this one is, from 0: `shoal.process_index`.

    Local.

    Before the job is joined, from the variables of the launcher: DTENSOR_CLIENT_ID, or any other
    launcher's that `shoal.initialize` knows.
    """
    return _numbers()[0]


@local
def num_clients() -> int:
    """Return how many processes the job has: `shoal.process_count`.

    Local.
    """
    return _numbers()[1]


@local
def jobs() -> list[str]:
    """Return the address of each process: the entries of DTENSOR_JOBS; [] in a job of one.

    Local.

    In a job that another launcher started: the host of each process.
    """
    listed = jobs_of(os.environ.get("DTENSOR_JOBS", ""))
    if any(entry.startswith("/bns/") for entry in listed):
        matches = [re.findall(r"/(\d+)(?::\w+)?$", entry) for entry in listed]
        tasks = [int(match[0]) if match else -1 for match in matches]
        if tasks != sorted(tasks) or -1 in tasks:
            raise UsageError(
                f"dtensor.jobs: Unexpected DTENSOR_JOBS content {','.join(listed)!r}: /bns/ "
                "entries must be sorted by their task"
            )
    if listed or not is_initialized() or num_clients() == 1:
        return listed
    return list(client().hosts)


@local
def job_name() -> str:
    """Return DTENSOR_JOB_NAME; without it "localhost" in a job of one, else "worker".

    Local.
    """
    usual = "localhost" if num_clients() == 1 else "worker"
    return os.environ.get("DTENSOR_JOB_NAME", "").strip() or usual


@local
@takes("dtensor.", task_id=or_none(whole))
def full_job_name(task_id: int | None = None) -> str:
    """Return TensorFlow's name of a process: "worker/replica:0/task:1"; by default this one.

    Local.
    """
    task = client_id() if task_id is None else task_id
    if not 0 <= task < num_clients():
        raise UsageError(
            f"dtensor.full_job_name: Unexpected task ID {task} in local runs or in a job of "
            f"{num_clients()}"
        )
    return f"{job_name()}/replica:0/task:{task}"


def type_of(operation: str, device_type: object) -> str:
    """Return a device type in upper case.

    Raises:
      UsageError: it is not a device type.
    """
    kind = device_type.upper() if isinstance(device_type, str) else ""
    if kind not in _TYPES:
        raise UsageError(
            f"dtensor.{operation}: Unknown device_type {device_type}, Allowed values: CPU, GPU, TPU"
            f"{nearest(kind, _TYPES)}"
        )
    return kind


def _present(operation: str, kind: str) -> dict[int, list[int]]:
    """Return the devices of each process; with several processes, only after joining the job."""
    if not is_initialized() and num_clients() > 1:
        raise StartError(
            f"dtensor.{operation}: Accelerators are uninitialized in this process of a job of "
            f"{num_clients()}; call dtensor.initialize_accelerator_system() first"
        )
    return devices_of(kind.lower())


@local
@takes("dtensor.", for_client_id=or_none(whole))
def local_devices(device_type: str, for_client_id: int | None = None) -> list[DeviceSpec]:
    """Return the devices of a type that this process, or another, has.

    Local.
    """
    kind = type_of("local_devices", device_type)
    process = client_id() if for_client_id is None else for_client_id
    full_job_name(process)  # raises if the job has no such process
    devices = _present("local_devices", kind).get(process, [])
    return [
        DeviceSpec(job=job_name(), replica=0, task=process, device_type=kind, device_index=index)
        for index in range(len(devices))
    ]


@local
def num_local_devices(device_type: str) -> int:
    """Return the number of this process's devices of a type; 0 for absent types.

    Local.
    """
    if str(device_type).upper() not in _TYPES:
        return 0
    return len(local_devices(device_type))


@local
def num_global_devices(device_type: str) -> int:
    """Return the total number of devices of a type: counted, not assumed equal.

    Local.
    """
    if str(device_type).upper() not in _TYPES:
        return 0
    present = _present("num_global_devices", str(device_type))
    return sum(map(len, present.values()))


@local
def heartbeat_enabled() -> bool:
    """Return the setting DTENSOR_ENABLE_HEARTBEAT; true by default.

    Local.

    Heartbeats between processes cannot be turned off here; with SHOAL_LOST_AFTER_S=inf no process
    is declared lost.
    """
    return os.environ.get("DTENSOR_ENABLE_HEARTBEAT", "true").strip().lower() in ("true", "1")


@local
def preferred_device_type() -> str:
    """Return the type of the devices that JAX uses by default: "TPU", "GPU" or "CPU".

    Local.
    """
    _present("preferred_device_type", "CPU")
    kind = jax.default_backend().upper()
    return kind if kind in _TYPES else "CPU"


@local
def is_local_mode() -> bool:
    """Return whether this is a job of one process.

    Local.
    """
    return num_clients() == 1


@local
def gpu_use_nccl_communication() -> bool:
    """Return the setting DTENSOR_GPU_USE_NCCL_COMMUNICATION; XLA uses NCCL on GPUs in any case.

    Local.
    """
    return os.environ.get("DTENSOR_GPU_USE_NCCL_COMMUNICATION", "") != "0"


@local
def use_multi_device_mode() -> bool:
    """Return the setting DTENSOR_ENABLE_MULTI_DEVICE_EXPANSION; JAX always compiles for all.

    Local.
    """
    return os.environ.get("DTENSOR_ENABLE_MULTI_DEVICE_EXPANSION", "") != "0"
