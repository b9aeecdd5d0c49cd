"""A section of docs/reference.md: a public name, its signature, colour, arguments, members."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from meta.source import PACKAGE
from shoal.colour import colour_of

COLUMNS = 96  # of a signature, before it gets a line for each parameter
SECTIONS = ("Args", "Returns", "Yields", "Raises")
_HEAD = re.compile(r"(\w+):")
_ITEM = re.compile(r"  (\S[^:]*?): +(.*)")
_FIELD = re.compile(r"    (\w+): .*?  # (.+)")


class Text(str):
    """Text whose repr is itself: what `inspect` shows of an annotation that is text already."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Member(NamedTuple):
    """One attribute or method of a public class."""

    shown: str  # "size: int", "parse(text: str) -> Mesh"
    words: str
    getter: object = None  # the function that gives it; None: a field, or a value of an enumeration


def signature(
    name: str, target: Callable[..., Any], *, bound: bool = False, columns: float = COLUMNS
) -> str:
    """Return `name(a: int, *, b: str = "") -> int`; long ones have a line for each parameter.

    `bound`: without the first parameter.
    """
    found = inspect.signature(target)
    parameters = [*found.parameters.values()][1 if bound else 0 :]
    pieces = [*_pieces(parameters)]
    result = "" if isinstance(target, type) else _returned(target, found.return_annotation)
    line = f"{name}({', '.join(pieces)}){result}"
    if len(line) <= columns:
        return line
    return "\n".join([f"{name}(", *(f"    {piece}," for piece in pieces), f"){result}"])


def _pieces(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    """Yield the parameters, and the slash and the star between their kinds."""
    before = None
    has_star = False
    for each in parameters:
        if before == each.POSITIONAL_ONLY != each.kind:
            yield "/"
        if each.kind == each.KEYWORD_ONLY and not has_star:
            yield "*"
            has_star = True
        has_star |= each.kind == each.VAR_POSITIONAL
        before = each.kind
        yield str(each.replace(annotation=_text(each.annotation), default=_default(each.default)))
    if before == inspect.Parameter.POSITIONAL_ONLY:
        yield "/"


def _text(annotation: Any) -> Any:
    """Return an annotation as `inspect` shows it; named tuples keep a ForwardRef of its text."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return Text(text) if isinstance(text, str) else annotation


def _default(value: Any) -> Any:
    """Return what is shown as a default: no addresses, which differ from run to run."""
    if isinstance(value, str):
        return Text(json.dumps(value, ensure_ascii=False))
    return Text("…") if " at 0x" in repr(value) else value


def _returned(target: Callable[..., Any], annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if inspect.isgeneratorfunction(inspect.unwrap(target)) and target is not inspect.unwrap(target):
        text = text.replace("Iterator[", "AbstractContextManager[", 1)
    return f" -> {text}"


def paragraph(target: object) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(target) or "").split("\n\n")[0].split())


def summary(target: object) -> str:
    """Return the first paragraph, fit for a table."""
    return plain(paragraph(target)).replace("|", "\\|")


def plain(text: str) -> str:
    """Escape what Markdown would take for markup, but in `code`."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def sections(docstring: str) -> dict[str, list[tuple[str, str]]]:
    """Return the sections of a docstring: rows of name and text; the name may be empty.

    >>> sections("Do.\\n\\nArgs:\\n  a: one\\n    thing.\\n  b: two.\\n\\nReturns:\\n  It.")
    {'Args': [('a', 'one thing.'), ('b', 'two.')], 'Returns': [('', 'It.')]}
    """
    found: dict[str, list[tuple[str, str]]] = {}
    rows: list[tuple[str, str]] | None = None
    for line in docstring.splitlines():
        head = _HEAD.fullmatch(line)
        if line and not line.startswith(" "):
            rows = found.setdefault(head[1], []) if head and head[1] in SECTIONS else None
        elif rows is not None and line.strip():
            item = _ITEM.fullmatch(line)
            if item:
                rows.append((item[1], item[2]))
            elif rows and line.startswith("    "):
                rows[-1] = rows[-1][0], f"{rows[-1][1]} {line.strip()}"
            else:
                rows.append(("", line.strip()))
    return {name: _joined(name, rows) for name, rows in found.items()}


def _joined(section: str, rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Where there are no names the lines are one text: what looks like a name is a part of it."""
    if section in ("Args", "Raises"):
        return rows
    return [("", " ".join(f"{name}: {text}" if name else text for name, text in rows))]


def entry(name: str, target: Any, *, heading: str, is_result: bool = False) -> str:
    """Return the section of one public name.

    `is_result`: of a class that calls return and that users do not make.
    """
    parts = [f"### `{heading}`\n"]
    if callable(target) and not is_result:
        parts.append(f"```\n{signature(name, target)}\n```\n")
    if colour := colour_of(target):
        parts.append(f"*{plain(colour)}*\n")
    parts.append(plain(paragraph(target)) + "\n")
    docstring = inspect.getdoc(target) or ""
    if isinstance(target, type) and "__init__" in vars(target):
        docstring += "\n\n" + (inspect.getdoc(target.__init__) or "")
    for section, rows in sections(docstring).items():
        parts.append(_section(section, rows))
    if isinstance(target, type):
        rows = [(f"`{m.shown}`".replace("|", "\\|"), m.words) for m in members(target)]
        parts += [table(("member", "what it is"), rows)] if rows else []
    return "\n".join(parts)


def _section(name: str, rows: list[tuple[str, str]]) -> str:
    if name in ("Returns", "Yields"):
        return f"**{name}** {plain(rows[0][1])}\n"
    lines = [f"- {_names(names)}{plain(text)}" for names, text in rows]
    return "\n".join([f"**{name}**\n", *lines, ""])


def _names(names: str) -> str:
    """Put each of `a, b` into backticks; leave prose such as "On all" as it is."""
    if not names:
        return ""
    each = names.split(", ")
    code = all(re.fullmatch(r"\*{0,2}\w+", name.strip("`")) for name in each)
    return (", ".join(f"`{name.strip('`')}`" for name in each) if code else plain(names)) + ": "


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def members(kind: type) -> list[Member]:
    """Return the public attributes and methods of a class, those of its bases behind them."""
    found: dict[str, Member] = {}
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == PACKAGE:
            for member in [*_fields(base), *_methods(base)]:
                found.setdefault(re.split(r"\W", member.shown)[0], member)
    return [*found.values()]


def _fields(kind: type) -> Iterator[Member]:
    """Yield the fields of a tuple or data class, and the values of an enumeration."""
    if issubclass(kind, enum.Enum):
        for each in kind:
            yield Member(each.name, f"{each.value}")
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        source = inspect.getsource(kind).splitlines()
        comments = dict(match.groups() for match in map(_FIELD.fullmatch, source) if match)
        for name, annotation in inspect.get_annotations(kind).items():
            if not name.startswith("_"):
                words = plain(comments.get(name, "")).replace("|", "\\|")
                yield Member(f"{name}: {_text(annotation)}", words)


def _methods(kind: type) -> Iterator[Member]:
    for name, value in vars(kind).items():
        if name.startswith(("_", "test_")) or name in getattr(kind, "_fields", ()):
            continue
        if isinstance(value, property | functools.cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            result = _text(inspect.signature(getter).return_annotation)
            yield Member(f"{name}: {inspect.formatannotation(result)}", summary(value), getter)
        elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            function = getattr(value, "__func__", value)
            bound = not isinstance(value, staticmethod)
            shown = signature(name, function, bound=bound, columns=math.inf)
            yield Member(shown, summary(function), function)
