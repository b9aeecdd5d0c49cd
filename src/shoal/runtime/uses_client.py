"""Public functions: functions of (client, …), called with the job client of this process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from shoal.errors import InitializeError
from shoal.runtime.client.interface import JobClient
from shoal.tracebacks import at_caller

P = ParamSpec("P")
T = TypeVar("T")


class ClientFunction(Protocol[P, T]):
    """A function whose job client is that of this process, unless given: `barrier.on(c, "x")`."""

    on: Callable[Concatenate[JobClient, P], T]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it with the job client of this process."""


@overload
def uses_client(function: Callable[Concatenate[JobClient, P], T]) -> ClientFunction[P, T]: ...
@overload
def uses_client(
    *, of: Callable[[], JobClient]
) -> Callable[[Callable[Concatenate[JobClient, P], T]], ClientFunction[P, T]]: ...
def uses_client(function: Any = None, *, of: Any = None) -> Any:
    """Decorate a function of (client, …) to be called without it; `on` takes it explicitly.

    Args:
      of: returns the job client of a call without one; None: that of this process.
    """
    if function is None:
        return functools.partial(_bound, of)
    return _bound(_client, function)


def _client() -> JobClient:
    from shoal.runtime.process import client

    return client()


def _bound(
    of: Callable[[], JobClient], function: Callable[Concatenate[JobClient, P], T]
) -> ClientFunction[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(of(), *args, **kwargs)

    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    public = cast(ClientFunction[P, T], call)
    public.on = at_caller(function)
    public.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return public


def client_here(*_: object, **__: object) -> JobClient | None:
    """Return the job client of this process, whatever the arguments; None: it has none."""
    from shoal.runtime.process import client

    try:
        return client()
    except InitializeError:
        return None
