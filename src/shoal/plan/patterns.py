"""Patterns over the names of leaves, in checkpoints and tables of layouts: `params/**`."""

from __future__ import annotations

import re
from functools import lru_cache


def matches(pattern: str, name: str) -> bool:
    """Does a pattern match this name?

    `*` and `?` match characters of one component, `[ab]` for one of them, and a component `**`
    for any number of components, none included.

    >>> matches("params/**", "params/layers/0/w"), matches("params/*", "params/layers/0/w")
    (True, False)
    >>> matches("**/w", "w"), matches("opt/[mn]u/?", "opt/mu/w")
    (True, True)
    """
    return _compiled(pattern).fullmatch(name) is not None


def is_pattern(text: str) -> bool:
    """Is it a valid pattern? `[z-a]` is not a range."""
    try:
        _compiled(text)
    except re.error:
        return False
    return True


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.sub(r"(?<![^/])\*\*(/\*\*)+(?![^/])", "**", pattern).split("/")
    if parts == ["**"]:
        return re.compile(r".*", re.DOTALL)
    text = ""
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part != "**":
            text += _component(part) + ("" if is_last or parts[number + 1 :] == ["**"] else "/")
        elif is_last:
            text += "(?:/.*)?"
        else:
            text += "(?:.*/)?"
    return re.compile(text, re.DOTALL)


def _component(part: str) -> str:
    text = ""
    for token in re.findall(r"\[[^\]]+\]|.", part, re.DOTALL):
        if token == "*":
            text += "[^/]*"
        elif token == "?":
            text += "[^/]"
        elif len(token) > 1:
            inner = token[1:-1]
            sign = "^" if inner.startswith("!") and len(inner) > 1 else ""
            body = inner[len(sign) :]
            text += f"[{sign}{''.join(c if c == '-' else re.escape(c) for c in body)}]"
        else:
            text += re.escape(token)
    return text
