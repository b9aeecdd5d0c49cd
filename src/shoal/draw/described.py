"""A picture as a string that notebooks and interactive sessions display as the picture."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from shoal.draw.media.picture import Picture
from shoal.draw.media.picture_svg import picture_svg
from shoal.draw.media.terminal import to_text

_WIDTH = 200  # if the output is not a terminal


class Described(str):
    """The text of a picture; displayed in a notebook without quotes and escaped newlines."""

    __slots__ = ("_svg",)

    _svg: str

    def __new__(cls, text: str, svg: str = "") -> Described:
        self = super().__new__(cls, text)
        self._svg = svg
        return self

    def _repr_html_(self) -> str | None:
        return self._svg or None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython has one for all strings
        printer.text(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Described, (str(self), self._svg)


def described(picture: Picture) -> str:
    """Return a picture as text, as wide as the terminal; 200 columns without one."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if is_terminal else _WIDTH
    return Described(to_text(picture, width), picture_svg(picture))
