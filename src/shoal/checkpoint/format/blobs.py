"""Serialize a per-process tree of plain values, NumPy arrays and PRNG keys, without pickle.

The bytes are a small safetensors file: an entry for each array; the tree and all other values are
JSON in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.checkpoint.format import header
from shoal.checkpoint.tree import dtypes
from shoal.checkpoint.tree.flatten import (
    Nodes,
    PerProcess,
    flatten_tree,
    unflatten_like,
    unflatten_tree,
)
from shoal.checkpoint.tree.names import name_of
from shoal.checkpoint.tree.nodes import decode_structure, encode_structure, names_of
from shoal.checkpoint.tree.plain_values import decode_value, kind_of, remedy
from shoal.checkpoint.tree.plain_values import encode_value as value_json
from shoal.errors import CorruptCheckpointError, UsageError, WrongType, raise_all

_FORMAT = "shoal-values"
_FITTING = "pass NumPy arrays, numbers, str, bytes, PRNG keys or None"

Array = np.ndarray[Any, Any]


def encode_tree(
    tree: Any,
    nodes: Nodes | None = None,
    *,
    words_of: Callable[[Any], tuple[str, Array] | None] = lambda _: None,
    operation: str = "a process's own value",
) -> bytes:
    """Serialize a tree of plain values, NumPy arrays and PRNG keys.

    Args:
      nodes: handles further node types, as for `flatten_tree`.
      words_of: returns the implementation and the words of PRNG keys; None: it is no key.

    Raises:
      UsageError: a leaf is neither; names all offenders.
    """
    leaves, structure = flatten_tree(tree, nodes, operation=operation)
    problems: list[str] = []
    record: list[Any] = []
    arrays: dict[str, Array] = {}
    for path, value in leaves:
        name = name_of(path)
        try:
            if type(value) is np.ndarray:
                record.append(["array", dtypes.dtype_name(value.dtype), list(value.shape)])
                arrays[name] = value
            elif (key := words_of(value)) is not None:
                impl, key_words = key
                record.append(
                    ["key", dtypes.dtype_name(key_words.dtype), list(key_words.shape), impl]
                )
                arrays[name] = key_words
            elif isinstance(value, PerProcess):
                problems.append(WrongType(f"{name}: is a PerProcess in another; pass its .value"))
            elif kind_of(value) is None:
                problems.append(
                    WrongType(f"{name}: {remedy(value, can_register=False, known=_FITTING)}")
                )
            else:
                record.append([kind_of(value), value_json(value)])
        except UsageError as why:
            problems += [type(problem)(f"{name}: {problem}") for problem in why.problems]
    raise_all(operation, problems)
    entries = header.arrange(
        (name, dtypes.storage_of(array.dtype).entry, dtypes.entry_shape(array.dtype, array.shape))
        for name, array in arrays.items()
    )
    metadata = {
        "format": _FORMAT,
        "tree": json.dumps(encode_structure(structure), separators=(",", ":")),
        "leaves": json.dumps(record, separators=(",", ":")),
    }
    first = header.build_header(entries, metadata, page_bytes=8)
    return b"".join([first, *(dtypes.pack_elements(arrays[entry.name]).data for entry in entries)])


def decode_tree(
    blob: bytes | memoryview,
    nodes: Nodes | None = None,
    *,
    wrap: Callable[[Array, str], Any] = lambda key_words, impl: key_words,
    like: PerProcess | None = None,
    file: str = "",
) -> Any:
    """Deserialise a tree; its arrays are copies.

    Args:
      nodes: as for `unflatten_tree`.
      wrap: returns PRNG keys of their words and implementation.
      like: holds a tree whose classes it takes; None: the classes of their names.
      file: where the bytes come from, for errors.

    Raises:
      CorruptCheckpointError: the bytes do not encode a tree.
      UsageError: with `like`: a class is in neither.
    """
    file = file or "a process's own value"
    view = memoryview(blob)
    parsed = header.parse_header(view, len(view), file)
    if parsed.metadata.keys() != {"format", "tree", "leaves"}:
        raise CorruptCheckpointError(f"{file} does not hold a tree of values", file=file)
    structure, count = decode_structure(header.strict_json(parsed.metadata["tree"], file), file)
    record = header.strict_json(parsed.metadata["leaves"], file)
    if parsed.metadata["format"] != _FORMAT or type(record) is not list or len(record) != count:
        raise CorruptCheckpointError(f"{file} does not hold a tree of values", file=file)
    entries = {entry.name: entry for entry in parsed.entries}
    leaves = []
    for name, leaf in zip(names_of(structure), record, strict=True):
        try:
            leaves.append(_leaf(leaf, entries.pop(name, None), view[parsed.num_bytes :], wrap))
        except (UsageError, ValueError, TypeError) as why:
            message = f"{file}: {name[:100]}: {why}"
            raise CorruptCheckpointError(message, file=file, leaf=name) from None
    if entries:
        raise CorruptCheckpointError(
            f"{file} has an array that is not in its tree: {min(entries)[:100]!r}", file=file
        )
    if like is None:
        return unflatten_tree(structure, leaves, nodes)
    return unflatten_like(structure, leaves, like.value, nodes)


def _leaf(
    record: Any,
    entry: header.Entry | None,
    data: memoryview,
    wrap: Callable[[Array, str], Any],
) -> Any:
    if type(record) is list and len(record) == 2 and type(record[0]) is str and entry is None:
        return decode_value(record[0], record[1])
    if type(record) is list and len(record) == 4 and record[0] == "key" and type(record[3]) is str:
        return wrap(_leaf(["array", *record[1:3]], entry, data, wrap), record[3])
    if type(record) is not list or len(record) != 3 or record[0] != "array" or entry is None:
        raise UsageError("is neither an array nor a plain value")
    if type(record[1]) is not str or type(record[2]) is not list or {*map(type, record[2])} - {int}:
        raise UsageError("has no dtype or no shape")
    dtype, shape = dtypes.dtype_of(record[1]), tuple(record[2])
    wanted = dtypes.entry_shape(dtype, shape)
    if entry.dtype != dtypes.storage_of(dtype).entry or entry.shape != wanted:
        raise UsageError("is not the array that its entry says")
    elements = dtypes.unpack_elements(data[entry.begin : entry.end], dtype, shape)
    return elements.copy() if dtype.itemsize else elements  # a copy would change the dtype
