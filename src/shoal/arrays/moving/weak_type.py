"""Restore the weak type of arrays that were moved: arrays assembled from shards are strongly typed.

A weakly typed array (`jnp.full((8, 8), 3.0)`) takes on the dtype of its other operand, and XLA's
own move preserves that: with `bfloat16` it gives `bfloat16`, where a strong one gives `float32`.
Empty arrays become strong: programs of jax 0.10 give them shards of wrong shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

_SCALARS = {"i": 0, "f": 0.0, "c": 0j}  # all weakly typed arrays have their dtypes


def as_weak_as(array: jax.Array, source: jax.Array) -> jax.Array:
    """Return a moved array, weakly typed if its source is. Donates its memory.

    Args:
      array: shares no memory with another, since it is donated; under a NamedSharding.
      source: the array before the move.
    """
    if not is_weak(source) or is_weak(array) or not array.addressable_shards:
        return array
    weak: jax.Array = _program(array.sharding)(array)
    return weak


def weakened(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return a value inside `jit` weakly typed, per device, since Explicit axes forbid more."""
    on_shard = jax.shard_map(
        _weakened,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )
    weak: jax.Array = on_shard(x)
    return weak


def is_weak(array: jax.Array) -> bool:
    """True for a weakly typed array."""
    return bool(getattr(array, "weak_type", False))  # arrays of PRNG keys have no such attribute


def _weakened(shard: jax.Array) -> jax.Array:
    """Return a shard weakly typed; only `at[].set` takes the type of its destination.

    It is set as the one row of a stack: `at[...]` has an empty array of indices, a constant of
    `shard_map` that ends the process within the compiler (JAX 0.11.2, on CPUs).
    """
    weak = jnp.asarray(_SCALARS[shard.dtype.kind])
    if weak.dtype != shard.dtype:
        return shard  # of a process with another x64 setting
    return jnp.broadcast_to(weak, (1, *shard.shape)).at[0].set(shard)[0]


@lru_cache(maxsize=256)
def _program(sharding: NamedSharding) -> Callable[[Any], Any]:
    """Return a program that computes nothing: XLA returns the donated memory."""
    return jax.jit(
        lambda x: weakened(x, sharding),
        in_shardings=sharding,
        out_shardings=sharding,
        donate_argnums=0,
    )
