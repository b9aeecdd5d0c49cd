"""Pages that lead through the code, against the tree: docs/how-it-works/.

`[meeting.py](../../src/shoal/runtime/rules/meeting.py), `Meeting.arrive`, `differ`` is a file and
functions, classes or methods of it. The table of messages is compared with the code that makes them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator

from meta.architecture import definitions
from meta.source import Tree, nodes, parse

STOP = re.compile(r"\[([^\]]+)\]\(([^)\s]+\.py)\)((?:,\s+`[\w.]+`)*)")
MESSAGE = re.compile(r"^\| `([\w ]+)` \|", re.MULTILINE)


def stops(page: str) -> list[tuple[str, str, list[str]]]:
    """Return the label, the target and the names of each link to a file of the code."""
    return [
        (label, target, re.findall(r"`([\w.]+)`", names))
        for label, target, names in STOP.findall(page)
    ]


def wrong_stops(tree: Tree, page: str, folder: str, *, needs_name: bool) -> list[str]:
    """Find links to files, and names of functions, that do not exist.

    Args:
      folder: of the page, relative to `src/shoal/`.
      needs_name: whether each link must be followed by a name.
    """
    problems = []
    for label, target, names in stops(page):
        path = posixpath.normpath(posixpath.join(folder, target))
        if path not in tree:
            problems.append(f"{target}: does not exist")
            continue
        if label != posixpath.basename(path):
            problems.append(f"{target}: is called {label}")
        if needs_name and not names:
            problems.append(f"{target}: no function is named")
        known = {*definitions(parse(tree[path]))}
        problems += [f"{path}: has no {name}" for name in names if name not in known]
    return problems


def messages_on(page: str) -> list[str]:
    """Return the messages in the tables of a page, in order."""
    return MESSAGE.findall(page)


def messages_of(tree: Tree, field: str) -> set[str]:
    """Return the messages that the code makes: the constants under a key "do" or "is"."""
    return {
        value.value
        for path, text in tree.items()
        if not path.startswith("launch/nodes/")  # the protocol of launchers, which is another
        for key, value in _items(parse(text))
        if key == field and isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def _items(module: ast.Module) -> Iterator[tuple[object, ast.expr]]:
    """Yield keys and values of dicts, and of assignments to one key."""
    for node in nodes(module):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield key.value, value
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = node.targets[0].slice
            if isinstance(key, ast.Constant):
                yield key.value, node.value
