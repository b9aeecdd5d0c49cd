"""Count the accelerators that this process is likely to see, without starting JAX."""

from __future__ import annotations

import glob
import importlib.util
from collections.abc import Mapping
from typing import NamedTuple


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
