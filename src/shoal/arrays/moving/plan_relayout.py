"""Plan a relayout: what it would move, before anything moves."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arguments import check_flags
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
)
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.host.host_values import deleted, not_placed
from shoal.arrays.moving.across_devices import (
    Programs,
    as_rows,
    is_apart,
    programs_across,
    travels_as,
)
from shoal.arrays.moving.agreed_move import obstacle
from shoal.arrays.moving.host_copy import check_way, has_words, in_one_memory
from shoal.arrays.moving.move import row_of, xla_program
from shoal.arrays.moving.planned_move import ArrayMove, is_better, programs_of, whole_shape
from shoal.arrays.moving.staged_move import by_host_alone
from shoal.colour import local
from shoal.errors import UsageError, WrongType, raise_all
from shoal.plan.compiled import received_bytes_of
from shoal.plan.hardware.links import Links
from shoal.plan.hardware.wiring import Topology
from shoal.plan.layout import Layout, shard_of
from shoal.plan.transfer.move_steps import Step
from shoal.plan.transfer.plan import Transfer, plan_of_chunk
from shoal.plan.transfer.staging import staging_of
from shoal.plan.transfer.traffic import Traffic, traffic_of
from shoal.runtime.jax_service.own_programs import own_programs


@dataclass(frozen=True, repr=False)
class RelayoutPlan:
    """The plan of one array's `relayout`. A plain value: equal by content; `print` shows it."""

    transfer: Transfer
    """The underlying plan, independent of JAX."""
    dtype: np.dtype[Any]
    in_one_memory: bool = False
    """Whether the devices are CPU devices of one process, so that tiles are copied in memory."""
    by_permutes: bool = False
    """Whether the devices differ, so that permutes move the array to them."""
    devices: tuple[jax.Device, ...] | None = field(default=None, compare=False)
    """Described devices, for which programs are compiled. None: this job's devices."""

    @property
    def way(self) -> str:
        """The transport.

        "none": no byte moves. "collectives": the steps, as one compiled program. "xla": a single
        step, for which XLA's own program is the same. "copy": within the memory of one process, or
        by `jax.device_put` between different devices of one process; `received_bytes` then says
        what each device would have to receive from others. "permutes": between different devices of
        several processes, the sends of `transfer.sends` as one program on all of them, run once or
        for each of several `parts`.
        """
        if self.transfer.way == "none":
            return "none"
        if self.in_one_memory:
            return "copy"
        return self._program_way

    @property
    def _program_way(self) -> str:
        """The transport if devices shared no memory."""
        if self.by_permutes and self.transfer.way != "none":
            return "permutes"
        if self.transfer.way != "collectives":
            return self.transfer.way if self.transfer.way == "none" else "copy"
        return "collectives" if is_better(self.transfer, self.dtype) else "xla"

    @property
    def steps(self) -> tuple[Step, ...]:
        """The collectives, in order."""
        return self.transfer.steps

    @property
    def parts(self) -> int:
        """How often the program runs: a large array moves to other devices in parts."""
        return self._across.parts if self.way == "permutes" else 1

    @property
    def received_bytes(self) -> int:
        """Maximum number of bytes received by a device."""
        return self.transfer.received_bytes

    @property
    def bound_bytes(self) -> int:
        """Lower bound of `received_bytes` over all plans."""
        return self.transfer.bound_bytes

    @cached_property
    def peak_bytes(self) -> int:
        """Peak memory of a device: both shards and the program's temporaries.

        Compiles the program, if any.
        """
        programs = [] if self.way == "copy" else self._compiled()
        both, held = self.transfer.bounds.peak_bytes, [_peak(each) for each in programs]
        return both + held[0] if self.parts > 1 else max([both, *held])

    def staged_peak_bytes(self, *, donate: bool) -> int:
        """Return a device's peak memory in `relayout(staged=True)`, for the arrays moved.

        Compiles the program that moves a chunk between processes, if any.

        Args:
          donate: as in `relayout`: free the source first, or keep it.

        Raises:
          UsageError: there are no collectives between the layouts, and several processes.
        """
        check_flags("staged_peak_bytes", donate=donate)
        plan = self.transfer
        bounds, chunk = plan.bounds, 0
        if self.way == "none":
            return bounds.donated_peak_bytes if donate else bounds.peak_bytes
        if not by_host_alone(*self._ends):
            if plan.sends is not None:
                raise UsageError("plan_relayout: no collectives move this array: it is not staged")
            staging = staging_of(plan)
            part = plan_of_chunk(plan, staging.shape_of(next(staging.boxes())))
            programs = compiled_programs(part, self.dtype, self.devices)
            chunk = max(map(_peak, programs))
        if donate:
            return max(bounds.donated_peak_bytes, chunk)
        return max(bounds.peak_bytes, plan.shard_bytes[0] + chunk)

    def program(self) -> Any:
        """Return the compiled program of the steps (`jax.stages.Compiled`).

        It runs `parts` times, unless the way is "copy": then it is what would run if the
        devices shared no memory, and what `constrain(via=)` runs.

        Raises:
          UsageError: no program runs, or two do, because the device order changes.
        """
        compiled = self._compiled()
        if len(compiled) != 1:
            raise UsageError(
                f"plan_relayout: this move (way {self.way!r}) runs {len(compiled)} programs; "
                "print(plan) shows its steps"
            )
        return compiled[0]

    @cached_property
    def default_received_bytes(self) -> int:
        """Maximum number of bytes received by a device if XLA chose the transport. Compiles it.

        Raises:
          UsageError: XLA cannot move arrays between different devices or device orders.
        """
        return received_bytes_of(self._default.as_text(), self.transfer.source.mesh.size)

    @cached_property
    def default_peak_bytes(self) -> int:
        """Peak memory of a device if XLA chose the transport. Compiles it.

        Raises:
          UsageError: as for `default_received_bytes`.
        """
        return _peak(self._default)

    def seconds(self, topology: Topology, links: Links | None = None) -> float:
        """Return the estimated duration of the steps on a topology, by the model of `plan.cost`.

        Raises:
          UsageError: the way is "copy", which is not modeled.
        """
        if self._program_way == "copy":
            raise UsageError(
                "RelayoutPlan.seconds: between different devices JAX copies the array, which the "
                "cost model does not cover; print(plan) shows the bytes"
            )
        return self.transfer.seconds(topology, links)

    def traffic(self, topology: Topology | None = None) -> Traffic:
        """Return the traffic over links within hosts, between hosts, and between slices.

        A plain value: `print` lists it, `describe` draws a table, a notebook shows ribbons.

        Args:
          topology: says which devices share a host; None: those of one process do.

        Raises:
          UsageError: the topology lacks devices of the meshes.
        """
        return traffic_of(self.transfer, topology)

    @cached_property
    def _default(self) -> Any:
        ends = self._ends
        if row_of(ends[0]) != row_of(ends[1]):
            raise UsageError(
                "plan_relayout: XLA itself moves arrays only among the same devices in one order"
            )
        return _compiled(
            xla_program((ends[0],), (ends[1],), ()), self.transfer.shape, self.dtype, ends[0]
        )

    @property
    def _ends(self) -> tuple[NamedSharding, NamedSharding]:
        source, target = self.transfer.source, self.transfer.target
        return (
            sharding_of(source, devices=self.devices),
            sharding_of(target, devices=self.devices),
        )

    @property
    def _across(self) -> Programs:
        dtype = travels_as(self.dtype, self._ends[0])
        return programs_across(as_rows(self.transfer), dtype, self.devices)

    def _compiled(self) -> list[Any]:
        plan = self.transfer
        if self._program_way == "xla":
            return [self._default]
        if self._program_way == "permutes":
            across, dtype = self._across, travels_as(self.dtype, self._ends[0])
            return [
                _compiled(across.send, whole_shape(across.takes, across.row), dtype, across.row)
            ]
        if self._program_way != "collectives":
            return []
        return compiled_programs(plan, self.dtype, self.devices)

    def __str__(self) -> str:
        if self.way == "permutes":
            parts = f", in {self.parts} parts" if self.parts > 1 else ""
            return f"way permutes{parts}\n{self.transfer}"
        if self._program_way != "copy":
            shared = ", in the memory of one process; among devices that share none:"
            return f"way {self.way}{shared * (self.way == 'copy')}\n{self.transfer}"
        return (
            f"way copy\n{self.transfer.source!r}\n→ {self.transfer.target!r}\n"
            f"shape {self.transfer.shape}: JAX copies it\n{self.transfer.bounds}"
        )

    def __repr__(self) -> str:
        return f"RelayoutPlan({self.way}: {self.transfer!r})"


@local
def plan_relayout(
    tree: Any, layouts: Layouts, *, way: Literal["collectives"] | None = None
) -> RelayoutPlan | Any:
    """Return what `relayout` would do with arrays: bytes, steps, memory. Nothing moves.

    Local.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`s with a sharding; their devices may be those of a
        topology described by `jax.experimental.topologies`, for absent hardware.
      layouts: the target layouts, as for `relayout`.
      way: as for `relayout`.

    Returns:
      A `RelayoutPlan` for an array, a tree of them for a tree.

    Raises:
      UsageError: leaves that have no layout, are PRNG keys (XLA chooses how to move these), deleted
        arrays, or values inside `jit`, `grad` or `vmap`; ranks that do not match, dims that
        do not divide evenly, on either side; what `relayout` refuses between devices of several
        processes. All offending leaves are named by path.

    Example:
      >>> import jax, numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> rows = shoal.put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x")))
      >>> plan = shoal.plan_relayout(rows, NamedSharding(mesh, P(None, "x")))
      >>> plan.way, plan.received_bytes == plan.bound_bytes
      ('copy', True)

      Of a tree:

      >>> plans = shoal.plan_relayout({"w": rows, "v": rows}, NamedSharding(mesh, P(None, "x")))
      >>> sum(plan.received_bytes for plan in jax.tree.leaves(plans)) == 2 * plan.received_bytes
      True
    """
    check_way("plan_relayout", way)
    problems: list[str] = []
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        why = _why_not(value)
        if why:
            problems.append(WrongType(f"{jax.tree_util.keystr(path)}: {why}" if path else why))
    raise_all("plan_relayout", problems)
    ends = [*(value.sharding for value in jax.tree.leaves(tree)), *jax.tree.leaves(layouts)]
    devices = _described(ends)
    leaves, treedef = leaf_layouts(tree, layouts, problems, devices=devices)
    plans = []
    for leaf in leaves:
        must_divide(leaf, problems)
        try:
            source = layout_of(leaf.value)
        except UsageError as error:  # it has none
            problems.append(f"{leaf.path}: {error}")
            continue
        must_divide(Leaf(f"{leaf.path}, the source", leaf.value, source), problems)
        cannot_be_pending(leaf, problems)
        if problems:  # what does not fit has no plan
            continue
        move = ArrayMove(leaf.value, leaf.value, sharding_of(leaf.layout, devices=devices))
        why = _why_not_planned(move, source, way)
        if why:
            problems.append(f"{leaf.path}: {why}")
        elif move.plan is not None:
            plans.append(_plan_of(move, move.plan, way, devices))
    raise_all("plan_relayout", problems)
    return treedef.unflatten(plans)


def _why_not_planned(move: ArrayMove, source: Layout, way: str | None) -> str:
    if move.changes_devices and source.partial:
        return f"{source!r} is pending, and sends to other devices reduce nothing: reduce it first"
    return obstacle(move, programs=way is not None) or move.why_not_planned


def _plan_of(
    move: ArrayMove, plan: Transfer, way: str | None, devices: tuple[jax.Device, ...] | None
) -> RelayoutPlan:
    dtype = move.array.dtype
    is_copy = way is None and in_one_memory(plan.source, plan.target) and not plan.source.partial
    permutes = is_apart(move.array.sharding, move.target, programs=way is not None)
    return RelayoutPlan(
        transfer=plan,
        dtype=dtype,
        in_one_memory=is_copy and has_words(dtype),
        by_permutes=permutes,
        devices=devices,
    )


def _described(ends: Iterable[object]) -> tuple[jax.Device, ...] | None:
    """Return the devices of shardings if some are described ones; None if all are present."""
    rows = [row_of(end) for end in ends if isinstance(end, NamedSharding)]
    devices = tuple(dict.fromkeys(device for row in rows for device in row))
    here: set[jax.Device] = set()
    for platform in {device.platform for device in devices}:
        with suppress(RuntimeError):  # no devices of this platform
            here |= {*jax.devices(platform)}
    return None if here.issuperset(devices) else devices


def _why_not(x: Any) -> str:
    """Return why there is no plan for a value, or an empty string."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return not_placed(x)
    if isinstance(x, jax.core.Tracer):
        return (
            f"{jax.typeof(x)} is a value inside jit, grad or vmap: plan the array outside, or a "
            "jax.ShapeDtypeStruct with its sharding; inside jit constrain(x, layout, via=plan) "
            "runs the plan"
        )
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "PRNG keys move as XLA chooses; plan jax.random.key_data(keys) instead"
    return deleted(x) if isinstance(x, jax.Array) else ""


def compiled_programs(
    plan: Transfer, dtype: np.dtype[Any], devices: tuple[jax.Device, ...] | None = None
) -> list[Any]:
    """Return the compiled programs of a plan's steps."""
    programs: list[Any] = []
    shard = shard_of(plan.source, plan.shape)
    for run, takes, gives in programs_of(plan, dtype, devices):
        programs.append(_compiled(run, whole_shape(shard, takes), dtype, takes))
        shard = gives.shard_shape(programs[-1].out_info.shape)
    return programs


@own_programs()
def _compiled(run: Any, shape: tuple[int, ...], dtype: Any, takes: NamedSharding) -> Any:
    return run.lower(jax.ShapeDtypeStruct(shape, dtype, sharding=takes)).compile()


def _peak(compiled: Any) -> int:
    """Return a program's memory on a device, arguments and results included."""
    stats = compiled.memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(held + stats.temp_size_in_bytes)
