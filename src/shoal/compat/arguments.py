"""What arguments of a predecessor's functions must be, checked at a facade's entrance.

The predecessors let Python's own errors out of the middle of a call, and so would shoal: here the
argument is named, and what to pass.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, TypeVar, cast

import numpy as np

from shoal.arguments import as_integer, as_number, shown
from shoal.errors import WrongType, raise_all

T = TypeVar("T", bound=Callable[..., Any])
Kind = Callable[[Any], str]
"""Maps a value to what it must be, in words; to an empty string if it is."""


def takes(facade: str, **kinds: Kind) -> Callable[[T], T]:
    """Decorate a function whose arguments must be of these kinds; those not passed are not checked.

    Args:
      facade: the prefix of its name in messages, such as "dtensor.".
      kinds: the kind of each argument, by name.

    Raises:
      UsageTypeError: by the decorated function; names all that are wrong.
    """

    def decorate(function: T) -> T:
        signature = inspect.signature(function)
        name = facade + function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            problems: list[str] = [
                WrongType(f"{argument}={shown(given[argument])} must be {wanted}")
                for argument, kind in kinds.items()
                if argument in given and (wanted := kind(given[argument]))
            ]
            raise_all(name, problems)
            return function(*args, **kwargs)

        return cast(T, checked)

    return decorate


def or_none(kind: Kind) -> Kind:
    """Return the kind that None is of, too."""
    return lambda value: "" if value is None else kind(value)


def a(cls: type, message: str) -> Kind:
    """Return the kind of a class's instances."""
    return lambda value: "" if isinstance(value, cls) else message


def text(value: Any) -> str:
    """A string."""
    return "" if isinstance(value, str) else "a string"


def flag(value: Any) -> str:
    """True or False."""
    return "" if isinstance(value, bool | np.bool_) else "True or False"


def whole(value: Any) -> str:
    """An integer."""
    return "" if as_integer(value) is not None else "an integer"


def number(value: Any) -> str:
    """A real number."""
    return "" if as_number(value) is not None else "a number"


def row(value: Any) -> str:
    """A list or tuple of anything, or an array of one dim or more."""
    is_row = isinstance(value, Collection) and not isinstance(value, str | bytes | Set | Mapping)
    if is_row and getattr(value, "ndim", 1) != 0:
        return ""
    return "a list or tuple"


def wholes(value: Any) -> str:
    """A list or tuple of integers."""
    is_right = not row(value) and all(as_integer(entry) is not None for entry in value)
    return "" if is_right else "a list or tuple of integers"


def function(value: Any) -> str:
    """Something to call."""
    return "" if callable(value) else "a function"


def path_like(value: Any) -> str:
    """A path."""
    return "" if isinstance(value, str | os.PathLike) else "a string or a pathlib.Path"


def numpy_dtype(value: Any) -> str:
    """What NumPy makes a dtype of; it parses strings and lists, too."""
    try:
        np.dtype(value)
    except (TypeError, ValueError, SyntaxError):
        return "a dtype"
    return ""
