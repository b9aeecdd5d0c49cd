"""Lower bounds on the bytes received and the memory of any plan of a move."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.errors import counted
from shoal.plan.hardware.wiring import Topology
from shoal.plan.layout import Layout
from shoal.plan.transfer.checks import Move, checked_move
from shoal.plan.transfer.places import Places, places
from shoal.plan.transfer.regions import Regions, regions_of

__all__ = ["Bounds", "DeviceBound", "bounds"]

IntArray = NDArray[np.int64]


class DeviceBound(NamedTuple):
    """The bounds of one device."""

    device: int
    host: int
    received_bytes: int
    """The bytes that it needs and does not hold."""
    peak_bytes: int
    """Its shard of the source and its shard of the target, both held at the end."""
    donated_peak_bytes: int
    """The larger of the two: the source may be overwritten."""


class Bounds(NamedTuple):
    """The lower bounds of a move. `print` shows them."""

    devices: tuple[DeviceBound, ...]
    """The bounds of every device of either layout, by ascending id."""
    host_bytes: tuple[tuple[int, int], ...]
    """Host and the bytes that must enter it at least once, by ascending number."""
    total_bytes: int
    """The bytes that all devices together must receive."""

    @property
    def received_bytes(self) -> dict[int, int]:
        """Device id → bytes it must receive."""
        return {bound.device: bound.received_bytes for bound in self.devices}

    @property
    def largest_bytes(self) -> int:
        """The most bytes that one device must receive."""
        return max(bound.received_bytes for bound in self.devices)

    @property
    def total_host_bytes(self) -> int:
        """Bytes that must enter hosts, in total."""
        return sum(entered for _, entered in self.host_bytes)

    @property
    def largest_host_bytes(self) -> int:
        """The most bytes that must enter one host."""
        return max(entered for _, entered in self.host_bytes)

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest device if the source is kept."""
        return max(bound.peak_bytes for bound in self.devices)

    @property
    def donated_peak_bytes(self) -> int:
        """Memory of the fullest device if the source may be overwritten."""
        return max(bound.donated_peak_bytes for bound in self.devices)

    def __str__(self) -> str:
        processes = counted(len(self.host_bytes), "process", "processes")
        devices = counted(len(self.devices), "device")
        return "\n".join(
            f"{name:<18}{figures}"
            for name, figures in (
                ("lower bounds", f"{devices}, {processes}"),
                ("device receives", f"{self.largest_bytes:,} B at most"),
                ("devices receive", f"{self.total_bytes:,} B in all"),
                ("process receives", f"{self.largest_host_bytes:,} B at most"),
                ("processes receive", f"{self.total_host_bytes:,} B in all"),
                ("device holds", f"{self.peak_bytes:,} B at most"),
                ("  if donated", f"{self.donated_peak_bytes:,} B at most"),
            )
        )


@local
def bounds(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    item_bytes: int,
    *,
    topology: Topology | None = None,
) -> Bounds:
    """Return lower bounds on the bytes and the memory of a move.

    Local.

    With S and T the boxes that a device holds in the source and in the target, it receives at least
    |T| - |T ∩ S|: what it needs and does not hold. A host receives at least the bytes that its
    devices need in the target and none of them holds in the source, each once. A device holds at
    least |S| + |T| at the end, or max(|S|, |T|) where S may be overwritten.

    Where a reduction of k > 1 terms is pending, a device receives at least |T|: of every element it
    holds one term at most, and the result depends on the others. A host receives every element that
    it needs and does not hold all terms of. All devices together receive at least k + r - 1
    messages for an element that r devices need, or k + r - 2 if one of these holds a term: every
    message joins two of the k groups of holders at most, so k - 1 must pass before any device knows
    the value (k if that device holds no term), and then one for each needer that is left.

    Args:
      source: the layout of the array; it may be partial, by any reduction.
      target: the layout to move it to.
      shape: the shape of the whole array [rank].
      item_bytes: bytes of one element.
      topology: says the host of each device. None: a host for each process of the meshes.

    Raises:
      UsageError: as for `regions`; the topology lacks devices of the meshes; or without a
        topology, the meshes give different processes for a device.

    Example:
      >>> from shoal import Mesh
      >>> mesh = Mesh({"x": 2, "y": 4}, processes=[0, 0, 0, 0, 1, 1, 1, 1])
      >>> found = bounds(Layout(mesh, "x", "y"), Layout(mesh, None, "y"), (8, 8), 4)
      >>> found.largest_bytes, found.total_bytes, found.largest_host_bytes, found.peak_bytes
      (32, 256, 128, 96)

    Source: the bound of a host is that of Y. Zhuang et al., "On optimizing the communication of
    model parallelism", MLSys 2023 (arXiv 2211.05322): each slice needs to cross to a host once.
    """
    move = checked_move(
        operation="bounds", source=source, target=target, shape=shape, item_bytes=item_bytes
    )
    where = places("bounds", source.mesh, target.mesh, topology)
    return bounds_of(move, regions_of(move), where)


def bounds_of(move: Move, pieces: Regions, where: Places) -> Bounds:
    """Return the bounds of a move that has been checked, given its regions and its devices."""
    item_bytes = move.item_bytes
    old = _shards(move.shape, pieces.source_counts)
    new = _shards(move.shape, pieces.target_counts)
    before, after, received = np.zeros((3, len(where.devices)), np.int64)
    before[where.at(pieces.holders)] = old.volume[:, None, None] * item_bytes
    after[where.at(pieces.wanted)] = new.volume[:, None] * item_bytes
    missing = new.volume[:, None] - pieces.elements_of(pieces.kept)
    received[where.at(pieces.wanted)] = missing * item_bytes
    columns = (where.devices, where.hosts, received, before + after, np.maximum(before, after))
    devices = zip(*(column.tolist() for column in columns), strict=True)
    total = sum(missing.ravel().tolist())
    if pieces.holders.shape[1] > 1:
        total = _total_of_terms(pieces)
    return Bounds(
        tuple(DeviceBound(*row) for row in devices),
        tuple((host, count * item_bytes) for host, count in _entering(pieces, old, new, where)),
        total * item_bytes,
    )


class _Shards(NamedTuple):
    """The shards of a layout, row-major over the dims."""

    first: IntArray  # [shards, rank]
    end: IntArray  # [shards, rank]
    volume: IntArray  # elements of each [shards]


def _shards(sizes: Sequence[int], counts: Sequence[int]) -> _Shards:
    """Cut an array by the rule "ceil"."""
    numbers = np.indices(tuple(counts)).reshape(len(counts), math.prod(counts)).T
    lengths = [-(-size // count) for size, count in zip(sizes, counts, strict=True)]
    first = np.minimum(numbers * np.array(lengths, np.int64), np.array(sizes, np.int64))
    end = np.minimum(first + np.array(lengths, np.int64), np.array(sizes, np.int64))
    return _Shards(first, end, (end - first).prod(axis=1))


def _total_of_terms(pieces: Regions) -> int:
    """Return the messages of one element each that a pending reduction takes."""
    terms, needers = pieces.holders.shape[1], pieces.wanted.shape[1]
    holds_term = np.isin(pieces.cells, pieces.own)  # a device that needs it
    messages = terms + needers - 1 - holds_term.astype(np.int64)
    return sum(map(operator.mul, pieces.num_elements.tolist(), messages.tolist()))


def _entering(
    pieces: Regions, old: _Shards, new: _Shards, where: Places
) -> Iterator[tuple[int, int]]:
    """Yield each host, ascending, and how many elements must enter it."""
    hosts, host_of_place = np.unique(where.hosts, return_inverse=True)
    wanting = host_of_place[where.at(pieces.wanted)]
    needed = _by_host(np.arange(len(wanting))[:, None], wanting, len(hosts))
    holding = host_of_place[where.at(pieces.holders)]
    num_terms = holding.shape[1]
    term_numbers = np.arange(holding.shape[0] * num_terms).reshape(*holding.shape[:2], 1)
    held = _by_host(term_numbers, holding, len(hosts))
    num_elements = sum(new.volume.tolist())  # Python ints: no overflow
    for host, wanted, terms in zip(hosts.tolist(), needed, held, strict=True):
        shards, counts = np.unique(terms // num_terms, return_counts=True)
        shards = shards[counts == num_terms]  # of which the host has every term
        if sum(old.volume[shards].tolist()) == num_elements:  # it holds everything: a shortcut
            yield host, 0
            continue
        common = np.ones((len(wanted), len(shards)), np.int64)
        for dim in range(new.first.shape[1]):
            first = np.maximum.outer(new.first[wanted, dim], old.first[shards, dim])
            end = np.minimum.outer(new.end[wanted, dim], old.end[shards, dim])
            common *= np.maximum(end - first, 0)
        yield host, sum(new.volume[wanted].tolist()) - sum(common.sum(axis=1).tolist())


def _by_host(values: IntArray, hosts: IntArray, count: int) -> list[IntArray]:
    """Return the distinct values paired with each host; they broadcast to `hosts`."""
    span = int(values.max(initial=0)) + 1
    pairs = np.unique(hosts * span + values)
    return np.split(pairs % span, np.searchsorted(pairs, np.arange(1, count) * span))
