"""Compare the data of two checkpoints' leaves bit by bit, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.checkpoint.blocks.reader import Want, read_boxes
from shoal.checkpoint.store.opening import Checkpoint
from shoal.checkpoint.tree.dtypes import dtype_of

_BAND_BYTES = 64 << 20  # in memory at a time, per checkpoint
_BAND_COUNT = 4096

Array = np.ndarray[Any, Any]
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Pair(NamedTuple):
    """One leaf: its number in each checkpoint, and its shape and dtype."""

    numbers: tuple[int, int]
    shape: tuple[int, ...]  # as stored
    dtype: str


class _Difference:
    """The differences found in one leaf so far."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._count, self._largest = 0, math.nan
        self._place: list[int] = []
        self._shown = ("", "")

    def add(self, origin: Sequence[int], one: Array, other: Array) -> None:
        """Compare one box of the two."""
        differ = np.flatnonzero(_bits(one) != _bits(other))
        if not differ.size:
            return
        if not self._count:
            inner = np.unravel_index(differ[0], one.shape)
            self._place = [int(o + i) for o, i in zip(origin, inner, strict=True)]
            self._shown = str(one.reshape(-1)[differ[0]]), str(other.reshape(-1)[differ[0]])
        self._count += int(differ.size)
        self._largest = float(np.fmax(self._largest, _distance(one, other, differ)))

    def facts(self) -> dict[str, Any] | None:
        """Describe the differences; None if the data are equal."""
        if not self._count:
            return None
        total, far = math.prod(self._pair.shape), self._largest
        apart = "" if math.isnan(far) else f", at most {far:.6g} apart"
        return {
            "kind": "values",
            "count": self._count,
            "of": total,
            "at": self._place,
            "first": self._shown[0],
            "second": self._shown[1],
            "max_abs": far if math.isfinite(far) else None,
            "words": f"{self._count:,} of {total:,} values differ, first at {self._place}: "
            f"{self._shown[0]} | {self._shown[1]}{apart}",
        }


def compare(
    both: tuple[Checkpoint, Checkpoint], pairs: Sequence[Pair]
) -> list[dict[str, Any] | None]:
    """Return how the data of each leaf differ; None where they are equal."""
    differences = [_Difference(pair) for pair in pairs]
    for batch in _batches(pairs):
        read_of = []
        for side, checkpoint in enumerate(both):
            wants = [
                Want(pairs[n].numbers[side], origin, np.empty(extent, dtype_of(pairs[n].dtype)))
                for n, (origin, extent) in batch
            ]
            read_boxes(checkpoint, wants, most_bytes=_BAND_BYTES)
            read_of.append([want.out for want in wants])
        for (n, (origin, _)), one, other in zip(batch, *read_of, strict=True):
            differences[n].add(origin, one, other)
    return [difference.facts() for difference in differences]


def shape_of(checkpoint: Checkpoint, leaf_index: int) -> tuple[int, ...]:
    """Return the shape of a leaf's data; a per-process value is a row of bytes."""
    leaf = checkpoint.manifest.leaves[leaf_index]
    if leaf.kind != "per_process":
        return leaf.stored_shape
    return (sum(size for _, size in checkpoint.values_of(leaf_index).values()),)


def _batches(pairs: Sequence[Pair]) -> Iterator[list[tuple[int, Box]]]:
    """Yield boxes to read together, as (index of the pair, box)."""
    batch: list[tuple[int, Box]] = []
    num_bytes = 0
    for n, pair in enumerate(pairs):
        for box in _bands(pair):
            batch.append((n, box))
            num_bytes += math.prod(box[1]) * dtype_of(pair.dtype).itemsize
            if num_bytes >= _BAND_BYTES or len(batch) >= _BAND_COUNT:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _bands(pair: Pair) -> Iterable[Box]:
    """Return boxes (origin, extent) that tile a leaf, of bounded size where dim 0 allows it."""
    shape = pair.shape
    if not shape or not math.prod(shape):
        return [((0,) * len(shape), shape)]
    row_bytes = math.prod(shape[1:]) * dtype_of(pair.dtype).itemsize
    rows = max(1, _BAND_BYTES // row_bytes)
    rest = shape[1:]
    return (
        ((begin, *(0,) * len(rest)), (min(rows, shape[0] - begin), *rest))
        for begin in range(0, shape[0], rows)
    )


def _bits(array: Array) -> Array:
    """Return the bits of each element as one integer, or as bytes."""
    size = array.dtype.itemsize
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def _distance(one: Array, other: Array, differ: Array) -> float:
    """Return the largest absolute difference; nan if the values are not numbers."""
    try:
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        left, right = (array.reshape(-1)[differ].astype(wide) for array in (one, other))
    except (TypeError, ValueError):
        return math.nan
    with np.errstate(all="ignore"):
        return float(np.fmax.reduce(np.abs(left - right)))
