"""The names that a user calls, and the classes that calls return: what the API pages must have."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import shoal
from meta.source import PACKAGE
from shoal.colour import colour_of

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


def public_modules() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each module that a user calls, with what of it has a colour: the door, then others."""
    door = {name: getattr(shoal, name) for name in sorted(getattr(shoal, "__all__", ()))}
    yield PACKAGE, door
    for name in DOORS:
        module = _module(name)
        names = {name: getattr(module, name) for name in sorted(getattr(module, "__all__", ()))}
        yield f"{PACKAGE}.{name}", {n: v for n, v in names.items() if colour_of(v)}


def documented() -> dict[str, Any]:
    """Return what the API pages must show: `shoal.barrier` → the function."""
    found = {
        f"shoal.errors.{name}" if _is_exception(value) else f"{module}.{name}": value
        for module, names in public_modules()
        for name, value in names.items()
        if callable(value)
    }
    errors = importlib.import_module(f"{PACKAGE}.errors")
    for name in errors.__all__:
        if _is_exception(value := getattr(errors, name)):
            found[f"shoal.errors.{name}"] = value
    for module, more in OTHERS.items():
        found |= {f"{PACKAGE}.{module}.{name}": getattr(_module(module), name) for name in more}
    return found


def results(names: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes that calls return, or members of these, and that have no name of theirs.

    A private class whose instances users get is shown at the module that defines it.
    """
    shown = set(names.values())
    found: dict[str, type] = {}
    queue = list(names.values())
    for target in queue:
        for kind in _returned_classes(target):
            name = f"{kind.__module__}.{kind.__qualname__}"
            if kind not in shown and name not in found:
                found[name] = kind
                queue.append(kind)
    return found


def _returned_classes(target: Any) -> Iterator[type]:
    """Yield the classes of ours that a function returns, or that the members of a class give."""
    if not isinstance(target, type):
        yield from _classes_in(_hints(target).get("return"))
        return
    for base in target.__mro__:
        if base.__module__.split(".")[0] != PACKAGE:
            continue
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "func", None)
            function = function or getattr(value, "__func__", value)
            if not name.startswith("_") and inspect.isfunction(function):
                yield from _classes_in(_hints(function).get("return"))
        for name, hint in _hints(base).items():
            if not name.startswith("_"):
                yield from _classes_in(hint)


@functools.cache
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


def _module(name: str) -> types.ModuleType:
    folder, _, last = name.partition(".")
    if folder in DOORS and last:  # a module that a door re-exports
        return getattr(_module(folder), last)  # type: ignore[no-any-return]
    return importlib.import_module(f"{PACKAGE}.{name}")


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
