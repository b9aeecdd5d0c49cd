"""Open a committed checkpoint: COMMIT vouches for manifest and index, these for all else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shoal.checkpoint.disk import step_folder
from shoal.checkpoint.disk.refusal import absent
from shoal.checkpoint.disk.step_folder import COMMIT, in_folder
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format import json_files, table_files, tiling
from shoal.checkpoint.format.records import (
    Blob,
    Chunks,
    Commit,
    Index,
    IntArray,
    LeafRecord,
    Manifest,
)
from shoal.checkpoint.planning.read_plan import Items
from shoal.checkpoint.tree.dtypes import dtype_of, storage_of
from shoal.errors import CheckpointError, CorruptCheckpointError, NotCommittedError, StorageError
from shoal.hashing import seal
from shoal.paths import dangling_link


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A committed checkpoint; its manifest and index are verified."""

    folder: Folder
    commit: Commit
    manifest: Manifest
    index: Index

    @cached_property
    def chunks(self) -> Chunks:
        """The index's chunks, with per-process values concatenated into one row."""
        return replace(self.index.chunks, origin=self._origins)

    @cached_property
    def _origins(self) -> IntArray:
        chunks = self.index.chunks
        own = [n for n, leaf in enumerate(self.manifest.leaves) if leaf.kind == "per_process"]
        if not own:
            return chunks.origin
        origin = chunks.origin.copy()
        for leaf in own:
            rows = np.flatnonzero(chunks.leaf == leaf)
            sizes = chunks.extent[rows, 0]
            origin[rows, 0] = np.cumsum(sizes) - sizes
        return origin

    @cached_property
    def items(self) -> Items:
        """Element sizes of each leaf; 0 bytes for leaves without data in files."""
        return _items(self.manifest.leaves)

    def values_of(self, leaf: int) -> dict[int, tuple[int, int]]:
        """Return the first byte in `chunks` and the length of each process's value."""
        rows = np.flatnonzero(self.chunks.leaf == leaf)
        processes = self.index.chunks.origin[rows, 0].tolist()
        first, sizes = self.chunks.origin[rows, 0], self.chunks.extent[rows, 0]
        return dict(zip(processes, zip(first.tolist(), sizes.tolist(), strict=True), strict=True))


def open_folder(folder: Folder) -> Checkpoint:
    """Open the checkpoint committed in a directory.

    Raises:
      NotCommittedError: nothing is committed there.
      CorruptCheckpointError, UnsupportedCheckpointError, StorageError: it cannot be read.
    """
    commit = step_folder.committed(folder)
    if commit is None:
        raise NotCommittedError(f"{folder.path}: {_what_is_there(folder)}", path=folder.path)
    try:
        manifest_data = _read_blob(folder, commit.manifest)
        index_data = _read_blob(folder, commit.index)
    except (CorruptCheckpointError, StorageError) as error:
        raise deleted_meanwhile(folder, commit.attempt) or error from None
    with in_folder(folder):
        manifest = json_files.decode_manifest(manifest_data, commit.manifest.name)
        index = table_files.decode_index(index_data, commit.index.name)
        tiling.check_whole(commit, manifest, index)
    return Checkpoint(folder, commit, manifest, index)


def deleted_meanwhile(folder: Folder, attempt: str) -> NotCommittedError | None:
    """Return the error for a checkpoint that was deleted after it was opened; None if it stands.

    Retention, by another job for example, deletes steps that a reader may have open: what the
    reader then lacks is no damage.
    """
    try:
        commit = step_folder.committed(folder)
    except CheckpointError:
        return None
    if commit is not None and commit.attempt == attempt:
        return None
    return NotCommittedError(f"{folder.path}: was deleted while it was read", path=folder.path)


def _items(leaves: Sequence[LeafRecord]) -> Items:
    num_bytes = np.zeros(len(leaves), dtype=np.int64)
    per_byte = np.ones(len(leaves), dtype=np.int64)
    for number, leaf in enumerate(leaves):
        if leaf.has_data:
            how = storage_of(dtype_of(leaf.dtype))
            num_bytes[number], per_byte[number] = how.item_bytes, how.per_byte
    return Items(num_bytes, per_byte)


def _read_blob(folder: Folder, blob: Blob) -> bytes:
    """Read a file that COMMIT vouches for."""
    try:
        data = folder.read(blob.name, blob.bytes + 1)
        if len(data) == blob.bytes and seal(data).hex() == blob.sha256:
            return data
        what = "has changed since it was saved: its hash differs"
        if len(data) != blob.bytes:
            what = f"has changed since it was saved: it had {blob.bytes:,} bytes"
    except FileNotFoundError:
        what = absent(folder.path, blob.name)
    raise CorruptCheckpointError(
        f"{folder.path}: {blob.name} {what}\n"
        "restore another step, or put an undamaged copy in its place",
        path=folder.path,
        file=blob.name,
    )


def _what_is_there(folder: Folder) -> str:
    """Return why there is nothing to read."""
    names = folder.names()
    at = COMMIT if COMMIT in names else ""
    if link := dangling_link(os.path.join(folder.path, at)):
        return link
    steps = [name for name in names if name.startswith("step_")]
    if steps:
        return f"is not a checkpoint but a history of {len(steps)} steps; pass the path of one"
    if words := step_folder.unfinished(folder):
        return f"nothing is committed; {words}"
    return "is not a checkpoint: it has no file COMMIT" if names else "nothing is saved there"
