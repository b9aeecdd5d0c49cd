"""Device orders in which each host's devices form a box of the mesh.

Then the part of an array that one host reads or saves is one box, too. The price is longer hops: a
ring that visits all of a host's chips before the next host's cannot fold as freely.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.plan.hardware.wiring import Topology, Torus
from shoal.plan.hop_counts import hops_along
from shoal.plan.orders.jax_order import granules, interleaved

IntArray = NDArray[np.int64]
Sizes = tuple[int, ...]
Place = Callable[[Torus, Sizes], IntArray]


def by_hosts(torus: Torus, sizes: Sizes, place: Place) -> IntArray:
    """Return the ids [sizes] of the best order in which each host's devices form a box.

    The hosts are placed like chips, and so are the devices within each; of all ways to divide the
    axes between the two, the one with the shortest hops is chosen, the last axis first.

    Args:
      torus: its processes have adjacent boxes of one shape.
      sizes: of the mesh.
      place: returns the ids of a torus in the order of a mesh.

    Raises:
      UsageError: the hosts are not boxes of one shape.
    """
    parts = list(torus.parts())
    hosts = _hosts(torus, parts)
    rows = np.stack([part.device_ids.ravel() for part in parts])
    one = parts[0].numbered(np.arange(parts[0].num_devices).reshape(parts[0].grid))
    found = []
    for inner in _divided(sizes, parts[0].num_devices):
        outer = tuple(size // own for size, own in zip(sizes, inner, strict=True))
        order = place(hosts, outer).ravel()
        cells = place(one, inner).ravel()  # hosts are identical, and so is the order within them
        meshes = rows[order][:, cells].reshape(-1, *inner)
        ids = interleaved(list(meshes), inner, outer)
        found.append((hops_along(torus, ids)[::-1], inner, ids))
    return min(found, key=lambda one: one[:2])[2]


def in_boxes(topology: Topology, sizes: Sizes) -> IntArray:
    """Return the ids [sizes] of hosts without wires, each a box: the last axes are in a host.

    Raises:
      UsageError: the hosts have different numbers of devices.
    """
    hosts = [one.device_ids.ravel() for one in granules(topology)]
    if len({len(ids) for ids in hosts}) > 1:
        raise UsageError(f"place: the processes of {topology.text} differ in their devices")
    inner = max(_divided(sizes, len(hosts[0])), key=lambda row: row[::-1])
    outer = tuple(size // own for size, own in zip(sizes, inner, strict=True))
    return interleaved([ids.reshape(inner) for ids in hosts], inner, outer)


def _hosts(torus: Torus, parts: Sequence[Torus]) -> Torus:
    """Return the hosts as a torus of chips, whose ids are the numbers of the parts."""
    box = parts[0].grid
    if any(part.grid != box for part in parts):
        raise UsageError(f"place: the processes of {torus.text} have boxes of several shapes")
    blocks = tuple(size // own for size, own in zip(torus.shape, box, strict=False))
    zero = (0,) * len(torus.shape)
    begin = np.array(torus.origin or zero)
    places = (np.array([part.origin or zero for part in parts]) - begin) / box[:-1]
    if box[-1] != torus.cores or (places != places.round()).any():
        raise UsageError(f"place: the processes' boxes of {torus.text} are not side by side")
    numbers = np.empty((*blocks, 1), np.int64)
    numbers[(*places.astype(np.int64).T, 0)] = np.arange(len(parts))
    return Torus(blocks, wrap=torus.wrap).numbered(numbers)


def _divided(sizes: Sizes, count: int) -> list[Sizes]:
    """Return how much of each axis fits into one host of `count` devices.

    This is always possible: the hosts make up the mesh, so the sizes have all prime factors of one.
    """
    choices = [[n for n in range(1, size + 1) if math.gcd(size, count) % n == 0] for size in sizes]
    return [inner for inner in itertools.product(*choices) if math.prod(inner) == count]
