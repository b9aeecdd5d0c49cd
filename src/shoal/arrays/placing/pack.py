"""Per-device pieces ⇄ one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.leaf_layouts import Layouts, Leaf, leaf_layouts, path_text
from shoal.arrays.bridge.sharding import layout_of_sharding
from shoal.arrays.host.host_values import as_numpy, deleted, device_form, warn_of_narrowing
from shoal.arrays.host.record_call import lane_problems, record_call
from shoal.arrays.host.upload import refuse_inside_jit, upload
from shoal.arrays.placing.put import dtype_problems
from shoal.colour import local, logically_collective
from shoal.errors import UsageError, UsageTypeError, counted, raise_all, with_article
from shoal.plan.layout import Layout
from shoal.plan.mesh import coords_of


@logically_collective("shapes and dtypes of pieces, and layouts,")
def pack(
    pieces: Sequence[Any], layouts: Layouts, *, like: Any = None, lane: str | None = None
) -> Any:
    """Assemble one array from one piece per device.

    Logically collective: shapes and dtypes of pieces, and layouts, must be equal.

    Nothing is sent. A piece already on its device is not copied. If replicas in this process are
    passed as host values, their bits are compared (so that NaN equals NaN), and a difference is an
    error. Pieces on devices, and those of other processes, are not compared. Equality of shapes,
    dtypes and layouts on all processes is checked at the next collective call, as for `put`.

    Args:
      pieces: one piece for each device of the mesh that this process owns, in mesh order: a host
        value, a jax.Array on one device, or a tree of these. All have the shape of a shard.
      layouts: the layout of the result, or a prefix tree of them, as for `put`. Along an axis with
        a pending sum the pieces are the terms.
      like: one piece, as `jax.ShapeDtypeStruct`s; needed only where this process owns no device.
      lane: the lane, as for `put`.

    Returns:
      The array, or the tree of arrays, whose shards are the pieces.

    Raises:
      UsageError: too few or too many pieces, shapes, dtypes or trees that differ, replicas that
        differ; all offending pieces are named.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> x = shoal.compat.pack([np.full(2, i) for i in np.arange(mesh.size, dtype="f4")],
      ...                NamedSharding(mesh, P("x")))
      >>> x.shape == (2 * mesh.size,)
      True
    """
    if not isinstance(pieces, list | tuple):
        raise UsageTypeError(
            f"pack: the pieces must be a list, not {with_article(type(pieces).__name__)}"
        )
    if not pieces and like is None:
        raise UsageError(_nothing(layouts))
    problems = _structure_problems(pieces) + lane_problems(lane)
    raise_all("pack", problems)
    first = pieces[0] if pieces else like
    leaves, treedef = leaf_layouts(first, layouts, problems)
    columns = list(zip(*(jax.tree.leaves(piece) for piece in pieces), strict=True))
    columns = columns or [()] * treedef.num_leaves
    for leaf, column in zip(leaves, columns if len(leaves) == len(columns) else [], strict=False):
        problems += _problems(leaf, column)
    raise_all("pack", problems)
    refuse_inside_jit()
    warn_of_narrowing("pack", ((leaf.path, leaf.value) for leaf in leaves))
    record_call("pack", leaves, lane=lane)
    packed = [_pack(leaf, column) for leaf, column in zip(leaves, columns, strict=True)]
    return jax.tree.unflatten(treedef, packed)


@local
def unpack(tree: Any) -> list[Any]:
    """Return the pieces of an array held by this process's devices, in mesh order.

    Local.

    Nothing is copied: a piece is the buffer that its device holds, so that donating or deleting
    the array gives up its pieces, too.

    Args:
      tree: an array, or a tree of arrays on the same number of this process's devices.

    Returns:
      For each device of the mesh that this process owns, a jax.Array on that device, or a tree of
      them; an empty list where it owns none.

    Raises:
      UsageError: leaves that are not arrays, or are on different numbers of devices.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> x = shoal.put(np.arange(2.0 * mesh.size, dtype="f4"), NamedSharding(mesh, P("x")))
      >>> shoal.compat.unpack(x)[0]
      Array([0., 1.], dtype=float32)
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    raise_all(
        "unpack",
        [
            f"{path_text(path)}: {with_article(type(value).__name__)} has no pieces; "
            "pass arrays on devices"
            for path, value in paths
            if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer)
        ],
        wrong_type=True,
    )
    raise_all("unpack", [f"{path_text(path)}: {why}" for path, v in paths if (why := deleted(v))])
    columns = [_unpack(value) for _, value in paths]
    counts = {len(column) for column in columns}
    if len(counts) > 1:
        listed = ", ".join(
            f"{path_text(path)} on {len(column)}"
            for (path, _), column in zip(paths, columns, strict=True)
        )
        raise UsageError(f"unpack: the arrays are on different numbers of devices: {listed}")
    return [jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True)]


def _nothing(layouts: Layouts) -> str:
    """Return the error message for an empty list of pieces."""
    meshes = {leaf.mesh for leaf in jax.tree.leaves(layouts) if isinstance(leaf, Layout)}
    counts = {len(_positions(Layout(mesh))) for mesh in meshes}
    if counts == {0}:
        return (
            "pack: no pieces, and this process owns no device here: describe a piece, "
            "like=jax.ShapeDtypeStruct(shape, dtype)"
        )
    devices = f"the {counts.pop()} devices" if len(counts) == 1 else "each device"
    return f"pack: no pieces for {devices} that this process owns; pass one for each"


def _structure_problems(pieces: Sequence[Any]) -> list[str]:
    """Name pieces whose tree differs from the first, and values that are not arrays."""
    structures = [jax.tree.structure(piece) for piece in pieces]
    problems = [
        f"piece {index} is the tree {structure}, piece 0 is {structures[0]}"
        for index, structure in enumerate(structures)
        if structure != structures[0]
    ]
    for index, piece in enumerate(pieces):
        problems += dtype_problems(
            (f"piece {index}{jax.tree_util.keystr(path)}", value)
            for path, value in jax.tree_util.tree_flatten_with_path(piece)[0]
        )
    return problems


def _positions(layout: Layout) -> list[tuple[int, jax.Device]]:
    """Return position and device of this process's devices, in mesh order."""
    devices = jax_mesh(layout.mesh).devices.ravel().tolist()
    own = jax.process_index()
    return [(n, device) for n, device in enumerate(devices) if device.process_index == own]


def _problems(leaf: Leaf, column: Sequence[Any]) -> list[str]:
    """Compare the pieces of one leaf with the devices and with each other."""
    positions = _positions(leaf.layout)
    if len(column) != len(positions):
        return [
            f"{leaf.path}: {counted(len(column), 'piece')} for the "
            f"{counted(len(positions), 'device')} that this process owns in {leaf.layout.mesh!r}"
        ]
    problems = []
    values = [v if isinstance(v, jax.Array) else device_form(as_numpy(v)) for v in column]
    for index, value in enumerate(values):
        facts, wanted = (value.shape, value.dtype), (values[0].shape, values[0].dtype)
        if facts != wanted:
            problems.append(
                f"{leaf.path}: piece {index} is {value.dtype}{list(value.shape)}, "
                f"piece 0 is {values[0].dtype}{list(values[0].shape)}"
            )
        if isinstance(value, jax.Array):
            why = _cannot_be_piece(value)
            if why:
                problems.append(f"{leaf.path}: piece {index} {why}")
    return problems or _unequal_replicas(leaf, values, [n for n, _ in positions])


def _cannot_be_piece(array: jax.Array) -> str:
    """Return why an array cannot be the buffer of one of this process's devices, or ""."""
    device, *others = array.sharding.device_set
    if others:
        return "is spread over several devices"
    if not array.is_fully_addressable:
        return f"is on a device of process {device.process_index}; pass one of your own"
    kind, usual = array.sharding.memory_kind, device.default_memory().kind
    if kind in (None, usual):
        return ""
    # Not `device_put` to the device: JAX fails where the array is on it already.
    there = f"jax.device_put(…, its .sharding.with_memory_kind({usual!r}))"
    return f"is in {kind} memory; shoal's arrays live in device memory: pass {there}"


def _unequal_replicas(leaf: Leaf, values: Sequence[Any], positions: Sequence[int]) -> list[str]:
    """Name the host pieces that should be replicas but differ, bit by bit."""
    layout = leaf.layout
    mesh = layout.mesh
    splitting = {axis for dim in layout.axes_of_dims for axis in dim} | set(layout.partial)
    firsts: dict[tuple[int, ...], int] = {}
    problems = []
    for index, (value, position) in enumerate(zip(values, positions, strict=True)):
        if isinstance(value, jax.Array):
            continue
        coords = zip(mesh.axis_names, coords_of(position, mesh.shape), strict=True)
        box = tuple(coord for axis, coord in coords if axis in splitting)
        first = firsts.setdefault(box, index)
        if not _same_bits(values[first], value):
            problems.append(
                f"{leaf.path}: pieces {first} and {index} are replicas in {layout!r}, "
                "but their values differ"
            )
    return problems


def _same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one is other or one.size == 0:
        return True
    first, second = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (one, other))
    return bool(np.array_equal(first, second))


def _pack(leaf: Leaf, column: Sequence[Any]) -> jax.Array:
    devices = [device for _, device in _positions(leaf.layout)]
    host = {
        n: device_form(as_numpy(v)) for n, v in enumerate(column) if not isinstance(v, jax.Array)
    }
    uploaded = upload([*host.values()], [devices[n] for n in host])
    jax.block_until_ready(uploaded)  # a transfer under way still reads the host array
    buffers = dict(zip(host, uploaded, strict=True))
    moved = [n for n in range(len(column)) if n not in host]
    placed = jax.device_put([column[n] for n in moved], [devices[n] for n in moved])
    buffers |= dict(zip(moved, placed, strict=True))
    piece = buffers[0] if buffers else leaf.value
    return jax.make_array_from_single_device_arrays(
        leaf.layout.global_shape(piece.shape),
        leaf.sharding,
        [buffers[index] for index in range(len(column))],
        dtype=piece.dtype,
    )


def _unpack(array: jax.Array) -> list[jax.Array]:
    layout = layout_of_sharding(array.sharding, array.ndim)
    held = {shard.device: shard.data for shard in array.addressable_shards}
    return [held[device] for _, device in _positions(layout)]
