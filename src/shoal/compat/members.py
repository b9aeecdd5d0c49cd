"""Members of a module object: the items of containers, the attributes of objects."""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

__all__ = ["members_of"]

_WITHOUT = (
    jax.Array, np.ndarray, np.generic, str, bytes,
    type, ModuleType, FunctionType, MethodType, BuiltinFunctionType,
)  # fmt: skip
"""Types that are not containers of a program's objects: values, and code."""


def members_of(value: Any) -> list[tuple[Any, Any]]:
    """Return an object's members, by key, index or name, including `__slots__`.

    Arrays, classes, functions and modules have none.

    >>> members_of({"w": 1}), members_of([2])
    ([('w', 1)], [(0, 2)])
    """
    if isinstance(value, _WITHOUT):
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    in_slots = [
        (name, getattr(value, name)) for name in _slots(type(value)) if _is_set(value, name)
    ]
    return [*in_slots, *getattr(value, "__dict__", {}).items()]


def _slots(kind: type) -> list[str]:
    """Return the names of the slots of a class and of those that it derives from."""
    given = [vars(base).get("__slots__", ()) for base in reversed(kind.__mro__)]
    names = [[value] if isinstance(value, str) else [*value] for value in given]
    owners = [base.__name__.lstrip("_") for base in reversed(kind.__mro__)]
    slots = [_mangled(o, n) for o, own in zip(owners, names, strict=True) for n in own]
    return list(dict.fromkeys(slots))


def _mangled(owner: str, name: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    if is_private and owner:
        return f"_{owner}{name}"
    return name


def _is_set(value: Any, name: str) -> bool:
    return name not in ("__dict__", "__weakref__") and hasattr(value, name)
