"""The rings of a mesh's axes on the wires: the order of the devices, and the hops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.draw.wiring.grounds import Ground
from shoal.draw.wiring.scene import Axis
from shoal.errors import UsageError
from shoal.plan.mesh import Mesh
from shoal.plan.notation.mesh_text import short_runs

IntArray = NDArray[np.int64]


class Standing(NamedTuple):
    """The location of one device."""

    ground: int
    coords: tuple[int, int, int]
    core: int


class Stands(NamedTuple):
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
        if (wrong := np.unique(ids[self.ids[index] != ids])).size:
            raise UsageError(
                f"devices {short_runs(wrong)} of the mesh are not in the topology, whose ids are "
                f"{short_runs(self.ids)}"
            )
        return np.asarray(index)

    def at(self, index: int) -> Standing:
        """Return the location of one device."""
        *coords, core = self.places[index].tolist()
        return Standing(int(self.grounds[index]), tuple(coords), core)


def stands(boxes: Sequence[Ground]) -> Stands:
    """Return the locations of the devices of all boxes."""
    cells = [np.argwhere(box.ids >= 0) for box in boxes]
    ids = np.concatenate([b.ids[tuple(c.T)] for b, c in zip(boxes, cells, strict=True)])
    owners = np.concatenate([b.processes[tuple(c.T)] for b, c in zip(boxes, cells, strict=True)])
    numbers = np.repeat(np.arange(len(boxes)), [len(part) for part in cells])
    order = np.argsort(ids)
    places = np.concatenate(cells)[order]
    return Stands(ids[order], numbers[order], places, owners[order])


def axes_of(mesh: Mesh, where: Stands, boxes: Sequence[Ground]) -> list[Axis]:
    """Return the hops of the rings of each axis."""
    index = where.find(mesh.device_ids.ravel()).reshape(mesh.shape)
    found = []
    for axis, (name, size) in enumerate(mesh.axes.items()):
        after = np.roll(index, -1, axis)
        links, leaves = _lengths(index.ravel(), after.ravel(), where, boxes)
        links, leaves = links.reshape(mesh.shape), leaves.reshape(mesh.shape)
        first = index[(0,) * axis + (slice(None),) + (0,) * (index.ndim - axis - 1)]
        ring = tuple(where.ids[first].tolist())
        total, crossings = (int(part.sum(axis).max()) for part in (links, leaves))
        longest = int(links.max())
        far = _far(size, longest, total, crossings, boxes)
        found.append(Axis(name, size, longest, total, crossings, ring, far))
    return found


def _far(size: int, longest: int, total: int, crossings: int, boxes: Sequence[Ground]) -> str:
    """Describe the hops of an axis's rings."""
    if size == 1:
        return "no hops"
    inside = size - crossings
    if not boxes[0].rank:
        has_hosts = any(len(np.unique(box.processes[box.ids >= 0])) > 1 for box in boxes)
        leaving = f", {crossings} between hosts" if crossings else ", all within a host"
        return f"{size} hops{leaving if has_hosts else ''}"
    leaving = f"; {crossings} between slices" if crossings else ""
    if not inside:
        return f"{size} hops, all between slices"
    if longest == 0:
        return f"{inside} hops within a chip{leaving}"
    if longest == 1 and total < inside:
        return f"{inside} hops of 1 link or within a chip, {total} links in all{leaving}"
    if longest == 1:
        return f"{inside} hops of 1 link{leaving}"
    return f"{inside} hops, the longest {longest} links, {total} in all{leaving}"


def _lengths(
    start: IntArray, end: IntArray, where: Stands, boxes: Sequence[Ground]
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
    found = []
    for begin, stop, size, wraps in zip(
        start.coords, end.coords, box.sizes, box.wraps, strict=True
    ):
        apart = abs(stop - begin)
        found.append(int(math.copysign(1, begin - stop)) if wraps and size < 2 * apart else 0)
    return tuple(found)  # type: ignore[return-value]


def links_between(start: Standing, end: Standing, box: Ground) -> int | None:
    """Return the number of links between two devices; None if they are not linked."""
    if not box.rank or start.ground != end.ground:
        return None
    apart = [abs(a - b) for a, b in zip(start.coords, end.coords, strict=True)]
    whole = zip(apart, box.sizes, box.wraps, strict=True)
    return sum(min(part, size - part) if wraps else part for part, size, wraps in whole)
