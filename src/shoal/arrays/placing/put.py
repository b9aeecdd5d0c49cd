"""Host values → sharded arrays, without a gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arguments import not_flags
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
)
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.host.host_values import as_numpy, is_key, stand_in, unfit, warn_of_narrowing
from shoal.arrays.host.record_call import lane_problems, record_call
from shoal.arrays.host.tree_words import tree_lines
from shoal.arrays.host.upload import refuse_inside_jit, upload_shards
from shoal.arrays.moving.move import move, relabelled
from shoal.arrays.moving.planned_move import ArrayMove
from shoal.colour import logically_collective
from shoal.errors import raise_all
from shoal.plan.layout import Layout
from shoal.runtime.jax_service.own_programs import own_programs
from shoal.runtime.system.shapes_only import shapes_only

_OWN_ROWS = "if these are the rows of this process alone, from_host_local joins those of all"


@logically_collective("values, shapes, dtypes and layouts")
def put(tree: Any, layouts: Layouts, *, check_values: bool = True, lane: str | None = None) -> Any:
    """Return a tree of host values as sharded arrays.

    Logically collective: values, shapes, dtypes and layouts must be equal.

    No data is sent. Each process slices the shards of its own devices from the host array, each
    distinct shard once. The result never changes when the host value is modified afterwards. 64-bit
    values become 32-bit ones, as in `jnp.asarray`, unless JAX's 64-bit values are on: integers
    where all fit, floats with one `DtypeWarning` per call site.

    Equality of the call on all processes that own devices of the mesh is checked at their next
    synchronization point (`barrier`, `broadcast`, `save`, `shutdown`, …): a digest of its call site
    and of all that must be equal is sent along, and a difference is a DivergenceError on all, which
    names the first call that differed. The digest of values over 1 MiB samples 128 places of 64
    bytes; that of a memory-mapped file eight; evenly spaced.

    Args:
      tree: numpy arrays (memory-mapped ones are read only where needed), numpy and Python scalars,
        jax.Arrays. Python numbers get JAX's default dtypes. A jax.Array already placed as requested
        is not copied, so that donating one gives up both; any other that this process holds alone
        counts as a host value, and the result shares no memory with it.
      layouts: one layout, or a prefix tree of them: NamedShardings, which the arrays then have; a
        mesh (replicated on it); Layouts; with a mesh in force (see `use_mesh`) PartitionSpecs,
        tuples of axis names and None, a name, or None (split nothing); or a function of (path such
        as "params/w", leaf) that returns one. Dims at the end may be left out: they are not split.
      check_values: False: values may differ between processes, and matter only where a process's
        own devices hold them; shapes, dtypes and layouts must be equal all the same.
      lane: the lane in which this call is compared, see `barrier`. None: the lane in which this
        thread last synchronized with other processes; calls of a thread that never did are not
        compared.

    Returns:
      The tree, with jax.Arrays.

    Raises:
      UsageError: ranks that do not match, dims that do not divide evenly, arrays of several
        processes in another layout (`relayout` moves them), values that are not arrays or do not
        fit 32 bits (of a mapped file: on the processes whose devices hold them);
        SHOAL_STRICT_DTYPES=1: all dtypes that would be narrowed. All offending leaves are named by
        path. On every process.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> params = {"w": np.ones((8, 3), np.float32), "b": np.zeros(3, np.float32)}
      >>> layouts = {"w": NamedSharding(mesh, P("x")), "b": mesh}
      >>> shoal.put(params, layouts)["w"].sharding.spec
      P('x',)
    """
    if shapes_only():
        return jax.tree.map(stand_in, tree)
    problems: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, problems)
    for leaf in leaves:
        uneven: list[str] = []
        must_divide(leaf, uneven)
        if uneven and len(leaf.layout.mesh.process_indices) > 1:
            uneven = [f"{problem}; {_OWN_ROWS}" for problem in uneven]
        problems += uneven
        cannot_be_pending(leaf, problems)
        if _is_elsewhere(leaf.value) and relabelled(leaf.value, leaf.sharding) is None:
            problems.append(f"{leaf.path}: {_where(leaf.value)}")
    named = [
        (jax.tree_util.keystr(path) or "the array", value)
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    problems += dtype_problems(named)
    problems += [*lane_problems(lane), *not_flags(check_values=check_values)]
    raise_all("put", problems)
    warn_of_narrowing("put", named)
    options, nodes = (f"check_values={check_values}",), tree_lines(treedef)
    record_call("put", leaves, lane=lane, options=options, nodes=nodes, values=check_values)
    return jax.tree.unflatten(treedef, place_leaves(leaves))


def dtype_problems(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the reasons why values, given as (name, value), cannot become arrays."""
    problems = []
    for name, value in named:
        if isinstance(value, jax.core.Tracer):
            problems.append(f"{name}: is a value inside jit or grad; constrain pins it there")
        elif why := unfit(value):
            problems.append(f"{name}: {why}")
    return problems


def place_leaves(leaves: list[Leaf]) -> list[jax.Array]:
    """Place validated leaves. When it returns, host values may be changed."""
    placed = [_already(leaf.value, leaf.sharding) for leaf in leaves]
    from_host = [index for index, array in enumerate(placed) if array is None]
    if from_host:
        refuse_inside_jit()
    for index in from_host:
        placed[index] = _from_host(leaves[index])
    # a pending transfer still reads the host array
    jax.block_until_ready([placed[index] for index in from_host])
    return placed


def _from_host(leaf: Leaf) -> jax.Array:
    value, layout = leaf.value, leaf.layout
    if not is_key(value):
        return upload_shards(as_numpy(value), leaf.sharding)
    key_words = np.asarray(jax.random.key_data(value))
    whole = [None] * (key_words.ndim - layout.rank)
    array = upload_shards(key_words, sharding_of(Layout(layout.mesh, *layout.dims, *whole)))
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(value))


@own_programs()
def strong(value: Any) -> Any:
    """Return an array without JAX's weak type, which passing through the host would also lose."""
    return value.astype(value.dtype) if getattr(value, "weak_type", False) else value


def _is_elsewhere(value: Any) -> bool:
    """True for an array with shards on devices of other processes."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not value.is_fully_addressable
        and not value.is_deleted()  # `dtype_problems` reports a deleted one
    )


def _where(array: jax.Array) -> str:
    owners = sorted({device.process_index for device in array.sharding.device_set})
    if len(owners) > 1:
        return "is spread over processes in another layout; relayout moves it"
    return f"is only on devices of process {owners[0]}; put needs it as a host value here too"


def _already(value: Any, target: NamedSharding) -> jax.Array | None:
    """Return an array that is on devices and need not pass through the host, else None."""
    if not isinstance(value, jax.Array):
        return None
    array = relabelled(value, target)
    if array is not None:
        return array
    if target.is_fully_addressable and value.is_fully_addressable:
        value = strong(value)
        return move([ArrayMove(value, value, target)])[0]
    return None
