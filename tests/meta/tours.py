"""Pages that lead through the code, against the tree: docs/how-it-works/.

A link ``[meeting.py](../../src/shoal/runtime/rules/meeting.py), `Meeting.arrive`, `Meeting.tick` ``
is a file, and functions or classes of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from meta.architecture import definitions
from meta.source import Tree, nodes, parse

SOURCE = "../../src/shoal/"
STOP = re.compile(rf"\[([^\]]+)\]\({re.escape(SOURCE)}([^)\s]+\.py)\)((?:,\s+`[\w.]+`)*)")
ROW = re.compile(r"^\| `([\w ]+)` \|", re.MULTILINE)


def wrong_stops(tree: Tree, page: str, *, needs_name: bool) -> list[str]:
    """Find links to files, and names behind them, that do not exist.

    Args:
      needs_name: whether a link must be followed by a name.
    """
    problems = []
    for label, path, listed in STOP.findall(page):
        names = re.findall(r"`([\w.]+)`", listed)
        if path not in tree:
            problems.append(f"{path}: does not exist")
            continue
        if label != path.rpartition("/")[2]:
            problems.append(f"{path}: the link calls it {label}")
        if needs_name and not names:
            problems.append(f"{path}: no function is named")
        known = {*definitions(parse(tree[path]))}
        problems += [f"{path}:{name}: does not exist" for name in names if name not in known]
    return problems


def rows_below(page: str, heading: str) -> set[str]:
    """Return what the first column of the table below a heading names."""
    return {*ROW.findall(page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0])}


def messages(tree: Tree, field: str) -> set[str]:
    """Return the messages that the code makes: the texts under a key "do" or "is"."""
    return {
        value.value
        for path, text in tree.items()
        if not path.startswith("launch/nodes/")  # another protocol: that of the launchers
        for key, value in _items(parse(text))
        if isinstance(key, ast.Constant) and key.value == field
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def _items(module: ast.Module) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    """Yield the keys and values of dicts, and of assignments to one key."""
    for node in nodes(module):
        if isinstance(node, ast.Dict):
            yield from zip(node.keys, node.values, strict=True)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            yield node.targets[0].slice, node.value
