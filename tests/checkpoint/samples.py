"""A small checkpoint of two processes with a leaf of every kind, made from the format alone."""

import hashlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from shoal.checkpoint.format import blobs, header, json_files, table_files
from shoal.checkpoint.format import records as format_records
from shoal.checkpoint.tree import dtypes, flatten, names, plain_values

ATTEMPT = "0123456789ab"


class Adam(NamedTuple):
    count: object
    mu: object


Adam.__module__ = "checkpoint.samples"  # as in the golden files


class Cut(NamedTuple):
    """A leaf with data: its record, and the boxes that each process writes."""

    value: np.ndarray
    record: format_records.LeafRecord
    boxes: tuple  # (process, origin, extent)


def whole(value, process, **fields):
    origin = (0,) * value.ndim
    return cut(value, [(process, origin, value.shape)], **fields)


def cut(value, boxes, kind="array", **fields):
    dtype = dtypes.dtype_name(value.dtype)
    record = format_records.LeafRecord("", kind, dtype, fields.pop("shape", value.shape), **fields)
    return Cut(value, record, tuple(boxes))


W = np.arange(24, dtype=np.float32).reshape(4, 6)
LONG = "ä" * 40_000
STATE = {
    "params": {
        "w": cut(W, [(0, (0, 0), (2, 6)), (1, (2, 0), (2, 6))], layout="(data, -) @ data=2"),
        "b": whole(np.array([0.5, -0.0, 3], ml_dtypes.bfloat16), 0),
        "q": cut(np.array([1, -8, 7, 0, -1], ml_dtypes.int4), [(0, (0,), (2,)), (1, (2,), (3,))]),
        "a/b#c": whole(np.array([1 + 2j, -3j]), 1),
        "empty": whole(np.zeros((0, 3), np.float64), 0),
    },
    "opt": Adam(whole(np.array(7, np.int32), 1), [1, 2.5, None, True, "ß", b"\0\xff", -0.0]),
    "key": whole(np.array([1, 2], np.uint32), 0, kind="key", shape=(), words=(2,), impl="fry"),
    "when": whole(np.array(["2020-01-01", "NaT"], "M8[D]"), 0),
    "text": np.str_("x"),
    "long": whole(plain_values.bulk_of(LONG), 1, kind="str"),
    "loader": [{"row": 3, "seen": np.arange(3)}, {"row": 5, "seen": np.arange(2)}],
    1: 10**30,
    "1": 1j,
}


def is_leaf(value):
    return isinstance(value, Cut) or (type(value) is list and type(value[0]) is dict)


def records():
    """Return the structure, and each leaf's record and what is to be written of it."""
    leaves, structure = flatten.flatten_tree(STATE, is_leaf=is_leaf)
    found = []
    for path, leaf in leaves:
        name = names.name_of(path)
        if isinstance(leaf, Cut):
            found.append((leaf.record.__class__(**{**vars(leaf.record), "name": name}), leaf))
        elif is_leaf(leaf):
            found.append((format_records.LeafRecord(name, "per_process", "uint8"), leaf))
        else:
            kind = plain_values.kind_of(leaf)
            found.append(
                (format_records.LeafRecord(name, kind, value=plain_values.encode_value(leaf)), None)
            )
    return structure, found


def pieces_of(process, found):
    """Return what a process writes: leaf, origin, extent, entry name, dtype, entry shape, bytes."""
    pieces = []
    for number, (record, leaf) in enumerate(found):
        if record.kind == "per_process":
            blob = blobs.encode_tree(leaf[process])
            entry = names.entry_of_process(record.name, process)
            pieces.append((number, (process,), (len(blob),), entry, "U8", (len(blob),), blob))
        for of, origin, extent in leaf.boxes if isinstance(leaf, Cut) else ():
            if of != process:
                continue
            box = tuple(slice(o, o + e) for o, e in zip(origin, extent, strict=True))
            value = leaf.value[box]
            entry = names.entry(record.name, None if len(leaf.boxes) == 1 else origin)
            how, shape = dtypes.storage_of(value.dtype), dtypes.entry_shape(value.dtype, extent)
            data = dtypes.pack_elements(value).tobytes()
            pieces.append((number, origin, extent, entry, how.entry, shape, data))
    return pieces


def hashes_of(data):
    blocks = range(0, len(data), format_records.BLOCK_BYTES)
    return [xxhash.xxh3_64_intdigest(data[at : at + format_records.BLOCK_BYTES]) for at in blocks]


def part_of(process, found, rank):
    """Return the data file of a process and its part."""
    pieces = {piece[3]: piece for piece in pieces_of(process, found)}
    entries = header.arrange((entry, *piece[4:6]) for entry, piece in pieces.items())
    first = header.build_header(entries, table_files.data_metadata(ATTEMPT))
    data = first + b"".join(pieces[entry.name][6] for entry in entries)
    rows = []
    for entry in entries:
        number, origin, extent = pieces[entry.name][:3]
        more = rank - len(origin)
        begin, end = len(first) + entry.begin, len(first) + entry.end
        rows.append((number, 0, begin, end, *origin, *(0,) * more, *extent, *(1,) * more))
    table = np.array(sorted(rows, key=lambda row: (row[0], row[4:])), np.int64)
    chunks = format_records.Chunks(*table.T[:4], table[:, 4 : 4 + rank], table[:, 4 + rank :])
    name = format_records.data_name(ATTEMPT, process, 2)
    record = format_records.FileRecord(name, len(data), process)
    block_hash = np.array(hashes_of(data), np.uint64)
    return data, format_records.Part(ATTEMPT, process, (record,), chunks, block_hash)


def manifest():
    structure, found = records()
    return format_records.Manifest(
        ATTEMPT, 1000, 1_600_000_000_000_000_000, 2, structure,
        tuple(record for record, _ in found),
        writer={"shoal": "0"}, mesh="data=2", user={"lr": [0.1, None], "größe": "ß"},
        metrics={"loss": 0.25, "worst": float("inf")},
    )  # fmt: skip


def blob(name, data):
    return format_records.Blob(name, len(data), hashlib.sha256(data).hexdigest())


def checkpoint():
    """Return the files of the checkpoint by name, those of its parts among them."""
    said, found = manifest(), records()[1]
    written = {}
    parts = []
    for process in range(2):
        data, part = part_of(process, found, rank=2)
        written[part.files[0].name] = data
        written[format_records.part_name(ATTEMPT, process)] = table_files.encode_part(part)
        parts.append(part)
    index = table_files.join_parts(said, parts)
    written[format_records.manifest_name(ATTEMPT)] = json_files.encode_manifest(said)
    written[format_records.index_name(ATTEMPT)] = table_files.encode_index(index)
    written["COMMIT"] = json_files.encode_commit(commit_of(written, said, index))
    return written


def commit_of(written, said, index):
    return format_records.Commit(
        ATTEMPT, said.step, said.created_ns,
        blob(format_records.manifest_name(ATTEMPT), written[format_records.manifest_name(ATTEMPT)]),
        blob(format_records.index_name(ATTEMPT), written[format_records.index_name(ATTEMPT)]),
        sum(one.bytes for one in index.files), len(index.files), said.metrics,
    )  # fmt: skip
