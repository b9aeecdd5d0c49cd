"""A small save of several processes at the level of files, and the look whether it is whole."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import xxhash

from shoal.checkpoint.blocks.image import FileImage, Piece
from shoal.checkpoint.blocks.writer import write_files
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.format import json_files, records, table_files, tiling
from shoal.checkpoint.format.header import Entry, build_header
from shoal.checkpoint.format.records import Chunks
from shoal.checkpoint.store.interface import Files, Store
from shoal.checkpoint.tree.flatten import flatten_tree
from shoal.checkpoint.tree.names import entry

ROWS, COLUMNS = 3, 1000  # of each process
OWNER = {"host": "here", "pid": 1}


def store_of(place: Files) -> Store:
    """Return a store, or that of a folder."""
    return place if hasattr(place, "commit") else LocalStore(place)


@dataclass(frozen=True)
class Save:
    """One attempt; every byte of its only leaf is `value`."""

    attempt: str
    value: int = 7
    processes: int = 2
    step: int = 5

    @property
    def manifest(self) -> records.Manifest:
        shape = (ROWS * self.processes, COLUMNS)
        _, structure = flatten_tree({"w": np.zeros(0)})
        leaves = (records.LeafRecord("w", "array", "uint8", shape),)
        return records.Manifest(
            self.attempt, self.step, 1_700_000_000 * 10**9 + self.value, self.processes,
            structure, leaves, metrics={"loss": 0.5},
        )  # fmt: skip

    def begin(self, place: Files) -> None:
        store_of(place).begin(self.manifest, OWNER)

    def image(self, process: int) -> FileImage:
        extent = (ROWS, COLUMNS)
        size = ROWS * COLUMNS
        name = entry("w", (ROWS * process, 0))
        header = build_header(
            [Entry(name, "U8", extent, 0, size)], table_files.data_metadata(self.attempt)
        )
        where = (slice(0, ROWS), slice(0, COLUMNS))

        def values():
            return np.full(extent, self.value, np.uint8)

        piece = Piece(len(header), extent, np.dtype(np.uint8), 1, where, values)
        name = records.data_name(self.attempt, process, self.processes)
        return FileImage(name, header, len(header) + size, (piece,))

    def write(self, place: Files, process: int) -> None:
        """Write the data of a process, and its part."""
        image = self.image(process)
        (hashes,) = write_files(store_of(place), [image], None, lambda _: None)
        row = np.array([0])
        chunks = Chunks(
            row, row, row + len(image.header), row + image.num_bytes,
            np.array([[ROWS * process, 0]]), np.array([[ROWS, COLUMNS]]),
        )  # fmt: skip
        record = records.FileRecord(image.name, image.num_bytes, process)
        part = records.Part(self.attempt, process, (record,), chunks, hashes)
        store_of(place).write_part(part)

    def prepare(self, place: Files) -> Save:
        """Do all but the commit."""
        self.begin(place)
        for process in range(self.processes):
            self.write(place, process)
        return self

    def save(self, place: Files) -> records.Commit:
        """Do all."""
        self.prepare(place)
        return store_of(place).commit(self.attempt)


def value_of(place: Files, commit: records.Commit) -> int:
    """Check every byte that a commit vouches for; return the value of the leaf."""
    blobs = []
    for blob in (commit.manifest, commit.index):
        data = place.read(blob.name)
        assert len(data) == blob.bytes
        assert hashlib.sha256(data).hexdigest() == blob.sha256
        blobs.append(data)
    manifest, index = json_files.decode_manifest(blobs[0]), table_files.decode_index(blobs[1])
    tiling.check_index(manifest, index)
    values = set()
    for number, file in enumerate(index.files):
        data = place.read(file.name)
        assert len(data) == file.bytes
        first = int(index.first_block[number])
        for block, at in enumerate(range(0, len(data), records.BLOCK_BYTES)):
            digest = xxhash.xxh3_64_intdigest(data[at : at + records.BLOCK_BYTES])
            assert digest == int(index.block_hash[first + block])
        (row,) = np.flatnonzero(index.chunks.file == number)
        values |= set(data[index.chunks.begin[row] : index.chunks.end[row]])
    (value,) = values
    return value


def names_of(place: Files, commit: records.Commit) -> list[str]:
    """Return the files that remain of a save: COMMIT and what it vouches for."""
    index = table_files.decode_index(place.read(commit.index.name))
    data = [file.name for file in index.files]
    return sorted(["COMMIT", commit.manifest.name, commit.index.name, *data])
