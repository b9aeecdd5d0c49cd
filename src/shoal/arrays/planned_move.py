"""One array → another layout of the same devices, by the collectives of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from shoal.arrays.host_values import is_key
from shoal.arrays.move_program import stages
from shoal.arrays.sharding import layout_of_sharding
from shoal.arrays.words import as_words, bits_as, must_be_words
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.transfer.chunks import chunks_of
from shoal.plan.transfer.plan import Transfer, plan_transfer

__all__ = [
    "Program",
    "as_it_lies",
    "is_better",
    "move_as_planned",
    "plan_of",
    "programs",
    "whole_shape",
]


class Program(NamedTuple):
    """One compiled part of a move."""

    run: Callable[[jax.Array], jax.Array]
    takes: NamedSharding
    gives: NamedSharding


def plan_of(array: jax.Array | jax.ShapeDtypeStruct, target: NamedSharding) -> Transfer | None:
    """Return the plan of a move; None where the way it lies, or shall lie, is no layout."""
    if array.sharding is None or (isinstance(array, jax.Array) and is_key(array)):
        return None
    rank = len(array.shape)
    try:
        ends = layout_of_sharding(array.sharding, rank), layout_of_sharding(target, rank)
        return plan_transfer(*ends, array.shape, max(1, array.dtype.itemsize))
    except UsageError:
        return None


def is_better(plan: Transfer) -> bool:
    """Say whether a plan receives less, or needs less memory, than XLA's own program would.

    A single step is what XLA does too. But it does it with the whole array at once.
    """
    if plan.way != "collectives":
        return False
    in_one_order = list(plan.source.mesh.device_ids.flat) == list(plan.target.mesh.device_ids.flat)
    is_single = len(plan.steps) == 1 and plan.steps[0].kind != "exchange"
    is_large = chunks_of(plan.steps, plan.shape, plan.item_bytes) is not None
    return not in_one_order or not is_single or is_large


def move_as_planned(array: jax.Array, plan: Transfer, target: NamedSharding) -> jax.Array:
    """Return the array in its new layout.

    Args:
      plan: of `plan_of`, whose way is "collectives".
    """
    whole, dtype = array.shape, array.dtype
    if narrow := must_be_words(array):
        array = as_words(array)
    shape = plan.source.shard_shape(whole)
    for program in programs(plan.source, plan.target, whole, plan.item_bytes):
        array = program.run(as_it_lies(array, program.takes, shape))
        shape = array.sharding.shard_shape(array.shape)
    array = as_it_lies(array, target, shape)
    return bits_as(array, dtype) if narrow else array


@lru_cache(maxsize=1024)
def programs(
    source: Layout, target: Layout, shape: tuple[int, ...], item_bytes: int
) -> tuple[Program, ...]:
    """Return the programs of a move, one after the other; compiled when they first run."""
    steps = plan_transfer(source, target, shape, item_bytes).steps
    return tuple(
        Program(jax.jit(run, in_shardings=takes, out_shardings=gives), takes, gives)
        for run, takes, gives in stages(steps, source, target, shape, item_bytes)
    )


def as_it_lies(array: jax.Array, target: NamedSharding, shard: tuple[int, ...]) -> jax.Array:
    """Return the same shards under another sharding of the same devices."""
    if array.sharding == target:
        return array
    held = {piece.device: piece.data for piece in array.addressable_shards}
    own = [held[device] for device in target.mesh.devices.flat if device in held]
    shape = whole_shape(shard, target)
    return jax.make_array_from_single_device_arrays(shape, target, own, dtype=array.dtype)


def whole_shape(shard: tuple[int, ...], target: NamedSharding) -> tuple[int, ...]:
    """Return the shape of the array of which each device holds so large a shard."""
    counts = [_count(axes, target) for axes in (*target.spec, *[None] * len(shard))]
    return tuple(size * count for size, count in zip(shard, counts, strict=False))


def _count(axes: object, target: NamedSharding) -> int:
    """Return into how many shards a sharding cuts a dim."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(target.mesh.shape[name] for name in names)  # type: ignore[attr-defined]
