"""Picture of a mesh: the device at each position, and its process."""

from __future__ import annotations

import itertools
import math

from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, elide
from shoal.plan.mesh import Mesh
from shoal.plan.notation.words import quote

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 16, 16, 4
_MOST_CHARACTERS = 160


def draw_mesh(mesh: Mesh) -> Picture:
    """Return the grid of device ids; the last two axes are rows and columns of each panel."""
    outer = mesh.shape[:-2]
    places = list(itertools.islice(itertools.product(*map(range, outer)), 1 + _MOST_PANELS))
    has_owners = len(mesh.process_indices) > 1
    panels = [_panel(mesh, place, has_owners) for place in places[:_MOST_PANELS]]
    notes = []
    if has_owners:
        notes.append("p: the process that owns the device")
    if len(places) > len(panels):
        notes.append(f"{len(panels)} of {math.prod(outer)} panels are shown")
    return Picture(repr(mesh), panels, notes)


def _panel(mesh: Mesh, place: tuple[int, ...], has_owners: bool) -> CellTable:
    names, inner = mesh.axis_names, mesh.shape[-2:]
    row_axis = names[-2] if len(inner) == 2 else ""
    column_axis = names[-1] if inner else ""
    rows = elide(range(inner[0]), _MOST_ROWS, None) if row_axis else [-1]
    columns = elide(range(inner[-1]), _fitting(mesh), None) if column_axis else [-1]
    body = [
        (
            _label(row_axis, row),
            [_cell(mesh, (*place, row, column), has_owners) for column in columns],
        )
        for row in rows
    ]
    title = ", ".join(f"{quote(axis)} {index}" for axis, index in zip(names, place, strict=False))
    labels = [_label(column_axis, column) for column in columns]
    num_rows, num_columns = (inner[0] if row_axis else 0), (inner[-1] if column_axis else 0)
    return CellTable(
        title, corner="", columns=labels, rows=body, num_rows=num_rows, num_columns=num_columns
    )


def _fitting(mesh: Mesh) -> int:
    """Return how many columns fit in a line at the width of the widest label or id."""
    largest = mesh.size - 1 if mesh.is_iota else int(mesh.device_ids.max())
    owner = f" p{mesh.process_indices[-1]}"
    widest = max(len(_label(mesh.axis_names[-1], mesh.shape[-1])), len(f"{largest}{owner}"))
    return max(6, min(_MOST_COLUMNS, _MOST_CHARACTERS // (widest + 3)))


def _cell(mesh: Mesh, place: tuple[int | None, ...], has_owners: bool) -> Cell:
    """Return the cell of a position, in which None is a gap and -1 stands for a missing axis."""
    index = tuple(coord for coord in place if coord is not None and coord >= 0)
    if None in place:
        return GAP
    process = int(mesh.processes[index])
    device_id = _position(mesh, index) if mesh.is_iota else mesh.device_ids[index]
    return Cell(f"{device_id} p{process}" if has_owners else f"{device_id}", process)


def _position(mesh: Mesh, index: tuple[int, ...]) -> int:
    position = 0
    for size, coord in zip(mesh.shape, index, strict=True):
        position = position * size + coord
    return position


def _label(axis: str, index: int | None) -> str:
    if not axis:
        return ""
    return "…" if index is None else f"{quote(axis)} {index}"
