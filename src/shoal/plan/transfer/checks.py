"""Validate the arguments of a move, with all problems in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.arguments import as_integer
from shoal.errors import UsageError, UsageTypeError, WrongType, raise_all
from shoal.plan.layout import Layout

_MOST_BYTES = 1 << 62  # so that the bytes of a device, and edges past a dim's end, fit in 64 bits


def terms_of(layout: Layout) -> dict[str, str]:
    """Return axis → reduction for the pending reductions of more than one term."""
    axes = layout.mesh.axes
    return {axis: kind for axis, kind in layout.partial.items() if axes[axis] > 1}


def check_move(
    operation: str,
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    item_bytes: int = 1,
    *,
    reduces: bool = True,
) -> tuple[int, ...]:
    """Return `shape` as plain ints if an array can be moved so.

    Args:
      operation: the function that the caller called.
      item_bytes: of one element.
      reduces: whether the source may have pending reductions.

    Raises:
      UsageError: names all problems.
    """
    problems: list[str] = []
    layouts = {"source": source, "target": target}
    for name, layout in layouts.items():
        if not isinstance(layout, Layout):
            problems.append(WrongType(f"{name}={layout!r} must be a Layout"))
    if as_integer(item_bytes) is None:
        problems.append(WrongType(f"item_bytes={item_bytes!r} must be an int"))
    elif item_bytes < 1:
        problems.append(f"item_bytes={item_bytes} must be 1 or more")
    raise_all(operation, problems)
    sizes = _check_shape(source, target, shape, problems)
    if sizes and math.prod(max(size, 1) for size in sizes) * item_bytes > _MOST_BYTES:
        problems.append(f"shape {sizes} of {item_bytes} bytes an element has more than 2^62 bytes")
    _check_terms(source, target, reduces, problems)
    raise_all(operation, problems)
    return sizes


def _check_shape(
    source: Layout, target: Layout, shape: Sequence[int], problems: list[str]
) -> tuple[int, ...]:
    if source.rank != target.rank:
        problems.append(
            f"a move keeps the dims, but the source {source!r} has rank {source.rank} and the "
            f"target {target!r} rank {target.rank}"
        )
    sizes: tuple[int, ...] = ()
    for layout in (source, target):
        try:
            sizes = layout.check_shape(shape)
        except UsageError as error:
            words = WrongType(error) if isinstance(error, UsageTypeError) else str(error)
            if words not in problems:
                problems.append(words)
    return sizes


def _check_terms(source: Layout, target: Layout, reduces: bool, problems: list[str]) -> None:
    if pending := terms_of(target):
        problems.append(
            f"the target is pending ({_shown(pending)}), but a move ends with values: leave "
            "partial out of the target"
        )
    if not reduces and (pending := terms_of(source)):
        problems.append(
            f"the source is pending ({_shown(pending)}), and sends of pieces reduce nothing: "
            "reduce it first"
        )


def _shown(pending: dict[str, str]) -> str:
    return ", ".join(f"{kind} over {axis!r}" for axis, kind in pending.items())
