"""torch_xla's `runtime`: the numbers of processes and devices."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from shoal.colour import local
from shoal.compat.torch_xla.errors import NoMeaningHere
from shoal.compat.torch_xla.mesh import device_attributes, numbered_devices
from shoal.runtime.process import process_count, process_index

__all__ = [
    "addressable_runtime_device_count",
    "get_master_ip",
    "global_runtime_device_attributes",
    "global_runtime_device_count",
    "is_spmd",
    "process_count",
    "process_index",
    "use_spmd",
]


@local
def use_spmd(auto: bool = False) -> None:
    """Do nothing: on JAX every program is SPMD.

    Local.

    Raises:
      NotImplementedError: `auto`; it is a UsageError as well.
    """
    if auto:
        raise NoMeaningHere(
            "torch_xla use_spmd (jax.jit): layouts are not searched for a whole program; inside "
            "jit the compiler lays out values without a layout, and shoal.match_layouts takes "
            "rules for parameters"
        )


@local
def is_spmd() -> bool:
    """Return True.

    Local.
    """
    return True


@local
def global_runtime_device_count() -> int:
    """Return the number of devices of the job.

    Local.

    Raises:
      InitializeError: this process is one of several, and has not joined them.
    """
    return len(numbered_devices())


@local
def addressable_runtime_device_count() -> int:
    """Return the number of devices of this process.

    Local.

    Raises:
      InitializeError: this process is one of several, and has not joined them.
    """
    own = jax.process_index()
    return sum(device.process_index == own for device in numbered_devices())


@local
def get_master_ip() -> NoReturn:
    """Raise: processes find each other automatically.

    Local.

    Raises:
      NotImplementedError: always; it is a UsageError as well.
    """
    raise NoMeaningHere(
        "torch_xla get_master_ip (shoal.initialize): shoal.initialize() finds the other processes, "
        "or takes coordinator_address="
    )


@local
def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """Return the attributes of each device, by number: `name`, and on TPUs `coords`, …

    Local.

    >>> global_runtime_device_attributes()[0]["name"]
    'CPU:0'
    """
    return device_attributes()
