"""Assemble the rows read by one process into global arrays.

A process's rows are those of its shards in order (see `local_rows`), concatenated: of 12 rows in 4
shards, of which it holds 0, 1 and 3, it supplies 9: 0..6, then 9..12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
    path_text,
)
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.host.digest import digest
from shoal.arrays.host.host_values import as_numpy, is_key, unfit, warn_of_narrowing
from shoal.arrays.host.tree_words import nodes_text
from shoal.arrays.host.upload import upload_shards
from shoal.errors import UsageError, raise_all, with_article
from shoal.plan.layout import Layout
from shoal.plan.rows import row_holders
from shoal.runtime.rules.spec_lines import SpecLine
from shoal.runtime.system.callsite import Caller

HostArray = np.ndarray[Any, Any]
Path = tuple[Any, ...]


class Split:
    """How the rows of all batches are sharded, and which of them this process supplies.

    Args:
      layout: of one dim, that of the rows.
      process: this one, by the mesh's numbering.
    """

    def __init__(self, layout: Layout, process: int) -> None:
        self.layout = layout
        self.process = process
        self._holders = row_holders(layout)
        self.held = self._holders.held_by(process)
        self.num_shards = self._holders.num_shards

    def own_rows(self, size: int) -> int:
        """Return how many rows of a batch this process supplies."""
        return size // self.num_shards * len(self.held)

    def slices(self, size: int) -> tuple[slice, ...]:
        """Return which rows of a batch it supplies."""
        return self._holders.slices(size, self.process)

    def size_of(self, rows: int) -> int:
        """Return the global batch size of which this process supplies `rows` rows, rounded up."""
        return -(-rows // len(self.held)) * self.num_shards

    def is_exact(self, rows: int) -> bool:
        """Do its shards divide this many rows evenly?"""
        return rows % len(self.held) == 0

    @cached_property
    def everyone(self) -> str:
        """All processes that hold a shard, as text."""
        return _words({process for holders in self._holders.holders for process in holders})

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Sets of processes that hold a common shard, as text → indices of this process's shards
        shared by exactly these; shards that it holds alone are left out.
        """
        places_of: dict[str, list[int]] = {}
        for place, shard in enumerate(self.held):
            holders = self._holders.holders[shard]
            if len(holders) > 1:
                places_of.setdefault(_words(holders), []).append(place)
        return {holders: tuple(places) for holders, places in places_of.items()}


def _words(processes: Iterable[int]) -> str:
    return ",".join(map(str, sorted(processes)))


class Batch(NamedTuple):
    """A process's part of a batch: host arrays, with the layouts of the whole batch."""

    leaves: list[Leaf]
    treedef: PyTreeDef
    rows: int

    @property
    def text(self) -> str:
        """Lines that are equal on all processes: one for each leaf, and one for the tree."""
        if not self.leaves:
            return ""
        lines = [
            _line(leaf.path, leaf.value.shape, leaf.value.dtype, leaf.layout)
            for leaf in self.leaves
        ]
        return "\n".join([*lines, SpecLine("tree", value=nodes_text(self.treedef)).packed])

    def padded(self, rows: int) -> Batch:
        """Return it padded with zeros at the end, or unchanged."""
        return self if rows == self.rows else self._filled(self.rows, rows)

    def first(self, rows: int) -> Batch:
        """Return it with all but the first rows replaced by zeros."""
        return self if rows >= self.rows else self._filled(rows, self.rows)

    def empty(self) -> Batch:
        """Return one of the same structure without rows, which keeps none of its memory."""
        return self._filled(0, 0)

    def _filled(self, rows: int, wanted: int) -> Batch:
        leaves = [leaf._replace(value=_filled(leaf.value, rows, wanted)) for leaf in self.leaves]
        return Batch(leaves, self.treedef, wanted)

    def digests(self, split: Split, size: int) -> dict[str, list[str]]:
        """Return a digest of each leaf for each set of processes that hold the same data.

        That is: sets of processes that share rows; and all processes, for scalars.
        """
        each = size // split.num_shards
        by_holders = {
            holders: [_digest(leaf.value, places, each) for leaf in self.leaves]
            for holders, places in split.shared.items()
        }
        if "," in split.everyone and any(not leaf.value.ndim for leaf in self.leaves):
            alone = ["" if leaf.value.ndim else digest(leaf.value) for leaf in self.leaves]
            rows = by_holders.get(split.everyone, [""] * len(alone))
            by_holders[split.everyone] = [a + b for a, b in zip(alone, rows, strict=True)]
        return by_holders

    def digest(self) -> str:
        """Return a digest of all leaves that have rows."""
        return " ".join(digest(leaf.value) for leaf in self.leaves if leaf.value.ndim)

    def arrays(self, split: Split, size: int) -> Any:
        """Return the tree as global arrays. Afterwards host values may be changed.

        Raises:
          UsageError: their shards do not divide other dims evenly.
        """
        problems: list[str] = []
        for leaf in self.leaves:
            shape = (size, *leaf.value.shape[1:]) if leaf.value.ndim else ()
            must_divide(leaf._replace(value=jax.ShapeDtypeStruct(shape, np.int8)), problems)
        raise_all("feed", problems)
        placed = [place_rows(leaf.value, leaf.sharding, split, size) for leaf in self.leaves]
        jax.block_until_ready(placed)  # a pending transfer still reads the host array
        return jax.tree.unflatten(self.treedef, placed)


def place_rows(value: HostArray, sharding: jax.NamedSharding, split: Split, size: int) -> jax.Array:
    """Return one leaf as a global array. Wait for it before changing the host array."""
    if not value.ndim:
        return upload_shards(value, sharding)
    rows: Any = _Rows(value, split.slices(size), size)
    return upload_shards(rows, sharding)


class _Rows:
    """A process's own rows, indexed by global row numbers."""

    def __init__(self, value: HostArray, slices: Sequence[slice], size: int) -> None:
        self._value = value
        self._slices = slices
        self.shape = (size, *value.shape[1:])
        self.dtype = value.dtype

    def __getitem__(self, index: tuple[Any, ...]) -> HostArray:
        start, stop, _ = index[0].indices(self.shape[0])
        before = 0
        for piece in self._slices:
            if piece.start <= start < piece.stop:
                break
            before += piece.stop - piece.start
        first = before + start - piece.start if self._slices else 0
        return self._value[(slice(first, first + stop - start), *index[1:])]


def checked_batch(tree: Any, layouts: Layouts, split: Split, caller: Caller) -> Batch:
    """Return a reader's batch as host arrays, with their layouts.

    Args:
      caller: the call site of `feed`, for warnings.

    Raises:
      UsageError: values that are not arrays or do not fit 32 bits, layouts that do not fit, leaves
        of unequal rows, or no leaves; all of them, by path.
    """
    problems: list[str] = []
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    values = [_host(value, path, problems) for path, value in pairs]
    for (path, _), value in zip(pairs, values, strict=True):
        why = unfit(value)
        if why:
            problems.append(f"{path_text(path)}: {why}")
    raise_all("feed", problems)
    tree = jax.tree.unflatten(treedef, values)
    with use_mesh(split.layout.mesh):  # JAX's mesh in force is that of the caller's thread
        leaves, treedef = leaf_layouts(tree, layouts, problems)
    problems += [f"{leaf.path}: {why}" for leaf in leaves if (why := _misfit(leaf, split))]
    for leaf in leaves:
        cannot_be_pending(leaf, problems)
    raise_all("feed", problems)
    warn_of_narrowing("feed", ((leaf.path, leaf.value) for leaf in leaves), caller)
    leaves = [leaf._replace(value=as_numpy(leaf.value)) for leaf in leaves]
    rows = {leaf.path: leaf.value.shape[0] for leaf in leaves if leaf.value.ndim}
    if len({*rows.values()}) != 1:
        text = ", ".join(f"{path} has {count}" for path, count in rows.items()) or "none has dims"
        raise UsageError(f"feed: the leaves of a batch must have equally many rows (dim 0): {text}")
    return Batch(leaves, treedef, next(iter(rows.values())))


def _host(value: Any, path: Path, problems: list[str]) -> Any:
    """Convert another library's tensor to a NumPy array; return other values unchanged."""
    if isinstance(value, jax.Array | np.ndarray | np.generic) or not hasattr(value, "__array__"):
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # on a device, or dtype NumPy lacks
        what = f"is {with_article(type(value).__name__)} of {getattr(value, 'dtype', 'no dtype')}"
        problems.append(
            f"{path_text(path)}: {what} that NumPy cannot read ({error}); convert it in the reader"
        )
        return np.zeros(())


def _misfit(leaf: Leaf, split: Split) -> str:
    """Return why a leaf cannot be part of a batch, or an empty string."""
    if is_key(leaf.value):
        return (
            "holds PRNG keys; feed jax.random.key_data(keys) and call jax.random.wrap_key_data "
            "inside jit, or feed row numbers and fold_in them there"
        )
    if isinstance(leaf.value, jax.Array) and not leaf.value.is_fully_addressable:
        return "is spread over processes already; feed takes the rows of this one"
    if leaf.layout.rank and Layout(leaf.layout.mesh, leaf.layout.dims[0]) != split.layout:
        return (
            f"{leaf.layout!r} spreads rows otherwise than {split.layout!r}; all leaves of a batch "
            "have theirs on the same axes: relayout leaves that need another layout"
        )
    return ""


def _filled(value: HostArray, rows: int, wanted: int) -> HostArray:
    """Return an array of this many rows: the first `rows` from the value, the rest zeros."""
    if not value.ndim:
        return value
    whole = np.zeros((wanted, *value.shape[1:]), value.dtype)
    whole[:rows] = value[:rows]
    return whole


def _digest(value: HostArray, places: Sequence[int], each: int) -> str:
    """Return an unsampled digest of some shards' rows: they are about to be copied anyway."""
    if not value.ndim:
        return ""
    pieces = [value[place * each : (place + 1) * each] for place in places]
    return " ".join(f"{len(piece)}:{digest(piece, whole=True)}" for piece in pieces)


@lru_cache(maxsize=1024)
def _line(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout) -> str:
    """Describe a leaf; shown as `['x']: float32[rows,4] as (data, -)`."""
    sizes = ",".join(["rows", *map(str, shape[1:])] if shape else [])
    dims = layout.text.removesuffix(f" @ {layout.mesh.text}")
    shown = dims if dims.startswith("(") else f"({dims})"
    kind = str(dtype.newbyteorder("="))
    return SpecLine(path=path, dtype=kind, shape=f"[{sizes}]", layout=shown).packed
