"""The saved position of a feed, and whether another feed can continue from it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from shoal.arguments import integer
from shoal.errors import UsageError

_NAMES = ("order", "rows")
_MOST_MARK = 0x7FFF_FFFF  # an int32: it may be placed on devices


def mark_of(order: str) -> int:
    """Return a positive number that identifies an order of rows."""
    return (zlib.crc32(order.encode()) & _MOST_MARK) or 1


def position_of(rows: int, mark: int) -> dict[str, int]:
    """Return the state to save.

    Args:
      rows: number of rows delivered, of all processes.
      mark: of the order of rows read by number; else 0.
    """
    return {"order": mark, "rows": rows}


def rows_before(start: Any, mark: int) -> int:
    """Return how many rows were delivered before, from `start=`.

    Args:
      start: a number of rows, or the result of `position_of`, perhaps restored from a checkpoint.
      mark: identifies the order of the feed that is to continue.

    Raises:
      UsageError: it is neither, or was saved by a feed of another order.
    """
    if not isinstance(start, Mapping):
        return integer("feed", "start", start, least=0)
    if sorted(start) != [*_NAMES]:
        raise UsageError(
            f"feed: start={start!r} must be a number of rows, or what the state() of a feed "
            'returned: {"order": …, "rows": …}'
        )
    was, rows = (integer("feed", f"start[{name!r}]", start[name], least=0) for name in _NAMES)
    if rows and was != mark:
        raise UsageError(
            f"feed: start= was saved by a feed of {_words(was)}; this one is of {_words(mark)}\n"
            f"give it the order of that epoch, or start={rows} to continue anyway"
        )
    return rows


def _words(mark: int) -> str:
    return f"rows by number in order {mark:08x}" if mark else "an iterable"
