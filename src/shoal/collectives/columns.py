"""One leaf of every process side by side, and what becomes of them.

A column says how many bytes each process's leaf has, gives memory for them to be put into (that of
the result, where the result is an array), and then the result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shoal.arrays.host_values import is_key
from shoal.collectives.leaves import (
    ANY,
    Array,
    Buffer,
    Leaf,
    buffer_of,
    is_global,
    key_of,
    value_of,
)
from shoal.errors import ShoalError, UsageError

__all__ = ["Column", "column_of"]

_NUMBER = np.dtype("<u8")
_DTYPES = {"bool": np.dtype("?"), "float": np.dtype("<f8"), "complex": np.dtype("<c16")}
_INT64 = range(-(1 << 63), 1 << 63)


class Column:
    """Arrays and scalars: a new dim 0, one entry for each process."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf

    def bodies(self, value: Any) -> tuple[int, list[Buffer]]:
        """Return this process's number (of what is open) and its bytes."""
        return 0, [buffer_of(self.leaf, value)]

    def places(self, numbers: Sequence[int]) -> list[Array]:
        """Return memory for the bytes of each process."""
        shape = (len(numbers), *self.leaf.shape, *self.leaf.words)
        self._words = np.empty(shape, self.leaf.dtype)
        return [_bytes_of(self._words[p : p + 1]) for p in range(len(numbers))]

    def result(self) -> Any:
        """Return what all gave, once the places are filled."""
        if self.leaf.kind == "key":
            return key_of(self._words, self.leaf.impl)
        return self._words


class Tiled(Column):
    """Arrays, one behind the other in dim 0, which may differ in size."""

    def bodies(self, value: Any) -> tuple[int, list[Buffer]]:
        return value.shape[0], [buffer_of(self.leaf, value)]

    def places(self, numbers: Sequence[int]) -> list[Array]:
        row = (*self.leaf.shape[1:], *self.leaf.words)
        self._words = np.empty((sum(numbers), *row), self.leaf.dtype)
        parts = np.split(self._words, np.cumsum(numbers[:-1], dtype=np.intp))
        return [_bytes_of(part) for part in parts]


class Listed(Column):
    """Text, bytes, None: a list; whole numbers: an array, if 64 bits hold them all."""

    def bodies(self, value: Any) -> tuple[int, list[Buffer]]:
        body = buffer_of(self.leaf, value)
        return len(body), [body]

    def places(self, numbers: Sequence[int]) -> list[Array]:
        self._bits = [np.empty(self.leaf.num_bytes(number), np.uint8) for number in numbers]
        return self._bits

    def result(self) -> Any:
        values = [value_of(self.leaf, bits) for bits in self._bits]
        if self.leaf.kind == "int" and all(value in _INT64 for value in values):
            return np.array(values, np.int64)
        return values


class Shards(Listed):
    """An array that lies in parts on all processes: each region comes from one that holds it.

    Bytes of a process: for each of its regions the begin and the end in each dim, then its words.
    """

    def bodies(self, value: Any) -> tuple[int, list[Buffer]]:
        buffers: list[Buffer] = []
        with jax.transfer_guard("allow"):
            words = jax.random.key_data(value) if is_key(value) else value
            for shard in words.addressable_shards:
                if shard.replica_id == 0:
                    buffers.append(np.array(_bounds(shard.index, words.shape), _NUMBER).tobytes())
                    part = np.ascontiguousarray(shard.data)
                    buffers.append(part.reshape(-1).view(np.uint8).data)
        return sum(map(len, buffers)), buffers

    def result(self) -> Any:
        leaf, held = self.leaf, 0
        whole: Array = np.empty(leaf.shape + leaf.words, leaf.dtype)
        head_bytes = 2 * whole.ndim * _NUMBER.itemsize
        for bits in self._bits:
            at = 0
            while at < len(bits):
                head = bits[at : at + head_bytes].view(_NUMBER).reshape(-1, 2).tolist()
                shape = [end - begin for begin, end in head]
                at += head_bytes
                end = at + math.prod(shape) * whole.itemsize
                region = tuple(slice(*bounds) for bounds in head)
                whole[region] = bits[at:end].view(whole.dtype).reshape(shape)
                held, at = held + math.prod(shape), end
        if held != whole.size:
            told = f"the processes gave {held} of its {whole.size} entries"
            raise ShoalError(f"allgather: {leaf.path}: {told}; they do not hold all of it")
        return key_of(whole, leaf.impl) if leaf.impl is not None else whole


def column_of(leaf: Leaf, value: Any, tiled: bool) -> Column:
    """Return the column that a leaf is in.

    Raises:
      UsageError: it lies in parts on several processes, and `tiled` is not set.
    """
    if leaf.dtype is None:
        dtype = _DTYPES.get(leaf.kind)
        return Listed(leaf) if dtype is None else Column(leaf._replace(dtype=dtype))
    if not leaf.shape or leaf.kind == "scalar":
        return Column(leaf)
    if is_global(value) and tiled:
        note = f" {_regions(value.sharding, value.shape)}"
        return Shards(leaf._replace(kind="shards", note=note))
    if is_global(value) and not value.is_fully_replicated:
        told = "lies in parts on several processes: tiled=True gathers its global value"
        raise UsageError(f"{leaf.path}: {told}")
    return Tiled(leaf._replace(shape=(ANY, *leaf.shape[1:]))) if tiled else Column(leaf)


def _bytes_of(words: Array) -> Array:
    return words.reshape(-1).view(np.uint8)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return begin and end in each dim: `(slice(2, 4), slice(None))` of (8, 3): (2, 4), (0, 3)."""
    return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]


@lru_cache(maxsize=256)
def _regions(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Return who holds which region, as text that is equal where that is."""
    held = sharding.devices_indices_map(shape)
    rows = sorted((d.process_index, d.id, _bounds(index, shape)) for d, index in held.items())
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()
    return f"{getattr(sharding, 'spec', 'sharded')} on {len(held)} devices ({digest})"
