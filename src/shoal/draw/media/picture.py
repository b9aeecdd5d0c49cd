"""The content of a picture, independent of the medium: panels of cells with labels.

Every drawing of shoal makes one `Picture`; `terminal` turns it into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from rich.cells import cell_len

T = TypeVar("T")


class Cell(NamedTuple):
    """One block of a panel. Cells with the same colour number belong together."""

    text: str
    colour: int = -1  # -1: none


GAP = Cell("…")


class CellTable(NamedTuple):
    """A table of cells [rows][columns] with a label for each row and column."""

    title: str
    corner: str
    columns: list[str]  # "…": some are left out there
    rows: list[tuple[str, list[Cell]]]
    num_rows: int = 0  # in all; 0: these
    num_columns: int = 0

    def ends(self, count: int) -> CellTable:
        """Return this many columns from both ends, with a gap for the omitted ones."""
        own = [column for column, label in enumerate(self.columns) if label != "…"]
        total = self.num_columns or len(own)
        kept: list[int | None] = [*own[: (count + 1) // 2], *own[len(own) - count // 2 :]]
        if count < total:
            kept.insert((count + 1) // 2, None)
        rows = [
            (label, [GAP if column is None else cells[column] for column in kept])
            for label, cells in self.rows
        ]
        columns = ["…" if column is None else self.columns[column] for column in kept]
        return self._replace(columns=columns, rows=rows, num_columns=total)

    def width_of(self, column: int) -> int:
        """Return the width of a column in characters."""
        texts = [cells[column].text for _, cells in self.rows]
        lines = [self.columns[column], *(line for text in texts for line in text.split("\n"))]
        return max(map(cell_len, lines))


class Picture(NamedTuple):
    """Panels with a line above and lines below."""

    title: str
    panels: list[CellTable]
    notes: list[str]


def left_out(panels: Sequence[CellTable]) -> list[str]:
    """Return the line about omitted rows and columns, if any."""
    notes = []
    for panel in panels:
        shown = (
            ("rows", sum(label != "…" for label, _ in panel.rows), panel.num_rows),
            ("columns", sum(label != "…" for label in panel.columns), panel.num_columns),
        )
        parts = [f"{count} of {total} {what}" for what, count, total in shown if count < total]
        if parts:
            notes.append(f"{' and '.join(parts)} are shown")
    return list(dict.fromkeys(notes))


def elide(items: Sequence[T], limit: int, gap: T) -> list[T]:
    """Return the items, or if there are more than `limit`, the first ones, a gap and the last.

    Example:
      >>> elide([0, 1, 2, 3, 4, 5], 4, gap=-1)
      [0, 1, -1, 5]
    """
    if len(items) <= limit:
        return list(items)
    head = limit // 2
    return [*items[:head], gap, *items[len(items) - (limit - head - 1) :]]
