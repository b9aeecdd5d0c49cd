"""The library, and tests of it, loaded once more with the letters of all their sentences rotated.

What is decided must not depend on wording. So the tests that say which process failed first run
twice, in a copy of the library as it is and in one that speaks another language, and every
decision and every fact must be the same. Asserts do not count there: some are about texts.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import itertools
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from meta.source import PACKAGE, ROOT, docstring_nodes
from meta.wording import FOREIGN, looked_for

SPEAKING = (
    "errors.py", "launch/", "runtime/client/", "runtime/exit/", "runtime/failures/",
    "runtime/rules/", "runtime/server/", "runtime/system/foreign_text.py",
)  # fmt: skip
_SOURCE = ROOT / "src" / PACKAGE
_WORD = re.compile(r"%\(?\w+|\{[^}]*\}|[A-Za-z]{2,}")  # not what is filled in
_SENTENCE = re.compile(r"[A-Za-z]{2,}[,:;]? |[ ;:][A-Za-z]{2,}")
_OF_OTHERS = re.compile(
    r"Gloo|gloo|Connection closed|Broken pipe|UNAVAILABLE|INTERNAL|Traceback|most recent call"
    r"|\", line |^ in f$"  # a stack
)
_TEXTS = (
    "headline", "words", "advice", "message", "notes", "said", "speaker", "text", "value",
    "last_output", "failed_since", "programs",
)  # fmt: skip


def rotated(text: str) -> str:
    """Return a text in another language.

    >>> rotated("process {} left: %s"), rotated("lost")
    ('cebprff {} yrsg: %s', 'lost')
    """
    if not _SENTENCE.search(text) or _OF_OTHERS.search(text):
        return text  # a name, a code
    return _WORD.sub(lambda word: _turned(word[0]), text)


def _turned(word: str) -> str:
    if word[0] in "%{":
        return word
    return word.translate(_ROTATION)


_LOWER = "abcdefghijklmnopqrstuvwxyz"
_ROTATION = str.maketrans(
    _LOWER + _LOWER.upper(),
    _LOWER[13:] + _LOWER[:13] + (_LOWER[13:] + _LOWER[:13]).upper(),
)


class _Rotation(ast.NodeTransformer):
    """Rotates the sentences that a file makes; those that it looks for stay as they are."""

    def __init__(self, file: str, module: ast.Module) -> None:
        self._file = file
        self._kept = docstring_nodes(module)
        for node in ast.walk(module):
            for sought, _ in looked_for(node):
                self._kept |= {id(one) for one in ast.walk(sought)}
            if isinstance(node, ast.Assign) and self._is_foreign(node.targets[0]):
                self._kept |= {id(one) for one in ast.walk(node.value)}

    def _is_foreign(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Name) and (self._file, target.id) in FOREIGN

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str) or id(node) in self._kept:
            return node
        return ast.copy_location(ast.Constant(rotated(node.value)), node)


class _WithoutAsserts(ast.NodeTransformer):
    """Evaluates what a test asserts, whatever it is."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Expr(node.test), node)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the library's modules, with some of them changed."""

    def __init__(self, edits: Mapping[str, tuple[str, str]], *, rotates: bool) -> None:
        self._edits, self._rotates = edits, rotates

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        stem = _SOURCE.joinpath(*fullname.split(".")[1:])
        is_package = (stem / "__init__.py").exists()
        file = stem / "__init__.py" if is_package else stem.with_suffix(".py")
        if not file.exists():
            return None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self,
            submodule_search_locations=[str(stem)] if is_package else None,
        )  # fmt: skip

    def exec_module(self, module: types.ModuleType) -> None:
        path = module.__spec__.origin
        file = path.removeprefix(f"{_SOURCE}/")
        with open(path, encoding="utf-8") as source:
            text = source.read()
        old, new = self._edits.get(file, ("", ""))
        assert old in text
        tree = ast.parse(text.replace(old, new) if old else text)
        if self._rotates and file.startswith(SPEAKING):
            tree = _Rotation(file, tree).visit(tree)
        exec(compile(tree, path, "exec"), vars(module))


@contextlib.contextmanager
def library(edits: Mapping[str, tuple[str, str]], *, rotates: bool) -> Iterator[None]:
    """Import the library anew in the block, and forget that afterwards."""
    finder = _Finder(edits, rotates=rotates)
    before = {name: sys.modules.pop(name) for name in _loaded()}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(before)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == PACKAGE]


def decisions(
    tests: Mapping[str, tuple[str, ...]],
    edits: Mapping[str, tuple[str, str]] | None = None,
    *,
    rotates: bool,
    without: Collection[str] = (),
) -> dict[str, list[Any]]:
    """Return what each test decides, in its order.

    Args:
      tests: for each file, relative to tests/, the names in it whose results are decisions.
      edits: for files of the library, a text and what replaces it.
      rotates: whether sentences are rotated, also those of the tests.
      without: tests that are left out.
    """
    found: dict[str, list[Any]] = {}
    with library(edits or {}, rotates=rotates):
        for file, names in tests.items():
            path = ROOT / "tests" / file
            tree = ast.parse(path.read_text(encoding="utf-8"))
            tree = _WithoutAsserts().visit(tree)
            if rotates:
                tree = _Rotation(file, tree).visit(tree)
            space = {"__name__": f"rotated_{path.stem}", "__file__": str(path)}
            exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), space)
            taken: list[Any] = []
            for name in names:
                space[name] = _recording(space[name], taken)
            for number, call in enumerate(_calls(space, without)):
                taken.clear()
                try:
                    call()
                except Exception as error:  # noqa: BLE001 (about a text, or of a decision)
                    taken.append(type(error).__name__)
                found[f"{file} {number}"] = [*taken]
    return found


def _recording(function: Any, taken: list[Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        taken.append(_plain(result))
        return result

    return call


def _calls(space: Mapping[str, Any], without: Collection[str]) -> Iterator[Any]:
    """Yield the tests of a module that need no fixtures, with each of their rows."""
    for name, test in [*space.items()]:
        if not name.startswith("test_") or hasattr(test, "hypothesis") or name in without:
            continue
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        choices = []
        for mark in marks:
            names = mark.args[0]
            names = names.split(",") if isinstance(names, str) else names
            rows = [row if len(names) > 1 else [row] for row in mark.args[1]]
            choices.append([dict(zip(names, row, strict=True)) for row in rows])
        needed = test.__code__.co_varnames[: test.__code__.co_argcount]
        for rows in itertools.product(*choices):
            given = {name: value for row in rows for name, value in row.items()}
            if {*needed} == {*given}:
                yield lambda test=test, given=given: test(**given)


def _plain(value: Any) -> Any:
    """Return a decision without texts and times."""
    if isinstance(value, BaseException):
        value = sys.modules["shoal.runtime.failures.last_record"].record_of(value)
    if hasattr(value, "causes") or hasattr(value, "because_of"):
        return _without_texts(sys.modules["shoal.runtime.failures.facts"].to_json(value))
    if hasattr(value, "process"):
        return value.process
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return bool(value) if isinstance(value, str) else value


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: bool(one) if key in _TEXTS else _without_texts(one)
            for key, one in value.items()
            if not (key.endswith("_s") or key == "started")
        }
    return [_without_texts(one) for one in value] if isinstance(value, list) else value
