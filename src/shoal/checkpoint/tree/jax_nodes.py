"""Node types registered with JAX, through its public API."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import jax
from jax import tree_util

from shoal.checkpoint.tree.flatten import Level, loaded
from shoal.checkpoint.tree.nodes import OPAQUE


class JaxNodes:
    """Node types registered with JAX: dataclasses, flax modules, optimizer states. `tree.Nodes`."""

    def flatten(self, value: Any) -> Level | None:
        """See `tree.Nodes`. None is a leaf here."""
        if value is None or isinstance(value, jax.Array):
            return None
        flattened = tree_util.default_registry.flatten_one_level_with_keys(value)
        if flattened is None:
            return None
        pairs, static = flattened
        pairs = list(pairs)
        keys = tuple(_key(key) for key, _ in pairs)
        if len(set(map(repr, keys))) < len(keys):  # a class with ambiguous child keys
            keys = tuple(str(index) for index in range(len(pairs)))
        return Level(keys, tuple(child for _, child in pairs), static)

    def build(self, type_name: str, level: Level) -> Any | None:
        """See `tree.Nodes`: None unless the class is loaded, registered, and accepts them."""
        kind = loaded(type_name)
        registry = tree_util.default_registry
        if kind is None or level.static is OPAQUE or not registry.is_node(kind):
            return None
        if _is_native(kind) or (is_dataclass(kind) and not _fits(kind, level)):
            return None
        try:
            parts = [tree_util.tree_structure(0)] * len(level.children)
            data = (kind, level.static)
            node = tree_util.PyTreeDef.from_node_data_and_children(registry, data, parts)
            return node.unflatten(level.children)
        except Exception:  # noqa: BLE001 - whatever the class says: it takes others than it gave
            return None

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        """See `tree.Nodes`."""
        # `from_node_data_and_children` would rebuild a namedtuple that has functions of its own as
        # any other.
        one_level = tree_util.tree_structure(value, is_leaf=lambda part: part is not value)
        return one_level.unflatten(children)


def _is_native(kind: type) -> bool:
    """Does JAX rebuild such nodes without validation? Then a malicious file could crash it.

    Namedtuples count, also those that were registered with functions of their own.
    """
    return kind in _NATIVE or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


_NATIVE = (dict, list, tuple, type(None), OrderedDict, defaultdict)  # no file has these as `node`


def _fits(kind: type, level: Level) -> bool:
    """Does a registered dataclass have these children and static data? JAX does not check.

    Determined by flattening an instance created without running its own code.
    """
    try:
        blank: Any = object.__new__(kind)
        for field in fields(kind):
            object.__setattr__(blank, field.name, None)
        flattened = tree_util.default_registry.flatten_one_level_with_keys(blank)
    except Exception:  # noqa: BLE001 - as above
        return False
    if flattened is None:
        return False
    pairs, static = flattened
    if tuple(_key(key) for key, _ in pairs) != level.keys or type(static) is not type(level.static):
        return False
    return not isinstance(static, tuple) or len(static) == len(level.static)


def _key(entry: Any) -> Any:
    """Return the key for an entry of a JAX key path."""
    if isinstance(entry, tree_util.DictKey):
        return entry.key
    if isinstance(entry, tree_util.GetAttrKey):
        return entry.name
    if isinstance(entry, tree_util.SequenceKey):
        return str(entry.idx)
    if isinstance(entry, tree_util.FlattenedIndexKey):
        return str(entry.key)
    return str(entry)
