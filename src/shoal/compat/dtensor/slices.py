"""The `shape_and_slices` of TensorFlow's SaveV2: which part of a whole a tensor is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.errors import UsageError

__all__ = ["Part", "part_of", "whole_of"]

_TEXT = re.compile(r"(?:\d{1,18} )+(?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*", re.ASCII)


class Part(NamedTuple):
    """Where a tensor lies in a whole."""

    shape: tuple[int, ...]  # of the whole
    begins: tuple[int, ...]
    sizes: tuple[int, ...]


def part_of(text: str, shape: Sequence[int]) -> Part:
    """Read a slice such as "8 4 0,2:-": rows 0 and 1 of 8x4; "" is a tensor of `shape`, whole.

    >>> part_of("8 4 0,2:-", (2, 4))
    Part(shape=(8, 4), begins=(0, 0), sizes=(2, 4))

    Raises:
      UsageError: it is none, or not one that the tensor can be.
    """
    shape = tuple(shape)
    if text == "":
        return Part(shape, (0,) * len(shape), shape)
    *sizes, spec = text.split(" ") if isinstance(text, str) and _TEXT.fullmatch(text) else ["", ""]
    whole, bounds = tuple(int(size) for size in sizes if size), spec.split(":")
    if not whole or len(whole) != len(bounds):
        raise UsageError(
            f"dtensor.sharded_save: {text!r} is no shape and slice, such as '8 4 0,2:-'; '' is the "
            "whole tensor"
        )
    pairs = [(0, size) if bound == "-" else tuple(map(int, bound.split(",")))
             for bound, size in zip(bounds, whole, strict=True)]  # fmt: skip
    part = Part(whole, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    beyond = any(b + s > w for b, s, w in zip(part.begins, part.sizes, whole, strict=True))
    if part.sizes != shape or beyond:
        raise UsageError(
            f"dtensor.sharded_save: {text!r} is no slice that a tensor of {list(shape)} can be"
        )
    return part


def whole_of(name: str, parts: Sequence[Part], values: Sequence[Any]) -> Any:
    """Return the array that parts make up, which may not overlap nor leave anything out.

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

    def joined(*pieces: jax.Array) -> jax.Array:
        whole = jnp.zeros(parts[0].shape, pieces[0].dtype)
        for part, piece in zip(parts, pieces, strict=True):
            whole = jax.lax.dynamic_update_slice(whole, piece, part.begins)
        return whole

    return jax.jit(joined)(*values)


def _meet(parts: Sequence[Part]) -> bool:
    """Do two parts share an item?"""
    return any(
        all(
            b < d + t and d < b + s
            for b, s, d, t in zip(one.begins, one.sizes, other.begins, other.sizes, strict=True)
        )
        for place, one in enumerate(parts)
        for other in parts[:place]
    )
