"""Bar charts for a terminal and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.draw.media.svg import Canvas, text_width
from shoal.errors import raise_all

_LEAST = 10  # columns of a bar in a terminal
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDE, _HIGH = 360.0, 24.0


class Bar(NamedTuple):
    """One row: label, value and its text, as `Bar("model", 0.012, "12 ms")`."""

    label: str
    value: float
    text: str


def bar_text(value: float, most: float, columns: int) -> str:
    """Return a bar of this many columns at the maximum.

    >>> bar_text(3, 4, 10)
    '███████▌'
    """
    eighths = round(8 * columns * value / most) if most else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def bars_svg(title: str, rows: Sequence[tuple[str, float, str]], *, alone: bool = True) -> str:
    """Return the bars as SVG.

    Args:
      title: the line above.
      rows: label, value and its text, as in `Bar`.
      alone: with a heading and style sheet of its own.

    Raises:
      UsageError: a value is negative, or not a number.
    """
    bars = _bars(rows)
    canvas = Canvas()
    canvas.text(x=0, y=0, words=title, size=15, kind="head")
    left = max((text_width(bar.label, 13) for bar in bars), default=0.0) + 12
    most = max((bar.value for bar in bars), default=0.0)
    for index, bar in enumerate(bars):
        top = 16 + index * (_HIGH + 4)
        canvas.text(0, top + 16, bar.label, 13)
        canvas.rect(left, top=top + 4, wide=_WIDE, high=_HIGH - 8, kind="track", round_=3)
        if bar.value and most:
            canvas.rect(
                left,
                top=top + 4,
                wide=_WIDE * bar.value / most,
                high=_HIGH - 8,
                kind="bar",
                round_=3,
            )
        canvas.text(left + _WIDE + 12, top + 16, bar.text, 13)
    summary = "; ".join(f"{bar.label}: {bar.text}" for bar in bars)
    return canvas.svg(f"{title}. {summary}.", alone=alone)


def _bars(rows: Sequence[tuple[str, float, str]]) -> list[Bar]:
    bars = [Bar(*row) for row in rows]
    wrong = [b for b in bars if not (math.isfinite(b.value) and b.value >= 0)]
    raise_all("bars", [f"{bar.label!r} has {bar.value!r}" for bar in wrong])
    return bars
