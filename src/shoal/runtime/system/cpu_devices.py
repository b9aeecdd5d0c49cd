"""The number of virtual CPU devices of a process, its source, and the threads they need.

An explicit number takes precedence: `initialize(virtual_devices=)`, or `--devices` of `shoal run`,
then SHOAL_VIRTUAL_DEVICES, which the latter sets. Without those JAX's rule applies: its
configuration (JAX_NUM_CPU_DEVICES), then the flag in XLA_FLAGS. One line names overridden settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.runtime.system.cores import num_cores

_FLAG = "--xla_force_host_platform_device_count"
_CONFIGURED = "jax_num_cpu_devices"  # JAX's configuration, where it differs from its variable
_VARIABLES = ("SHOAL_VIRTUAL_DEVICES", _CONFIGURED, "JAX_NUM_CPU_DEVICES")


def chosen_devices(env: Mapping[str, str]) -> int:
    """Return the number of CPU devices that an environment sets for JAX; -1: not set.

    >>> chosen_devices({"JAX_NUM_CPU_DEVICES": "4"}), chosen_devices({})
    (4, -1)
    """
    words = env.get(_CONFIGURED) or env.get("JAX_NUM_CPU_DEVICES") or _in_flags(env)
    return _number(words)


def with_configured(devices: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with JAX's configured number (-1: none) if it differs."""
    if devices in (-1, _number(env.get("JAX_NUM_CPU_DEVICES", ""))):
        return dict(env)
    return {**env, _CONFIGURED: str(devices)}


def overruled(explicit: str, devices: int, env: Mapping[str, str]) -> str:
    """Return the line about settings that `explicit` overrides; "" if there are none.

    >>> overruled("--devices 2", 2, {"JAX_NUM_CPU_DEVICES": "4"})
    '--devices 2 overrides JAX_NUM_CPU_DEVICES=4: 2 CPU devices per process'
    """
    others = [f"{name}={env[name]}" for name in _VARIABLES if _differs(env.get(name), devices)]
    if _differs(_in_flags(env), devices):
        others.append(f"XLA_FLAGS={_FLAG}={_in_flags(env)}")
    listed = " and ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
    return f"{explicit} overrides {listed}: {devices} CPU devices per process" if others else ""


def without_devices(xla_flags: str) -> str:
    """Return XLA's flags without the number of devices."""
    return " ".join(flag for flag in xla_flags.split() if not flag.startswith(f"{_FLAG}="))


def cpu_threads(devices: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that gives XLA's CPU client two threads per device.

    By default it has as many as cores or devices. Once 32 steps are in flight on a device, starting
    the next blocks a thread; with none to spare, the collective that all wait for never runs, and
    the program hangs. Must be set before the backend exists.

    Args:
      devices: the number of devices.
      env: the environment. A PJRT_NPROC in it is kept, unless shoal has set it.
    """
    given = env.get("PJRT_NPROC", "")
    requested = [*(env.get(name, "").strip() for name in _VARIABLES), _in_flags(env)]
    if given and given not in [str(2 * _number(words)) for words in requested]:
        return {}
    return {"PJRT_NPROC": str(2 * devices)} if 2 * devices > num_cores() else {}


def _in_flags(env: Mapping[str, str]) -> str:
    flags = re.findall(rf"{_FLAG}=(\d+)", env.get("XLA_FLAGS", ""))
    return flags[-1] if flags else ""


def _number(words: str) -> int:
    return int(words) if words.isascii() and words.isdigit() else -1


def _differs(words: str | None, devices: int) -> bool:
    return bool(words and words.strip()) and _number(str(words).strip()) != devices
