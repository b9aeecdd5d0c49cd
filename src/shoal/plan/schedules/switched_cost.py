"""Cost of collectives across switches: the devices of a host, and hosts over a network.

Every device, and every host, has a port of its own into a network that is otherwise unlimited.
Recursive halving and doubling move (n - 1) / n of the payload through each port in log2(n) steps,
and pairwise exchange does an all-to-all in n - 1 (Thakur, Rabenseifner and Gropp: see `stage`).

If a group has devices in several slices (or hosts), it works in stages: a reduce-scatter within
each, an all-reduce of the results across them, and an all-gather within.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.hardware.links import Link
from shoal.plan.schedules.stage import NOTHING, Stage

IntArray = NDArray[np.int64]


class Members(NamedTuple):
    """The devices of all groups, group by group in the order of the axis [devices]."""

    size: int  # of a group
    place: IntArray  # which slice or host
    inside: IntArray  # devices of its group in the same place, itself included
    outside: IntArray  # places of its group
    host: IntArray  # host whose port it uses
    leaves: NDArray[np.bool_]  # whether the next device of its group is in another place

    @property
    def next(self) -> IntArray:
        """The number of the next device of its group, the first one's for the last."""
        numbers = np.arange(self.host.size).reshape(-1, self.size)
        return np.roll(numbers, -1, axis=1).ravel()


def across_gather(members: Members, link: Link, num_bytes: int, passes: int) -> Stage:
    """Gather across slices or hosts: each of a group's devices there contributes its share.

    A device sends (k - 1) / k of its share of the payload, where k is the number of places of its
    group; the data of all devices of a host go through one port.
    """
    most = int(members.outside.max())
    if most == 1:
        return NOTHING
    sent = num_bytes / members.inside * (members.outside - 1) / members.outside
    steps = passes * (most - 1).bit_length()
    return _stage(link, steps, passes * float(np.bincount(members.host, sent).max()))


def across_all_to_all(members: Members, link: Link, pair_bytes: float) -> Stage:
    """Send to each device of the group in another slice or host."""
    sent = pair_bytes * (members.size - members.inside)
    if not sent.any():
        return NOTHING
    steps = int(members.outside.max()) - 1  # data for one place are sent together
    return _stage(link, steps, float(np.bincount(members.host, sent).max()))


def across_permute(members: Members, link: Link, num_bytes: int) -> Stage:
    """Send to the next device, if it is in another slice or host."""
    if not members.leaves.any():
        return NOTHING
    sent = num_bytes * members.leaves
    ends = (members.host, members.host[members.next])
    return _stage(link, 1, max(float(np.bincount(end, sent).max()) for end in ends))


def host_gather(members: Members, link: Link, num_bytes: int, passes: int) -> Stage:
    """Gather within each host, every device over its own port."""
    most = int(members.inside.max())
    steps = passes * (most - 1).bit_length()
    return _stage(link, steps, passes * num_bytes * (most - 1) / most)


def host_all_to_all(members: Members, link: Link, pair_bytes: float) -> Stage:
    """Send to each device of the group that is in the same host."""
    most = int(members.inside.max())
    return _stage(link, most - 1, pair_bytes * (most - 1))


def host_permute(members: Members, link: Link, num_bytes: int) -> Stage:
    """Send to the next device, if it is in the same host."""
    stays = not members.leaves.all()
    return _stage(link, int(stays), float(num_bytes * stays))


def _stage(link: Link, steps: int, link_bytes: float) -> Stage:
    if not steps:
        return NOTHING
    return Stage(
        steps, link_bytes, steps * link.latency_s + link_bytes / link.bytes_per_s, link.name
    )
