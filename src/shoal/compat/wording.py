"""Errors of shoal under a predecessor's name, and as instances of its error types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import RestoreMismatchError, ShoalError

__all__ = ["errors_named"]


@contextmanager
def errors_named(name: str, *also: type[ShoalError], facade: str = "") -> Iterator[None]:
    """Prefix the errors of a block with the predecessor's name of the function.

    Args:
      facade: the prefix of its names; messages that have it are left unchanged.
      also: classes that are both an error of shoal and one that the predecessor raised. An error
        of shoal becomes the first of them that derives from its class.
    """
    try:
        yield
    except ShoalError as error:
        is_named = bool(facade) and str(error).startswith(facade)
        message = str(error) if is_named else f"{name}: {error}"
        if isinstance(error, RestoreMismatchError) and "only=" in message:
            message += "\n  only= is an option of shoal.restore, which reads the same checkpoints"
        kind = next((kind for kind in also if type(error) in kind.__mro__), None)
        if kind is None:
            error.args = (message, *error.args[1:])
            raise
        new = kind(message)
        vars(new).update(vars(error))
        raise new.with_traceback(error.__traceback__) from error.__cause__
