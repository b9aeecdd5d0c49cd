"""Decompose a run of array items, in C order, into boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]  # first and end of each dim


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Yield the boxes that the items low ≤ i < high of an array fill, in C order.

    Items 2 to 11 of a [4, 4]: the end of row 0, rows 1 to 1, the beginning of row 2::

        . . a a
        b b b b
        c c c .
    """
    if low >= high:
        return
    if not shape:
        yield ()
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, end = -(-low // row), high // row  # of the whole rows
    cuts = [(low, high)] if first > end else [(low, first * row), (end * row, high)]
    head, *tail = [
        [((r, r + 1), *box) for box in boxes(inner, a - r * row, b - r * row)]
        for a, b in cuts
        for r in (a // row,)
    ]
    yield from head
    if first < end:
        yield ((first, end), *((0, size) for size in inner))
    for more in tail:
        yield from more
