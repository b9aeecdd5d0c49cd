"""Layout and memory kind of an array as one line of text.

`"x, - @ x=4"` is in the devices' default memory, `"x, - @ x=4 in pinned_host"` in another.
"""

from __future__ import annotations

import re

_MEMORY = re.compile(r"(.*) in ([a-z][a-z0-9_]*)", re.DOTALL)


def in_memory(layout: str, memory: str) -> str:
    """Return the text of a layout in a memory kind; "" is the default memory."""
    return f"{layout} in {memory}" if layout and memory else layout


def layout_and_memory(text: str) -> tuple[str, str]:
    """Split the text into the layout's and the memory kind.

    >>> layout_and_memory("x, - @ x=4 in pinned_host"), layout_and_memory("x @ x=4")
    (('x, - @ x=4', 'pinned_host'), ('x @ x=4', ''))
    """
    found = _MEMORY.fullmatch(text)
    return (found[1], found[2]) if found else (text, "")
