"""The `shape_and_slices` of TensorFlow's SaveV2: which slice of an array a tensor holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import UsageError

__all__ = ["SliceOf", "part_of", "whole_of"]

_TEXT = re.compile(r"(?:\d{1,18} )+(?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*", re.ASCII)


class SliceOf(NamedTuple):
    """The position of a tensor in the whole array."""

    shape: tuple[int, ...]  # of the whole
    begins: tuple[int, ...]
    sizes: tuple[int, ...]


def part_of(text: str, shape: Sequence[int]) -> SliceOf:
    """Read a slice such as "8 4 0,2:-": rows 0 and 1 of 8x4; "" is a whole tensor of `shape`.

    >>> part_of("8 4 0,2:-", (2, 4))
    SliceOf(shape=(8, 4), begins=(0, 0), sizes=(2, 4))

    Raises:
      UsageError: it is not a slice, or does not fit the tensor.
    """
    shape = tuple(shape)
    if text == "":
        return SliceOf(shape, (0,) * len(shape), shape)
    if not isinstance(text, str) or not _TEXT.fullmatch(text):
        raise _bad(text, "not a shape and slice, such as '8 4 0,2:-'; '' is the whole tensor")
    *sizes, spec = text.split(" ")
    whole, bounds = tuple(map(int, sizes)), spec.split(":")
    if len(whole) != len(bounds):
        raise _bad(text, "not a shape and a slice with as many dims, such as '8 4 0,2:-'")
    pairs = [_bounds(bound, size) for bound, size in zip(bounds, whole, strict=True)]
    part = SliceOf(whole, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    if part.sizes != shape or any(b + s > w for (b, s), w in zip(pairs, whole, strict=True)):
        raise _bad(text, f"not a slice of the shape {list(shape)}")
    return part


def _bounds(text: str, size: int) -> tuple[int, int]:
    """Return where a slice begins, and its size."""
    begin, _, length = (f"0,{size}" if text == "-" else text).partition(",")
    return int(begin), int(length)


def _bad(text: object, what: str) -> UsageError:
    return UsageError(f"dtensor.sharded_save: {text!r} is {what}")


def whole_of(name: str, parts: Sequence[SliceOf], values: Sequence[Any]) -> Any:
    """Return the array that parts make up; they may neither overlap nor leave gaps.

    Raises:
      UsageError: they do not make up one array.
    """
    shapes, dtypes = {part.shape for part in parts}, {value.dtype for value in values}
    covered = sum(math.prod(part.sizes) for part in parts)
    if len(shapes) > 1 or len(dtypes) > 1 or covered != math.prod(parts[0].shape) or _meet(parts):
        raise UsageError(
            f"dtensor.sharded_save: the {len(parts)} slices of {name!r} do not make up one array: "
            f"{[(part.begins, part.sizes) for part in parts[:8]]} of {sorted(shapes)}"
        )
    if len(parts) == 1:
        return values[0]
    if any(isinstance(value, jax.Array) for value in values):
        return jax.jit(partial(_joined, tuple(parts)))(*values)
    return _joined_here(parts, values)


def _joined_here(parts: Sequence[SliceOf], pieces: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Join host values, whose dtype JAX may not support."""
    whole = np.empty(parts[0].shape, pieces[0].dtype)
    for part, piece in zip(parts, pieces, strict=True):
        ends = zip(part.begins, part.sizes, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in ends)] = piece
    return whole


def _joined(parts: Sequence[SliceOf], *pieces: jax.Array) -> jax.Array:
    whole = jnp.zeros(parts[0].shape, pieces[0].dtype)
    for part, piece in zip(parts, pieces, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, part.begins)
    return whole


def _meet(parts: Sequence[SliceOf]) -> bool:
    """Do two parts overlap?"""
    return any(
        all(
            b < d + t and d < b + s
            for b, s, d, t in zip(one.begins, one.sizes, other.begins, other.sizes, strict=True)
        )
        for place, one in enumerate(parts)
        for other in parts[:place]
    )
