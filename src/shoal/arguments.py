"""Checks of the arguments of public functions; each problem names the argument and its value."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from shoal.errors import UsageTypeError, WrongType, nearest, raise_all

SCALARS = (bool, int, float, complex)
# Python types whose values are sent and saved unchanged; subclasses are not among them.
PLAIN_KINDS: Mapping[type, str] = {
    **{kind: kind.__name__ for kind in (*SCALARS, str, bytes)},
    type(None): "None",
}


@lru_cache(maxsize=256)
def no_fixed_bits(dtype: Any) -> str:
    """Return why arrays of a dtype of NumPy can be neither sent nor saved, or "".

    The one rule for both: elements have a fixed size, and the same bits mean the same on every
    machine. These are NumPy's own numbers, text and times of fixed width, and those of ml_dtypes,
    of which `checkpoint.tree.dtypes` lists how each is stored.
    """
    if dtype.names == ("float0",):
        return "which is the tangent of an integer, always 0; leave it out"
    if dtype.kind == "T":
        return "whose elements have any length; pass np.array(….tolist()) of it"
    if dtype.hasobject:
        return "whose elements are Python objects; pass .tolist() of it, or of text .astype('U')"
    if dtype.names or dtype.subdtype:
        return "which has fields; pass each field as a leaf of its own"
    library = dtype.type.__module__.partition(".")[0]
    if library == "ml_dtypes":
        return ""
    if dtype.kind == "V":
        return "which is raw memory and cannot be stored or sent; pass its bytes as uint8"
    if dtype.char in "gG":
        return "whose size depends on the machine; convert it to float64 or complex128"
    is_known = library == "numpy" and dtype.kind in "biufcSUmM"
    return "" if is_known else "which cannot be stored or sent; convert it to a dtype of NumPy"


def shown(value: object) -> str:
    """Return a value in a few words on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:79] + "…"


def not_flags(**values: object) -> list[str]:
    """Return a problem for each value that is neither True nor False.

    >>> not_flags(donate="yes", staged=True)
    ["donate='yes' must be True or False"]
    """
    return [
        WrongType(f"{name}={shown(value)} must be True or False")
        for name, value in values.items()
        if not isinstance(value, bool)
    ]


def not_texts(**values: object) -> list[str]:
    """Return a problem for each value that is neither text nor None.

    >>> not_texts(address=3, bind_address=None)
    ['address=3 must be a string']
    """
    return [
        WrongType(f"{name}={shown(value)} must be a string")
        for name, value in values.items()
        if value is not None and not isinstance(value, str)
    ]


def check_flags(caller: str, **values: object) -> None:
    """Raise a UsageTypeError for values that are neither True nor False."""
    raise_all(caller, not_flags(**values))


def as_integer(value: object) -> int | None:
    """Return an integer as a Python int; None for other values, bools among them.

    NumPy's scalars, and concrete arrays of NumPy and JAX without dims, are integers, too.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # of tracers, too
        return None


def as_number(value: object) -> int | float | None:
    """Return a real number as a Python int or float; None for other values, as `as_integer`.

    >>> as_number(3), as_number(0.5), as_number(True), as_number("3")
    (3, 0.5, None, None)
    """
    if isinstance(value, float):
        return float(value)  # of NumPy's float64, which is one
    whole = as_integer(value)
    if whole is not None:
        return whole
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if getattr(value, "ndim", None) != 0 or kind not in ("f", "V"):  # "V": ml_dtypes' own
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def seconds(name: str, value: object, problems: list[str], *, is_finite: bool = False) -> float:
    """Return a duration in seconds, which is positive; append what is wrong with it to `problems`.

    Args:
      is_finite: whether infinity is wrong, too.

    >>> problems = []
    >>> seconds("timeout_s", 2, problems), seconds("every_s", 0, problems)
    (2, nan)
    >>> problems
    ['every_s=0 must be a positive number of seconds']
    """
    number = as_number(value)
    if number is None:
        problems.append(WrongType(f"{name}={shown(value)} must be a number of seconds"))
    elif not number > 0:
        problems.append(f"{name}={shown(value)} must be a positive number of seconds")
    elif is_finite and number == math.inf:
        problems.append(f"{name}={shown(value)} must be a positive and finite number of seconds")
    else:
        return number
    return math.nan


def count(
    name: str,
    value: object,
    problems: list[str],
    *,
    least: int | None = None,
    wanted: str = "a whole number",
) -> int:
    """Return an integer as a Python int, 0 if it is wrong; append why to `problems`.

    >>> problems = []
    >>> count("batch", 8, problems, least=1), count("prefetch", 0, problems, least=1), problems
    (8, 0, ['prefetch=0 must be at least 1'])
    """
    number = as_integer(value)
    if number is None:
        problems.append(WrongType(f"{name}={shown(value)} must be {wanted}"))
    elif least is not None and number < least:
        problems.append(f"{name}={number} must be at least {least}")
    else:
        return number
    return 0


def integer(
    caller: str,
    name: str,
    value: object,
    *,
    least: int | None = None,
    wanted: str = "a whole number",
) -> int:
    """Return an integer as a Python int; a bool is not an integer.

    Raises:
      UsageError: not an integer, or less than `least`.
    """
    problems: list[str] = []
    number = count(name, value, problems, least=least, wanted=wanted)
    raise_all(caller, problems)
    return number


def check_kind(caller: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise a UsageTypeError unless `value` is a `kind`; `wanted` says what to pass instead.

    >>> check_kind("region", "x", int, "a Layout")
    Traceback (most recent call last):
    shoal.errors.UsageTypeError: region: 'x' must be a Layout
    """
    if not isinstance(value, kind):
        raise UsageTypeError(f"{caller}: {shown(value)} must be {wanted}")


def not_one_of(name: str, value: object, known: Collection[str]) -> list[str]:
    """Return a problem unless a value is one of some words; non-text values have the wrong type.

    >>> not_one_of("way", "colectives", ["collectives"])
    ["way='colectives' is not one of 'collectives'; did you mean 'collectives'?"]
    """
    if isinstance(value, str) and value in known:
        return []
    choices = ", ".join(map(repr, known))
    problem = f"{name}={shown(value)} is not one of {choices}"
    return [problem + nearest(value, known)] if isinstance(value, str) else [WrongType(problem)]
