"""Picture of cells as SVG: blocks with labels, the same fill within a group."""

from __future__ import annotations

from html import escape

from shoal.draw.media.palette import fill_class
from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, left_out
from shoal.draw.media.svg import Canvas, rect, text, text_width

_FONT, _LINE, _PAD = 12.0, 16.0, 10.0
_LEAST = 44.0  # minimum width of a block


def picture_svg(picture: Picture, *, alone: bool = True) -> str:
    """Return a picture as SVG; `alone`: with a heading and style sheet of its own."""
    canvas = Canvas()
    if alone:
        canvas.text(0, 0, picture.title, 15, "head")
    y = 18.0
    for panel in picture.panels:
        y = _panel(canvas, panel, y) + 18
    notes = [*picture.notes, *left_out(picture.panels)]
    for note in notes:
        canvas.text(0, y + 8, note, _FONT, "dim")
        y += 18
    label = " ".join(f"{line}." for line in (picture.title, *notes))
    return canvas.svg(label, alone=alone)


def _panel(canvas: Canvas, panel: CellTable, top: float) -> float:
    """Draw a panel; return its lower right corner."""
    if panel.title:
        top += _LINE
        canvas.text(0, top - 2, panel.title, _FONT, "dim")
        top += 6
    labels = [panel.corner, *(label for label, _ in panel.rows)]
    left = max(text_width(label, _FONT) for label in labels)
    left += _PAD if left else 0
    if any(panel.columns) or panel.corner:
        top += _LINE
        canvas.text(0, top - 4, panel.corner, _FONT, "dim")
    begin = [left]
    for at, label in enumerate(panel.columns):
        texts = [label, *(line for _, cells in panel.rows for line in cells[at].text.split("\n"))]
        wide = max(_LEAST, 2 * _PAD + max(text_width(line, _FONT) for line in texts))
        canvas.text(begin[-1] + wide / 2, top - 4, label, _FONT, "dim", end=0.5)
        begin.append(begin[-1] + wide)
    for label, cells in panel.rows:
        high = _LINE * max(cell.text.count("\n") + 1 for cell in cells) + 2 * _PAD
        canvas.text(0, top + high / 2 + 4, label, _FONT, "dim")
        for at, cell in enumerate(cells):
            place = ", ".join(filter(None, (panel.title, label, panel.columns[at])))
            _cell(canvas, cell, place, (begin[at], top, begin[at + 1] - begin[at], high))
        top += high
    return top


def _cell(canvas: Canvas, cell: Cell, place: str, box: tuple[float, float, float, float]) -> None:
    left, top, wide, high = box
    canvas.cover(left, top, left + wide, top + high)
    lines = cell.text.split("\n")
    middle = top + high / 2 - _LINE * (len(lines) - 1) / 2
    words = [
        text(left + wide / 2, middle + _LINE * at, line, _FONT, "id")
        for at, line in enumerate(lines)
    ]
    if cell == GAP:
        canvas.add("".join(words))
        return
    block = rect(left + 1.5, top + 1.5, wide - 3, high - 3, fill_class(cell.colour), round_=4)
    title = escape("\n".join(filter(None, (place, cell.text))))
    canvas.add(f'<g class="chip"><title>{title}</title>{block}{"".join(words)}</g>')
