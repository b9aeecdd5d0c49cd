"""What the predecessors' names are, as read from their packages, and how ours compare."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

CASES = Path(__file__).with_name("predecessor_names.jsonl")


def rows_from(sources: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the cases of the modules whose names begin with one of `sources`."""
    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["from"].startswith(sources)]


def problems(facade: ModuleType, rows: list[dict[str, Any]]) -> list[str]:
    """Return the names and members that a facade lacks, or has with another signature."""
    found = []
    for row in rows:
        name = row["name"]
        if not hasattr(facade, name):
            found.append(f"{name}: missing")
            continue
        ours = getattr(facade, name)
        if row["kind"] == "value" and repr(ours) != row["value"]:
            found.append(f"{name}: is {ours!r}, not {row['value']}")
        found += _differences(name, row, ours)
        for member in row.get("members", []):
            found += _member_problems(name, member, ours)
    return found


def _member_problems(owner: str, member: Mapping[str, Any], ours: type) -> list[str]:
    name = member["name"]
    fields = {field.name for field in dataclasses.fields(ours)} if _is_dataclass(ours) else set()
    # a member that only an instance has is declared: as an annotation, or in __init__
    declared = {*fields, *(key for base in ours.__mro__ for key in _annotations(base))}
    if not hasattr(ours, name) and name not in declared:
        return [f"{owner}.{name}: missing"]
    if member["kind"] in ("value", "property") or isinstance(getattr(ours, name), property):
        return []
    return _differences(f"{owner}.{name}", member, getattr(ours, name))


def _is_dataclass(ours: type) -> bool:
    return dataclasses.is_dataclass(ours)


def _annotations(base: type) -> list[str]:
    return [*inspect.get_annotations(base)]


def _differences(name: str, case: Mapping[str, Any], ours: Any) -> list[str]:
    """Compare the parameters: their names, kinds and order, and which can be left out."""
    if case["kind"] in ("class", "value", "property") or not case.get("signature"):
        return []
    theirs = parameters(case["signature"])
    have = list(inspect.signature(ours).parameters.values())
    if case["kind"] in ("method", "classmethod") and theirs and theirs[0][0] in ("self", "cls"):
        theirs = theirs[1:]
        have = have[1:] if case["kind"] == "method" and inspect.isfunction(ours) else have
    found = []
    by_name = {one.name: one for one in have}
    positional = [
        one.name for one in have if one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)
    ]
    wanted = [parameter for parameter, _, kind in theirs if kind == "positional"]
    is_open = {one.kind for one in have}
    if positional[: len(wanted)] != wanted and inspect.Parameter.VAR_POSITIONAL not in is_open:
        found.append(f"{name}: takes {positional} by position, not {wanted}")
    for parameter, is_optional, kind in theirs:
        one = by_name.get(parameter)
        if one is None:
            if kind != "variable" and inspect.Parameter.VAR_KEYWORD not in is_open:
                found.append(f"{name}: has no parameter {parameter}")
        elif is_optional and kind != "variable" and one.default is one.empty:
            found.append(f"{name}: {parameter} cannot be left out")
    known = {parameter for parameter, _, _ in theirs}
    found += [
        f"{name}: {one.name} must be given, and is not the predecessor's"
        for one in have
        if one.name not in known
        and one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return found


def parameters(signature: str) -> list[tuple[str, bool, str]]:
    """Return (name, can it be left out, "positional" | "keyword" | "variable") of each.

    >>> parameters("(a, b: int=1, *rest, c=None)")  # doctest: +NORMALIZE_WHITESPACE
    [('a', False, 'positional'), ('b', True, 'positional'), ('rest', True, 'variable'),
     ('c', True, 'keyword')]
    """
    text = re.sub(r"<[^<>]*>", "None", signature)  # defaults without a literal
    arguments = ast.parse(f"def f{text}: ...").body[0].args
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    found = [(one.arg, place >= required, "positional") for place, one in enumerate(plain)]
    if arguments.vararg:
        found.append((arguments.vararg.arg, True, "variable"))
    found += [
        (one.arg, default is not None, "keyword")
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, True, "variable"))
    return found


def unspoken(page: str, names: set[str]) -> list[str]:
    """Return the names that stand nowhere on a page as code."""
    spoken = " ".join(re.findall(r"```.*?```|`[^`]+`", page, re.DOTALL))
    words = set(re.findall(r"\w+", spoken))
    return sorted(names - words)
