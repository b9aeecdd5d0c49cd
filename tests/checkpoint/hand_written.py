"""Checkpoints for tests of reading, written without what saves: cut as a test likes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shoal.checkpoint.disk import committing
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.format.blobs import encode_tree
from shoal.checkpoint.format.records import (
    BLOCK_BYTES,
    FileRecord,
    LeafRecord,
    Manifest,
    Part,
)
from shoal.checkpoint.planning.file_layout import lay_out
from shoal.checkpoint.planning.who_writes import Box, WriteBox
from shoal.checkpoint.tree import dtypes, plain_values
from shoal.checkpoint.tree.flatten import PerProcess, flatten_tree
from shoal.checkpoint.tree.names import name_of

ATTEMPT = "00000000000a"
Cut = Callable[[str, tuple[int, ...]], list[Box]]


def whole(name: str, shape: tuple[int, ...]) -> list[Box]:
    """One chunk."""
    return [Box((0,) * len(shape), shape)]


def grid(*counts: int) -> Cut:
    """Cut each of the first dims into that many pieces, as even as can be."""

    def cut(name: str, shape: tuple[int, ...]) -> list[Box]:
        if 0 in shape:
            return whole(name, shape)
        spans = []
        for dim, size in enumerate(shape):
            count = min(counts[dim] if dim < len(counts) else 1, max(size, 1))
            edges = [size * k // count for k in range(count + 1)]
            spans.append(list(itertools.pairwise(edges)))
        boxes = itertools.product(*spans)
        return [Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]

    return cut


def write(
    path: Path, tree: Any, cut: Cut = whole, *, processes: int = 1, attempt: str = ATTEMPT,
    step: int | None = None, max_file_bytes: int = 1 << 34,
) -> None:  # fmt: skip
    """Write and commit a tree; its chunks are dealt to the processes in turn."""
    found, structure = flatten_tree(tree)
    records, data = _records(found)
    manifest = Manifest(attempt, step, 1_700_000_000 * 10**9, processes, structure, tuple(records))
    folder = LocalFolder(path)
    committing.begin_attempt(folder, manifest, {"host": "here", "pid": 1})
    turn = 0
    shares: list[list[tuple[WriteBox, bytes]]] = [[] for _ in range(processes)]
    for number, record in enumerate(records):
        if record.kind == "per_process":
            for process, share in enumerate(shares):
                blob = encode_tree(found[number][1].value[process])
                box = Box((process,), (len(blob),))
                share.append((WriteBox(number, record, box), blob))
        elif number in data:
            for box in sorted(cut(record.name, record.stored_shape)):
                inside = tuple(slice(a, a + n) for a, n in zip(box.origin, box.extent, strict=True))
                packed = dtypes.pack_elements(data[number][(*inside, ...)]).tobytes()
                shares[turn % processes].append((WriteBox(number, record, box), packed))
                turn += 1
    for process, share in enumerate(shares):
        _write_part(folder, manifest, process, share, max_file_bytes)
    committing.commit(folder, attempt)


def _records(found: list[tuple[Any, Any]]) -> tuple[list[LeafRecord], dict[int, np.ndarray]]:
    """Return what each leaf is, and the values of those with data, by number."""
    records: list[LeafRecord] = []
    data: dict[int, np.ndarray] = {}
    for number, (tree_path, value) in enumerate(found):
        name = name_of(tree_path)
        if isinstance(value, PerProcess):
            records.append(LeafRecord(name, "per_process", "uint8"))
        elif isinstance(value, np.ndarray):
            dtype = dtypes.dtype_name(value.dtype)
            records.append(LeafRecord(name, "array", dtype, value.shape))
            data[number] = value
        elif (bulk := plain_values.bulk_of(value)) is not None:
            records.append(LeafRecord(name, plain_values.kind_of(value), "uint8", bulk.shape))
            data[number] = bulk
        else:
            record = LeafRecord(
                name, plain_values.kind_of(value), value=plain_values.encode_value(value)
            )
            records.append(record)
    return records, data


def _write_part(
    folder: LocalFolder, manifest: Manifest, process: int,
    share: Sequence[tuple[WriteBox, bytes]], max_file_bytes: int,
) -> None:  # fmt: skip
    plan = lay_out(
        [own for own, _ in share], manifest.attempt,
        process=process, num_processes=manifest.num_processes, max_file_bytes=max_file_bytes,
    )  # fmt: skip
    files, hashes = [], []
    for file in plan.files:
        content = file.header + b"".join(share[row][1] for row in file.rows)
        folder.write_new(file.name, content)
        files.append(FileRecord(file.name, len(content), process))
        hashes += [
            xxhash.xxh3_64_intdigest(content[at : at + BLOCK_BYTES])
            for at in range(0, len(content), BLOCK_BYTES)
        ]
    part = Part(manifest.attempt, process, tuple(files), plan.chunks, np.array(hashes, np.uint64))
    committing.write_part(folder, part)
