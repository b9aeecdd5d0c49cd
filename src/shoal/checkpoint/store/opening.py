"""Open a committed checkpoint: COMMIT vouches for manifest and index, these for all else."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

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
from shoal.checkpoint.store.interface import Attempt, Store, confirmed, located
from shoal.checkpoint.store.step_names import COMMIT
from shoal.checkpoint.tree.dtypes import dtype_of, storage_of
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
    UnsupportedCheckpointError,
    counted,
)
from shoal.hashing import seal


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A committed checkpoint; its manifest and index are verified."""

    store: Store
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


def open_checkpoint(store: Store) -> Checkpoint:
    """Open the checkpoint committed in a place.

    Raises:
      NotCommittedError: nothing is committed there.
      CorruptCheckpointError, UnsupportedCheckpointError, StorageError: it cannot be read.
    """
    return confirmed(lambda: _opened(store))


def _opened(store: Store) -> Checkpoint:
    commit = store.committed()
    if commit is None:
        raise NotCommittedError(f"{store.path}: {_what_is_there(store)}", path=store.path)
    try:
        manifest_data = read_blob(store, commit.manifest)
        index_data = read_blob(store, commit.index)
    except (CorruptCheckpointError, StorageError) as error:
        raise deleted_meanwhile(store, commit.attempt) or error from None
    with located(store.path):
        manifest = json_files.decode_manifest(manifest_data, commit.manifest.name)
        index = table_files.decode_index(index_data, commit.index.name)
        tiling.check_whole(commit, manifest, index)
    return Checkpoint(store, commit, manifest, index)


def deleted_meanwhile(store: Store, attempt: str) -> NotCommittedError | None:
    """Return the error for a checkpoint that is gone since it was opened; None if it stands.

    Retention, by another job for example, deletes steps that a reader may have open, and a save
    may replace them: what the reader then lacks is no damage.
    """
    try:
        commit = store.committed()
    except CheckpointError:
        return None
    if commit is not None and commit.attempt == attempt:
        return None
    problem = "was deleted while it was read"
    if commit is not None:
        problem = "was replaced by another save while it was read: read it again"
    return NotCommittedError(f"{store.path}: {problem}", path=store.path)


def _items(leaves: Sequence[LeafRecord]) -> Items:
    num_bytes = np.zeros(len(leaves), dtype=np.int64)
    per_byte = np.ones(len(leaves), dtype=np.int64)
    for index, leaf in enumerate(leaves):
        if leaf.has_data:
            how = storage_of(dtype_of(leaf.dtype))
            num_bytes[index], per_byte[index] = how.item_bytes, how.per_byte
    return Items(num_bytes, per_byte)


def read_blob(store: Store, blob: Blob) -> bytes:
    """Read a file that COMMIT vouches for."""
    try:
        data = store.read(blob.name, blob.bytes + 1)
        if len(data) == blob.bytes and seal(data).hex() == blob.sha256:
            return data
        what = "has changed since it was saved: its hash differs"
        if len(data) != blob.bytes:
            what = f"has changed since it was saved: it had {blob.bytes:,} bytes"
    except FileNotFoundError:
        what = absent(store, blob.name)
    raise CorruptCheckpointError(
        f"{store.path}: {blob.name} {what}\n"
        "restore another step, or put an undamaged copy in its place",
        path=store.path,
        file=blob.name,
    )


def absent(store: Store, name: str) -> str:
    """Return how a file is not there: it "is missing", or is a link that leads nowhere."""
    why = store.why_absent(name)
    return f"is missing: {why}" if why else "is missing"


def unfinished(store: Store, save: str = "its save") -> str:
    """Return what is known of a step that is not committed: "its save still runs (…)"; or "".

    Which of several attempts will be committed is open: the one refreshed last is described, in
    words about `save`.
    """
    why = store.why_absent()
    if why:
        return why
    with contextlib.suppress(CorruptCheckpointError, UnsupportedCheckpointError):
        live = [attempt for attempt in store.state().attempts if attempt.is_live]
        if live:
            last = min(live, key=lambda attempt: attempt.idle_s)
            return _unfinished(save, last, store.pace.lease_s)
    return ""


def _unfinished(save: str, last: Attempt, lease_s: float) -> str:
    by = f"by {last.owner.get('host', '?')}, pid {last.owner.get('pid', '?')}"
    who = f"({by}, touched {last.idle_s:.0f} s ago)"
    if last.idle_s < lease_s:
        return f"{save} still runs {who}"
    if last.is_complete:
        return f"{save} is complete, but not committed {who}: `shoal ckpt recover` commits it"
    return f"{save} ended before it was complete {who}"


def _what_is_there(store: Store) -> str:
    """Return why there is nothing to read."""
    names = store.names()
    name = COMMIT if COMMIT in names else ""
    link = store.why_absent(name)
    if link:
        return link
    steps = store.steps()
    if steps:
        count = counted(len(steps), "step")
        return f"is not a checkpoint but a history of {count}; pass the path of one"
    attempts = unfinished(store)
    if attempts:
        return f"nothing is committed; {attempts}"
    return "is not a checkpoint: it has no file COMMIT" if names else "nothing is saved there"
