"""DTensor's functions for joining and leaving a job."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from shoal.arrays.make_mesh import described_platform
from shoal.colour import collective, local
from shoal.compat.dtensor import config
from shoal.compat.dtensor.refused import NotPossible, StartError, check_eager
from shoal.errors import InitializeError, UsageError
from shoal.runtime import process
from shoal.runtime.system.local_devices import are_attached, count_accelerators

__all__ = [
    "initialize_accelerator_system",
    "initialize_multi_client",
    "initialize_multi_client_cluster",
    "initialize_tpu_system",
    "is_initialized",
    "refuse_megacore",
    "set_initialized",
    "shutdown_accelerator_system",
    "shutdown_tpu_system",
]

_LOG = logging.getLogger("shoal")


@local
def is_initialized() -> bool:
    """Return whether this process is in a job.

    Local.
    """
    return process.is_initialized()


@local
def set_initialized(value: bool) -> None:
    """Refuse: membership in a job cannot be set.

    Local.
    """
    raise NotPossible(
        "dtensor.set_initialized: membership in a job cannot be set; call "
        "initialize_accelerator_system() or shutdown_accelerator_system()"
    )


@collective()
def initialize_accelerator_system(
    device_type: str | None = None, enable_coordination_service: bool | None = True,
    num_logical_cpu_devices: int | None = None, experimental_reset_context: bool | None = False,
    experimental_enable_megcore: bool | None = False,
) -> str:  # fmt: skip
    """Join the job: `shoal.initialize`.

    Collective over all processes.

    The index of this process comes from DTENSOR_CLIENT_ID and DTENSOR_JOBS, or from any launcher
    that `shoal.initialize` knows.

    Args:
      device_type: "CPU", "GPU" or "TPU", which must be present, or CPU devices stand for it
        (SHOAL_TOPOLOGY); None: JAX's default.
      enable_coordination_service: ignored; shoal always uses its own.
      num_logical_cpu_devices: number of CPU devices of this process: all of its devices if the
        type is CPU, else those beside the accelerators, at least one for each.
      experimental_reset_context: ignored; JAX cannot be reset once started.
      experimental_enable_megcore: refused; use XLA's flags.

    Returns:
      the type of the devices.

    Raises:
      StartError, which is a ValueError: it was called twice, or too late; there are no devices of
        the type; or what `shoal.initialize` raises.
      EagerOnly, which is a RuntimeError: it was called inside `jit`.
    """
    operation = "initialize_accelerator_system"
    check_eager(operation, "call it first in the program")
    kind = None if device_type is None else config.type_of(operation, device_type)
    refuse_megacore(operation, experimental_enable_megcore)
    _check_first(operation)
    if kind is not None and kind.lower() == described_platform():
        kind = "CPU"
    if kind is not None:
        why = _absent(kind.lower())
        if why:  # not joined yet: "CPU" may follow
            raise StartError(_none_found(operation, kind, why))
    _join(operation, **_devices(operation, kind, num_logical_cpu_devices))
    return _found(operation, kind)


def refuse_megacore(operation: str, value: bool | None) -> None:
    """Refuse the megacore option.

    Raises:
      NotPossible: it is on.
    """
    if value:
        raise NotPossible(
            f"dtensor.{operation}: megacore: JAX sees each megacore as one device already; "
            "LIBTPU_INIT_ARGS sets flags of libtpu"
        )


def _check_first(operation: str) -> None:
    if process.is_initialized():
        raise StartError(
            f"dtensor.{operation}: Accelerator system has already been initialized (this is "
            f"process {process.process_index()} of {process.process_count()}); call "
            "shutdown_accelerator_system() first to join another job"
        )


def _devices(operation: str, kind: str | None, count: int | None) -> dict[str, int | None]:
    """Return the CPU device arguments for `shoal.initialize`."""
    if count is None:
        return {}
    accelerators = 0 if kind == "CPU" else count_accelerators(os.environ)
    if isinstance(count, int) and count < accelerators:
        raise UsageError(
            f"dtensor.{operation}: num_logical_cpu_devices={count} is less than the {accelerators} "
            "accelerators of this process, each of which needs a CPU device next to it"
        )
    return {"virtual_devices" if not accelerators else "host_devices": count}


@contextmanager
def _as_start(operation: str) -> Iterator[None]:
    """Convert an InitializeError in the block to the ValueError that DTensor raises."""
    try:
        yield
    except InitializeError as error:
        raise StartError(f"dtensor.{operation}: {error}", missing=error.missing) from error


def _join(operation: str, **options: object) -> None:
    if not config.heartbeat_enabled():
        _LOG.warning(
            "dtensor.%s: DTENSOR_ENABLE_HEARTBEAT has no effect here; with SHOAL_LOST_AFTER_S=inf "
            "a silent process is never declared lost", operation,
        )  # fmt: skip
    with _as_start(operation):
        process.initialize(**options)  # type: ignore[arg-type]


def _found(operation: str, kind: str | None) -> str:
    """Return the type of the devices; without any, leave the job again."""
    if kind is None:
        return config.preferred_device_type()
    try:
        jax.devices(kind.lower())
    except RuntimeError as error:
        count = process.process_count()
        process.shutdown()
        message = _none_found(operation, kind, str(error).splitlines()[0])
        if count > 1:
            message += (
                f"\nthis process has left the job of {count}, and cannot join it again for other "
                'devices: start the program again, with "CPU"'
            )
        raise StartError(message) from None
    return kind


def _none_found(operation: str, kind: str, why: str) -> str:
    return f"dtensor.{operation}: Initialization failed, no valid {kind}s found: {why}"


def _absent(platform: str) -> str:
    """Return why JAX will find no devices of a platform here, without starting it; "" if it may."""
    chosen = jax.config.jax_platforms
    names = {"gpu": ("gpu", "cuda", "rocm")}.get(platform, (platform,))
    if chosen and not any(name in chosen.split(",") for name in names):
        return f"JAX_PLATFORMS={chosen} leaves them out"
    if platform != "cpu" and not are_attached(platform):
        return "this host has no device file of one"
    return ""


initialize_tpu_system = initialize_accelerator_system
initialize_multi_client = initialize_accelerator_system


@collective()
def initialize_multi_client_cluster(
    job_name: str, dtensor_jobs: list[str], client_id: int, collective_leader: str,
    port: int | None = None, gpu_use_nccl_communication: bool = False,
    enable_coordination_service: bool = True,
) -> None:  # fmt: skip
    """Join the job that a list of host:port describes: `shoal.initialize`.

    Collective over all processes.

    The processes meet at the first entry; `job_name`, `collective_leader`, `port` and later
    arguments have no effect.
    """
    operation = "initialize_multi_client_cluster"
    if not dtensor_jobs:
        raise UsageError(f"dtensor.{operation}: dtensor_jobs is empty; list each host:port")
    _check_first(operation)
    with _as_start(operation):
        process.initialize(
            coordinator_address=dtensor_jobs[0],
            num_processes=len(dtensor_jobs),
            process_id=client_id,
        )


@collective()
def shutdown_accelerator_system() -> None:
    """Leave the job: `shoal.shutdown`, also with several processes.

    Collective over all processes.

    A job of one process may be joined again. One of several may not, in this process: JAX's devices
    stay those of the job.

    Raises:
      StartError, which is a ValueError: this process is not in a job.
      EagerOnly, which is a RuntimeError: it was called inside `jit`.
    """
    operation = "shutdown_accelerator_system"
    check_eager(operation, "call it last in the program")
    if not process.is_initialized():
        raise StartError(
            f"dtensor.{operation}: Accelerator system is not initialized; call "
            "initialize_accelerator_system() first"
        )
    process.shutdown()


shutdown_tpu_system = shutdown_accelerator_system
