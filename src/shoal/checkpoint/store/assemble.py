"""Assemble the parts of all processes into the index and the text of COMMIT, deterministically."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.checkpoint.format.json_files import decode_manifest
from shoal.checkpoint.format.records import (
    Blob,
    Commit,
    FileRecord,
    Index,
    Manifest,
    Part,
    manifest_name,
    part_name,
)
from shoal.checkpoint.format.table_files import decode_part, join_parts
from shoal.checkpoint.store.interface import Files, located
from shoal.checkpoint.store.step_names import check_place
from shoal.errors import CorruptCheckpointError
from shoal.hashing import seal
from shoal.runtime.system.threads import in_threads


def assemble(place: Files, attempt: str, most: int = 1) -> tuple[Manifest, Blob, Index]:
    """Read manifest and parts; check that they cover whole leaves and that their files exist.

    `most` files are read at a time.

    Raises:
      FileNotFoundError: manifest or a part is missing.
      CorruptCheckpointError: they contradict one another, the files, or the name of the directory.
    """
    name = manifest_name(attempt)
    text = place.read(name)
    with located(place.path):
        manifest = decode_manifest(text, name)
        check_place(place.path, manifest.step, name)
        parts: dict[int, Part] = {}

        def read(processes: Iterator[int]) -> None:
            for process in processes:
                own = part_name(attempt, process)
                parts[process] = decode_part(place.read(own), own)

        in_threads(read, range(manifest.num_processes), most)
        index = join_parts(manifest, [parts[process] for process in range(len(parts))])
        in_threads(lambda files: _check_files(place, files), index.files, most)
    return manifest, blob_record(name, text), index


def _check_files(place: Files, files: Iterator[FileRecord]) -> None:
    for file in files:
        try:
            size = place.size(file.name)
        except FileNotFoundError:
            problem = "is missing"
        else:
            if size == file.bytes:
                continue
            problem = f"has {size:,} bytes"
        raise CorruptCheckpointError(
            f"{file.name} {problem}; process {file.process} wrote {file.bytes:,}", file=file.name
        )


def blob_record(name: str, data: bytes) -> Blob:
    """Return COMMIT's record of a file."""
    return Blob(name, len(data), seal(data).hex())


def commit_of(manifest: Manifest, manifest_blob: Blob, index: Index, index_blob: Blob) -> Commit:
    """Return the contents of COMMIT, the same on every process that commits."""
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
