"""Serialize a tree of values to one flat buffer and back, bit-exactly.

::

    data = one number (u64, little-endian) for each leaf whose length only its holder knows
           | the leaves' bits, in order, each aligned to its item size

`Spec.lines` lists what must be equal on all processes (the tree, shapes, dtypes). A process without
a tree of its own rebuilds that of another one from `spec_text`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.arrays.bridge.leaf_layouts import not_a_tree
from shoal.arrays.host.tree_words import nodes_text
from shoal.collectives.leaves import (
    Array,
    Buffer,
    LeafSpec,
    buffer_of,
    dtype_name,
    leaf_of,
    value_of,
)
from shoal.errors import ShoalError, UsageError, raise_all, with_article
from shoal.hashing import call_digest
from shoal.runtime.rules.spec_lines import END, SpecLine

_NUMBER = np.dtype("<u8")
_INLINE_BYTES = 64 << 10  # of one process
_SENT_BYTES = 64 << 20  # by the coordinator, to all processes together
_VALUES: type = type({}.values())
_LINE = 200  # characters per line of a tree's text
DIGEST_BYTES = 16
_KEYS = (str, int, bool, float)  # types of a dict's keys that JSON keeps, in a list


class Spec(NamedTuple):
    """A tree without its data."""

    leaves: tuple[LeafSpec, ...]
    treedef: Any

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that must be equal on all processes: one for each leaf, then the nodes."""
        text = nodes_text(self.treedef)
        nodes = [text[start : start + _LINE] for start in range(0, len(text), _LINE)]
        leaves = (leaf.line for leaf in self.leaves)
        return (*leaves, END, *(SpecLine("tree", value=part).packed for part in nodes))

    @property
    def digest(self) -> bytes:
        """DIGEST_BYTES of the lines."""
        return call_digest("\n".join(self.lines).encode(errors="surrogatepass"))


def spec_of(tree: Any, operation: str = "the values") -> Spec:
    """Describe a tree without reading any data.

    Raises:
      UsageError: it is not a pytree, or has unsupported leaves; names all, by path.
    """
    return flatten(tree, operation)[0]


def flatten(tree: Any, operation: str) -> tuple[Spec, list[Any]]:
    """Return a tree's description and leaves. Raises as `spec_of`, for the call `operation`."""
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    except ValueError as error:  # dicts with unsortable keys
        raise UsageError(f"{operation}: {not_a_tree(error)}") from error
    leaves = [leaf_of(jax.tree_util.keystr(path) or "the value", v) for path, v in pairs]
    raise_all(operation, [leaf for leaf in leaves if isinstance(leaf, str)])
    spec = Spec(tuple(leaf for leaf in leaves if isinstance(leaf, LeafSpec)), treedef)
    return spec, [value for _, value in pairs]


def spec_text(spec: Spec) -> tuple[str, list[str]]:
    """Return a tree's description as JSON, and which of its nodes and keys it cannot describe.

    >>> spec = spec_of({"w": np.zeros(3, np.float32), "n": (1, None)})
    >>> spec_from(spec_text(spec)[0]) == spec
    True
    """
    problems: list[str] = []
    leaves = [
        [leaf.kind, leaf.dtype and dtype_name(leaf.dtype), leaf.shape, leaf.words, leaf.impl]
        for leaf in spec.leaves
    ]
    problems += [
        f"{leaf.path}: its keys are of {leaf.impl}"
        for leaf in spec.leaves
        if not isinstance(leaf.impl, str | None)
    ]
    nodes = jax.tree.unflatten(spec.treedef, range(len(leaves)))
    return json.dumps([_nodes_out(nodes, "", problems), leaves], default=str), problems


def spec_from(text: str | bytes) -> Spec:
    """Return the description that `spec_text` gave."""
    nodes, rows = json.loads(text)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(_nodes_in(nodes))
    leaves = [
        LeafSpec(
            path=jax.tree_util.keystr(path) or "the value",
            kind=kind,
            dtype=None if dtype is None else np.dtype(dtype),
            shape=tuple(shape),
            words=tuple(key_words),
            impl=impl,
        )
        for (path, row_index) in pairs
        for kind, dtype, shape, key_words, impl in [rows[row_index]]
    ]
    return Spec(tuple(leaves), treedef)


def _nodes_out(node: Any, path: str, problems: list[str]) -> Any:
    """Return nodes as lists that begin with their kind; a leaf is its number."""
    if type(node) is int:
        return node
    if type(node) is dict:
        keys = [*node]
        problems += [
            f"{path}[{key!r}]: the key is {with_article(type(key).__name__)}"
            for key in keys
            if type(key) not in _KEYS
        ]
        children = [_nodes_out(node[key], f"{path}[{key!r}]", problems) for key in keys]
        return ["dict", keys, children]
    if type(node) in (list, tuple):
        children = [_nodes_out(child, f"{path}[{n}]", problems) for n, child in enumerate(node)]
        return [type(node).__name__, children]
    problems.append(f"{path or 'the value'}: is {with_article(type(node).__name__)}")
    return None


def _nodes_in(node: Any) -> Any:
    """Return the nodes of lists of `_nodes_out`."""
    if isinstance(node, int):
        return node
    kind, *keys, children = node
    values = [_nodes_in(child) for child in children]
    if kind == "dict":
        return dict(zip(keys[0], values, strict=True))
    return tuple(values) if kind == "tuple" else values


def pack_tree(spec: Spec, values: Sequence[Any], operation: str) -> tuple[list[Buffer], int]:
    """Return the data of a tree as buffers to concatenate, and their total size.

    Contiguous memory is not copied.

    Raises:
      UsageError: this process does not hold all values; names the others by path.
    """
    bodies: list[Buffer] = []
    problems = []
    for leaf, value in zip(spec.leaves, values, strict=True):
        try:
            bodies.append(buffer_of(leaf, value))
        except UsageError as error:
            problems.append(f"{leaf.path}: {error}")
    raise_all(operation, problems)
    return join_data(spec.leaves, bodies, [len(body) for body in bodies])


def unpack_tree(spec: Spec, data: Array) -> Any:
    """Return the tree of this data; its NumPy arrays share the memory of `data`.

    Args:
      spec: of this process's own tree, whose nodes are rebuilt.
      data: uint8[num_bytes], writable, with no other references.
    """
    parts = split_data(spec.leaves, data)
    values = [value_of(leaf, bits) for leaf, (_, bits) in zip(spec.leaves, parts, strict=True)]
    return jax.tree.unflatten(spec.treedef, values)


def join_data(
    leaves: Sequence[LeafSpec], bodies: Sequence[Buffer], lengths: Sequence[int]
) -> tuple[list[Buffer], int]:
    """Return data as buffers; `lengths` applies to the open leaves."""
    numbers = [length for leaf, length in zip(leaves, lengths, strict=True) if leaf.is_open]
    buffers: list[Buffer] = [np.array(numbers, _NUMBER).tobytes()]
    offset = len(buffers[0])
    for leaf, body in zip(leaves, bodies, strict=True):
        gap = -offset % leaf.align
        if gap:
            buffers.append(bytes(gap))
        buffers.append(body)
        offset += gap + len(body)
    return [buffer for buffer in buffers if len(buffer)], offset


def split_data(leaves: Sequence[LeafSpec], data: Array) -> list[tuple[int, Array]]:
    """Return each leaf's number (0 if it is not open) and its bits, views of `data`.

    Raises:
      ShoalError: it is not the data of such leaves.
    """
    count = sum(leaf.is_open for leaf in leaves)
    offset = count * _NUMBER.itemsize
    numbers = iter(data[:offset].view(_NUMBER).tolist())
    parts = []
    for leaf in leaves:
        length = next(numbers) if leaf.is_open else 0
        offset += -offset % leaf.align
        end = offset + leaf.num_bytes(length)
        parts.append((length, data[offset:end]))
        offset = end
    if offset != len(data):
        raise ShoalError(f"data of {offset} bytes came with {len(data)} bytes: a bug in shoal")
    return parts


def inline_bytes(copies: int) -> int:
    """Return the limit of bytes sent with a call, if they are relayed `copies` times."""
    return min(_INLINE_BYTES, _SENT_BYTES // copies)


def _is_leaf(value: object) -> bool:
    """True for None, which would change the structure, and for iterators.

    JAX warns of these, and will refuse them before shoal can say what to give instead.
    """
    kind = type(value)
    if value is None or kind is _VALUES:
        return True
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
