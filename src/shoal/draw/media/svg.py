"""SVG as plain text: a canvas that grows with its content."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from rich.cells import cell_len

from shoal.draw.media.palette import style

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
        for at, (x, y) in enumerate(points):
            self.cover(x, y, x, y)
            steps.append(f"{'ML'[at % 2]}{number(x)} {number(y)}")
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
        paper = rect(left, top, wide, high, "paper")
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
