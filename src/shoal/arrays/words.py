"""Narrow values as whole words while they travel between devices on CPU.

There XLA (jax 0.10 to 0.12) changes the bits of NaNs of floats below 32 bits on their way, and
between processes writes behind its memory where elements are narrower than a byte. As unsigned
integers of the same size nothing happens to them.
"""

from __future__ import annotations

import jax
import numpy as np

from shoal.arrays.host_values import is_key
from shoal.arrays.upload import upload

__all__ = ["as_words", "bits_as", "must_be_words"]


def must_be_words(array: jax.Array) -> bool:
    """Say whether moving an array might change its bits."""
    if is_key(array) or array.dtype.itemsize >= 4 or array.dtype.kind in "biu":
        return False
    return any(device.platform == "cpu" for device in array.sharding.device_set)


def as_words(array: jax.Array) -> jax.Array:
    """Return an array's bits as unsigned integers; NumPy has a byte for an int4, too."""
    return bits_as(array, np.dtype(f"u{array.dtype.itemsize}"))


def bits_as(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the array of another dtype of the same size that has the same bits."""
    shards = array.addressable_shards
    with jax.transfer_guard("allow"):
        views = [np.asarray(shard.data).view(dtype) for shard in shards]
        own = upload(views, [shard.device for shard in shards])
        own = jax.device_put(own, [shard.data.sharding for shard in shards])  # kind of memory
        jax.block_until_ready(own)  # a transfer under way still reads the view
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, own, dtype=dtype)
