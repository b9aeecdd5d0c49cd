"""What arguments of public functions may be; each offence names the argument and its value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all

SCALARS = (bool, int, float, complex)
# Values of Python that travel and are saved as they are, by their type; not those of a subclass.
PLAIN_KINDS: Mapping[type, str] = {
    **{kind: kind.__name__ for kind in (*SCALARS, str, bytes)},
    type(None): "None",
}


def shown(value: object) -> str:
    """Return a value in a few words on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:79] + "…"


def not_flags(**values: object) -> list[str]:
    """Return an offence for each value that is neither True nor False.

    >>> not_flags(donate="yes", staged=True)
    ["donate='yes' must be True or False"]
    """
    return [
        WrongType(f"{name}={shown(value)} must be True or False")
        for name, value in values.items()
        if not isinstance(value, bool)
    ]


def not_texts(**values: object) -> list[str]:
    """Return an offence for each value that is neither text nor None.

    >>> not_texts(address=3, bind_address=None)
    ['address=3 must be text']
    """
    return [
        WrongType(f"{name}={shown(value)} must be text")
        for name, value in values.items()
        if value is not None and not isinstance(value, str)
    ]


def check_flags(asked: str, **values: object) -> None:
    """Raise a UsageTypeError for those that are neither True nor False."""
    raise_all(asked, not_flags(**values))


def as_integer(value: object) -> int | None:
    """Return a whole number as Python's own; None: it is none, as True is not."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integer(
    asked: str,
    name: str,
    value: object,
    *,
    least: int | None = None,
    wanted: str = "a whole number",
) -> int:
    """Return a whole number; True is none.

    Raises:
      UsageError: it is none, or less than `least`.
    """
    number = as_integer(value)
    if number is None:
        raise UsageTypeError(f"{asked}: {name}={shown(value)} must be {wanted}")
    if least is not None and number < least:
        raise UsageError(f"{asked}: {name}={number} must be at least {least}")
    return number


def check_kind(asked: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise a UsageTypeError for what is of no such type; `wanted` says what is, or how to get it.

    >>> check_kind("region", "x", int, "a Layout")
    Traceback (most recent call last):
    shoal.errors.UsageTypeError: region: 'x' must be a Layout
    """
    if not isinstance(value, kind):
        raise UsageTypeError(f"{asked}: {shown(value)} must be {wanted}")


def not_one_of(name: str, value: object, known: Collection[str]) -> list[str]:
    """Return an offence if a value is none of some words; whatever is no text is of a wrong type.

    >>> not_one_of("way", "colectives", ["collectives"])
    ["way='colectives' is none of 'collectives'; did you mean 'collectives'?"]
    """
    if isinstance(value, str) and value in known:
        return []
    words = ", ".join(map(repr, known))
    told = f"{name}={shown(value)} is none of {words}"
    return [told + nearest(value, known)] if isinstance(value, str) else [WrongType(told)]
