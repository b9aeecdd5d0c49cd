"""Cost of collectives on a torus, and the schedules assumed.

Groups that are boxes of chips, as placement makes them, gather dim after dim: the *bucket*
algorithm. Each group cuts its payload into parts that go through the dims in different orders at
the same time, so that all dims carry data all the time: N. Jain and Y. Sabharwal, "Optimal bucket
algorithms for large MPI collectives on torus interconnects", ICS 2010; P. Sack and W. Gropp,
"Collective algorithms for multiported torus networks", ACM TOPC 1 (2015).

XLA compiles the same for TPUs where dims have equal sizes ("StrategyND", a colour for each order);
over dims of different sizes libtpu 0.0.52 takes fewer orders, and so leaves links idle that are
counted here: a group of 4 x 8 wrapped chips takes one order, whose second dim carries 1.8 times the
bytes.

Other groups gather in a ring through their devices in mesh order, both ways round: P. Patarasuk and
X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).

On a ring of wrapped chips both give the times of https://jax-ml.github.io/scaling-book/sharding:
an all-gather of V bytes along k wrapped dims takes V / (k W), W being the bandwidth of a link in
both directions together; without wrap twice that; and an all-to-all a quarter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.plan.hardware.links import Link
from shoal.plan.hardware.wiring_checks import DIMS
from shoal.plan.schedules.ring import Side
from shoal.plan.schedules.routing import Grid, LinkTraffic, box_values, distance, lines
from shoal.plan.schedules.stage import NOTHING, Stage

IntArray = NDArray[np.int64]

_MOST_PAIRS = 1 << 24  # pairs of devices routed individually


def gather(
    grid: Grid, groups: Sequence[IntArray], link: Link, num_bytes: int, passes: int
) -> Stage:
    """Return the cost of `passes` all-gathers whose result on each device is `num_bytes`.

    Args:
      groups: coordinates of all groups' devices in the order of the axis, for each size of group
        [groups, members, dims].
    """
    several = [own for own in groups if own.shape[1] > 1]
    if not several:
        return NOTHING
    values = box_values(several[0]) if len(several) == 1 else None
    if values is None:
        return _ring(grid, several, link, num_bytes, passes)
    own_lines = lines(grid, several[0], values)
    steps = passes * (sum(line.steps for line in own_lines) + values[-1].shape[1] - 1)
    share, dims = _bucket(
        [line.chips for line in own_lines], [line.load for line in own_lines], several[0].shape[1]
    )
    return _stage(link, [own_lines[n].dim for n in dims], steps, passes * num_bytes * share)


def box_gather(sides: Sequence[Side], cores: int) -> tuple[int, float]:
    """Return the steps of one all-gather, and the share of its result on the busiest link.

    Args:
      sides: of the box, those of the links, then that of the cores.
      cores: devices of a chip; all of them gather at once.
    """
    counts, loads, steps, members = [], [], 0, 1
    for side in sides[:-1]:
        members *= side.chips
        if side.chips > 1:
            closes = side.chips * side.stride == side.ring
            counts.append(side.chips)
            loads.append(cores * side.stride * (0.5 if closes else 1.0))
            steps += side.stride * (side.chips // 2 if closes else side.chips - 1)
    own = sides[-1].chips
    return steps + own - 1, _bucket(counts, loads, members * own)[0]


def _bucket(
    counts: Sequence[int], loads: Sequence[float], members: int
) -> tuple[float, tuple[int, ...]]:
    """Return the share of the payload that the busiest link carries, and the dims that bind.

    A part that goes through the dims in some order brings each device, along each dim, what the
    dims before it have gathered, once for every other chip on its line. The parts' sizes are free,
    so what all of them bring along dim d, x[d] of the payload, is any point of a polymatroid: no
    set S of dims brings more than 1 - 1 / prod(counts[S]), and all together bring 1 - 1 / members.
    The largest x[d] * loads[d] is then least at

        max over sets T of dims of (1 / (members / prod(counts[T])) - 1 / members)
                                   / sum of 1 / loads[d] over T

    (max-flow min-cut for polymatroids: J. Edmonds, 1970). No schedule needs less: the planes
    across T, of members / prod(counts[T]) devices each, must receive that much over T's links.
    """
    best, binding = 0.0, tuple[int, ...]()
    for size in range(1, len(counts) + 1):
        for dims in itertools.combinations(range(len(counts)), size):
            across = math.prod(counts[dim] for dim in dims)
            share = (across - 1) / members / sum(1.0 / loads[dim] for dim in dims)
            if share >= best:
                best, binding = share, dims
    return best, binding


def _ring(grid: Grid, groups: Sequence[IntArray], link: Link, num_bytes: int, passes: int) -> Stage:
    """Gather in rings through the devices in the order of the axis, half of each shard either way.

    A hop of a group of n carries (n - 1) / (2 n) of the payload; the farthest shard comes from
    n / 2 hops away.
    """
    traffic, steps = LinkTraffic(grid), 0
    for own in groups:
        members = own.shape[1]
        here, there = (
            own.reshape(-1, own.shape[2]),
            np.roll(own, -1, axis=1).reshape(-1, own.shape[2]),
        )
        share = passes * num_bytes * (members - 1) / (2 * members)
        traffic.add(here, there, share)
        traffic.add(there, here, share)
        steps = max(steps, members // 2 * int(distance(grid, here, there).max()))
    return _busiest(grid, traffic, link, passes * steps)


def all_to_all(grid: Grid, groups: Sequence[IntArray], link: Link, pair_bytes: float) -> Stage:
    """Send `pair_bytes` from each device to each other one of its group, dim by dim.

    Raises:
      UsageError: the groups are not boxes, and are too large to route every pair.
    """
    several = [own for own in groups if own.shape[1] > 1]
    if not several:
        return NOTHING
    traffic = LinkTraffic(grid)
    values = box_values(several[0]) if len(several) == 1 else None
    if values is not None:
        steps = _box_pairs(grid, traffic, groups=several[0], values=values, pair_bytes=pair_bytes)
        return _busiest(grid, traffic, link, steps)
    steps = 0
    _check_pairs(sum(own.shape[0] * own.shape[1] ** 2 for own in several))
    for own in several:
        here = own.reshape(-1, own.shape[2])
        for ahead in range(1, own.shape[1]):
            there = np.roll(own, -ahead, axis=1).reshape(here.shape)
            traffic.add(here, there, pair_bytes)
            steps = max(steps, int(distance(grid, here, there).max()))
    return _busiest(grid, traffic, link, steps)


def _box_pairs(
    grid: Grid, traffic: LinkTraffic, groups: IntArray, values: list[IntArray], pair_bytes: float
) -> int:
    """Route all pairs of boxes and return the longest way.

    Along each dim every device sends an equal part of all its data to each chip of its line,
    regardless of the earlier dims.
    """
    here = groups.reshape(-1, groups.shape[2])
    _check_pairs(len(here) * max(own.shape[1] for own in values[1:-1]))
    longest = int(values[-1].shape[1]) - 1
    for dim in grid.dims:
        count, farthest = values[dim].shape[1], 0
        for chip in range(count if count > 1 else 0):
            there = here.copy()
            there[:, dim] = np.repeat(values[dim][:, chip], groups.shape[1])
            traffic.add_along(dim, here, there[:, dim], pair_bytes * groups.shape[1] / count)
            farthest = max(farthest, int(distance(grid, here, there).max()))
        longest += farthest
    return longest


def _check_pairs(pairs: int) -> None:
    if pairs > _MOST_PAIRS:
        raise UsageError(
            f"all_to_all: {pairs} pairs of devices would be routed one by one, at most "
            f"{_MOST_PAIRS}: groups that fill boxes of chips, as placement.place makes them, need "
            "fewer"
        )


def permute(grid: Grid, source: IntArray, target: IntArray, link: Link, num_bytes: int) -> Stage:
    """Send `num_bytes` from each source to its target [devices, dims]."""
    if not len(source):
        return NOTHING
    traffic = LinkTraffic(grid)
    traffic.add(source, target, num_bytes)
    return _busiest(grid, traffic, link, int(distance(grid, source, target).max()))


def _busiest(grid: Grid, traffic: LinkTraffic, link: Link, steps: int) -> Stage:
    loads = traffic.busiest()
    return _stage(
        link, [dim - 1 for dim in grid.dims if loads[dim - 1] == max(loads)], steps, max(loads)
    )


def _stage(link: Link, dims: Sequence[int], steps: int, link_bytes: float) -> Stage:
    """Return the stage; between the cores of a chip no link carries anything."""
    where = f"{link.name} {''.join(DIMS[dim] for dim in dims)}" if link_bytes else "in chip"
    seconds = steps * link.latency_s + link_bytes / link.bytes_per_s
    return Stage(steps, link_bytes, seconds, where)
