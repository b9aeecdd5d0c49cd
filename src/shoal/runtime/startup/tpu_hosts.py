"""The hosts of a TPU slice, as JAX's own detection finds them.

On GKE it reads variables, on other TPU VMs the metadata server. It runs only if chips are attached
or variables name TPU hosts, and JAX may use them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from shoal.errors import InitializeError
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.system.accelerators import devices_seen

INDEX, COUNT = "TPU host", "TPU hosts"  # stand in the environment like variables
_HOSTS = ("TPU_PROCESS_ADDRESSES_PATH", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_READ = (
    "JAX_PLATFORMS", *_HOSTS, "TPU_WORKER_ID", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES",
    "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS",
)  # fmt: skip
_RESOLVE_S = 300

_Environment = Mapping[str, str]


def completed(env: _Environment, problems: list[str]) -> _Environment:
    """Return the environment, with index and count if this is a TPU host.

    Raises:
      InitializeError: it looks like a TPU host, and JAX's detection failed.
    """
    numbers = _numbers(*(env.get(name) for name in _READ))
    return env if numbers is None else {**env, INDEX: str(numbers[0]), COUNT: str(numbers[1])}


def address(env: _Environment) -> str | None:
    """Return the address of the first host, with the port that JAX would use.

    Raises:
      InitializeError: its name does not resolve.
    """
    found = _detected(*(env.get(name) for name in _READ))
    if found is None:
        return None
    try:
        return str(
            found.get_coordinator_address(timeout_secs=_RESOLVE_S, override_coordinator_port=None)
        )
    except Exception as error:
        raise _undetected(error) from error


@functools.cache  # if the metadata server does not answer, JAX retries for seconds
def _numbers(*values: str | None) -> tuple[int, int] | None:
    """Return the index of this host and the number of hosts, given the values of `_READ`."""
    found = _detected(*values)
    if found is None:
        return None
    try:
        return int(found.get_process_id()), int(found.get_process_count())
    except Exception as error:  # of JAX and of the metadata server: many types
        raise _undetected(error) from error


def _detected(*values: str | None) -> Any:
    """Return JAX's description of the TPU slice of this host; None: it has none."""
    env = {name: value for name, value in zip(_READ, values, strict=True) if value is not None}
    platforms = env.get("JAX_PLATFORMS", "").strip()
    if platforms and "tpu" not in platforms.split(","):
        return None
    if not devices_seen("tpu", env)[0] and not any(env.get(name) for name in _HOSTS):
        return None
    try:
        return next((kind for kind in jax_runtime.tpu_hosts() if kind.is_env_present()), None)
    except Exception as error:
        raise _undetected(error) from error


def _undetected(error: Exception) -> InitializeError:
    return InitializeError(
        "initialize: this is a TPU host, but JAX's detection of its slice failed: "
        f"{type(error).__name__}: {error}\n"
        "give num_processes=, process_id= and coordinator_address=, or set JAX_PLATFORMS=cpu to "
        "leave the TPU alone"
    )
