"""Which parts of a tree's values should be equal on which processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shoal.collectives.hashes import FlatItems, digest_of, items_of
from shoal.collectives.leaves import LeafSpec, words_of
from shoal.errors import raise_all
from shoal.hashing import quick_digest
from shoal.plan.shards import Box
from shoal.runtime.rules.first_difference import ItemsInOrder

Holders: TypeAlias = tuple[int, ...] | None  # JAX process indices; None: all of the job


_ITEMS = 1 << 20  # compared at a time to locate a difference


class SharedPart(NamedTuple):
    """A leaf, or a region of a sharded one, held by some processes."""

    leaf: LeafSpec
    box: Box | None  # None: the whole
    holders: Holders
    open: Callable[[], ItemsInOrder] | None  # None: not here

    def place(self, index: int) -> str:
        """Return the index expression of an item: `['w'][2, 3]`."""
        path = "" if self.leaf.path == "the value" else self.leaf.path
        if self.leaf.dtype is None:
            noun = {"str": " at character ", "bytes": " at byte "}.get(self.leaf.kind)
            return self.leaf.path + (f"{noun}{index}" if noun else "")
        whole = (*self.leaf.shape, *self.leaf.words)
        box = self.box or [(0, size) for size in whole]
        at = np.unravel_index(index, [end - first for first, end in box])
        where = [first + int(i) for (first, _), i in zip(box, at, strict=True)]
        return f"{path}{where}" if where else self.leaf.path


class Compared(NamedTuple):
    """The parts of a leaf that are compared."""

    line: str  # its distribution over devices, if global; else empty
    parts: list[SharedPart]
    words: str  # difference between replicas of this process, or empty


def parts_of(
    leaves: Sequence[LeafSpec], values: Sequence[Any], operation: str, pool: ThreadPoolExecutor
) -> list[Compared]:
    """Return the parts of each leaf, in the same order on all processes.

    Raises:
      UsageError: a leaf has no value.
    """
    problems = [
        f"{leaf.path}: stands for an array, but its value is needed"
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(value, jax.ShapeDtypeStruct)
    ]
    raise_all(operation, problems)
    return [_placed(leaf, value, pool) for leaf, value in zip(leaves, values, strict=True)]


def _placed(leaf: LeafSpec, value: Any, pool: ThreadPoolExecutor) -> Compared:
    dtype = leaf.dtype
    if dtype is None:
        return Compared("", [SharedPart(leaf, None, None, lambda: items_of(leaf, value))], "")
    if not isinstance(value, jax.Array):
        host = np.asarray(value)
        whole = FlatItems(host.shape, dtype, [((0,) * host.ndim, host)])
        return Compared("", [SharedPart(leaf, None, None, lambda: whole)], "")
    shards = [_Shard(_box(one.index, leaf), one) for one in value.addressable_shards]
    difference = _local_difference(leaf, shards, pool)
    here = {shard.box: shard for shard in shards}
    if value.is_fully_addressable:
        return Compared("", [SharedPart(leaf, None, None, lambda: _whole(leaf, here))], difference)
    regions = _regions(value.sharding, leaf._replace(path=""))
    parts = [
        SharedPart(leaf, box, holders, here[box].read if box in here else None)
        for box, holders in regions
    ]
    return Compared(
        f"{leaf.path}: spread as {_distribution(value.sharding, regions)}", parts, difference
    )


class _Shard(NamedTuple):
    """The data of one of this process's devices."""

    box: Box
    shard: Any  # a JAX shard

    def read(self) -> FlatItems:
        """Return its words as items."""
        array = words_of(self.shard.data)
        return FlatItems(array.shape, array.dtype, [((0,) * array.ndim, array)])


def _whole(leaf: LeafSpec, here: Mapping[Box, _Shard]) -> FlatItems:
    """Read an array on this process's devices, however it is sharded."""
    pieces = [
        ([first for first, _ in box], words_of(shard.shard.data)) for box, shard in here.items()
    ]
    dtype = pieces[0][1].dtype
    return FlatItems((*leaf.shape, *leaf.words), dtype, pieces)


def _local_difference(leaf: LeafSpec, shards: Sequence[_Shard], pool: ThreadPoolExecutor) -> str:
    """Compare the replicas on this process's devices; return the first difference."""
    if len({shard.box for shard in shards}) == len(shards):
        return ""
    firsts: dict[Box, tuple[_Shard, bytes]] = {}
    for shard in shards:
        digest = digest_of(shard.read(), pool)
        other, expected = firsts.setdefault(shard.box, (shard, digest))
        if digest != expected:
            index = _first_item(other.read(), shard.read())
            place = SharedPart(leaf, shard.box, None, None).place(index)
            return f"{place}: {_held(other, index)}, {_held(shard, index)}"
    return ""


def _held(shard: _Shard, index: int) -> str:
    value, _, bits = shard.read().show(index).partition("\t")
    return f"device {shard.shard.device.id} holds {value} ({bits})"


def _first_item(one: FlatItems, other: FlatItems) -> int:
    for low in range(0, len(one), _ITEMS):
        here, there = one.read(low, low + _ITEMS), other.read(low, low + _ITEMS)
        if (apart := np.flatnonzero(here != there)).size:
            return low + int(apart[0]) // one.dtype.itemsize
    return 0  # changed since the comparison


def _box(index: tuple[slice, ...], leaf: LeafSpec) -> Box:
    """Return a region of a leaf's words; a JAX index of a key may omit their dims."""
    sizes = (*leaf.shape, *leaf.words)
    cuts = (*index, *[slice(None)] * (len(sizes) - len(index)))
    return tuple(cut.indices(size)[:2] for cut, size in zip(cuts, sizes, strict=True))


def _distribution(sharding: Any, regions: Any) -> str:
    """Describe an array's distribution over devices, with a digest of the holders."""
    words = getattr(sharding, "spec", type(sharding).__name__)
    digest = quick_digest(repr(regions).encode()).hex()
    return f"{words} (digest of the holders: {digest})"


@lru_cache(maxsize=512)
def _regions(sharding: Any, leaf: LeafSpec) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Return each region of a sharded array and the processes (JAX indices) that hold it."""
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(_box(index, leaf), set()).add(device.process_index)
    return tuple((box, tuple(sorted(holders[box]))) for box in sorted(holders))
