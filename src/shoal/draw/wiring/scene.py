"""The scene of a topology and a mesh on it, independent of the medium.

Chips are in the columns and rows of panels: x to the right, y down, a panel for each z. A section
is a slice. `wires` makes a scene; `wires_svg` and `wires_text` draw it. Sizes are counted in cells.
"""

from __future__ import annotations

from typing import NamedTuple


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
