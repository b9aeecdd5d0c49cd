"""Suggest what to save instead of a value that cannot be saved."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from shoal.errors import with_article
from shoal.plain_forms import advice

_KNOWN = "give arrays, numbers, str, bytes, PRNG keys, None or PerProcess(…)"


def remedy(value: Any, *, can_register: bool = True) -> str:
    """Return the type of a value, and what to save instead, as text.

    Args:
      can_register: would registering its class with JAX help?

    >>> remedy({1, 2})
    'is a set; save a sorted list of it'
    >>> remedy(object())
    'is an object; give arrays, numbers, str, bytes, PRNG keys, None or PerProcess(…)'
    """
    kind = type(value)
    words = advice(value, "save", "saved", can_register=can_register) or _KNOWN
    if isinstance(value, type):
        return f"is the class {value.__name__}; {words}"
    if isinstance(value, Enum):
        return f"is {value}, of the enum {kind.__name__}; {words}"
    if is_dataclass(value) and can_register and "decorate" in words:
        return f"is a dataclass {kind.__name__} that JAX does not know; {words}"
    what = f"{'dataclass ' if is_dataclass(value) else ''}{kind.__name__}"
    return f"is {with_article(what)}; {words}"
