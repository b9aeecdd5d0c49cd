"""Errors of shoal that `except` clauses written for torch_xla also catch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from shoal.errors import NotCommittedError, UsageError, UsageTypeError
from shoal.tracebacks import at_caller

__all__ = [
    "NoMeaningHere",
    "NoSuchDim",
    "SpmdError",
    "SpmdTypeError",
    "UntrackedStep",
    "stands_for",
]

T = TypeVar("T", bound=Callable[..., Any])


class SpmdError(UsageError, AssertionError, RuntimeError):
    """An argument has a wrong value: torch_xla asserts, or raises a ValueError or a RuntimeError
    from C++. Nothing was changed."""


class SpmdTypeError(UsageTypeError, AssertionError, RuntimeError):
    """An argument has the wrong type. Nothing was changed."""


class NoSuchDim(SpmdError, IndexError):
    """A placement splits a dim that the array does not have."""


class NoMeaningHere(UsageError, NotImplementedError):
    """This torch_xla function has no counterpart on JAX; the message names the alternative."""


class UntrackedStep(NotCommittedError, AssertionError):
    """No checkpoint of that step is committed."""


def stands_for(ours: str) -> Callable[[T], T]:
    """Convert errors of a shoal function to those of the facade's function.

    Args:
      ours: the equivalent shoal function, such as "shoal.put".
    """

    def mark(function: T) -> T:
        @wraps(function)
        def facade(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except UsageError as error:
                if type(error) not in (UsageError, UsageTypeError):
                    raise
                raise _translated(error, function.__qualname__, ours) from error

        return at_caller(facade)  # type: ignore[return-value]

    return mark


def _translated(error: UsageError, name: str, ours: str) -> UsageError:
    kind = SpmdTypeError if isinstance(error, UsageTypeError) else SpmdError
    theirs = f"torch_xla {name.removesuffix('.__init__')}"
    reason = str(error).removeprefix(f"{theirs}: ").removeprefix(ours.rpartition(".")[2] + ": ")
    message = f"{theirs} ({ours}): {reason}"
    return kind(message, problems=error.problems)
