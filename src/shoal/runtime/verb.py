"""Public verbs: functions of (coordinator, …), called with the coordinator of this process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

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


@overload
def verb(function: Callable[Concatenate[Coordinator, P], T]) -> Verb[P, T]: ...
@overload
def verb(
    *, of: Callable[[], Coordinator]
) -> Callable[[Callable[Concatenate[Coordinator, P], T]], Verb[P, T]]: ...
def verb(function: Any = None, *, of: Any = None) -> Any:
    """Decorate a function of (coordinator, …) to be called without it; `on` takes it explicitly.

    Args:
      of: returns the coordinator of a call without one; None: that of this process.
    """
    if function is None:
        return functools.partial(_verb, of)
    return _verb(_coordinator, function)


def _coordinator() -> Coordinator:
    from shoal.runtime.process import coordinator

    return coordinator()


def _verb(
    of: Callable[[], Coordinator], function: Callable[Concatenate[Coordinator, P], T]
) -> Verb[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(of(), *args, **kwargs)

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
