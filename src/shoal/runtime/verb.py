"""Public verbs: functions of (coordinator, …), called with the coordinator of this process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from shoal.errors import InitializeError
from shoal.runtime.client.interface import Coordinator
from shoal.tracebacks import at_caller

P = ParamSpec("P")
T = TypeVar("T")


class Verb(Protocol[P, T]):
    """A function whose coordinator is that of this process, unless given: `barrier.on(c, "x")`."""

    on: Callable[Concatenate[Coordinator, P], T]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it with the coordinator of this process."""


def verb(function: Callable[Concatenate[Coordinator, P], T]) -> Verb[P, T]:
    """Decorate a function of (coordinator, …) to be called without it; `on` takes it explicitly."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        from shoal.runtime.process import coordinator

        return function(coordinator(), *args, **kwargs)

    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    public = cast(Verb[P, T], call)
    public.on = at_caller(function)
    public.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return public


def coordinator_here(*_: object, **__: object) -> Coordinator | None:
    """Return the coordinator of this process, whatever the arguments; None: it has none."""
    from shoal.runtime.process import coordinator

    try:
        return coordinator()
    except InitializeError:
        return None
