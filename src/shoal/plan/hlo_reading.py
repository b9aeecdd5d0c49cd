"""Parse the HLO text of a sharding into a layout."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

__all__ = ["layout_of_text"]

_NUMBER = "[0-9]{1,18}"  # int64 holds it
_NUMBERS = f"{_NUMBER}(?:,{_NUMBER})*"
_TILED = re.compile(
    rf"\{{devices=\[(?P<tiles>{_NUMBERS})\]"
    rf"(?:(?P<listed>{_NUMBERS})|<=\[(?P<iota>{_NUMBERS})\](?:T\((?P<turn>{_NUMBERS})\))?)"
    r"(?P<whole> last_tile_dim_replicate| last_tile_dims=\{replicated\})?\}"
)
_MOST_DEVICES = 1 << 24
_MOST_DIMS = 64  # of an array of NumPy


@local
def layout_of_text(text: str) -> Layout:
    """Return a layout described by HLO text.

    Local.

    The text names no axes: there is one for each dim, "dim0", "dim1", …, and "replica" for the
    devices that hold the same data. `hlo_text` reproduces the text.

    Args:
      text: as `hlo_text` writes it in either version, or XLA prints it. Devices without tiles,
        `{replicated}` and `{maximal device=3}`, make a layout of no dims.

    Raises:
      UsageError: it is not such a text, or its numbers do not fit.

    Example:
      >>> layout_of_text("{devices=[2,1,2]<=[4] last_tile_dim_replicate}")
      Layout(dim0, - @ dim0=2 dim1=1 replica=2)
    """
    if not isinstance(text, str):
        raise UsageTypeError(f"layout_of_text: {text!r} must be a string")
    single = re.fullmatch(rf"\{{maximal device=({_NUMBER})\}}", text)
    if single:
        return Layout(Mesh({}, device_ids=[int(single[1])]))
    if text == "{replicated}":
        return Layout(Mesh({}))
    match = _TILED.fullmatch(text)
    if match is None:
        raise UsageError(
            f"layout_of_text: {text[:200]!r} is not a sharding of dims: "
            "{devices=[2,2]0,1,2,3}, {devices=[2,2]<=[4]}, {maximal device=0} or {replicated}, "
            "with numbers of at most 18 digits"
        )
    tiles = _numbers(match["tiles"])
    dims = tiles[:-1] if match["whole"] else tiles
    names = [f"dim{dim}" for dim in range(len(dims))]
    mesh = _mesh(text, [*names, *(["replica"] if match["whole"] else [])], tiles, match)
    return Layout(
        mesh, *(name if size > 1 else None for name, size in zip(names, dims, strict=True))
    )


def _mesh(text: str, names: list[str], sizes: list[int], match: re.Match[str]) -> Mesh:
    ids = _ids(match)
    if ids is None or ids.size != math.prod(sizes):
        raise UsageError(f"layout_of_text: {text[:200]!r}: the numbers of devices do not fit")
    return Mesh(list(zip(names, sizes, strict=True)), device_ids=ids)


def _ids(match: re.Match[str]) -> NDArray[np.int64] | None:
    """Return the devices in tile order, or None if the numbers are invalid."""
    if match["listed"]:
        return np.array(_numbers(match["listed"]), dtype=np.int64)
    shape = _numbers(match["iota"])
    turn = _numbers(match["turn"]) if match["turn"] else list(range(len(shape)))
    if len(shape) > _MOST_DIMS or sorted(turn) != list(range(len(shape))):
        return None
    if not 0 < math.prod(shape) <= _MOST_DEVICES:
        return None
    return np.arange(math.prod(shape)).reshape(shape).transpose(turn).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
