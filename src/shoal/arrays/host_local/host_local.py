"""Per-process arrays ⇄ one global array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shoal.arguments import not_flags
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    fitting,
    leaf_layouts,
    must_divide,
    whole_rows,
)
from shoal.arrays.host.host_values import cannot_hold, stand_in, warn_of_narrowing
from shoal.arrays.host.record_call import lane_problems
from shoal.arrays.host.tree_words import tree_lines
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.host_local.part_primitives import IN_JIT, cut_traced, join_traced
from shoal.arrays.host_local.parts import (
    PartsCall,
    cut_own_part,
    global_shape,
    is_local,
    join_own_parts,
    lies_elsewhere,
    local_shape,
    own_box,
    seen,
)
from shoal.arrays.moving.move import relabelled
from shoal.arrays.placing.put import dtype_problems
from shoal.colour import local, logically_collective
from shoal.errors import UsageError, raise_all
from shoal.plan.process_boxes import ProcessBox
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.shapes_only import shapes_only

Tree = Any


@logically_collective("shapes, dtypes, layouts and what processes hold in common")
def from_host_local(
    tree: Tree, layouts: Layouts, *, check_values: bool = True, lane: str | None = None
) -> Tree:
    """Assemble global arrays from each process's part.

    Logically collective: shapes, dtypes, layouts and what processes hold in common must be equal.

    Nothing is sent, and a jax.Array that is already placed as this process's part is not copied:
    donating one gives up both. An axis within a process splits the part among its devices. Data
    that no axis splits between processes is one value, which all of them pass. At their next
    synchronization point, as for `put`, the value and the call are checked to be the same.

    If every process passes the full array, this is not detected, and the result is as many times as
    long. `put` accepts a full array; `feed` warns.

    Differentiable (`grad`, `vjp`, `jvp`) and batched (`vmap`), outside `jit`. The transpose is
    `to_host_local`: a process gets the cotangent of its own part, and that of a value which several
    hold is whole on each, not their share of a sum.

    Args:
      tree: this process's parts: numpy arrays, numpy and Python scalars, PRNG keys, jax.Arrays on
        devices of this process; [as the part of a shape]. Global arrays already placed as requested
        pass through. A process without devices in the mesh passes the same tree with any
        values, or `jax.ShapeDtypeStruct`s.
      layouts: the layout of the global array, or a prefix tree of them, as for `put`. Dim d of the
        result is as many times as long as processes split it.
      check_values: False: do not compare parts that processes hold in common.
      lane: the lane, as for `put`.

    Returns:
      The tree, with global jax.Arrays.

    Raises:
      UsageError: the devices of a process hold no block of the array, or processes hold blocks of
        several shapes (on every process); a part that its devices do not divide evenly,
        values that do not fit 32 bits or are not arrays, a call inside `jit`. All offending leaves
        are named by path.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"data": -1})
      >>> mine = np.full((mesh.size // shoal.process_count(), 3), shoal.process_index(), np.float32)
      >>> batch = shoal.from_host_local({"x": mine}, NamedSharding(mesh, P("data")))["x"]
      >>> batch.shape == (mesh.size, 3)
      True
    """
    if shapes_only():
        leaves, treedef = leaf_layouts(tree, layouts, [])
        return jax.tree.unflatten(treedef, [_whole_of(leaf) for leaf in leaves])
    _refuse_inside_jit("from_host_local")
    problems = [*lane_problems(lane), *not_flags(check_values=check_values), *whole_rows(layouts)]
    leaves, treedef = leaf_layouts(tree, layouts, problems)
    for leaf in leaves:
        problems += _part_problems(leaf)
    raise_all("from_host_local", problems)
    warn_of_narrowing("from_host_local", ((leaf.path, leaf.value) for leaf in leaves))
    nodes = tree_lines(treedef)
    call = PartsCall(
        operation="from_host_local",
        site=callsite(),
        check_values=check_values,
        lane=lane,
        nodes=nodes,
    )
    joined = _converted(leaves, _is_global, lambda some: join_own_parts(some, call),
                        lambda some: join_traced(some, call))  # fmt: skip
    return jax.tree.unflatten(treedef, joined)


@local
def to_host_local(tree: Tree, layouts: Layouts) -> Tree:
    """Return this process's parts of global arrays.

    Local.

    Nothing is sent and nothing is copied: the part has the buffers of the array, so that donating
    or deleting one gives up both. The inverse of `from_host_local`.

    Differentiable and batched, outside `jit`. The transpose is `from_host_local`, which all
    processes must then call: cotangents of parts make up that of the array, and for data that
    several processes hold they must be equal, or processes get DivergenceError at their next
    synchronization point. (A loss that each process computes alone is a per-process value: convert
    it back first.)

    Args:
      tree: global jax.Arrays in the given layouts. Local values pass through: jax.Arrays on this
        process's own devices, host values.
      layouts: one layout, or a prefix tree of them, as for `put`.

    Returns:
      The tree, with jax.Arrays on this process's devices, split over them as before; for an array
      of which this process holds nothing, the `jax.ShapeDtypeStruct` of a part.

    Raises:
      UsageError: arrays in other layouts, which `relayout` would have to move; the devices
        of a process hold no block of the array, or processes hold blocks of several shapes; a call
        inside `jit`. All offending leaves are named by path.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"data": -1})
      >>> rows = NamedSharding(mesh, P("data"))
      >>> whole = shoal.put(np.ones((8 * mesh.size, 3), np.float32), rows)
      >>> mine = shoal.to_host_local(whole, rows)
      >>> mine.is_fully_addressable, mine.shape[0] == 8 * len(mine.addressable_shards)
      (True, True)
    """
    _refuse_inside_jit("to_host_local")
    problems: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, problems)
    for leaf in leaves:
        problems += _whole_problems(leaf)
    raise_all("to_host_local", problems)
    call = PartsCall("to_host_local", callsite())
    parts = _converted(leaves, _is_part, lambda some: [_own_part(leaf, call) for leaf in some],
                       lambda some: cut_traced(some, call))  # fmt: skip
    return jax.tree.unflatten(treedef, parts)


def _whole_of(leaf: Leaf) -> Any:
    """Return what stands for the array of which a leaf is a part.

    Raises:
      UsageError: a traced value may be a part, or an array that passes through.
    """
    value = leaf.value
    if isinstance(value, jax.core.Tracer):
        raise UsageError(f"from_host_local: {leaf.path}: a part, or an array, without its values")
    if not is_local(value):
        return value
    shape = global_shape(leaf.layout, np.shape(value))
    return stand_in(jax.ShapeDtypeStruct(shape, stand_in(value).dtype))


def _refuse_inside_jit(operation: str) -> None:
    if is_tracing():
        raise UsageError(IN_JIT[operation])


def _converted(
    leaves: Sequence[Leaf],
    passes: Callable[[Leaf], bool],
    convert: Callable[[list[Leaf]], Sequence[Any]],
    convert_traced: Callable[[list[Leaf]], Sequence[Any]],
) -> list[Any]:
    """Convert values, including those that JAX differentiates or batches; pass others through."""
    results: list[Any] = [None] * len(leaves)
    plain: list[int] = []
    traced: list[int] = []
    for index, leaf in enumerate(leaves):
        if passes(leaf):
            results[index] = _with_sharding(leaf)
        else:
            (traced if isinstance(leaf.value, jax.core.Tracer) else plain).append(index)
    for numbers, how in ((plain, convert), (traced, convert_traced)):
        made = how([leaves[index] for index in numbers]) if numbers else ()
        for index, value in zip(numbers, made, strict=True):
            results[index] = value
    return results


def _with_sharding(leaf: Leaf) -> Any:
    """Return a global array that passes through, with the requested sharding."""
    array = leaf.value
    if isinstance(array, jax.core.Tracer) or is_local(array):
        return array
    return relabelled(array, leaf.sharding)


def _is_global(leaf: Leaf) -> bool:
    return not is_local(seen(leaf.value))


def _is_part(leaf: Leaf) -> bool:
    """True for data that this process holds alone, unless on exactly the devices of its layout."""
    value = seen(leaf.value)
    if value is None or not is_local(value):
        return False
    targets = leaf.sharding.device_set
    return not isinstance(value, jax.Array) or value.sharding.device_set != targets


def _own_part(leaf: Leaf, call: PartsCall) -> Any:
    if own_box(leaf.layout).layout is None:
        return jax.ShapeDtypeStruct(local_shape(leaf.layout, leaf.value.shape), leaf.value.dtype)
    return cut_own_part(leaf, call)


def _part_problems(leaf: Leaf) -> list[str]:
    """Return why a value cannot be this process's part of an array."""
    problems = _dtype_problems(leaf)
    cannot_be_pending(leaf, problems)
    if problems:
        return problems
    array = seen(leaf.value)
    if not is_local(array):
        return _named(leaf, lies_elsewhere(array, leaf.layout))
    try:
        box = own_box(leaf.layout)
    except UsageError as error:
        return _named(leaf, str(error))
    if isinstance(leaf.value, jax.ShapeDtypeStruct) and box.layout is not None:
        return _named(leaf, "has no values, but devices of this process hold a part of the array")
    return _uneven(leaf, box)


def _dtype_problems(leaf: Leaf) -> list[str]:
    value = seen(leaf.value)
    if isinstance(value, jax.ShapeDtypeStruct):
        if not isinstance(value.dtype, np.dtype):
            return []  # of keys
        value = np.empty(0, value.dtype)  # would its dtype be kept?
    elif value is not leaf.value and not isinstance(value, np.ndarray | np.generic):
        return []  # under `grad` or `vmap`, JAX has checked it
    return dtype_problems([(leaf.path, value)])


def _whole_problems(leaf: Leaf) -> list[str]:
    """Return why a value cannot be an array of which this process has its part."""
    is_traced = isinstance(leaf.value, jax.core.Tracer)
    is_nothing = isinstance(leaf.value, jax.ShapeDtypeStruct)
    problems: list[str] = []
    if not (is_traced or is_nothing):
        problems = _named(leaf, cannot_hold(leaf.value))
    cannot_be_pending(leaf, problems)
    if problems:
        return problems
    try:
        box = own_box(leaf.layout)
    except UsageError as error:
        return _named(leaf, str(error))
    if is_nothing and box.layout is not None:
        return _named(leaf, "has no values, but devices of this process hold a part of the array")
    if _is_part(leaf):
        return []
    array = seen(leaf.value)
    if array is not None:
        why = lies_elsewhere(array, leaf.layout)
        if why:
            return _named(leaf, why)
    must_divide(leaf, problems)
    return problems


def _named(leaf: Leaf, why: str) -> list[str]:
    return [f"{leaf.path}: {why}"] if why else []


def _uneven(leaf: Leaf, box: ProcessBox) -> list[str]:
    """Name the dims of a part that this process's devices do not divide evenly."""
    shape = np.shape(leaf.value)
    problems = []
    for dim, (size, count) in enumerate(zip(shape, box.shards, strict=True)):
        if size % count:
            axes = " x ".join(leaf.layout.axes_of_dims[dim])
            padded = "" if dim else ", or feed(…, remainder='pad') fills up rows"
            problems.append(
                f"{leaf.path}: dim {dim} of the part {shape} of process {jax.process_index()} has "
                f"size {size}, which its {count} of the {leaf.layout.num_shards(dim)} shards over "
                f"{axes} do not divide; {fitting(size, count)} would fit{padded}"
            )
    return problems
