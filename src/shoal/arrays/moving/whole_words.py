"""Bit-cast small dtypes to unsigned integers for CPU transfers.

XLA (jax 0.10 to 0.12) changes the NaN payloads of floats below 32 bits in transfers between CPU
devices, and between processes writes out of bounds where elements are narrower than a byte.
Unsigned integers of the same size are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.arrays.host.host_values import is_key
from shoal.arrays.host.upload import upload


def is_narrow_float(dtype: Any) -> bool:
    """Is it a narrow float of whole bytes? XLA then has an integer of the same size."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)


def in_words(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap a function traced by `jit` so that it sees narrow floats as integers.

    Its result has the dtype of its first argument.
    """

    def run_in_words(x: jax.Array, *others: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(run(*map(_integers, (x, *others))), x.dtype)

    return run_in_words


def _integers(x: jax.Array) -> jax.Array:
    if not is_narrow_float(x.dtype):
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def must_be_words(array: jax.Array) -> bool:
    """Might moving this array change its bits?"""
    if is_key(array) or not may_change(array.dtype):
        return False
    return any(device.platform == "cpu" for device in array.sharding.device_set)


def may_change(dtype: Any) -> bool:
    """Is the dtype among those whose values change on CPU?"""
    return bool(dtype.itemsize < 4 and dtype.kind not in "biu")


def word_of(dtype: Any) -> np.dtype[Any]:
    """Return the unsigned integer dtype of the same size; NumPy stores an int4 in a byte, too."""
    return np.dtype(f"u{dtype.itemsize}")


def as_words(array: jax.Array) -> jax.Array:
    """Return an array's bits as unsigned integers."""
    return bits_as(array, word_of(array.dtype))


def bits_as(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the array of another dtype of the same size with the same bits."""
    shards = array.addressable_shards
    with jax.transfer_guard("allow"):
        views = [np.asarray(shard.data).view(dtype) for shard in shards]
        own = upload(views, [shard.device for shard in shards])
        own = jax.device_put(own, [shard.data.sharding for shard in shards])  # memory kind
        jax.block_until_ready(own)  # a pending transfer still reads the view
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, own, dtype=dtype)
