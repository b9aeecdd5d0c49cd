"""Suggest what to save instead of a value that cannot be saved."""

from __future__ import annotations

from dataclasses import is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

_KNOWN = "give arrays, numbers, str, bytes, PRNG keys, None or PerProcess(…)"
_REGISTER = "jax.tree_util.register_dataclass"


def remedy(value: Any, *, can_register: bool = True) -> str:
    """Return the type of a value, and what to save instead, as text.

    Args:
      can_register: would registering its class with JAX help?

    >>> from fractions import Fraction
    >>> remedy({1, 2})
    'is a set; save a sorted list of it'
    >>> remedy(Fraction(1, 2))
    'is a Fraction; give arrays, numbers, str, bytes, PRNG keys, None or PerProcess(…)'
    """
    kind = type(value)
    if isinstance(value, type):
        return f"is the class {value.__name__}; save its name, or leave it out"
    if isinstance(value, Enum):
        return f"is {value}, of the enum {kind.__name__}; save its .name or .value"
    if is_dataclass(value):
        detail = f"is a dataclass {kind.__name__}"
        as_dict = "save dataclasses.asdict(…) of it"
        if not can_register:
            return f"{detail}; {as_dict}"
        return f"{detail} that JAX does not know; decorate it with @{_REGISTER}, or {as_dict}"
    return f"is a {kind.__name__}; {_other(value)}"


def _other(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return "save a sorted list of it"
    if isinstance(value, PurePath):
        return "save str(…) of it"
    if isinstance(value, date | time):
        return "save its .isoformat()"
    if isinstance(value, timedelta):
        return "save its .total_seconds()"
    for plain in (dict, list, tuple, bool, int, float, complex, str, bytes):
        if isinstance(value, plain):
            return f"save {plain.__name__}(…) of it"
    if callable(value):
        return "functions cannot be saved; leave it out"
    return _KNOWN
