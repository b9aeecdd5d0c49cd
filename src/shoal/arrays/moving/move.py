"""Move device arrays to other shardings, without a detour through the host where possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shoal.arrays.host.host_values import is_key
from shoal.arrays.host.upload import upload
from shoal.arrays.moving.across_devices import is_apart, move_across
from shoal.arrays.moving.host_copy import can_copy, copied
from shoal.arrays.moving.planned_move import ArrayMove, is_better, move_as_planned
from shoal.arrays.moving.weak_type import as_weak_as, is_weak
from shoal.arrays.moving.whole_words import as_words, bits_as, must_be_words
from shoal.plan.transfer.plan import Transfer
from shoal.runtime.jax_service.own_programs import own_programs


def relabelled(array: jax.Array, target: NamedSharding) -> jax.Array | None:
    """Return the array under `target` without moving a byte, or None if bytes must move."""
    if array.sharding == target:
        return array
    if not array.sharding.is_equivalent_to(target, array.ndim):
        return None
    if is_weak(array):  # JAX assembles only strongly typed arrays from shards
        same: jax.Array = jax.device_put(array, target)
        return same
    own = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, target, own, dtype=array.dtype)


def _empty(shape: tuple[int, ...], dtype: Any, target: NamedSharding) -> jax.Array:
    """Return an array of no items."""
    devices = [*target.addressable_devices_indices_map(shape)]
    own = upload([np.empty(target.shard_shape(shape), dtype) for _ in devices], devices)
    return jax.make_array_from_single_device_arrays(shape, target, own, dtype=dtype)


def _elsewhere(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Return an array of which this process holds nothing."""
    return jax.make_array_from_single_device_arrays(array.shape, target, [], dtype=array.dtype)


@own_programs()
def move(
    moves: Sequence[ArrayMove], *, donate: bool = False, between_devices: bool = False
) -> list[jax.Array]:
    """Move arrays that can be moved; those already in place are not copied.

    Arrays that stay on one row of devices move in one program. `jax.device_put` would gather an
    array that one process owns whole on the host instead (`shard_sharded_device_array_slow_path`).

    Args:
      moves: the arrays and their targets.
      donate: donate the arrays that move.
      between_devices: use programs even between devices that share one process's memory.
    """
    by_copy = [
        not between_devices and not each.is_traced and can_copy(each.array, each.target)
        for each in moves
    ]
    plans = [None if is_copy else _plan(each) for each, is_copy in zip(moves, by_copy, strict=True)]
    requested = moves
    moves = [
        each if plan is not None else _without_pending_sum(each)
        for each, plan in zip(moves, plans, strict=True)
    ]
    moved = [unmoved(each) for each in moves]
    kept = [each.array for each, done in zip(moves, moved, strict=True) if done is not None]
    uses = Counter(id(each.array) for each in moves if donate)
    programs: dict[tuple[jax.Device, ...], list[int]] = {}
    others: list[int] = []
    for index, (each, done) in enumerate(zip(moves, moved, strict=True)):
        if done is not None:
            continue
        plan = plans[index]
        if each.is_traced:
            moved[index] = _differentiably(each)
        elif by_copy[index]:
            moved[index] = copied(each.array, each.target)
        elif plan is not None or is_apart(
            each.array.sharding, each.target, programs=between_devices
        ):
            with on_row(()):
                moved[index] = _by_programs(each, plan)
        elif row_of(each.array.sharding) == row_of(each.target):
            programs.setdefault(row_of(each.target), []).append(index)
        else:
            others.append(index)
    for numbers in programs.values():
        results = _run([moves[index] for index in numbers], uses)
        for index, array in zip(numbers, results, strict=True):
            moved[index] = array
    for index, array in zip(others, _put([moves[n] for n in others]), strict=True):
        moved[index] = _unshared(array, moves[index].array)
    if donate:
        give_up(requested, {id(array) for array in kept})
    return moved


def _by_programs(each: ArrayMove, plan: Transfer | None) -> jax.Array:
    """Move an array by its plan, or if there is none, by permutes to other devices."""
    if plan is None:
        return as_weak_as(move_across(each), each.array)
    return as_weak_as(move_as_planned(each.array, plan, each.target), each.array)


def _plan(each: ArrayMove) -> Transfer | None:
    """Return the plan of a move; None if XLA, or JAX's copy, does it."""
    if each.is_traced or each.array.sharding == each.target:
        return None
    if is_key(each.array) or each.changes_devices:
        return None
    plan = each.plan
    if plan is None or not is_better(plan, each.array.dtype):
        return None
    return plan


def unmoved(each: ArrayMove) -> jax.Array | None:
    """Return the result if no byte must move in this process."""
    array, target = each.array, each.target
    if array.sharding == target:
        return _differentiably(each) if each.is_traced else array
    if each.is_traced:
        return None
    if not array.committed and not target.mesh.axis_names and array.devices() == target.device_set:
        return array  # where `layout_of` describes it; JAX may still move it
    if array.size == 0 and not is_key(array):  # jax 0.10's programs give shards of wrong shapes
        return _empty(array.shape, array.dtype, target)
    if not target.addressable_devices and not array.addressable_shards:
        return _elsewhere(array, target)
    return relabelled(array, target)


def _run(moves: list[ArrayMove], uses: Mapping[int, int]) -> tuple[jax.Array, ...]:
    """Move arrays within one row of devices; those used once, and so named, are donated."""
    originals, moves = moves, [_in_words(each) for each in moves]
    sources = tuple(each.array.sharding for each in moves)
    targets = tuple(each.target for each in moves)
    fits = tuple(
        index
        for index, each in enumerate(moves)
        if uses.get(id(each.array)) == 1
        and each.array.sharding.shard_shape(each.array.shape)
        == each.target.shard_shape(each.array.shape)
    )
    with on_row(row_of(targets[0])):
        results = xla_program(sources, targets, fits)(*[each.value for each in moves])
    return tuple(_in_own_dtypes(results, moves, originals))


def _differentiably(each: ArrayMove) -> jax.Array:
    """Move a value under differentiation. Cotangents come back to where it lies.

    The transpose of a program demands cotangents that lie as its results do. That of `device_put`
    moves them to `src`, so the result passes through one, and so does the value.
    """
    value, source, target = each.value, each.array.sharding, each.target
    if row_of(source) != row_of(target) or _has_types(source) or _has_types(target):
        moved: jax.Array = jax.device_put(value, target, src=source)
        return moved
    value = jax.device_put(value, source, src=source)
    with on_row(row_of(target)):
        (moved,) = xla_program((source,), (target,), ())(value)
    return jax.device_put(moved, target, src=target)


def _has_types(sharding: jax.sharding.Sharding) -> bool:
    """True on Explicit axes: cotangents have layouts in their types, which programs drop."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def _in_words(each: ArrayMove) -> ArrayMove:
    """Bit-cast the arrays that XLA would corrupt."""
    if not must_be_words(each.array):
        return each
    machine_words = as_words(each.array)
    return ArrayMove(machine_words, machine_words, each.target)


def _in_own_dtypes(
    results: Sequence[jax.Array], moves: Sequence[ArrayMove], originals: Sequence[ArrayMove]
) -> list[jax.Array]:
    """Bit-cast results back to their own dtypes."""
    return [
        result if moved is was else bits_as(result, was.array.dtype)
        for result, moved, was in zip(results, moves, originals, strict=True)
    ]


def _put(moves: Sequence[ArrayMove]) -> list[jax.Array]:
    """Move arrays between rows of devices."""
    originals, moves = moves, [_in_words(each) for each in moves]
    spread = [is_key(m.array) and not m.target.is_fully_addressable for m in moves]
    # Between processes `jax.device_put` cannot move keys. Their data has one more, unsplit dim.
    values = [
        jax.random.key_data(m.array) if bits else m.value
        for m, bits in zip(moves, spread, strict=True)
    ]
    arrays = jax.device_put(values, [m.target for m in moves])
    results = [
        jax.random.wrap_key_data(a, impl=jax.random.key_impl(m.array)) if bits else a
        for a, m, bits in zip(arrays, moves, spread, strict=True)
    ]
    return _in_own_dtypes(results, moves, originals)


def _unshared(array: jax.Array, source: jax.Array) -> jax.Array:
    """Copy the buffers that an array shares with its source: donating one would delete both.

    JAX shares the buffer of a device that holds the same shard before and after, whatever
    `may_alias` says (jax 0.10 to 0.12).
    """
    if isinstance(array, jax.core.Tracer) or is_key(array):
        return array
    held = {shard.data.unsafe_buffer_pointer() for shard in source.addressable_shards}
    own = [shard.data for shard in array.addressable_shards]
    shared = [n for n, each in enumerate(own) if each.unsafe_buffer_pointer() in held]
    if not shared:
        return array
    for n in shared:
        own[n] = jax.device_put(own[n], own[n].sharding, may_alias=False)
    copied = jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, own, dtype=array.dtype
    )
    return as_weak_as(copied, source)


def give_up(moves: Sequence[ArrayMove], kept: set[int]) -> None:
    """Delete arrays that have moved. XLA would only warn about donation; tied arrays may stay."""
    for each in moves:
        array = each.array
        if not each.is_traced and id(array) not in kept and not array.is_deleted():
            array.delete()


def on_row(row: tuple[jax.Device, ...]) -> AbstractContextManager[Any]:
    """Leave a `jax.set_mesh` of other devices, whose programs may run on its devices only.

    While JAX traces (under `grad`) no context can be left.
    """
    try:
        here = jax.sharding.get_mesh()
    except ValueError:
        return nullcontext()
    if here.empty or tuple(here.devices.flat) == row:
        return nullcontext()
    return jax.set_mesh(None)


def row_of(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    """Return the devices in mesh order; () where it is not known."""
    mesh = getattr(sharding, "mesh", None)
    return tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else ()


# JAX keeps compiled code by function object: without this cache each call would compile anew.
@lru_cache(maxsize=256)
def xla_program(
    sources: tuple[NamedSharding, ...], targets: tuple[NamedSharding, ...], donated: tuple[int, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the program that moves."""
    return jax.jit(
        _identity,
        in_shardings=sources,
        out_shardings=targets,
        donate_argnums=donated,
    )


def _identity(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


def _without_pending_sum(each: ArrayMove) -> ArrayMove:
    """Reduce a pending sum in place: only `jax.reshard` can."""
    sharding = each.array.sharding
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return each
    summed = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions))
    if not sharding.addressable_devices:
        array = _elsewhere(each.array, summed)
        return ArrayMove(array, array, each.target)
    array = jax.reshard(each.array, summed)
    value = jax.reshard(each.value, summed) if each.is_traced else array
    return ArrayMove(value, array, each.target)
