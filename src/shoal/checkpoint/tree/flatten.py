"""Flatten trees into leaves and a serializable structure, and back. Without JAX.

Built in: dict (keys sorted by their text), list, tuple, namedtuple, OrderedDict, defaultdict; None
is a leaf. Other node types are handled by a `Nodes`. A structure contains the numbers of its
leaves, counted from 0 in its own order.

A structure names its classes by module and qualified name, which finds no class that a function
defined, and another one where a name was bound again. A tree that is given therefore keeps its own
classes (`refilled`, `unflatten_like`); names are looked up only where there is none.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from shoal.checkpoint.tree.names import Key, Path, component, name_of
from shoal.checkpoint.tree.nodes import DEEPEST, FACTORIES, KEYLESS, OPAQUE, Branch, Structure
from shoal.colour import local
from shoal.errors import UsageError, raise_all


class Level(NamedTuple):
    """One node, flattened by one level."""

    keys: tuple[Key, ...]  # distinct
    children: tuple[Any, ...]
    static: Any  # auxiliary data; serialized if it consists of plain values


class Nodes(Protocol):
    """A registry of further node types."""

    def flatten(self, value: Any) -> Level | None:
        """Flatten a node by one level; None if it is a leaf."""

    def build(self, type_name: str, level: Level) -> Any | None:
        """Rebuild a node of that type; None if unknown. Imports nothing."""

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        """Return a node like one that `flatten` took apart, with other children."""


@dataclass(frozen=True, repr=False)
class UnknownNode:
    """A node whose type is unknown or could not be rebuilt. Flattens like the original."""

    type: str  # "module:QualName"
    keys: tuple[Key, ...]
    children: tuple[Any, ...]
    static: Any = None  # OPAQUE if not plain values

    def __repr__(self) -> str:
        pairs = ", ".join(f"{key}={child!r}" for key, child in self.items())
        return f"UnknownNode({pairs}; {self.remedy})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of Python, such as copying
            raise AttributeError(name)
        raise AttributeError(f"UnknownNode has no attribute {name!r}: {self.remedy}")

    def items(self) -> Iterator[tuple[Key, Any]]:
        """Return the keys with their children."""
        return zip(self.keys, self.children, strict=True)

    @property
    def remedy(self) -> str:
        """Say how to get the class instead."""
        module, _, name = self.type.partition(":")
        if "<locals>" in name:
            how = f"{name} of {module} was defined in a function"
        elif self.static is OPAQUE:
            how = f"the static data of {name} of {module} are no plain values and were not saved"
        elif (kind := loaded(self.type)) is not None:
            how = f"{kind.__qualname__} of {module} does not take what was saved"
        else:
            how = f"import {name} of {module} before it is restored"
            return f"{how}, or pass a target that has the class"
        return f"{how}: pass a target that has the class"


def type_name(kind: type) -> str:
    """Return the name of a type in files: `module:QualName`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def flatten_tree(
    tree: Any,
    nodes: Nodes | None = None,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    operation: str = "the tree",
) -> tuple[list[tuple[Path, Any]], Structure]:
    """Return the leaves of a tree with their paths, and its structure.

    Args:
      nodes: handles further node types; without it they are leaves.
      is_leaf: predicate that makes a node a leaf.
      operation: prefix of error messages.

    Raises:
      UsageError: unsupported or duplicate keys (names all), or too deep a tree.
    """
    walk = NodeTaker(nodes, is_leaf)
    structure = walk.structure(tree, (), DEEPEST)
    raise_all(operation, walk.problems)
    return walk.leaves, structure


def refilled(
    tree: Any,
    leaves: Iterable[Any],
    nodes: Nodes | None = None,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Return a tree of the same classes with other leaves, in the order of `flatten_tree`.

    >>> refilled({"b": [1, None], "a": (2,)}, "xyz")
    {'a': ('x',), 'b': ['y', 'z']}
    """
    return _refilled(NodeTaker(nodes, is_leaf), tree, iter(leaves))


# Not a closure: one that calls itself would hold the leaves until garbage is collected.
def _refilled(walk: NodeTaker, value: Any, leaves: Iterator[Any]) -> Any:
    branch = walk.branch(value)
    if branch is None:
        return next(leaves)
    kind, _, keys, below, _ = branch
    children = [_refilled(walk, child, leaves) for child in below]
    return _like(value, kind, keys, children, walk.nodes)


def unflatten_like(
    structure: Structure, leaves: Sequence[Any], like: Any, nodes: Nodes | None = None
) -> Any:
    """Return the tree of a structure as `unflatten_tree` does, with the classes of another tree.

    A node of the other tree counts if its children have the same keys; lists and tuples may have
    other lengths. Elsewhere the structure's own classes count.

    Raises:
      UsageError: such a class is not loaded, or does not take what was saved.
    """
    return _unflattened(NodeTaker(nodes, None), structure, leaves, like)


def _unflattened(walk: NodeTaker, branch: Structure, leaves: Sequence[Any], like: Any) -> Any:
    if isinstance(branch, int):
        return leaves[branch]
    stored = dict(zip(map(component, branch.child_keys()), branch.children, strict=True))
    kind, _, keys, below, _ = walk.branch(like) or ("", "", (), (), None)
    texts = [*stored]
    if kind not in KEYLESS:
        texts = [component(key) for key in keys]
    if not kind or (texts != [*stored] and {*texts} != stored.keys()):
        own = [_unflattened(walk, child, leaves, None) for child in branch.children]
        built = _of_branch(branch, tuple(own), walk.nodes)
        if type(built) is UnknownNode:
            raise UsageError(f"a value of a class that is not known: {built.remedy}")
        return built
    likes = [*below, *[None] * len(texts)]  # the stored list may be the longer one
    pairs = zip(texts, likes, strict=False)
    children = [_unflattened(walk, stored[text], leaves, child_like) for text, child_like in pairs]
    return _like(like, kind, keys, children, walk.nodes)


def _like(
    value: Any, kind: str, keys: Sequence[Key], children: Sequence[Any], nodes: Nodes | None
) -> Any:
    """Return a node of the class of `value` with other children."""
    if type(value) is UnknownNode:
        return UnknownNode(value.type, value.keys, tuple(children), value.static)
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, zip(keys, children, strict=True))
    if kind == "node" and nodes is not None:
        try:
            return nodes.rebuild(value, children)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise UsageError(f"the class {type_name(type(value))} takes no {problem}") from error
    if kind == "namedtuple":
        return tuple.__new__(type(value), children)  # does not run code of the class
    return _of_branch(Branch(kind, tuple(keys), ()), tuple(children), nodes)


class NodeTaker:
    """Takes trees apart."""

    def __init__(self, nodes: Nodes | None, is_leaf: Callable[[Any], bool] | None) -> None:
        self.nodes = nodes
        self.is_leaf = is_leaf
        self.leaves: list[tuple[Path, Any]] = []
        self.problems: list[str] = []
        self.above: set[int] = set()  # enclosing nodes, by id

    def structure(self, value: Any, path: Path, depth: int) -> Structure:
        branch = self.branch(value)
        if branch is None:
            self.leaves.append((path, value))
            return len(self.leaves) - 1
        if not depth or id(value) in self.above:
            what = "contains itself"
            if not depth:
                what = f"is nested deeper than {DEEPEST} nodes"
            below = "/…" if path[8:] else ""
            self.problems.append(f"{name_of(path[:8])}{below}: {what}")
            return -1
        kind, type_name, keys, children, static = branch
        named = keys
        if kind in KEYLESS:
            named = [str(index) for index in range(len(children))]
        if self._is_wrong(named, path):
            return -1
        self.above.add(id(value))
        pairs = zip(named, children, strict=True)
        inner = tuple([self.structure(child, (*path, key), depth - 1) for key, child in pairs])
        self.above.remove(id(value))
        return Branch(kind, keys=tuple(keys), children=inner, type=type_name, static=static)

    def _is_wrong(self, keys: Sequence[Key], path: Path) -> bool:
        texts = set()
        before = len(self.problems)
        for key in keys:
            try:
                text = component(key)
            except UsageError as why:
                self.problems += [
                    type(problem)(f"{name_of(path)}: {problem}") for problem in why.problems
                ]
            else:
                if text in texts:
                    self.problems.append(f"{name_of(path)}: has the key {key!r} twice")
                texts.add(text)
        return len(self.problems) > before

    def branch(self, value: Any) -> tuple[str, str, Sequence[Key], Sequence[Any], Any] | None:
        """Flatten a node by one level: kind, type, keys, children, static data; None for a leaf."""
        if self.is_leaf and self.is_leaf(value):
            return None
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
        if kind is UnknownNode:
            return "node", value.type, value.keys, value.children, value.static
        level = self.nodes.flatten(value) if self.nodes else None
        if level is not None and level.static is not kind:  # JAX's own way with namedtuples
            return "node", type_name(kind), level.keys, level.children, level.static
        if isinstance(value, tuple) and _fields(kind) is not None:
            return "namedtuple", type_name(kind), kind._fields, value, None
        return None

    def _defaultdict(self, value: Any) -> tuple[str, str, Sequence[Key], Sequence[Any], Any]:
        keys = _sorted(value)
        children = [value[key] for key in keys]
        for name, factory in FACTORIES.items():
            if value.default_factory is factory:
                return "defaultdict", "", keys, children, name
        return "node", "collections:defaultdict", keys, children, OPAQUE


def _sorted(keys: Iterable[Key]) -> list[Key]:
    """Sort keys by their text; unchanged if one has none."""
    listed = list(keys)
    try:
        return sorted(listed, key=component)
    except UsageError:  # reported later, with the path
        return listed


def _fields(kind: type) -> tuple[str, ...] | None:
    fields = getattr(kind, "_fields", None)
    if type(fields) is tuple and all(type(field) is str for field in fields):
        return fields
    return None


def unflatten_tree(structure: Structure, leaves: Sequence[Any], nodes: Nodes | None = None) -> Any:
    """Return the tree of a structure; its leaf `n` is `leaves[n]`.

    Nothing is imported: a namedtuple or node whose class is not loaded, or does not fit, becomes an
    `UnknownNode`.
    """
    if isinstance(structure, int):
        return leaves[structure]
    children = tuple([unflatten_tree(child, leaves, nodes) for child in structure.children])
    return _of_branch(structure, children, nodes)


def _of_branch(branch: Branch, children: tuple[Any, ...], nodes: Nodes | None) -> Any:
    if branch.kind == "list":
        return [*children]
    if branch.kind == "tuple":
        return children
    if branch.kind == "dict":
        return dict(zip(branch.keys, children, strict=True))
    if branch.kind == "OrderedDict":
        return OrderedDict(zip(branch.keys, children, strict=True))
    if branch.kind == "defaultdict":
        return defaultdict(FACTORIES[branch.static], zip(branch.keys, children, strict=True))
    return _built(branch, children, nodes)


def _built(branch: Branch, children: tuple[Any, ...], nodes: Nodes | None) -> Any:
    kind = loaded(branch.type)
    if kind and issubclass(kind, tuple) and _fields(kind) == branch.keys:
        return tuple.__new__(kind, children)  # does not run code of the class
    if branch.kind == "node" and nodes:
        built = nodes.build(branch.type, Level(branch.keys, children, branch.static))
        if built is not None:
            return built
    return UnknownNode(branch.type, branch.keys, children, branch.static)


def loaded(name: str) -> type | None:
    """Return the class of that name if it is already loaded. Runs no module's code."""
    module, _, qualified = name.partition(":")
    candidate: Any = sys.modules.get(module)
    for part in qualified.split("."):
        if not isinstance(candidate, ModuleType | type):
            return None
        candidate = vars(candidate).get(part)
    if isinstance(candidate, type):
        return candidate
    return None


# ---- A leaf with a different value on every process.


@local
@dataclass(frozen=True)
class PerProcess:
    """Mark a leaf whose value is this process's own, such as a data loader's position or a seed.

    Local.

    `shoal.save` stores the value of every process; each gets its own back if the process count
    is the same. The value is a tree of plain values, NumPy arrays and PRNG keys: dicts, lists,
    tuples, numbers, str, bytes, None.

    >>> PerProcess({"row": 17}).value
    {'row': 17}
    """

    value: Any
