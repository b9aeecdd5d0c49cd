"""Moves between devices of several processes: are they possible, and do all processes agree?

Where arrays are sent between processes, these first agree, in one round trip: nothing moves before.
A move that each process makes from what it holds sends nothing to agree: the call is only recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shoal.arrays.bridge.leaf_layouts import Leaf, leaf_layouts, meshes_in, path_text
from shoal.arrays.host.agreed_program import agree_on_program, concrete, fail_program
from shoal.arrays.host.host_values import is_key
from shoal.arrays.host.record_call import owners_of_mesh, record_call
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.moving.across_devices import is_across, is_apart
from shoal.arrays.moving.move import row_of
from shoal.arrays.moving.planned_move import ArrayMove
from shoal.plan.transfer.move_steps import spans_processes
from shoal.plan.transfer.permutes import MOST_PERMUTES, num_permutes, side_of


def obstacle(move: ArrayMove, *, programs: bool) -> str:
    """Return why an array cannot move, or an empty string; the same on every process.

    Args:
      programs: use programs within one process, too.
    """
    source, target = move.array.sharding, move.target
    if not is_apart(source, target, programs=programs and not move.is_traced):
        return ""
    here, there = source.device_set, target.device_set
    owners = ", ".join(map(str, sorted({device.process_index for device in here | there})))
    kinds = [next(iter(devices)).platform for devices in (here, there)]
    if kinds[0] != kinds[1]:
        return (
            f"is on {kinds[0]} devices and is to move to {kinds[1]} devices, of processes "
            f"{owners}; no program runs on both: allgather brings it to hosts, put places it there"
        )
    if move.is_traced:
        return (
            f"is being differentiated, and is to move to other devices, of processes {owners}: "
            "cotangents do not travel back there; take the gradient on one side, and relayout it"
        )
    return _too_much(move)


def _too_much(move: ArrayMove) -> str:
    """Return why no plan moves an array to other devices, or an empty string."""
    if not move.array.size or is_key(move.array):
        return ""
    plan = move.plan
    if plan is None:
        return move.why_not_planned
    if plan.sends is None:
        return ""
    count = num_permutes(plan.sends, side_of(plan.source, plan.target, plan.shape))
    if count <= MOST_PERMUTES:
        return ""
    return (
        f"would take {count:,} permutes to reach {plan.target!r}, and a move may take "
        f"{MOST_PERMUTES:,}; go by way of a layout there that splits dims as the source does"
    )


def agree_on_move(
    operation: str,
    leaves: Sequence[Leaf],
    moves: Sequence[ArrayMove | None],
    *,
    options: tuple[str, ...] = (),
    nodes: tuple[str, ...] = (),
    timeout_s: float | None = None,
) -> None:
    """Record the call; or, if arrays are sent between processes, first agree on it.

    Args:
      leaves: with their layouts.
      moves: their moves; None: hidden by `vmap`, so that the array may have to be sent.
      options: further lines that must be equal.
      nodes: the line of the tree.
      timeout_s: deadline of that agreement in seconds; None: SHOAL_TIMEOUT_S.

    Raises:
      DivergenceError, DeadlineError, ProcessLostError, PeerFailedError: as `agree_on_program`.
    """
    sent = [pair for pair in zip(leaves, moves, strict=True) if _is_sent(*pair)]
    if not sent:
        record_call(operation, leaves, lane=None, options=options, nodes=nodes)
        return
    sources = {leaf.path: move.array for leaf, move in sent if move is not None}
    agree_on_program(operation, leaves, sources, options=options, nodes=nodes, timeout_s=timeout_s)


def fail_move(error: BaseException, tree: Any, layouts: Any, *_: object, **__: object) -> None:
    """Fail a refused `relayout` for the other processes, if arrays would be sent between them."""
    fail_any_move("relayout", error, tree, layouts)


def fail_any_move(
    operation: str, error: BaseException, tree: Any, layouts: Any, *, none_clears: bool = False
) -> None:
    """As `fail_move`, of a call of any name. An array without a layout of its own counts as sent,
    and so does a layout without an array: the other processes may have what is missing here.
    """
    if is_tracing():
        return
    leaves, _ = leaf_layouts(tree, layouts, [], none_clears=none_clears)
    known = {leaf.path: leaf for leaf in leaves}
    arrays, is_sent = [], False
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        leaf, array = known.get(path_text(path)), concrete(value)
        if array is None or leaf is None or _is_sent(leaf, move_of(leaf, array)):
            is_sent = True
            if array is not None:
                arrays.append(array)
    if is_sent or not known:
        meshes = [leaf.layout.mesh for leaf in leaves if leaf.layout is not None]
        fail_program(operation, error, arrays, meshes or meshes_in(layouts))


def move_of(leaf: Leaf, array: jax.Array | None) -> ArrayMove | None:
    """Return the move of a leaf to its layout; None without an array, or without a layout."""
    if array is None or leaf.layout is None:
        return None
    return ArrayMove(leaf.value, array, leaf.sharding)


def _is_sent(leaf: Leaf, move: ArrayMove | None) -> bool:
    """May the move of this leaf send between processes? The same on every process.

    Where XLA's own program runs instead of the plan (no plan, a traced move, keys), it may send
    what the plan would not. The exception: between the same devices in the same order, it cuts a
    slice from what each device holds.
    """
    if leaf.layout is None:
        return False
    if move is None:
        return len(owners_of_mesh(leaf.layout.mesh)) > 1
    array, source, target = move.array, move.array.sharding, move.target
    if source == target:
        return False
    if move.changes_devices:
        return is_across(source, target)
    if len(owners_of_mesh(leaf.layout.mesh)) == 1:
        return False
    is_pending = isinstance(source, NamedSharding) and bool(source.spec.unreduced)
    if not is_pending and (not array.size or source.is_equivalent_to(target, array.ndim)):
        return False
    plan = move.plan
    if plan is None:
        return True
    if (move.is_traced or is_key(array)) and row_of(source) != row_of(target):
        return True
    return plan.sends is not None or any(map(spans_processes, plan.steps))
