"""Describe a checkpoint without its data, for programs and `shoal ckpt show`. Needs no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.checkpoint.at import Path, store_at
from shoal.checkpoint.format.records import layout_and_memory
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.opening import Checkpoint, open_checkpoint
from shoal.checkpoint.store.step_names import COMMIT
from shoal.checkpoint.tree.plain_values import decode_value, encode_value
from shoal.colour import local
from shoal.errors import UsageError, counted


@dataclass(frozen=True)
class SavedLeaf:
    """One leaf of a checkpoint."""

    name: str  # "params/w"
    kind: str  # "array", "key" (PRNG keys), "scalar" (of NumPy), "int", "str", …, "per_process"
    dtype: str  # "float32": of data in files; "" for values stored in the manifest
    shape: tuple[int, ...]
    bytes: int  # in files, each counted once
    chunks: int  # boxes in files
    layout: str  # the saved layout, as `Layout.parse` reads it; "" if none
    memory: str  # memory kind, such as "pinned_host"; "" is the default
    impl: str  # generator of a PRNG key
    value: Any  # of a leaf that is not an array and at most 64 KiB; else None

    def to_json(self) -> dict[str, Any]:
        """Return it as in `shoal ckpt show --json`."""
        value = None if self.dtype else encode_value(self.value)
        return {**vars(self), "shape": list(self.shape), "value": value}


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a checkpoint. Its `str` is a table."""

    path: str
    step: int | None
    attempt: str  # id of the save
    saved_ns: int  # when the save began, since 1970, UTC
    by: dict[str, str]  # versions: shoal, numpy, jax
    processes: int  # number of processes that saved it
    mesh: str  # as `Mesh.parse` reads it; "" if there was none
    bytes: int  # of all data files
    files: int  # with data
    pinned: bool
    metrics: dict[str, float]
    user: dict[str, Any]  # as given to `save(user=…)`
    leaves: dict[str, SavedLeaf] = field(repr=False)  # by name, in the order of the tree

    def to_json(self) -> dict[str, Any]:
        """Return it as in `shoal ckpt show --json`."""
        leaves = [leaf.to_json() for leaf in self.leaves.values()]
        plain = {"by": dict(self.by), "metrics": dict(self.metrics), "user": dict(self.user)}
        return {**vars(self), **plain, "leaves": leaves}

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        count = counted(len(self.leaves), "leaf", "leaves")
        head = f"{self.path}{step}: {count}, {self.bytes} bytes"
        rows = [
            (leaf.name, _what(leaf), leaf.layout or _value(leaf)) for leaf in self.leaves.values()
        ]
        widths = [max((len(row[n]) for row in rows), default=0) for n in range(2)]
        lines = [f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}".rstrip() for a, b, c in rows]
        return "\n".join([head, *lines])


@local
def checkpoint_info(path: Path, *, step: int | None = None) -> CheckpointInfo:
    """Return a checkpoint's contents: step, user data, metrics; names, shapes, dtypes, layouts.

    Local.

    Reads metadata only. Needs no JAX. `shoal ckpt show --json` prints the same.

    Args:
      path: a checkpoint, or a run directory, of which the newest step is described.
      step: this step of the run directory.

    Raises:
      NotCommittedError: nothing is saved there, or not that step.
      CorruptCheckpointError, UnsupportedCheckpointError, StorageError: it cannot be read.
      UsageError: `step` was given for a single checkpoint.

    Example:
      >>> import tempfile, numpy as np, shoal
      >>> path = tempfile.mkdtemp() + "/model"
      >>> shoal.save(path, {"w": np.ones((3, 2)), "epoch": 2}, user={"commit": "a1b2c3"})
      >>> found = shoal.checkpoint_info(path)
      >>> found.user["commit"], list(found.leaves), found.leaves["epoch"].value
      ('a1b2c3', ['epoch', 'w'], 2)
      >>> found.leaves["w"].shape, found.leaves["w"].dtype
      ((3, 2), 'float64')
    """
    store = store_at(path, f"checkpoint_info: path={path!r}")
    if COMMIT in store.names() or not store.steps():
        if step is not None:
            raise UsageError(f"checkpoint_info: {store.path} is not a history: omit step={step!r}")
        return info_of(store)
    wanted = None if step is None else saved_steps.step_number("checkpoint_info", step)
    chosen = saved_steps.chosen(store, wanted, skip_corrupt=False)
    if chosen is None:
        raise saved_steps.none_saved(store)
    return info_of(store.step(chosen))


def info_of(store: Store) -> CheckpointInfo:
    """Like `checkpoint_info`, for one checkpoint."""
    checkpoint = open_checkpoint(store)
    commit, manifest = checkpoint.commit, checkpoint.manifest
    leaves = {leaf.name: _leaf(checkpoint, n) for n, leaf in enumerate(manifest.leaves)}
    return CheckpointInfo(
        path=store.path,
        step=commit.step,
        attempt=commit.attempt,
        saved_ns=commit.created_ns,
        by=dict(manifest.writer),
        processes=manifest.num_processes,
        mesh=manifest.mesh,
        bytes=commit.data_bytes,
        files=commit.num_files,
        pinned=store.is_pinned,
        metrics=dict(commit.metrics),
        user=dict(manifest.user),
        leaves=leaves,
    )


def _leaf(checkpoint: Checkpoint, index: int) -> SavedLeaf:
    leaf, chunks = checkpoint.manifest.leaves[index], checkpoint.index.chunks
    first, last = np.searchsorted(chunks.leaf, [index, index + 1])
    layout, memory = layout_and_memory(leaf.layout)
    return SavedLeaf(
        name=leaf.name,
        kind=leaf.kind,
        dtype=leaf.dtype,
        shape=leaf.shape,
        bytes=int((chunks.end[first:last] - chunks.begin[first:last]).sum()),
        chunks=int(last - first),
        layout=layout,
        memory=memory,
        impl=leaf.impl,
        value=None if leaf.has_data else decode_value(leaf.kind, leaf.value),
    )


def _what(leaf: SavedLeaf) -> str:
    if leaf.kind == "per_process":
        return "of each process"
    kind = f"key<{leaf.impl}>" if leaf.impl else leaf.dtype or leaf.kind
    return f"{kind}[{','.join(map(str, leaf.shape))}]" if leaf.dtype else kind


def _value(leaf: SavedLeaf) -> str:
    return "" if leaf.dtype else ascii(leaf.value)[:60]
