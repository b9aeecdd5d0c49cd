"""Render a picture as text for a terminal, in colour where supported."""

from __future__ import annotations

import io

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.draw.media.picture import CellTable, Picture, left_out

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


def render(picture: Picture, width: int | None = None) -> RenderableType:
    """Return a `rich` renderable.

    Args:
      picture: the picture.
      width: of the console; columns that do not fit are omitted, and counted.
    """
    parts: list[RenderableType] = [Text(picture.title, style="bold")]
    panels = [_fit(panel, width) for panel in picture.panels]
    for panel in panels:  # a table's own title would be wrapped to the table's width
        parts += [Text(panel.title, style="italic")] if panel.title else []
        parts += [_table(panel)] if panel.columns else []
    notes = [*picture.notes, *left_out(panels)]
    missing = [own for own, panel in zip(picture.panels, panels, strict=True) if not panel.columns]
    if missing:
        least = max(_width(_without_corner(panel).ends(1)) for panel in missing)
        notes.append(f"{width} columns of text are too few: {least} are needed to draw this")
    return Group(*parts, *(Text(note, style="dim") for note in notes))


def to_text(picture: Picture, width: int = 200) -> str:
    """Return plain text, at most `width` characters wide, without colours."""
    return plain(render(picture, width), width)


def plain(rendered: RenderableType, width: int) -> str:
    """Return what a console would print, as plain text without colours."""
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        legacy_windows=False,
        force_jupyter=False,  # in a notebook rich would show an output of its own
    )
    with console.capture() as captured:
        console.print(rendered)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _fit(panel: CellTable, width: int | None) -> CellTable:
    """Return as many columns as fit next to the labels; none if not even one fits."""
    if width is None or _width(panel) <= width:
        return panel
    panel = _without_corner(panel)
    if _width(panel) <= width:
        return panel
    for count in range(sum(label != "…" for label in panel.columns), 0, -1):
        part = panel.ends(count)
        if _width(part) <= width:
            return part
    return CellTable("", "", [], [])


def _without_corner(panel: CellTable) -> CellTable:
    """Return the panel with its corner label moved above it, where it can wrap."""
    title = "  ".join(filter(None, (panel.title, panel.corner)))
    return panel._replace(title=title, corner="")


def _width(panel: CellTable) -> int:
    """Return the width in characters of a panel's table."""
    labels = max(cell_len(label) for label in (panel.corner, *(row[0] for row in panel.rows)))
    columns = sum(panel.width_of(column) + 3 for column in range(len(panel.columns)))
    return 1 + (labels + 3) * bool(labels) + columns


def _table(panel: CellTable) -> Table:
    table = Table(
        box=box.SQUARE,
        show_lines=True,
        show_header=any(panel.columns),
    )
    has_labels = any(label for label, _ in panel.rows)
    if has_labels:
        table.add_column(Text(panel.corner), overflow="fold")
    for label in panel.columns:
        table.add_column(Text(label), justify="center", overflow="fold")
    for label, cells in panel.rows:
        row = [Text(cell.text, style=colour_style(cell.colour)) for cell in cells]
        table.add_row(*([Text(label)] if has_labels else []), *row)
    return table


def colour_style(colour: int) -> str:
    """Return the style of a group; -1: of none."""
    return "" if colour < 0 else _COLOURS[colour % len(_COLOURS)]
