"""The scene of a topology and a mesh on it, independent of the medium.

Chips are in the columns and rows of panels: x to the right, y down, a panel for each z. A section
is a slice. `wires` makes a scene; `wires_svg` and `wires_text` draw it. Sizes are counted in cells.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageTypeError
from shoal.plan.hardware.hosts import Flat, Hosts
from shoal.plan.hardware.wiring import Slices, Topology, Torus


class MarkPlace(NamedTuple):
    """The middle of a device; columns are fractions where a chip has several."""

    panel: int
    column: float
    row: int


class DeviceMark(NamedTuple):
    """One device of a chip."""

    id: int
    process: int
    position: tuple[int, ...]  # in the mesh; () where no mesh has it
    group: int  # equal for the devices of one ring of the last axis; -1: in no mesh


class Chip(NamedTuple):
    """One chip, or one device where nothing is known of chips."""

    panel: int
    column: int
    row: int
    coords: tuple[int, ...]
    devices: tuple[DeviceMark, ...]


class Host(NamedTuple):
    """The outline of a process's chips in a panel; the last column and row are inside."""

    panel: int
    process: int
    left: int
    top: int
    right: int
    bottom: int


class LinkMark(NamedTuple):
    """A link between two chips of a panel; one that wraps joins the ends of a line."""

    panel: int
    start: tuple[int, int]  # column, row
    end: tuple[int, int]
    wraps: bool


class Bundle(NamedTuple):
    """All the links between two planes of a torus."""

    start: int  # panel
    end: int
    links: int
    wraps: bool


class Arrow(NamedTuple):
    """A hop of a ring of an axis, from a device to the next one."""

    axis: int  # index in `Scene.axes`
    hop: int  # its number in the ring, from 0
    start: MarkPlace
    end: MarkPlace
    links: int | None  # how many links apart; None: no links lead there
    around: tuple[int, int, int]  # -1 or 1 along x, y, z where it takes the link that wraps


class Axis(NamedTuple):
    """A mesh axis and the hops of its rings; those of the worst ring if they differ."""

    name: str
    size: int
    longest: int  # links of a hop
    total: int  # links of all hops of a ring
    crossings: int  # hops of a ring that leave the slice, or the host where nothing is linked
    ring: tuple[int, ...]  # the ids of the first ring, whose arrows are shown
    far: str  # all of this as text


class ChipPlane(NamedTuple):
    """A plane of chips."""

    section: int
    title: str
    columns: tuple[int | None, ...]  # x of each column; None: some are left out here
    rows: tuple[int | None, ...]
    wraps: tuple[bool, bool]  # whether columns' and rows' ends are linked


class Scene(NamedTuple):
    """The content of a picture."""

    title: str
    subtitle: str
    sections: tuple[str, ...]  # a title for each; "" if there is only one
    panels: tuple[ChipPlane, ...]
    chips: tuple[Chip, ...]
    hosts: tuple[Host, ...]
    links: tuple[LinkMark, ...]
    bundles: tuple[Bundle, ...]
    arrows: tuple[Arrow, ...]
    axes: tuple[Axis, ...]
    num_groups: int
    unit: str  # what a cell is: "chip" or "device"
    notes: tuple[str, ...]


# ---- Topologies of every kind as boxes of devices in three dims, which a picture can show.
#
# Torus    one box, links between neighbors        x, y, z
# Slices   a box for each                           x, y, z
# Hosts    one box, no links                        devices, hosts, switches
# Flat     one box, no links                        devices, line after line


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
        return [_of_torus(part, f"slice {index}") for index, part in parts]
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
    rank, plane = len(torus.shape), "z"
    return Ground(title, ids, processes, wraps, rank, plane, origin)  # type: ignore[arg-type]


def _of_hosts(hosts: Hosts) -> Ground:
    """Lay out hosts: several per line if they are small; a plane for each switch."""
    switches = hosts.count // hosts.switch if hosts.switch else 1
    shape = (switches, hosts.count // switches, hosts.devices)
    ids, processes = _in_lines(hosts, shape, max(1, _LINE // 2 // hosts.devices))
    return Ground(hosts.text, ids, processes, plane="switch")


def _in_lines(topology: Topology, shape: Sizes, in_line: int) -> tuple[IntArray, IntArray]:
    """Lay out planes of blocks of devices, `blocks` per line; single devices fill lines."""
    planes, blocks, devices = shape
    if devices == 1 and planes == 1:
        in_line = _LINE
    in_line = min(blocks, in_line)
    rows = math.ceil(blocks / in_line)
    grids = []
    for values in (topology.device_ids, topology.processes):
        full = np.full((planes, rows * in_line, devices), -1, np.int64)
        full[:, :blocks] = values.reshape(shape)
        grids.append(full.reshape(planes, rows, in_line * devices).transpose(2, 1, 0)[..., None])
    return grids[0], grids[1]
