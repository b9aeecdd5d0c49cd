"""Parts of all processes → the index and the text of COMMIT. Whoever does it gets the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from shoal.checkpoint.format import (
    BLOCK_BYTES,
    Blob,
    Chunks,
    Commit,
    Index,
    IntArray,
    Manifest,
    Part,
    check_tiling,
    decode_manifest,
    decode_part,
)
from shoal.checkpoint.step_folder import in_folder, manifest_name, part_name
from shoal.checkpoint.storage import Folder
from shoal.errors import CorruptCheckpoint

__all__ = ["assemble", "blob_of", "commit_of", "joined"]


def assemble(folder: Folder, attempt: str) -> tuple[Manifest, Blob, Index]:
    """Read manifest and parts, and check that they tell of whole leaves and of files that exist.

    Raises:
      FileNotFoundError: manifest or a part is missing.
      CorruptCheckpoint: they contradict one another, or the files.
    """
    name = manifest_name(attempt)
    text = folder.read(name)
    with in_folder(folder):
        manifest = decode_manifest(text, name)
        parts = []
        for process in range(manifest.num_processes):
            own = part_name(attempt, process)
            part = decode_part(folder.read(own), own)
            if (part.attempt, part.process) != (attempt, process):
                raise CorruptCheckpoint(
                    f"{own} tells of process {part.process} in attempt {part.attempt}", file=own
                )
            parts.append(part)
        index = joined(attempt, parts)
        _check_files(folder, index)
        check_tiling(manifest, index.chunks)
    return manifest, blob_of(name, text), index


def _check_files(folder: Folder, index: Index) -> None:
    for file in index.files:
        try:
            size = folder.size(file.name)
        except FileNotFoundError:
            words = "is missing"
        else:
            if size == file.bytes:
                continue
            words = f"has {size:,} bytes"
        raise CorruptCheckpoint(
            f"{file.name} {words}; process {file.process} wrote {file.bytes:,}", file=file.name
        )


def joined(attempt: str, parts: Sequence[Part]) -> Index:
    """Return the index of what all processes wrote: `parts`, by process."""
    files = tuple(file for part in parts for file in part.files)
    first_file = np.cumsum([0, *(len(part.files) for part in parts)])
    tables = [part.chunks for part in parts]
    dims = max((table.origin.shape[1] for table in tables), default=0)
    leaf = _stacked([table.leaf for table in tables])
    origin = _stacked([_widened(table.origin, dims, 0) for table in tables], dims)
    extent = _stacked([_widened(table.extent, dims, 1) for table in tables], dims)
    numbers = [
        table.file + first for table, first in zip(tables, first_file.tolist(), strict=False)
    ]
    order = np.lexsort((*origin.T[::-1], leaf))
    chunks = Chunks(
        leaf[order],
        _stacked(numbers)[order],
        _stacked([table.begin for table in tables])[order],
        _stacked([table.end for table in tables])[order],
        origin[order],
        extent[order],
    )
    blocks = [-(-file.bytes // BLOCK_BYTES) for file in files]
    return Index(
        attempt,
        files,
        chunks,
        np.cumsum([0, *blocks], dtype=np.int64),
        np.concatenate([part.block_hash for part in parts] or [np.zeros(0, np.uint64)]),
    )


def _widened(rows: IntArray, dims: int, fill: int) -> IntArray:
    return np.pad(rows, ((0, 0), (0, dims - rows.shape[1])), constant_values=fill)


def _stacked(tables: Sequence[IntArray], dims: int | None = None) -> IntArray:
    empty = np.zeros(0 if dims is None else (0, dims), np.int64)
    return np.concatenate([empty, *tables])


def blob_of(name: str, data: bytes) -> Blob:
    """Return what COMMIT says of a file."""
    return Blob(name, len(data), hashlib.sha256(data).hexdigest())


def commit_of(manifest: Manifest, manifest_blob: Blob, index: Index, index_blob: Blob) -> Commit:
    """Return what COMMIT says: the same, whoever commits."""
    return Commit(
        attempt=manifest.attempt,
        step=manifest.step,
        created_ns=manifest.created_ns,
        manifest=manifest_blob,
        index=index_blob,
        data_bytes=sum(file.bytes for file in index.files),
        num_files=len(index.files),
        metrics=manifest.metrics,
    )
