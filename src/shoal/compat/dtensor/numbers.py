"""Convert Python numbers, and lists of them, to arrays of a dtype, exactly."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shoal.errors import UsageError, UsageTypeError

__all__ = ["array_from", "numbers_in"]


def array_from(operation: str, value: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """Return a host value as an array.

    Fractions may be rounded, as in a literal of that dtype; nothing else may change.

    Args:
      operation: the DTensor function that was called.
      dtype: default: JAX's for such numbers; for lists of arrays, that of the arrays.

    >>> array_from("pack", [1, 2]).dtype
    dtype('int32')

    Raises:
      UsageError: a number does not fit, or a value is not a number.
    """
    array = numbers_in(value)
    if array is None:
        raise UsageTypeError(
            f"dtensor.{operation}: {value!r} is not an array, number or list of numbers"
        )
    wanted = np.dtype(dtype or _own_dtype(value, array))
    if not _is_of_one_kind(array.dtype, wanted):
        raise UsageError(f"dtensor.{operation}: {array.dtype} is not {wanted}; cast it")
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
    _check_fit(operation, array, converted)
    return converted


def _own_dtype(value: Any, array: np.ndarray[Any, Any]) -> Any:
    is_plain = not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
    return jax.dtypes.canonicalize_dtype(array.dtype) if is_plain else array.dtype


def numbers_in(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a host value as an array; None unless it is a number or a regular list of them."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # lists of several sizes; an object that refuses
        return None
    kinds = (np.bool_, np.number)
    return array if any(jax.dtypes.issubdtype(array.dtype, kind) for kind in kinds) else None


def _check_fit(
    operation: str, given: np.ndarray[Any, Any], converted: np.ndarray[Any, Any]
) -> None:
    """Refuse a cast that changed a number; fractions may be rounded."""
    is_whole = given.dtype.kind in "iub" and converted.dtype.kind in "iu"
    kept = converted == given if is_whole else np.isfinite(converted) | ~np.isfinite(given)
    if not np.all(kept):
        worst = given[~kept].flat[0] if given.ndim else given
        detail = f"{worst} does not fit {converted.dtype}; pass dtype= or an array"
        raise UsageError(f"dtensor.{operation}: {detail}")


def _is_of_one_kind(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether a cast keeps or widens the kind of number: bool, integer, real, complex.

    >>> _is_of_one_kind(np.dtype(float), np.dtype("int8"))
    False
    """
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    ranks = [
        next((n for n, kind in enumerate(kinds) if jax.dtypes.issubdtype(dtype, kind)), None)
        for dtype in (given, wanted)
    ]
    return given == wanted or (None not in ranks and ranks[0] <= ranks[1])  # type: ignore[operator]
