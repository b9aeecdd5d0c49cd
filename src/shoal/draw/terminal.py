"""A picture as text for a terminal, with colours where the terminal has them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.draw.picture import Panel, Picture

__all__ = ["colour_style", "plain", "render", "to_text"]

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


def render(picture: Picture, width: int | None = None) -> RenderableType:
    """Return what a `rich` console prints.

    Args:
      picture: what is seen.
      width: of the console, if columns that do not fit go below the others.
    """
    parts: list[RenderableType] = [Text(picture.title, style="bold")]
    for panel in picture.panels:  # a table's own title would be wrapped to the table's width
        parts += [Text(panel.title, style="italic")] if panel.title else []
        parts += [_table(piece) for piece in _pieces(panel, width)]
    parts += [Text(note, style="dim") for note in picture.notes]
    return Group(*parts)


def to_text(picture: Picture, width: int = 200) -> str:
    """Return plain text, at most `width` characters wide, without colours."""
    return plain(render(picture, width), width)


def plain(rendered: RenderableType, width: int) -> str:
    """Return what a console would print, as plain text without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(rendered)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _pieces(panel: Panel, width: int | None) -> Iterator[Panel]:
    """Yield panels of as many columns as fit beside the labels; of one, at least."""
    labels = max(cell_len(label) for label in (panel.corner, *(row[0] for row in panel.rows)))
    room = math.inf if width is None else width - 1 - (labels + 3) * bool(labels)
    begin, used = 0, 0.0
    for at, wide in enumerate(map(panel.width_of, range(len(panel.columns)))):
        if at > begin and used + wide + 3 > room:
            yield panel.part(begin, at)
            begin, used = at, 0.0
        used += wide + 3
    yield panel.part(begin, len(panel.columns))


def _table(panel: Panel) -> Table:
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
    """Return the style of what belongs to a group; -1: to none."""
    return "" if colour < 0 else _COLOURS[colour % len(_COLOURS)]
