"""A planned move inside `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.bridge.sharding import sharding
from shoal.arrays.moving.move_program import inside_jit, stages
from shoal.arrays.moving.plan_relayout import RelayoutPlan
from shoal.arrays.moving.weak_type import is_weak, weakened
from shoal.errors import UsageError, WrongType
from shoal.plan.transfer.plan import Transfer, plan_transfer
from shoal.plan.transfer.same_devices import in_one_order

OnArray: TypeAlias = Callable[[jax.Array], jax.Array]


def why_not_via(plan: RelayoutPlan, leaves: Sequence[Leaf]) -> list[str]:
    """Return all problems with `constrain(x, layout, via=plan)`."""
    if not isinstance(plan, RelayoutPlan):
        return [WrongType(f"via={plan!r} must be what plan_relayout returns")]
    if len(leaves) != 1:
        return [f"via= is the plan of one array, and this tree has {len(leaves)} leaves"]
    (leaf,), move = leaves, plan.transfer
    found = []
    if not isinstance(leaf.value, jax.core.Tracer):
        found.append("via= is for values inside jit; outside, relayout moves by a plan of its own")
    if leaf.layout != move.target:
        found.append(f"via= leads to {move.target!r}, not to {leaf.layout!r}")
    if tuple(leaf.value.shape) != move.shape:
        found.append(f"via= is for the shape {move.shape}, not {tuple(leaf.value.shape)}")
    ends = (move.source, move.target)
    if any(kind == "explicit" for end in ends for kind in end.mesh.axis_types.values()):
        found.append("via= works on Auto axes only; Explicit ones are part of the type")
    if not in_one_order(move.source.mesh, move.target.mesh):
        found.append(
            "via= cannot change the order of devices: a program has one; relayout does, outside jit"
        )
    return found


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
        return weakened(moved, sharding(move.target))
    return moved


def _pinned_move(move: Transfer, devices: Sequence[jax.Device] | None) -> OnArray:
    ends = move.source, move.target
    source, target = (sharding(end, devices=devices) for end in ends)
    found = stages(move.steps, *ends, move.shape, move.item_bytes, devices)
    run = inside_jit(found, source, target)

    def pinned(x: jax.Array) -> jax.Array:
        lies = jax.lax.with_sharding_constraint(x, source)
        return jax.lax.with_sharding_constraint(run(lies), target)

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
