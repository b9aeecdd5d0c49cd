"""The structure of a tree, nodes and leaf numbers, as JSON.

Leaves are numbered from 0 in the order of the structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from shoal.checkpoint.tree.names import ROOT, Key, component, key_of
from shoal.checkpoint.tree.plain_values import json_excerpt, plain_json, plain_value
from shoal.errors import CorruptCheckpointError, UsageError

DEEPEST = 100  # well below the nesting limits of JSON libraries, at two levels a node
_KINDS = ("dict", "list", "tuple", "namedtuple", "OrderedDict", "defaultdict", "node")
KEYLESS = ("list", "tuple")
_TYPED = ("namedtuple", "node")
FACTORIES: Mapping[str, Any] = {
    kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, dict, set, tuple)
} | {"None": None}


class _Opaque(Enum):
    OPAQUE = "opaque"

    def __repr__(self) -> str:
        return self.name


OPAQUE = _Opaque.OPAQUE  # auxiliary data that are not plain values


@dataclass(frozen=True)
class Branch:
    """One node of a structure."""

    kind: str  # "dict", …
    keys: tuple[Key, ...]  # of the children; () of lists and tuples
    children: tuple[Structure, ...]
    type: str = ""  # "module:QualName" of namedtuples and nodes
    static: Any = None  # of a node; of a defaultdict: the name of its factory

    def child_keys(self) -> Iterable[Key]:
        """The keys of the children; in lists, the text of each index."""
        if self.kind in KEYLESS:
            return map(str, range(len(self.children)))
        return self.keys


Structure: TypeAlias = int | Branch  # a leaf is its number


def num_leaves(structure: Structure) -> int:
    """Return how many leaves a structure has."""
    if isinstance(structure, int):
        return 1
    return sum(num_leaves(child) for child in structure.children)


def names_of(structure: Structure) -> list[str]:
    """Return the names of all leaves, by number."""
    pairs = sorted(_named(structure, ""))
    return [name or ROOT for _, name in pairs]


def _named(structure: Structure, prefix: str) -> Iterator[tuple[int, str]]:
    if isinstance(structure, int):
        yield structure, prefix
        return
    for key, child in zip(structure.child_keys(), structure.children, strict=True):
        yield from _named(child, _child_name(prefix, key))


def _child_name(name: str, key: Key) -> str:
    """Return the name of a child of a node, which is "" at the root."""
    if not name:
        return component(key)
    return f"{name}/{component(key)}"


def branch_names(structure: Structure, prefix: str = "") -> set[str]:
    """Return the names of all nodes, those without leaves among them."""
    if isinstance(structure, int):
        return set()
    names = {prefix or ROOT}
    for key, child in zip(structure.child_keys(), structure.children, strict=True):
        names |= branch_names(child, _child_name(prefix, key))
    return names


def prune(structure: Structure, wanted: Iterable[int]) -> Structure:
    """Return the structure of some of the leaves, renumbered from 0 in the same order.

    A node other than a dict that loses children becomes a dict of the rest: every leaf keeps its
    name. If no leaves are wanted, the result is an empty dict.
    """
    new_index = {old: new for new, old in enumerate(sorted(set(wanted)))}
    rest: Structure = Branch("dict", (), ())
    if new_index:
        rest = _pruned(structure, new_index)
    return rest


def _pruned(structure: Structure, new_index: Mapping[int, int]) -> Any:
    """Return the rest of a structure; None if nothing is left."""
    if isinstance(structure, int):
        return new_index.get(structure)
    pairs = zip(structure.child_keys(), structure.children, strict=True)
    left = [(key, rest) for key, child in pairs if (rest := _pruned(child, new_index)) is not None]
    if not left:
        return None
    keys, children = tuple(key for key, _ in left), tuple(found for _, found in left)
    if len(left) < len(structure.children):
        kind = "dict"
        if structure.kind in ("OrderedDict", "defaultdict"):
            kind = structure.kind
        static = structure.static if kind == "defaultdict" else None
        return Branch(kind, keys, children, type="", static=static)
    if structure.kind in KEYLESS:
        keys = ()
    return Branch(structure.kind, keys, children, structure.type, structure.static)


def as_dicts(structure: Structure) -> Structure:
    """Return the structure with every node a dict; lists are keyed by the text of each index."""
    if isinstance(structure, int):
        return structure
    keys = tuple(structure.child_keys())
    return Branch("dict", keys, tuple([as_dicts(child) for child in structure.children]))


def encode_structure(structure: Structure) -> Any:
    """Encode a structure as JSON: a leaf is its number, a node an object."""
    if isinstance(structure, int):
        return structure
    node: dict[str, Any] = {"kind": structure.kind}
    if structure.kind in _TYPED:
        node["type"] = structure.type
    if structure.kind not in KEYLESS:
        node["keys"] = [component(key) for key in structure.keys]
    if structure.static is not None:
        try:
            node["static"] = plain_json(structure.static)
        except UsageError:
            node["opaque"] = True
    node["children"] = [encode_structure(child) for child in structure.children]
    return node


def decode_structure(encoded: Any, file: str) -> tuple[Structure, int]:
    """Decode a structure from JSON; return also its number of leaves.

    Raises:
      CorruptCheckpointError: it is not a valid structure.
    """
    reading = _NodeReading()
    try:
        return reading.structure(encoded, DEEPEST), reading.leaves
    except UsageError as why:
        raise CorruptCheckpointError(f"{file} has an invalid tree: {why}", file=file) from None


class _NodeReading:
    def __init__(self) -> None:
        self.leaves = 0

    def structure(self, encoded: Any, depth: int) -> Structure:
        if type(encoded) is int:
            if encoded != self.leaves:
                said = json_excerpt(encoded)
                raise UsageError(f"leaf {said} is where leaf {self.leaves} should be")
            self.leaves += 1
            return encoded
        if not depth:
            raise UsageError(f"it is nested deeper than {DEEPEST} nodes")
        if type(encoded) is not dict:
            raise UsageError("a node is not an object")
        kind, static = encoded.get("kind"), plain_value(encoded.get("static"))
        if kind not in _KINDS or encoded.keys() != self._wanted(kind, encoded):
            raise UsageError(f"a node of kind {json_excerpt(kind)} has the wrong keys")
        if "opaque" in encoded:
            if encoded["opaque"] is not True or "static" in encoded:
                raise UsageError("a node is opaque and is not")
            static = OPAQUE
        if kind == "defaultdict" and (type(static) is not str or static not in FACTORIES):
            raise UsageError("a defaultdict has an unknown factory")
        keys = self._keys(kind, encoded)
        children = tuple([self.structure(child, depth - 1) for child in encoded["children"]])
        return Branch(kind, keys, children, type=encoded.get("type", ""), static=static)

    def _wanted(self, kind: str, encoded: Mapping[str, Any]) -> set[str]:
        wanted = {"kind", "children"}
        if kind not in KEYLESS:
            wanted.add("keys")
        if kind in _TYPED:
            wanted.add("type")
        if kind in ("node", "defaultdict"):
            wanted |= encoded.keys() & {"static", "opaque"}
        return wanted

    def _keys(self, kind: str, encoded: Mapping[str, Any]) -> tuple[Key, ...]:
        children, texts = encoded["children"], encoded.get("keys", [])
        kind_type = encoded.get("type", "")
        if type(children) is not list or type(texts) is not list or type(kind_type) is not str:
            raise UsageError("a node's keys, children or type are invalid")
        if kind in KEYLESS:
            return ()
        if len(texts) != len(children) or len(set(map(str, texts))) != len(texts):
            raise UsageError("a node does not have one distinct key for each child")
        if not all(type(text) is str for text in texts):
            raise UsageError("a key is not text")
        if kind in ("dict", "defaultdict") and texts != sorted(texts):
            raise UsageError("the keys of a dict are not sorted")
        return tuple([key_of(text) for text in texts])
