"""Trees of values ↔ their leaves and a structure that can be written down. Without JAX.

Known here: dict (keys in the order of their text), list, tuple, namedtuple, OrderedDict,
defaultdict; None is a leaf. What else is a node, only a `Nodes` knows. A structure holds the
numbers of its leaves, counted from 0 in its own order.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from shoal.checkpoint.names import Key, Path, component, key_of, name_of
from shoal.checkpoint.values import plain_json, plain_value
from shoal.errors import CorruptCheckpoint, UsageError, raise_all

__all__ = [
    "OPAQUE",
    "Branch",
    "Level",
    "Node",
    "Nodes",
    "Structure",
    "flatten",
    "from_json",
    "names_of",
    "num_leaves",
    "paths_of",
    "prune",
    "to_json",
    "type_name",
    "unflatten",
]

DEEPEST = 200  # nodes in nodes; Python's own limits are not far
KINDS = ("dict", "list", "tuple", "namedtuple", "OrderedDict", "defaultdict", "node")
_KEYLESS = ("list", "tuple")
_TYPED = ("namedtuple", "node")
_FACTORIES: Mapping[str, Any] = {
    kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, dict, set, tuple)
} | {"None": None}


class _Opaque:
    """Static data that does not consist of plain values."""

    def __repr__(self) -> str:
        return "OPAQUE"


OPAQUE = _Opaque()


class Level(NamedTuple):
    """One node, taken apart."""

    keys: tuple[Key, ...]  # distinct
    children: tuple[Any, ...]
    static: Any  # its other data; written down where it consists of plain values


class Nodes(Protocol):
    """Who knows nodes that are not Python's own."""

    def flatten(self, value: Any) -> Level | None:
        """Take a node apart, one level; None: it is a leaf."""

    def build(self, type_name: str, level: Level) -> Any | None:
        """Return the node of that type; None: it is not known here. Imports nothing."""


@dataclass(frozen=True)
class Node:
    """A node of a type that is not known here, or could not be built. Flattens as what it was."""

    type: str  # "module:QualName"
    keys: tuple[Key, ...]
    children: tuple[Any, ...]
    static: Any = None  # OPAQUE where it did not consist of plain values


@dataclass(frozen=True)
class Branch:
    """One node of a structure."""

    kind: str  # one of KINDS
    keys: tuple[Key, ...]  # of the children; () of lists and tuples
    children: tuple[Structure, ...]
    type: str = ""  # "module:QualName" of namedtuples and nodes
    static: Any = None  # of a node; of a defaultdict: the name of its factory

    def child_keys(self) -> Iterable[Key]:
        """The keys by which the children are named: of lists, the text of each index."""
        return map(str, range(len(self.children))) if self.kind in _KEYLESS else self.keys


Structure: TypeAlias = int | Branch  # a leaf is its number


def type_name(kind: type) -> str:
    """Return how a type is named in files: `module:QualName`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def flatten(
    tree: Any,
    nodes: Nodes | None = None,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    asked: str = "the tree",
) -> tuple[list[tuple[Path, Any]], Structure]:
    """Return the leaves of a tree with their paths, and its structure.

    Args:
      nodes: knows further kinds of nodes; without it such values are leaves.
      is_leaf: says of what would be a node that it is a leaf.
      asked: begins the message of an error.

    Raises:
      UsageError: keys that have no text, or are there twice; all of them. Nested too deeply.
    """
    walk = _Walk(nodes, is_leaf)
    structure = walk.structure(tree, (), DEEPEST)
    raise_all(asked, walk.offences)
    return walk.leaves, structure


class _Walk:
    def __init__(self, nodes: Nodes | None, is_leaf: Callable[[Any], bool] | None) -> None:
        self.nodes = nodes
        self.is_leaf = is_leaf
        self.leaves: list[tuple[Path, Any]] = []
        self.offences: list[str] = []

    def structure(self, value: Any, path: Path, depth: int) -> Structure:
        found = None if self.is_leaf and self.is_leaf(value) else self._branch(value)
        if found is None:
            self.leaves.append((path, value))
            return len(self.leaves) - 1
        if not depth:
            self.offences.append(f"{name_of(path[:4])}/…: is nested deeper than {DEEPEST} nodes")
            return -1
        kind, type_name, keys, children, static = found
        named = keys if kind not in _KEYLESS else [str(index) for index in range(len(children))]
        if self._is_wrong(named, path):
            return -1
        inner = tuple(
            [
                self.structure(child, (*path, key), depth - 1)
                for key, child in zip(named, children, strict=True)
            ]
        )
        return Branch(kind, tuple(keys), inner, type_name, static)

    def _is_wrong(self, keys: Sequence[Key], path: Path) -> bool:
        texts = set()
        before = len(self.offences)
        for key in keys:
            try:
                text = component(key)
            except UsageError as why:
                self.offences += [type(one)(f"{name_of(path)}: {one}") for one in why.offences]
            else:
                if text in texts:
                    self.offences.append(f"{name_of(path)}: has the key {key!r} twice")
                texts.add(text)
        return len(self.offences) > before

    def _branch(self, value: Any) -> tuple[str, str, Sequence[Key], Sequence[Any], Any] | None:
        """Take a node apart; None: it is a leaf."""
        kind = type(value)
        if kind is dict:
            keys = _sorted(value)
            return "dict", "", keys, [value[key] for key in keys], None
        if kind is list or kind is tuple:
            return kind.__name__, "", (), value, None
        if kind is OrderedDict:
            return "OrderedDict", "", list(value), list(value.values()), None
        if kind is defaultdict:
            return self._defaultdict(value)
        if kind is Node:
            return "node", value.type, value.keys, value.children, value.static
        if isinstance(value, tuple) and _fields(kind) is not None:
            return "namedtuple", type_name(kind), kind._fields, value, None
        level = self.nodes.flatten(value) if self.nodes else None
        if level is None:
            return None
        return "node", type_name(kind), level.keys, level.children, level.static

    def _defaultdict(self, value: Any) -> tuple[str, str, Sequence[Key], Sequence[Any], Any]:
        keys = _sorted(value)
        children = [value[key] for key in keys]
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return "defaultdict", "", keys, children, name
        return "node", "collections:defaultdict", keys, children, OPAQUE


def _sorted(keys: Iterable[Key]) -> list[Key]:
    """Return keys in the order of their text; as they are if one has none."""
    listed = list(keys)
    try:
        return sorted(listed, key=component)
    except UsageError:  # said later, with the path
        return listed


def _fields(kind: type) -> tuple[str, ...] | None:
    fields = getattr(kind, "_fields", None)
    if type(fields) is tuple and all(type(field) is str for field in fields):
        return fields
    return None


def unflatten(structure: Structure, leaves: Sequence[Any], nodes: Nodes | None = None) -> Any:
    """Return the tree of a structure; leaf `n` of it is `leaves[n]`.

    Nothing is imported: a namedtuple or node whose class is not there already, or does not fit,
    comes back as a `Node`.
    """
    if isinstance(structure, int):
        return leaves[structure]
    children = [unflatten(child, leaves, nodes) for child in structure.children]
    kind = structure.kind
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "dict":
        return dict(zip(structure.keys, children, strict=True))
    if kind == "OrderedDict":
        return OrderedDict(zip(structure.keys, children, strict=True))
    if kind == "defaultdict":
        pairs = zip(structure.keys, children, strict=True)
        return defaultdict(_FACTORIES[structure.static], pairs)
    return _built(structure, tuple(children), nodes)


def _built(branch: Branch, children: tuple[Any, ...], nodes: Nodes | None) -> Any:
    if branch.kind == "namedtuple":
        kind = _loaded(branch.type)
        if kind and issubclass(kind, tuple) and _fields(kind) == branch.keys:
            return tuple.__new__(kind, children)  # runs no code of the class
    elif nodes:
        built = nodes.build(branch.type, Level(branch.keys, children, branch.static))
        if built is not None:
            return built
    return Node(branch.type, branch.keys, children, branch.static)


def _loaded(name: str) -> type | None:
    """Return the class of that name if it is loaded already. Runs no code of any module."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        names = getattr(found, "__dict__", None) if found is not None else None
        found = names.get(part) if names is not None else None
    return found if isinstance(found, type) else None


def num_leaves(structure: Structure) -> int:
    """Return how many leaves a structure has."""
    if isinstance(structure, int):
        return 1
    return sum(num_leaves(child) for child in structure.children)


def names_of(structure: Structure) -> list[str]:
    """Return the names of all leaves, by number."""
    found = sorted(_named(structure, ""))
    return [name or "~" for _, name in found]


def _named(structure: Structure, prefix: str) -> Iterator[tuple[int, str]]:
    if isinstance(structure, int):
        yield structure, prefix
        return
    for key, child in zip(structure.child_keys(), structure.children, strict=True):
        text = component(key)
        yield from _named(child, f"{prefix}/{text}" if prefix else text)


def paths_of(structure: Structure) -> list[Path]:
    """Return the paths of all leaves, by number."""
    return [path for _, path in sorted(_paths(structure, ()), key=lambda pair: pair[0])]


def _paths(structure: Structure, path: Path) -> Iterator[tuple[int, Path]]:
    if isinstance(structure, int):
        yield structure, path
        return
    for key, child in zip(structure.child_keys(), structure.children, strict=True):
        yield from _paths(child, (*path, key))


def prune(structure: Structure, wanted: Iterable[int]) -> Structure:
    """Return the structure of some of the leaves, numbered anew from 0 in the same order.

    A node other than a dict that loses children becomes a dict of what is left: every leaf keeps
    its name. With no leaves wanted it is an empty dict.
    """
    number = {old: new for new, old in enumerate(sorted(set(wanted)))}
    return _pruned(structure, number) if number else Branch("dict", (), ())


def _pruned(structure: Structure, number: Mapping[int, int]) -> Any:
    """Return what is left, None if nothing is."""
    if isinstance(structure, int):
        return number.get(structure)
    pairs = zip(structure.child_keys(), structure.children, strict=True)
    left = [(key, found) for key, child in pairs if (found := _pruned(child, number)) is not None]
    if not left:
        return None
    keys, children = tuple(key for key, _ in left), tuple(found for _, found in left)
    if len(left) < len(structure.children):
        kind = structure.kind if structure.kind in ("OrderedDict", "defaultdict") else "dict"
        static = structure.static if kind == "defaultdict" else None
        return Branch(kind, keys, children, "", static)
    keys = () if structure.kind in _KEYLESS else keys
    return Branch(structure.kind, keys, children, structure.type, structure.static)


def to_json(structure: Structure) -> Any:
    """Return a structure as JSON: a leaf is its number, a node an object."""
    if isinstance(structure, int):
        return structure
    found: dict[str, Any] = {"kind": structure.kind}
    if structure.kind in _TYPED:
        found["type"] = structure.type
    if structure.kind not in _KEYLESS:
        found["keys"] = [component(key) for key in structure.keys]
    if structure.static is not None:
        try:
            found["static"] = plain_json(structure.static)
        except UsageError:
            found["opaque"] = True
    found["children"] = [to_json(child) for child in structure.children]
    return found


def from_json(found: Any, file: str) -> tuple[Structure, int]:
    """Return the structure that JSON says, and how many leaves it has.

    Raises:
      CorruptCheckpoint: it says none.
    """
    reading = _Reading()
    try:
        return reading.structure(found, DEEPEST), reading.leaves
    except (UsageError, ValueError) as why:
        raise CorruptCheckpoint(f"{file} has a tree that is none: {why}", file=file) from None


class _Reading:
    def __init__(self) -> None:
        self.leaves = 0

    def structure(self, found: Any, depth: int) -> Structure:
        if type(found) is int:
            if found != self.leaves:
                raise ValueError(f"leaf {found} stands where leaf {self.leaves} should")
            self.leaves += 1
            return found
        if not depth:
            raise ValueError(f"it is nested deeper than {DEEPEST} nodes")
        if type(found) is not dict:
            raise ValueError("a node is no object")
        kind, static = found.get("kind"), plain_value(found.get("static"))
        if kind not in KINDS or found.keys() != self._wanted(kind, found):
            raise ValueError(f"a node of kind {str(kind)[:40]!r} has the wrong keys")
        if "opaque" in found:
            if found["opaque"] is not True or "static" in found:
                raise ValueError("a node is opaque and is not")
            static = OPAQUE
        if kind == "defaultdict" and (type(static) is not str or static not in _FACTORIES):
            raise ValueError("a defaultdict has an unknown factory")
        keys = self._keys(kind, found)
        children = tuple([self.structure(child, depth - 1) for child in found["children"]])
        return Branch(kind, keys, children, found.get("type", ""), static)

    def _wanted(self, kind: str, found: Mapping[str, Any]) -> set[str]:
        wanted = {"kind", "children"}
        if kind not in _KEYLESS:
            wanted.add("keys")
        if kind in _TYPED:
            wanted.add("type")
        if kind in ("node", "defaultdict"):
            wanted |= found.keys() & {"static", "opaque"}
        return wanted

    def _keys(self, kind: str, found: Mapping[str, Any]) -> tuple[Key, ...]:
        children, texts, kind_type = found["children"], found.get("keys", []), found.get("type", "")
        if type(children) is not list or type(texts) is not list or type(kind_type) is not str:
            raise ValueError("a node's keys, children or type are none")
        if kind in _KEYLESS:
            return ()
        if len(texts) != len(children) or len(set(map(str, texts))) != len(texts):
            raise ValueError("a node has not as many distinct keys as children")
        if not all(type(text) is str for text in texts):
            raise ValueError("a key is no text")
        if kind in ("dict", "defaultdict") and texts != sorted(texts):
            raise ValueError("the keys of a dict are not sorted")
        return tuple([key_of(text) for text in texts])
