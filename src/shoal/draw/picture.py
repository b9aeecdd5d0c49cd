"""What a picture shows, before anybody decides how: panels of cells with labels.

Every drawing of shoal makes one `Picture`; `terminal` turns it into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from rich.cells import cell_len

__all__ = ["GAP", "Cell", "Panel", "Picture", "elide"]

T = TypeVar("T")


class Cell(NamedTuple):
    """One block of a panel. Cells with the same colour number belong together."""

    text: str
    colour: int = -1  # -1: none


GAP = Cell("…")


class Panel(NamedTuple):
    """A table of cells [rows][columns] with a label for each row and column."""

    title: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]

    def part(self, begin: int, end: int) -> Panel:
        """Return some of the columns, with all labels of rows."""
        rows = [(label, cells[begin:end]) for label, cells in self.rows]
        return self._replace(columns=self.columns[begin:end], rows=rows)

    def width_of(self, column: int) -> int:
        """Return how many letters wide a column is."""
        texts = [cells[column].text for _, cells in self.rows]
        lines = [self.columns[column], *(line for text in texts for line in text.split("\n"))]
        return max(map(cell_len, lines))


class Picture(NamedTuple):
    """Panels with a line above and lines below."""

    title: str
    panels: list[Panel]
    notes: list[str]


def elide(items: Sequence[T], limit: int, gap: T) -> list[T]:
    """Return the items, or, if they are more than `limit`, the first ones, a gap and the last.

    Example:
      >>> elide([0, 1, 2, 3, 4, 5], 4, gap=-1)
      [0, 1, -1, 5]
    """
    if len(items) <= limit:
        return list(items)
    head = limit // 2
    return [*items[:head], gap, *items[len(items) - (limit - head - 1) :]]
