"""A page of a report: a stream's style, and lines of spans laid out in its width."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shoal.runtime.failures.shortening import breaks, columns, shortened

LINES = 24  # of a report
_GAP = "   "  # between columns
_CODES = {"failed": "1;31", "cause": "1", "quiet": "2"}
WORD_CODES = {"interrupted": "1;33", "preempted": "1;32"}


class Span(NamedTuple):
    """A piece of a line, and what it is: "plain", "failed", "cause" or "quiet"."""

    text: str
    role: str = "plain"


Line = list[Span]


class Style(NamedTuple):
    """How a stream shows a report."""

    width: int = 80
    colour: bool = False
    ascii: bool = False

    @classmethod
    def for_stream(
        cls, is_terminal: bool, columns: int, env: Mapping[str, str], encoding: str | None
    ) -> Style:
        """Return the style for a stream.

        Args:
          is_terminal: is it one?
          columns: its width now; unused if it is none.
          env: COLUMNS, CI, NO_COLOR, FORCE_COLOR and TERM are read.
          encoding: of the stream; unknown is taken for ASCII.

        >>> Style.for_stream(False, 0, {"CI": "true"}, "utf-8")
        Style(width=120, colour=False, ascii=False)
        """
        wanted = env.get("COLUMNS", "")
        width = 120 if env.get("CI") else 80
        if is_terminal:
            width = min(max(columns, 60), 120)
        elif len(wanted) < 4 and wanted.isascii() and wanted.isdigit() and 60 <= int(wanted) <= 200:
            width = int(wanted)
        is_forced = env.get("FORCE_COLOR", "0") not in ("", "0")
        is_wanted = is_terminal and env.get("TERM") != "dumb"
        colour = (is_wanted or is_forced) and not env.get("NO_COLOR")
        return cls(width, colour, not _is_utf8(encoding))

    @property
    def dots(self) -> str:
        """The mark of what is left out."""
        if self.ascii:
            return "..."
        return "…"


def _is_utf8(encoding: str | None) -> bool:
    try:
        return codecs.lookup(encoding or "ascii").name.startswith("utf-8")
    except LookupError:
        return False


class Shown(NamedTuple):
    """How much a report shows of each part."""

    programs: int = 2
    output: int = 3
    advice: int = 2
    others: int = 3
    frames: int = 5
    message: int = 5
    groups: int = 4
    causes: int = 2


class Page(NamedTuple):
    """Where lines go: a style, an indentation, and how much is shown."""

    style: Style
    limits: Shown
    indent: int = 2

    @property
    def room(self) -> int:
        """Columns of a line after the indentation."""
        return self.style.width - self.indent

    def deeper(self, by: int = 2) -> Page:
        """Return the page of a part that is indented more."""
        return self._replace(indent=self.indent + by)

    def text(self, text: str, role: str = "plain", most: int = LINES) -> list[Line]:
        """Return a text in at most that many lines; those after the first are indented more."""
        text = shortened(text, most * self.room, self.style.dots)
        lines = self.spans(Span(text, role))
        if len(lines) > most:
            lines = self.spans(Span(shortened(text, most * (self.room - 8), self.style.dots), role))
        return lines[:most]

    def spans(self, *spans: Span) -> list[Line]:
        """Return a line of spans, wrapped."""
        return wrapped([Span(" " * self.indent), *spans], self.style.width, self.indent + 2)

    def rows(
        self,
        heads: Sequence[Sequence[str]],
        last: Callable[[int], Sequence[str]],
        *,
        label_at: int = 0,
        least: int = 16,
    ) -> list[list[Line]]:
        """Return a table, as lines for each row, its columns three spaces apart.

        Args:
          heads: the cells of each row but the last, equally many.
          last: from the columns that remain to the last cell of each row; a wider one is wrapped.
          label_at: the cell with the label, which is bold in the first row.
          least: columns of the last cell; if fewer remain, it goes on a line of its own.
        """
        widths = [max(columns(row[i]) for row in heads) for i in range(len(heads[0]))]
        used = sum(width + len(_GAP) for width in widths)
        is_narrow = self.room - used < least
        if is_narrow:
            cells = last(self.room - 4)
        else:
            cells = last(self.room - used)
        table: list[list[Line]] = []
        for row, cell in zip(heads, cells, strict=True):
            line = [Span(" " * self.indent)]
            for index, (head, width) in enumerate(zip(row, widths, strict=True)):
                role = "plain"
                if index == label_at and not table:
                    role = "cause"
                padding = " " * (width - columns(head)) + _GAP
                line += [Span(head, role), Span(padding)]
            if is_narrow:
                table.append([_cut(line, 0, self.style.width), *self.deeper(4).text(cell)])
            else:
                indent = self.indent + used
                first, *more = wrapped([Span(cell)], self.style.width - indent, 0)
                under = ([Span(" " * indent), *line] for line in more)
                table.append([[*line, *first], *under])
        return table


def wrapped(line: Line, width: int, hanging: int, is_hard: bool = True) -> list[Line]:
    """Return a line as lines of at most `width` columns: see `breaks`."""
    text = "".join(span.text for span in line)
    parts = breaks(text, width, hanging, is_hard=is_hard)
    lines = [_cut(line, start, end) for start, end in parts]
    return [lines[0], *([Span(" " * hanging), *line] for line in lines[1:])]


def _cut(line: Line, start: int, end: int) -> Line:
    """Return the spans of a slice of a line."""
    spans, offset = [], 0
    for text, role in line:
        piece = text[max(0, start - offset) : max(0, end - offset)]
        offset += len(text)
        if piece:
            spans.append(Span(piece, role))
    return spans


def painted(line: Line, style: Style) -> str:
    """Return a line as printed."""
    text = "".join(span.text for span in line)
    if not style.colour:
        return text.rstrip(" ")
    kept, painted = len(text.rstrip(" ")), ""
    for piece, role in _cut(line, 0, kept):
        code = _CODES.get(role)
        if role == "failed":
            code = WORD_CODES.get(piece, code)
        if code:
            piece = f"\x1b[{code}m{piece}\x1b[0m"
        painted += piece
    return painted
