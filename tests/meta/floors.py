"""The floors: what each folder of src/shoal may know. Imports go only downwards."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meta.source import PACKAGE, Tree, docstring_nodes, module_name, nodes, parse, scopes

PRIVATE_JAX_FILE = "runtime/jax_service/jax_runtime.py"
# The files of the runtime that import JAX, in functions only.
JAX_FILES = (
    PRIVATE_JAX_FILE,
    "runtime/jax_service/device_work.py",
    "runtime/jax_service/own_programs.py",
)
# A finder that waits for the user's program to import this; it imports nothing of JAX itself.
WATCHED = {"launch/child.py": "jax._src.clusters"}
# A door names what it opens only when asked: exports by name, commands by name.
DOORS = ("__init__.py", "types.py", "cli/main.py", PRIVATE_JAX_FILE)
IMPORTERS = ("import_module", "__import__", "find_spec", "resolve_name")


class Floor(NamedTuple):
    """One folder (or file) directly under src/shoal."""

    level: int
    may_see: int  # the highest floor that it may import from, besides itself
    third_party: frozenset[str] | None  # None: anything


def _floor(level: int, may_see: int, third_party: str = "") -> Floor:
    return Floor(level, may_see, frozenset(third_party.split()))


_ARRAYS = "numpy ml_dtypes jax"
FLOORS = {
    "errors": _floor(0, 0),
    "settings": _floor(0, 0),
    "colour": _floor(0, 0),
    "tracebacks": _floor(0, 0),
    "arguments": _floor(0, 0),
    "hashing": _floor(0, 0, "xxhash"),
    "names": _floor(0, 0),
    "conversion_hints": _floor(0, 0),
    "paths": _floor(0, 0),
    "plan": _floor(1, 0, "numpy"),
    "runtime": _floor(2, 1),
    "arrays": _floor(3, 2, _ARRAYS),
    "collectives": _floor(4, 3, _ARRAYS),
    "checkpoint": _floor(5, 4, _ARRAYS + " obstore"),
    "interop": Floor(6, 5, None),
    "launch": _floor(6, 2),
    "compat": _floor(6, 6, _ARRAYS),
    "draw": _floor(6, 5, "numpy rich"),
    "testing": _floor(7, 6, _ARRAYS + " hypothesis pyroute2 pytest rich"),
    "planning": _floor(6, 1),
    "preemption": _floor(6, 2),
    "retention": _floor(6, 5),
    "types": _floor(6, 5),
    "cli": _floor(7, 6, "numpy ml_dtypes rich typer"),
    "__init__": _floor(8, 7),
    "__main__": _floor(8, 7),
}
# Parts of a higher floor that know no more than `plan`: its floor, each other, ml_dtypes.
HELD = (
    "checkpoint/format/", "checkpoint/planning/", "checkpoint/tree/",
)  # fmt: skip
NOT_HELD = ("checkpoint/tree/jax_nodes.py",)  # trees that only JAX knows
HELD_TO = ("errors", "settings", "colour", "arguments", "hashing", "conversion_hints", "plan")

# What decides answers with values; one folder makes sentences of them.
WITHOUT_SENTENCES = ("runtime/rules/", "runtime/server/", "runtime/system/", "runtime/wire/")
SENTENCES = "shoal.runtime.failures"


class Import(NamedTuple):
    """One import: the module it names, the line, and whether it runs when the file is imported."""

    target: str
    line: int
    at_import: bool


def place(module: str) -> str:
    """Return the folder (or file) directly under src/shoal that a module of ours lies in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: str, tree: Tree) -> Iterator[Import]:
    """Yield what a file imports, `if TYPE_CHECKING:`, inside functions and by string included."""
    known = {module_name(other) for other in tree}
    for node, at_import in scopes(parse(tree[path])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(path, node)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                # `from jax import _src` and `from shoal.plan import mesh` import modules
                whole = inner in known or alias.name == "_src"
                yield Import(inner if whole else source, node.lineno, at_import)
        elif isinstance(node, ast.Call) and _callee(node) in IMPORTERS and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, node.lineno, at_import)


def _absolute(path: str, node: ast.ImportFrom) -> str:
    """Resolve `from ..plan import mesh` to shoal.plan."""
    if not node.level:
        return node.module or ""
    package = [PACKAGE, *path.split("/")[:-1]]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def _callee(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _ours(name: str) -> bool:
    return name.split(".")[0] == PACKAGE


def upward_imports(tree: Tree) -> list[str]:
    """Find imports that look up, and files that stand on no floor."""
    problems = []
    for path in tree:
        here = place(module_name(path))
        if here not in FLOORS:
            problems.append(f"{path}: {here!r} has no floor; add it to FLOORS in tests/meta")
            continue
        for target, line, _ in imports(path, tree):
            there = place(target)
            if not _ours(target) or there == here:
                continue
            if there not in FLOORS or FLOORS[there].level > FLOORS[here].may_see:
                problems.append(f"{path}:{line}: {here} may not import {target}")
    return problems


def foreign_imports(tree: Tree) -> list[str]:
    """Find third-party imports that a floor may not have."""
    problems = []
    for path in tree:
        allowed = FLOORS[place(module_name(path))].third_party
        for target, line, at_import in imports(path, tree):
            top = target.split(".")[0]
            if top in sys.stdlib_module_names or top == PACKAGE or allowed is None:
                continue
            if path in JAX_FILES and top in ("jax", "jaxlib"):
                if at_import:
                    problems.append(f"{path}:{line}: imports {target} outside a function")
            elif top not in allowed and top != "jaxlib":  # private_jax names jaxlib
                problems.append(f"{path}:{line}: may not import {target}")
    return problems


def held_down(tree: Tree) -> list[str]:
    """Find imports that a file held to a lower floor may not have."""
    paths = sorted(path for path in tree if path.startswith(HELD) and path not in NOT_HELD)
    held = {module_name(path) for path in paths}
    problems = []
    for path in paths:
        for target, line, _ in imports(path, tree):
            top = target.split(".")[0]
            is_held = target in held or target.rpartition(".")[0] in held
            if _ours(target) and not is_held and place(target) not in HELD_TO:
                problems.append(f"{path}:{line}: is held to the floor of plan: {target}")
            elif not _ours(target) and top not in {*sys.stdlib_module_names, "numpy", "ml_dtypes"}:
                problems.append(f"{path}:{line}: is held to the floor of plan: {target}")
    return problems


def without_sentences(tree: Tree) -> list[str]:
    """Find folders that decide, and import what makes sentences."""
    return [
        f"{path}:{line}: {target} makes sentences: answer with values"
        for path in tree
        if path.startswith(WITHOUT_SENTENCES)
        for target, line, _ in imports(path, tree)
        if f"{target}.".startswith(f"{SENTENCES}.")
    ]


def private_jax(tree: Tree) -> list[str]:
    """Find private JAX outside its one file, however it is reached."""
    problems = []
    for path, text in tree.items():
        if path == PRIVATE_JAX_FILE:
            continue
        names = [(line, target) for target, line, _ in imports(path, tree)]
        module = parse(text)
        prose = docstring_nodes(module)
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and node.attr == "_src":
                names.append((node.lineno, "jax._src"))
            elif isinstance(node, ast.Constant) and id(node) not in prose:
                if _hides(node.value) and node.value != WATCHED.get(path):
                    names.append((node.lineno, "jax._src"))
        problems += [
            f"{path}:{line}: {name} is for {PRIVATE_JAX_FILE} alone"
            for line, name in names
            if name.split(".")[0] == "jaxlib" or (name + ".").startswith("jax._src.")
        ]
    return problems


def _hides(value: object) -> bool:
    return isinstance(value, str) and ("jax._src" in value or value == "_src")


def computed_imports(tree: Tree) -> list[str]:
    """Find imports of a computed name: they would hide their floor. Only doors may."""
    problems = []
    for path, text in tree.items():
        if path in DOORS:
            continue
        for node in nodes(parse(text)):
            if isinstance(node, ast.Call) and _callee(node) in IMPORTERS[:2] and not (
                node.args and isinstance(node.args[0], ast.Constant)
            ):  # fmt: skip
                problems.append(f"{path}:{node.lineno}: imports a module of a computed name")
    return problems


def cycles(tree: Tree) -> list[str]:
    """Find modules that import each other, directly or around a corner."""
    paths = {module_name(path): path for path in tree}
    return _circles(
        {
            name: sorted({i.target for i in imports(path, tree) if i.target in paths})
            for name, path in paths.items()
        }
    )


def folder_cycles(tree: Tree) -> list[str]:
    """Find folders that import each other: a folder is what lies in it, its folders left out."""
    paths = {module_name(path): path for path in tree}
    edges: dict[str, set[str]] = {}
    for path in tree:
        here = path.rpartition("/")[0]
        there = {
            paths[i.target].rpartition("/")[0] for i in imports(path, tree) if i.target in paths
        }
        edges.setdefault(here, set()).update(there - {here, ""})
    return _circles({here: sorted(there) for here, there in edges.items()})


def _circles(edges: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each circle that a walk along the edges finds."""
    problems: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            problems.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in edges.get(name, ()):
                visit(target, [*path, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    return problems
