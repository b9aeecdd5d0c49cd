"""A picture as text for a terminal, with colours where the terminal has them."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.draw.picture import Panel, Picture

__all__ = ["plain", "render", "to_text"]

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


def render(picture: Picture) -> RenderableType:
    """Return what a `rich` console prints."""
    parts: list[RenderableType] = [Text(picture.title, style="bold")]
    for panel in picture.panels:  # a table's own title would be wrapped to the table's width
        parts += [Text(panel.title, style="italic")] if panel.title else []
        parts.append(_table(panel))
    parts += [Text(note, style="dim") for note in picture.notes]
    return Group(*parts)


def to_text(picture: Picture, width: int = 200) -> str:
    """Return plain text, at most `width` characters wide, without colours."""
    return plain(render(picture), width)


def plain(rendered: RenderableType, width: int) -> str:
    """Return what a console would print, as plain text without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(rendered)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _table(panel: Panel) -> Table:
    table = Table(
        box=box.SQUARE,
        show_lines=True,
        show_header=any(panel.columns),
    )
    has_labels = any(label for label, _ in panel.rows)
    if has_labels:
        table.add_column(Text(panel.corner), no_wrap=True)
    for label in panel.columns:
        table.add_column(Text(label), justify="center", no_wrap=True)
    for label, cells in panel.rows:
        row = [Text(cell.text, style=_style(cell.colour)) for cell in cells]
        table.add_row(*([Text(label)] if has_labels else []), *row)
    return table


def _style(colour: int) -> str:
    return "" if colour < 0 else _COLOURS[colour % len(_COLOURS)]
