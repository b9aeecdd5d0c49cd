"""The devices of this host: accelerators and who uses which, virtual CPU devices, cores.

Launchers differ: some give each process GPUs of its own, and hide the others; most show all GPUs
of the host to all of its processes, with a local index for each. Then each process takes its
share, and no GPU is used twice or left out: one each if there are as many processes as GPUs.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import NamedTuple


class LocalPlace(NamedTuple):
    """The local index and count of a process, as the launcher sets them; None: not set."""

    process: int | None
    processes: int | None
    words: str  # the variable of the count, with its value
    devices_bound: bool  # whether the launcher gave this process devices of its own


def share(index: int, count: int, devices: int) -> tuple[int, ...]:
    """Return the devices of process `index` of the `count` processes of a host, in equal runs.

    >>> share(1, 2, 8), share(3, 4, 4)
    ((4, 5, 6, 7), (3,))
    """
    each = devices // count
    return tuple(range(index * each, (index + 1) * each))


def chosen(
    place: LocalPlace, env: Mapping[str, str], problems: list[str]
) -> tuple[int, ...] | None:
    """Return the GPUs for this process; None: all that it sees."""
    if not _may_use({"gpu", "cuda", "rocm"}, env):
        return None
    if place.process is None or place.processes == 1 or place.devices_bound:
        return None
    gpus, is_listed = devices_seen("gpu", env)
    if gpus == 0 or (gpus == 1 and is_listed):
        return None
    if place.processes is None:
        problem = "the number of processes of this host is not known"
    elif gpus < place.processes and is_listed:  # the launcher, or a script, assigned them
        return None
    elif gpus % place.processes:
        problem = f"the {place.processes} processes of this host cannot have equal shares"
    else:
        return share(place.process, place.processes, gpus)
    seen = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    problems.append(
        f"this process sees {seen} ({place.words}), and {problem}: pass local_device_ids= or "
        "JAX_LOCAL_DEVICE_IDS, or set JAX_PLATFORMS=cpu to use none"
    )
    return None


def num_processes(env: Mapping[str, str]) -> tuple[int, str]:
    """Return how many processes the devices of this host are for, and the reason.

    One for each GPU; one for all of a TPU host; without either, one for each core.
    """
    gpus = devices_seen("gpu", env)[0] if _may_use({"gpu", "cuda", "rocm"}, env) else 0
    if gpus:
        return gpus, "one for each GPU"
    if _may_use({"tpu"}, env) and devices_seen("tpu", env)[0]:
        return 1, "one for all TPU chips of a host"
    return num_cores(), "one for each core"


def _may_use(names: set[str], env: Mapping[str, str]) -> bool:
    """Return whether JAX_PLATFORMS allows one of these platforms."""
    platforms = {name for name in env.get("JAX_PLATFORMS", "").strip().split(",") if name}
    return not platforms or bool(platforms & names)


# ---- Count the accelerators that this process is likely to see, without starting JAX.


class _Accelerators(NamedTuple):
    """The means to count one kind: its plugin, its visibility variable, its device files."""

    plugins: tuple[str, ...]
    visible: tuple[str, ...]
    devices: tuple[str, ...]
    platform: str = ""


_ACCELERATORS = (
    _Accelerators(
        ("jax_cuda13_plugin", "jax_cuda12_plugin"),
        ("CUDA_VISIBLE_DEVICES",),
        ("/dev/nvidia[0-9]*", "/dev/dxg"),
        "gpu",
    ),
    _Accelerators(
        ("jax_rocm7_plugin", "jax_rocm60_plugin"),
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        ("/dev/dri/renderD*",),
        "gpu",
    ),
    _Accelerators(
        ("libtpu",),
        ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
        ("/dev/accel*", "/dev/vfio/[0-9]*"),
        "tpu",
    ),
)


def count_accelerators(env: Mapping[str, str]) -> int:
    """Return the number of accelerators that this process is likely to see; 0 if unknown.

    Counted without creating a backend: entries of the kind's "visible devices" variable, else
    device files, and only where JAX's plugin for the kind is installed.
    """
    for kind in _ACCELERATORS:
        if not any(importlib.util.find_spec(plugin) for plugin in kind.plugins):
            continue
        return _seen(kind, env)[0]
    return 0


def devices_seen(platform: str, env: Mapping[str, str]) -> tuple[int, bool]:
    """Return how many devices of a platform ("gpu", "tpu") this process is likely to see.

    Also return whether a variable lists them.
    """
    for kind in _ACCELERATORS:
        if kind.platform == platform and any(map(importlib.util.find_spec, kind.plugins)):
            return _seen(kind, env)
    return 0, False


def _seen(kind: _Accelerators, env: Mapping[str, str]) -> tuple[int, bool]:
    listed = next((env[name] for name in kind.visible if name in env), None)
    if listed is None:
        return max(len(glob.glob(pattern)) for pattern in kind.devices), False
    return len([part for part in listed.split(",") if part.strip() not in ("", "-1")]), True


def are_attached(platform: str) -> bool:
    """Return whether this host has devices of a platform ("tpu", "gpu", JAX's aliases).

    The devices need not be ready. True if unknown.

    >>> are_attached("a platform of a plugin")
    True
    """
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    patterns = [
        name for kind in _ACCELERATORS if kind.platform == platform for name in kind.devices
    ]
    return not patterns or any(glob.glob(pattern) for pattern in patterns)


# ---- The number of virtual CPU devices of a process, its source, and the threads they need.
#
# An explicit number takes precedence: `initialize(virtual_devices=)`, or `--devices` of `shoal
# run`, then SHOAL_VIRTUAL_DEVICES, which the latter sets. Without those JAX's rule applies: its
# configuration (JAX_NUM_CPU_DEVICES), then the flag in XLA_FLAGS. One line names overridden
# settings.


_FLAG = "--xla_force_host_platform_device_count"
_CONFIGURED = "jax_num_cpu_devices"  # JAX's configuration, where it differs from its variable
_VARIABLES = ("SHOAL_VIRTUAL_DEVICES", _CONFIGURED, "JAX_NUM_CPU_DEVICES")


def chosen_devices(env: Mapping[str, str]) -> int:
    """Return the number of CPU devices that an environment sets for JAX; -1: not set.

    >>> chosen_devices({"JAX_NUM_CPU_DEVICES": "4"}), chosen_devices({})
    (4, -1)
    """
    count = env.get(_CONFIGURED) or env.get("JAX_NUM_CPU_DEVICES") or _in_flags(env)
    return _number(count)


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
    requested = [*(env.get(name, "") for name in _VARIABLES), _in_flags(env)]
    if given and given not in [str(2 * _number(text)) for text in requested]:
        return {}
    return {"PJRT_NPROC": str(2 * devices)} if 2 * devices > num_cores() else {}


def _in_flags(env: Mapping[str, str]) -> str:
    flags = re.findall(rf"{_FLAG}=(\d+)", env.get("XLA_FLAGS", ""))
    return flags[-1] if flags else ""


def _number(text: str) -> int:
    text = text.strip()  # as JAX does
    if text.isascii() and text.isdigit():
        return int(text)
    return -1


def _differs(text: str | None, devices: int) -> bool:
    return text is not None and bool(text.strip()) and _number(text) != devices


# ---- The number of cores available to this process.


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
