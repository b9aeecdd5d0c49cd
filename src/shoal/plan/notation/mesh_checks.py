"""Checks of a mesh's arguments. Each appends to one list, so that all offenders are named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import as_integer
from shoal.errors import WrongType, nearest, with_article

IntArray = NDArray[np.int64]

_MOST_AXES = 64  # the dims of a NumPy array
_MOST_DEVICES = 2**63 - 1  # the positions that 64 bits count


def check_axes(axes: object, problems: list[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and sizes."""
    pairs: list[tuple[Any, Any]] = (
        list(axes.items()) if isinstance(axes, Mapping) else _pairs(axes, problems)
    )
    if len(pairs) > _MOST_AXES:
        problems.append(f"{len(pairs)} axes are more than a mesh can have: {_MOST_AXES}")
        return (), ()
    names: list[str] = []
    sizes: list[int] = []
    for given, size in pairs:
        name = check_name(given, "axis name", problems)
        if name and name in names:
            problems.append(f"axis {name!r} is repeated")
        whole = as_integer(size)
        if whole is None:
            problems.append(WrongType(f"axis {given!r}: size {size!r} must be an integer"))
        elif whole < 1:
            problems.append(f"axis {given!r}: size {size} must be at least 1")
        else:
            sizes.append(whole)
        names.append(name)
    if math.prod(sizes) > _MOST_DEVICES:
        problems.append(f"{'x'.join(map(str, sizes))} positions do not fit in 64 bits")
    return tuple(names), tuple(sizes)


def check_name(name: object, what: str, problems: list[str], *, may_be_empty: bool = False) -> str:
    """Return a name as a plain `str`, whatever subclass was given; "" if it is invalid."""
    if not isinstance(name, str):
        problems.append(WrongType(f"{what} {name!r} must be a string"))
        return ""
    if not name and not may_be_empty:
        problems.append(f"{with_article(what)} is empty")
    if any("\ud800" <= char <= "\udfff" for char in name):
        problems.append(f"{what} {name!r} has half of a surrogate pair, which no text can hold")
        return ""
    return str.__str__(name)


def _pairs(axes: object, problems: list[str]) -> list[tuple[Any, Any]]:
    try:
        return [(name, size) for name, size in axes]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        problems.append(
            WrongType(f"axes={_shown(axes)} must be a dict of name: size, or pairs of them")
        )
        return []


def check_ids(ids: object, shape: tuple[int, ...] | None, problems: list[str]) -> IntArray | None:
    """Return the ids in the mesh's shape, or None if they are 0..n-1."""
    if ids is None:
        return None
    array = _fit(_integers(ids, "device_ids", problems), shape, "device ids", problems)
    if array is None:
        return None
    flat = array.ravel()
    if flat.size and flat[0] == 0 and (flat == np.arange(flat.size)).all():
        return None
    negative = flat[flat < 0]
    if negative.size:
        problems.append(f"device ids are negative: {_some(negative)}")
    distinct, counts = np.unique(flat, return_counts=True)
    if (counts > 1).any():
        problems.append(f"device ids are repeated: {_some(distinct[counts > 1])}")
    return array


def check_processes(
    processes: object, shape: tuple[int, ...] | None, problems: list[str]
) -> IntArray | int:
    """Return the owner at each position, or one number for all."""
    if processes is None:
        return 0
    array = _integers(processes, "processes", problems)
    if array is not None:
        negative = array[array < 0]
        if negative.size:
            problems.append(f"processes are negative: {_some(np.unique(negative))}")
        if array.ndim == 0:
            return int(array)
    array = _fit(array, shape, "processes", problems)
    return 0 if array is None else array


def check_axis_types(types: object, names: tuple[str, ...], problems: list[str]) -> frozenset[str]:
    """Return the names of the explicit axes."""
    by_name = dict(types) if isinstance(types, Mapping) else dict.fromkeys(names, types)
    for name in by_name:
        if name not in names:
            hint = nearest(name, names)
            problems.append(f"axis_types: no axis {name!r} (axes: {', '.join(names)}){hint}")
    shown = {"axis_types": types}
    if isinstance(types, Mapping):
        shown = {f"axis_types[{name!r}]": value for name, value in types.items()}
    for place, value in shown.items():
        if not isinstance(value, str) or value not in ("auto", "explicit"):
            problems.append(f"{place}={value!r} is neither 'auto' nor 'explicit'")
    explicit = [n for n, value in by_name.items() if isinstance(value, str) and value == "explicit"]
    return frozenset(name for name in names if name in explicit)


def _integers(values: object, what: str, problems: list[str]) -> IntArray | None:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal length
        array = np.empty(1, dtype=object)
    if array.size and array.dtype.kind not in "iu":
        problems.append(WrongType(f"{what} must be a sequence of integers, not {_shown(values)}"))
        return None
    if array.size and array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        problems.append(
            f"{what} must be a sequence of 64-bit signed integers, not {_shown(values)}"
        )
        return None
    return np.array(array, dtype=np.int64)  # a private copy


def _fit(
    array: IntArray | None, shape: tuple[int, ...] | None, what: str, problems: list[str]
) -> IntArray | None:
    """Return the array in the mesh's shape; None if it does not fit."""
    if array is None or shape is None:  # already reported
        return None
    size = math.prod(shape)
    if array.size == size and array.shape in (shape, (size,)):
        return array.reshape(shape)
    product = "x".join(map(str, shape)) or "1"
    given = f"{array.size}" if array.ndim < 2 else "x".join(map(str, array.shape))
    problems.append(f"{given} {what} for {product} = {size} positions")
    return None


def _some(values: IntArray) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return shown + (f", … ({values.size} in all)" if values.size > 8 else "")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
