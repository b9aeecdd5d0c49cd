"""Tables of `shoal ckpt` and `plan`: drawn on a terminal, plain columns in a pipe."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print a table. Columns named in `right` (separated by spaces) are right-aligned."""
    numbers = right.split()
    rows = [[safe(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            cells = [
                cell.rjust(width) if name in numbers else cell.ljust(width)
                for name, cell, width in zip(head, row, widths, strict=True)
            ]
            print("  ".join(cells).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in head:
        is_number = name in numbers  # names and values must not be truncated
        table.add_column(Text(name), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_json(value: Any) -> None:
    """Print strictly valid JSON: NaN and infinities become text."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def print_lines(name: str, text: str) -> None:
    """Print a text about `name`: its first line, and the others indented."""
    for index, line in enumerate(text.split("\n")):
        print(safe(f"  {line}" if index else f"{name}: {line}"))


def safe(text: str) -> str:
    r"""Escape control and unencodable characters in an untrusted text.

    >>> safe("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def short(value: Any, most: int = 40) -> str:
    """Return a value of a tree, shortened.

    >>> short(1.5), short("a" * 50, 10)
    ('1.5', "'aaaaaaaa…")
    """
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
