"""Narrow values as whole words while they travel between devices on CPU.

There XLA (jax 0.10 to 0.12) changes the bits of NaNs of floats below 32 bits on their way, and
between processes writes behind its memory where elements are narrower than a byte. As unsigned
integers of the same size nothing happens to them.
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
    """Say whether a narrow float fills its bytes: XLA then has an integer of the same bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)


def in_words(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a function, called while `jit` traces, that sees narrow floats as integers.

    Its result is of the dtype of its first argument.
    """

    def run_in_words(x: jax.Array, *others: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(run(*map(_integers, (x, *others))), x.dtype)

    return run_in_words


def _integers(x: jax.Array) -> jax.Array:
    if not is_narrow_float(x.dtype):
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def must_be_words(array: jax.Array) -> bool:
    """Say whether moving an array might change its bits."""
    if is_key(array) or not may_change(array.dtype):
        return False
    return any(device.platform == "cpu" for device in array.sharding.device_set)


def may_change(dtype: Any) -> bool:
    """Say whether values of a dtype are among those that change on CPU."""
    return bool(dtype.itemsize < 4 and dtype.kind not in "biu")


def word_of(dtype: Any) -> np.dtype[Any]:
    """Return the unsigned integers of the same size; NumPy has a byte for an int4, too."""
    return np.dtype(f"u{dtype.itemsize}")


def as_words(array: jax.Array) -> jax.Array:
    """Return an array's bits as unsigned integers."""
    return bits_as(array, word_of(array.dtype))


def bits_as(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the array of another dtype of the same size that has the same bits."""
    shards = array.addressable_shards
    with jax.transfer_guard("allow"):
        views = [np.asarray(shard.data).view(dtype) for shard in shards]
        own = upload(views, [shard.device for shard in shards])
        own = jax.device_put(own, [shard.data.sharding for shard in shards])  # kind of memory
        jax.block_until_ready(own)  # a transfer under way still reads the view
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, own, dtype=dtype)
