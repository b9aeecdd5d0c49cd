"""Move arrays via host memory: a device holds its old shard or its new one, never both.

One process that owns all devices assembles the new shards on its host. Several processes exchange
chunks of the array by small collective programs, from and to host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arrays.host.host_values import is_key
from shoal.arrays.host.upload import upload
from shoal.arrays.moving.move import give_up, move, on_row, unmoved
from shoal.arrays.moving.planned_move import ArrayMove, move_as_planned
from shoal.arrays.moving.weak_type import as_weak_as
from shoal.arrays.moving.whole_words import must_be_words
from shoal.plan.layout import shard_of
from shoal.plan.transfer.plan import Transfer, plan_of_chunk
from shoal.plan.transfer.staging import staging_of
from shoal.runtime.jax_service.own_programs import own_programs

HostArray = np.ndarray[Any, Any]
Index = tuple[tuple[int, int], ...]  # begin and end of each dim
Shards = dict[jax.Device, HostArray]


def why_not_staged(move: ArrayMove) -> str:
    """Return why an array cannot move via the host, or ""; the same on every process."""
    if move.is_traced:
        return "is being differentiated, and staged=True moves nothing but values; leave it out"
    array, target = move.array, move.target
    if is_key(array) or by_host_alone(array.sharding, target):
        return ""
    if move.changes_devices or move.plan is None or move.plan.sends is not None:
        return (
            "cannot be staged: there are no collectives from its sharding "
            f"{array.sharding} to {target.spec}; leave staged=True out"
        )
    return ""


def by_host_alone(source: jax.sharding.Sharding, target: NamedSharding) -> bool:
    """Does this process hold all the data it needs? Pending sums need the devices."""
    pending = isinstance(source, NamedSharding) and source.spec.unreduced
    return source.is_fully_addressable and target.is_fully_addressable and not pending


@own_programs()
def move_staged(moves: Sequence[ArrayMove], *, donate: bool = False) -> list[jax.Array]:
    """Move arrays one at a time via the host; PRNG keys move as usual.

    Args:
      moves: accepted by `why_not_staged`.
      donate: free each source before its new shards are made; repeated ones at the end.
    """
    moved = [unmoved(each) for each in moves]
    kept = {id(each.array) for each, done in zip(moves, moved, strict=True) if done is not None}
    uses = Counter(id(each.array) for each in moves)
    for index, each in enumerate(moves):
        if moved[index] is not None:
            continue
        if is_key(each.array):
            (moved[index],) = move([each])
        else:
            frees = donate and uses[id(each.array)] == 1 and id(each.array) not in kept
            moved[index] = _staged(each, frees=frees)
    if donate:
        give_up(moves, kept)
    return [array for array in moved if array is not None]


def _staged(each: ArrayMove, *, frees: bool) -> jax.Array:
    array, target = each.array, each.target
    plan = None if by_host_alone(array.sharding, target) else each.plan
    with jax.transfer_guard("allow"):
        held = _fetched(array, each_by_itself=plan is not None and bool(plan.source.partial))
        if frees:
            array.delete()
        if plan is None:
            own = _put_together(array, held, target)
        else:
            held = _exchanged(array, held, plan, target) if plan.steps else held
            own = _upload([*held.values()], [*held])
    moved = jax.make_array_from_single_device_arrays(array.shape, target, own, dtype=array.dtype)
    return as_weak_as(moved, array)


def _fetched(array: jax.Array, *, each_by_itself: bool) -> Shards:
    """Copy the shards of this process's devices to the host; replicas share one host array."""
    copies: dict[Any, HostArray] = {}
    held: Shards = {}
    for shard in array.addressable_shards:
        key = shard.device if each_by_itself else _index(shard.index, array.shape)
        if key not in copies:  # on CPU a view would keep the device's memory alive
            copies[key] = np.array(shard.data, order="C", copy=True)
        held[shard.device] = copies[key]
    return held


def _index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    bounds = (piece.indices(size) for piece, size in zip(index, shape, strict=True))
    return tuple((begin, end) for begin, end, _ in bounds)


def _put_together(array: jax.Array, held: Shards, target: NamedSharding) -> list[jax.Array]:
    """Assemble the new shards from the old ones on the host, one distinct box at a time."""
    placed = array.sharding.addressable_devices_indices_map(array.shape)
    pieces = {_index(placed[device], array.shape): shard for device, shard in held.items()}
    owners: dict[Index, list[jax.Device]] = {}
    wanted = target.addressable_devices_indices_map(array.shape)
    for device, index in wanted.items():
        owners.setdefault(_index(index, array.shape), []).append(device)
    shards: dict[jax.Device, jax.Array] = {}
    for box, devices in owners.items():
        whole = np.empty([end - begin for begin, end in box], array.dtype)
        for index, piece in pieces.items():
            _copy_common(piece, index, whole, box)
        shards.update(zip(devices, _upload([whole] * len(devices), devices), strict=True))
    return [shards[device] for device in wanted]


def _copy_common(piece: HostArray, index: Index, whole: HostArray, box: Index) -> None:
    """Copy the intersection of two boxes."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(index, box, strict=True)]
    if all(begin < end for begin, end in common):
        there, here = (
            tuple(
                slice(b - first, e - first)
                for (b, e), (first, _) in zip(common, outer, strict=True)
            )
            for outer in (box, index)
        )
        whole[there] = piece[here]


def _exchanged(array: jax.Array, held: Shards, plan: Transfer, target: NamedSharding) -> Shards:
    """Return the new shards of this process's devices on its host, exchanged chunk by chunk."""
    dtype = array.dtype
    if must_be_words(array) and not plan.source.partial:
        dtype = np.dtype(f"u{dtype.itemsize}")
    held = {device: shard.view(dtype) for device, shard in held.items()}
    distinct: dict[Index, HostArray] = {}
    wanted: Shards = {}
    for device, index in target.addressable_devices_indices_map(array.shape).items():
        box = _index(index, array.shape)
        if box not in distinct:
            distinct[box] = np.empty([end - begin for begin, end in box], dtype)
        wanted[device] = distinct[box]
    staging = staging_of(plan)
    for places in staging.boxes():
        part = plan_of_chunk(plan, staging.shape_of(places))
        tile = shard_of(part.source, part.shape)
        chunk = [
            np.array(staging.view(shard, plan.source, places), order="C").reshape(tile)
            for shard in held.values()
        ]
        moved = _moved_part(chunk, devices=[*held], placed=array.sharding, part=part, target=target)
        for shard in moved.addressable_shards:
            there = staging.view(wanted[shard.device], plan.target, places)
            there[...] = np.asarray(shard.data).reshape(there.shape)
        moved.delete()
    return {device: shard.view(array.dtype) for device, shard in wanted.items()}


def _moved_part(
    chunk: list[HostArray],
    devices: list[jax.Device],
    placed: jax.sharding.Sharding,
    part: Transfer,
    target: NamedSharding,
) -> jax.Array:
    """Return a chunk in its new layout; none of the old one is left on the devices."""
    own = upload(chunk, devices)
    array = jax.make_array_from_single_device_arrays(part.shape, placed, own)
    with on_row(()):
        moved = move_as_planned(array, part, target)
    jax.block_until_ready(moved)
    array.delete()
    return moved


def _upload(shards: Sequence[HostArray], devices: Sequence[jax.Device]) -> list[jax.Array]:
    own = upload(shards, devices)
    jax.block_until_ready(own)
    return own
