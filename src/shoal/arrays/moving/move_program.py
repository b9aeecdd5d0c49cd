"""Compile the steps of a planned move.

Consecutive steps over one mesh of digits form one `shard_map`. Where one mesh follows another that
expresses the same placement in other digits, the array is passed as *blocks*: an array whose first
dim joins the devices' shards, in order. Nothing moves for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shoal.arrays.bridge.devices import jax_mesh
from shoal.plan.layout import Dim, Layout, shard_of
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.blocks import Copies, exchange_copies
from shoal.plan.transfer.move_steps import Step, chunks_of, pairs
from shoal.plan.transfer.same_devices import in_one_order

AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
OnShard = Callable[[jax.Array], jax.Array]  # maps one device's shard


class DigitStage(NamedTuple):
    """Steps over one mesh of digits."""

    run: Callable[[jax.Array], jax.Array]
    takes: NamedSharding
    gives: NamedSharding


def stages(
    steps: Sequence[Step],
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    item_bytes: int,
    devices: Sequence[jax.Device] | None = None,
) -> list[DigitStage]:
    """Return the stages of a move.

    The first takes the array as is, or as blocks if its devices are in another order or it has
    pending sums; likewise the last returns it. Between stages there are blocks.

    Args:
      steps: as returned by `transfer.collective.shortest` for the layouts and the shape.
      item_bytes: size of an element: arrays larger than a chunk are moved in chunks.
      devices: the devices to search for the meshes'; None: those of this job.
    """
    runs = [list(own) for _, own in groupby(steps, key=lambda step: step.before.mesh)]
    built = []
    for run in runs:
        mesh = run[0].before.mesh
        is_begin = run is runs[0] and in_one_order(mesh, source.mesh)
        begin = run[0].before if is_begin else None
        last = run[-1].after
        is_end = run is runs[-1] and last.mesh == mesh and in_one_order(mesh, target.mesh)
        takes = _sharding(mesh, begin, len(shape), devices)
        gives = _sharding(mesh, last if is_end else None, len(shape), devices)
        local = _by_chunks(run, shape, item_bytes)
        mapped = jax.shard_map(
            local,
            mesh=takes.mesh,
            in_specs=takes.spec,
            out_specs=gives.spec,
            check_vma=False,
        )
        built.append(DigitStage(_on_its_mesh(mapped), takes, gives))
    return built


def _on_its_mesh(mapped: OnShard) -> OnShard:
    """Return a function of a mesh of digits, which is none of a `jax.set_mesh` around it."""

    @wraps(mapped)
    def run(x: jax.Array) -> jax.Array:
        here = jax.sharding.get_abstract_mesh()
        if here.empty or AxisType.Manual in here.axis_types:
            return mapped(x)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return mapped(x)

    return run


def inside_jit(
    digit_stages: Sequence[DigitStage], source: NamedSharding, target: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """Return stages as part of a program traced by `jit`: the devices have one order."""

    def run(x: jax.Array) -> jax.Array:
        current = source
        for stage in digit_stages:
            x = stage.run(_under_axes_of(x, current, stage.takes))
            current = stage.gives
        return _under_axes_of(x, current, target)

    return run


def _under_axes_of(x: jax.Array, current: NamedSharding, wanted: NamedSharding) -> jax.Array:
    """Return the same shards under the axes of another mesh, via blocks."""
    if current == wanted:
        return x
    x = _in_terms_of(current.mesh, x, current.spec, _blocks(current.mesh))
    return _in_terms_of(wanted.mesh, x, _blocks(wanted.mesh), wanted.spec)


def _blocks(mesh: AnyMesh) -> PartitionSpec:
    return PartitionSpec(mesh.axis_names)


def _in_terms_of(
    mesh: AnyMesh, x: jax.Array, given: PartitionSpec, wanted: PartitionSpec
) -> jax.Array:
    """Return the array of the same shards under another spec."""
    same = jax.shard_map(
        lambda shard: shard, mesh=mesh, in_specs=given, out_specs=wanted, check_vma=False
    )
    return _on_its_mesh(same)(x)


def _sharding(
    mesh: Mesh, layout: Layout | None, rank: int, devices: Sequence[jax.Device] | None
) -> NamedSharding:
    """Return the sharding of a layout of digits, or of blocks."""
    dims: tuple[Dim, ...] = (mesh.axis_names, *[None] * (rank - 1))
    if layout is not None and not layout.partial:
        dims = layout.dims
    return NamedSharding(jax_mesh(mesh, devices=devices), PartitionSpec(*dims))


def _by_chunks(run: Sequence[Step], shape: Sequence[int], item_bytes: int) -> OnShard:
    """Return a device's function, applied in chunks if its shard is large.

    Temporary memory of a program is then a few pieces, whatever the size of the array.
    """
    chunks = chunks_of(run, shape, item_bytes)
    if chunks is None:
        return _in_order([_on_shard(step, shape) for step in run])
    before, after = run[0].before, run[-1].after
    dim, tile = chunks.dim, shard_of(after, shape)
    keep_order = _row_major if before.mesh.kind == "tpu" else _in_order([])
    tiles_before, tiles_after = (chunks.tiles // end.num_shards(dim) for end in (before, after))

    def move_chunk(x: jax.Array, new_shard: jax.Array, first: Any, width: int) -> jax.Array:
        """Return the new shard with a chunk of the old one written into it."""
        part = (*shape[:dim], chunks.tiles * width, *shape[dim + 1 :])
        rows = jax.lax.dynamic_slice_in_dim(x, first, width, dim + (tiles_before > 1))
        steps = _in_order([_on_shard(step, part) for step in run])
        moved = steps(keep_order(rows).reshape(shard_of(before, part)))
        moved = keep_order(_rows(moved, dim, tiles_after))
        return jax.lax.dynamic_update_slice_in_dim(new_shard, moved, first, dim + (tiles_after > 1))

    def loop(x: jax.Array) -> jax.Array:
        x = _rows(x, dim, tiles_before)
        new_shard = _rows(jax.lax.empty(tile, x.dtype), dim, tiles_after)
        width, parts = chunks.width, chunks.parts
        if chunks.rest:  # before the loop: XLA would copy its result to update it
            new_shard = move_chunk(x, new_shard, parts * width, chunks.rest)
        new_shard = jax.lax.fori_loop(
            0, parts, lambda n, new_shard: move_chunk(x, new_shard, n * width, width), new_shard
        )
        return new_shard.reshape(tile)

    return loop


def _row_major(x: jax.Array) -> jax.Array:
    """Constrain an array to the default memory layout.

    Where shards are cut or joined along the last dim, XLA's TPU compiler makes that dim the
    slowest, also in the arrays from which the chunk is cut and to which it is written, and
    transposes the whole array before or after.
    """
    return with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))


def _rows(x: jax.Array, dim: int, tiles: int) -> jax.Array:
    """Return an array with an extra dim for the tiles that every chunk has a part of.

    A single tile stays as is: XLA may give a dim of size 1 a stride for which it copies everything.
    """
    if tiles == 1:
        return x
    return x.reshape(*x.shape[:dim], tiles, x.shape[dim] // tiles, *x.shape[dim + 1 :])


def _in_order(functions: Sequence[OnShard]) -> OnShard:
    def run(x: jax.Array) -> jax.Array:
        for function in functions:
            x = function(x)
        return x

    return run


def _on_shard(step: Step, shape: Sequence[int]) -> OnShard:
    """Return the function of a device's shard."""
    names = step.before.mesh.axis_names
    if step.kind == "permute":
        return lambda x: jax.lax.ppermute(x, names, _with_self_sends(step))
    if step.kind == "exchange":
        return _exchange(step, shape)
    size = int(np.prod([step.before.mesh.axes[axis] for axis in step.axes]))
    dim: Any = step.dim
    kinds: dict[str, OnShard] = {
        "slice": lambda x: _own_slice(x, step.axes, size, dim),
        "all_gather": lambda x: _gathered(x, step),
        "all_to_all": lambda x: _cut_and_joined(x, step, size),
        "reduce_scatter": lambda x: _summed_and_cut(x, step, size),
        "all_reduce": lambda x: jax.lax.psum(x, step.axes),
    }
    return kinds[step.kind]


def _gathered(x: jax.Array, step: Step) -> jax.Array:
    """Gather the shards of a group and join them along a dim.

    They are gathered into a new leading dim first. When joining in place, XLA's compilers for
    CPU and GPU make that dim the slowest, element by element, and transpose the whole back; for TPU
    they do not, and there the extra dim would need padding.
    """
    dim: Any = step.dim
    if step.before.mesh.kind == "tpu":
        return jax.lax.all_gather(x, step.axes, axis=dim, tiled=True)
    return _merged(jax.lax.all_gather(x, step.axes, axis=dim), dim)


def _cut_and_joined(x: jax.Array, step: Step, size: int) -> jax.Array:
    """All-to-all: a shard cut along one dim and joined along another, as in `_gathered`."""
    dim: Any = step.dim
    cut: Any = step.to_dim
    if step.before.mesh.kind == "tpu":
        return jax.lax.all_to_all(x, step.axes, cut, dim, tiled=True)
    parts = x.reshape(*x.shape[:cut], size, x.shape[cut] // size, *x.shape[cut + 1 :])
    return _merged(jax.lax.all_to_all(parts, step.axes, cut, dim), dim)


def _summed_and_cut(x: jax.Array, step: Step, size: int) -> jax.Array:
    """Reduce-scatter: the sum of a group's shards, of which each device keeps a part.

    Between CPU devices gloo's own is wrong in silence: at the end of the part of a group's first
    device, if the part has some MiB and its sender is late (jax-ml/jax#40830). There the parts are
    exchanged, as many bytes, and each device adds up those that it keeps.
    """
    dim: Any = step.dim
    if step.before.mesh.kind != "cpu":
        return jax.lax.psum_scatter(x, step.axes, scatter_dimension=dim, tiled=True)
    parts = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return jax.lax.all_to_all(parts, step.axes, dim, dim).sum(dim, dtype=x.dtype)


def _merged(x: jax.Array, dim: int) -> jax.Array:
    """Merge a dim with the next one."""
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def _own_slice(x: jax.Array, axes: tuple[str, ...], size: int, dim: int) -> jax.Array:
    length = x.shape[dim] // size
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * length, length, dim)


def _with_self_sends(step: Step) -> list[tuple[int, int]]:
    """Return the permutation; devices that keep their shard send to themselves."""
    moved = pairs(step.before, step.after)
    receivers = {receiver for _, receiver in moved}
    kept = [(d, d) for d in range(step.before.mesh.size) if d not in receivers]
    return [*moved, *kept]


def _exchange(step: Step, shape: Sequence[int]) -> OnShard:
    """Return the writes of an exchange: each a block of the new tile, received or kept."""
    names = step.before.mesh.axis_names
    counts = [
        (step.before.num_shards(dim), step.after.num_shards(dim)) for dim in range(len(shape))
    ]
    side = tuple(size // max(pair) for size, pair in zip(shape, counts, strict=True))
    tile = shard_of(step.after, shape)
    rounds = exchange_copies(step.before, step.after)

    def run(x: jax.Array) -> jax.Array:
        place = jax.lax.axis_index(names)
        blocks = [_block(x, each, names, place, side) for each in rounds]
        if len(blocks) == 1 and side == tile:
            return blocks[0]
        fills = len(blocks) == 2 and 2 * np.prod(side) == np.prod(tile)
        if fills and all(map(_all_receive, rounds)):
            return _halves(blocks, np.stack([each.writes for each in rounds]), place)
        shard = jax.lax.empty(tile, x.dtype)
        for block, each in zip(blocks, rounds, strict=True):
            start = _at(each.writes, place, side)
            if each.idle.any():
                there = jax.lax.dynamic_slice(shard, start, side)
                block = jnp.where(jnp.asarray(each.idle)[place], there, block)
            shard = jax.lax.dynamic_update_slice(shard, block, start)
        return shard

    return run


def _halves(
    blocks: Sequence[jax.Array], places: np.ndarray[Any, Any], position: jax.Array
) -> jax.Array:
    """Return a tile of two blocks, in a different order on each device.

    Written once; an empty tile would first be zeroed. Both blocks were received: any other block
    would be cut out of the old tile again by XLA's CPU compiler, slowly, for each item.

    Args:
      places: index of each block, 0 or 1, along the dim that has two [block, devices, rank].
      position: that of this device in its mesh.
    """
    dim = int(np.argmax(places.any(axis=(0, 1))))
    swapped = places[0, :, dim] == 1
    if swapped.all() or not swapped.any():
        return jnp.concatenate(blocks[::-1] if swapped.all() else blocks, dim)
    is_swapped = jnp.asarray(swapped)[position]
    ends = [jax.lax.select_n(is_swapped, *pair) for pair in (blocks, blocks[::-1])]
    return jnp.concatenate(ends, dim)


def _block(
    x: jax.Array, each: Copies, names: tuple[str, ...], place: jax.Array, side: tuple[int, ...]
) -> jax.Array:
    """Return the block that a device writes in a round.

    A device that keeps one sends it to itself, unless it sends another.
    """

    def cut(blocks: np.ndarray[Any, Any]) -> jax.Array:
        return jax.lax.dynamic_slice(x, _at(blocks, place, side), side)

    if not each.sends:
        return cut(each.keeps)
    if _all_receive(each):
        reads = np.where(each.receives[:, None], each.reads, each.keeps)
        to_itself = [(device, device) for device in np.flatnonzero(~each.receives).tolist()]
        return jax.lax.ppermute(cut(reads), names, [*each.sends, *to_itself])
    sent = jax.lax.ppermute(cut(each.reads), names, each.sends)
    return jnp.where(jnp.asarray(each.receives)[place], sent, cut(each.keeps))


def _all_receive(each: Copies) -> bool:
    """Does each device receive a block in this round, perhaps from itself?"""
    senders = [sender for sender, _ in each.sends]
    return bool(senders) and bool(each.receives[senders].all())


def _at(blocks: np.ndarray[Any, Any], place: jax.Array, side: tuple[int, ...]) -> list[jax.Array]:
    """Return the start index of a device's block in each dim."""
    if (blocks == blocks[0]).all():
        return [jnp.int32(first) for first in blocks[0] * np.array(side)]
    table = jnp.asarray((blocks * np.array(side)).astype(np.int32))
    return list(table[place])
