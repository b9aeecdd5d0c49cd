"""Cost model of a collective over a mesh axis on described hardware: steps, bytes, seconds.

    seconds = steps * latency + bytes over the busiest link / bandwidth      (α-β)

with all groups of the axis active at the same time, so that shared links carry the bytes of all of
them: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994), with
contention counted per link. `torus_cost` and `switched_cost` hold the schedules, each with its
source. The model counts the load of the links; a program may be slower because of other work,
and faster where it overlaps communication with computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import check_kind, integer, not_one_of
from shoal.colour import local
from shoal.errors import UsageError, nearest, raise_all
from shoal.plan.hardware.hosts import Hosts
from shoal.plan.hardware.links import Link, Links, links_of
from shoal.plan.hardware.wiring import Slices, Topology, Torus, check_topology
from shoal.plan.mesh import Mesh, mesh_of
from shoal.plan.schedules import switched_cost, torus_cost
from shoal.plan.schedules.ring import Side
from shoal.plan.schedules.routing import Grid
from shoal.plan.schedules.stage import NOTHING, PASSES, Stage
from shoal.plan.schedules.switched_cost import Members

__all__ = ["COLLECTIVES", "Cost", "box_seconds", "cost"]

IntArray = NDArray[np.int64]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")


class Cost(NamedTuple):
    """The cost of one collective."""

    collective: str
    axes: tuple[str, ...]  # mesh axes it runs over
    num_bytes: int  # the payload, as `cost` defines it for each collective
    steps: int  # sequential hops, or steps across a switch
    link_bytes: int  # over the busiest link, in one direction, all groups active; rounded up
    seconds: float
    link: str  # the kind of link that takes the most time: "ICI x", "DCN", "NVLink", "in chip"…


@local
def cost(
    topology: Topology,
    mesh: Mesh,
    collective: str,
    axis: str | Sequence[str],
    num_bytes: int,
    *,
    links: Links | None = None,
) -> Cost:
    """Return the cost of a collective over one or several axes of a mesh.

    Local.

    All groups of the axes run it at the same time. If a group spans several slices (or hosts)
    it runs in stages, within each and across them, one after the other; `link` and `link_bytes` are
    those of the slower stage. Traffic between the devices of one chip is not counted: its speed is
    not published.

    Args:
      topology: where the devices are.
      mesh: its devices, or some of them, in any order.
      collective: "all_reduce" and "broadcast" (`num_bytes` is what each device holds before and
        after), "all_gather" (what each holds after), "reduce_scatter", "all_to_all" or "permute"
        (what each holds before). A permute sends to the next device along the axis, and from the
        last one to the first; a broadcast is a scatter and an all-gather.
      axis: a name, or several, the first major.
      num_bytes: the payload of one device. Where it does not divide by the group, the shards are
        counted as equal fractions.
      links: the speed of the links; default `links_of(topology)`.

    Raises:
      UsageError: unknown collectives or axes; devices that the topology lacks; links of unknown
        speed.

    Example:
      >>> from shoal.planning import place, topology
      >>> torus = topology.parse("v5e:16x16")
      >>> mesh = place(torus, {"data": 16, "model": 16})
      >>> found = cost(torus, mesh, "all_gather", "model", 1 << 20)
      >>> found.steps, found.link_bytes, found.link
      (8, 491520, 'ICI x')
    """
    names = _check(topology, mesh, collective, axis, num_bytes)
    if links is not None:
        check_kind("cost", links, Links, "Links: links_of makes them")
    ids = _groups(mesh, names)
    if num_bytes == 0 or ids.shape[1] == 1:
        return Cost(
            collective,
            axes=names,
            num_bytes=num_bytes,
            steps=0,
            link_bytes=0,
            seconds=0.0,
            link="none",
        )
    cells = _cells(topology, mesh, ids)
    stages = _stages(topology, cells, collective, num_bytes, links=links or links_of(topology))
    whole = math.ceil(stages.link_bytes * (1 - 1e-12))  # 2.0000000000000004 bytes are 2
    return Cost(collective, names, num_bytes, stages.steps, whole, stages.seconds, stages.link)


def box_seconds(sides: Sequence[Side], link: Link, num_bytes: float, *, cores: int = 1) -> float:
    """Return the seconds of an all-reduce over groups that are all boxes of a torus.

    Args:
      sides: of one box, as `placement` makes them: one for each dim of links, then one for the
        cores of a chip. Copies of the box fill the torus.
      link: of the torus.
      num_bytes: the bytes that each device holds.
      cores: devices of a chip.

    >>> from shoal.plan.topology import parse
    >>> ici = links_of(parse("v5p:4x4x4")).near
    >>> box = (Side(4, 1, 4), Side(4, 1, 4), Side(1), Side(1))
    >>> box_seconds(box, ici, 1 << 30) / box_seconds(box[:1] + box[2:], ici, 1 << 30)
    0.625...
    """
    steps, share = torus_cost.box_gather(sides, cores)
    return 2 * (steps * link.latency_s + num_bytes * share / link.bytes_per_s)


def _check(
    topology: object, mesh: object, collective: object, axis: object, num_bytes: object
) -> tuple[str, ...]:
    """Return the names of the axes."""
    check_topology("cost", topology)
    mesh = mesh_of("cost", mesh)
    problems: list[str] = []
    problems += not_one_of("collective", collective, COLLECTIVES)
    names: tuple[Any, ...] = ()
    if isinstance(axis, str):
        names = (axis,)
    elif isinstance(axis, Sequence):
        names = tuple(axis)
    if not names or not all(isinstance(name, str) for name in names):
        problems.append(f"axis={axis!r} must be the name of an axis, or several names")
    for name in names:
        if isinstance(name, str) and name not in mesh.axis_names:
            hint = nearest(name, mesh.axis_names)
            problems.append(f"no axis {name!r} (axes: {', '.join(mesh.axis_names)}){hint}")
    if len(set(names)) < len(names):
        problems.append(f"axis={axis!r} names an axis twice")
    raise_all("cost", problems)
    if not 0 <= integer("cost", "num_bytes", num_bytes) < 1 << 63:
        raise UsageError(f"cost: num_bytes={num_bytes} must not be negative, and below 2**63")
    return names


def _groups(mesh: Mesh, names: tuple[str, ...]) -> IntArray:
    """Return the ids of each group of the axes, in their order [groups, members]."""
    places = [mesh.axis_names.index(name) for name in names]
    ids = np.moveaxis(mesh.device_ids, places, range(-len(places), 0))
    return ids.reshape(-1, math.prod(mesh.shape[place] for place in places))


def _cells(topology: Topology, mesh: Mesh, ids: IntArray) -> IntArray:
    """Return the cell of each device.

    Raises:
      UsageError: the topology lacks some of them.
    """
    known = topology.device_ids.ravel()
    order = np.argsort(known, kind="stable")
    positions = np.minimum(np.searchsorted(known[order], ids), len(known) - 1)
    cells = order[positions]
    strange = np.unique(ids[known[cells] != ids])
    if strange.size:
        shown = ", ".join(map(str, strange[:8].tolist())) + (", …" if strange.size > 8 else "")
        raise UsageError(
            f"cost: {mesh!r} has devices that {topology.text} lacks: {shown}; "
            f"its ids are {known.min()} to {known.max()}"
        )
    return cells


def _stages(
    topology: Topology, cells: IntArray, collective: str, num_bytes: int, links: Links
) -> Stage:
    """Return both stages of a collective, within slices (or hosts) and across them."""
    members = _members(topology, cells)
    near = NOTHING
    if int(members.inside.max()) > 1:
        link = _needed(links.near, topology, "link_bytes_per_s", "--link")
        if isinstance(topology, Torus | Slices):
            near = _on_tori(
                topology,
                cells=cells.ravel(),
                members=members,
                collective=collective,
                num_bytes=num_bytes,
                link=link,
            )
        else:
            near = _in_hosts(members, collective, num_bytes, link)
    if int(members.outside.max()) == 1:
        return near
    link = _needed(links.network, topology, "network_bytes_per_s", "--network")
    if collective == "all_to_all":
        pair_bytes = num_bytes / members.size
        return near.beside(switched_cost.across_all_to_all(members, link, pair_bytes))
    if collective == "permute":
        return near.beside(switched_cost.across_permute(members, link, num_bytes))
    return near.then(switched_cost.across_gather(members, link, num_bytes, PASSES[collective]))


def _members(topology: Topology, cells: IntArray) -> Members:
    hosts = np.unique(topology.processes.ravel(), return_inverse=True)[1].ravel()
    if isinstance(topology, Slices):
        sizes = [torus.num_devices for torus in topology.slices]
        places = np.repeat(np.arange(len(sizes)), sizes)
    else:
        places = hosts if isinstance(topology, Hosts) else np.zeros(hosts.size, np.int64)
    place = places[cells]
    key = np.arange(len(cells))[:, None] * (int(place.max()) + 1) + place
    _, own, counts = np.unique(key, return_inverse=True, return_counts=True)
    inside = counts[own.reshape(cells.shape)]
    outside = np.rint((1.0 / inside).sum(axis=1)).astype(np.int64)  # 1/m for each of m
    leaves = place != np.roll(place, -1, axis=1)
    return Members(
        size=cells.shape[1],
        place=place.ravel(),
        inside=inside.ravel(),
        outside=np.repeat(outside, cells.shape[1]),
        host=hosts[cells].ravel(),
        leaves=leaves.ravel(),
    )


def _in_hosts(members: Members, collective: str, num_bytes: int, link: Link) -> Stage:
    if collective == "all_to_all":
        return switched_cost.host_all_to_all(members, link, num_bytes / members.size)
    if collective == "permute":
        return switched_cost.host_permute(members, link, num_bytes)
    return switched_cost.host_gather(members, link, num_bytes, PASSES[collective])


def _on_tori(
    topology: Torus | Slices,
    cells: IntArray,
    members: Members,
    collective: str,
    num_bytes: int,
    link: Link,
) -> Stage:
    """Return the slowest slice's stage."""
    slowest = NOTHING
    for grid, chosen, coords in _grids(topology, cells, members.place):
        if collective == "permute":
            stays = ~members.leaves[chosen]
            ahead = np.searchsorted(chosen, members.next[chosen[stays]])  # in the same slice
            stages = torus_cost.permute(
                grid, source=coords[stays], target=coords[ahead], link=link, num_bytes=num_bytes
            )
        else:
            groups = _clusters(members, chosen, coords)
            if collective == "all_to_all":
                stages = torus_cost.all_to_all(grid, groups, link, num_bytes / members.size)
            else:
                stages = torus_cost.gather(grid, groups, link, num_bytes, passes=PASSES[collective])
        slowest = slowest.beside(stages)
    return slowest


def _grids(
    topology: Torus | Slices, cells: IntArray, place: IntArray
) -> Iterator[tuple[Grid, IntArray, IntArray]]:
    """Yield the slices of each shape: which devices are present, and where [devices, dims]."""
    tori = topology.slices if isinstance(topology, Slices) else (topology,)
    begins = np.cumsum([0, *(torus.num_devices for torus in tori)])
    kinds: dict[tuple[tuple[int, ...], tuple[bool, ...], int], list[int]] = {}
    for index, torus in enumerate(tori):
        kinds.setdefault((torus.shape, torus.wrap, torus.cores), []).append(index)
    for (shape, wrap, cores), numbers in kinds.items():
        chosen = np.flatnonzero(np.isin(place, numbers))
        inner = cells[chosen] - begins[place[chosen]]
        own = np.searchsorted(numbers, place[chosen])
        coords = np.column_stack((own, *np.unravel_index(inner, (*shape, cores))))
        yield Grid(len(numbers), shape, wrap, cores), chosen, coords.astype(np.int64)


def _clusters(members: Members, chosen: IntArray, coords: IntArray) -> list[IntArray]:
    """Return each group's devices in each slice, by size [groups, members, dims]."""
    # Stable: what a group has in a slice stays in the order of the axis.
    order = np.lexsort((members.place[chosen], chosen // members.size))
    counts = members.inside[chosen][order]
    return [
        coords[order[counts == size]].reshape(-1, size, coords.shape[1])
        for size in np.unique(counts).tolist()
    ]


def _needed(link: Link | None, topology: Topology, name: str, option: str) -> Link:
    if link is None:
        what = "network" if option == "--network" else "links"
        raise UsageError(
            f"cost: the speed of the {what} of {topology.text} is not known; pass "
            f"links=links_of(topology, {name}=…), or {option} to shoal plan"
        )
    return link
