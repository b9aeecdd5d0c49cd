"""Check the signature of functions of (name, x) used as targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_MOST_SHOWN = 80  # characters


def wrong_arguments(function: Callable[..., Any]) -> str:
    """Return why a function cannot be called with (name, x); empty if it can, or if unknown.

    >>> wrong_arguments(lambda name, x: None), wrong_arguments(max)
    ('', '')
    >>> wrong_arguments(lambda name: None)[:52]
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
    detail = (
        "the leaf's name, such as 'params/w', and a jax.ShapeDtypeStruct of its shape and dtype"
    )
    return f"the {what}{short_text(signature, str)} must take (name, x): {detail}"


def short_text(value: object, text: Callable[[object], str] = repr) -> str:
    """Return a short one-line text of a value."""
    found = " ".join(text(value).split())
    return found if len(found) <= _MOST_SHOWN else found[: _MOST_SHOWN - 1] + "…"
