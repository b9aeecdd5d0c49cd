"""Which accelerators a process uses, of those that it sees on a host of several processes.

Launchers differ: some hand each process GPUs of its own, and show it no others; most show all GPUs
of the host to all of its processes, and say which process of the host each is. Then each takes its
share, and no GPU is used twice or left out: one each where there are as many of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.runtime.system.accelerators import devices_seen


class LocalPlace(NamedTuple):
    """Which process of its host this one is, as the launcher says; None: it does not."""

    process: int | None
    processes: int | None
    words: str  # the variables, with their values
    devices_bound: bool  # the launcher gave this process devices of its own


def share(index: int, count: int, devices: int) -> tuple[int, ...]:
    """Return the devices of one of `count` processes of a host, in equal runs.

    >>> share(1, 2, 8), share(3, 4, 4)
    ((4, 5, 6, 7), (3,))
    """
    each = devices // count
    return tuple(range(index * each, (index + 1) * each))


def chosen(
    place: LocalPlace, env: Mapping[str, str], offences: list[str]
) -> tuple[int, ...] | None:
    """Return the GPUs that this process is to use; None: all that it sees."""
    platforms = {name for name in env.get("JAX_PLATFORMS", "").strip().split(",") if name}
    if platforms and not platforms & {"gpu", "cuda", "rocm"}:
        return None
    if place.process is None or place.processes == 1 or place.devices_bound:
        return None
    gpus, is_listed = devices_seen("gpu", env)
    if gpus == 0 or (gpus == 1 and is_listed):
        return None
    if place.processes is None:
        problem = "how many processes this host has is not known"
    elif gpus < place.processes and is_listed:  # the launcher, or a script of it, handed them out
        return None
    elif gpus % place.processes:
        problem = f"the {place.processes} processes of this host cannot share them equally"
    else:
        return share(place.process, place.processes, gpus)
    offences.append(
        f"this process sees {gpus} GPUs ({place.words}), and {problem}: give local_device_ids= or "
        "JAX_LOCAL_DEVICE_IDS, or set JAX_PLATFORMS=cpu to use none"
    )
    return None
