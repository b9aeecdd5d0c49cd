"""`shoal ckpt diff`: what differs between two checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer

from shoal.checkpoint.dtypes import dtype_of
from shoal.checkpoint.format import LeafRecord
from shoal.checkpoint.reader import Checkpoint, Want, open_folder, read
from shoal.cli.ckpt_paths import look_at, one_of
from shoal.cli.ckpt_show import chosen_leaves
from shoal.cli.ckpt_tables import safe

__all__ = ["diff"]

_BAND_BYTES = 64 << 20  # of one leaf in memory at a time, of each of the two
_SHOWN = 50

Array = np.ndarray[Any, Any]


def diff(
    first: Annotated[str, typer.Argument(help="A checkpoint, or a history: its newest step.")],
    second: Annotated[str, typer.Argument(help="Another.")],
    leaf: Annotated[
        str, typer.Option(metavar="GLOB", help="Only these leaves: 'params/**', 'opt/*/mu'.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Compare two checkpoints: leaves that one lacks, shapes, dtypes, and every value, bit by bit.

    Where and how they lie (layouts, processes, files) makes no difference.

    \b
    Examples:
      shoal ckpt diff run/step_000000000010 run/step_000000000020
      shoal ckpt diff before/ after/ --leaf 'params/**'

    \b
    Exit code:
      0   they are equal
      1   they differ; or nothing is committed at one of them
    """
    pair = [open_folder(one_of(look_at(path)).folder) for path in (first, second)]
    found = list(_differences(pair[0], pair[1], leaf))
    if as_json:
        print(json.dumps({"equal": not found, "differences": found}))
    else:
        for one in found[:_SHOWN]:
            print(safe(f"{one['leaf']}: {one['words']}"))
        if len(found) > _SHOWN:
            print(f"and {len(found) - _SHOWN} leaves more")
        print(_summary(pair[0], found))
    if found:
        raise typer.Exit(1)


def _summary(checkpoint: Checkpoint, found: list[dict[str, Any]]) -> str:
    if not found:
        return f"equal: {len(checkpoint.manifest.leaves)} leaves, bit by bit"
    return f"{len(found)} leaves differ"


def _differences(first: Checkpoint, second: Checkpoint, leaf: str) -> Iterator[dict[str, Any]]:
    both = (first, second)
    numbers = [
        {one.name: n for n, one in enumerate(checkpoint.manifest.leaves)} for checkpoint in both
    ]
    wanted: set[str] = set()
    for checkpoint in both:
        names = [one.name for one in checkpoint.manifest.leaves]
        wanted |= {names[n] for n in chosen_leaves(checkpoint, leaf)}
    for name in [*numbers[0], *(name for name in numbers[1] if name not in numbers[0])]:
        if name not in wanted:
            continue
        where = [known[name] for known in numbers if name in known]
        if len(where) < 2:
            words = f"only in {both[name not in numbers[0]].folder.path}"
            yield {"leaf": name, "kind": "missing", "words": words}
            continue
        pair = [c.manifest.leaves[n] for c, n in zip(both, where, strict=True)]
        facts = _described(*pair) or _values(both, where, pair[0])
        if facts:
            yield {"leaf": name, **facts}


def _described(one: LeafRecord, other: LeafRecord) -> dict[str, Any] | None:
    """Return how two leaves differ before their data is looked at."""
    for kind, left, right in (
        ("kind", one.kind, other.kind),
        ("dtype", one.impl or one.dtype, other.impl or other.dtype),
        ("shape", list(one.shape), list(other.shape)),
        ("value", one.value, other.value),
    ):
        if left != right:
            return {"kind": kind, "first": left, "second": right, "words": f"{left} | {right}"}
    return None


def _values(
    both: tuple[Checkpoint, Checkpoint], where: list[int], leaf: LeafRecord
) -> dict[str, Any] | None:
    """Compare the data of a leaf, a band of it at a time."""
    if not leaf.has_data:
        return None
    count, largest, place = 0, math.nan, None
    shown: tuple[str, str] = ("", "")
    for origin, extent in _bands(leaf):
        pair = []
        for checkpoint, number in zip(both, where, strict=True):
            out = np.empty(extent, dtype_of(leaf.dtype))
            read(checkpoint, [Want(number, origin, out)], most_bytes=_BAND_BYTES)
            pair.append(out)
        differ = np.flatnonzero(_bits(pair[0]) != _bits(pair[1]))
        if not differ.size:
            continue
        count += differ.size
        largest = np.fmax(largest, _distance(pair[0], pair[1], differ))
        if place is None:
            inner = np.unravel_index(differ[0], extent)
            place = [int(o + i) for o, i in zip(origin, inner, strict=True)]
            shown = str(pair[0].reshape(-1)[differ[0]]), str(pair[1].reshape(-1)[differ[0]])
    if place is None:
        return None
    total = math.prod(leaf.stored_shape)
    far = f", at most {largest:.6g} apart" if largest == largest else ""
    words = f"{count:,} of {total:,} values differ, first at {place}: {shown[0]} | {shown[1]}{far}"
    return {
        "kind": "values",
        "count": count,
        "of": total,
        "at": place,
        "first": shown[0],
        "second": shown[1],
        "max_abs": float(largest) if math.isfinite(largest) else None,
        "words": words,
    }


def _bands(leaf: LeafRecord) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes (origin, extent) that tile a leaf, each of bounded size where dim 0 allows it."""
    shape = leaf.stored_shape
    if not shape or not math.prod(shape):
        yield (0,) * len(shape), shape
        return
    row_bytes = math.prod(shape[1:]) * dtype_of(leaf.dtype).itemsize
    rows = max(1, _BAND_BYTES // row_bytes)
    for begin in range(0, shape[0], rows):
        rest = shape[1:]
        yield (begin, *(0,) * len(rest)), (min(rows, shape[0] - begin), *rest)


def _bits(array: Array) -> Array:
    """Return the bits of each element, as one number or one piece of memory."""
    size = array.dtype.itemsize
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def _distance(one: Array, other: Array, differ: Array) -> float:
    """Return how far apart numbers are at most; nan where they are none."""
    try:
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        left, right = (array.reshape(-1)[differ].astype(wide) for array in (one, other))
    except (TypeError, ValueError):
        return math.nan
    with np.errstate(all="ignore"):
        return float(np.fmax.reduce(np.abs(left - right)))
