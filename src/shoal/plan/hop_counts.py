"""Hop counts of a mesh's collectives on the wires of a topology."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.hardware.wiring import Slices, Topology, Torus
from shoal.plan.mesh import Mesh

IntArray = NDArray[np.int64]


class Hops(NamedTuple):
    """The worst ring of one axis: from each device to the next, and from the last to the first."""

    longest: int  # links between consecutive devices in a slice
    total: int  # links of all hops of a ring that stay in a slice
    slices: int  # how many slices a ring visits


def hops_of(topology: Topology, mesh: Mesh) -> dict[str, Hops]:
    """Return the hops along each axis of a mesh; {} if no links are described.

    Between the cores of a chip there is no link.

    Args:
      topology: has the devices of the mesh, at least.

    >>> from shoal.plan.placement import place
    >>> from shoal.plan.topology import parse
    >>> slices = parse("v5e:2x4 x 2 slices")
    >>> hops_of(slices, place(slices, {"data": 2, "model": 8}))["model"]
    Hops(longest=1, total=8, slices=1)
    """
    return dict(zip(mesh.axis_names, hops_along(topology, mesh.device_ids), strict=False))


def hops_along(topology: Topology, ids: IntArray) -> list[Hops]:
    """Return the hops along each axis of ids in the order of a mesh; [] without links."""
    if isinstance(topology, Torus):
        tori = [topology]
    elif isinstance(topology, Slices):
        tori = list(topology.parts())
    else:
        return []
    part, coords = _cells(tori, ids)
    return [_along(axis, tori, part, coords) for axis in range(ids.ndim)]


def _cells(tori: list[Torus], ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return the slice of each device [mesh shape] and its chip there [mesh shape, x y z]."""
    part = np.zeros(ids.shape, np.int64)
    coords = np.zeros((*ids.shape, 3), np.int64)
    for number, torus in enumerate(tori):
        order = np.argsort(torus.device_ids, axis=None)
        known = torus.device_ids.ravel()[order]
        place = np.searchsorted(known, ids).clip(max=known.size - 1)
        here = known[place] == ids
        part[here] = number
        chips = np.unravel_index(order[place[here]], torus.grid)[:-1]
        coords[here, : len(chips)] = np.stack(chips, axis=-1)
    return part, coords


def _along(axis: int, tori: list[Torus], part: IntArray, coords: IntArray) -> Hops:
    links = np.abs(coords - np.roll(coords, -1, axis=axis))
    for number, torus in enumerate(tori):
        for dim, size in enumerate(torus.shape):
            if torus.wrap[dim]:
                own = part == number
                links[own, dim] = np.minimum(links[own, dim], size - links[own, dim])
    stays = part == np.roll(part, -1, axis=axis)
    hops = np.where(stays, links.sum(axis=-1), 0)
    ordered = np.sort(part, axis=axis)
    slices = 1 + (np.diff(ordered, axis=axis) > 0).sum(axis=axis)
    return Hops(int(hops.max()), int(hops.sum(axis=axis).max()), int(slices.max()))
