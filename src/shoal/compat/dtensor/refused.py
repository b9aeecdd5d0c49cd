"""Errors of shoal that are also of the types raised by DTensor, under its names."""

from __future__ import annotations

from contextlib import AbstractContextManager

from shoal.arrays.host.upload import is_tracing
from shoal.compat.wording import errors_named
from shoal.errors import InitializeError, UsageError
from shoal.runtime.jax_service import jax_runtime

__all__ = ["EagerOnly", "NotPossible", "StartError", "must_be_eager", "said_of"]


class NotPossible(UsageError, NotImplementedError):
    """A name of DTensor's that can have no meaning here; the message says what to do."""


class EagerOnly(UsageError, RuntimeError):
    """A function was called inside `jit`, which works on arrays that have values."""


class StartError(InitializeError, ValueError):
    """The devices were initialised twice, or too late, or not at all."""


def said_of(name: str) -> AbstractContextManager[None]:
    """Let an error of shoal's in the block say first which name of DTensor's was called."""
    return errors_named(f"dtensor.{name}", facade="dtensor.")


def must_be_eager(name: str, ours: str) -> None:
    """Refuse a call inside `jit`, as DTensor does with a RuntimeError.

    Raises:
      EagerOnly: a function is being traced.
    """
    # To ask JAX would start its devices; before they are, no program can be traced for them.
    if jax_runtime.backend_exists() and is_tracing():
        raise EagerOnly(f"dtensor.{name} must be called eagerly, outside jit; {ours}")
