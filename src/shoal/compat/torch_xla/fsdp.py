"""The dim of a parameter that torch_xla's `SpmdFullyShardedDataParallel` splits."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compat.torch_xla.left_out import SpmdFullyShardedDataParallel

__all__ = ["SpmdFullyShardedDataParallel", "_prepare_spmd_partition_spec"]


def _prepare_spmd_partition_spec(
    param: Any, extra_data_axis: str | None = None, shard_maximal: bool = False
) -> tuple[Any, ...]:
    """Return the partition spec of a parameter: one dim over the axis "fsdp".

    Args:
      param: an array, or another object with a shape.
      extra_data_axis: an axis that splits the same dim, before "fsdp".
      shard_maximal: split the first of the largest dims; False: dim 0.

    >>> _prepare_spmd_partition_spec(np.zeros((64, 128)), "data", shard_maximal=True)
    (None, ('data', 'fsdp'))
    """
    shape = np.shape(param)
    split = 0
    if shape and shard_maximal:
        split = shape.index(max(shape))
    axis = "fsdp" if extra_data_axis is None else (extra_data_axis, "fsdp")
    return tuple(axis if dim == split else None for dim in range(len(shape)))
