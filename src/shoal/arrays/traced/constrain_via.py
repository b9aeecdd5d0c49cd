"""A planned move inside `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.bridge.sharding import sharding
from shoal.arrays.moving.move_program import inside_jit, stages
from shoal.arrays.moving.plan_relayout import RelayoutPlan
from shoal.arrays.moving.weak_type import is_weak, weakened
from shoal.errors import UsageError, WrongType
from shoal.plan.transfer.plan import Transfer, plan_transfer
from shoal.plan.transfer.same_devices import in_one_order


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
      UsageError: under `vmap`, since the steps do not handle a batch dim.
    """
    move = plan.transfer
    back = plan_transfer(move.target, move.source, move.shape, move.item_bytes)
    there_and_back = [_pinned_move(each, plan.devices) for each in (move, back)]
    try:
        moved: jax.Array = jax.custom_derivatives.linear_call(
            lambda _, value: there_and_back[0](value),
            lambda _, cotangent: there_and_back[1](cotangent),
            (),
            x,
        )
    except NotImplementedError:
        raise UsageError(
            "constrain: via= is the plan of one array, and under vmap this is a batch of them: "
            "plan a move of the whole batch, and constrain that outside vmap"
        ) from None
    if is_weak(x) and not is_weak(moved):
        return weakened(moved, sharding(move.target))
    return moved


def _pinned_move(
    move: Transfer, devices: Sequence[jax.Device] | None
) -> Callable[[jax.Array], jax.Array]:
    ends = move.source, move.target
    source, target = (sharding(end, devices=devices) for end in ends)
    found = stages(move.steps, *ends, move.shape, move.item_bytes, devices)
    run = inside_jit(found, source, target)

    def pinned(x: jax.Array) -> jax.Array:
        lies = jax.lax.with_sharding_constraint(x, source)
        return jax.lax.with_sharding_constraint(run(lies), target)

    return pinned
