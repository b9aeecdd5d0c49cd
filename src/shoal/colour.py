"""The colour of a public function: who must call it.

Four colours, each a line of its own in the docstring and a decorator that records it:

* ``Local.`` any process, any time.
* ``Traced.`` inside `jax.jit`; the same program everywhere.
* ``Logically collective: NAMES must be equal.`` all call it, nothing is sent.
* ``Collective over PROCESSES.`` all call it, in the same order; it may wait.

The tracebacks of its errors end at its caller (see `tracebacks`).

The colour is fixed per function, whatever its arguments, at one process too. The words follow
PETSc's manual pages (*Developer's style guide*, "Manual Page Format").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from shoal.tracebacks import at_caller, class_at_caller

__all__ = ["collective", "colour_of", "local", "logically_collective", "traced"]

T = TypeVar("T", bound=Callable[..., Any])


def _record(colour: str) -> Callable[[T], T]:
    def mark(target: T) -> T:
        if isinstance(target, type):
            class_at_caller(target)
        else:
            target = cast(T, at_caller(target))
        target.__colour__ = colour  # type: ignore[attr-defined]
        return target

    return mark


def local(target: T) -> T:
    """Mark a function that any process may call, at any time."""
    return _record("Local.")(target)


def traced(target: T) -> T:
    """Mark a function that is called inside `jit`, in the same program everywhere."""
    return _record("Traced.")(target)


def logically_collective(names: str) -> Callable[[T], T]:
    """Mark a function that all processes call with equal `names`; nothing is sent."""
    return _record(f"Logically collective: {names} must be equal.")


def collective(processes: str = "all processes") -> Callable[[T], T]:
    """Mark a function that all of `processes` call in the same order; it may wait."""
    return _record(f"Collective over {processes}.")


def colour_of(target: object) -> str:
    """Return the recorded colour line, or an empty string."""
    return str(getattr(target, "__colour__", ""))
