"""Validate sizes and numbers that describe a topology."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.arguments import as_integer
from shoal.errors import WrongType

IntArray = NDArray[np.int64]
DIMS = "xyz"


def text_of(sizes: Iterable[int]) -> str:
    """Format sizes as `4x8`."""
    return "x".join(map(str, sizes))


def sizes_of(
    given: object, name: str, problems: list[str], *, rank: int | None = None
) -> tuple[int, ...]:
    """Return validated sizes; () if they are invalid."""
    values: tuple[object, ...] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, str):
        values = tuple(given)
    sizes = tuple(whole for value in values if (whole := as_integer(value)) is not None)
    if len(sizes) < len(values):
        wrong = next(value for value in values if as_integer(value) is None)
        problems.append(WrongType(f"{name}={given!r}: {wrong!r} is not a whole number"))
        return ()
    if not 1 <= len(sizes) <= len(DIMS) or min(sizes) < 1:
        problems.append(f"{name}={given!r} must be one to three sizes, each at least 1")
        return ()
    if rank is not None and len(sizes) != rank:
        problems.append(f"{name}={given!r} must have {rank} sizes, one for each dim")
        return ()
    return sizes


def origin_of(given: object, rank: int, problems: list[str]) -> tuple[int, ...]:
    """Return the validated coordinates of a first chip; () if all are 0, or they are invalid."""
    values = tuple(given) if isinstance(given, Sequence | np.ndarray) else (given,)
    numbers = [whole for value in values if (whole := as_integer(value)) is not None]
    if len(numbers) < len(values) or any(not -(1 << 63) <= v < 1 << 63 for v in numbers):
        problems.append(WrongType(f"origin={given!r} must be whole numbers"))
        return ()
    # chips of a flat network have a z, which is no dim of theirs
    if values and not rank <= len(values) <= len(DIMS):
        problems.append(f"origin={given!r} must have a number for each of the {rank} dims")
    return tuple(map(int, numbers)) if any(numbers) else ()


def frozen(held: bytes, rule: Callable[[], Any], grid: tuple[int, ...]) -> IntArray:
    array = np.frombuffer(held, np.int64).reshape(grid) if held else np.array(rule())
    array.flags.writeable = False
    return array


def stored(
    given: ArrayLike | None,
    rule: IntArray,
    name: str,
    problems: list[str],
    *,
    distinct: bool = False,
) -> bytes:
    """Return numbers as stored: empty if they follow the rule."""
    if given is None:
        return b""
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):  # rows of different lengths; not a number
        array = np.empty(0)
    if array.dtype.kind not in "iu" or array.size != rule.size:
        problems.append(f"{name} must be {rule.size} whole numbers, one for each device")
        return b""
    array = np.ascontiguousarray(array.reshape(rule.shape), np.int64)
    if (array < 0).any() or (distinct and np.unique(array).size != array.size):
        problems.append(f"{name} must not be negative{' and none may occur twice' * distinct}")
    return b"" if (array == rule).all() else array.tobytes()
