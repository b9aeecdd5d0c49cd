"""A mesh as a picture: which device stands where, and whose it is."""

from __future__ import annotations

import itertools
import math

from shoal.draw.picture import GAP, Cell, Panel, Picture, elide
from shoal.plan.mesh import Mesh

__all__ = ["draw_mesh"]

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 16, 16, 4


def draw_mesh(mesh: Mesh) -> Picture:
    """Return the grid of device ids; the last two axes are rows and columns of each panel."""
    outer = mesh.shape[:-2]
    places = list(itertools.islice(itertools.product(*map(range, outer)), 1 + _MOST_PANELS))
    panels = [_panel(mesh, place) for place in places[:_MOST_PANELS]]
    notes = []
    if len(mesh.process_indices) > 1:
        notes.append("p: the process that owns the device")
    if len(places) > len(panels):
        notes.append(f"{len(panels)} of {math.prod(outer)} panels are shown")
    return Picture(repr(mesh), panels, notes)


def _panel(mesh: Mesh, place: tuple[int, ...]) -> Panel:
    names, inner = mesh.axis_names, mesh.shape[-2:]
    row_axis = names[-2] if len(inner) == 2 else ""
    column_axis = names[-1] if inner else ""
    rows = elide(range(inner[0]), _MOST_ROWS, None) if row_axis else [-1]
    columns = elide(range(inner[-1]), _MOST_COLUMNS, None) if column_axis else [-1]
    body = [
        (_label(row_axis, row), [_cell(mesh, place, row, column) for column in columns])
        for row in rows
    ]
    title = ", ".join(f"{axis} {number}" for axis, number in zip(names, place, strict=False))
    return Panel(title, "", [_label(column_axis, column) for column in columns], body)


def _cell(mesh: Mesh, place: tuple[int, ...], row: int | None, column: int | None) -> Cell:
    if row is None or column is None:
        return GAP
    index = (*place, *(number for number in (row, column) if number >= 0))
    process = int(mesh.processes[index])
    owner = f" p{process}" if len(mesh.process_indices) > 1 else ""
    return Cell(f"{mesh.device_ids[index]}{owner}", process)


def _label(axis: str, number: int | None) -> str:
    if not axis:
        return ""
    return "…" if number is None else f"{axis} {number}"
