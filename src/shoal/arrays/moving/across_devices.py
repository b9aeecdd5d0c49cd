"""Move an array to a layout on other devices, by permutes among the devices of both layouts.

One program runs on a row of all these devices: every device supplies a shard of the source and
receives one of the target; if it has none in one of the layouts, a dummy buffer. A large array goes
in parts, one after the other, so that dummies stay small: two more programs cut a part out of the
source, and write it into the target.

    source row     cut:   shard → part of it
    both           send:  part of the source → part of the target
    target row     place: part of it → shard
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.host.host_values import is_key
from shoal.arrays.moving.planned_move import ArrayMove
from shoal.arrays.moving.whole_words import (
    as_words,
    bits_as,
    in_words,
    is_narrow_float,
    may_change,
    word_of,
)
from shoal.errors import UsageError
from shoal.plan.layout import Layout, shard_of
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.move_steps import ChunkCut, Step, chunks_of
from shoal.plan.transfer.permutes import Permute, Permutes, permutes_of
from shoal.plan.transfer.plan import Transfer, plan_of_chunk, plan_transfer

_DEVICE = "device"  # axis name of a row

Held = Mapping[jax.Device, jax.Array]
OnShard = Callable[..., jax.Array]


def is_across(source: Sharding, target: Sharding) -> bool:
    """Do the devices differ, and belong to several processes? JAX cannot move such arrays."""
    here, there = source.device_set, target.device_set
    return here != there and _are_of_several_processes(here | there)


def is_apart(source: Sharding, target: Sharding, *, programs: bool) -> bool:
    """Does `move_across` apply: between processes, or wherever programs are requested?"""
    return source.device_set != target.device_set if programs else is_across(source, target)


def _are_of_several_processes(devices: Iterable[jax.Device]) -> bool:
    return len({device.process_index for device in devices}) > 1


class Programs(NamedTuple):
    """The programs of a move. Each maps rows to rows: arrays whose first dim joins the shards."""

    send: Any
    row: NamedSharding  # of the devices of both layouts
    parts: int  # number of repetitions
    cut: Any  # (row of the source, number of the part)
    place: Any  # (row of the target, row of its part, number of the part)
    takes: tuple[int, ...]  # shape of a device's input to `send`
    gives: tuple[int, ...]  # shape of its output
    source: NamedSharding  # the devices of the source alone
    target: NamedSharding


def move_across(each: ArrayMove) -> jax.Array:
    """Return the array in its new layout. Collective over the owners of both layouts' devices.

    Args:
      each: to devices of the same kind, of an array without pending reductions.
    """
    array, target = each.array, each.target
    if is_key(array):
        data = jax.random.key_data(array)
        key_words = move_across(ArrayMove(data, data, target))
        return jax.random.wrap_key_data(key_words, impl=jax.random.key_impl(array))
    whole, dtype = array.shape, array.dtype
    by_host = travels_as(dtype, array.sharding) != dtype
    if by_host:
        array = as_words(array)
    if array.size:
        if each.plan is None:
            raise UsageError(each.why_not_planned)
        held = {d: data if whole else data.reshape(1) for d, data in _held(array).items()}
        shards = _moved(as_rows(each.plan), held, array.dtype)
    else:
        shards = _blanks(target.shard_shape(whole), array.dtype, _own(target))
    own = [shards[device] if whole else shards[device].reshape(()) for device in _own(target)]
    moved = jax.make_array_from_single_device_arrays(whole, target, own, dtype=array.dtype)
    return bits_as(moved, dtype) if by_host else moved


def travels_as(dtype: Any, source: Sharding) -> np.dtype[Any]:
    """Return the dtype that the programs see; they convert narrow floats of whole bytes.

    >>> travels_as(np.float32, SingleDeviceSharding(jax.devices()[0]))
    dtype('float32')
    """
    dtype = np.dtype(dtype)
    on_cpu = any(device.platform == "cpu" for device in source.device_set)
    if on_cpu and may_change(dtype) and not is_narrow_float(dtype):
        return word_of(dtype)
    return dtype


def as_rows(plan: Transfer) -> Transfer:
    """Return a plan of arrays of rank 1 or more: a scalar becomes an array of one item."""
    if plan.shape:
        return plan
    source, target = (Layout(layout.mesh, None) for layout in (plan.source, plan.target))
    return plan_transfer(source, target, (1,), plan.item_bytes)


def _moved(plan: Transfer, held: Held, dtype: Any) -> Held:
    """Return the final shards of this process's devices."""
    run = programs_across(plan, dtype)
    if run.parts == 1:
        return _sent(run, held, dtype)
    old = _as_row(held, run.source, shard_of(plan.source, plan.shape), dtype)
    shape, receivers = shard_of(plan.target, plan.shape), _own(run.target)
    new = _as_row(_blanks(shape, dtype, receivers), run.target, shape, dtype)
    for part_index in range(run.parts):
        # All run `send`; only processes that hold parts run `cut`, only receivers `place`.
        with jax.transfer_guard("allow"):  # the part's number is transferred to the devices
            part = _held(run.cut(old, np.int32(part_index))) if held else {}
            sent = _sent(run, part, dtype)
            if receivers:
                received = _as_row(sent, run.target, run.gives, dtype)
                new = run.place(new, received, np.int32(part_index))
        jax.block_until_ready([*sent.values(), new])  # otherwise parts would pile up
    return _held(new)


def _sent(run: Programs, held: Held, dtype: Any) -> Held:
    """Run `send` on the devices' buffers; a device without one supplies a dummy."""
    blanks = _blanks(run.takes, dtype, [device for device in _own(run.row) if device not in held])
    return _held(run.send(_as_row({**held, **blanks}, run.row, run.takes, dtype)))


@lru_cache(maxsize=1024)
def programs_across(
    plan: Transfer, dtype: Any, devices: tuple[jax.Device, ...] | None = None
) -> Programs:
    """Return the programs of a move, compiled on first use.

    Args:
      plan: between layouts that cut every dim evenly; of rank 1 or more.
      dtype: narrow floats are moved as integers of the same bits: XLA changes NaN payloads.
      devices: the devices to search for the meshes'; None: those of this job.
    """
    source, target = plan.source, plan.target
    chunks = _chunks(plan)
    sizes = list(plan.shape)
    if chunks is not None:
        sizes[chunks.dim] //= chunks.parts
    part = plan_of_chunk(plan, tuple(sizes))
    takes, gives = shard_of(source, part.shape), shard_of(target, part.shape)
    if part.sends is None:
        raise UsageError(f"programs_across: {plan!r} is between the same devices: it has no sends")
    moves = permutes_of(part.sends, source, target, part.shape)
    owner_of = {**_owners(source.mesh), **_owners(target.mesh)}
    row = _row({device: owner_of[device] for device in moves.devices}, source.mesh.kind, devices)
    before, after = (_row(_owners(end.mesh), end.mesh.kind, devices) for end in (source, target))
    send = _program(partial(_send, moves=moves, tile=gives), row, dtype)
    if chunks is None:
        return Programs(
            send, row, parts=1, cut=None, place=None, takes=takes, gives=gives,
            source=before, target=after,
        )  # fmt: skip
    old, new = (chunks.tiles // layout.num_shards(chunks.dim) for layout in (source, target))
    cut = partial(_cut, dim=chunks.dim, tiles=old, shape=takes)
    place = partial(_place, dim=chunks.dim, tiles=new)
    return Programs(
        send, row, chunks.parts, takes=takes, gives=gives, source=before, target=after,
        cut=_program(cut, before, dtype, numbers=1),
        place=_program(place, after, dtype, arrays=2, numbers=1, donated=(0,)),
    )  # fmt: skip


def _chunks(plan: Transfer) -> ChunkCut | None:
    """Return the parts of a large array."""
    whole = Step(
        kind="exchange", axes=(), dim=None, to_dim=None, before=plan.source, after=plan.target
    )
    return chunks_of([whole], plan.shape, plan.item_bytes)


def _program(
    run: Callable[..., jax.Array],
    row: NamedSharding,
    dtype: Any,
    *,
    arrays: int = 1,
    numbers: int = 0,
    donated: tuple[int, ...] = (),
) -> Any:
    """Return the program of every device of a row, as a function of rows and of equal numbers."""
    everywhere = NamedSharding(row.mesh, PartitionSpec())
    takes = (*[row] * arrays, *[everywhere] * numbers)
    mapped = jax.shard_map(
        run,
        mesh=row.mesh,
        in_specs=tuple(each.spec for each in takes),
        out_specs=row.spec,
        check_vma=False,
    )
    return jax.jit(
        in_words(mapped) if is_narrow_float(dtype) else mapped,
        in_shardings=takes,
        out_shardings=row,
        donate_argnums=donated,
    )


def _send(x: jax.Array, *, moves: Permutes, tile: tuple[int, ...]) -> jax.Array:
    """Return a device's shard of the target, block by block."""
    here = jax.lax.axis_index(_DEVICE)
    shard = jax.lax.empty(tile, x.dtype)
    for each in moves.rounds:
        start = _at(each.writes, here)
        block = _block(x, shard, each, here, moves.side)
        if each.is_idle.any():
            there = jax.lax.dynamic_slice(shard, start, moves.side)
            block = jnp.where(jnp.asarray(each.is_idle)[here], there, block)
        shard = jax.lax.dynamic_update_slice(shard, block, start)
    return shard


def _block(
    x: jax.Array, shard_so_far: jax.Array, each: Permute, here: jax.Array, side: tuple[int, ...]
) -> jax.Array:
    """Return the block that a device writes in a round."""

    def cut(shard: jax.Array, places: np.ndarray[Any, Any]) -> jax.Array:
        return jax.lax.dynamic_slice(shard, _at(places, here), side)

    if not each.sends:
        return cut(x, each.keeps)
    block = cut(x, each.reads)
    if each.passes_on.any():
        block = jnp.where(jnp.asarray(each.passes_on)[here], cut(shard_so_far, each.reads), block)
    sent = jax.lax.ppermute(block, _DEVICE, each.sends)
    if not each.copies.any():
        return sent
    return jnp.where(jnp.asarray(each.copies)[here], cut(x, each.keeps), sent)


def _at(places: np.ndarray[Any, Any], here: jax.Array) -> list[jax.Array]:
    """Return a device's index along each dim."""
    if (places == places[0]).all():
        return [jnp.int32(first) for first in places[0]]
    return list(jnp.asarray(places.astype(np.int32))[here])


def _cut(
    x: jax.Array, part_index: jax.Array, *, dim: int, tiles: int, shape: tuple[int, ...]
) -> jax.Array:
    """Return a part of a shard: a run of items of each tile along a dim (see `chunks`)."""
    rows = _rows(x, dim, tiles)
    width = shape[dim] // tiles
    return jax.lax.dynamic_slice_in_dim(rows, part_index * width, width, dim + 1).reshape(shape)


def _place(
    shard: jax.Array, part: jax.Array, part_index: jax.Array, *, dim: int, tiles: int
) -> jax.Array:
    """Return a shard with a part written into it: the inverse of `_cut`."""
    own = _rows(part, dim, tiles)
    first = part_index * own.shape[dim + 1]
    rows = jax.lax.dynamic_update_slice_in_dim(_rows(shard, dim, tiles), own, first, dim + 1)
    return rows.reshape(shard.shape)


def _rows(x: jax.Array, dim: int, tiles: int) -> jax.Array:
    """Return an array with an extra dim for the tiles that every part has items of."""
    return x.reshape(*x.shape[:dim], tiles, x.shape[dim] // tiles, *x.shape[dim + 1 :])


@lru_cache(maxsize=256)
def _owners(mesh: Mesh) -> Mapping[int, int]:
    """Return device id → process, in mesh order."""
    return dict(zip(mesh.device_ids.ravel().tolist(), mesh.processes.ravel().tolist(), strict=True))


def _row(
    owners: Mapping[int, int], kind: str, devices: tuple[jax.Device, ...] | None
) -> NamedSharding:
    mesh = Mesh(
        {_DEVICE: len(owners)}, device_ids=[*owners], processes=[*owners.values()], kind=kind
    )
    return NamedSharding(jax_mesh(mesh, devices=devices), PartitionSpec(_DEVICE))


def _own(sharding: NamedSharding) -> list[jax.Device]:
    """Return this process's devices, in mesh order."""
    own = sharding.addressable_devices
    return [device for device in sharding.mesh.devices.flat if device in own]


def _held(array: jax.Array) -> Held:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _as_row(held: Held, row: NamedSharding, shard: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return the buffers of a row's devices as one array."""
    shape = (shard[0] * row.mesh.size, *shard[1:])
    own = [held[device] for device in _own(row)]
    return jax.make_array_from_single_device_arrays(shape, row, own, dtype=dtype)


def _blanks(shape: tuple[int, ...], dtype: Any, devices: Sequence[jax.Device]) -> Held:
    """Return dummy buffers."""
    return {device: _blank(shape, np.dtype(dtype), device)() for device in devices}


@lru_cache(maxsize=1024)
def _blank(
    shape: tuple[int, ...], dtype: np.dtype[Any], device: jax.Device
) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jax.lax.empty(shape, dtype), out_shardings=SingleDeviceSharding(device))
