"""The pages about errors, messages, exit codes and variables name all that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import shoal.errors
from meta.source import ROOT, docstring_nodes, nodes, package_tree, parse
from shoal.runtime.rules.stopping import REQUEUE
from shoal.settings import SETTINGS

ERRORS, MESSAGES, CODES, VARIABLES = (
    (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    for page in ("errors", "messages", "exit-codes", "settings")
)
CLASSES = {
    name: one for name, one in vars(shoal.errors).items()
    if isinstance(one, type) and issubclass(one, shoal.errors.ShoalError)
}  # fmt: skip
ROOTS = {"ShoalError", "CheckpointError"}
# Classes for others, and those that take more than a program.
WITHOUT_PROGRAM = {*ROOTS, "DeviceStartError", "StorageFullError"}
_FORMAT = re.compile(r"%[-+.\d]*[a-z]")
_LEAST = 8  # characters of a part that is looked for


def headings(page: str) -> list[str]:
    return re.findall(r"^### (.+)$", page, re.MULTILINE)


def templates() -> list[str]:
    """Return the templates of the page of messages: headings, and the first column of the table."""
    rows = re.findall(r"^\| (`.*?`) \|", MESSAGES, re.MULTILINE)
    found = [text for line in headings(MESSAGES) + rows for text in re.findall(r"`(.+?)`", line)]
    return [text for text in found if " " in text or "…" in text]


def text_of(node: ast.AST) -> str:
    """Return a string expression with … in the place of each value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return "…"


def strings(module: ast.Module) -> Iterator[str]:
    """Yield the texts of a module, but for its docstrings."""
    docstrings = docstring_nodes(module)
    yield from (text_of(node) for node in nodes(module) if id(node) not in docstrings)


def parts(template: str) -> list[str]:
    """Return the parts that are long enough to be looked for."""
    found = [part.strip() for part in re.split("[…:;]", template)]
    return [part for part in found if len(part) >= _LEAST]


MODULES = [parse(text) for text in package_tree().values()]
CODE = {_FORMAT.sub("…", text) for module in MODULES for text in strings(module) if " " in text}


def is_in_code(template: str) -> bool:
    """Is the template one of the code, or each clause of it: its parts in one text, in order?"""
    if any(template in text for text in CODE):
        return True
    clauses = [parts(clause) for clause in re.split("[:;]", template)]
    in_order = [re.compile(".*".join(map(re.escape, clause)), re.DOTALL) for clause in clauses]
    return any(clauses) and all(any(one.search(text) for text in CODE) for one in in_order)


def test_each_error_class_has_an_entry_with_a_program():
    entries = re.split(r"^### ", ERRORS, flags=re.MULTILINE)[1:]
    named = {entry.partition("\n")[0].strip("`"): entry for entry in entries}
    assert named.keys() == CLASSES.keys()
    lacking = {name for name, entry in named.items() if "<!-- run -->" not in entry}
    assert lacking == WITHOUT_PROGRAM


def test_the_table_of_classes_has_their_exit_codes():
    rows = re.findall(r"^\| (\[.+?) \| (\w.*?) \|", ERRORS, re.MULTILINE)
    named = {name: code for text, code in rows for name in re.findall(r"`(\w+)`", text)}
    expected = {name: str(one.exit_code) for name, one in CLASSES.items()}
    expected |= {"SaveAbortedError": "that of its cause"}
    assert named == {name: code for name, code in expected.items() if name not in ROOTS}


def test_each_exit_code_has_an_entry():
    own = {0, REQUEUE, *(one.exit_code for one in CLASSES.values())}
    assert headings(CODES) == [*(f"Exit code {code}" for code in sorted(own)), "Exit code 128 + n"]


def test_each_variable_has_an_entry_with_its_default():
    assert sorted(headings(VARIABLES)) == sorted(f"`{name}`" for name in SETTINGS)
    for name, one in SETTINGS.items():
        default = f"default {one.default}" if one.default else "not set by default"
        assert re.search(rf"^### `{name}`\n\n\*[^*]*; {default}\*\n\n", VARIABLES, re.MULTILINE), (
            name
        )


def test_each_message_of_the_page_is_in_the_code():
    assert len(templates()) > 100
    assert [text for text in templates() if not is_in_code(text)] == []


def test_each_logged_warning_has_an_entry():
    """But those whose text is made elsewhere: they are on the page too."""
    calls = [
        text_of(node.args[0])
        for module in MODULES
        for node in nodes(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("warning", "exception")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "_LOG"
    ]
    listed = {part for text in templates() for part in parts(text)}
    texts = [_FORMAT.sub("…", text) for text in calls]
    assert len(texts) > 30
    lacking = [text for text in texts if parts(text) and not any(p in text for p in listed)]
    assert lacking == []


def test_a_message_that_is_not_in_the_code_is_noticed():
    assert is_in_code("did not join within … s")
    assert not is_in_code("did not join within … s, since it was late")
    assert not is_in_code("checkpoint … did not join … is not a number")
