"""Traffic of a move by class of link: within a host, between hosts, between slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import check_kind
from shoal.colour import local
from shoal.plan.hardware.hosts import Hosts
from shoal.plan.hardware.wiring import Topology
from shoal.plan.layout import shard_of
from shoal.plan.transfer.blocks import exchange_rounds, tiles_of
from shoal.plan.transfer.move_steps import Step, pairs
from shoal.plan.transfer.places import Places, places
from shoal.plan.transfer.plan import Transfer

__all__ = ["StepTraffic", "Traffic", "traffic_of"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class StepTraffic:
    """The bytes that all devices send in a step, by class of links."""

    title: str
    num_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """The bytes sent by a plan's steps. A plain value; `print` shows it, `describe` draws it."""

    transfer: Transfer
    classes: tuple[str, ...]
    """The classes of links, near ones first."""
    flows: tuple[StepTraffic, ...]
    """The traffic of each step in order; of single sends, of each round."""

    @property
    def num_bytes(self) -> dict[str, int]:
        """Class → bytes over its links in all steps."""
        sums = np.array([flow.num_bytes for flow in self.flows], np.int64)
        in_all = sums.reshape(-1, len(self.classes)).sum(axis=0).tolist()
        return dict(zip(self.classes, in_all, strict=True))

    def __str__(self) -> str:
        lines = [f"{name}: {count:,} B" for name, count in self.num_bytes.items()]
        for number, flow in enumerate(self.flows, 1):
            each = zip(self.classes, flow.num_bytes, strict=True)
            amounts = ", ".join(f"{name} {count:,} B" for name, count in each if count)
            lines.append(f"  {number}. {flow.title}: {amounts or 'nothing is sent'}")
        return "\n".join(lines)


@local
def traffic_of(plan: Transfer, topology: Topology | None = None) -> Traffic:
    """Return the bytes that a plan sends within hosts, and between them.

    Local.

    A byte is counted at every device that receives it, from the device that held it before the
    step: how a backend forwards it (around a ring, via one device of a host) does not matter.
    So the flows of a step add up to what its devices receive.

    Args:
      topology: says the host and the slice, or the switch, of each device; None: a host for each
        process of the meshes.

    Raises:
      UsageError: the topology lacks devices of the meshes.

    Example:
      >>> from shoal import Layout
      >>> from shoal import Mesh
      >>> from shoal.planning import plan_transfer
      >>> mesh = Mesh({"x": 4}, processes=[0, 0, 1, 1])
      >>> print(traffic_of(plan_transfer(Layout(mesh, "x"), Layout(mesh, None), (8,), 4)))
      same host: 32 B
      other host: 64 B
        1. all_gather over x.0+x.1 of dim 0: same host 32 B, other host 64 B
    """
    check_kind("traffic_of", plan, Transfer, "a plan: plan_transfer makes one")
    where = places("traffic_of", plan.source.mesh, plan.target.mesh, topology)
    names = ["same host", "other host"]
    if len(np.unique(where.slices)) > 1:
        names.append("other switch" if isinstance(topology, Hosts) else "other slice")
    flows = [_flow(str(step), _sent(step, plan, where), where) for step in plan.steps]
    for index, sends in enumerate(plan.sends.rounds if plan.sends else ()):
        sent = np.array([[s.sender, s.receiver, s.num_bytes] for s in sends], np.int64)
        flows.append(_flow(f"round {index}", [(where.at(sent[:, 0]), where.at(sent[:, 1]),
                                               sent[:, 2])], where))  # fmt: skip
    return Traffic(
        plan, tuple(names), tuple(StepTraffic(f.title, f.num_bytes[: len(names)]) for f in flows)
    )


# Places in `Places.devices` of senders and receivers, and the bytes of each message.
_Messages = tuple[IntArray, IntArray, IntArray]


def _flow(title: str, messages: list[_Messages], where: Places) -> StepTraffic:
    sums = np.zeros(3, np.int64)
    for senders, receivers, num_bytes in messages:
        far = where.hosts[senders] != where.hosts[receivers]
        kinds = far.astype(np.int64) + (far & (where.slices[senders] != where.slices[receivers]))
        np.add.at(sums, kinds, num_bytes)
    return StepTraffic(title, tuple(sums.tolist()))


def _sent(step: Step, plan: Transfer, where: Places) -> list[_Messages]:
    """Return the messages of a step."""
    mesh = step.before.mesh
    device_places = where.at(mesh.device_ids.ravel())
    held = math.prod(shard_of(step.before, plan.shape)) * plan.item_bytes
    if step.kind == "permute":
        return [_single(pairs(step.before, step.after), device_places, held)]
    if step.kind == "exchange":
        rounds = exchange_rounds(step.before, step.after)
        ends = [(sender, receiver) for sends in rounds for sender, receiver, _ in sends]
        counts = tiles_of(step.before).counts, tiles_of(step.after, mesh).counts
        block = math.prod(plan.shape) * plan.item_bytes // math.prod(map(max, *counts))
        return [_single(ends, device_places, block)]
    return list(_within_groups(step, device_places, held))


def _single(ends: Sequence[tuple[int, int]], device_places: IntArray, size: int) -> _Messages:
    sent = np.array(ends, np.int64).reshape(-1, 2)
    return device_places[sent[:, 0]], device_places[sent[:, 1]], np.full(len(sent), size)


def _within_groups(step: Step, device_places: IntArray, held: int) -> Iterator[_Messages]:
    """Yield the messages within each group: from the first device to the second, and so on."""
    mesh = step.before.mesh
    group = math.prod(mesh.axes[axis] for axis in step.axes)
    each = {
        "slice": 0,
        "all_gather": held,
        "all_to_all": held // group,
        "reduce_scatter": held // group,
        "all_reduce": 2 * (held // group),
    }[step.kind]
    axes = [mesh.axis_names.index(axis) for axis in step.axes]
    grid = np.moveaxis(device_places.reshape(mesh.shape), axes, range(-len(axes), 0)).reshape(
        -1, group
    )
    for shift in range(1, group if each else 1):
        receivers = np.roll(grid, shift, axis=1)
        yield grid.ravel(), receivers.ravel(), np.full(grid.size, each)
