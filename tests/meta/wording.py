"""Texts that the library reads: those of others, and what is left of its own.

A maintainer may reword a message. So no module decides anything by words that another one makes:
facts are passed along as values. What JAX, gloo, object stores and Python say has no other form.

What counts as wording is two words in a row, or one between blanks: a code such as "lost" is a
value. Of a pattern, each run of words between its classes and groups counts by itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from meta.source import PACKAGE, Tree, docstring_nodes, module_name, nodes, parse

_METHODS = (
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "find",
    "rfind", "index", "replace", "split",
)  # fmt: skip
_REGEXES = ("compile", "search", "match", "fullmatch", "sub", "split", "findall", "finditer")
_PROSE = re.compile(
    r"[A-Za-z]{2,}[,:;]? \(?[A-Za-z]{2,}|[A-Za-z]{4,}: ?$|^; [a-z]{2,}|^ [a-z]{2,} $"
)
_LITERAL = re.compile(r"(?:[A-Za-z',] ?)+")  # of a pattern without its classes


# Texts of others: the only place that lists them. By file, and the constant or the text.
FOREIGN: Mapping[tuple[str, str], str] = {
    ("checkpoint/bucket/transport.py", "status code"): "obstore",
    ("checkpoint/bucket/transport.py", "\n\nDebug source"): "obstore",
    ("checkpoint/bucket/transport.py", "_NO_CONNECTION"): "obstore",
    ("checkpoint/bucket/transport.py", "doctype html"): "a server's page",
    ("compat/dtensor/text.py", "mesh:"): "DTensor",
    ("launch/diagnose.py", "Fatal Python"): "Python",
    ("launch/diagnose.py", "terminate called "): "the C++ runtime",
    ("launch/diagnose.py", "Check failure"): "absl",
    ("launch/conclusion.py", "EOF when reading a line"): "Python",
    ("plan/hlo_reading.py", "maximal device"): "XLA",
    ("runtime/exit/idle.py", "TracerPid:"): "Linux",
    ("runtime/failures/last_record.py", "(most recent call first):"): "faulthandler",
    ("runtime/failures/last_record.py", "<frozen runpy>"): "Python",
    ("runtime/failures/last_record.py", "_OF_JAX"): "JAX",
    ("runtime/failures/stack_text.py", "Current thread"): "faulthandler",
    ("runtime/failures/stack_text.py", "most recent call first"): "faulthandler",
    ("runtime/failures/stack_text.py", "ANNOUNCES"): "Python",
    ("runtime/startup/device_start.py", "nable to initialize backend '"): "JAX",
    ("runtime/startup/device_start.py", "text"): "JAX",
    ("runtime/failures/exception_text.py", "ANNOUNCES"): "Python",
    ("runtime/system/foreign_text.py", "_HEADS"): "Python",
    ("runtime/failures/exception_text.py", "phrase"): "gloo",
    ("runtime/system/stacks.py", "Current thread"): "faulthandler",
    ("runtime/system/stacks.py", "SigCgt:"): "Linux",
    ("runtime/system/stacks.py", "<frozen runpy>"): "Python",
}
# Own texts that are still read, each with the reason. The list only shrinks.
STILL_READ: Mapping[tuple[str, str], str] = {
    (
        "checkpoint/disk/committing.py",
        "_DOUBT",
    ): "a mark that it was added: one constant makes and reads it",
    ("collectives/leaves.py", "the value"): "the path of a leaf that is the whole tree",
    (
        "collectives/transport/device_transfer.py",
        "_LATE",
    ): "a mark before what a late process reports: made and read there",
    ("launch/diagnose.py", "_NOT_OUTPUT"): "lines of shoal in a log, which a report leaves out",
    ("runtime/failures/comparison.py", " at "): "the call site in a place, put into parentheses",
    (
        "runtime/failures/comparison.py",
        "AMONG",
    ): "the name of an operation among some processes: one constant makes and reads it",
    ("runtime/failures/rendering.py", "shoal run"): "the name of a program",
    ("settings.py", "short or full"): "the unit of a setting, in a table",
    ("testing/cluster.py", "the launcher"): "the name of a process of a test",
}


class Reading(NamedTuple):
    """One place that looks for a text in another."""

    file: str
    line: int
    text: str
    constant: str  # its name, if it is that of a module

    @property
    def key(self) -> tuple[str, str]:
        """What names it in a list: its file, and the constant or the text."""
        return self.file, self.constant or self.text

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: reads {self.text!r}"


def unlisted(tree: Tree) -> list[str]:
    """Return the places that look for words in a text, and are in neither list."""
    own = own_texts_read(tree)
    foreign = {one.key: str(one) for one in _readings(tree) if one.key not in own}
    read = {**own, **foreign}
    return [text for key, text in read.items() if key not in {**FOREIGN, **STILL_READ}]


def outdated(tree: Tree) -> list[str]:
    """Return the rows of the lists that no place of the library is about."""
    keys = {one.key for one in _readings(tree)}
    return [
        f"{file}: {text!r} is not read" for file, text in {**FOREIGN, **STILL_READ}.keys() - keys
    ]


def own_texts_read(tree: Tree) -> dict[tuple[str, str], str]:
    """Return the places that look for words which another place of the library makes."""
    found, made = {}, _made(tree)
    for one in _readings(tree):
        makers = [at for at in made if _makes(made[at], one) and at[0] != f"{one.file}:{one.line}"]
        if makers:
            found[one.key] = f"{one}, made at {makers[0][0]}"
    return found


def _makes(text: str, one: Reading) -> bool:
    return text == f"={one.constant}" if one.constant else one.text in text


def _readings(tree: Tree) -> Iterator[Reading]:
    constants = _constants(tree)
    for file, source in tree.items():
        module = parse(source)
        known = {**constants[file], **_imported(module, tree, constants)}
        for node in nodes(module):  # any(text in message for text in _ABSENT)
            if isinstance(node, ast.comprehension) and isinstance(node.target, ast.Name):
                if isinstance(node.iter, ast.Name) and node.iter.id in known:
                    known[node.target.id] = known[node.iter.id]
        for node in nodes(module):
            for sought, is_regex in looked_for(node):
                for text, name in _texts(sought, known):
                    pieces = _pieces(text) if is_regex else [text]
                    for piece in pieces:
                        if _PROSE.search(piece):
                            name = "" if is_regex else name
                            yield Reading(file, sought.lineno, piece, name)


def looked_for(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the expressions of which a node looks for the value in a text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        owner, method = node.func.value, node.func.attr
        is_regex = isinstance(owner, ast.Name) and owner.id == "re"
        if is_regex and method in _REGEXES:
            yield node.args[0], True
        elif not is_regex and method in _METHODS:
            yield node.args[0], False
    if isinstance(node, ast.Compare):
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, ast.In | ast.NotIn):
                yield left, False
            elif isinstance(operator, ast.Eq | ast.NotEq) and isinstance(right, ast.Constant):
                yield right, False
            left = right


def _texts(sought: ast.expr, known: Mapping[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """Yield the texts of an expression, each with the constant of a module that holds it."""
    if isinstance(sought, ast.Constant) and isinstance(sought.value, str):
        yield sought.value, ""
    elif isinstance(sought, ast.JoinedStr):
        for part in sought.values:
            yield from _texts(part, {})
    elif isinstance(sought, ast.Tuple):
        for one in sought.elts:
            yield from _texts(one, known)
    elif isinstance(sought, ast.Name) and sought.id in known:
        for text, _ in _texts(known[sought.id], {}):
            yield text, sought.id


def _pieces(pattern: str) -> list[str]:
    """Return the words that a pattern looks for."""
    plain = re.sub(r"\\[a-zA-Z]|\[[^\]]*\]|\(\?P?<?\w*[>:=!]|[()|?*+{}^$]", "\n", pattern)
    return [*_LITERAL.findall(plain.replace("\\", ""))]


def _constants(tree: Tree) -> dict[str, dict[str, ast.expr]]:
    """Return the texts of each file that have a name."""
    return {
        file: {
            name.id: value
            for node in parse(source).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            for name, value in _assigned(target, node.value)
        }
        for file, source in tree.items()
    }


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, of_it in zip(target.elts, value.elts, strict=False):
            yield from _assigned(one, of_it)


def _imported(
    module: ast.Module, tree: Tree, constants: Mapping[str, Mapping[str, ast.expr]]
) -> dict[str, ast.expr]:
    files = {module_name(file): file for file in tree}
    return {
        alias.asname or alias.name: constants[files[node.module]][alias.name]
        for node in nodes(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if node.module in files and alias.name in constants[files[node.module]]
    }


def _made(tree: Tree) -> dict[tuple[str, int], str]:
    """Return the texts that the library makes, by place: constants that are neither read nor said
    to a reader of the source, and `=NAME` for each use of one that has a name."""
    made: dict[tuple[str, int], str] = {}
    for file, source in tree.items():
        module = parse(source)
        skipped = set(docstring_nodes(module))
        for node in nodes(module):
            for sought, _ in looked_for(node):
                skipped.update(id(one) for one in ast.walk(sought))
            if isinstance(node, ast.Assign) and node in module.body:
                if isinstance(node.value, ast.Constant | ast.Tuple):
                    skipped.update(id(one) for one in ast.walk(node.value))
        for node in nodes(module):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                made[f"{file}:{node.lineno}", id(node)] = node.value
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                made[f"{file}:{node.lineno}", id(node)] = f"={node.id}"
    return made
