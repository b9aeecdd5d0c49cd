"""Pin layouts of values inside `jit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shoal.arguments import not_flags
from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    axes_of,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
)
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.bridge.use_mesh import default_mesh
from shoal.arrays.host.agreed_program import concrete
from shoal.arrays.host.host_values import as_array, is_key, unfit, warn_of_narrowing
from shoal.arrays.host.upload import is_tracing, with_shards_of_its_layout
from shoal.arrays.moving.agreed_move import agree_on_move, fail_any_move, move_of
from shoal.arrays.moving.move import on_row
from shoal.arrays.moving.move_program import inside_jit, stages
from shoal.arrays.moving.plan_relayout import RelayoutPlan
from shoal.arrays.moving.weak_type import is_weak, weakened
from shoal.arrays.placing.host_arguments import is_elsewhere, is_from_host, place_arguments
from shoal.colour import traced
from shoal.errors import UsageError, WrongType, raise_all
from shoal.plan.layout import Layout
from shoal.plan.transfer.plan import Transfer, plan_transfer
from shoal.plan.transfer.same_devices import in_one_order
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.jax_service.own_programs import own_programs

Pin = Callable[[jax.Array], jax.Array]
AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh


@traced
def constrain(
    tree: Any, layouts: Layouts, *, gradient: bool = False, via: RelayoutPlan | None = None
) -> Any:
    """Pin the layouts of values inside `jit`; the values are unchanged.

    Traced.

    On Auto axes this tells the compiler (`jax.lax.with_sharding_constraint`), and dims need not
    divide evenly. On Explicit axes, where layouts are part of the type, it changes the type
    (`jax.reshard`), and cotangents follow the types, whatever `gradient` is. One dim may be split
    by both, the Explicit axes first. A function traced by `jit` keeps the default mesh that it was
    traced with: Layouts name theirs. Outside `jit` an array is moved at once: if it is sent between
    processes, all of its processes call this, and first agree on the call, as for `relayout`. A
    host value is placed as by `put`: equal on all processes, which is checked at their next
    collective call.

    Args:
      tree: arrays.
      layouts: one layout, or a prefix tree of them, as for `put`. `None` clears: the compiler
        chooses every dim of this value again, whatever was pinned before. Outside `jit`, where an
        array on a mesh ties what is computed from it to that mesh, `None` returns an ordinary array
        of the same value: in full, on the default device, and free to move wherever the next
        computation runs (*uncommitted* in JAX).
      gradient: also pin derivatives: the tangent in forward mode, the cotangent in reverse. By
        default the compiler places them. (JAX's own constraint always pins them.)
      via: for one array inside `jit`: the plan that leads to the layout, as returned by
        `plan_relayout`: its steps are used where the compiler might gather the whole array. The
        array is pinned to the plan's source first; a cotangent takes the planned way back, and
        tangents the same way. All axes must be Auto.

    Returns:
      The tree.

    Raises:
      UsageError: layouts that do not fit, or do not fit `via`; outside `jit`, arrays on other
        devices and layouts with pending sums; a dim split by an Auto axis before an Explicit one;
        `None`, or a layout on Auto axes, on Explicit axes inside `jit`; `None` for an array of
        several processes outside; axes that are Manual here. All offending leaves by path, while
        tracing.

    Example:
      >>> import jax, jax.numpy as jnp, shoal
      >>> from jax import NamedSharding, P
      >>> rows = NamedSharding(shoal.make_mesh({"x": -1}), P("x"))
      >>> y = jax.jit(lambda x: shoal.constrain(x * 2, rows))(jnp.ones((8, 3)))
      >>> y.sharding.is_equivalent_to(rows, 2)
      True
    """
    try:
        leaves, treedef = _checked(tree, layouts, gradient, via)
    except BaseException as error:
        with contextlib.suppress(Exception):  # whose call it is cannot be known
            fail_any_move("constrain", error, tree, layouts, none_clears=True)
        raise
    if via is not None:
        return jax.tree.unflatten(treedef, [moved_inside(leaves[0].value, via)])
    if not is_tracing():
        placed = [
            leaf
            for leaf in leaves
            if isinstance(leaf.value, jax.Array)
            and leaf.layout is not None
            and not is_from_host(leaf)
        ]
        moves = [move_of(leaf, concrete(leaf.value)) for leaf in placed]
        agree_on_move("constrain", placed, moves)
    return jax.tree.unflatten(treedef, _constrained(leaves, gradient))


def constrain_agreed(tree: Any, layouts: Layouts) -> Any:
    """As `constrain`, in a call that its processes have agreed on already."""
    leaves, treedef = _checked(tree, layouts, False, None)
    return jax.tree.unflatten(treedef, _constrained(leaves, False))


def _checked(
    tree: Any, layouts: Layouts, gradient: bool, via: RelayoutPlan | None
) -> tuple[list[Leaf], Any]:
    """Check the arguments; return the leaves and the tree's structure."""
    problems = not_flags(gradient=gradient)
    devices = via.devices if isinstance(via, RelayoutPlan) else None
    leaves, treedef = leaf_layouts(tree, layouts, problems, none_clears=True, devices=devices)
    for leaf in leaves:
        why = unfit(leaf.value)
        if why:
            problems.append(f"{leaf.path}: {why}")
        else:
            _check(leaf, problems)
    if via is not None:
        problems += why_not_via(via, leaves)
    raise_all("constrain", problems)
    warn_of_narrowing("constrain", ((leaf.path, leaf.value) for leaf in leaves))
    return leaves, treedef


@own_programs()
def _constrained(leaves: Sequence[Leaf], gradient: bool) -> list[jax.Array]:
    leaves = place_arguments("constrain", leaves)
    # outside jit a `jax.set_mesh` of Explicit axes would take the value's layout for the type's
    with nullcontext() if is_tracing() else on_row(()), jax_runtime.explicit_transfers():
        placed = [_constrain(leaf, gradient) for leaf in leaves]
    return [*map(with_shards_of_its_layout, placed)]


def _check(leaf: Leaf, problems: list[str]) -> None:
    """Report why a leaf cannot be pinned here."""
    if leaf.layout is None:
        why = _cannot_clear(leaf.value)
        if why:
            problems.append(f"{leaf.path}: {why}")
        return
    types = leaf.layout.mesh.axis_types
    for dim_index, dim in enumerate(leaf.layout.axes_of_dims):
        kinds = [types[axis] for axis in dim]
        if ("auto", "explicit") in pairwise(kinds):
            problems.append(
                f"{leaf.path}: dim {dim_index} is split by an Auto axis before an Explicit one "
                f"({', '.join(f'{axis} {types[axis]}' for axis in dim)}): the types, which know "
                "only Explicit axes, cannot say that; put the Explicit ones first"
            )
    used = {axis for dim in leaf.layout.axes_of_dims for axis in dim}
    around = _mesh_around(leaf)
    manual = sorted(used & manual_axes(around)) if around is not None else []
    if manual:
        problems.append(f"{leaf.path}: axes {', '.join(manual)} are Manual inside this shard_map")
    here = jax.sharding.get_abstract_mesh()
    if used and manual_axes(here) and dict(here.shape) != dict(leaf.layout.mesh.axes):
        axes = ", ".join(f"{axis}={size}" for axis, size in here.shape.items())
        problems.append(
            f"{leaf.path}: inside this shard_map over {axes} a layout on another mesh "
            f"({leaf.layout.mesh!r}) cannot be named"
        )
    if not is_tracing():
        cannot_be_pending(leaf, problems)
        if is_elsewhere(leaf.value, jax_mesh(leaf.layout.mesh)):
            problems.append(
                f"{leaf.path}: is on other devices than {leaf.layout.mesh!r}, or in another "
                "order; relayout moves it"
            )
    else:
        why = _auto_on_explicit(leaf)
        if why:
            problems.append(f"{leaf.path}: {why}")
        # Only Explicit axes must divide: the compiler pads uneven splits by Auto ones.
        explicit = [
            tuple(axis for axis in dim if types[axis] == "explicit")
            for dim in leaf.layout.axes_of_dims
        ]
        leaf = leaf.on(Layout(leaf.layout.mesh, *explicit))
    must_divide(leaf, problems)


def _auto_on_explicit(leaf: Leaf) -> str:
    """Return why a layout on Auto axes cannot be pinned on Explicit ones, or an empty string."""
    here = jax.sharding.get_abstract_mesh()
    is_auto = {*leaf.layout.mesh.axis_types.values()} == {"auto"}
    if not is_auto or {*here.axis_types} != {AxisType.Explicit}:
        return ""
    spec = jax.typeof(leaf.value).sharding.spec
    if tuple(map(axes_of, spec)) == leaf.layout.axes_of_dims:
        return ""
    axes = ", ".join(f"{axis}={size}" for axis, size in here.shape.items())
    return (
        f"{leaf.layout!r} has Auto axes, and here (jax.set_mesh) the axes {axes} are Explicit, "
        "where layouts are part of the type: make its mesh with axis_types='explicit', or set an "
        "Auto one"
    )


def _cannot_clear(value: Any) -> str:
    """Return why `None` cannot clear a value, or an empty string."""
    if isinstance(value, jax.core.Tracer) or is_tracing():
        typed = jax.typeof(value).sharding
        if set(typed.mesh.axis_types) == {AxisType.Explicit} or any(typed.spec):
            return "None clears nothing on Explicit axes: layouts are part of the type"
    elif isinstance(value, jax.Array) and not value.is_fully_addressable:
        processes = sorted({device.process_index for device in value.sharding.device_set})
        return (
            f"outside jit None gives an ordinary array, and this one is on processes "
            f"{', '.join(map(str, processes))}: allgather(x, tiled=True) gives all of them its "
            "value, relayout another layout"
        )
    return ""


def _constrain(leaf: Leaf, gradient: bool) -> jax.Array:
    value = as_array(leaf.value)
    if leaf.layout is None:
        return _cleared(value, gradient)
    mesh = _mesh_here(leaf)
    types = leaf.layout.mesh.axis_types
    if "explicit" in types.values():
        if leaf.layout.partial and jax.typeof(value).sharding.mesh.empty:
            whole = Layout(leaf.layout.mesh, *leaf.layout.dims)  # JAX requires this (0.12)
            value = jax.reshard(value, _only("explicit", leaf.on(whole), mesh))
        value = jax.reshard(value, _only("explicit", leaf, mesh))
    if AxisType.Auto not in mesh.axis_types:
        return value
    return _pinned(value, _only("auto", leaf, mesh), gradient)


def _cleared(value: jax.Array, gradient: bool) -> jax.Array:
    if not is_tracing():
        return _without_derivative(_ordinary)(value)
    clear = _mesh_to_clear(value)
    if clear is None or AxisType.Auto not in clear.axis_types:
        return value
    free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * value.ndim)
    return _pinned(value, NamedSharding(clear, free), gradient)


def _ordinary(array: jax.Array) -> jax.Array:
    """Return an array as JAX makes it from host values; under `vmap` its value is not available."""
    if isinstance(array, jax.core.Tracer) or not array.committed:
        return array
    with jax.transfer_guard("allow"):
        if is_key(array):
            bits = jnp.asarray(np.asarray(jax.random.key_data(array)))
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
        return jnp.asarray(np.asarray(array))


def _mesh_to_clear(value: jax.Array) -> AnyMesh | None:
    """Return the mesh on which to clear a layout, or None if there is none to name.

    That is the mesh of the value: a program runs on the devices of one mesh, which need not be
    those of the default mesh. If the value has none, only a default mesh of all devices is sure to
    be the program's.
    """
    here = jax.sharding.get_abstract_mesh()
    if manual_axes(here):
        return here if AxisType.Auto in here.axis_types else None
    mesh, own = default_mesh(), jax.typeof(value).sharding.mesh
    if mesh is None:
        return None
    if not own.empty:
        return own
    return jax_mesh(mesh) if mesh.size == jax.device_count() else None


def _mesh_here(leaf: Leaf) -> AnyMesh:
    """Return the mesh to name: inside `shard_map` the current one, with its Manual axes."""
    around = _mesh_around(leaf)
    return sharding_of(leaf.layout).mesh if around is None else around


def _mesh_around(leaf: Leaf) -> AnyMesh | None:
    """Return the mesh of the enclosing `shard_map`, if it has the layout's axes."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty or dict(here.shape) != dict(leaf.layout.mesh.axes):
        return None
    return here if manual_axes(here) else None


def explicit_part(leaf: Leaf) -> NamedSharding | None:
    """Return the part of a layout that belongs to the type; None without Explicit axes."""
    mesh = _mesh_here(leaf)
    return _only("explicit", leaf, mesh) if AxisType.Explicit in mesh.axis_types else None


def _only(kind: str, leaf: Leaf, mesh: AnyMesh) -> NamedSharding:
    """Return the part of a layout with axes of one type: JAX adds the Auto axes of a dim to the
    Explicit ones in its type.
    """
    types = leaf.layout.mesh.axis_types
    each = map(axes_of, leaf.spec.partitions)
    dims = [tuple(a for a in dim if types[a] == kind) for dim in each]
    partial = {"unreduced": set(leaf.layout.partial)} if leaf.layout.partial else {}
    spec = PartitionSpec(*[dim or None for dim in dims], **partial if kind == "explicit" else {})
    return NamedSharding(mesh, spec)


def _pinned(value: jax.Array, target: NamedSharding, gradient: bool) -> jax.Array:
    pin: Pin = partial(jax.lax.with_sharding_constraint, shardings=target)
    if AxisType.Explicit in target.mesh.axis_types and not is_tracing():
        pin = _pin_program(target)
    if gradient or not jnp.issubdtype(value.dtype, jnp.inexact):
        return pin(value)  # its derivative is pinned alike
    return _without_derivative(pin)(value)


@lru_cache(maxsize=256)
def _pin_program(target: NamedSharding) -> Pin:
    """Return a program that pins; a call by itself loses the Explicit axes (jax 0.10 to 0.12)."""
    return jax.jit(partial(jax.lax.with_sharding_constraint, shardings=target))


def _without_derivative(pin: Pin) -> Pin:
    """Apply `pin` to values, with the identity as derivative."""

    @jax.custom_jvp
    def values_only(x: jax.Array) -> jax.Array:
        return pin(x)

    @values_only.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return values_only(*primals), tangents[0]

    return values_only


def manual_axes(mesh: AnyMesh) -> set[str]:
    """Return the axes of a mesh that are Manual here."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in pairs if kind == AxisType.Manual}


# A planned move inside `jit`.

OnArray: TypeAlias = Callable[[jax.Array], jax.Array]


def why_not_via(plan: RelayoutPlan, leaves: Sequence[Leaf]) -> list[str]:
    """Return all problems with `constrain(x, layout, via=plan)`."""
    if not isinstance(plan, RelayoutPlan):
        return [WrongType(f"via={plan!r} must be what plan_relayout returns")]
    if len(leaves) != 1:
        return [f"via= is the plan of one array, and this tree has {len(leaves)} leaves"]
    (leaf,), move = leaves, plan.transfer
    problems = []
    if not isinstance(leaf.value, jax.core.Tracer):
        problems.append(
            "via= is for values inside jit; outside, relayout moves by a plan of its own"
        )
    if leaf.layout != move.target:
        problems.append(f"via= leads to {move.target!r}, not to {leaf.layout!r}")
    if tuple(leaf.value.shape) != move.shape:
        problems.append(f"via= is for the shape {move.shape}, not {tuple(leaf.value.shape)}")
    ends = (move.source, move.target)
    if any(kind == "explicit" for end in ends for kind in end.mesh.axis_types.values()):
        problems.append("via= works on Auto axes only; Explicit ones are part of the type")
    if not in_one_order(move.source.mesh, move.target.mesh):
        problems.append(
            "via= cannot change the order of devices: a program has one; relayout does, outside jit"
        )
    return problems


def moved_inside(x: jax.Array, plan: RelayoutPlan) -> jax.Array:
    """Return the value in its new layout, by the steps of a plan; its cotangent by one back.

    Raises:
      UsageError: under `vmap`, `jacfwd` or `jacrev`, since the steps do not handle a batch dim.
    """
    move = plan.transfer
    back = plan_transfer(move.target, move.source, move.shape, move.item_bytes)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    there, back_again = (
        jax.make_jaxpr(_pinned_move(each, plan.devices))(like) for each in (move, back)
    )
    moved: jax.Array = _MOVED.bind(x, there=there, back=back_again)
    if is_weak(x) and not is_weak(moved):
        return weakened(moved, sharding_of(move.target))
    return moved


def _pinned_move(move: Transfer, devices: Sequence[jax.Device] | None) -> OnArray:
    ends = move.source, move.target
    source, target = (sharding_of(end, devices=devices) for end in ends)
    digit_stages = stages(move.steps, *ends, move.shape, move.item_bytes, devices)
    run = inside_jit(digit_stages, source, target)

    def pinned(x: jax.Array) -> jax.Array:
        at_source = jax.lax.with_sharding_constraint(x, source)
        return jax.lax.with_sharding_constraint(run(at_source), target)

    return pinned


# `jax.custom_derivatives.linear_call` would do, but its transpose of a transpose holds constants of
# the steps as tracers, which leak under `jax.checkpoint`; and it cannot be batched, nor say so. The
# moves are jaxprs: JAX looks in these for the devices of a program.


def _run(x: jax.Array, *, there: ClosedJaxpr, back: ClosedJaxpr) -> jax.Array:
    (moved,) = jaxpr_as_fun(there)(x)
    return moved


def _type(x: Any, *, there: ClosedJaxpr, back: ClosedJaxpr) -> Any:
    return x.update(weak_type=False)  # layouts on Auto axes are no part of the type


def _push_forward(
    primals: Sequence[Any], tangents: Sequence[Any], *, there: ClosedJaxpr, back: ClosedJaxpr
) -> tuple[Any, Any]:
    """JVP: the map is linear, so the tangent is mapped like the value."""
    (x,), (tangent,) = primals, tangents
    moved = _MOVED.bind(x, there=there, back=back)
    if isinstance(tangent, ad.Zero):
        return moved, tangent
    return moved, _MOVED.bind(tangent, there=there, back=back)


def _pull_back(cotangent: Any, _: Any, *, there: ClosedJaxpr, back: ClosedJaxpr) -> Sequence[Any]:
    """Transpose: the cotangent is moved by the plan of the way back."""
    if isinstance(cotangent, ad.Zero):
        return [None]
    return [_MOVED.bind(cotangent, there=back, back=there)]


def _refuse_batch(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "constrain: via= is the plan of one array, and under vmap this is a batch of them "
        "(jacfwd and jacrev are vmap, too): plan a move of the whole batch, and constrain that "
        "outside vmap; or leave via= out"
    )


_MOVED = Primitive("planned_move")
_MOVED.def_impl(_run)
_MOVED.def_abstract_eval(_type)
ad.primitive_jvps[_MOVED] = _push_forward
ad.primitive_transposes[_MOVED] = _pull_back
batching.primitive_batchers[_MOVED] = _refuse_batch
mlir.register_lowering(_MOVED, mlir.lower_fun(_run, multiple_results=False))
