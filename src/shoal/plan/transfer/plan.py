"""The plan of a move: its transport, steps and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shoal.colour import local
from shoal.errors import UsageError
from shoal.plan.hardware.links import Links
from shoal.plan.hardware.wiring import Topology
from shoal.plan.layout import Layout, shard_of
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.blocks import missing, tiles_of
from shoal.plan.transfer.bounds import Bounds, bounds_of
from shoal.plan.transfer.checks import Move, checked_move
from shoal.plan.transfer.collective import Weigh, by_bytes, by_seconds, shortest
from shoal.plan.transfer.move_steps import Step, received_bytes
from shoal.plan.transfer.permutes import num_permutes, side_of
from shoal.plan.transfer.places import places
from shoal.plan.transfer.point_to_point import PointToPoint, sends_of
from shoal.plan.transfer.regions import regions_of

__all__ = ["Transfer", "plan_transfer"]


@dataclass(frozen=True, repr=False)
class Transfer:
    """The plan of a move. A plain value: hashable, equal by content; `print` shows it."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    item_bytes: int
    steps: tuple[Step, ...]
    """The collectives, in order; none if nothing moves, or if the plan consists of `sends`."""
    sends: PointToPoint | None
    """Single sends: if the devices differ, or dims are cut unevenly."""
    bounds: Bounds

    @property
    def way(self) -> str:
        """ "none" if nothing must move, "collectives", or "point to point"."""
        if self.sends is not None:
            return "point to point"
        return "collectives" if self.steps else "none"

    @property
    def received_bytes(self) -> int:
        """The bytes received by the device that receives most."""
        if self.sends is not None:
            return self.sends.largest_bytes
        ids = np.sort(self.source.mesh.device_ids.ravel())
        total = np.zeros(len(ids), np.int64)
        for step in self.steps:
            each = np.searchsorted(ids, step.before.mesh.device_ids.ravel())
            total[each] += received_bytes(step, self.shape, self.item_bytes)
        return int(total.max())

    @property
    def bound_bytes(self) -> int:
        """The lower bound of `received_bytes` over all plans."""
        return self.bounds.largest_bytes

    @property
    def shard_bytes(self) -> tuple[int, int]:
        """Bytes that a device holds before and after."""
        return self._shard_bytes(self.source), self._shard_bytes(self.target)

    def seconds(self, topology: Topology, links: Links | None = None) -> float:
        """Return how long the steps take on a topology, one after the other, by `plan.cost`.

        Single sends are counted as the permutes that run them.

        Raises:
          UsageError: the plan consists of single sends of uneven shards; or as `cost`.
        """
        weigh = by_seconds(topology, links)
        if self.sends is not None:
            return self._seconds_of_sends(self.sends, weigh)
        return sum(self._weight(step, weigh) for step in self.steps)

    def _seconds_of_sends(self, sends: PointToPoint, weigh: Weigh) -> float:
        if not self._move.is_even:
            raise UsageError(
                "Transfer.seconds: this plan consists of single sends of uneven shards, whose "
                "time is not modeled; print(plan) shows their bytes"
            )
        side = side_of(self.source, self.target, self.shape)
        ids, hosts = zip(*sends.hosts, strict=True)
        row = Mesh({"device": len(ids)}, device_ids=ids, processes=hosts)
        block = math.prod(side) * self.item_bytes
        return num_permutes(sends, side) * weigh("permute", row, ("device",), block)

    @property
    def _move(self) -> Move:
        return Move(self.source, self.target, self.shape, self.item_bytes)

    def _weight(self, step: Step, weigh: Weigh) -> float:
        mesh, held = step.before.mesh, self._shard_bytes(step.before)
        if step.kind != "exchange":
            return weigh(step.kind, mesh, step.axes or mesh.axis_names, held)
        old, new = tiles_of(step.before), tiles_of(step.after, mesh)
        grid = math.prod(map(max, old.counts, new.counts))
        block = math.prod(self.shape) * self.item_bytes // grid
        return int(missing(old, new).max()) * weigh("permute", mesh, mesh.axis_names, block)

    def _shard_bytes(self, layout: Layout) -> int:
        return math.prod(shard_of(layout, self.shape)) * self.item_bytes

    def __hash__(self) -> int:  # cheap: computed in every relayout
        return hash((self.source, self.target, self.shape, self.item_bytes, self.steps))

    def __repr__(self) -> str:
        return (
            f"Transfer({self.way}: {self.received_bytes:,} B of at least {self.bound_bytes:,} B; "
            f"{self.source!r} → {self.target!r}, shape {self.shape})"
        )

    def __str__(self) -> str:
        head = (
            f"{self.source!r}\n→ {self.target!r}\n"
            f"shape {self.shape}, {self.item_bytes} bytes an element\n"
            f"a device receives {self.received_bytes:,} B at most; no plan can receive less than "
            f"{self.bound_bytes:,} B"
        )
        if self.sends is not None:
            return f"{head}\n{self.sends}"
        return "\n".join([head, *(f"  {n}. {self._line(s)}" for n, s in enumerate(self.steps, 1))])

    def _line(self, step: Step) -> str:
        most = int(received_bytes(step, self.shape, self.item_bytes).max())
        ends = (self._shard_bytes(layout) for layout in (step.before, step.after))
        held, holds = ends
        return f"{step}: receives {most:,} B; a device held {held:,} B and holds {holds:,} B"


@local
def plan_transfer(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    item_bytes: int,
    *,
    topology: Topology | None = None,
    links: Links | None = None,
) -> Transfer:
    """Return the plan of a move from one layout to another.

    Local.

    Between the same devices, if both layouts cut every dim evenly, the cheapest sequence of
    collectives, by bytes received or, given a topology, by seconds. Otherwise single sends,
    which receive exactly the lower bound. On the way no device holds more than the larger of
    its two shards, in addition to these.

    Args:
      source: the layout of the array. Sums may be pending; other reductions may not.
      target: the layout to move it to.
      shape: the shape of the whole array [rank].
      item_bytes: bytes of one element.
      topology: weighs collectives by seconds instead of bytes.
      links: the speed of its links; default `links_of(topology)`.

    Raises:
      UsageError: layouts or shapes that do not fit; sums that are pending between different
        devices or in uneven shards; a plan of too many sends.

    Example:
      >>> from shoal import Mesh
      >>> mesh = Mesh({"a": 2, "b": 2, "c": 2})
      >>> source, target = Layout(mesh, "c", "b"), Layout(mesh, ("c", "b", "a"), None)
      >>> print(plan_transfer(source, target, (64, 64), 4))
      Layout(c, b @ a=2 b=2 c=2)
      → Layout(c+b+a, - @ a=2 b=2 c=2)
      shape (64, 64), 4 bytes an element
      a device receives 1,024 B at most; no plan can receive less than 1,024 B
        1. exchange: receives 1,024 B; a device held 4,096 B and holds 2,048 B
    """
    move = checked_move(
        operation="plan_transfer", source=source, target=target, shape=shape, item_bytes=item_bytes
    )
    other = {axis: how for axis, how in source.partial.items() if how != "sum"}
    if other:
        raise UsageError(f"plan_transfer: {other}: only sums can be reduced by a move")
    if topology is None and links is None:
        return transfer_of(move)
    if topology is None:
        raise UsageError("plan_transfer: links= requires topology=")
    return _plan(move, by_seconds(topology, links), topology)


@lru_cache(maxsize=4096)
def transfer_of(move: Move) -> Transfer:
    """Return the plan of a move that has been checked, weighed by bytes."""
    return _plan(move, by_bytes)


def plan_of_chunk(plan: Transfer, shape: tuple[int, ...]) -> Transfer:
    """Return the plan by which an array of another shape moves as in `plan`: a chunk of its own."""
    move = Move(plan.source, plan.target, shape, plan.item_bytes)
    return plan if shape == plan.shape else transfer_of(move)


def _plan(move: Move, weigh: Weigh, topology: Topology | None = None) -> Transfer:
    where = places("plan_transfer", move.source.mesh, move.target.mesh, topology)
    pieces = regions_of(move)
    least = bounds_of(move, pieces, where)
    if 0 in move.shape:
        return Transfer(*move, (), None, least)
    if _same_devices(move.source, move.target) and move.is_even:
        steps = shortest(*move, weigh=weigh)
        if steps is not None:
            return Transfer(*move, steps, None, least)
    if move.why_reduces:
        raise UsageError(f"plan_transfer: {move.why_reduces}")
    return Transfer(*move, (), sends_of(pieces, where, move.item_bytes), least)


def _same_devices(source: Layout, target: Layout) -> bool:
    here, there = (np.sort(each.mesh.device_ids.ravel()) for each in (source, target))
    return source.mesh.kind == target.mesh.kind and np.array_equal(here, there)
