"""How far the data of a mesh's collectives travel on the wires of a topology."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.mesh import Mesh
from shoal.plan.wiring import Slices, Topology, Torus

__all__ = ["Hops", "hops_of"]

IntArray = NDArray[np.int64]


class Hops(NamedTuple):
    """The rings of one axis: each device, the next one, and from the last back to the first."""

    longest: int  # links between two neighbours in a ring that lie in the same slice, at most
    slices: int  # how many slices one ring visits, at most


def hops_of(topology: Topology, mesh: Mesh) -> dict[str, Hops]:
    """Return the hops along each axis of a mesh; {} where no links are described.

    The cores of a chip count as one link apart.

    Args:
      topology: has the devices of the mesh, at least.

    >>> from shoal.plan.placement import place
    >>> from shoal.plan.topology import parse
    >>> slices = parse("v5e:2x4 x 2 slices")
    >>> hops_of(slices, place(slices, {"data": 2, "model": 8}))
    {'data': Hops(longest=0, slices=2), 'model': Hops(longest=1, slices=1)}
    """
    if isinstance(topology, Torus):
        tori = [topology]
    elif isinstance(topology, Slices):
        tori = list(topology.parts())
    else:
        return {}
    part, coords = _cells(tori, mesh.device_ids)
    return {name: _along(axis, tori, part, coords) for axis, name in enumerate(mesh.axis_names)}


def _cells(tori: list[Torus], ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return the slice of each device [mesh shape] and its cell there [mesh shape, 4]."""
    part = np.zeros(ids.shape, np.int64)
    coords = np.zeros((*ids.shape, 4), np.int64)
    for number, torus in enumerate(tori):
        order = np.argsort(torus.device_ids, axis=None)
        known = torus.device_ids.ravel()[order]
        place = np.searchsorted(known, ids).clip(max=known.size - 1)
        here = known[place] == ids
        part[here] = number
        cells = np.unravel_index(order[place[here]], torus.grid)
        coords[here] = np.column_stack([*_padded(cells[:-1], here.sum()), cells[-1]])
    return part, coords


def _padded(cells: tuple[NDArray[np.intp], ...], count: int) -> list[NDArray[np.intp]]:
    """Return the coordinates in three dims."""
    return [*cells, *[np.zeros(count, np.intp)] * (3 - len(cells))]


def _along(axis: int, tori: list[Torus], part: IntArray, coords: IntArray) -> Hops:
    apart = np.abs(coords - np.roll(coords, -1, axis=axis))
    stays = part == np.roll(part, -1, axis=axis)
    longest = 0
    for number, torus in enumerate(tori):
        steps = apart[stays & (part == number)]
        for dim, (size, wraps) in enumerate(zip(torus.shape, torus.wrap, strict=True)):
            if wraps:
                steps[:, dim] = np.minimum(steps[:, dim], size - steps[:, dim])
        longest = max(longest, int(steps.sum(axis=1).max(initial=0)))
    lines = np.moveaxis(part, axis, -1).reshape(-1, part.shape[axis])
    ordered = np.sort(lines, axis=1)
    return Hops(longest, int((1 + (np.diff(ordered, axis=1) > 0).sum(axis=1)).max()))
