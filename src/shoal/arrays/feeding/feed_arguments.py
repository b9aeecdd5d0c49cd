"""Check the arguments of a feed, and list what must be equal on all processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from shoal.arguments import as_integer, not_flags
from shoal.arrays.bridge.leaf_layouts import Layouts, is_one_layout
from shoal.arrays.bridge.sharding import sharding
from shoal.arrays.feeding.batch_sources import ByNumber, InTurn, by_number
from shoal.arrays.feeding.batch_verdict import LAST
from shoal.arrays.feeding.feed_steps import FeedOptions
from shoal.arrays.feeding.local_rows import split_layout
from shoal.arrays.feeding.own_rows import Split
from shoal.arrays.host.digest import digest
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, with_article
from shoal.plan.layout import Layout
from shoal.plan.rows import check_even_split


def problems_of(
    batch: object, order: object, last: object, prefetch: object, same: object, skip: object
) -> list[str]:
    """Return what is wrong with each argument by itself."""
    problems: list[str] = []
    for name, value in {"batch": batch, "prefetch": prefetch}.items():
        if value is None and name == "batch":
            continue
        number = as_integer(value)
        if number is None:
            problems.append(WrongType(f"{name}={value!r} must be a whole number"))
        elif number < 1:
            problems.append(f"{name}={value!r} must be at least 1")
    if order is not None and batch is None:
        problems.append("order= is for rows read by number: give batch=, too")
    if not isinstance(last, str) or last not in LAST:
        problems.append(f"last={last!r} is not one of {', '.join(LAST)}{nearest(last, LAST)}")
    problems += not_flags(same=same)
    if skip is not None and not isinstance(skip, bool):
        problems.append(WrongType(f"skip={skip!r} must be True, False or None"))
    if skip is not None and batch is not None:
        problems.append("skip= is for iterables; rows by number (batch=) are never skipped")
    return problems


def source_of(source: Any, batch: int | None, order: Any, split: Split) -> InTurn | ByNumber:
    """Return the batch source: an iterable, or rows by number.

    Raises:
      UsageError: it is neither, or a batch cannot be split evenly.
    """
    if batch is None:
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            what = "a function of row numbers" if callable(source) else f"{source!r}"
            raise UsageTypeError(
                f"feed: {what} is not an iterable of batches; rows by number need batch="
            )
        if isinstance(source, dict | np.ndarray | jax.Array):
            raise UsageTypeError(
                f"feed: {with_article(type(source).__name__)} is not an iterable of batches: "
                "give batch=, the rows of a batch over all processes, to read it by number"
            )
        return InTurn(source)
    check_even_split("feed: batch", split.layout, batch, 0)
    return by_number(source, order)


def check_last_batch(reads: InTurn | ByNumber, options: FeedOptions) -> None:
    """Raise if the last batch by number is incomplete and `last` does not allow it."""
    if isinstance(reads, InTurn):
        return
    batch, left = options.batch, max(0, reads.total - options.start)
    is_nothing = options.last == "drop" and reads.total < batch
    if left % batch and (options.last == "error" or is_nothing):
        text = f"{left} rows are {left // batch} batches of {batch}, and {left % batch} more"
        raise UsageError(f"feed: {text}; last='pad' gives these with a mask")


def check_skip(source: Any, reads: InTurn | ByNumber, rows: int, skip: bool | None) -> None:
    """Reject an iterable that may already be past the rows to skip."""
    can_be_set = any(hasattr(source, name) for name in ("set_state", "load_state_dict"))
    if rows and skip is None and can_be_set and isinstance(reads, InTurn):
        raise UsageError(
            f"feed: start= is after {rows} rows, and {with_article(type(source).__name__)} "
            "can be set to where it was\n"
            "skip=False if it was (to reader_state()); skip=True if it begins anew, and "
            "that many rows are to be skipped"
        )


def rows_layout(layouts: Layouts) -> Layout:
    """Return the layout of the rows: that of the first dim."""
    found: dict[Layout, None] = {}
    for one in jax.tree.leaves(layouts, is_leaf=is_one_layout):
        if callable(one) or not is_one_layout(one):
            raise UsageTypeError(
                f"feed: {one!r} cannot be resolved before there are leaves: give layouts"
            )
        layout = split_layout("feed", one)
        if layout.rank:
            found[Layout(layout.mesh, layout.dims[0])] = None
    if len(found) != 1:
        raise UsageError(
            "feed: all leaves of a batch have their rows (dim 0) on the same axes of one mesh, not "
            + (" and ".join(map(repr, found)) or "none")
        )
    (layout,) = found
    sharding(layout)  # checks that its devices exist
    return layout


def feed_spec(
    reads: InTurn | ByNumber, split: Split, options: FeedOptions, prefetch: int
) -> tuple[str, ...]:
    """Return the lines that must be equal on all processes."""
    lines = [
        f"rows as {split.layout.text}",
        f"last={options.last!r} start={options.start} prefetch={prefetch} same={options.same}"
        + ("" if options.skip else " skip=False"),
    ]
    if isinstance(reads, ByNumber):
        lines.append(f"batch={options.batch} of {order_text(reads)}")
    return tuple(lines)


def order_text(reads: ByNumber) -> str:
    """Return a text that identifies an order of rows."""
    order = str(reads.order)
    if not isinstance(reads.order, range):
        order = f"numbers with the digest {digest(np.asarray(reads.order), whole=True)}"
    return f"{reads.total} rows, order={order}"
