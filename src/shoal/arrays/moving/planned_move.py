"""Move one array to another layout of the same devices by the collectives of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding

from shoal.arrays.bridge.sharding import layout_of_sharding
from shoal.arrays.moving.move_program import DigitStage, stages
from shoal.arrays.moving.whole_words import (
    as_words,
    bits_as,
    in_words,
    is_narrow_float,
    must_be_words,
)
from shoal.errors import UsageError
from shoal.plan.layout import Layout, shard_of
from shoal.plan.transfer.move_steps import Step, chunks_of
from shoal.plan.transfer.plan import Transfer, plan_transfer
from shoal.plan.transfer.same_devices import in_one_order


@dataclass(frozen=True, eq=False)
class ArrayMove:
    """An array and its target sharding, with the plan of the move: made when first asked for."""

    value: jax.Array  # under `grad` a tracer
    array: jax.Array  # the concrete array behind it
    target: NamedSharding

    @property
    def is_traced(self) -> bool:
        """Whether the value is being differentiated."""
        return self.value is not self.array

    @property
    def changes_devices(self) -> bool:
        """Whether the array moves to other devices."""
        return self.array.sharding.device_set != self.target.device_set

    @property
    def plan(self) -> Transfer | None:
        """The plan; None if there is none. To other devices it is slow to make."""
        return self._found if isinstance(self._found, Transfer) else None

    @property
    def why_not_planned(self) -> str:
        """Why there is no plan; "" if there is one."""
        return "" if isinstance(self._found, Transfer) else str(self._found)

    @cached_property
    def _found(self) -> Transfer | UsageError:
        array, rank = self.array, len(self.array.shape)
        try:
            source = layout_of_sharding(array.sharding, rank)
            if self.changes_devices:  # pending sums are reduced before
                source = Layout(source.mesh, *source.dims)
            target = layout_of_sharding(self.target, rank)
            return plan_transfer(source, target, array.shape, max(1, array.dtype.itemsize))
        except UsageError as error:
            return error


def is_better(plan: Transfer, dtype: Any = None) -> bool:
    """Does a plan receive less, need less memory or run faster than XLA's own program?

    Slices, and a single step of another kind, are what XLA does too. But XLA does it with the whole
    array at once, corrupts the bits of narrow floats, and joins shards along a later dim element by
    element, except on TPU.
    """
    if plan.way != "collectives":
        return False
    if dtype is not None and is_narrow_float(dtype):
        return True
    reordered = not in_one_order(plan.source.mesh, plan.target.mesh)
    is_single = len(plan.steps) == 1 and _is_as_good(plan.steps[0])
    is_single |= all(step.kind == "slice" for step in plan.steps)
    is_large = chunks_of(plan.steps, plan.shape, plan.item_bytes) is not None
    return reordered or not is_single or is_large or bool(plan.source.partial)


def _is_as_good(step: Step) -> bool:
    """Is XLA's program for a step as good as ours?"""
    if step.kind == "all_gather":
        return step.dim == 0 or step.before.mesh.kind == "tpu"
    return step.kind != "exchange"


def move_as_planned(array: jax.Array, plan: Transfer, target: NamedSharding) -> jax.Array:
    """Return the array in its new layout.

    Args:
      plan: of an `ArrayMove`, whose way is "collectives".
    """
    whole, dtype = array.shape, array.dtype
    by_host = must_be_words(array) and not is_narrow_float(dtype) and not plan.source.partial
    if by_host:
        array = as_words(array)
    shape = shard_of(plan.source, whole)
    for program in programs_of(plan, dtype):
        array = program.run(same_shards_under(array, program.takes, shape))
        shape = array.sharding.shard_shape(array.shape)
    array = same_shards_under(array, target, shape)
    return bits_as(array, dtype) if by_host else array


def programs_of(
    plan: Transfer, dtype: Any, devices: tuple[jax.Device, ...] | None = None
) -> tuple[DigitStage, ...]:
    """Return the programs of a move, in order, compiled on first use.

    Args:
      devices: the devices to search for the meshes'; None: those of this job.
    """
    in_words = is_narrow_float(dtype) and not plan.source.partial  # integers cannot be summed
    return _programs(plan, in_words, devices)


@lru_cache(maxsize=1024)
def _programs(
    plan: Transfer, is_narrow: bool, devices: tuple[jax.Device, ...] | None
) -> tuple[DigitStage, ...]:
    """Narrow floats are moved as integers of the same bits: XLA changes NaN payloads."""
    digit_stages = stages(
        plan.steps, plan.source, plan.target, plan.shape, plan.item_bytes, devices
    )
    return tuple(
        DigitStage(
            jax.jit(in_words(run) if is_narrow else run, in_shardings=takes, out_shardings=gives),
            takes,
            gives,
        )
        for run, takes, gives in digit_stages
    )


def same_shards_under(array: jax.Array, target: NamedSharding, shard: tuple[int, ...]) -> jax.Array:
    """Return the same shards under another sharding of the same devices."""
    if array.sharding == target:
        return array
    held = {piece.device: piece.data for piece in array.addressable_shards}
    own = [held[device] for device in target.mesh.devices.flat if device in held]
    shape = whole_shape(shard, target)
    return jax.make_array_from_single_device_arrays(shape, target, own, dtype=array.dtype)


def whole_shape(shard: tuple[int, ...], target: NamedSharding) -> tuple[int, ...]:
    """Return the global shape for a shard shape."""
    counts = [_count(axes, target) for axes in (*target.spec, *[None] * len(shard))]
    return tuple(size * count for size, count in zip(shard, counts, strict=False))


def _count(axes: object, target: NamedSharding) -> int:
    """Return the number of shards of a dim."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(target.mesh.shape[name] for name in names)  # type: ignore[attr-defined]
