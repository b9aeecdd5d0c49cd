"""Moves between devices of several processes: are they possible, and do all processes agree?

Among the same devices `relayout` sends nothing to agree: it leaves a trail. Where devices differ,
the arguments decide which processes run a program together, so processes that disagree would wait
for each other inside XLA, which has no deadline that names them. So these processes first meet, in
one round trip: nothing moves before all have agreed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shoal import settings
from shoal.arrays.bridge.leaf_layouts import Leaf, leaf_layouts
from shoal.arrays.bridge.sharding import layout_of_sharding, sharding
from shoal.arrays.host.record_trail import record_trail, trail_lines
from shoal.arrays.moving.across_devices import is_across, is_apart
from shoal.errors import DeadlineError, UsageError
from shoal.plan.layout import Layout
from shoal.plan.transfer.permutes import MOST_PERMUTES, num_permutes, side_of
from shoal.plan.transfer.plan import plan_transfer
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.lanes import fail_call
from shoal.runtime.jax_service.process_numbers import processes_of
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.failure_words import listed
from shoal.runtime.verb import coordinator_here


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
    target = sharding(leaf.layout, devices=devices)
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
    leaves: Sequence[Leaf], arrays: Sequence[jax.Array | None], *, options: tuple[str, ...] = ()
) -> None:
    """Leave a trail; or, if arrays go to other devices, return once all processes have arrived.

    Args:
      leaves: with their layouts.
      arrays: the arrays to move.
      options: further lines that must be equal.

    Raises:
      DivergenceError: on all that arrived: another call, or other layouts.
      DeadlineError, ProcessLostError, PeerFailedError: as `Coordinator.arrive`.
    """
    sources = _sources(leaves, arrays)
    if not sources:
        record_trail("relayout", leaves, lane=None, options=options)
        return
    coordinator = coordinator_here()
    if coordinator is None or coordinator.num_processes == 1:
        return
    timeout_s = settings.timeout("relayout", None, "SHOAL_TIMEOUT_S")
    owners = _owners(coordinator, leaves, sources, timeout_s)
    if coordinator.process not in owners:
        return
    fault_points.reach("relayout.before_arrive", coordinator.process)
    lies = [f"{path}: lies as {layout.text}" for path, layout in sources.items()]
    agree(
        coordinator,
        Call(
            f"relayout among {listed(owners)}",
            None,
            callsite(),
            (*options, *lies, *trail_lines(leaves)),
        ),
        timeout_s=timeout_s,
        group=None if len(owners) == coordinator.num_processes else tuple(sorted(owners)),
        lane=coordinator.trails.lane or "main",
    )
    fault_points.reach("relayout.after_arrive", coordinator.process)


def fail_move(error: BaseException, tree: Any, layouts: Any, *_: object, **__: object) -> None:
    """Fail a refused `relayout` for the other processes, if it moves arrays to other devices."""
    leaves = [leaf for leaf in leaf_layouts(tree, layouts, [])[0] if is_placed(leaf.value)]
    sources = _sources(leaves, [leaf.value for leaf in leaves])
    coordinator = coordinator_here()
    if coordinator is None or coordinator.num_processes == 1 or not sources:
        return
    timeout_s = settings.timeout("relayout", None, "SHOAL_TIMEOUT_S")
    owners = _owners(coordinator, leaves, sources, timeout_s)
    lane = coordinator.trails.lane or "main"
    fail_call(coordinator, "relayout", error, lane=lane, processes=owners)


def is_placed(value: object) -> bool:
    """Is it an array on devices, and not a value inside `jit`?"""
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def _sources(leaves: Sequence[Leaf], arrays: Sequence[jax.Array | None]) -> Mapping[str, Layout]:
    """Return the layouts of the arrays that move to other devices, by path."""
    return {
        leaf.path: layout_of_sharding(array.sharding, array.ndim)
        for leaf, array in zip(leaves, arrays, strict=True)
        if array is not None and is_across(array.sharding, sharding(leaf.layout))
    }


def _owners(
    coordinator: Coordinator,
    leaves: Sequence[Leaf],
    sources: Mapping[str, Layout],
    timeout_s: float,
) -> set[int]:
    """Return the processes that meet for a move."""
    meshes = [layout.mesh for layout in sources.values()]
    meshes += [leaf.layout.mesh for leaf in leaves]
    owners = {process for mesh in meshes for process in mesh.process_indices}
    if any(mesh.kind == "tpu" for mesh in meshes):
        owners = _job_numbers(coordinator, owners, timeout_s)
    return owners


def _job_numbers(coordinator: Coordinator, owners: Iterable[int], timeout_s: float) -> set[int]:
    """Return processes by their job numbers: on TPUs JAX may number them differently.

    Raises:
      DeadlineError: one of them has not called `relayout`, so it has not said its number.
    """
    owners = {*owners}
    if len(owners) == coordinator.num_processes:
        return owners
    try:
        return {*processes_of(owners, coordinator.process, timeout_s=timeout_s)}
    except TimeoutError as error:
        me = ThisProcess(coordinator.process, coordinator.hosts)
        raise DeadlineError(
            f"{me}: relayout: the processes that are {sorted(owners)} in JAX own the devices of "
            f"both meshes, and have not all called it within {timeout_s:g} s ({error})",
            name="relayout",
            waited_s=timeout_s,
        ) from None
