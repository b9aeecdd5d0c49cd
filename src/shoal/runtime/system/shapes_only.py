"""Find out what a function would make, while no array is made.

`jax.eval_shape` traces a function, but `put` and its relatives place host values, and a program
that is traced has none to place. So for this one purpose they return arrays that have no values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_shapes_only: ContextVar[bool] = ContextVar("shoal_shapes_only", default=False)


def shapes_only() -> bool:
    """True inside `read_shapes`."""
    return _shapes_only.get()


def read_shapes(function: Callable[[], Any], read: Callable[[Any], T]) -> T:
    """Trace a function, and return what `read` returns of its result before the trace ends.

    In it `put`, `create`, `from_host_local` and `relayout` return arrays without values, and leave
    no trail. Host values are themselves.

    Raises:
      Whatever the function raises when it is traced.
    """
    import jax

    found: list[T] = []
    token = _shapes_only.set(True)
    try:
        jax.eval_shape(lambda: found.append(read(function())))
    finally:
        _shapes_only.reset(token)
    return found[0]
