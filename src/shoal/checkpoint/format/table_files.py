"""Part and index ↔ bytes: a safetensors file of integer tables.

The last 32 bytes are the SHA-256 of all bytes before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.checkpoint.format import header
from shoal.checkpoint.format.fields import Fields, check_version, head
from shoal.checkpoint.format.header import strict_json
from shoal.checkpoint.format.records import (
    BLOCK_BYTES,
    LARGEST,
    MOST_DIMS,
    Chunks,
    FileRecord,
    Index,
    IntArray,
    Manifest,
    Part,
    data_name,
)
from shoal.checkpoint.format.tiling import check_index, check_places, join_chunks
from shoal.errors import CorruptCheckpointError
from shoal.hashing import SEAL_BYTES, seal

Array = np.ndarray[Any, Any]
_SEAL = "sha256"
_DIGITS = re.compile("[0-9]{5,9}", re.ASCII)
_COLUMNS = ("leaf", "file", "begin", "end", "origin", "extent")
_AS_JSON = frozenset({"version", "required", "process", "files"})
_KEYS = frozenset(
    ["format", "file", "version", "required", "attempt", "num_processes", "process", "files"]
)


def first_blocks(files: Sequence[FileRecord]) -> IntArray:
    """Return each file's first block number, and the total number of blocks at the end."""
    counts = [-(-record.bytes // BLOCK_BYTES) for record in files]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def encode_part(part: Part) -> bytes:
    """Encode a part."""
    return _encode(
        {**head("part"), "attempt": part.attempt, "process": part.process},
        part.files,
        part.chunks,
        {"block_hash": part.block_hash},
    )


def encode_index(index: Index) -> bytes:
    """Encode an index, deterministically."""
    return _encode(
        {**head("index"), "attempt": index.attempt},
        index.files,
        index.chunks,
        {"first_block": index.first_block, "block_hash": index.block_hash},
    )


def decode_part(data: bytes, file: str = "a part") -> Part:
    """Decode a part, and check its consistency.

    Raises:
      CorruptCheckpointError: it is malformed, or its bytes have changed.
      UnsupportedCheckpointError: it is of a later version.
    """
    fields, tables = _decode(data, "part", file)
    process = fields.size("process")
    files = _files(fields)
    if any(record.process != process for record in files):
        fields.refuse(f"is of process {process} and has files of others")
    chunks, block_hash = _checked(fields, tables, files)
    return Part(
        attempt=fields.attempt(), process=process, files=files, chunks=chunks, block_hash=block_hash
    )


def decode_index(data: bytes, file: str = "the index") -> Index:
    """Decode an index, and check its consistency.

    Raises:
      CorruptCheckpointError: it is malformed, or its bytes have changed.
      UnsupportedCheckpointError: it is of a later version.
    """
    fields, tables = _decode(data, "index", file)
    files = _files(fields)
    chunks, block_hash = _checked(fields, tables, files)
    wanted = first_blocks(files)
    first_block = tables.get("first_block")
    if first_block is None or not np.array_equal(first_block, wanted):
        fields.refuse("gives a wrong first block for a file")
    return Index(
        attempt=fields.attempt(),
        files=files,
        chunks=chunks,
        first_block=wanted,
        block_hash=block_hash,
    )


def _encode(
    head: dict[str, Any], files: Sequence[FileRecord], chunks: Chunks, more: dict[str, Array]
) -> bytes:
    head["files"] = [[record.name, record.bytes, record.process] for record in files]
    tables: dict[str, Array] = {key: getattr(chunks, key) for key in _COLUMNS} | more
    tables = {
        key: np.ascontiguousarray(table, "<u8" if key == "block_hash" else "<i8")
        for key, table in tables.items()
    }
    entries, begin = [], 0
    for key, table in tables.items():
        dtype = "U64" if key == "block_hash" else "I64"
        entries.append(
            header.Entry(
                name=key, dtype=dtype, shape=table.shape, begin=begin, end=begin + table.nbytes
            )
        )
        begin += table.nbytes
    entries.append(
        header.Entry(
            name=_SEAL, dtype="U8", shape=(SEAL_BYTES,), begin=begin, end=begin + SEAL_BYTES
        )
    )
    metadata = {key: value if type(value) is str else _text(value) for key, value in head.items()}
    first = header.build_header(entries, metadata, page_bytes=64)
    body = b"".join([first, *(table.tobytes() for table in tables.values())])
    return body + seal(body)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _decode(data: bytes, kind: str, file: str) -> tuple[Fields, dict[str, Array]]:
    """Check the seal, the version and the tables' dtypes."""
    if seal(memoryview(data)[:-SEAL_BYTES]) != data[-SEAL_BYTES:]:
        raise CorruptCheckpointError(
            f"{file} is damaged: it does not end with the SHA-256 of the bytes before it", file=file
        )
    parsed = header.parse_header(data, len(data), file)
    head = {
        key: strict_json(text, file) if key in _AS_JSON else text
        for key, text in parsed.metadata.items()
    }
    fields = Fields(head, file)
    names = (*_COLUMNS, *(["first_block"] if kind == "index" else []), "block_hash", _SEAL)
    if check_version(fields, kind):
        fields.only(_KEYS)
        if set(names) != {entry.name for entry in parsed.entries}:
            fields.refuse(f"lacks one of the tables {', '.join(names)}")
    tables: dict[str, Array] = {}
    for entry in parsed.entries:
        if entry.dtype not in ("I64", "U64") or max(entry.shape, default=0) > len(data):
            continue
        offset = parsed.num_bytes + entry.begin
        dtype = np.dtype("<i8" if entry.dtype == "I64" else "<u8")
        count = (entry.end - entry.begin) // 8
        tables[entry.name] = np.frombuffer(data, dtype, count, offset).reshape(entry.shape)
    if not parsed.entries or parsed.entries[-1] != (
        _SEAL,
        "U8",
        (SEAL_BYTES,),
        *_last(parsed, data),
    ):
        fields.refuse("does not end with its own hash")
    return fields, tables


def _last(parsed: header.Header, data: bytes) -> tuple[int, int]:
    end = len(data) - parsed.num_bytes
    return end - SEAL_BYTES, end


def _files(fields: Fields) -> tuple[FileRecord, ...]:
    """Return the files; their names are derived, so no path can leave the directory."""
    listed = fields.found.get("files")
    attempt = fields.attempt()
    records: list[FileRecord] = []
    place = 0
    for row in listed if type(listed) is list else [None]:
        if type(row) is not list or [type(value) for value in row] != [str, int, int]:
            fields.refuse("lists invalid files")
        name, num_bytes, process = row
        if not (0 <= num_bytes < LARGEST and 0 <= process < 1 << 31):
            fields.refuse(f"lists a file of {num_bytes} bytes of process {process}")
        last = records[-1].process if records else -1
        place = place + 1 if process == last else 0
        if process < last:
            fields.refuse("lists files not in the order of their processes")
        of = _DIGITS.match(name.partition("-of-")[2])
        wanted = data_name(attempt, process, int(of.group()) if of else 0, place)
        if name != wanted:
            fields.refuse(f"lists a file {name[:100]!r} that should be {wanted!r}")
        records.append(FileRecord(name, num_bytes, process))
    return tuple(records)


def _checked(
    fields: Fields, tables: dict[str, Array], files: Sequence[FileRecord]
) -> tuple[Chunks, Array]:
    columns = []
    count = tables["leaf"].shape if "leaf" in tables else ()
    for key in _COLUMNS:
        table = tables.get(key)
        rank = 2 if key in ("origin", "extent") else 1
        if table is None or table.dtype.kind != "i" or table.ndim != rank:
            fields.refuse(f"has no table {key!r}")
        if rank == 2 and table.shape[1] > MOST_DIMS:
            fields.refuse(f"has a table {key!r} of {table.shape[1]} dims")
        if table.shape[:1] != count or (rank == 2 and table.shape != tables["origin"].shape):
            fields.refuse(f"has a table {key!r} of another length")
        columns.append(table.astype(np.int64, copy=False))
    block_hash = tables.get("block_hash")
    wanted = int(first_blocks(files)[-1])
    if block_hash is None or block_hash.dtype.kind != "u" or block_hash.shape != (wanted,):
        fields.refuse(f"does not have one hash for each of the {wanted} blocks of its files")
    chunks = Chunks(*columns)
    check_places(chunks, files, fields.file)
    return chunks, block_hash


# ---- Join the parts of all processes into the index of a checkpoint; metadata of data files.


def data_metadata(attempt: str) -> dict[str, str]:
    """Return the metadata in the header of a data file."""
    return {"format": "shoal-checkpoint", "attempt": attempt}


def join_parts(manifest: Manifest, parts: Sequence[Part]) -> Index:
    """Return the index of all parts, checked against the manifest; the same on every process.

    Raises:
      CorruptCheckpointError: a part is missing or of another attempt, or leaves are not tiled.
    """
    parts = sorted(parts, key=lambda part: part.process)
    there = [part.process for part in parts]
    if len(parts) != manifest.num_processes or there != list(range(len(parts))):
        raise CorruptCheckpointError(
            f"there are parts of the processes {there}, and there should be one of each of "
            f"{manifest.num_processes}"
        )
    wrong = [part.process for part in parts if part.attempt != manifest.attempt]
    if wrong:
        raise CorruptCheckpointError(f"the parts of processes {wrong} are of another attempt")
    files = tuple([record for part in parts for record in part.files])
    chunks = join_chunks(parts)
    block_hash = np.concatenate([np.zeros(0, np.uint64), *(part.block_hash for part in parts)])
    index = Index(
        manifest.attempt, files, chunks, first_block=first_blocks(files), block_hash=block_hash
    )
    check_places(chunks, files, "the parts together")
    check_index(manifest, index, file="the parts together")
    return index
