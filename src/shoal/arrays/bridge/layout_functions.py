"""Check the signature of functions of (name, x) given for layouts or targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_MOST_SHOWN = 80  # characters


def wrong_arguments(function: Callable[..., Any], leaf: str) -> str:
    """Return why a function cannot be called with (name, x); empty if it can, or if unknown.

    Args:
      leaf: what x is.

    >>> wrong_arguments(lambda name, x: None, "the leaf"), wrong_arguments(max, "the leaf")
    ('', '')
    >>> wrong_arguments(lambda name: None, "the leaf")[:52]
    'the function <lambda>(name) must take (name, x): the'
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some builtins have no signature
        return ""
    try:
        signature.bind("", None)
    except TypeError:
        pass
    else:
        if not isinstance(function, type):
            return ""
    kind = "class" if isinstance(function, type) else "function"
    what = getattr(function, "__name__", "")
    what = f"{kind} {what}" if what else type(function).__name__
    taken = "the leaf's name, such as 'params/w', and"
    return f"the {what}{short_text(signature, str)} must take (name, x): {taken} {leaf}"


def short_text(value: object, text: Callable[[object], str] = repr) -> str:
    """Return a short one-line text of a value."""
    one_line = " ".join(text(value).split())
    return one_line if len(one_line) <= _MOST_SHOWN else one_line[: _MOST_SHOWN - 1] + "…"
