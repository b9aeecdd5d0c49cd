"""The scene of a topology and a mesh placed on it: chips, hosts, links and the rings of axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.draw.media.picture import elide
from shoal.draw.wiring.scene import (
    Arrow,
    Axis,
    Bundle,
    Chip,
    ChipPlane,
    DeviceMark,
    Ground,
    Host,
    LinkMark,
    MarkPlace,
    Scene,
    grounds,
)
from shoal.errors import UsageError, counted
from shoal.plan.hardware.hosts import Flat
from shoal.plan.hardware.wiring import Slices, Topology, Torus
from shoal.plan.mesh import Mesh, coords_of
from shoal.plan.notation.mesh_text import short_runs
from shoal.plan.notation.words import quote

MOST_DEVICES = 1 << 22  # of a topology that is drawn


class Most(NamedTuple):
    """Limits on what is shown; excess items are omitted from the middle."""

    columns: int = 32
    rows: int = 32
    chips: int = 10_240  # of all panels
    sections: int = 8
    arrows: int = 4096  # of a ring; 0: rings are ignored


_Shown = tuple[int | None, ...]


def draw_wires(topology: Topology, mesh: Mesh | None = None, most: Most | None = None) -> Scene:
    """Return the scene of a topology.

    Args:
      topology: the devices.
      mesh: a mesh on it, whose axes' rings are shown; None: the wires alone.
      most: limits on what is shown.

    Raises:
      UsageError: the mesh has devices that the topology lacks, or too many to draw.
    """
    if topology.num_devices > MOST_DEVICES:
        raise UsageError(
            f"{topology.text} has {topology.num_devices} devices; at most {MOST_DEVICES} can be "
            "drawn"
        )
    return _Drawing(topology, mesh, most or Most()).scene()


def places_of(topology: Topology, mesh: Mesh) -> dict[str, Any]:
    """Return the locations of a mesh's devices, and the hops of its rings, as plain values.

    `coords` [mesh shape, dims] and `cores` [mesh shape] for chips, `slices` [mesh shape] where
    there are several; `rings`: for each axis.
    """
    boxes = grounds(topology)
    where = placement_of(boxes)
    index = where.find(mesh.device_ids.ravel()).reshape(mesh.shape)
    places: dict[str, Any] = {}
    rank = boxes[0].rank
    if rank:
        origins = np.array([box.origin for box in boxes])[where.grounds[index]]
        places["coords"] = (where.places[index][..., :3] + origins)[..., :rank].tolist()
        places["cores"] = where.places[index][..., 3].tolist()
    if len(boxes) > 1:
        places["slices"] = where.grounds[index].tolist()
    facts = ("longest", "total", "crossings")
    axes = axes_of(mesh, where, boxes)
    return places | {"rings": {a.name: {f: getattr(a, f) for f in facts} for a in axes}}


class _Drawing:
    """Collects the parts of one scene."""

    def __init__(self, topology: Topology, mesh: Mesh | None, most: Most) -> None:
        self.topology, self.mesh, self.most = topology, mesh, most
        self.boxes = grounds(topology)
        self.where = placement_of(self.boxes)
        self.axes = axes_of(mesh, self.where, self.boxes) if mesh else []
        self.positions = self._positions()
        self.last = max([a for a, axis in enumerate(self.axes) if axis.size > 1], default=0)
        self.panels: list[ChipPlane] = []
        self.planes: list[tuple[int, int]] = []  # of each panel: its box, its z
        self.notes: list[str] = []
        self._lay_panels()

    def _positions(self) -> NDArray[np.int64]:
        """Return the position in the mesh of every device, by ascending id; -1: in no mesh."""
        positions = np.full(len(self.where.ids), -1, np.int64)
        if self.mesh is not None:
            ids = self.mesh.device_ids.ravel()
            positions[self.where.find(ids)] = np.arange(len(ids))
        return positions

    def scene(self) -> Scene:
        has_chips = isinstance(self.topology, Torus | Slices)
        sections = [box.title for box in self.boxes] if len(self.boxes) > 1 else [""]
        panels = range(len(self.panels))
        links = tuple(link for panel in panels for link in self._links(panel))
        # A group: the devices along the last axis of more than one position, as in `_device`.
        num_groups = 0
        if self.axes and self.mesh:
            num_groups = self.mesh.size // self.axes[self.last].size
        return Scene(
            title=self.topology.text,
            subtitle=self._subtitle(),
            sections=tuple(sections),
            panels=tuple(self.panels),
            chips=tuple(chip for panel in panels for chip in self._chips(panel)),
            hosts=tuple(host for panel in panels for host in self._hosts(panel)),
            links=links,
            bundles=tuple(self._bundles()),
            arrows=tuple(a for n, axis in enumerate(self.axes) for a in self._arrows(n, axis)),
            axes=tuple(self.axes),
            num_groups=num_groups,
            unit="chip" if has_chips else "device",
            notes=tuple(self.notes),
        )

    def _subtitle(self) -> str:
        facts = []
        if self.mesh is not None:
            facts.append(" ".join(f"{quote(n)}={s}" for n, s in self.mesh.axes.items()))
        count, hosts = self.topology.num_devices, len(np.unique(self.where.processes))
        chips = sum(math.prod(box.sizes) for box in self.boxes)
        if isinstance(self.topology, Torus | Slices):
            facts.append(counted(chips, "chip"))
        if count != chips or not isinstance(self.topology, Torus | Slices):
            facts.append(counted(count, "device"))
        if not isinstance(self.topology, Flat) or hosts > 1:
            facts.append(counted(hosts, "host"))
        return ", ".join(facts)

    def _lay_panels(self) -> None:
        each = self.boxes[0].sizes
        fitting = max(2, self.most.chips // math.prod(each))
        chosen = elide(range(len(self.boxes)), min(self.most.sections, fitting), None)
        for box_index in chosen:
            if box_index is not None:
                self._lay_box(box_index, self.most.chips // max(1, len(chosen)))
        if None in chosen:
            self.notes.append(f"{len(chosen) - 1} of {len(self.boxes)} slices are shown")

    def _lay_box(self, box_index: int, chips: int) -> None:
        box = self.boxes[box_index]
        wide, high, deep = box.sizes
        columns: _Shown = tuple(elide(range(wide), self.most.columns, None))
        rows: _Shown = tuple(elide(range(high), self.most.rows, None))
        planes = elide(range(deep), max(3, chips // (len(columns) * len(rows))), None)
        for z in planes:
            if z is None:
                continue
            title = f"{box.plane} = {z + box.origin[2]}" if deep > 1 else ""
            self.panels.append(
                ChipPlane(
                    section=box_index, title=title, columns=columns, rows=rows, wraps=box.wraps[:2]
                )
            )
            self.planes.append((box_index, z))
        if box_index == 0:
            for what, shown, size in (
                ("columns", columns, wide),
                ("rows", rows, high),
                ("planes", planes, deep),
            ):
                if None in shown:
                    self.notes.append(f"{len(shown) - 1} of {size} {what} are shown")

    def _chips(self, panel: int) -> Iterator[Chip]:
        box_index, z = self.planes[panel]
        box, shown = self.boxes[box_index], self.panels[panel]
        for row, column in itertools.product(range(len(shown.rows)), range(len(shown.columns))):
            x, y = shown.columns[column], shown.rows[row]
            if x is None or y is None or box.ids[x, y, z, 0] < 0:
                continue
            coords = tuple(a + b for a, b in zip((x, y, z), box.origin, strict=True))
            devices = tuple(self._device(int(device)) for device in box.ids[x, y, z])
            yield Chip(panel, column, row, coords=coords[: box.rank], devices=devices)

    def _device(self, device_id: int) -> DeviceMark:
        index = int(np.searchsorted(self.where.ids, device_id))
        owner, place = int(self.where.processes[index]), int(self.positions[index])
        if self.mesh is None or place < 0:
            return DeviceMark(device_id, owner, (), -1)
        position = coords_of(place, self.mesh.shape)
        group = 0
        for axis, size in enumerate(self.mesh.shape):
            group = group if axis == self.last else group * size + position[axis]
        return DeviceMark(device_id, owner, position, group)

    def _hosts(self, panel: int) -> Iterator[Host]:
        """Outline every process's chips, where they fill a box of the plane."""
        if isinstance(self.topology, Flat) and len(np.unique(self.where.processes)) == 1:
            return
        box_index, z = self.planes[panel]
        shown = self.panels[panel]
        owners = self.boxes[box_index].processes[:, :, z, 0]
        for process in np.unique(owners[owners >= 0]).tolist():
            own = np.argwhere(owners == process)
            low, high = own.min(axis=0), own.max(axis=0)
            columns = _inside(shown.columns, int(low[0]), int(high[0]))
            rows = _inside(shown.rows, int(low[1]), int(high[1]))
            if len(own) == np.prod(high - low + 1) and columns and rows:
                yield Host(
                    panel, process, left=columns[0], top=rows[0], right=columns[-1], bottom=rows[-1]
                )

    def _links(self, panel: int) -> Iterator[LinkMark]:
        box_index, _ = self.planes[panel]
        box, shown = self.boxes[box_index], self.panels[panel]
        if not box.rank:
            return
        for dim, line, other in ((0, shown.columns, shown.rows), (1, shown.rows, shown.columns)):
            ends = list(_neighbours(line, box.sizes[dim], box.wraps[dim]))
            for across in [index for index, value in enumerate(other) if value is not None]:
                for start, end, wraps in ends:
                    pair = [(start, across), (end, across)]
                    a, b = pair if dim == 0 else [(row, col) for col, row in pair]
                    yield LinkMark(panel, a, b, wraps)

    def _bundles(self) -> Iterator[Bundle]:
        for box_index, box in enumerate(self.boxes):
            own = {z: panel for panel, (which, z) in enumerate(self.planes) if which == box_index}
            links, deep = box.sizes[0] * box.sizes[1], box.sizes[2]
            if not box.rank:
                continue
            for z, panel in own.items():
                if z + 1 in own:
                    yield Bundle(panel, own[z + 1], links, False)
            if box.wraps[2] and 0 in own and deep - 1 in own:
                yield Bundle(own[deep - 1], own[0], links, True)

    def _arrows(self, axis_index: int, axis: Axis) -> Iterator[Arrow]:
        """Yield the hops of an axis's first ring whose two ends are shown."""
        if axis.size == 1 or not self.most.arrows:
            return
        indices = self.where.find(np.array(axis.ring))
        places = [self.where.at(int(index)) for index in indices[: self.most.arrows + 1]]
        shown = [self._place(place) for place in places]
        missing = 0
        for hop, (start, begin) in enumerate(zip(places[: self.most.arrows], shown, strict=False)):
            after = (hop + 1) % axis.size
            end, stop = places[after], shown[after]
            if begin is None or stop is None:
                missing += 1
                continue
            box = self.boxes[start.ground]
            links = links_between(start, end, box)
            around = (0, 0, 0) if links is None else ways_round(start, end, box)
            yield Arrow(axis_index, hop, begin, stop, links, around)
        missing = missing + max(0, axis.size - self.most.arrows)
        if missing:
            self.notes.append(f"{missing} of {axis.size} hops of {quote(axis.name)} are not shown")

    def _place(self, standing: Standing) -> MarkPlace | None:
        x, y, z = standing.coords
        if (standing.ground, z) not in self.planes:
            return None
        panel = self.planes.index((standing.ground, z))
        shown = self.panels[panel]
        if x not in shown.columns or y not in shown.rows:
            return None
        cores = self.boxes[standing.ground].cores
        column = shown.columns.index(x) + (standing.core + 0.5) / cores - 0.5
        return MarkPlace(panel, column, shown.rows.index(y))


def _inside(shown: _Shown, low: int, high: int) -> list[int]:
    """Return the columns that show a part of a range."""
    return [
        index for index, value in enumerate(shown) if value is not None and low <= value <= high
    ]


def _neighbours(shown: _Shown, size: int, wraps: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield the pairs of columns that a link joins, and whether it wraps."""
    for index, (value, after) in enumerate(itertools.pairwise(shown)):
        if value is not None and after is not None:
            yield index, index + 1, False
    if wraps and shown[0] == 0 and shown[-1] == size - 1:
        yield len(shown) - 1, 0, True


# ---- The rings of a mesh's axes on the wires: the order of the devices, and the hops.


IntArray = NDArray[np.int64]


class Standing(NamedTuple):
    """The location of one device."""

    ground: int
    coords: tuple[int, int, int]
    core: int


class Placement(NamedTuple):
    """The location of every device, by ascending id."""

    ids: IntArray  # [n]
    grounds: IntArray  # [n]
    places: IntArray  # [n, 4]: x, y, z, core
    processes: IntArray  # [n]

    def find(self, ids: IntArray) -> IntArray:
        """Return the index of each of these devices.

        Raises:
          UsageError: some are missing.
        """
        index = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        wrong = np.unique(ids[self.ids[index] != ids])
        if wrong.size:
            raise UsageError(
                f"devices {short_runs(wrong)} of the mesh are not in the topology, whose ids are "
                f"{short_runs(self.ids)}"
            )
        return np.asarray(index)

    def at(self, index: int) -> Standing:
        """Return the location of one device."""
        *coords, core = self.places[index].tolist()
        return Standing(int(self.grounds[index]), tuple(coords), core)


def placement_of(boxes: Sequence[Ground]) -> Placement:
    """Return the locations of the devices of all boxes."""
    cells = [np.argwhere(box.ids >= 0) for box in boxes]
    ids = np.concatenate([b.ids[tuple(c.T)] for b, c in zip(boxes, cells, strict=True)])
    owners = np.concatenate([b.processes[tuple(c.T)] for b, c in zip(boxes, cells, strict=True)])
    numbers = np.repeat(np.arange(len(boxes)), [len(part) for part in cells])
    order = np.argsort(ids)
    places = np.concatenate(cells)[order]
    return Placement(ids[order], numbers[order], places, owners[order])


def axes_of(mesh: Mesh, where: Placement, boxes: Sequence[Ground]) -> list[Axis]:
    """Return the hops of the rings of each axis."""
    index = where.find(mesh.device_ids.ravel()).reshape(mesh.shape)
    axes = []
    for axis, (name, size) in enumerate(mesh.axes.items()):
        after = np.roll(index, -1, axis)
        links, leaves = _lengths(index.ravel(), after.ravel(), where, boxes)
        links, leaves = links.reshape(mesh.shape), leaves.reshape(mesh.shape)
        first = index[(0,) * axis + (slice(None),) + (0,) * (index.ndim - axis - 1)]
        ring = tuple(where.ids[first].tolist())
        total, crossings = (int(part.sum(axis).max()) for part in (links, leaves))
        longest = int(links.max())
        far = _far(size, longest, total, crossings, boxes)
        axes.append(Axis(name, size, longest, total, crossings, ring, far))
    return axes


def _far(size: int, longest: int, total: int, crossings: int, boxes: Sequence[Ground]) -> str:
    """Describe the hops of an axis's rings."""
    if size == 1:
        return "no hops"
    inside, hops = size - crossings, counted(size - crossings, "hop")
    if not boxes[0].rank:
        has_hosts = any(len(np.unique(box.processes[box.ids >= 0])) > 1 for box in boxes)
        if not has_hosts:
            return counted(size, "hop")
        leaving = f"{crossings} between hosts" if crossings else "all within a host"
        return f"{counted(size, 'hop')}, {leaving}"
    leaving = f"; {crossings} between slices" if crossings else ""
    if not inside:
        return f"{counted(size, 'hop')}, all between slices"
    if longest == 0:
        return f"{hops} within a chip{leaving}"
    if longest == 1 and total < inside:
        return f"{hops} of 1 link or within a chip, {counted(total, 'link')} in all{leaving}"
    if longest == 1:
        return f"{hops} of 1 link{leaving}"
    return f"{hops}, the longest {longest} links, {total} in all{leaving}"


def _lengths(
    start: IntArray, end: IntArray, where: Placement, boxes: Sequence[Ground]
) -> tuple[IntArray, IntArray]:
    """Return the links of each hop [n], and whether no link leads there [n]."""
    sizes, wraps, linked = _wiring(boxes)
    ground = where.grounds[start]
    apart = np.abs(where.places[end, :3] - where.places[start, :3])
    around = np.where(wraps[ground], sizes[ground] - apart, apart)
    links = np.minimum(apart, around).sum(axis=1)
    same = (where.grounds[start] == where.grounds[end]) & linked[ground]
    leaves = np.where(linked[ground], ~same, where.processes[start] != where.processes[end])
    return np.where(same, links, 0), leaves.astype(np.int64)


def _wiring(boxes: Sequence[Ground]) -> tuple[IntArray, NDArray[np.bool_], NDArray[np.bool_]]:
    return (
        np.array([box.sizes for box in boxes]),
        np.array([box.wraps for box in boxes]),
        np.array([box.rank > 0 for box in boxes]),
    )


def ways_round(start: Standing, end: Standing, box: Ground) -> tuple[int, int, int]:
    """Return the dims along which a hop takes the wrap-around link: -1, 0 or 1 for x, y, z."""
    ways = []
    for begin, stop, size, wraps in zip(
        start.coords, end.coords, box.sizes, box.wraps, strict=True
    ):
        apart = abs(stop - begin)
        is_shorter_round = wraps and size < 2 * apart
        ways.append(int(math.copysign(1, begin - stop)) if is_shorter_round else 0)
    return tuple(ways)  # type: ignore[return-value]


def links_between(start: Standing, end: Standing, box: Ground) -> int | None:
    """Return the number of links between two devices; None if they are not linked."""
    if not box.rank or start.ground != end.ground:
        return None
    apart = [abs(a - b) for a, b in zip(start.coords, end.coords, strict=True)]
    whole = zip(apart, box.sizes, box.wraps, strict=True)
    return sum(min(part, size - part) if wraps else part for part, size, wraps in whole)
