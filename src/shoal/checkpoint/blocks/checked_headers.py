"""Check that headers of data files agree with manifest and index: other readers trust them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.checkpoint.disk.opening import Checkpoint
from shoal.checkpoint.disk.refusal import absent
from shoal.checkpoint.format import header
from shoal.checkpoint.format.joined_parts import data_metadata
from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.checkpoint.tree import names
from shoal.checkpoint.tree.dtypes import dtype_of, entry_shape, storage_of
from shoal.errors import CorruptCheckpointError

_SHOWN = 100  # characters of a name


class _EntryRecord(NamedTuple):
    """The dtype, shape and byte range of an entry; offsets count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} at bytes {self.begin:,} to {self.end:,}"


def check_header(checkpoint: Checkpoint, file: int) -> None:
    """Reject a data file whose header contradicts manifest and index, whatever its hashes.

    Raises:
      CorruptCheckpointError: names the file and the first leaf that differs.
    """
    record, path = checkpoint.index.files[file], checkpoint.folder.path
    try:
        found = header.parse_header(_read(checkpoint, file), record.bytes, record.name)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}", path=path, file=record.name) from None
    except FileNotFoundError:
        detail = f"{path}: {record.name}: {absent(path, record.name)}"
        raise CorruptCheckpointError(detail, path=path, file=record.name) from None
    leaf, detail = "", ""
    entries = {
        one.name: _EntryRecord(
            one.dtype, one.shape, found.num_bytes + one.begin, found.num_bytes + one.end
        )
        for one in found.entries
    }
    if found.num_bytes % PAGE_BYTES:
        detail = f"has {found.num_bytes:,} bytes, no multiple of {PAGE_BYTES}"
    elif found.metadata != data_metadata(checkpoint.commit.attempt):
        detail = f"is not of attempt {checkpoint.commit.attempt}"
    else:
        leaf, detail = _difference(entries, _expected(checkpoint, file))
    if detail:
        raise CorruptCheckpointError(
            f"{path}: {record.name}: its header {detail}\n"
            "its bytes are as written, but other readers would misread them; "
            "restore another step",
            path=path,
            file=record.name,
            leaf=leaf,
        )


def _read(checkpoint: Checkpoint, file: int) -> memoryview:
    """Read a file from its beginning, as far as its header may reach."""
    record = checkpoint.index.files[file]
    first = memoryview(bytearray(8))
    checkpoint.folder.read_at(record.name, 0, first)
    whole = memoryview(bytearray(header.header_bytes(first, record.bytes, record.name)))
    checkpoint.folder.read_at(record.name, 0, whole)
    return whole


def _expected(checkpoint: Checkpoint, file: int) -> dict[str, tuple[str, _EntryRecord]]:
    """Return, by entry name, the leaf and what manifest and index say of it."""
    chunks, found = checkpoint.index.chunks, {}
    for row in np.flatnonzero(chunks.file == file).tolist():
        leaf = checkpoint.manifest.leaves[int(chunks.leaf[row])]
        dtype, shape = dtype_of(leaf.dtype), leaf.stored_shape
        origin, extent = chunks.origin[row].tolist(), chunks.extent[row].tolist()
        if leaf.kind == "per_process":
            name, box = names.entry_of_process(leaf.name, origin[0]), tuple(extent[:1])
        else:
            box = tuple(extent[: len(shape)])
            name = names.entry(leaf.name, None if box == shape else origin[: len(shape)])
        places = int(chunks.begin[row]), int(chunks.end[row])
        said = _EntryRecord(storage_of(dtype).entry, entry_shape(dtype, box), *places)
        found[name] = leaf.name, said
    return found


def _difference(
    entries: dict[str, _EntryRecord], expected: dict[str, tuple[str, _EntryRecord]]
) -> tuple[str, str]:
    """Describe the first leaf that differs; empty if none does."""
    for name, (leaf, said) in expected.items():
        if name not in entries:
            return leaf, f"lacks the entry {name[:_SHOWN]!r}, which the index has there"
        if entries[name] != said:
            detail = f"says that {name[:_SHOWN]!r} is {entries[name]}"
            return leaf, f"{detail}; by manifest and index it is {said}"
    if more := entries.keys() - expected.keys():
        return "", f"has an entry {min(more)[:_SHOWN]!r}, which the index lacks"
    return "", ""
