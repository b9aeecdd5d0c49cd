"""The functions of TensorFlow's `tpu_util` that `tf.experimental.dtensor` exposed."""

from __future__ import annotations

from shoal.colour import collective, local
from shoal.compat.dtensor.meshes import create_tpu_mesh, get_device_ids, get_device_locations
from shoal.compat.dtensor.refused import NotPossible
from shoal.compat.dtensor.start import (
    initialize_accelerator_system,
    refuse_megacore,
    shutdown_accelerator_system,
)

__all__ = [
    "create_tpu_mesh",
    "dtensor_initialize_tpu_system",
    "dtensor_shutdown_tpu_system",
    "get_device_ids",
    "get_device_locations",
    "initialize_tpu_system",
    "shutdown_tpu_system",
    "tpu_system_init_helper",
]


@collective()
def initialize_tpu_system(use_megacore: bool = False) -> str:
    """Join the job, and find its TPUs: `shoal.initialize`.

    Collective over all processes.
    """
    refuse_megacore("tpu.initialize_tpu_system", use_megacore)
    return initialize_accelerator_system("TPU")


@collective()
def dtensor_initialize_tpu_system(enable_coordination_service: bool = False) -> str:
    """Join the job, and find its TPUs: the former name of `initialize_accelerator_system`.

    Collective over all processes.
    """
    return initialize_accelerator_system("TPU", enable_coordination_service)


shutdown_tpu_system = shutdown_accelerator_system
dtensor_shutdown_tpu_system = shutdown_accelerator_system


@local
def tpu_system_init_helper(
    task_id: int, num_tasks: int, num_devices: int, use_tfrt_host_runtime: bool = True,
    use_megacore: bool = False,
) -> None:  # fmt: skip
    """Refuse: JAX knows the coordinates of all cores without a collective.

    Local.
    """
    raise NotPossible(
        "dtensor.tpu_system_init_helper: JAX finds the cores of all processes by itself; call "
        "initialize_accelerator_system()"
    )
