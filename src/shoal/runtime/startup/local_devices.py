"""The accelerators that a process uses, of those visible to several processes of a host.

Launchers differ: some give each process GPUs of its own, and hide the others; most show all GPUs
of the host to all of its processes, with a local index for each. Then each process takes its
share, and no GPU is used twice or left out: one each if there are as many processes as GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.runtime.system.accelerators import devices_seen


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
    platforms = {name for name in env.get("JAX_PLATFORMS", "").strip().split(",") if name}
    if platforms and not platforms & {"gpu", "cuda", "rocm"}:
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
        f"this process sees {seen} ({place.words}), and {problem}: give local_device_ids= or "
        "JAX_LOCAL_DEVICE_IDS, or set JAX_PLATFORMS=cpu to use none"
    )
    return None
