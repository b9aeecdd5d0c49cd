"""The door and the colours: what a user may name, and who must call it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType

from meta.source import PACKAGE, Tree, nodes, parse
from shoal import colour

COLOUR_LINE = re.compile(
    r"Local\.|Traced\.|Logically collective: .+ must be equal\.|Collective over .+\."
)
NEARLY = re.compile(r"(Local|Traced)\. .*|(Logically collective|Collective over)\b.*")


def declared(door: str) -> dict[str, str]:
    """Return what the door imports from the package, at once or for types: name → module."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in nodes(parse(door))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}.")
        for alias in node.names
    }


def listed(door: str) -> list[str]:
    """Return the names in `__all__`, the version left out."""
    for node in parse(door).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    return []


def door_problems(door: str) -> list[str]:
    """Compare `__all__` with what the door imports."""
    names, sources = listed(door), {n for n in declared(door) if not n.startswith("_")}
    return [
        *(f"{name}: listed twice in __all__" for name in sorted(names) if names.count(name) > 1),
        *(f"{name}: in __all__, imported nowhere" for name in sorted(set(names) - sources)),
        *(f"{name}: imported, not in __all__" for name in sorted(sources - set(names))),
    ]


def lazy_problems(module: ModuleType, sources: Mapping[str, str]) -> list[str]:
    """Compare what a module gives, now or lazily, with what it declares to type checkers."""
    problems = []
    for name, source in sources.items():
        if not hasattr(module, name):
            problems.append(f"{name}: {module.__name__} does not pass it")
        elif getattr(module, name) is not getattr(importlib.import_module(source), name, None):
            problems.append(f"{name}: not the one of {source}")
        elif name not in dir(module):
            problems.append(f"{name}: dir() does not show it")
    return problems


def colour_lines(docstring: str | None) -> list[str]:
    """Return the lines of a docstring that are colour lines, or were meant to be."""
    lines = [line.strip() for line in (docstring or "").splitlines()]
    return [line for line in lines if COLOUR_LINE.fullmatch(line) or NEARLY.fullmatch(line)]


def surface_problems(exports: Mapping[str, object]) -> list[str]:
    """Check that everything a user can call says, once and rightly, who must call it."""
    problems = []
    for name, target in exports.items():
        if isinstance(target, type) and issubclass(target, BaseException):
            if not target.__doc__:
                problems.append(f"{name}: no docstring")
        elif callable(target):
            lines, recorded = colour_lines(inspect.getdoc(target)), colour.colour_of(target)
            if not recorded or lines != [recorded]:
                problems.append(f"{name}: recorded {recorded!r}, its docstring says {lines}")
    return problems


def colour_problems(tree: Tree) -> list[str]:
    """Compare decorator and docstring of everything in the library that has either."""
    problems = []
    for path, text in tree.items():
        if path == "colour.py":
            continue
        for node in nodes(parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = colour_lines(ast.get_docstring(node))
                recorded = list(_recorded(node))
                if lines != recorded:
                    problems.append(
                        f"{path}:{node.lineno}: {node.name}: decorated {recorded}, "
                        f"its docstring says {lines}"
                    )
    return problems


def _recorded(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the colours that the decorators of a definition record."""
    for mark in node.decorator_list:
        call = mark if isinstance(mark, ast.Call) else None
        name = ast.unparse(call.func if call else mark).removeprefix("colour.")
        if name not in ("local", "traced", "logically_collective", "collective"):
            continue
        if (call is None) != (name in ("local", "traced")):
            yield f"@{ast.unparse(mark)}: call it only if it takes words"
            continue
        paint = getattr(colour, name)
        if call is not None:
            paint = paint(*(ast.literal_eval(argument) for argument in call.args))
        yield colour.colour_of(paint(lambda: None))
