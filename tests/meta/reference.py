"""docs/reference.md, written from the docstrings. `make reference` rewrites it; a test compares."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import shoal

if __name__ == "__main__":  # a script finds what lies beside it, not the package that it is in
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meta import reference_entries as entries
from meta.source import PACKAGE
from shoal.colour import colour_of
from shoal.errors import DtypeWarning, ShoalError
from shoal.runtime.system import fault_points
from shoal.settings import SETTINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"

HEAD = """\
# Reference

Written from the docstrings by `make reference`; `help(name)` shows the whole of each, with what it
guarantees and an example. The predecessors' names have pages of their own, see
[coming from](../README.md#coming-from).

A *colour* says who must call: `Local.` any process, any time. `Traced.` inside `jax.jit`, the
same program everywhere. `Logically collective: …` all processes call it with equal values of
what is named, nothing is sent. `Collective over …` all of them call it, in the same order; it may
wait. The colour of a function never depends on its arguments or on the number of processes.
"""

# Modules that users name, beside the top: every name of theirs that has a colour, and `OTHERS`.
DOORS = (
    "compat", "planning", "planning.topology", "preemption", "preemption.clouds", "retention"
)  # fmt: skip
OTHERS: Mapping[str, tuple[str, ...]] = {
    "retention": ("Keep", "Saved"),
    "runtime.system.fault_points": ("reach",),
    "testing.cluster": ("Cluster",),
    "testing.clock": ("Clock",),
    "testing.strategies": ("meshes", "layouts", "shapes", "axis_names"),
}
PLUGIN = "testing.pytest_plugin"  # fixtures and markers: its docstring is the reference


def public_modules() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each module that a user calls, with what of it has a colour: the door, then others."""
    door = {name: getattr(shoal, name) for name in sorted(getattr(shoal, "__all__", ()))}
    yield PACKAGE, door
    for name in DOORS:
        module = _module(name)
        names = {name: getattr(module, name) for name in sorted(getattr(module, "__all__", ()))}
        yield f"{PACKAGE}.{name}", {n: v for n, v in names.items() if colour_of(v)}


def documented() -> dict[str, dict[str, Any]]:
    """Return all modules of the page: name → what is shown of it, errors left out."""
    modules: dict[str, dict[str, Any]] = {
        module: {n: v for n, v in names.items() if callable(v) and not _is_exception(v)}
        for module, names in public_modules()
    }
    for module, more in OTHERS.items():
        shown = modules.setdefault(f"{PACKAGE}.{module}", {})
        shown |= {name: getattr(_module(module), name) for name in more}
    return modules


def results(modules: Mapping[str, Mapping[str, Any]]) -> dict[type, list[str]]:
    """Return the classes that calls return and that stand nowhere else: class → who returns it."""
    shown = {target for names in modules.values() for target in names.values()}
    found: dict[type, list[str]] = {}
    queue = [
        (name if module == PACKAGE else f"{module}.{name}", target)
        for module, names in modules.items()
        for name, target in names.items()
    ]
    for name, target in queue:
        for kind in _returned_classes(target):
            if kind not in shown:
                if kind not in found:
                    queue.append((kind.__name__, kind))
                found.setdefault(kind, []).append(name)
    return found


def _returned_classes(target: Any) -> Iterator[type]:
    """Yield the classes of ours that a function returns, or that the members of a class give."""
    if not isinstance(target, type):
        yield from _classes_in(_hints(target).get("return"))
        return
    for member in entries.members(target):
        if member.getter is not None:
            yield from _classes_in(_hints(member.getter).get("return"))
        elif ": " in member.shown:
            yield from _classes_in(_hints(target).get(member.shown.split(": ")[0]))


def _hints(target: Any) -> dict[str, Any]:
    """Return the types of a function or class; none where they are there for type checkers only."""
    try:
        return typing.get_type_hints(target)
    except NameError:
        return {}


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes of ours in a type: `tuple[Step, ...] | None` has one."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        if hint.__module__.split(".")[0] == PACKAGE and not hint.__name__.startswith("_"):
            yield hint
    for argument in typing.get_args(hint):
        yield from _classes_in(argument)


def page() -> str:
    """Compute the whole page."""
    modules = documented()
    parts = [HEAD]
    parts += [_module_section(module, names) for module, names in modules.items()]
    parts.append(f"## `{PACKAGE}.{PLUGIN}`\n\n{inspect.getdoc(_module(PLUGIN))}\n")
    parts.append("## What calls return\n\nYou are given these; you do not make them.\n")
    found = results(modules)
    for kind in sorted(found, key=lambda kind: (kind.__name__, kind.__module__)):
        section = entries.entry(kind.__name__, kind, heading=kind.__name__, is_result=True)
        by = ", ".join(f"`{name.removeprefix(PACKAGE + '.')}`" for name in sorted({*found[kind]}))
        parts.append(section.replace("`\n", f"`\n\nGiven by {by}.\n", 1))
    return "\n".join([*parts, _errors(), _points(), _variables()])


def _module_section(module: str, names: Mapping[str, Any]) -> str:
    """Return a table of contents, and a section for each name."""
    headings = {name: f"{module}.{name}" for name in names}
    rows = [
        (
            f"[`{name}`](#{anchor})",
            entries.plain(colour_of(names[name])).replace("|", "\\|"),
            entries.summary(names[name]),
        )
        for name, anchor in zip(names, _anchors(headings.values()), strict=True)
    ]
    contents = entries.table(("name", "colour", "what it does"), rows)
    sections = [
        entries.entry(name, target, heading=headings[name]) for name, target in names.items()
    ]
    return "\n".join([f"## `{module}`\n", contents, *sections])


def _anchors(headings: Iterable[str]) -> Iterator[str]:
    """Yield the anchors that GitHub gives to headings: `a.Cost` and `a.cost` are two."""
    seen: dict[str, int] = {}
    for heading in headings:
        anchor = re.sub(r"[^\w-]", "", heading.lower())
        count = seen.setdefault(anchor, 0)
        seen[anchor] += 1
        yield f"{anchor}-{count}" if count else anchor


def _errors() -> str:
    rows = [
        (f"`{kind.__name__}`", str(kind.exit_code), _facts(kind), entries.summary(kind))
        for kind in [ShoalError, *_subclasses(ShoalError)]
    ]
    rows.append((f"`{DtypeWarning.__name__}`", "–", "", entries.summary(DtypeWarning)))
    head = ("name", "exit code", "attributes", "what it says")
    return f"## `shoal.errors`\n\n{entries.table(head, rows)}"


def _facts(kind: type[ShoalError]) -> str:
    """Return the attributes of an error: what its constructor takes by keyword."""
    if kind is ShoalError:
        return "`exit_code`"
    parameters = inspect.signature(kind).parameters.values()
    return " ".join(f"`{each.name}`" for each in parameters if each.kind == each.KEYWORD_ONLY)


def _points() -> str:
    points = [(f"`{name}`", entries.plain(words)) for name, words in fault_points.POINTS.items()]
    kinds = [(f"`{name}`", entries.plain(words)) for name, words in fault_points.KINDS.items()]
    return (
        "## Fault points\n\nFor tests: `SHOAL_FAULTS` is a list of "
        "`POINT[@PROCESS][#TURN]:KIND[=VALUE]`, separated by semicolons; see "
        f"[testing](testing.md#faults-at-named-points).\n\n"
        f"{entries.table(('point', 'where'), points)}\n{entries.table(('kind', 'what'), kinds)}"
    )


def _variables() -> str:
    rows = [
        (f"`{row.name}`", row.default or "–", row.unit, row.meaning) for row in SETTINGS.values()
    ]
    head = ("variable", "default", "unit", "meaning")
    return f"## Environment variables\n\n{entries.table(head, rows)}"


def _module(name: str) -> types.ModuleType:
    folder, _, last = name.partition(".")
    if folder in DOORS and last:  # a module that a door re-exports
        return getattr(_module(folder), last)  # type: ignore[no-any-return]
    return importlib.import_module(f"{PACKAGE}.{name}")


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _subclasses(kind: type[ShoalError]) -> Iterator[type[ShoalError]]:
    """Yield the tree below `kind` that errors.py defines, parents first."""
    for child in kind.__subclasses__():
        if child.__module__ == kind.__module__:
            yield child
            yield from _subclasses(child)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
