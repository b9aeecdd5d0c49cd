"""Which parts of a tree's values should be equal on which processes, and where they lie here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import xxhash

from shoal.arrays.host_values import is_key
from shoal.collectives.hashes import Box, Flat, digest_of, items_of
from shoal.collectives.leaves import Array, Leaf, host_view
from shoal.errors import raise_all
from shoal.runtime.differing import Items

__all__ = ["Holders", "Part", "Placed", "parts_of"]

Holders: TypeAlias = tuple[int, ...] | None  # JAX's indices of processes; None: all of the job


_ITEMS = 1 << 20  # compared at once where replicas differ
_TAB = "\t"


class Part(NamedTuple):
    """A leaf, or a region of a sharded one, that some processes hold."""

    leaf: Leaf
    box: Box | None  # None: the whole
    holders: Holders
    open: Callable[[], Items] | None  # None: not here

    def place(self, index: int) -> str:
        """Return where an item is, as one writes it: `['w'][2, 3]`."""
        path = "" if self.leaf.path == "the value" else self.leaf.path
        if self.leaf.dtype is None:
            noun = {"str": " at character ", "bytes": " at byte "}.get(self.leaf.kind)
            return self.leaf.path + (f"{noun}{index}" if noun else "")
        whole = (*self.leaf.shape, *self.leaf.words)
        box = self.box or [(0, size) for size in whole]
        at = np.unravel_index(index, [end - first for first, end in box])
        where = [first + int(i) for (first, _), i in zip(box, at, strict=True)]
        return f"{path}{where}" if where else self.leaf.path


class Placed(NamedTuple):
    """What is compared of a leaf."""

    line: str  # says how it lies on devices, if other processes hold some of them; else empty
    parts: list[Part]
    words: str  # what differs between replicas of this process, or empty


def parts_of(
    leaves: Sequence[Leaf], values: Sequence[Any], asked: str, pool: ThreadPoolExecutor
) -> list[Placed]:
    """Return the parts of each leaf, in the same order on all processes.

    Raises:
      UsageError: a leaf has no value.
    """
    offences = [
        f"{leaf.path}: stands for an array; its value is asked for"
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(value, jax.ShapeDtypeStruct)
    ]
    raise_all(asked, offences)
    return [_placed(leaf, value, pool) for leaf, value in zip(leaves, values, strict=True)]


def _placed(leaf: Leaf, value: Any, pool: ThreadPoolExecutor) -> Placed:
    dtype = leaf.dtype
    if dtype is None:
        return Placed("", [Part(leaf, None, None, lambda: items_of(leaf, value))], "")
    if not isinstance(value, jax.Array):
        return Placed("", [Part(leaf, None, None, lambda: _flat(np.asarray(value), dtype))], "")
    words = jax.random.key_data(value) if is_key(value) else value
    told = _local_difference(leaf, words, pool)
    if words.is_fully_addressable:
        return Placed("", [Part(leaf, None, None, lambda: _whole(words, dtype))], told)
    regions = _regions(words.sharding, words.shape)
    here = {_box(shard.index, words.shape): shard for shard in words.addressable_shards}
    parts = [
        Part(leaf, box, holders, _opener(here[box], dtype) if box in here else None)
        for box, holders in regions
    ]
    return Placed(f"{leaf.path}: spread as {_told(words.sharding, regions)}", parts, told)


def _opener(shard: Any, dtype: np.dtype[Any]) -> Callable[[], Items]:
    return lambda: _flat(np.asarray(shard.data), dtype)


def _flat(array: Array, dtype: np.dtype[Any]) -> Flat:
    return Flat(array.shape, dtype, [((0,) * array.ndim, array)])


def _whole(words: jax.Array, dtype: np.dtype[Any]) -> Flat:
    """Read an array of this process's own devices in place, however it is cut."""
    if words.is_fully_replicated:
        return _flat(host_view(words), dtype)
    shards = {_box(shard.index, words.shape): shard for shard in words.addressable_shards}
    pieces = [([a for a, _ in box], np.asarray(one.data)) for box, one in shards.items()]
    return Flat(words.shape, dtype, pieces)


def _local_difference(leaf: Leaf, words: jax.Array, pool: ThreadPoolExecutor) -> str:
    """Compare the replicas that devices of this process hold; return the first difference."""
    first: dict[Box, tuple[Any, bytes]] = {}
    boxes = [(_box(shard.index, words.shape), shard) for shard in words.addressable_shards]
    if len({box for box, _ in boxes}) == len(boxes):
        return ""
    for box, shard in boxes:
        mine = _flat(np.asarray(shard.data), words.dtype)
        digest = digest_of(mine, pool)
        other, expected = first.setdefault(box, (shard, digest))
        if digest != expected:
            theirs = _flat(np.asarray(other.data), words.dtype)
            index = _first_item(theirs, mine)
            held = [
                f"device {device.id} holds {items.show(index).replace(_TAB, ' = ')}"
                for device, items in ((other.device, theirs), (shard.device, mine))
            ]
            return f"{Part(leaf, box, None, None).place(index)}: {', '.join(held)}"
    return ""


def _first_item(one: Flat, other: Flat) -> int:
    for low in range(0, len(one), _ITEMS):
        here, there = one.read(low, low + _ITEMS), other.read(low, low + _ITEMS)
        if (apart := np.flatnonzero(here != there)).size:
            return low + int(apart[0]) // one.dtype.itemsize
    return 0  # what differed a moment ago has been changed


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


def _told(sharding: Any, regions: Any) -> str:
    """Say how an array lies on devices: in words, and as a digest of who holds what."""
    words = getattr(sharding, "spec", None) or type(sharding).__name__
    return f"{words} ({xxhash.xxh3_64_hexdigest(repr(regions).encode())})"


@lru_cache(maxsize=512)
def _regions(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Return each region of a sharded array, and the processes (JAX's indices) that hold it."""
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape), set()).add(device.process_index)
    return tuple((box, tuple(sorted(holders[box]))) for box in sorted(holders))
