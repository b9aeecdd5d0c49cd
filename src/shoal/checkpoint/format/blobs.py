"""Serialise a per-process tree of plain values and NumPy arrays to bytes, without pickle.

The bytes are a small safetensors file: an entry for each array; the tree and all other values are
JSON in its metadata.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from shoal.checkpoint.format import header
from shoal.checkpoint.tree import dtypes
from shoal.checkpoint.tree.flatten import flatten, unflatten
from shoal.checkpoint.tree.names import name_of
from shoal.checkpoint.tree.nodes import from_json, names_of, to_json
from shoal.checkpoint.tree.plain_values import kind_of, value_of
from shoal.checkpoint.tree.plain_values import to_json as value_json
from shoal.errors import CorruptCheckpoint, UsageError, raise_all

_FORMAT = "shoal-values"


def blob_of(tree: Any, *, asked: str = "a process's own value") -> bytes:
    """Serialise a tree of plain values and NumPy arrays.

    Raises:
      UsageError: a leaf is neither; names all offenders.
    """
    leaves, structure = flatten(tree, asked=asked)
    offences: list[str] = []
    said: list[Any] = []
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for path, value in leaves:
        name = name_of(path)
        try:
            if type(value) is np.ndarray:
                said.append(["array", dtypes.name_of(value.dtype), list(value.shape)])
                arrays[name] = value
            else:
                said.append([kind_of(value), value_json(value)])
        except UsageError as why:
            offences += [type(one)(f"{name}: {one}") for one in why.offences]
    raise_all(asked, offences)
    entries = header.arrange(
        (name, dtypes.storage_of(array.dtype).entry, dtypes.entry_shape(array.dtype, array.shape))
        for name, array in arrays.items()
    )
    metadata = {
        "format": _FORMAT,
        "tree": json.dumps(to_json(structure), separators=(",", ":")),
        "leaves": json.dumps(said, separators=(",", ":")),
    }
    first = header.build(entries, metadata, page_bytes=8)
    return b"".join([first, *(dtypes.pack(arrays[entry.name]).data for entry in entries)])


def tree_of(blob: bytes | memoryview, *, file: str = "") -> Any:
    """Deserialise a tree; its arrays are copies.

    Args:
      file: where the bytes come from, for errors.

    Raises:
      CorruptCheckpoint: the bytes do not encode a tree.
    """
    file = file or "a process's own value"
    view = memoryview(blob)
    found = header.parse(view, len(view), file)
    if found.metadata.keys() != {"format", "tree", "leaves"}:
        raise CorruptCheckpoint(f"{file} is no tree of values", file=file)
    structure, count = from_json(header.strict_json(found.metadata["tree"], file), file)
    said = header.strict_json(found.metadata["leaves"], file)
    if found.metadata["format"] != _FORMAT or type(said) is not list or len(said) != count:
        raise CorruptCheckpoint(f"{file} is no tree of values", file=file)
    entries = {entry.name: entry for entry in found.entries}
    leaves = []
    for name, one in zip(names_of(structure), said, strict=True):
        try:
            leaves.append(_leaf(one, entries.pop(name, None), view[found.num_bytes :]))
        except (UsageError, ValueError, TypeError) as why:
            raise CorruptCheckpoint(f"{file}: {name}: {why}", file=file, leaf=name) from None
    if entries:
        raise CorruptCheckpoint(f"{file} has arrays that are nobody's: {list(entries)}", file=file)
    return unflatten(structure, leaves)


def _leaf(said: Any, entry: header.Entry | None, data: memoryview) -> Any:
    if type(said) is list and len(said) == 2 and type(said[0]) is str and entry is None:
        return value_of(said[0], said[1])
    if type(said) is not list or len(said) != 3 or said[0] != "array" or entry is None:
        raise UsageError("is neither an array nor a plain value")
    if type(said[1]) is not str or type(said[2]) is not list or {*map(type, said[2])} - {int}:
        raise UsageError("has no dtype or no shape")
    dtype, shape = dtypes.dtype_of(said[1]), tuple(said[2])
    wanted = dtypes.entry_shape(dtype, shape)
    if entry.dtype != dtypes.storage_of(dtype).entry or entry.shape != wanted:
        raise UsageError("is not the array that its entry says")
    found = dtypes.unpack(data[entry.begin : entry.end], dtype, shape)
    return found.copy() if dtype.itemsize else found  # a copy would change the dtype
