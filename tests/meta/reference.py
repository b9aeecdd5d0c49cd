"""docs/reference.md, written from the docstrings. `make reference` rewrites it; a test compares."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

import shoal
from shoal.colour import colour_of
from shoal.errors import ShoalError
from shoal.settings import SETTINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"

HEAD = """\
# Reference

Written from the docstrings by `make reference`; `help(name)` shows the whole of each.

A *colour* says who must call: `Local.` any process, any time. `Traced.` inside `jax.jit`, the
same program everywhere. `Logically collective: …` all processes call it with equal values of
what is named, nothing is sent. `Collective over …` all of them call it, in the same order; it may
wait. The colour of a function never depends on its arguments or on the number of processes.
"""


def public_modules() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each module that a user calls, with what it offers: the door, then the core."""
    door = {name: getattr(shoal, name) for name in sorted(getattr(shoal, "__all__", ()))}
    yield "shoal", door
    offered = {id(value) for value in door.values()}
    root = Path(shoal.__file__).parent
    for path in sorted((root / "plan").rglob("[!_]*.py")):
        name = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(f"shoal.{name}")
        names = {name: getattr(module, name) for name in sorted(getattr(module, "__all__", ()))}
        coloured = {n: v for n, v in names.items() if colour_of(v) and id(v) not in offered}
        if coloured:
            yield module.__name__, coloured


def first_sentence(target: object) -> str:
    """Return the first paragraph of a docstring on one line, fit for a table."""
    paragraph = (inspect.getdoc(target) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def page() -> str:
    """Compute the whole page."""
    parts = [HEAD]
    for module, names in public_modules():
        rows = [
            (f"`{name}`", colour_of(value).replace("|", "\\|"), first_sentence(value))
            for name, value in names.items()
            if callable(value) and not _is_exception(value)
        ]
        if rows:
            parts.append(f"## `{module}`\n\n" + _table(("name", "colour", "what it does"), rows))
    errors = [
        (f"`{kind.__name__}`", str(kind.exit_code), first_sentence(kind))
        for kind in [ShoalError, *_subclasses(ShoalError)]
    ]
    parts.append("## `shoal.errors`\n\n" + _table(("name", "exit code", "what it says"), errors))
    variables = [
        (f"`{row.name}`", row.default or "–", row.unit, row.meaning) for row in SETTINGS.values()
    ]
    head = ("variable", "default", "unit", "meaning")
    parts.append(f"## Environment variables\n\n{_table(head, variables)}")
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
