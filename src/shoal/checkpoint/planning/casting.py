"""Which dtype casts are lossless; a saved number as an array.

`numpy.can_cast(…, "safe")` is too permissive: it allows int64 to float64, and int8 to
float8_e4m3fn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from shoal.checkpoint.format.records import LeafRecord
from shoal.checkpoint.tree.plain_values import decode_value

_PARTS: Mapping[str, str] = {
    "complex64": "float32",
    "complex128": "float64",
    "complex32": "float16",
    "bcomplex32": "bfloat16",
}


@lru_cache(maxsize=1024)
def is_lossless(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Does every value of `source` survive a cast to `target` and back? NaN payloads may change.

    >>> is_lossless(np.dtype("int32"), np.dtype("float64"))
    True
    >>> is_lossless(np.dtype("int64"), np.dtype("float64"))
    False
    """
    if source == target:
        return True
    if not np.can_cast(source, target, "unsafe"):
        return False
    if source.kind in "SUmM" or target.kind in "SUmM":  # finer time units have a shorter range
        return (
            source.kind == target.kind
            and source.kind in "SU"
            and np.can_cast(source, target, "safe")
        )
    if source.name in _PARTS:
        return target.name in _PARTS and is_lossless(_part(source), _part(target))
    if target.name in _PARTS:
        return is_lossless(source, _part(target))
    integers, others = _integers(source), _integers(target)
    if integers is not None and others is not None:
        return bool(integers.min >= others.min and integers.max <= others.max)
    if source.itemsize <= 2:
        return _survives_round_trip(source, target)
    if integers is not None:
        return _holds(integers, target)
    return np.can_cast(source, target, "safe")  # floats to floats


def _part(dtype: np.dtype[Any]) -> np.dtype[Any]:
    name = _PARTS[dtype.name]
    return np.dtype(getattr(ml_dtypes, name, name))


def _survives_round_trip(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Try all values; there are at most 65,536."""
    bits = np.arange(1 << _bits(source), dtype=f"u{source.itemsize}")
    values = bits.view(source)
    with np.errstate(all="ignore"):
        there = values.astype(target)
        back = there.astype(source)
        both_nan = (back != back) & (values != values)
        # True would be -1 in an int1, and comes back as True.
        is_equal = there.astype(np.float64) == values.astype(np.float64)
    return bool((((back.view(bits.dtype) == bits) & is_equal) | both_nan).all())


def _bits(dtype: np.dtype[Any]) -> int:
    if dtype == np.bool_:
        return 1
    integers = _integers(dtype)
    return int(ml_dtypes.finfo(dtype).bits if integers is None else integers.bits)


def _integers(dtype: np.dtype[Any]) -> Any:
    """Return the range of an integer dtype; None for others."""
    try:
        return ml_dtypes.iinfo(dtype)
    except ValueError:
        return None


def _holds(integers: Any, other: np.dtype[Any]) -> bool:
    """Can a float represent every integer of a dtype?"""
    if other == np.bool_:
        return False
    floats = ml_dtypes.finfo(other)
    bits = int(integers.max).bit_length()
    return bool(floats.nmant + 1 >= bits and float(floats.max) >= float(integers.max))


def policy_for(value: Any, dtype: np.dtype[Any]) -> str:
    """Return the `dtype=` policy that makes a number an array: "safe", "any", or none ("").

    Python ints have no dtype: they are safe where the value fits exactly.

    >>> policy_for(7, np.dtype("int32")), policy_for(300, np.dtype("int8"))
    ('safe', '')
    >>> policy_for(0.5, np.dtype("float64")), policy_for(0.5, np.dtype("float32"))
    ('safe', 'any')
    """
    if dtype.kind in "SUOmM" or not isinstance(value, int | float | complex | np.generic):
        return ""
    if type(value) is not int:
        own = np.asarray(value).dtype
        if own.kind in "SUOmM" or not np.can_cast(own, dtype, "unsafe"):
            return ""
        return "safe" if is_lossless(own, dtype) else "any"
    if dtype == np.bool_:
        return "any"
    integers = _integers(dtype)
    if integers is not None:
        return "safe" if integers.min <= value <= integers.max else ""
    try:
        float(value)
    except OverflowError:
        return ""
    with np.errstate(all="ignore"):
        held = complex(as_array(value, dtype).astype(np.complex128)).real
    is_exact = math.isfinite(held) and int(held) == value
    return "safe" if is_exact else "any"


def as_array(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a number as a 0-d array, where `policy_for` allows it."""
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        value = bool(value) if dtype == np.bool_ else float(value)
    return np.asarray(value).astype(dtype)


# ---- Restore a saved number, such as a step, as an array. Without JAX.


_POLICIES = ("exact", "safe", "any")  # each allows what the earlier ones allow


def wrong_number(
    record: LeafRecord, shape: tuple[int, ...], dtype: np.dtype[Any] | None, policy: str
) -> tuple[str, str]:
    """Return why a non-array leaf cannot become an array: kind of mismatch, and message.

    Args:
      dtype: of the wanted array; None: PRNG keys are wanted.
      policy: permitted casts, as `restore(dtype=…)`.
    """
    detail = f"was saved as {record.kind}"
    is_number = not record.has_data and record.kind not in ("str", "bytes", "none")
    value = decode_value(record.kind, record.value) if is_number else None
    needed = ""
    if is_number and dtype is not None:
        needed = policy_for(value, dtype)
    if not needed:
        is_large = type(value) is int and dtype is not None and dtype.kind not in "SUOmM"
        unfit = f"; it does not fit {dtype}" if is_large else ""
        return "wrong_dtype", f"{detail}, which is not an array{unfit}"
    if shape:
        return "wrong_shape", f"{detail}, of shape (), not {shape}"
    if _POLICIES.index(policy) < _POLICIES.index(needed):
        return "wrong_dtype", f"{detail}, which is not an array; dtype={needed!r} makes one of it"
    return "", ""


def array_of(record: LeafRecord, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a number as the wanted array."""
    return as_array(decode_value(record.kind, record.value), dtype)
