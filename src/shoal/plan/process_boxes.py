"""The box of an array that each process's devices hold together, evenly split among them.

If every process holds a box, and all boxes have one shape, an array can be handled in parts: each
process has its box as a separate array. Boxes of two processes are then equal or disjoint.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.notation.words import runs_to_text
from shoal.plan.shards import owners

IntArray = NDArray[np.int64]

_MOST_SHOWN = 6  # positions of devices in a message


class ProcessBox(NamedTuple):
    """The part of an array that the devices of one process hold together."""

    layout: Layout | None
    """The layout of the box over them; None: the process owns no device of the mesh."""
    place: tuple[int, ...]
    """The index of this box along each dim."""
    shards: tuple[int, ...]
    """The number of shards of each dim of a box; the same on all processes."""
    boxes: tuple[int, ...]
    """The number of boxes along each dim of the array."""
    holders: tuple[int, ...]
    """The processes that hold this box, ascending."""


@lru_cache(maxsize=4096)
def process_box(layout: Layout, process: int) -> ProcessBox:
    """Return the box of arrays of a layout that `process` holds.

    Raises:
      UsageError: the devices of a process hold no box, or processes hold boxes of several shapes;
        the same on all of them.

    Example:
      >>> mesh = Mesh({"x": 4, "y": 2}, processes=[0, 0, 0, 0, 1, 1, 1, 1])
      >>> part = process_box(Layout(mesh, "x", None), 1)
      >>> part.layout.text, part.place, part.shards, part.boxes, part.holders
      ('x, - @ x=2 y=2 | ids 4..7 | processes 1x4', (1, 0), (2, 1), (2, 1), (1,))
    """
    parts = _parts(layout)
    shards = next(iter(parts.values())).shards
    whole = tuple(layout.num_shards(dim) for dim in range(layout.rank))
    boxes = tuple(all_ // own for all_, own in zip(whole, shards, strict=True))
    part = parts.get(process)
    if part is None:
        return ProcessBox(
            layout=None, place=(0,) * layout.rank, shards=shards, boxes=boxes, holders=()
        )
    place = tuple(first // own for first, own in zip(part.first, shards, strict=True))
    holders = tuple(sorted(p for p, other in parts.items() if other.first == part.first))
    return ProcessBox(
        layout=_local_layout(layout, process, shards),
        place=place,
        shards=shards,
        boxes=boxes,
        holders=holders,
    )


class _Part(NamedTuple):
    first: tuple[int, ...]  # the number of its first shard in each dim
    shards: tuple[int, ...]  # how many of each dim


@lru_cache(maxsize=256)
def _parts(layout: Layout) -> dict[int, _Part]:
    """Return what each process holds."""
    numbers, box = _shard_numbers(layout)
    parts: dict[int, _Part] = {}
    problems = []
    for process, rows in _positions(layout.mesh).items():
        own = numbers[rows]
        first = own.min(axis=0)
        shards = own.max(axis=0) + 1 - first
        held, times = np.unique(box[rows], return_counts=True)
        parts[process] = _Part(tuple(first.tolist()), tuple(shards.tolist()))
        if len(held) != math.prod(parts[process].shards):
            problems.append(_no_box(layout, process, own, parts[process].shards))
        elif times.min() != times.max():
            problems.append(
                f"some shards of the block that process {process} holds lie on "
                f"{times.max()} of its devices, others on {times.min()}"
                f"{_where(layout.mesh, process)}"
            )
    problems = problems or _several_shapes(layout, parts)
    if problems:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        counts = {len(rows) for rows in _positions(layout.mesh).values()}
        advice = _ADVICE if len(counts) == 1 else _UNEVEN
        raise UsageError(f"{problems[0]}{more}; {advice}")
    return parts


_ADVICE = (
    "order the mesh so that each process's devices form one block of it, all of one shape, as "
    "make_mesh does, or pass a piece for each device to pack"
)
_UNEVEN = (
    "no order of the mesh makes each process's devices form one block of it, all of one shape, "
    "since processes own different numbers of them: feed takes the rows of each process, pack a "
    "piece for each device, and addressable_shards are the pieces of an array"
)


def _shard_numbers(layout: Layout) -> tuple[IntArray, IntArray]:
    """Return the shard that each device holds: its number in each dim [devices, rank], and overall.

    They are read off an array with one index per shard: a device's region begins at its shard.
    """
    held = owners(layout, layout.global_shape((1,) * layout.rank))
    return held.start, held.box


@lru_cache(maxsize=64)
def _positions(mesh: Mesh) -> dict[int, IntArray]:
    """Return the positions of each process's devices, in mesh order."""
    processes = mesh.processes.ravel()
    order = np.argsort(processes, kind="stable")
    numbers, firsts = np.unique(processes[order], return_index=True)
    return dict(zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True))


def _coords(mesh: Mesh, rows: IntArray) -> tuple[IntArray, ...]:
    """Return the coordinates of positions along each axis."""
    return np.unravel_index(rows, mesh.shape) if mesh.shape else ()


def _local_layout(layout: Layout, process: int, shards: tuple[int, ...]) -> Layout:
    """Return the layout of a process's box over its own devices.

    The mesh's own axes are kept, if its devices are a grid of them: x=4, y=2 over two processes by
    rows is x=2, y=2 in each. In any other order there is one axis for each dim that is cut.
    """
    mesh = layout.mesh
    rows = _positions(mesh)[process]
    sizes = [len(np.unique(coords)) for coords in _coords(mesh, rows)]
    if math.prod(sizes) == len(rows):
        axes, dims, order = list(zip(mesh.axis_names, sizes, strict=True)), layout.dims, rows
        types = dict(mesh.axis_types)
    else:
        box = _shard_numbers(layout)[1][rows]
        order = rows[np.argsort(box, kind="stable")]
        axes, dims, types = _axes_of_dims(layout, shards, len(rows))
    ids = mesh.device_ids.ravel()[order]
    return Layout(
        Mesh(
            axes,
            device_ids=ids,
            processes=process,
            kind=mesh.kind,
            label=mesh.label,
            axis_types=types,
        ),
        *dims,
    )


def _axes_of_dims(
    layout: Layout, shards: tuple[int, ...], num_devices: int
) -> tuple[list[tuple[str, int]], tuple[str | None, ...], dict[str, str]]:
    """Return an axis for each dim that is cut, and one for replicas; their dims, and types."""
    used = {axis for dim in layout.axes_of_dims for axis in dim}
    free = [axis for axis in layout.mesh.axis_names if axis not in used]
    sizes = [*shards, num_devices // math.prod(shards)]
    axes: dict[str, int] = {}
    types: dict[str, str] = {}
    dims: list[str | None] = []
    for size, given in zip(sizes, [*layout.axes_of_dims, free], strict=True):
        name = "+".join(given)
        while name in axes:
            name += "+"
        dims.append(name if size > 1 else None)
        if size > 1:
            axes[name] = size
            kinds = {layout.mesh.axis_types[axis] for axis in given}
            types[name] = "explicit" if kinds == {"explicit"} else "auto"
    return list(axes.items()), tuple(dims[:-1]), types


def _no_box(layout: Layout, process: int, own: IntArray, shards: tuple[int, ...]) -> str:
    where = _where(layout.mesh, process)
    for dim, count in enumerate(shards):
        held = np.unique(own[:, dim])
        if len(held) < count:
            return (
                f"process {process} holds shards {runs_to_text(held)} of dim {dim}, which "
                f"{_axes(layout, dim)} cuts into {layout.num_shards(dim)}: that is not one block"
                f"{where}"
            )
    distinct = len(np.unique(own, axis=0))
    return (
        f"process {process} holds {distinct} of the {math.prod(shards)} shards between its first "
        f"and last: that is not one block{where}"
    )


def _several_shapes(layout: Layout, parts: dict[int, _Part]) -> list[str]:
    """Compare the boxes of all processes with that of the first."""
    (process, first), *others = sorted(parts.items())
    for other, part in others:
        for dim, (one, two) in enumerate(zip(first.shards, part.shards, strict=True)):
            if one != two:
                return [
                    f"of the {layout.num_shards(dim)} shards of dim {dim} ({_axes(layout, dim)}) "
                    f"process {process} holds {one} and process {other} {two}, but all parts must "
                    "have one shape"
                ]
    return []


def _axes(layout: Layout, dim: int) -> str:
    axes = layout.axes_of_dims[dim]
    return " x ".join(f"{axis}={layout.mesh.axes[axis]}" for axis in axes)


def _where(mesh: Mesh, process: int) -> str:
    """Return the positions of a process's devices in the mesh, as text."""
    rows = _positions(mesh)[process]
    coords = zip(*(axis.tolist() for axis in _coords(mesh, rows[:_MOST_SHOWN])), strict=True)
    shown = ", ".join("(" + ", ".join(map(str, position)) + ")" for position in coords)
    more = ", …" if len(rows) > _MOST_SHOWN else ""
    return f" (its devices are at ({', '.join(mesh.axis_names)}) = {shown}{more})"
