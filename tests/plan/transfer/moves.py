"""Moves to try, and who holds and needs which element of an array, one by one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from shoal.plan.layout import REDUCTIONS, Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region


class Move(NamedTuple):
    """A source, a target and a shape."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]

    @property
    def host_of(self):
        """Device id → process."""
        return {
            device: process
            for mesh in (self.source.mesh, self.target.mesh)
            for device, process in zip(
                mesh.device_ids.ravel().tolist(), mesh.processes.ravel().tolist(), strict=True
            )
        }


SHAPES = [(), (1,), (2,), (3,), (4,), (6,), (8,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (2, 3, 4)]


@st.composite
def grids(draw, host_of):
    """Meshes over some of the devices, in any order."""
    sizes = draw(st.sampled_from([s for s in SHAPES if math.prod(s) <= len(host_of)]))
    pool = list(range(len(host_of)))
    if draw(st.booleans()):
        pool = draw(st.permutations(pool))
    begin = draw(st.integers(0, len(host_of) - math.prod(sizes)))
    ids = pool[begin : begin + math.prod(sizes)]
    axes = dict(zip("abc", sizes, strict=False))
    return Mesh(axes, device_ids=[3 * i + 1 for i in ids], processes=[host_of[i] for i in ids])


@st.composite
def specs(draw, mesh, rank, partial):
    """Layouts of a rank on a mesh."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    pending = {}
    for axis in draw(st.permutations(mesh.axis_names)):
        place = draw(st.integers(-2 if partial else -1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            pending[axis] = draw(st.sampled_from(REDUCTIONS))
    return Layout(mesh, *map(tuple, dims), partial=pending)


@st.composite
def moves(draw, partial=False):
    """Moves of small arrays between meshes of up to 24 devices on up to 6 hosts."""
    count = draw(st.sampled_from([1, 2, 4, 8, 12, 24]))
    per_host = draw(st.sampled_from([1, 2, 3, 4, 24]))
    host_of = [7 - i // per_host % 6 for i in range(count)]
    rank = draw(st.integers(0, 3))
    layouts = [
        draw(grids(host_of).flatmap(lambda mesh, p=p: specs(mesh, rank, p)))
        for p in (partial, False)
    ]
    return Move(*layouts, tuple(draw(st.integers(0, 9)) for _ in range(rank)))


def elements(layout, shape):
    """Return device id → the numbers of the elements that its shard covers."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return {
        device: frozenset(numbers[region(layout, shape, device)].ravel().tolist())
        for device in layout.mesh.device_ids.ravel().tolist()
    }


def terms(layout):
    """Return device id → the number of the term that it holds; all 0 where nothing is pending."""
    mesh = layout.mesh
    coords_of = {}
    for index in np.ndindex(mesh.shape):
        coords = dict(zip(mesh.axis_names, index, strict=True))
        coords_of[int(mesh.device_ids[index])] = tuple(coords[axis] for axis in layout.partial)
    return coords_of


def box_elements(box, shape):
    """Return the numbers of the elements of a box."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[tuple(slice(*ends) for ends in box)].ravel().tolist()
