"""Single sends as permutes of equal blocks, run by one program on all devices of a move.

In a permute all participating devices send equally many bytes. The boxes of a plan of single sends
need not be equal; but if both layouts split every dim evenly, all boxes consist of equal *blocks*:
along a dim of 12 in tiles of 3 and of 4 a block has length 1. So a round of sends is as many
permutes as its largest box has blocks, without padding.

    12 in tiles of 3   0 0 0 1 1 1 2 2 2 3 3 3
    12 in tiles of 4   0 0 0 0 1 1 1 1 2 2 2 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.layout import Layout, shard_of
from shoal.plan.shards import Box
from shoal.plan.transfer.blocks import tiles_of
from shoal.plan.transfer.point_to_point import PointToPoint

MOST_PERMUTES = 1024  # of one program, whose compilation then takes seconds

IntArray = NDArray[np.int64]

Place = tuple[int, ...]  # first index of a block, in the whole array


class Permute(NamedTuple):
    """One permute as each device sees it: it writes one block of its shard of the target.

    Places are first indices; devices are positions in `Permutes.devices` [devices, …].
    """

    sends: tuple[tuple[int, int], ...]  # (sender, receiver); none where blocks are only copied
    reads: IntArray  # the block that it sends, in its shard of the source [devices, rank]
    passes_on: NDArray[np.bool_]  # it reads that in its shard of the target: it received it before
    copies: NDArray[np.bool_]  # it receives none, and writes a block that it keeps
    keeps: IntArray  # which, in its shard of the source [devices, rank]
    writes: IntArray  # where the block goes in its shard of the target [devices, rank]
    is_idle: NDArray[np.bool_]  # it has such a shard, but writes nothing now


class Permutes(NamedTuple):
    """A move as permutes among the devices of both layouts."""

    devices: tuple[int, ...]  # their ids, ascending
    side: tuple[int, ...]  # of a block
    rounds: tuple[Permute, ...]


def side_of(source: Layout, target: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sides of the blocks of which all boxes of a move consist.

    >>> from shoal import Mesh
    >>> side_of(Layout(Mesh({"x": 4}), "x"), Layout(Mesh({"y": 3}), "y"), (12,))
    (1,)
    """
    return tuple(map(math.gcd, shard_of(source, shape), shard_of(target, shape)))


def num_permutes(sends: PointToPoint, side: Sequence[int]) -> int:
    """Return how many permutes send something."""
    return sum(max(_num_blocks(send.box, side) for send in sends) for sends in sends.rounds)


def permutes_of(
    sends: PointToPoint, source: Layout, target: Layout, shape: Sequence[int]
) -> Permutes:
    """Return a plan of single sends as permutes.

    Blocks that a device keeps are copied in rounds in which it receives none; any left over, in
    rounds without sends.

    Args:
      sends: the plan of the same move.
      source, target: both cut every dim of `shape` evenly.
    """
    devices = tuple(device for device, _ in sends.hosts)
    side = side_of(source, target, shape)
    ends = _End.of(source, devices, shape), _End.of(target, devices, shape)
    position = {device: index for index, device in enumerate(devices)}
    kept: list[list[Place]] = [[] for _ in devices]
    for device, box, _ in sends.keeps:
        kept[position[device]] += _blocks(box, side)
    rounds = []
    for own in sends.rounds:
        boxes = [list(_blocks(send.box, side)) for send in own]
        pairs = [(position[send.sender], position[send.receiver]) for send in own]
        for blocks in zip_longest(*boxes):
            moved = [
                (*pair, place)
                for pair, place in zip(pairs, blocks, strict=True)
                if place is not None
            ]
            rounds.append(_permute(moved, kept, *ends))
    while any(kept):
        rounds.append(_permute((), kept, *ends))
    return Permutes(devices, side, tuple(rounds))


class _End(NamedTuple):
    """The data that the devices hold in one of the layouts."""

    first: IntArray  # of each device's shard [devices, rank]; 0 where it has none
    end: IntArray

    @classmethod
    def of(cls, layout: Layout, devices: Sequence[int], shape: Sequence[int]) -> _End:
        size = np.array(shard_of(layout, shape), np.int64)
        first = np.zeros((len(devices), len(size)), np.int64)
        end = np.zeros_like(first)
        own = np.searchsorted(devices, layout.mesh.device_ids.ravel())
        first[own] = tiles_of(layout).coords * size
        end[own] = first[own] + size
        return cls(first, end)

    def has(self, device: int, place: Place) -> bool:
        """Is the block that begins there in the shard of the device?"""
        return bool((self.first[device] <= place).all() and (self.end[device] > place).all())


def _permute(
    moved: Sequence[tuple[int, int, Place]], kept: list[list[Place]], source: _End, target: _End
) -> Permute:
    """Return one permute; the blocks that it copies are removed from `kept`."""
    count = len(kept)
    reads, keeps, writes = source.first.copy(), source.first.copy(), target.first.copy()
    passes_on, copies = np.zeros((2, count), np.bool_)
    is_idle: NDArray[np.bool_] = np.all(target.end > target.first, axis=1)
    for sender, receiver, place in moved:
        writes[receiver], is_idle[receiver] = place, False
        passes_on[sender] = not source.has(sender, place)
        reads[sender] = place
    begins = np.where(passes_on[:, None], target.first, source.first)
    for device in np.flatnonzero(is_idle).tolist():
        if kept[device]:
            keeps[device] = writes[device] = kept[device].pop()
            copies[device], is_idle[device] = True, False
    pairs = tuple((sender, receiver) for sender, receiver, _ in moved)
    return Permute(
        sends=pairs,
        reads=reads - begins,
        passes_on=passes_on,
        copies=copies,
        keeps=keeps - source.first,
        writes=writes - target.first,
        is_idle=is_idle,
    )


def _num_blocks(box: Box, side: Sequence[int]) -> int:
    return math.prod((end - first) // size for (first, end), size in zip(box, side, strict=True))


def _blocks(box: Box, side: Sequence[int]) -> Iterator[Place]:
    """Yield the first index of each block of a box."""
    counts = [(end - first) // size for (first, end), size in zip(box, side, strict=True)]
    for place in np.ndindex(*counts):
        yield tuple(first + n * size for n, (first, _), size in zip(place, box, side, strict=True))
