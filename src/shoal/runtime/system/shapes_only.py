"""Whether a function is called for the shapes of its result alone.

`jax.eval_shape` traces a function, but `put` and its relatives place host values, and a program
that is traced has none to place. So for this one purpose they return arrays that have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_shapes_only: ContextVar[bool] = ContextVar("shoal_shapes_only", default=False)


def shapes_only() -> bool:
    """True inside `for_shapes_only`."""
    return _shapes_only.get()


@contextmanager
def for_shapes_only() -> Iterator[None]:
    """In the block `put`, `create`, `from_host_local` and `relayout` return arrays without values,
    and are not recorded; calls in which processes meet are refused. Host values are themselves."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)
