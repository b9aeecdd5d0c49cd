"""Topologies of every kind as boxes of devices in three dims, which a picture can show.

Torus    one box, links between neighbours        x, y, z
Slices   a box for each                           x, y, z
Hosts    one box, no links                        devices, hosts, switches
Flat     one box, no links                        devices, line after line
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageTypeError
from shoal.plan.hardware.hosts import Flat, Hosts
from shoal.plan.hardware.wiring import Slices, Topology, Torus

IntArray = NDArray[np.int64]
Sizes = tuple[int, int, int]

_LINE = 16  # devices per line, if their arrangement is unknown


@dataclasses.dataclass(frozen=True, eq=False)
class Ground:
    """A box of devices."""

    title: str
    ids: IntArray  # [x, y, z, cores]; -1: no device
    processes: IntArray  # as `ids`
    wraps: tuple[bool, bool, bool] = (False, False, False)
    rank: int = 0  # of the links; 0: unknown
    plane: str = "z"  # name of a plane
    origin: Sizes = (0, 0, 0)

    @property
    def sizes(self) -> Sizes:
        """Chips along x, y, z."""
        return self.ids.shape[:3]

    @property
    def cores(self) -> int:
        """Devices of a chip."""
        return int(self.ids.shape[3])


def grounds(topology: Topology) -> list[Ground]:
    """Return the boxes of a topology."""
    if isinstance(topology, Torus):
        return [_of_torus(topology, topology.text)]
    if isinstance(topology, Slices):
        parts = enumerate(topology.parts())
        return [_of_torus(part, f"slice {number}") for number, part in parts]
    if isinstance(topology, Hosts):
        return [_of_hosts(topology)]
    if isinstance(topology, Flat):
        shape = (1, topology.count, 1)
        return [Ground(topology.text, *_in_lines(topology, shape, 1))]
    raise UsageTypeError(f"{topology!r} is not a topology: topology.parse makes one from text")


def _of_torus(torus: Torus, title: str) -> Ground:
    missing = 3 - len(torus.shape)
    grid = (*torus.shape, *(1,) * missing, torus.cores)
    wraps = (*torus.wrap, *(False,) * missing)
    origin = (*(torus.origin or (0,) * len(torus.shape)), *(0,) * missing)
    ids, processes = torus.device_ids.reshape(grid), torus.processes.reshape(grid)
    return Ground(title, ids, processes, wraps, len(torus.shape), "z", origin)  # type: ignore


def _of_hosts(hosts: Hosts) -> Ground:
    """Lay out hosts: several per line if they are small; a plane for each switch."""
    switches = hosts.count // hosts.switch if hosts.switch else 1
    shape = (switches, hosts.count // switches, hosts.devices)
    ids, processes = _in_lines(hosts, shape, max(1, _LINE // 2 // hosts.devices))
    return Ground(hosts.text, ids, processes, plane="switch")


def _in_lines(topology: Topology, shape: Sizes, in_line: int) -> tuple[IntArray, IntArray]:
    """Lay out planes of blocks of devices, `blocks` per line; single devices fill lines."""
    planes, blocks, devices = shape
    in_line = min(blocks, _LINE if devices == 1 and planes == 1 else in_line)
    rows = math.ceil(blocks / in_line)
    found = []
    for values in (topology.device_ids, topology.processes):
        full = np.full((planes, rows * in_line, devices), -1, np.int64)
        full[:, :blocks] = values.reshape(shape)
        found.append(full.reshape(planes, rows, in_line * devices).transpose(2, 1, 0)[..., None])
    return found[0], found[1]
