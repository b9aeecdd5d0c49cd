"""Host values → sharded arrays, without a gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arrays.host_values import as_numpy, cannot_hold, is_key, narrowed, native
from shoal.arrays.layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
)
from shoal.arrays.move import Move, move, relabelled
from shoal.arrays.sharding import sharding
from shoal.arrays.upload import upload
from shoal.colour import logically_collective
from shoal.errors import raise_all
from shoal.plan.layout import Layout

__all__ = ["dtype_offences", "put"]

X64 = "turn 64-bit values on: JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)"


@logically_collective("shapes, dtypes and layouts")
def put(tree: Any, layouts: Layouts) -> Any:
    """Return a tree of host values as sharded arrays.

    Logically collective: shapes, dtypes and layouts must be equal.

    Nothing is sent: each process cuts what its own devices hold and moves that, each distinct
    piece cut once. It is impossible that a value changes its dtype, or that the result changes
    when the host value is changed afterwards. A process's values count only where its own devices
    hold them; whether processes that hold replicas gave equal values is not checked.

    Args:
      tree: numpy arrays (memory-mapped ones are read only where needed), numpy and Python scalars,
        jax.Arrays. Python's numbers get JAX's default dtypes. A jax.Array that already lies as
        asked is not copied, so that donating one gives up both; any other that this process holds
        alone counts as a host value, and the result shares no memory with it.
      layouts: one layout, or a prefix tree of them: Layouts, NamedShardings, PartitionSpecs;
        inside `use_mesh` also tuples of axis names and None, a name, or None (split nothing); or a
        function of (path such as "params/w", leaf) that returns one.

    Returns:
      the tree, with jax.Arrays.

    Raises:
      UsageError: ranks that do not match, dims that do not divide evenly, dtypes that JAX would
        narrow, values that are no arrays; all leaves at fault are named by path. On every process.

    Example:
      >>> import numpy as np, shoal
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> params = {"w": np.ones((8, 3), np.float32), "b": np.zeros(3, np.float32)}
      >>> layouts = {"w": shoal.Layout(mesh, "x", None), "b": shoal.Layout(mesh, None)}
      >>> shoal.put(params, layouts)["w"].sharding.spec
      P('x', None)
    """
    offences: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, offences)
    for leaf in leaves:
        must_divide(leaf, offences)
        cannot_be_pending(leaf, offences)
        if _is_elsewhere(leaf.value) and relabelled(leaf.value, sharding(leaf.layout)) is None:
            offences.append(f"{leaf.path}: {_where(leaf.value)}")
    offences += dtype_offences(
        (jax.tree_util.keystr(path) or "the array", value)
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]
    )
    raise_all("put", offences)
    return jax.tree.unflatten(treedef, place(leaves))


def dtype_offences(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Return what is wrong with values that shall become arrays: (name, value) each."""
    offences, narrow = [], []
    for name, value in named:
        if isinstance(value, jax.core.Tracer):
            offences.append(f"{name}: is a value inside jit or grad; constrain pins it there")
        elif why := cannot_hold(value):
            offences.append(f"{name}: {why}")
        elif change := narrowed(value):
            narrow.append(f"{name}: {change}")
    if narrow:
        narrow[-1] += f"; cast, or {X64}"
    return offences + narrow


class _Cut(NamedTuple):
    """The pieces of one host array for this process's devices."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    target: NamedSharding
    views: list[np.ndarray[Any, Any]]
    devices: list[jax.Device]


def place(leaves: list[Leaf]) -> list[jax.Array]:
    """Put leaves that are known to be right; one batch of transfers for all of them."""
    placed: list[jax.Array | None] = []
    cuts: dict[int, _Cut] = {}
    for number, leaf in enumerate(leaves):
        target = sharding(leaf.layout)
        placed.append(_already(leaf.value, target))
        if placed[number] is None:
            value, layout = leaf.value, leaf.layout
            if is_key(value):
                value = np.asarray(jax.random.key_data(value))
                extra = value.ndim - layout.rank
                target = sharding(Layout(layout.mesh, *layout.dims, *[None] * extra))
            cuts[number] = _cut(as_numpy(value), target)
    pieces = [view for cut in cuts.values() for view in cut.views]
    devices = [device for cut in cuts.values() for device in cut.devices]
    buffers = iter(upload(pieces, devices))
    for number, cut in cuts.items():
        own = [next(buffers) for _ in cut.devices]
        array = jax.make_array_from_single_device_arrays(
            cut.shape, cut.target, own, dtype=cut.dtype
        )
        value = leaves[number].value
        if is_key(value):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(value))
        placed[number] = array
    return placed


def strong(value: Any) -> Any:
    """Return an array without JAX's weak type, which a way over the host would lose as well."""
    return value.astype(value.dtype) if getattr(value, "weak_type", False) else value


def _is_elsewhere(value: Any) -> bool:
    """True for an array of which other processes hold devices."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not value.is_fully_addressable
        and not value.is_deleted()
    )


def _where(array: jax.Array) -> str:
    owners = sorted({device.process_index for device in array.sharding.device_set})
    if len(owners) > 1:
        return "is spread over processes in another layout; relayout moves it"
    return f"lies on devices of process {owners[0]} alone; put needs it as a host value here too"


def _already(value: Any, target: NamedSharding) -> jax.Array | None:
    """Return an array that is on devices and need not pass through the host, else None."""
    if not isinstance(value, jax.Array):
        return None
    if (array := relabelled(value, target)) is not None:
        return array
    if target.is_fully_addressable and value.is_fully_addressable:
        value = strong(value)
        return move([Move(value, value, target)])[0]
    return None


def _cut(value: np.ndarray[Any, Any], target: NamedSharding) -> _Cut:
    """Cut what this process's devices hold; devices with equal regions share one view."""
    views: dict[tuple[tuple[int | None, int | None], ...], np.ndarray[Any, Any]] = {}
    cut = _Cut(value.shape, value.dtype.newbyteorder("="), target, [], [])
    for device, index in target.addressable_devices_indices_map(value.shape).items():
        box = tuple((piece.start, piece.stop) for piece in index)
        if box not in views:
            views[box] = native(value[(*index, ...)])  # the ellipsis keeps a scalar an array
        cut.views.append(views[box])
        cut.devices.append(device)
    return cut
