"""SVG as plain text: a canvas that grows with its content."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from rich.cells import cell_len

from shoal.draw.media.palette import fill_class, style
from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, left_out

_LETTER = 0.6  # of the font size: an upper bound on the average width of system fonts
_MARGIN = 16.0


def number(value: float) -> str:
    """Format a coordinate, to a tenth.

    >>> number(3.0), number(-0.04), number(12.345)
    ('3', '0', '12.3')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def text_width(text: str, size: float) -> float:
    """Return an upper bound on the width of a text."""
    return cell_len(text) * size * _LETTER


class Canvas:
    """The elements drawn, and their bounding box."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left, self._top, self._right, self._bottom = math.inf, math.inf, -math.inf, -math.inf

    def cover(self, left: float, top: float, right: float, bottom: float) -> None:
        """Extend the bounding box."""
        self._left, self._top = min(self._left, left), min(self._top, top)
        self._right, self._bottom = max(self._right, right), max(self._bottom, bottom)

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the bounding box."""
        return self._left, self._top, self._right, self._bottom

    def add(self, part: str) -> None:
        """Add an element inside the bounding box."""
        self._parts.append(part)

    def rect(
        self, left: float, top: float, wide: float, high: float, kind: str, *, round_: float = 0
    ) -> None:
        """Add a box."""
        self.cover(left, top, left + wide, top + high)
        self.add(rect(left, top, wide, high, kind, round_=round_))

    def path(self, points: Iterable[tuple[float, float]], kind: str, title: str = "") -> None:
        """Add a polyline of segments, given as two points each."""
        points = list(points)
        self.cover(*points[0], *points[0])
        steps = []
        for index, (x, y) in enumerate(points):
            self.cover(x, y, x, y)
            steps.append(f"{'ML'[index % 2]}{number(x)} {number(y)}")
        path = f'<path class="{kind}" d="{"".join(steps)}"'
        self.add(f"{path}><title>{escape(title)}</title></path>" if title else f"{path}/>")

    def text(
        self, x: float, y: float, words: str, size: float = 12, kind: str = "", *, end: float = 0
    ) -> None:
        """Add a line of text from its left end; `end` is how much of it stands left of there."""
        if not words:
            return
        wide = text_width(words, size) * (1.1 if "head" in kind else 1)
        self.cover(x - wide * end, y - size, x + wide * (1 - end), y + 0.3 * size)
        self.add(text(x, y, words, size, kind, end=end))

    def svg(self, label: str, *, alone: bool = True) -> str:
        """Return the whole picture.

        Args:
          label: a description for screen readers.
          alone: whether it has a margin and a style sheet; a page has them for all.
        """
        margin = _MARGIN if alone else 2.0
        left, top = self._left - margin, self._top - margin
        wide, high = self._right - left + margin, self._bottom - top + margin
        box = " ".join(map(number, (left, top, wide, high)))
        sheet = f"<style>\n{style()}</style>\n" if alone else ""
        paper = rect(left, top, wide, high, kind="paper")
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="shoal" role="img" '
            f'aria-label="{escape(label)}" viewBox="{box}" width="{number(wide)}" '
            f'height="{number(high)}">\n{sheet}{paper}\n{body}\n</svg>\n'
        )


def rect(left: float, top: float, wide: float, high: float, kind: str, *, round_: float = 0) -> str:
    """Return a box."""
    corner = f' rx="{number(round_)}"' if round_ else ""
    place = f'x="{number(left)}" y="{number(top)}" width="{number(wide)}" height="{number(high)}"'
    return f'<rect class="{kind}" {place}{corner}/>'


def text(x: float, y: float, words: str, size: float, kind: str = "", *, end: float = 0) -> str:
    """Return a line of text."""
    anchor = {0: "", 0.5: ' text-anchor="middle"', 1: ' text-anchor="end"'}[end]
    shown = f' class="{kind}"' if kind else ""
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
    return f"<text{shown} {place}{anchor}>{escape(words)}</text>"


# ---- Picture of cells as SVG: blocks with labels, the same fill within a group.


_FONT, _LINE, _PAD = 12.0, 16.0, 10.0
_LEAST = 44.0  # minimum width of a block


def picture_svg(picture: Picture, *, alone: bool = True) -> str:
    """Return a picture as SVG; `alone`: with a heading and style sheet of its own."""
    canvas = Canvas()
    if alone:
        canvas.text(x=0, y=0, words=picture.title, size=15, kind="head")
    y = 18.0
    for panel in picture.panels:
        y = _panel(canvas, panel, y) + 18
    notes = [*picture.notes, *left_out(picture.panels)]
    for note in notes:
        canvas.text(x=0, y=y + 8, words=note, size=_FONT, kind="dim")
        y += 18
    label = " ".join(f"{line}." for line in (picture.title, *notes))
    return canvas.svg(label, alone=alone)


def _panel(canvas: Canvas, panel: CellTable, top: float) -> float:
    """Draw a panel; return its lower right corner."""
    if panel.title:
        top += _LINE
        canvas.text(x=0, y=top - 2, words=panel.title, size=_FONT, kind="dim")
        top += 6
    labels = [panel.corner, *(label for label, _ in panel.rows)]
    left = max(text_width(label, _FONT) for label in labels)
    left += _PAD if left else 0
    if any(panel.columns) or panel.corner:
        top += _LINE
        canvas.text(x=0, y=top - 4, words=panel.corner, size=_FONT, kind="dim")
    begin = [left]
    for column, label in enumerate(panel.columns):
        texts = [
            label,
            *(line for _, cells in panel.rows for line in cells[column].text.split("\n")),
        ]
        wide = max(_LEAST, 2 * _PAD + max(text_width(line, _FONT) for line in texts))
        canvas.text(x=begin[-1] + wide / 2, y=top - 4, words=label, size=_FONT, kind="dim", end=0.5)
        begin.append(begin[-1] + wide)
    for label, cells in panel.rows:
        high = _LINE * max(cell.text.count("\n") + 1 for cell in cells) + 2 * _PAD
        canvas.text(x=0, y=top + high / 2 + 4, words=label, size=_FONT, kind="dim")
        for column, cell in enumerate(cells):
            place = ", ".join(filter(None, (panel.title, label, panel.columns[column])))
            _cell(
                canvas, cell, place, (begin[column], top, begin[column + 1] - begin[column], high)
            )
        top += high
    return top


def _cell(canvas: Canvas, cell: Cell, place: str, box: tuple[float, float, float, float]) -> None:
    left, top, wide, high = box
    canvas.cover(left, top, left + wide, top + high)
    lines = cell.text.split("\n")
    middle = top + high / 2 - _LINE * (len(lines) - 1) / 2
    texts = [
        text(x=left + wide / 2, y=middle + _LINE * index, words=line, size=_FONT, kind="id")
        for index, line in enumerate(lines)
    ]
    if cell == GAP:
        canvas.add("".join(texts))
        return
    block = rect(
        left=left + 1.5,
        top=top + 1.5,
        wide=wide - 3,
        high=high - 3,
        kind=fill_class(cell.colour),
        round_=4,
    )
    title = escape("\n".join(filter(None, (place, cell.text))))
    canvas.add(f'<g class="chip"><title>{title}</title>{block}{"".join(texts)}</g>')
