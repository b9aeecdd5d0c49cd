"""Restore a saved number, such as a step, as an array. Without JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.checkpoint.format.records import LeafRecord
from shoal.checkpoint.planning.casting import as_array, policy_for
from shoal.checkpoint.tree.plain_values import decode_value

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
    needed = policy_for(value, dtype) if is_number and dtype is not None else ""
    if not needed:
        is_large = type(value) is int and dtype is not None and dtype.kind not in "SUOmM"
        return "wrong_dtype", f"{detail}, which is not an array" + (
            f"; it does not fit {dtype}" if is_large else ""
        )
    if shape:
        return "wrong_shape", f"{detail}, of shape (), not {shape}"
    if _POLICIES.index(policy) < _POLICIES.index(needed):
        return "wrong_dtype", f"{detail}, which is not an array; dtype={needed!r} makes one of it"
    return "", ""


def array_of(record: LeafRecord, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a number as the wanted array."""
    return as_array(decode_value(record.kind, record.value), dtype)
