"""Plain values as JSON and back, exactly: for passing them between a test and its processes.

No pickle: None, booleans, numbers, text, bytes, paths, and lists, tuples, dicts and sets of them.
JSON has neither tuples nor non-string keys, so those are wrapped: `(1,)` is `{"tuple": [1]}`,
`{1: 2}` is `{"dict": [[1, 2]]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.arguments import PLAIN_KINDS
from shoal.errors import UsageTypeError, with_article

__all__ = ["decoded", "encoded"]

_AS_THEY_ARE = PLAIN_KINDS.keys() - {complex, bytes}
_BUILDERS: Mapping[str, Callable[[Any], object]] = {
    "tuple": lambda items: tuple(map(decoded, items)),
    "set": lambda items: set(map(decoded, items)),
    "frozenset": lambda items: frozenset(map(decoded, items)),
    "dict": lambda pairs: {decoded(key): decoded(value) for key, value in pairs},
    "bytes": bytes.fromhex,
    "path": Path,
}


def encoded(value: object, name: str = "the value") -> object:
    """Return `value` as JSON-serializable data.

    Raises:
      UsageTypeError: a part of it is not a plain value; says where.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, bytes) and kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, dict) and kind is dict:
        return {
            "dict": [
                [encoded(key, f"a key of {name}"), encoded(item, f"{name}[{key!r}]")]
                for key, item in value.items()
            ]
        }
    if isinstance(value, list | tuple | set | frozenset) and kind.__name__ in (*_BUILDERS, "list"):
        items = [encoded(item, f"{name}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {kind.__name__: items}
    raise UsageTypeError(
        f"{name} is {with_article(kind.__qualname__)}, which cannot be sent between processes\n"
        "pass plain values: numbers, text, bytes, None, paths, and lists, tuples, dicts and sets "
        "of them (an array's .tolist(), a scalar's .item())"
    )


def decoded(value: Any) -> object:
    """Return the original of `encoded`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if isinstance(value, dict):
        ((kind, inside),) = value.items()
        return _BUILDERS[kind](inside)
    return value
