"""Initialize arrays in sharded form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shoal.arrays.bridge.layout_functions import short_text
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
    path_text,
)
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.bridge.use_mesh import default_mesh
from shoal.arrays.host.host_values import cannot_hold, device_form, stand_in, warn_of_narrowing
from shoal.arrays.host.program_lines import program_lines
from shoal.arrays.host.record_call import owners_of_mesh, record_call
from shoal.arrays.host.tree_words import tree_lines
from shoal.arrays.host.upload import is_tracing, with_shards_of_its_layout
from shoal.arrays.moving.move import on_row, row_of
from shoal.arrays.placing.put import dtype_problems, place_leaves, strong
from shoal.colour import collective
from shoal.errors import UsageError, UsageTypeError, raise_all
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.system.shapes_only import shapes_only


@collective("the mesh's processes")
def create(init: Callable[..., Any], *args: Any, layouts: Layouts = None) -> Any:
    """Run an initializer so that its results are sharded from the start.

    Collective over the mesh's processes.

    The initializer is compiled for the whole mesh (`jax.jit` with `out_shardings`), so that each
    device computes its own shard. No result is ever first materialized in full on one device. The
    random bits do not depend on the layout or the number of processes; floats computed from them
    may differ in the last bit, as the compiler orders operations.

    Args:
      init: a function of arrays that returns a tree of arrays. If the same function object is
        passed again, nothing is compiled twice.
      args: its arguments: trees of arrays, PRNG keys, scalars; equal on all processes. Values that
        a process holds alone are replicated over the mesh, in dtypes as by `put` (not
        weak); Python numbers stay weak. At the next collective call these, the program that
        `init` is traced to, what it closes over, and the shapes, dtypes and layouts of the results
        are compared, as for `put`.
      layouts: one layout, or a prefix tree of them, for the result, as for `put`; a function gets
        the path (such as "params/w") and the `jax.ShapeDtypeStruct` of a leaf. None: `init`
        decides, as under `jax.jit(out_shardings=None)`; it runs on the mesh of the results that
        have a layout, or else on the mesh in force.

    Returns:
      The result of `init`, as sharded arrays.

    Raises:
      UsageError: before anything runs, on every process: layouts that do not fit the result (all
        leaves by path), arguments that do not fit 32 bits, layouts on different devices.
      DivergenceError: on all, at their next collective call: the calls or the arguments differ.

    Example:
      >>> import jax, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> w = shoal.create(
      ...     lambda key: jax.random.normal(key, (8, 3)), jax.random.key(0),
      ...     layouts=NamedSharding(mesh, P("x")))
      >>> w.sharding.spec
      P('x',)
    """
    return created(init, args, layouts)


def created(
    init: Callable[..., Any], args: tuple[Any, ...], layouts: Layouts, options: Sequence[str] = ()
) -> Any:
    """Run an initializer, as `create` does.

    Args:
      options: further lines that must be equal on all processes.
    """
    if not callable(init):
        given = short_text(init)
        raise UsageTypeError(f"create: the first argument must be a function, not {given}")
    if shapes_only():
        return jax.tree.map(stand_in, init(*jax.tree.map(_traceable, args)))
    named = [
        (f"args{jax.tree_util.keystr(path)}", value)
        for path, value in jax.tree_util.tree_flatten_with_path(args)[0]
    ]
    problems = [
        f"{name}: {value!r} is a layout: write layouts= in front of it"
        for name, value in named
        if isinstance(value, Layout | PartitionSpec | Sharding)
    ]
    raise_all("create", problems or dtype_problems(named))
    warn_of_narrowing("create", named)
    args = jax.tree.map(_traceable, args)  # trace exactly what will run
    try:
        shapes = jax.eval_shape(init, *args)
    except TypeError:
        # Perhaps a result is no array. JAX's error names no leaf: trace again, to name it.
        jax.eval_shape(partial(_arrays_of, init), *args)
        raise
    leaves, treedef = leaf_layouts(shapes, layouts, problems, none_clears=True)
    chosen = [leaf for leaf in leaves if leaf.layout is not None]
    for leaf in chosen:
        must_divide(leaf, problems)
        cannot_be_pending(leaf, problems)
    raise_all("create", problems)
    if not leaves:
        return init(*args)
    mesh = _one_mesh(chosen)
    row = sharding_of(Layout(mesh))
    raise_all("create", _apart(args, row))
    targets = [None if leaf.layout is None else leaf.sharding for leaf in leaves]
    shardings = jax.tree.unflatten(treedef, targets)
    program = jax.jit(init, out_shardings=shardings)
    placed = _on_mesh(args, mesh)
    nodes = (*tree_lines(jax.tree.structure(args)), *tree_lines(treedef))
    devices_in_force: AbstractContextManager[Any]
    if len(chosen) < len(leaves) and not is_tracing():
        # Of a result without a layout, only the mesh in force tells JAX the devices to run on.
        devices_in_force = jax.set_mesh(row.mesh)
    else:
        devices_in_force = on_row(row_of(row))
    # A NaN of the initializer is the user's to find; without `jit` nothing would be placed.
    with devices_in_force, jax.disable_jit(False):
        if len(owners_of_mesh(mesh)) > 1 and not is_tracing():
            # Of the very trace that runs: it contains what the initializer closes over.
            options = (*options, *program_lines(program.trace(*placed).jaxpr, "the initializer"))
        _record(args, chosen, mesh, options, nodes)
        return jax.tree.map(with_shards_of_its_layout, program(*placed))


def _arrays_of(init: Callable[..., Any], *args: Any) -> Any:
    """Return what an initializer returns; a UsageError names the leaves that are no arrays."""
    result = init(*args)
    raise_all(
        "create",
        [
            f"{path_text(path)}: {why}"
            for path, value in jax.tree_util.tree_flatten_with_path(result)[0]
            if (why := cannot_hold(value, "return"))
        ],
        wrong_type=True,
    )
    return result


def _traceable(value: Any) -> Any:
    """Return an argument as devices hold it, without a weak type."""
    is_host = isinstance(value, np.ndarray | np.generic)
    return device_form(np.asarray(value)) if is_host else strong(value)


def _record(
    args: tuple[Any, ...],
    results: list[Leaf],
    mesh: Mesh,
    options: Sequence[str],
    nodes: tuple[str, ...],
) -> None:
    """Record the call: the results, and the arguments that `jit` assumes to be equal."""
    if is_tracing():
        return
    own = [
        Leaf(f"args{jax.tree_util.keystr(path)}", value, Layout.replicated(mesh, np.ndim(value)))
        for path, value in jax.tree_util.tree_flatten_with_path(args)[0]
        if not isinstance(value, jax.Array) or value.is_fully_addressable
    ]
    leaves = [*own, *results]
    record_call("create", leaves, lane=None, options=(*options,), nodes=nodes, values=True)


def _one_mesh(leaves: list[Leaf]) -> Mesh:
    """Return the mesh on which one program creates all leaves."""
    if not leaves:
        mesh = default_mesh()
        if mesh is None:
            raise UsageError(
                "create: without layouts the initializer runs on the mesh in force, and there is "
                "none: pass layouts=, or call this inside `with use_mesh(mesh):`"
            )
        return mesh
    first = leaves[0]
    ids = first.layout.mesh.device_ids.ravel()
    kind = first.layout.mesh.kind
    others = [
        leaf
        for leaf in leaves
        if leaf.layout.mesh is not first.layout.mesh
        and not (
            leaf.layout.mesh.kind == kind
            and np.array_equal(leaf.layout.mesh.device_ids.ravel(), ids)
        )
    ]
    if others:
        raise UsageError(
            "create: one program runs on one row of devices; "
            f"{first.path} is on {first.layout.mesh!r}, "
            + ", ".join(f"{leaf.path} on {leaf.layout.mesh!r}" for leaf in others)
        )
    return first.layout.mesh


def _apart(args: tuple[Any, ...], target: NamedSharding) -> list[str]:
    """Name the arguments on several devices that cannot be in one program with the results."""
    row = tuple(target.mesh.devices.flat)
    return [
        f"args{jax.tree_util.keystr(path)}: is on other devices than the layouts, or on them in "
        "another order; relayout it first"
        for path, value in jax.tree_util.tree_flatten_with_path(args)[0]
        if isinstance(value, jax.Array)
        and (not value.is_fully_addressable or value.sharding.device_set == target.device_set)
        and (row_of(value.sharding) or row) != row
    ]


def _on_mesh(args: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
    """Replicate values that this process holds alone over the mesh; Python numbers stay weak."""
    values, treedef = jax.tree.flatten(args)
    devices = sharding_of(Layout(mesh)).device_set
    stray = [
        index
        for index, value in enumerate(values)
        if isinstance(value, np.ndarray | np.generic)
        or (
            isinstance(value, jax.Array)
            and value.is_fully_addressable
            and value.sharding.device_set != devices
        )
    ]
    leaves = [
        Leaf(f"args[{index}]", values[index], Layout.replicated(mesh, np.ndim(values[index])))
        for index in stray
    ]
    for index, array in zip(stray, place_leaves(leaves), strict=True):
        values[index] = array
    return jax.tree.unflatten(treedef, values)
