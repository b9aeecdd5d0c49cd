"""Scatter bytes of a file into a strided box in memory, some of the bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_WIDE_BYTES = 64  # shorter rows are copied by elements wider than a byte


class ByteBox(NamedTuple):
    """A box of bytes with source and target strides; the last dim is contiguous in both."""

    shape: tuple[int, ...]
    source: tuple[int, ...]  # source strides
    target: tuple[int, ...]  # target strides


def box_of(
    extent: Sequence[int], source: Sequence[int], target: Sequence[int], item_bytes: int
) -> ByteBox:
    """Return the box of elements with these strides (bytes), in as few dims as possible.

    A box of [4, 8] float32 that is contiguous in both is one row of 128 bytes.
    """
    shape, outer_source, outer_target = [item_bytes], [1], [1]
    dims = zip(reversed(extent), reversed(source), reversed(target), strict=True)
    for size, from_, to in dims:
        if size == 1:
            continue
        if from_ == shape[0] * outer_source[0] and to == shape[0] * outer_target[0]:
            shape[0] *= size
        else:
            shape.insert(0, size)
            outer_source.insert(0, from_)
            outer_target.insert(0, to)
    return ByteBox(tuple(shape), tuple(outer_source), tuple(outer_target))


def scatter(box: ByteBox, source: Bytes, begin: int, target: Bytes, into: int) -> None:
    """Copy the bytes of `source` that belong to a box whose first byte is at offset `begin`.

    `begin` may be negative. Bytes of the box outside `source` are left alone. `into`: offset of the
    box's first byte in the target.
    """
    size, step = box.shape[0], box.source[0]
    if len(box.shape) == 1:
        low, high = max(0, -begin), min(size, len(source) - begin)
        if low < high:
            target[into + low : into + high] = source[begin + low : begin + high]
        return
    inner = sum((n - 1) * stride for n, stride in zip(box.shape[1:], box.source[1:], strict=True))
    inner += 1  # one past its last byte, from its first
    whole = max(0, -(begin // step))  # the first row that begins inside `source`
    past = min(size, (len(source) - inner - begin) // step + 1)  # rows past it end outside
    if whole < past:
        part = ByteBox((past - whole, *box.shape[1:]), box.source, box.target)
        _copy(part, source, begin + whole * step, target, into + whole * box.target[0])
    else:
        past = whole  # at most one partial row on each side, or one longer than `source`
    first = max(0, (-begin - inner) // step + 1)
    last = min(size, -((begin - len(source)) // step))
    rest = ByteBox(box.shape[1:], box.source[1:], box.target[1:])
    for row in (*range(first, min(whole, last)), *range(max(past, first), last)):
        scatter(rest, source, begin + row * step, target, into + row * box.target[0])


def _copy(box: ByteBox, source: Bytes, begin: int, target: Bytes, into: int) -> None:
    """Copy a box that lies inside both buffers."""
    wide = _width(box, begin, into) if box.shape[-1] < _WIDE_BYTES else 1
    shape = (*box.shape[:-1], box.shape[-1] // wide)
    dtype = f"u{wide}"
    from_ = np.ndarray(shape, dtype, source.data, begin, (*box.source[:-1], wide))
    to = np.ndarray(shape, dtype, target.data, into, (*box.target[:-1], wide))
    to[...] = from_


def _width(box: ByteBox, begin: int, into: int) -> int:
    """Return the widest element that divides all row lengths and offsets."""
    places = [box.shape[-1], begin, into, *box.source[:-1], *box.target[:-1]]
    return next(wide for wide in (8, 4, 2, 1) if all(place % wide == 0 for place in places))
