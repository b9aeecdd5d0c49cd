"""A move that is possible: checked once, where a call of the user enters, and passed down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.arguments import as_integer
from shoal.errors import UsageError, UsageTypeError, WrongType, raise_all
from shoal.plan.layout import Layout

_MOST_BYTES = 1 << 62  # so that the bytes of a device, and edges past a dim's end, fit in 64 bits


def terms_of(layout: Layout) -> dict[str, str]:
    """Return axis → reduction for the pending reductions of more than one term."""
    axes = layout.mesh.axes
    return {axis: kind for axis, kind in layout.partial.items() if axes[axis] > 1}


class Move(NamedTuple):
    """An array, described, and the layouts from which and to which it moves; see `checked_move`."""

    source: Layout
    target: Layout  # without pending reductions
    shape: tuple[int, ...]  # of the whole array
    item_bytes: int  # of one element

    @property
    def is_even(self) -> bool:
        """Whether both layouts cut every dim into equal shards."""
        return all(
            size % layout.num_shards(dim) == 0
            for layout in (self.source, self.target)
            for dim, size in enumerate(self.shape)
        )

    @property
    def why_reduces(self) -> str:
        """What the source has pending, which sends of pieces cannot reduce; "" if nothing."""
        pending = terms_of(self.source)
        if not pending:
            return ""
        return (
            f"the source is pending ({_shown(pending)}), and sends of pieces reduce nothing: "
            "reduce it first"
        )


def checked_move(
    operation: str,
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    item_bytes: int = 1,
    *,
    reduces: bool = True,
) -> Move:
    """Return the move if an array can be moved so.

    Args:
      operation: the function that the caller called.
      reduces: whether the source may have pending reductions.

    Raises:
      UsageError: all problems in one message.
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
    pending = terms_of(target)
    if pending:
        problems.append(
            f"the target is pending ({_shown(pending)}), but a move ends with values: leave "
            "partial out of the target"
        )
    move = Move(source, target, sizes, int(item_bytes))  # an item size of NumPy would wrap
    if not reduces and move.why_reduces:
        problems.append(move.why_reduces)
    raise_all(operation, problems)
    return move


def _check_shape(
    source: Layout, target: Layout, shape: Sequence[int], problems: list[str]
) -> tuple[int, ...]:
    if source.rank != target.rank:
        problems.append(
            f"a move keeps the dims, but the source {source!r} has rank {source.rank} and the "
            f"target {target!r} rank {target.rank}"
        )
    sizes: tuple[int, ...] = ()
    for layout in (source, target) if problems else (source,):  # of one rank both take one shape
        try:
            sizes = layout.check_shape(shape)
        except UsageError as error:
            problem = WrongType(error) if isinstance(error, UsageTypeError) else str(error)
            if problem not in problems:
                problems.append(problem)
    return sizes


def _shown(pending: dict[str, str]) -> str:
    return ", ".join(f"{kind} over {axis!r}" for axis, kind in pending.items())
