"""Sizes of the library, as `make house` prints them. They are looked at; nothing fails by them."""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meta.floors import imports
from meta.house import conditionals, walruses
from meta.source import PACKAGE, Tree, docstring_nodes, module_name, nodes, package_tree, parse

DOORS = ("compat/", "cli/")  # what names alone reach: facades, commands
SHOWN = 12
NOT_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
)  # fmt: skip


def code_lines(text: str) -> int:
    """Count the lines that are neither blank, nor comments, nor of docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    docstrings = docstring_nodes(parse(text))
    for node in nodes(parse(text)):
        if id(node) in docstrings:
            lines -= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines)


def importers(tree: Tree) -> Mapping[str, set[str]]:
    """Return module -> the files that import it."""
    modules = {module_name(path): path for path in tree}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in tree:
        for one in imports(path, tree):
            at = one.target
            while at and at not in modules:
                at = at.rpartition(".")[0]
            if at and modules[at] != path:
                found[modules[at]].add(path)
    return found


def own_names(path: str, tree: Tree) -> int:
    """Count the names of ours that a file imports."""
    return sum(one.target.split(".")[0] == PACKAGE for one in imports(path, tree))


def _folder(path: str) -> str:
    return path.partition("/")[0] if "/" in path else "top"


def main() -> None:
    """Print the sizes."""
    tree = package_tree()
    used = importers(tree)
    code = {path: code_lines(text) for path, text in tree.items()}
    files = [path for path in tree if not path.endswith("__init__.py")]
    single = [p for p in files if len(used[p]) == 1 and not p.startswith(DOORS)]
    folders = Counter(map(_folder, files))
    conditional = Counter({path: len(conditionals(parse(text))) for path, text in tree.items()})
    walrus = Counter({path: len(walruses(parse(text))) for path, text in tree.items()})
    heads = f"{'folder':<14}{'files':>7}{'code':>8}{'one importer':>14}"
    print(f"{heads}{'a if b else c, ‰':>18}{':=, ‰':>7}")
    rows = {folder: [p for p in tree if _folder(p) == folder] for folder in sorted(folders)}
    for folder, mine in (rows | {"all": list(tree)}).items():
        lines, ones = sum(code[p] for p in mine), sum(p in mine for p in single)
        shares = [1000 * sum(count[p] for p in mine) / lines for count in (conditional, walrus)]
        row = f"{folder:<14}{folders.get(folder, len(files)):>7}{lines:>8}{ones:>14}"
        print(f"{row}{shares[0]:>18.1f}{shares[1]:>7.1f}")
    names = [own_names(path, tree) for path in files]
    print(f"names of ours that a file imports: median {statistics.median(names):.0f}")
    lengths = sorted(((len(tree[p].splitlines()), p) for p in files), reverse=True)
    print("longest files:", *(f"  {lines:>5} {path}" for lines, path in lengths[:SHOWN]), sep="\n")
    functions = sorted(
        (
            (node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
            for path in files
            for node in nodes(parse(tree[path]))
            if isinstance(node, ast.FunctionDef)
        ),
        reverse=True,
    )
    print("longest functions:", *(f"  {n:>5} {at}" for n, at in functions[:SHOWN]), sep="\n")


if __name__ == "__main__":
    main()
