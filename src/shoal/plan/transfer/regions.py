"""The data that must move between two layouts: boxes of the array, their holders and receivers.

Along each dim the shards of the source and those of the target cut the array into *pieces*; a piece
lies in one shard of each. A region is one piece of every dim: the intersection of one shard of the
source and one of the target. The devices of a shard are treated as one group; pairs of devices are
never enumerated.

    source: 3 shards   0 0 0 1 1 1 2 2
    target: 2 shards   0 0 0 0 1 1 1 1
    pieces             a a a b c c d d
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.plan.layout import Layout
from shoal.plan.shards import Box
from shoal.plan.transfer.checks import Move, checked_move, terms_of

__all__ = ["Pieces", "Region", "Regions", "regions"]

IntArray = NDArray[np.int64]

_AT_A_TIME = 1 << 14  # regions converted to Python values at a time


class Region(NamedTuple):
    """A box of the array that some devices need and do not hold."""

    box: Box
    """First and end of each dim."""
    terms: tuple[tuple[int, ...], ...]
    """The holders: one row of device ids, replicas of each other, in mesh order. Where a
    reduction is pending, a row for each of its terms: one device of every row must contribute."""
    needers: tuple[int, ...]
    """The ids of the devices that need it and do not hold it, in mesh order."""

    @property
    def num_elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(end - first for first, end in self.box)


class Pieces(NamedTuple):
    """The pieces of one dim, in order [pieces]."""

    first: IntArray
    end: IntArray
    source: IntArray  # the number of the source's shard along this dim
    target: IntArray


@dataclass(frozen=True, eq=False, repr=False)
class Regions(Sequence[Region]):
    """All regions to move, ordered by box: a sequence of `Region`, and the same as arrays.

    Memory grows with the devices and, by one number each, with the regions: between 4,096 shards
    and 4,096 others there are up to 16.8 million of them.
    """

    dims: tuple[Pieces, ...]
    """The pieces of each dim."""
    source_counts: tuple[int, ...]
    """The number of shards of each dim in the source."""
    target_counts: tuple[int, ...]
    """The number of shards of each dim in the target."""
    holders: IntArray
    """The devices of each shard of the source [source shards, terms, replicas]."""
    wanted: IntArray
    """The devices of each shard of the target [target shards, replicas]."""
    own: IntArray
    """The cell of which each of these holds a value, or a term, in the source; -1: none
    [target shards, replicas]."""
    cells: IntArray
    """The number of each region in the grid of pieces, ascending [regions]."""

    def __len__(self) -> int:
        return len(self.cells)

    @overload
    def __getitem__(self, index: int) -> Region: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Region, ...]: ...
    def __getitem__(self, index: int | slice) -> Region | tuple[Region, ...]:
        picked = np.atleast_1d(self.cells[index])
        picked_values = self._values(picked)
        return tuple(picked_values) if isinstance(index, slice) else next(picked_values)

    def __iter__(self) -> Iterator[Region]:
        for begin in range(0, len(self.cells), _AT_A_TIME):
            yield from self._values(self.cells[begin : begin + _AT_A_TIME])

    def __repr__(self) -> str:
        word = "region" if len(self) == 1 else "regions"
        return f"Regions({len(self)} {word} of {sum(self.num_elements.tolist())} elements)"

    @property
    def kept(self) -> IntArray:
        """The cell whose values each device of `wanted` holds already, or -1."""
        return self.own if self.holders.shape[1] == 1 else np.full_like(self.own, -1)

    @property
    def first(self) -> IntArray:
        """First index of each region [regions, rank]."""
        return _columns([dim.first[pieces] for dim, pieces in self._places(self.cells)], self.cells)

    @property
    def end(self) -> IntArray:
        """One past its last index [regions, rank]."""
        return _columns([dim.end[pieces] for dim, pieces in self._places(self.cells)], self.cells)

    @property
    def num_elements(self) -> IntArray:
        """Number of elements in each region [regions]."""
        return self.elements_of(self.cells)

    def elements_of(self, cells: IntArray) -> IntArray:
        """Return the number of elements of each of these cells, in their shape; 0 for -1."""
        count = np.where(cells < 0, 0, 1)
        for dim, pieces in self._places(np.maximum(cells, 0)):
            count *= np.append(dim.end - dim.first, 0)[pieces]  # a dim of size 0 has no pieces
        return count

    def box_of(self, cell: int) -> Box:
        """Return the box of one cell."""
        places = self._places(np.asarray(cell))
        return tuple((int(dim.first[piece]), int(dim.end[piece])) for dim, piece in places)

    @property
    def source_shards(self) -> IntArray:
        """The row of `holders` that holds each region [regions]."""
        return self._shards(self.cells)[0]

    @property
    def target_shards(self) -> IntArray:
        """The row of `wanted` that needs it, but for those devices that keep it [regions]."""
        return self._shards(self.cells)[1]

    def _places(self, cells: IntArray) -> list[tuple[Pieces, IntArray]]:
        """Return for each dim its pieces, and the piece of each cell."""
        numbers = _digits(cells, [len(dim.first) for dim in self.dims])
        return list(zip(self.dims, numbers, strict=True))

    def _shards(self, cells: IntArray) -> tuple[IntArray, IntArray]:
        places = self._places(cells)
        return (
            _number([dim.source[pieces] for dim, pieces in places], self.source_counts, len(cells)),
            _number([dim.target[pieces] for dim, pieces in places], self.target_counts, len(cells)),
        )

    def _values(self, cells: IntArray) -> Iterator[Region]:
        places = self._places(cells)
        first = _columns([dim.first[pieces] for dim, pieces in places], cells).tolist()
        end = _columns([dim.end[pieces] for dim, pieces in places], cells).tolist()
        source, target = self._shards(cells)
        missing = (self.kept[target] != cells[:, None]).tolist()
        wanted = self.wanted[target].tolist()
        terms = self.holders[source].tolist()
        for row in range(len(cells)):
            pairs = zip(wanted[row], missing[row], strict=True)
            yield Region(
                tuple(zip(first[row], end[row], strict=True)),
                tuple(map(tuple, terms[row])),
                tuple(device for device, needs in pairs if needs),
            )


@local
def regions(source: Layout, target: Layout, shape: Sequence[int]) -> Regions:
    """Return the boxes that must move to bring an array from one layout to another.

    Local.

    The meshes may differ in shape, in the order of their ids, and in their devices, which may
    coincide, overlap or be disjoint; a device is identified by its id. Uneven dims are cut by
    XLA's rule ("ceil" of `shards`). It is impossible that two regions overlap, that a region is
    empty or needed by no device, or that an element which a device needs and does not hold is
    missing from the regions that list the device as needing it.

    Where a reduction is pending in the source, no device holds a value: a region then has one
    row of devices per term, all terms must contribute, and every device of the target needs it,
    including those that hold a term.

    Args:
      source: the layout of the array; it may be partial, by any reduction.
      target: the layout to move it to.
      shape: the shape of the whole array [rank].

    Raises:
      UsageError: the ranks differ, the shape does not fit, the target is partial, or the array has
        more than 2^62 elements; all in one message.

    Example:
      >>> from shoal import Mesh
      >>> mesh = Mesh({"x": 2, "y": 2})
      >>> len(regions(Layout(mesh, "x"), Layout(mesh, ("x", "y")), (8,)))
      0
      >>> for region in regions(Layout(mesh, "x"), Layout(mesh, "y"), (8,)):
      ...     print(region.box, region.terms, region.needers)
      ((0, 4),) ((0, 1),) (2,)
      ((4, 8),) ((2, 3),) (1,)
    """
    return regions_of(checked_move("regions", source, target, shape))


def regions_of(move: Move) -> Regions:
    """Return the regions of a move that has been checked."""
    source_counts, target_counts = _counts(move.source), _counts(move.target)
    dims = tuple(map(_pieces, move.shape, source_counts, target_counts))
    holders = _devices_of_shards(move.source)
    wanted = _devices_of_shards(move.target)
    wanted = wanted.reshape(len(wanted), -1)
    own = np.full(wanted.shape, -1, np.int64)
    cells = np.arange(math.prod(len(dim.first) for dim in dims), dtype=np.int64)
    if len(cells):
        _, held_at, wanted_at = np.intersect1d(
            holders, wanted, assume_unique=True, return_indices=True
        )
        old = _digits(held_at // (holders.size // len(holders)), source_counts)
        new = _digits(wanted_at // wanted.shape[1], target_counts)
        own.ravel()[wanted_at] = _common_cells(dims, old, new, len(held_at))
    if holders.shape[1] == 1:
        held, counts = np.unique(own, return_counts=True)
        useless = held[(counts == wanted.shape[1]) & (held >= 0)]
        cells = np.delete(cells, useless)
    return Regions(dims, source_counts, target_counts, holders, wanted, own, cells)


def _counts(layout: Layout) -> tuple[int, ...]:
    """Return the number of shards of each dim."""
    return tuple(map(layout.num_shards, range(layout.rank)))


def _devices_of_shards(layout: Layout) -> IntArray:
    """Return the devices that hold each shard, in mesh order [shards, terms, replicas]."""
    names, pending = layout.mesh.axis_names, terms_of(layout)
    splits = list(chain(*layout.axes_of_dims))
    order = [*splits, *pending, *(n for n in names if n not in splits and n not in pending)]
    ids = layout.mesh.device_ids.transpose([names.index(axis) for axis in order])
    terms = math.prod(layout.mesh.axes[axis] for axis in pending)
    return ids.reshape(math.prod(_counts(layout)), terms, -1)


def _starts(size: int, count: int) -> IntArray:
    """Return the starts of the non-empty shards of a dim: 9 in 8 shards is 2, 2, 2, 2, 1."""
    return np.arange(0, size, max(1, -(-size // count)), dtype=np.int64)


def _pieces(size: int, source_count: int, target_count: int) -> Pieces:
    source, target = _starts(size, source_count), _starts(size, target_count)
    first = np.union1d(source, target)
    end = np.append(first[1:], size)[: len(first)]
    own = [np.searchsorted(starts, first, "right") - 1 for starts in (source, target)]
    return Pieces(first, end, *own)


def _common_cells(
    dims: Sequence[Pieces], source: Sequence[IntArray], target: Sequence[IntArray], count: int
) -> IntArray:
    """Return the cell that shards of both layouts have in common, or -1.

    Args:
      source: the shard of the source along each dim [dims][count].
      target: that of the target.
    """
    cells, is_met = np.zeros(count, np.int64), np.ones(count, np.bool_)
    for dim, old, new in zip(dims, source, target, strict=True):
        begin = np.maximum(np.searchsorted(dim.source, old), np.searchsorted(dim.target, new))
        pieces = np.minimum(begin, len(dim.first) - 1)
        is_met &= (dim.source[pieces] == old) & (dim.target[pieces] == new)
        cells = cells * len(dim.first) + pieces
    return np.where(is_met, cells, -1)


def _digits(numbers: IntArray, counts: Sequence[int]) -> list[IntArray]:
    """Split row-major numbers into one for each dim: 5 over counts (2, 3) is 1 and 2."""
    digits = []
    for count in reversed(counts):
        numbers, digit = np.divmod(numbers, max(count, 1))
        digits.append(digit)
    return digits[::-1]


def _number(digits: Sequence[IntArray], counts: Sequence[int], length: int) -> IntArray:
    """Join what `_digits` splits."""
    numbers = np.zeros(length, np.int64)
    for digit, count in zip(digits, counts, strict=True):
        numbers = numbers * count + digit
    return numbers


def _columns(rows: Sequence[IntArray], like: IntArray) -> IntArray:
    """Stack one row for each dim into [regions, rank]; an array of rank 0 has none."""
    return np.stack(rows, axis=1) if rows else np.empty((len(like), 0), np.int64)
