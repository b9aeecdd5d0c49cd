"""A tree of Python files as a value: what the architecture tests look at.

A tree maps paths relative to its root to text: `{"plan/mesh.py": "import numpy"}`. The real one is
read from disk; a bad one is written in a test to prove that a check can fail. Every check of this
folder is a pure function from a tree to a list of problems, empty when all is well.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

Tree = Mapping[str, str]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "shoal"


def read_tree(root: Path) -> Tree:
    """Read every Python file under `root`."""
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.py"))
    }


def package_tree() -> Tree:
    """Return the library's own files, relative to src/shoal."""
    return read_tree(ROOT / "src" / PACKAGE)


def repository_tree() -> Tree:
    """Return every Python file that a reader of the repository meets."""
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    return {
        f"{folder}/{path}": text
        for folder in folders
        for path, text in read_tree(ROOT / folder).items()
    }


@functools.cache
def parse(text: str) -> ast.Module:
    """Parse once: many checks look at the same file. Nobody may change the result."""
    return ast.parse(text)


@functools.cache
def nodes(module: ast.Module) -> tuple[ast.AST, ...]:
    """Walk once, too."""
    return tuple(ast.walk(module))


def module_name(path: str) -> str:
    """Name a file: plan/mesh.py is shoal.plan.mesh, plan/__init__.py is shoal.plan."""
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def scopes(tree: ast.Module) -> tuple[tuple[ast.AST, bool], ...]:
    """Walk all nodes; say of each whether it runs when the module is imported."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
        yield node, at_import
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import and not deferred)

    return tuple(walk(tree, True))


@functools.cache
def docstring_nodes(tree: ast.Module) -> frozenset[int]:
    """Return the ids of the string constants that are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        id(node.body[0].value)
        for node in nodes(tree)
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None
        and isinstance(node.body[0], ast.Expr)
    )  # fmt: skip
