"""The device order of TensorFlow DTensor's `create_tpu_mesh`, with all of its options.

DTensor cuts a slice into rings of cores, orders each along a snake that returns through its first
column, and concatenates the rings. Reimplemented from its behavior, including its weaknesses: a
row of chips is not closed to a ring, and rings that begin at an odd row have hops of two links.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError, UsageTypeError, raise_all
from shoal.plan.hardware.wiring import Topology, Torus
from shoal.plan.hardware.wiring_checks import text_of

IntArray = NDArray[np.int64]
_AXES = ("x", "y", "z", "core")


@dataclasses.dataclass(frozen=True)
class Rings:
    """The options of `create_tpu_mesh`, by their names there without `ring_`.

    Args:
      dims: how many mesh axes a ring covers: the first ones, or if negative the last ones. None:
        all but the first, so a mesh of one axis has no rings.
      axes: the directions in which a slice is walked through, the fastest first.
      bounds: of the box of a ring, along x, y, z, core; None: the whole slice's.
      can_split_host_across_rings: may the chips of one host belong to several rings?
      build_ring_across_rings: are the rings themselves ordered as a ring?
      rotate_ring_across_rings: does that ring run along y before x?

    >>> from shoal.planning import place, topology
    >>> mesh = place(
    ...     topology.parse("torus:4x2"), {"ring": 8}, compatible_with="dtensor", rings=Rings(dims=1)
    ... )
    >>> mesh.device_ids.tolist()
    [0, 1, 2, 3, 7, 6, 5, 4]
    """

    dims: int | None = None
    axes: Sequence[str] = ("core", "x", "y", "z")
    bounds: Sequence[int] | None = None
    can_split_host_across_rings: bool = True
    build_ring_across_rings: bool = False
    rotate_ring_across_rings: bool = False


def order(topology: Topology, sizes: Sequence[int], rings: Rings) -> IntArray:
    """Return the device ids [sizes] in the order of DTensor.

    Raises:
      UsageError: DTensor has no such mesh; names all problems.
    """
    if not isinstance(topology, Torus):
        raise UsageError(f"DTensor orders a single TPU slice, and {topology.text} is not one")
    shape = (*topology.shape, 1, 1)[:3]
    whole = (*shape, topology.cores)
    dims = 1 - len(sizes) if rings.dims is None else rings.dims
    if not isinstance(dims, int):
        raise UsageTypeError(f"DTensor's rings: dims={dims!r} must be a whole number of axes")
    in_ring: Sequence[int] = ()
    if dims > 0:
        in_ring = sizes[:dims]
    elif dims < 0:
        in_ring = sizes[dims:]
    size = math.prod(in_ring)
    bounds = tuple(rings.bounds or whole)
    host = _host(whole, rings)
    raise_all("DTensor's rings", _problems(rings, sizes, dims, whole, bounds, host))
    if size < math.prod(host):
        raise UsageError(
            f"DTensor's rings of {size} are smaller than a host of {text_of(host)} cores; "
            "allow that with can_split_host_across_rings=True"
        )
    places = _enumerated(whole, bounds, host, [_AXES.index(axis) for axis in rings.axes])
    blocks = places.reshape(-1, size, 4)
    blocks = blocks[:, _ring(blocks[0])]
    if rings.build_ring_across_rings:
        blocks = blocks[_ring(blocks[:, 0], is_rotated=rings.rotate_ring_across_rings)]
    x, y, z, core = blocks.reshape(-1, 4).T
    return topology.device_ids.reshape(whole)[x, y, z, core].reshape(tuple(sizes))


def _host(whole: Sequence[int], rings: Rings) -> tuple[int, ...]:
    if rings.can_split_host_across_rings:
        return (1, 1, 1, 1)
    cores = whole[3]
    return (1, 1, 1, cores) if math.prod(whole) <= 2 else (2, 2, 1, cores)


def _problems(
    rings: Rings,
    sizes: Sequence[int],
    dims: int,
    whole: tuple[int, ...],
    bounds: tuple[int, ...],
    host: tuple[int, ...],
) -> list[str]:
    problems = []
    if abs(dims) > len(sizes):
        problems.append(f"dims={dims}, and the mesh has {len(sizes)} axes")
    if sorted(rings.axes) != sorted(_AXES):
        problems.append(f"axes={tuple(rings.axes)} must be x, y, z and core, each once")
    if whole[3] > 2:
        problems.append(f"chips must have one or two cores, and these have {whole[3]}")
    if len(bounds) != 4:
        problems.append(f"bounds={bounds} must be four numbers: x, y, z, core")
    elif any(part < 1 or all_ % part for all_, part in zip(whole, bounds, strict=True)):
        problems.append(f"bounds={bounds} must divide the slice's {text_of(whole)} (x, y, z, core)")
    elif any(part % own for part, own in zip(bounds, host, strict=True)):
        problems.append(
            f"a ring's box of {text_of(bounds)} splits hosts of {text_of(host)}; allow that with "
            "can_split_host_across_rings=True"
        )
    return problems


def _enumerated(
    whole: Sequence[int], bounds: Sequence[int], host: Sequence[int], axes: Sequence[int]
) -> IntArray:
    """List the cores [cores, (x, y, z, core)], grouped by ring box, and within each by host."""
    places = np.zeros((1, 1, 1, 4), np.int64)  # [ring boxes, hosts of each, cores of each]
    for axis in axes:
        part, own = bounds[axis], host[axis]
        along = np.arange(whole[axis]).reshape((-1, 1, part // own, 1, own, 1))
        boxes, hosts, cores = places.shape[:3]
        inner = places.reshape((1, boxes, 1, hosts, 1, cores, 4))
        grown = np.broadcast_to(
            inner, (along.shape[0], boxes, part // own, hosts, own, cores, 4)
        ).copy()
        grown[..., axis] = along
        places = grown.reshape(along.shape[0] * boxes, part // own * hosts, own * cores, 4)
    return places.reshape(-1, 4)


def _ring(places: IntArray, *, is_rotated: bool = False) -> IntArray:
    """Return the order [count] of cores along a ring: out in a snake, back through a column.

    Args:
      places: x, y, z, core of each [count, 4].
      is_rotated: does the snake go along y, and the way back along x?
    """
    x, y, z, core = places.T
    if is_rotated:
        x, y = y, x
    is_back = (x == x.min()) & (y != y.min())
    snake = np.where(y % 2 == 0, x, -x)
    flat = np.lexsort((core, snake, np.where(is_back, -y, y), is_back))
    if (z == z[0]).all():
        return flat
    rank = np.empty(len(places), np.int64)
    rank[flat] = np.arange(len(places))
    # Back and forth over the planes, except for one corner, through which the way back leads.
    is_corner = (x == x.min()) & (y == y.min())
    within = np.where(is_corner, core, np.where(z % 2 == 0, rank, -rank))
    return np.lexsort((within, np.where(is_corner, -z, z), is_corner))
