"""The device order of JAX, bit by bit, for jobs that must keep it.

The results of `jax.experimental.mesh_utils.create_device_mesh` and `create_hybrid_device_mesh` of
JAX 0.10.2 for the same devices, including their weaknesses: broken rings on a 2x4 slice, shapes
refused although they fit, an order that depends on the order of the device list. Reimplemented from
their behavior; the tests compare it with JAX itself where it is installed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.plan.hardware.hosts import Hosts
from shoal.plan.hardware.wiring import Slices, Topology, Torus
from shoal.plan.hardware.wiring_checks import text_of

IntArray = NDArray[np.int64]
Sizes = Sequence[int]

# Positions in a list of chips (x fastest), in JAX's order.
_TRAY = (0, 1, 2, 3, 6, 7, 4, 5)
_SQUARE = (0, 1, 3, 2)
_SQUARE_4 = (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)
_EIGHT = (0, 1, 2, 3, 7, 6, 5, 4)
_CUBE_IOTA = (0, 4, 2, 6, 1, 5, 3, 7)
_CUBE = (0, 1, 3, 2, 6, 7, 5, 4)

_FLAT_KINDS = ("TPU v2", "TPU v3")  # their third physical dim is the cores
_CORE_KINDS = ("TPU7x", "TPU7", "TPU8i")  # their cores are a physical dim of their own

# Slices in which each host's block can be a block of the mesh: the permutation of dims for it.
_CONTIGUOUS: Mapping[tuple[int, ...], Mapping[tuple[int, ...], tuple[int, ...]]] = {
    (2, 2, 1): {(2, 2): (0, 1, 2)},
    (2, 2, 4): {(4, 4): (0, 1, 2)},
    (4, 4, 4): {(16, 4): (0, 2, 1)},
    (4, 8, 8): {(64, 4): (0, 2, 1), (4, 64): (0, 2, 1)},
    (8, 8, 8): {(64, 8): (0, 2, 1)},
    (8, 16, 16): {(256, 8): (0, 2, 1), (8, 256): (0, 2, 1)},
}


def order(
    topology: Topology,
    sizes: Sizes,
    *,
    allow_split_physical_axes: bool = False,
    contiguous_submeshes: bool = False,
) -> IntArray:
    """Return the device ids [sizes] in the order of JAX's `create_device_mesh`.

    Raises:
      UsageError: JAX refuses, or fails; names what fits.

    >>> from shoal.plan.topology import parse
    >>> order(parse("v5e:4x2"), (8,)).tolist()
    [0, 1, 2, 3, 7, 6, 5, 4]
    """
    if math.prod(sizes) != topology.num_devices:
        raise UsageError(
            f"a mesh of {text_of(sizes)} has {math.prod(sizes)} devices, and {topology.text} has "
            f"{topology.num_devices}"
        )
    if isinstance(topology, Torus):
        special = _special(topology, sizes)
        if special is not None:
            return special.reshape(sizes)
        physical = _physical(topology)
        if contiguous_submeshes:
            physical = _exchanged(physical, sizes, topology)
        return torus_order(physical, sizes, allow_split=allow_split_physical_axes)[0]
    if isinstance(topology, Slices):
        raise UsageError(
            f"JAX's order is for a single slice: for {topology.text}, name the axes that span its "
            "slices with across="
        )
    listed = topology.listed_ids
    return (np.sort(listed) if topology.platform == "gpu" else listed).reshape(sizes)


def hybrid_order(
    topology: Topology,
    inner: Sizes,
    outer: Sizes,
    *,
    allow_split_physical_axes: bool = False,
) -> IntArray:
    """Return the ids [inner * outer] in the order of JAX's `create_hybrid_device_mesh`.

    Args:
      topology: slices; or hosts, which then are the granules (JAX's `process_is_granule`).
      inner: the mesh of each granule.
      outer: the mesh of the granules; as many sizes.

    Raises:
      UsageError: there are not as many granules, or one does not fit.
    """
    if len(inner) != len(outer):
        raise UsageError(f"{text_of(inner)} and {text_of(outer)} must have as many axes")
    parts = granules(topology)
    if len(parts) != math.prod(outer):
        raise UsageError(
            f"{topology.text} has {len(parts)} granules (slices, or processes), and "
            f"{text_of(outer)} of them are requested"
        )
    split = allow_split_physical_axes
    meshes = [order(part, inner, allow_split_physical_axes=split) for part in parts]
    return interleaved(meshes, inner, outer)


def interleaved(meshes: Sequence[IntArray], inner: Sizes, outer: Sizes) -> IntArray:
    """Combine a mesh of meshes: on each axis the outer part is major [inner * outer]."""
    rank = len(inner)
    stacked = np.stack(meshes).reshape(*outer, *inner)
    turned = stacked.transpose([dim for axis in range(rank) for dim in (axis, rank + axis)])
    return turned.reshape([o * i for o, i in zip(outer, inner, strict=True)])


def granules(topology: Topology) -> list[Topology]:
    """Return the parts of a topology that the slow network connects, in order."""
    if isinstance(topology, Slices | Torus):
        return list(topology.parts())
    ids, owners = topology.listed_ids, topology.process_of(topology.listed_ids)
    rows = [ids[owners == process] for process in np.unique(owners)]
    return [Hosts(1, len(row), "cpu").numbered(row[None], listed=row) for row in rows]


def _special(torus: Torus, sizes: Sizes) -> IntArray | None:
    """Return the order of small slices of some kinds; None: the general rule applies."""
    ids, count = torus.listed_ids, torus.num_devices
    origin = torus.origin or (0, 0, 0)
    full = (*torus.shape, 1, 1)[:3]
    x, y, z = (size + begin for size, begin in zip(full, origin, strict=False))  # as in JAX
    by_place = _by_place(torus)
    if torus.kind in _FLAT_KINDS:
        if count == 8:
            return ids[[*_TRAY]]
        return ids.reshape(-1, 8)[:, [*_TRAY]] if sizes[-1:] == (8,) else ids
    if torus.kind in ("TPU v4 lite", "TPU8i"):
        return ids[[*_SQUARE]] if count == 4 else None
    if torus.kind in ("TPU v5 lite", "TPU v6 lite"):
        if (x, y, z) == (2, 2, 1) and count == 4:
            return by_place[[*_SQUARE]]
        if count == 8:
            return by_place[[*(_CUBE_IOTA if (x, y, z) == (2, 2, 2) else _EIGHT)]]
        if (x, y, z) == (4, 4, 1) and max(sizes) == count == 16:
            return by_place[[*_SQUARE_4]]
    if torus.kind == "TPU v5p" and (x, y, z) == (2, 2, 2) and count == 8:
        return by_place[[*_CUBE]]
    if torus.kind in ("TPU7x", "TPU7") and count % 8 == 0 and count <= 32 and max(full[:2]) <= 2:
        return ids.reshape(-1, 8)[:, [*_TRAY]]
    return None


def _by_place(torus: Torus) -> IntArray:
    """Return the ids by z, y, x; those of one chip in list order."""
    rank = np.empty(torus.num_devices, np.int64)
    rank[np.argsort(torus.listed_ids)] = np.arange(torus.num_devices)
    cells = torus.device_ids.transpose(*reversed(range(len(torus.shape))), -1)
    chips = cells.reshape(-1, torus.cores)
    places = rank[np.searchsorted(np.sort(torus.listed_ids), chips)]
    return np.take_along_axis(chips, np.argsort(places, axis=1), axis=1).ravel()


def _physical(torus: Torus) -> IntArray:
    """Return the ids as a grid of the dims that JAX counts as physical."""
    shape = (*torus.shape, 1, 1)[:3]
    grid = torus.device_ids.reshape(*shape, torus.cores)
    if torus.kind in _FLAT_KINDS:
        return grid[:, :, 0]
    if torus.kind in _CORE_KINDS or (torus.kind == "TPU v5p" and torus.cores == 2):
        return grid
    if torus.cores != 1:
        raise UsageError(
            f"JAX orders {torus.kind or 'these'} devices only where each chip is one device "
            f"(megacore); here each is {torus.cores}"
        )
    return grid[..., 0]


def _exchanged(physical: IntArray, sizes: Sizes, torus: Torus) -> IntArray:
    known = _CONTIGUOUS.get(physical.shape)
    if known is None:
        fit = ", ".join(map(text_of, _CONTIGUOUS))
        raise UsageError(f"JAX has no contiguous submeshes of {torus.text}; only of {fit}")
    dims = known.get(tuple(size for size in sizes if size != 1))
    if dims is None:
        fit = ", ".join(map(text_of, known))
        raise UsageError(
            f"JAX has no contiguous submeshes of {torus.text} as {text_of(sizes)}; only as {fit}"
        )
    return physical.transpose(dims)


def torus_order(
    physical: IntArray, sizes: Sizes, *, allow_split: bool
) -> tuple[IntArray, IntArray]:
    """Assign mesh axes to dims of a torus: the last axis first, to dims of the same product.

    Args:
      physical: the ids of the devices [dims of the torus].
      sizes: of the mesh, least network traffic first.
      allow_split: may two axes share a dim?

    Returns:
      The ids [sizes], and how much of each dim each axis takes [dims, axes].

    Raises:
      UsageError: this search finds no assignment.
    """
    free = list(physical.shape)
    chosen: list[tuple[int, ...]] = [()] * len(sizes)
    for axis in reversed(range(len(sizes))):
        fitting = (
            dims
            for count in range(len(free), 0, -1)
            for dims in itertools.combinations(range(len(free)), count)
            if math.prod(free[dim] for dim in dims) == sizes[axis]
        )
        dims = next(fitting, ())
        if not dims and sizes[axis] > 1:
            if allow_split:
                return _split_order(physical, sizes)
            raise UsageError(
                f"JAX's search finds no whole dims for axis {axis} of size {sizes[axis]}: of "
                f"{text_of(physical.shape)} it has {text_of(size for size in free if size) or 0} "
                "left\nlet it split dims (allow_split_physical_axes=True), or use shoal's order"
            )
        chosen[axis] = dims
        free = [0 if dim in dims else size for dim, size in enumerate(free)]
    taken = np.ones((len(free), len(sizes)), np.int64)
    for axis, dims in enumerate(chosen):
        taken[list(dims), axis] = [physical.shape[dim] for dim in dims]
    dims = tuple(itertools.chain(*chosen))
    return physical.transpose(dims).reshape(tuple(sizes)), taken


def _split_order(physical: IntArray, sizes: Sizes) -> tuple[IntArray, IntArray]:
    """The same if axes may share a dim: each takes the share that JAX prefers."""
    taken = np.ones((physical.ndim, len(sizes)), np.int64)
    for axis in reversed(range(len(sizes))):
        used = taken.prod(axis=1)
        shares = _shares(physical.shape, used, sizes[axis])
        if not shares:
            raise UsageError(
                f"JAX's search finds no share of {text_of(physical.shape)} for axis {axis} of "
                f"size {sizes[axis]}; use shoal's order"
            )
        taken[:, axis] = max(shares, key=lambda s: _preference(s, physical.shape, used))
    if (taken.prod(axis=0) != sizes).any() or (taken.prod(axis=1) != physical.shape).any():
        raise UsageError(
            f"JAX loses a prime factor of {text_of(sizes)} on {text_of(physical.shape)} and "
            "fails; use shoal's order"
        )
    count = len(sizes)
    # Within a dim the busier axes are inner; then each axis collects its parts, by dim.
    parts = physical.reshape(taken.ravel().tolist())
    dims = [dim * count + axis for axis in range(count) for dim in range(physical.ndim)]
    return parts.transpose(dims).reshape(tuple(sizes)), taken


def _shares(shape: Sizes, used: IntArray, size: int) -> set[tuple[int, ...]]:
    """Return the ways to spread an axis over the rest of each dim."""
    wanted = _factors(size)
    shares = {tuple(1 for _ in shape)}
    for factor in dict.fromkeys(wanted):
        places = [
            dim
            for dim, whole in enumerate(shape)
            for own in _factors(whole // int(used[dim]))
            if own == factor
        ]
        picks = set(itertools.combinations(places, wanted.count(factor)))
        shares = {
            tuple(part * factor ** pick.count(dim) for dim, part in enumerate(share))
            for share in shares
            for pick in picks
        }
    return shares


def _factors(number: int) -> list[int]:
    """Return prime factors as JAX 0.10.2 does: for 14, only 7.

    Fixed later: https://github.com/jax-ml/jax/issues/38286.
    """
    factors = []
    for prime in range(2, math.isqrt(number) + 2):
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        if number == 1:
            return factors
    return [number]


def _preference(share: tuple[int, ...], shape: Sizes, used: IntArray) -> tuple[object, ...]:
    """Whole dims, then many of them, then (JAX means the opposite) dims that others use too."""
    whole = [part for part, size in zip(share, shape, strict=True) if part == size]
    shared = math.prod(part for part, other in zip(share, used, strict=True) if other > 1)
    return math.prod(whole), sum(part > 1 for part in whole), shared, share
