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
    "compat", "planning", "planning.topology", "preemption", "preemption.clouds", "retention",
    "testing.ended", "types",
)  # fmt: skip
FOR_TESTS = ("client",)  # parameters: `Checkpoints(client=)` takes an internal object
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
        module = module_at(name)
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
        found |= {f"{PACKAGE}.{module}.{name}": getattr(module_at(module), name) for name in more}
    return found


def classes() -> dict[type, str]:
    """Return the public path of each class that has one: Member → `shoal.types.Member`.

    A door that takes a class of another door, such as `topology`, comes second.
    """
    found = {value: name for name, value in documented().items() if isinstance(value, type)}
    for name in sorted(DOORS, key=lambda name: (name.count("."), name)):
        module = module_at(name)
        for one in getattr(module, "__all__", ()):
            if isinstance(value := getattr(module, one), type):
                found.setdefault(value, f"{PACKAGE}.{name}.{one}")
    return found


def used(names: Mapping[str, Any]) -> dict[type, str]:
    """Return the classes of ours that calls take or return, members of these included.

    Each with the public name, or the class, that has it.
    """
    found: dict[type, str] = {}
    queue = list(names.items())
    for name, target in queue:
        for kind in _annotated(target):
            if kind not in found:
                found[kind] = name
                queue.append((f"{kind.__module__}.{kind.__qualname__}", kind))
    return found


def returned() -> dict[str, type]:
    """Return the public classes that users do not make: `shoal.types.Member` → the class."""
    known = documented()
    return {path: kind for kind, path in classes().items() if path not in known}


def _annotated(target: Any) -> Iterator[type]:
    """Yield the classes of ours in the types of a function, or of the members of a class."""
    if not isinstance(target, type):
        yield from _in_function(target)
        return
    for base in target.__mro__:
        if base.__module__.split(".")[0] != PACKAGE:
            continue
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "func", None)
            function = function or getattr(value, "__func__", value)
            is_made = name == "__init__" and colour_of(target)  # else calls make it
            if (is_made or not name.startswith("_")) and inspect.isfunction(function):
                yield from _in_function(function)
        for name, hint in typing.get_type_hints(base).items():
            if not name.startswith("_"):
                yield from _classes_in(hint)


def _in_function(function: Any) -> Iterator[type]:
    """Yield the classes of ours in the types of what a call takes and returns."""
    hints = _hints(function)
    for name in ["return", *inspect.signature(function).parameters]:
        if name not in FOR_TESTS:
            yield from _classes_in(hints.get(name))


@functools.cache
def _hints(function: Any) -> dict[str, Any]:
    module = vars(importlib.import_module(function.__module__))
    return typing.get_type_hints(inspect.unwrap(function), module)


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes of ours in a type: `tuple[Step, ...] | None` has one."""
    for kind in (hint, typing.get_origin(hint)):
        if isinstance(kind, type) and kind.__module__.split(".")[0] == PACKAGE:
            if not kind.__name__.startswith("_"):
                yield kind
    for argument in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from _classes_in(argument)


def module_at(name: str) -> types.ModuleType:
    folder, _, last = name.partition(".")
    if folder in DOORS and last:  # a module that a door re-exports
        return getattr(module_at(folder), last)  # type: ignore[no-any-return]
    return importlib.import_module(f"{PACKAGE}.{name}")


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
