"""The node structure of a tree as text, equal on all processes."""

from __future__ import annotations

import re
from typing import Any

from jax.tree_util import treedef_is_leaf

from shoal.runtime.rules.spec_lines import SpecLine

_ADDRESS = re.compile(r"at 0x[0-9a-fA-F]+")
_SET = re.compile(r"\{([^{}:]*)\}")


def tree_lines(treedef: Any) -> tuple[str, ...]:
    """Return the line of a tree's nodes, with their static data; none for a leaf alone."""
    return () if treedef_is_leaf(treedef) else (SpecLine("tree", value=nodes_text(treedef)).packed,)


def nodes_text(treedef: Any) -> str:
    """Return the nodes of a tree in one line, without what differs between processes.

    That is addresses (`<function f at 0x7f12…>`) and the order of sets. Static data may have texts
    of several lines.

    >>> import jax
    >>> nodes_text(jax.tree.structure({"x": (1, [2])}))
    "PyTreeDef({'x': (*, [*])})"
    """
    text = str(treedef)
    if "\n" in text:
        text = " ".join(map(str.strip, text.split("\n")))
    if "0x" not in text and "{" not in text:  # a scalar has neither
        return text
    text = _ADDRESS.sub("at 0x", text)
    return _SET.sub(lambda match: f"{{{', '.join(sorted(match[1].split(', ')))}}}", text)
