"""Nodes of trees that JAX knows: through its public registry, for `tree`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import jax
from jax import tree_util

from shoal.checkpoint.tree.flatten import Level, loaded
from shoal.checkpoint.tree.nodes import OPAQUE


class JaxNodes:
    """What is registered with JAX: dataclasses, flax modules, optimizer states. `tree.Nodes`."""

    def flatten(self, value: Any) -> Level | None:
        """See `tree.Nodes`. None is a leaf here."""
        if value is None or isinstance(value, jax.Array):
            return None
        found = tree_util.default_registry.flatten_one_level_with_keys(value)
        if found is None:
            return None
        pairs, static = found
        pairs = list(pairs)
        keys = tuple(_key(key) for key, _ in pairs)
        if len(set(map(repr, keys))) < len(keys):  # a class that names its children carelessly
            keys = tuple(str(index) for index in range(len(pairs)))
        return Level(keys, tuple(child for _, child in pairs), static)

    def build(self, type_name: str, level: Level) -> Any | None:
        """See `tree.Nodes`: None unless the class is loaded and registered, and takes these."""
        kind = loaded(type_name)
        registry = tree_util.default_registry
        if kind is None or level.static is OPAQUE or not registry.is_node(kind):
            return None
        if issubclass(kind, _NATIVE) or (is_dataclass(kind) and not _fits(kind, level)):
            return None
        parts = [tree_util.tree_structure(0)] * len(level.children)
        node = tree_util.PyTreeDef.from_node_data_and_children(
            registry, (kind, level.static), parts
        )
        try:
            return node.unflatten(level.children)
        except Exception:  # noqa: BLE001 - whatever the class says: it takes others than it gave
            return None


# What JAX builds without a look at what it is given: a file could crash the process with it.
_NATIVE = (dict, list, tuple, type(None))


def _fits(kind: type, level: Level) -> bool:
    """Has a registered dataclass these children and as much static data? JAX does not look.

    What it has is seen by taking an instance apart that was made without its own code.
    """
    try:
        blank: Any = object.__new__(kind)
        for field in fields(kind):
            object.__setattr__(blank, field.name, None)
        found = tree_util.default_registry.flatten_one_level_with_keys(blank)
    except Exception:  # noqa: BLE001 - as above
        return False
    if found is None:
        return False
    pairs, static = found
    if tuple(_key(key) for key, _ in pairs) != level.keys or type(static) is not type(level.static):
        return False
    return not isinstance(static, tuple) or len(static) == len(level.static)


def _key(entry: Any) -> Any:
    """Return the key that an entry of JAX's paths stands for."""
    if isinstance(entry, tree_util.DictKey):
        return entry.key
    if isinstance(entry, tree_util.GetAttrKey):
        return entry.name
    if isinstance(entry, tree_util.SequenceKey):
        return str(entry.idx)
    if isinstance(entry, tree_util.FlattenedIndexKey):
        return str(entry.key)
    return str(entry)
