"""Columns: one leaf of every process side by side, and how they are combined.

A column gives the size of each process's leaf, then memory to receive it (that of the result, if
the result is an array), and then the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np

from shoal.collectives.leaves import (
    ANY,
    Array,
    Buffer,
    LeafSpec,
    buffer_of,
    is_global,
    value_of,
    words_of,
    wrap_key,
)
from shoal.errors import ShoalError, UsageError
from shoal.hashing import short_digest

Region: TypeAlias = list[tuple[int, int]]  # begin and end in each dim

_RUN_BYTES = 8 << 10  # shorter runs are received into a buffer and copied
_DTYPES = {"bool": np.dtype("?"), "float": np.dtype("<f8"), "complex": np.dtype("<c16")}
_INT64 = range(-(1 << 63), 1 << 63)


class Column:
    """Arrays and scalars: a new dim 0, one entry for each process."""

    def __init__(self, leaf: LeafSpec) -> None:
        self.leaf = leaf

    def packed(self, value: Any) -> tuple[list[int], list[Buffer]]:
        """Return the length of this process's leaf, if it must be sent, and its bytes."""
        body = buffer_of(self.leaf, value)
        return [len(body)] if self.leaf.is_open else [], [body]

    def read(self, numbers: Iterator[int]) -> Any:
        """Parse the lengths sent by a process's `packed`, for the methods below."""
        return next(numbers) if self.leaf.is_open else 0

    def num_bytes(self, length: Any) -> int:
        """Return the size of a leaf."""
        return self.leaf.num_bytes(length)

    def check(self, lengths: Sequence[Any]) -> None:
        """Raise, on all processes alike, if the leaves cannot be combined."""

    def places(self, lengths: Sequence[Any]) -> list[list[Array]]:
        """Return the destination buffers of each process's bytes."""
        shape = (len(lengths), *self.leaf.shape, *self.leaf.words)
        self._words: Array = np.ndarray(shape, self.leaf.dtype)  # `empty` widens text of width 0
        return [[_bytes_of(self._words[p : p + 1])] for p in range(len(lengths))]

    def result(self) -> Any:
        """Return the combined value, once the destinations are filled."""
        return self._words if self.leaf.impl is None else wrap_key(self._words, self.leaf.impl)


class Tiled(Column):
    """Arrays concatenated along dim 0, which may differ in size."""

    def packed(self, value: Any) -> tuple[list[int], list[Buffer]]:
        return [value.shape[0]], [buffer_of(self.leaf, value)]

    def places(self, lengths: Sequence[Any]) -> list[list[Array]]:
        row = (*self.leaf.shape[1:], *self.leaf.words)
        self._words = np.ndarray((sum(lengths), *row), self.leaf.dtype)
        parts = np.split(self._words, np.cumsum(lengths[:-1], dtype=np.intp))
        return [[_bytes_of(part)] for part in parts]


class Listed(Column):
    """Text, bytes, None: a list; integers: an array if all fit into 64 bits."""

    def places(self, lengths: Sequence[Any]) -> list[list[Array]]:
        self._bits = [np.empty(self.num_bytes(length), np.uint8) for length in lengths]
        return [[bits] for bits in self._bits]

    def result(self) -> Any:
        values = [value_of(self.leaf, bits) for bits in self._bits]
        if self.leaf.kind == "int" and all(value in _INT64 for value in values):
            return np.array(values, np.int64)
        return values


class Parts(Column):
    """An array distributed over processes: each region comes from one holder.

    A process sends the number of its regions, and the bounds of each in every dim.
    """

    def __init__(self, leaf: LeafSpec, givers: frozenset[int] | None = None) -> None:
        super().__init__(leaf)
        self._givers = givers  # JAX numbers of the participants; None: all

    def packed(self, value: Any) -> tuple[list[int], list[Buffer]]:
        numbers = [0]
        buffers: list[Buffer] = []
        gives = None if self._givers is None else _given_by(value, self._givers)
        for shard in value.addressable_shards:
            if shard.replica_id == 0 if gives is None else shard.device in gives:
                part = np.ascontiguousarray(words_of(shard.data))
                buffers.append(part.reshape(-1).view(np.uint8).data)
                bounds = _bounds(shard.index, self.leaf.shape + self.leaf.words)
                numbers += itertools.chain(*bounds)
                numbers[0] += 1
        return numbers, buffers

    def read(self, numbers: Iterator[int]) -> list[Region]:
        dims = range(len(self.leaf.shape + self.leaf.words))
        return [[(next(numbers), next(numbers)) for _ in dims] for _ in range(next(numbers))]

    def num_bytes(self, length: list[Region]) -> int:
        itemsize = np.dtype(self.leaf.dtype).itemsize
        return itemsize * sum(math.prod(end - begin for begin, end in r) for r in length)

    def check(self, lengths: Sequence[list[Region]]) -> None:
        leaf = self.leaf
        missing = leaf.num_bytes() - sum(map(self.num_bytes, lengths))
        if missing:
            detail = f"no process gave {missing} of its {leaf.num_bytes()} bytes"
            whose = "the job does" if self._givers is None else "these processes do"
            raise ShoalError(f"allgather: {leaf.path}: {detail}; {whose} not hold all of it")

    def places(self, lengths: Sequence[list[Region]]) -> list[list[Array]]:
        self._words = np.empty(self.leaf.shape + self.leaf.words, self.leaf.dtype)
        self._apart: list[tuple[Array, Array]] = []
        return [[place for r in regions for place in self._runs(r)] for regions in lengths]

    def result(self) -> Any:
        for region, bits in self._apart:
            region[...] = bits.view(region.dtype).reshape(region.shape)
        return super().result()

    def _runs(self, bounds: Region) -> list[Array]:
        """Return the destination of a region: in place if it consists of long runs.

        Of (8, 4, 3): rows 2-4, all else, is one run; columns 0-2 of them are two runs of 6 each.
        """
        region = self._words[tuple(slice(*pair) for pair in bounds)]
        whole = [dim for dim in range(region.ndim) if region.shape[dim] != self._words.shape[dim]]
        outer = max(whole, default=0)  # all later dims are whole
        run_bytes = math.prod(region.shape[outer:]) * region.itemsize
        if outer and run_bytes < _RUN_BYTES:
            self._apart.append((region, np.empty(region.nbytes, np.uint8)))
            return [self._apart[-1][1]]
        return [_bytes_of(region[index]) for index in np.ndindex(region.shape[:outer])]


def column_of(
    leaf: LeafSpec, value: Any, tiled: bool, givers: frozenset[int] | None = None
) -> Column:
    """Return the column of a leaf.

    Args:
      givers: JAX numbers of the participants; None: all of the job.

    Raises:
      UsageError: it is distributed over processes, and `tiled` is not set.
    """
    if leaf.dtype is None:
        dtype = _DTYPES.get(leaf.kind)
        return Listed(leaf) if dtype is None else Column(leaf._replace(dtype=dtype))
    if not leaf.shape or leaf.kind == "scalar":
        return Column(leaf)
    if is_global(value) and tiled:
        note = f" {_regions(value.sharding, value.shape)}"
        return Parts(leaf._replace(kind="parts", note=note), givers)
    if is_global(value) and not value.is_fully_replicated:
        detail = "is distributed over several processes: tiled=True gathers its global value"
        raise UsageError(f"{leaf.path}: {detail}")
    return Tiled(leaf._replace(shape=(ANY, *leaf.shape[1:]))) if tiled else Column(leaf)


def _bytes_of(words: Array) -> Array:
    return words.reshape(-1).view(np.uint8)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return the bounds in each dim: `(slice(2, 4), slice(None))` of (8, 3): (2, 4), (0, 3)."""
    return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]


def _given_by(value: jax.Array, givers: frozenset[int]) -> set[jax.Device]:
    """Return the devices that supply the distinct regions: for each, the lowest participant's."""
    found: dict[tuple[tuple[int, ...], ...], jax.Device] = {}
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        region = tuple(_bounds(index, value.shape))
        other = found.get(region, device)
        if device.process_index in givers:
            found[region] = min(other, device, key=lambda one: (one.process_index, one.id))
    return {*found.values()}


@lru_cache(maxsize=256)
def _regions(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Return a text of who holds which region, equal if and only if that is equal."""
    held = sharding.devices_indices_map(shape)
    rows = sorted((d.process_index, d.id, _bounds(index, shape)) for d, index in held.items())
    digest = short_digest(repr(rows).encode()).hex()
    return f"{getattr(sharding, 'spec', 'sharded')} on {len(held)} devices ({digest})"
