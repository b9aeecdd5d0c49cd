"""Which rows of a batch this process must read."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arguments import integer
from shoal.arrays.bridge.leaf_layouts import (
    dims_of,
    is_layout_function,
    is_mesh,
    is_one_layout,
    layout_for,
    whole_rows,
)
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, raise_all
from shoal.plan.layout import Layout
from shoal.plan.rows import check_even_split, row_holders


@local
def local_rows(
    layout: Layout | NamedSharding | Any,
    global_batch: int,
    *,
    dim: int = 0,
    process: int | None = None,
) -> tuple[slice, ...]:
    """Return which rows of a global batch this process must read.

    Local.

    They are the rows that its devices hold, for any mesh and device order. Processes that hold
    replicas of a shard all read its rows. If no axis splits the batch, each reads all of it. Every
    row is read by at least one process.

    Args:
      layout: of an array of the batch: a NamedSharding or Layout; with a mesh in force (see
        `use_mesh`) also a PartitionSpec, a tuple of axis names and None, or a name.
      global_batch: global batch size: the size of `dim`.
      dim: the split dim, if not that of the rows, such as positions of long sequences; negative
        counts from the end.
      process: the process; None: this one.

    Returns:
      Slices of 0..global_batch, ascending and disjoint, with start and stop always set; adjacent
      rows are one slice. None for a process without devices in the mesh.

    Raises:
      UsageError: shards that do not divide the batch evenly, a layout without this dim.

    Example:
      >>> import shoal
      >>> mesh = shoal.Mesh({"data": 4, "model": 2}, processes=[0, 0, 1, 1, 2, 2, 0, 0])
      >>> shoal.local_rows(shoal.Layout(mesh, "data", None), 128, process=0)
      (slice(0, 32, None), slice(96, 128, None))
    """
    place = integer("local_rows", "dim", dim)
    size = integer("local_rows", "global_batch", global_batch)
    if size < 0:
        raise UsageError(f"local_rows: global_batch={global_batch!r} must not be negative")
    rows_layout = split_layout("local_rows", layout, place)
    if not -rows_layout.rank <= place < rows_layout.rank:
        raise UsageError(f"local_rows: dim={dim!r}: {rows_layout!r} has rank {rows_layout.rank}")
    place %= rows_layout.rank
    check_even_split(f"local_rows: dim {place}", rows_layout, size, place)
    own = jax.process_index() if process is None else process
    process_index = integer("local_rows", "process", own)
    if process_index < 0:
        raise UsageError(f"local_rows: process={process!r} must not be negative")
    return row_holders(rows_layout, place).slices(size, process_index)


def split_layout(operation: str, given: Any, dim: int = 0) -> Layout:
    """Return a layout with as many dims as it says, and at least those up to `dim`.

    Raises:
      UsageError: it is not a layout, or there is no mesh for it.
    """
    if is_mesh(given):
        raise_all(operation, whole_rows(given))
    if is_layout_function(given) or not is_one_layout(given):
        raise UsageTypeError(f"{operation}: {given!r} is not one layout: pass that of one array")
    rank = max(len(dims_of(given)), dim + 1, 1)
    try:
        return layout_for(given, jax.ShapeDtypeStruct((1,) * rank, np.int8), ())
    except UsageError as error:
        raise UsageError(f"{operation}: {error}") from None
