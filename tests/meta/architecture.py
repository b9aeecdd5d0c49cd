"""Pages against the tree: docs/architecture.md, and the table of floors in CONTRIBUTING.md.

On the first page a folder is an item that begins ``- **`plan/orders/`**``; the names in backticks
behind it are files of it that are worth naming. Anywhere on it, `plan/mesh.py` is a file and
`plan/mesh.py:Mesh.size` a function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from meta.floors import Floor
from meta.source import Tree, parse

TOP = "src/shoal/"
ITEM = re.compile(r"^- \*\*`([\w/]+/)`\*\*(.*(?:\n  .*)*)", re.MULTILINE)
PLACE = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)(?::([\w.]+))?`")
ROW = re.compile(r"^\| (\d) \| (`.*?) \| .*? \| (?:0–)?(\d) \| (.*?) \|$", re.MULTILINE)
IGNORANCE = re.compile(
    r"(?i)\b(?:(?:does|do|may) not know|knows? no\b|knows? neither|knows? nothing|nothing of|"
    r"never imports?)"
)


def listed(page: str) -> dict[str, list[str]]:
    """Return folder → names of files, as the page lists them; the top folder is ""."""
    return {
        folder.removeprefix(TOP): re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", names))
        for folder, names in ITEM.findall(page)
    }


def missing_folders(tree: Tree, page: str) -> list[str]:
    """Find folders that the page does not list."""
    on_page = listed(page)
    folders = dict.fromkeys(_split(path)[0] for path in sorted(tree))
    return [f"{f or TOP}: this directory is not on the page" for f in folders if f not in on_page]


def unknown_files(tree: Tree, page: str) -> list[str]:
    """Find folders and files that the page lists and the tree does not have."""
    folders = {_split(path)[0] for path in tree}
    problems = []
    for folder, names in listed(page).items():
        if folder not in folders:
            problems.append(f"{folder}: does not exist")
            continue
        problems += [
            f"{folder}{n}.py: does not exist" for n in names if f"{folder}{n}.py" not in tree
        ]
        problems += [f"{folder}{n}.py: listed twice" for n in {*names} if names.count(n) > 1]
    return problems


def unknown_places(tree: Tree, page: str) -> list[str]:
    """Find files and functions that the page speaks of and the tree does not have."""
    problems = []
    for path, name in PLACE.findall(page):
        if path not in tree:
            problems.append(f"{path}: does not exist")
        elif name and name not in {*definitions(parse(tree[path]))}:
            problems.append(f"{path}:{name}: does not exist")
    return problems


def knowing_folders(tree: Tree) -> list[str]:
    """Find folders whose docstring does not say what they may not know; the top one knows all."""
    docstrings = {
        path: " ".join((ast.get_docstring(parse(text)) or "").split())
        for path, text in tree.items()
        if path.endswith("/__init__.py")
    }
    return [
        f"{path}: its docstring does not say what the directory does not know"
        for path, docstring in docstrings.items()
        if not IGNORANCE.search(docstring)
    ]


def floor_problems(page: str, floors: Mapping[str, Floor]) -> list[str]:
    """Compare the table of floors on a page with the floors that are enforced."""
    on_page = {
        name: Floor(int(level), int(may_see), _packages(third_party))
        for level, names, may_see, third_party in ROW.findall(page)
        for name in re.findall(r"`(\w+)(?:/|\.py)`", names)
    }
    return [
        *(f"{name}: is not in the table" for name in floors if name not in on_page),
        *(f"{name}: has no floor" for name in on_page if name not in floors),
        *(
            f"{name}: the table says {on_page[name]}, enforced is {floors[name]}"
            for name in floors
            if name in on_page and on_page[name] != floors[name]
        ),
    ]


def _packages(words: str) -> frozenset[str] | None:
    return None if words == "any" else frozenset(words.split()) - {"–"}


def _split(path: str) -> tuple[str, str]:
    """Split "plan/mesh.py" into "plan/" and "mesh"."""
    folder, slash, file = path.rpartition("/")
    return folder + slash, file.removesuffix(".py")


def definitions(module: ast.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of functions, classes and methods."""
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(ast.Module(node.body, []), f"{prefix}{node.name}.")
