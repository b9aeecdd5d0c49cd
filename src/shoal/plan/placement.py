"""Device placement: the order that keeps each axis's collectives on short wires.

    mesh axes ──▶ how much of each dim of the wires each axis takes     `_best`
              ──▶ for each axis, a walk over the chips of its groups    `ring.best_walk`
              ──▶ device ids

All groups of an axis are copies of one box of chips, so one of them is enough to judge an axis. All
ways to spread the axes over the dims are compared, the last axis first, since it is assumed to be
the busiest: by the longest hop of its walk, then by the sum of all hops, then by the next axis. So
no order that maps axes to boxes of chips, like that of JAX's `mesh_utils`, is better for one axis
without being worse for a busier one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import as_integer, as_number
from shoal.colour import local
from shoal.errors import UsageError, nearest, raise_all
from shoal.plan import torus_order
from shoal.plan.hardware.wiring import Slices, Topology, Torus, check_topology
from shoal.plan.hardware.wiring_checks import text_of
from shoal.plan.mesh import Mesh
from shoal.plan.notation.mesh_checks import check_axes
from shoal.plan.orders.compatible import OrderFunction, OrderOptions
from shoal.plan.orders.dtensor_order import Rings
from shoal.plan.orders.jax_order import granules, interleaved

__all__ = ["Rings", "place"]
IntArray = NDArray[np.int64]
Sizes = tuple[int, ...]
Axes = Mapping[str, int] | Iterable[tuple[str, int]]


@local
def place(
    topology: Topology,
    axes: Axes,
    *,
    across: Mapping[str, int] | None = None,
    weights: Mapping[str, float] | None = None,
    compatible_with: str | OrderFunction | None = None,
    allow_split_physical_axes: bool | None = None,
    contiguous_submeshes: bool = False,
    rings: Rings | None = None,
) -> Mesh:
    """Return a mesh over all devices of a topology, in the best order for its wires.

    Local.

    On a torus the groups of each axis are boxes of chips, and follow one another in a closed walk
    whose hops are all one link long if such a walk exists. On hosts the last axes are
    within a host.

    Args:
      topology: the devices; see `topology.parse` and `topology.from_devices`.
      axes: name → size, the busiest last; -1 for one of them: what the others leave.
      across: name → how much of that axis spans slices (or hosts), over the slow network;
        the sizes in `axes` are totals. Default: as much of the first axes as there are slices;
        slices that differ each hold whole rows of the first axis.
      weights: name → bytes that each device contributes to all-reduces over that axis in a step of
        the program, or any amounts in proportion; missing ones are 0. The order is then the
        fastest by the model of `cost`, whichever axis is last.
      compatible_with: the order of another library, bit by bit: "jax" (`mesh_utils` of JAX
        0.10.2), "torch_xla" (`HybridMesh`) or "dtensor" (`create_tpu_mesh`); or a function of
        (topology, sizes, outer sizes or None, may axes share a dim) that returns the ids [sizes].
      allow_split_physical_axes: may two axes share a dim of the torus? Default: yes; under
        `compatible_with="jax"` no, as there.
      contiguous_submeshes: must the devices of each process be a box of the mesh? That may take
        longer hops.
      rings: the options of `create_tpu_mesh`; under `compatible_with="dtensor"` only.

    Raises:
      UsageError: the sizes do not fit; names the nearest that do.

    Example:
      >>> from shoal.planning import topology
      >>> mesh = place(topology.parse("v5e:2x4"), {"data": 8})
      >>> mesh.device_ids.tolist()  # each is a neighbor of the next, and the last of the first
      [0, 2, 4, 6, 7, 5, 3, 1]
    """
    check_topology("place", topology)
    problems: list[str] = []
    names, sizes = check_axes(_with_rest(axes, topology.num_devices), problems)
    split = allow_split_physical_axes
    options = OrderOptions(compatible_with, split, contiguous_submeshes, rings)
    problems += options.problems()
    bytes_of = _weights(names, weights, options, problems)
    if not problems:
        problems += _misfits(topology, names, sizes)
    raise_all("place", problems)
    outer = _outer(topology, names, sizes, across, options, bytes_of)
    if compatible_with is None:
        how = _How(split is not False, contiguous_submeshes, bytes_of)
        ids = _ours(topology, sizes, outer, how)
    else:
        ids = options.order(topology, sizes, outer)
    processes = topology.process_of(ids.ravel())
    pairs = list(zip(names, sizes, strict=True))
    return Mesh(pairs, device_ids=ids.ravel(), processes=processes, kind=topology.platform)


_MOST_BYTES = 1 << 63
_MOST_SHAPES = 4096  # shapes compared for an error message


class _How(NamedTuple):
    """The options of our own order."""

    split: bool
    contiguous: bool
    weights: tuple[float, ...] | None


def _with_rest(axes: Axes, count: int) -> Axes:
    """Return the axes with a size in place of -1: what the others leave of so many devices."""
    sizes = dict(axes) if isinstance(axes, Mapping) else {}
    known = [whole for size in sizes.values() if (whole := as_integer(size)) and whole > 0]
    open_axes = [name for name, size in sizes.items() if as_integer(size) == -1]
    if len(open_axes) != 1 or len(known) < len(sizes) - 1:
        return axes
    return sizes | {open_axes[0]: max(count // math.prod(known), 1)}


def _weights(
    names: Sequence[str],
    weights: Mapping[str, float] | None,
    options: OrderOptions,
    problems: list[str],
) -> tuple[float, ...] | None:
    """Return the weight of each axis; None: the last is the busiest."""
    if weights is None:
        return None
    if options.library is not None or options.contiguous:
        other = "contiguous_submeshes" if options.contiguous else "compatible_with"
        problems.append(f"weights and {other} cannot be combined: each sets the order")
    if not isinstance(weights, Mapping):
        problems.append(f"weights={weights!r} must be a dict: name → bytes")
        return None
    for name, weight in weights.items():
        if name not in names:
            problems.append(f"weights: no axis {name!r}{nearest(str(name), names)}")
        value = as_number(weight)
        if value is None or not 0 <= value < _MOST_BYTES:
            problems.append(f"weights: {name}={weight!r} must be a number of bytes")
    if not problems and not any(weights.values()):
        problems.append(
            "weights: all are 0; set a positive weight for at least one axis, or omit weights="
        )
    return None if problems else tuple(float(weights.get(name, 0)) for name in names)


def _misfits(topology: Topology, names: Sequence[str], sizes: Sizes) -> list[str]:
    """Report differing numbers of devices of mesh and topology; suggest what would fit."""
    count, wanted = topology.num_devices, math.prod(sizes)
    if wanted == count:
        return []
    near = sorted(_shapes(count, len(sizes)), key=lambda row: _distance(row, sizes))[:3]
    fit = [" ".join(f"{n}={s}" for n, s in zip(names, row, strict=True)) for row in near]
    hint = f"; these fit: {', or '.join(fit)}" if fit else ""
    devices = "device" if wanted == 1 else "devices"
    return [
        f"a mesh of {text_of(sizes) or 'no axes'} has {wanted} {devices}, and {topology.text} has "
        f"{count}{hint}"
    ]


def _shapes(count: int, rank: int) -> list[Sizes]:
    """Return the meshes with this many devices; only some if there are many axes."""
    shapes = [(1,) * rank] if rank else []
    for prime in prime_factors(count):
        grown = {
            (*row[:axis], row[axis] * prime, *row[axis + 1 :])
            for row in shapes
            for axis in range(rank)
        }
        shapes = sorted(grown)[:_MOST_SHAPES]
    return shapes


def _distance(row: Sizes, sizes: Sizes) -> tuple[int, float]:
    """Return how many axes differ, and by how much: the sum of the factors' logarithms."""
    pairs = [(math.log(a), math.log(b)) for a, b in zip(row, sizes, strict=True)]
    return sum(a != b for a, b in pairs), sum(abs(a - b) for a, b in pairs)


def _outer(
    topology: Topology,
    names: Sequence[str],
    sizes: Sizes,
    across: Mapping[str, int] | None,
    options: OrderOptions,
    weights: tuple[float, ...] | None,
) -> Sizes | None:
    """Return how much of each axis spans the slow network; None: unspecified."""
    if across is None:
        if options.library is None and isinstance(topology, Slices) and topology.is_even:
            return _spread(topology, sizes, _by_weight(sizes, weights))
        return None
    problems: list[str] = []
    parts = dict(zip(*check_axes(across, problems), strict=False)) if across else {}
    raise_all("place: across", problems)
    for name, part in parts.items():
        if name not in names:
            problems.append(f"across: no axis {name!r}{nearest(name, names)}")
        elif sizes[names.index(name)] % part:
            size = sizes[names.index(name)]
            problems.append(f"across: {part} does not divide the {size} of axis {name!r}")
    if not problems and isinstance(topology, Torus) and math.prod(parts.values()) == 1:
        return None  # a program for several slices, run on one
    count = len(granules(topology))
    if not problems and math.prod(parts.values()) != count:
        problems.append(
            f"across: {' x '.join(f'{n}={p}' for n, p in parts.items()) or '{}'} makes "
            f"{math.prod(parts.values())}, and {topology.text} has {count} {_granule(topology)}s"
        )
    raise_all("place", problems)
    return tuple(parts.get(name, 1) for name in names)


def _by_weight(sizes: Sizes, weights: tuple[float, ...] | None) -> list[int]:
    """Return the axes, the least busy first."""
    return sorted(range(len(sizes)), key=lambda axis: weights[axis] if weights else 0.0)


def _spread(topology: Slices, sizes: Sizes, axes: Sequence[int]) -> Sizes:
    """Distribute the slices over the axes, which are given the least busy first."""
    left, outer = len(topology.slices), [1] * len(sizes)
    for axis in axes:
        outer[axis] = math.gcd(sizes[axis], left)
        left //= outer[axis]
    if left > 1:
        raise UsageError(
            f"place: {text_of(sizes)} cannot be laid across the {len(topology.slices)} slices of "
            f"{topology.text}: some axes' sizes must have {len(topology.slices)} as a factor"
        )
    return tuple(outer)


def _ours(topology: Topology, sizes: Sizes, outer: Sizes | None, how: _How) -> IntArray:
    """Return the ids [sizes] in our own order."""
    if outer is not None:
        return _across(topology, sizes, outer, how)
    if isinstance(topology, Torus):
        if how.contiguous:
            return by_hosts(
                topology, sizes, lambda torus, own: torus_order.order(torus, own, how.split)
            )
        return torus_order.order(topology, sizes, how.split, how.weights)
    if isinstance(topology, Slices):
        return _in_rows(topology, sizes, how)
    if how.contiguous:
        return in_boxes(topology, sizes)
    # Row-major, the busiest axis in the hosts.
    axes = _by_weight(sizes, how.weights)
    return topology.device_ids.reshape([sizes[axis] for axis in axes]).transpose(np.argsort(axes))


def _across(topology: Topology, sizes: Sizes, outer: Sizes, how: _How) -> IntArray:
    """Place each slice (or host) by itself, `outer` of them along each axis."""
    inner = tuple(size // part for size, part in zip(sizes, outer, strict=True))
    parts = granules(topology)
    if any(part.num_devices != math.prod(inner) for part in parts):
        counts = ", ".join(str(part.num_devices) for part in parts)
        raise UsageError(
            f"place: each {_granule(topology)} must hold {text_of(inner)} = {math.prod(inner)} "
            f"devices; those of {topology.text} hold {counts}"
        )
    return interleaved([_ours(part, inner, None, how) for part in parts], inner, outer)


def _granule(topology: Topology) -> str:
    """Return what the slow network joins."""
    return "slice" if isinstance(topology, Slices) else "host"


def _in_rows(topology: Slices, sizes: Sizes, how: _How) -> IntArray:
    """Give slices of different sizes whole rows of the first axis, by their devices."""
    first = next((axis for axis, size in enumerate(sizes) if size > 1), 0)
    row = math.prod(sizes[first + 1 :])
    slices = list(topology.parts())
    if any(torus.num_devices % row for torus in slices):
        counts = ", ".join(str(torus.num_devices) for torus in slices)
        raise UsageError(
            f"place: the slices of {topology.text} differ, so each must hold whole rows of the "
            f"first axis, {row} devices here; they hold {counts}"
        )
    own = [(*sizes[:first], torus.num_devices // row, *sizes[first + 1 :]) for torus in slices]
    ids = [_ours(torus, part, None, how) for torus, part in zip(slices, own, strict=True)]
    return np.concatenate(ids, axis=first).reshape(sizes)


# Prime factors.


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number, ascending.

    >>> prime_factors(12), prime_factors(1)
    ([2, 2, 3], [])
    """
    factors, prime = [], 2
    while prime * prime <= number:
        if number % prime:
            prime += 1
        else:
            factors.append(prime)
            number //= prime
    return [*factors, number] if number > 1 else factors


# Hop counts of a mesh's collectives on the wires of a topology.


class Hops(NamedTuple):
    """The worst ring of one axis: from each device to the next, and from the last to the first."""

    longest: int  # links between consecutive devices in a slice
    total: int  # links of all hops of a ring that stay in a slice
    slices: int  # how many slices a ring visits


def hops_of(topology: Topology, mesh: Mesh) -> dict[str, Hops]:
    """Return the hops along each axis of a mesh; {} if no links are described.

    Between the cores of a chip there is no link.

    Args:
      topology: has the devices of the mesh, at least.

    >>> from shoal.planning import place
    >>> from shoal.plan.topology import parse
    >>> slices = parse("v5e:2x4 x 2 slices")
    >>> hops_of(slices, place(slices, {"data": 2, "model": 8}))["model"]
    Hops(longest=1, total=8, slices=1)
    """
    return dict(zip(mesh.axis_names, hops_along(topology, mesh.device_ids), strict=False))


def hops_along(topology: Topology, ids: IntArray) -> list[Hops]:
    """Return the hops along each axis of ids in the order of a mesh; [] without links."""
    if isinstance(topology, Torus):
        tori = [topology]
    elif isinstance(topology, Slices):
        tori = list(topology.parts())
    else:
        return []
    part, coords = _cells(tori, ids)
    return [_along(axis, tori, part, coords) for axis in range(ids.ndim)]


def _cells(tori: list[Torus], ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return the slice of each device [mesh shape] and its chip there [mesh shape, x y z]."""
    part = np.zeros(ids.shape, np.int64)
    coords = np.zeros((*ids.shape, 3), np.int64)
    for index, torus in enumerate(tori):
        order = np.argsort(torus.device_ids, axis=None)
        known = torus.device_ids.ravel()[order]
        place = np.searchsorted(known, ids).clip(max=known.size - 1)
        here = known[place] == ids
        part[here] = index
        chips = np.unravel_index(order[place[here]], torus.grid)[:-1]
        coords[here, : len(chips)] = np.stack(chips, axis=-1)
    return part, coords


def _along(axis: int, tori: list[Torus], part: IntArray, coords: IntArray) -> Hops:
    links = np.abs(coords - np.roll(coords, -1, axis=axis))
    for index, torus in enumerate(tori):
        for dim, size in enumerate(torus.shape):
            if torus.wrap[dim]:
                own = part == index
                links[own, dim] = np.minimum(links[own, dim], size - links[own, dim])
    stays = part == np.roll(part, -1, axis=axis)
    hops = np.where(stays, links.sum(axis=-1), 0)
    ordered = np.sort(part, axis=axis)
    slices = 1 + (np.diff(ordered, axis=axis) > 0).sum(axis=axis)
    return Hops(int(hops.max()), int(hops.sum(axis=axis).max()), int(slices.max()))


# Device orders in which each host's devices form a box of the mesh.
#
# Then the part of an array that one host reads or saves is one box, too. The price is longer hops:
# a ring that visits all of a host's chips before the next host's cannot fold as freely.

TorusOrder = Callable[[Torus, Sizes], IntArray]


def by_hosts(torus: Torus, sizes: Sizes, order: TorusOrder) -> IntArray:
    """Return the ids [sizes] of the best order in which each host's devices form a box.

    The hosts are placed like chips, and so are the devices within each; of all ways to divide the
    axes between the two, the one with the shortest hops is chosen, the last axis first.

    Args:
      torus: its processes have adjacent boxes of one shape.
      sizes: of the mesh.
      order: returns the ids of a torus in the order of a mesh.

    Raises:
      UsageError: the hosts are not boxes of one shape.
    """
    parts = list(torus.parts())
    hosts = _hosts(torus, parts)
    rows = np.stack([part.device_ids.ravel() for part in parts])
    # Hosts are identical, and so is the order within them.
    host = parts[0].numbered(np.arange(parts[0].num_devices).reshape(parts[0].grid))
    ids_of: dict[Sizes, IntArray] = {}  # by the part of each axis that is in a host
    for inner in _divided(sizes, host.num_devices):
        outer = tuple(size // own for size, own in zip(sizes, inner, strict=True))
        among_hosts, in_host = order(hosts, outer).ravel(), order(host, inner).ravel()
        meshes = rows[among_hosts][:, in_host].reshape(-1, *inner)
        ids_of[inner] = interleaved(list(meshes), inner, outer)

    def cost(inner: Sizes) -> tuple[list[Hops], Sizes]:
        """Return the hops along each axis, the last axis first; of equal ones the sizes decide."""
        return hops_along(torus, ids_of[inner])[::-1], inner

    return ids_of[min(ids_of, key=cost)]


def in_boxes(topology: Topology, sizes: Sizes) -> IntArray:
    """Return the ids [sizes] of hosts without wires, each a box: the last axes are in a host.

    Raises:
      UsageError: the hosts have different numbers of devices.
    """
    hosts = [granule.device_ids.ravel() for granule in granules(topology)]
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
