"""Moves between devices of several processes: are they possible, and do all processes agree?

Where arrays are sent between processes, these first agree, in one round trip: nothing moves before.
A move that each process makes from what it holds sends nothing to agree: it leaves a trail.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from shoal.arrays.bridge.leaf_layouts import Leaf, leaf_layouts, path_text
from shoal.arrays.bridge.sharding import layout_of_sharding, named_sharding
from shoal.arrays.host.agreed_program import agree_on_program, concrete, fail_program
from shoal.arrays.host.host_values import is_key
from shoal.arrays.host.record_trail import owners_of_mesh, record_trail
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.moving.across_devices import is_across, is_apart
from shoal.arrays.moving.move import row_of
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.transfer.move_steps import spans_processes
from shoal.plan.transfer.permutes import MOST_PERMUTES, num_permutes, side_of
from shoal.plan.transfer.plan import plan_transfer


def obstacle(
    leaf: Leaf,
    array: jax.Array | jax.ShapeDtypeStruct,
    *,
    programs: bool,
    devices: Sequence[jax.Device] | None = None,
) -> str:
    """Return why an array cannot move, or an empty string; the same on every process.

    Args:
      programs: use programs within one process, too.
      devices: the devices to search for the layout's; None: those of this job.
    """
    target = named_sharding(leaf.layout, devices=devices)
    is_traced = leaf.value is not array
    if not is_apart(array.sharding, target, programs=programs and not is_traced):
        return ""
    here, there = array.sharding.device_set, target.device_set
    owners = ", ".join(map(str, sorted({device.process_index for device in here | there})))
    kinds = [next(iter(devices)).platform for devices in (here, there)]
    if kinds[0] != kinds[1]:
        return (
            f"is on {kinds[0]} devices and is to move to {kinds[1]} devices, of processes "
            f"{owners}; no program runs on both: allgather brings it to hosts, put places it there"
        )
    if is_traced:
        return (
            f"is being differentiated, and is to move to other devices, of processes {owners}: "
            "cotangents do not travel back there; take the gradient on one side, and relayout it"
        )
    return _too_much(array, target)


def _too_much(array: jax.Array | jax.ShapeDtypeStruct, wanted: NamedSharding) -> str:
    """Return why no plan moves an array to other devices, or an empty string."""
    try:
        source = layout_of_sharding(array.sharding, array.ndim)
        source = Layout(source.mesh, *source.dims)  # pending sums are reduced first
        target = layout_of_sharding(wanted, array.ndim)
        if not array.size or not array.ndim:
            return ""
        plan = plan_transfer(source, target, array.shape, 1)
    except UsageError as error:
        return str(error)
    if plan.sends is None:
        return ""
    count = num_permutes(plan.sends, side_of(source, target, array.shape))
    if count <= MOST_PERMUTES:
        return ""
    return (
        f"would take {count:,} permutes to reach {target!r}, and a move may take "
        f"{MOST_PERMUTES:,}; go by way of a layout there that splits dims as the source does"
    )


def agree_on_move(
    operation: str,
    leaves: Sequence[Leaf],
    arrays: Sequence[jax.Array | None],
    *,
    options: tuple[str, ...] = (),
    timeout_s: float | None = None,
) -> None:
    """Leave a trail; or, if arrays are sent between processes, first agree on the call.

    Args:
      leaves: with their layouts.
      arrays: the arrays to move; None: hidden by `vmap`, so that they may have to be sent.
      options: further lines that must be equal.
      timeout_s: deadline of that agreement in seconds; None: SHOAL_TIMEOUT_S.

    Raises:
      DivergenceError, DeadlineError, ProcessLostError, PeerFailedError: as `agree_on_program`.
    """
    moving = [
        (leaf, array) for leaf, array in zip(leaves, arrays, strict=True) if _is_sent(leaf, array)
    ]
    if not moving:
        record_trail(operation, leaves, lane=None, options=options)
        return
    sources = {leaf.path: array for leaf, array in moving if array is not None}
    agree_on_program(operation, leaves, sources, options=options, timeout_s=timeout_s)


def fail_move(error: BaseException, tree: Any, layouts: Any, *_: object, **__: object) -> None:
    """Fail a refused `relayout` for the other processes, if arrays would be sent between them."""
    fail_any_move("relayout", error, tree, layouts)


def fail_any_move(
    operation: str, error: BaseException, tree: Any, layouts: Any, *, none_clears: bool = False
) -> None:
    """As `fail_move`, of a call of any name. An array without a layout of its own counts as sent:
    it may have one in the other processes.
    """
    if is_tracing():
        return
    leaves, _ = leaf_layouts(tree, layouts, [], none_clears=none_clears)
    known = {leaf.path: leaf for leaf in leaves}
    arrays, meshes = [], []
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        leaf, array = known.get(path_text(path)), concrete(value)
        if array is not None and (leaf is None or _is_sent(leaf, array)):
            arrays.append(array)
            meshes += [] if leaf is None else [leaf.layout.mesh]
    if arrays:
        fail_program(operation, error, arrays, [*meshes, *(leaf.layout.mesh for leaf in leaves)])


def _is_sent(leaf: Leaf, array: jax.Array | None) -> bool:
    """May a move of this array send between processes? The same on every process."""
    if leaf.layout is None:
        return False
    if array is None:
        return len(owners_of_mesh(leaf.layout.mesh)) > 1
    source, target = array.sharding, named_sharding(leaf.layout)
    if source == target:
        return False
    if source.device_set != target.device_set:
        return is_across(source, target)
    if len(owners_of_mesh(leaf.layout.mesh)) == 1:
        return False
    is_planned = leaf.value is array and not is_key(array)
    return _sends(source, target, array.shape, max(1, array.dtype.itemsize), is_planned)


@lru_cache(maxsize=4096)
def _sends(
    source: Sharding, target: NamedSharding, shape: tuple[int, ...], item_bytes: int, planned: bool
) -> bool:
    """May a move among the same devices send between processes?

    A program of XLA's own, where no plan runs, is free to send what need not be sent. But a slice
    among devices in one order it cuts from what each device holds.
    """
    rank = len(shape)
    is_pending = isinstance(source, NamedSharding) and bool(source.spec.unreduced)
    if not is_pending and (0 in shape or source.is_equivalent_to(target, rank)):
        return False
    try:
        ends = layout_of_sharding(source, rank), layout_of_sharding(target, rank)
        plan = plan_transfer(*ends, shape, item_bytes)
    except UsageError:
        return True
    if not planned and row_of(source) != row_of(target):
        return True
    return plan.sends is not None or any(map(spans_processes, plan.steps))
