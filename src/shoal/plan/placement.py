"""Which device goes where in a mesh: the order that keeps each axis's collectives on short wires.

    mesh axes ──▶ how much of each dim of the wires each axis takes     `_best`
              ──▶ for each axis, a walk over the chips of its groups    `ring.best_walk`
              ──▶ device ids

All groups of an axis are copies of one box of chips, so an axis is judged by one of them. All ways
to spread the axes over the dims are compared, the last axis first, for it is taken to be the
busiest: by the longest hop of its walk, then by all hops together, then by the next axis. Hence no
order that lays axes onto boxes of chips, as JAX's `mesh_utils` does, is better for one axis without
being worse for a busier one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.errors import UsageError, nearest, raise_all
from shoal.plan import jax_order
from shoal.plan.compatible import Options
from shoal.plan.dtensor_order import Rings
from shoal.plan.host_blocks import by_hosts, in_boxes
from shoal.plan.mesh import Mesh
from shoal.plan.mesh_checks import check_axes
from shoal.plan.ring import Side, best_walk, shortest_hops
from shoal.plan.wiring import Slices, Topology, Torus
from shoal.plan.wiring_checks import text_of

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
    compatible_with: str | None = None,
    allow_split_physical_axes: bool | None = None,
    contiguous_submeshes: bool = False,
    rings: Rings | None = None,
) -> Mesh:
    """Return a mesh over all devices of a topology, in the order that suits its wires best.

    Local.

    On a torus the groups of each axis are boxes of chips, and follow one another in a closed walk
    whose hops are all one link long wherever there is such a walk. On hosts the last axes lie
    within a host.

    Args:
      topology: the devices; see `topology.parse` and `topology.from_devices`.
      axes: name → size, the busiest last.
      across: name → how much of that axis lies across slices (or hosts), over the slow network;
        the sizes in `axes` are totals. Default: as much of the first axes as there are slices;
        slices that differ each hold whole rows of the first axis.
      compatible_with: the order of another library, bit by bit: "jax" (`mesh_utils` of JAX
        0.10.2), "torch_xla" (`HybridMesh`) or "dtensor" (`create_tpu_mesh`).
      allow_split_physical_axes: may two axes share a dim of the torus? Default: yes; under
        `compatible_with="jax"` no, as there.
      contiguous_submeshes: must the devices of each process be a box of the mesh? That may take
        longer hops.
      rings: the options of `create_tpu_mesh`; under `compatible_with="dtensor"` only.

    Raises:
      UsageError: the sizes do not fit; the nearest that do are named.

    Example:
      >>> from shoal.plan.topology import parse
      >>> mesh = place(parse("v5e:2x4"), {"data": 8})
      >>> mesh.device_ids.tolist()  # each is a neighbour of the next, and the last of the first
      [0, 2, 4, 6, 7, 5, 3, 1]
    """
    if not isinstance(topology, Topology):
        raise UsageError(f"place: {topology!r} is no topology: topology.parse makes one of a text")
    offences: list[str] = []
    names, sizes = check_axes(axes, offences)
    split = allow_split_physical_axes
    options = Options(compatible_with, split, contiguous_submeshes, rings)
    offences += options.offences()
    if not offences:
        offences += _misfits(topology, names, sizes)
    raise_all("place", offences)
    outer = _outer(topology, names, sizes, across, by_default=compatible_with is None)
    if compatible_with is None:
        ids = _ours(topology, sizes, outer, split is not False, contiguous_submeshes)
    else:
        ids = options.order(topology, sizes, outer)
    processes = topology.process_of(ids.ravel())
    pairs = list(zip(names, sizes, strict=True))
    return Mesh(pairs, ids.ravel(), processes, kind=topology.platform)


def _misfits(topology: Topology, names: Sequence[str], sizes: Sizes) -> list[str]:
    """Say that a mesh has another number of devices than the topology, and what would fit."""
    count, wanted = topology.num_devices, math.prod(sizes)
    if wanted == count:
        return []
    near = []
    for axis, size in enumerate(sizes):
        others = wanted // size
        if count % others == 0:
            row = (*sizes[:axis], count // others, *sizes[axis + 1 :])
            near.append(" ".join(f"{n}={s}" for n, s in zip(names, row, strict=True)))
    hint = f"; these fit: {', or '.join(dict.fromkeys(near))}" if near else ""
    return [
        f"a mesh of {text_of(sizes)} has {wanted} devices, and {topology.text} has {count}{hint}"
    ]


def _outer(
    topology: Topology,
    names: Sequence[str],
    sizes: Sizes,
    across: Mapping[str, int] | None,
    *,
    by_default: bool,
) -> Sizes | None:
    """Return how much of each axis lies across the slow network; None: nothing is said of it."""
    if across is None:
        if by_default and isinstance(topology, Slices) and topology.is_even:
            return _spread(topology, sizes)
        return None
    offences: list[str] = []
    parts = dict(zip(*check_axes(across, offences), strict=True)) if across else {}
    for name, part in parts.items():
        if name not in names:
            offences.append(f"across: no axis {name!r}{nearest(name, names)}")
        elif sizes[names.index(name)] % part:
            size = sizes[names.index(name)]
            offences.append(f"across: {part} does not divide the {size} of axis {name!r}")
    if not offences and isinstance(topology, Torus) and math.prod(parts.values()) == 1:
        return None  # a program for several slices, run on one
    granules = len(jax_order.granules(topology))
    if not offences and math.prod(parts.values()) != granules:
        what = "slices" if isinstance(topology, Slices) else "hosts"
        offences.append(
            f"across: {' x '.join(f'{n}={p}' for n, p in parts.items()) or '{}'} makes "
            f"{math.prod(parts.values())}, and {topology.text} has {granules} {what}"
        )
    raise_all("place", offences)
    return tuple(parts.get(name, 1) for name in names)


def _spread(topology: Slices, sizes: Sizes) -> Sizes:
    """Lay the slices across the first axes, which are the least busy."""
    left, outer = len(topology.slices), []
    for size in sizes:
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    if left > 1:
        raise UsageError(
            f"place: {text_of(sizes)} cannot be laid across the {len(topology.slices)} slices of "
            f"{topology.text}: some axes' sizes must have {len(topology.slices)} as a factor"
        )
    return tuple(outer)


def _ours(
    topology: Topology, sizes: Sizes, outer: Sizes | None, split: bool, contiguous: bool
) -> IntArray:
    """Return the ids [sizes] in our own order."""
    if outer is None:
        if isinstance(topology, Torus) and contiguous:
            return by_hosts(topology, sizes, lambda torus, own: _on_torus(torus, own, split))
        if isinstance(topology, Torus):
            return _on_torus(topology, sizes, split)
        if isinstance(topology, Slices):
            return _in_rows(topology, sizes, split, contiguous)
        if contiguous:
            return in_boxes(topology, sizes)
        return topology.device_ids.reshape(sizes)
    inner = tuple(size // part for size, part in zip(sizes, outer, strict=True))
    granules = jax_order.granules(topology)
    if any(one.num_devices != math.prod(inner) for one in granules):
        counts = ", ".join(f"{one.num_devices}" for one in granules)
        raise UsageError(
            f"place: each slice must hold {text_of(inner)} = {math.prod(inner)} devices; those of "
            f"{topology.text} hold {counts}"
        )
    meshes = [_ours(one, inner, None, split, contiguous) for one in granules]
    return jax_order.interleaved(meshes, inner, outer)


def _in_rows(topology: Slices, sizes: Sizes, split: bool, contiguous: bool) -> IntArray:
    """Let slices that differ have whole rows of the first axis, each as many as it has devices."""
    first = next((axis for axis, size in enumerate(sizes) if size > 1), 0)
    row = math.prod(sizes[first + 1 :])
    slices = list(topology.parts())
    if any(one.num_devices % row for one in slices):
        counts = ", ".join(str(one.num_devices) for one in slices)
        raise UsageError(
            f"place: the slices of {topology.text} differ, so each must hold whole rows of the "
            f"first axis, {row} devices here; they hold {counts}"
        )
    tails = ((one.num_devices // row, *sizes[first + 1 :]) for one in slices)
    pairs = zip(slices, tails, strict=True)
    ids = [_ours(one, tail, None, split, contiguous) for one, tail in pairs]
    return np.concatenate(ids).reshape(sizes)


def _on_torus(torus: Torus, sizes: Sizes, split: bool) -> IntArray:
    # The cores of a chip are a dim of their own, whose two ends are one chip apart at most.
    wraps = (*torus.wrap, False)
    grid = torus.grid
    taken = _best(grid, wraps, sizes, split)
    if taken is None:
        whole = ", ".join(map(text_of, itertools.islice(_whole(grid, len(sizes)), 6)))
        raise UsageError(
            f"place: {text_of(sizes)} on {torus.text} needs a dim that two axes share; whole dims "
            f"make {whole}, …\nallow_split_physical_axes=True lets axes share dims"
        )
    coords = [np.zeros(sizes, np.int64) for _ in grid]
    for axis, size in enumerate(sizes):
        walk = best_walk(_sides(taken, axis, grid, wraps))
        shape = [size if other == axis else 1 for other in range(len(sizes))]
        for dim, coord in enumerate(coords):
            coord += (walk.chips[:, dim] * _stride(taken, axis, dim)).reshape(shape)
    return torus.device_ids[tuple(coords)]


@lru_cache(maxsize=256)
def _best(
    grid: Sizes, wraps: tuple[bool, ...], sizes: Sizes, split: bool
) -> tuple[Sizes, ...] | None:
    """Return how much of each dim each axis takes [axis][dim], at its best; None if in no way.

    The busiest axis comes first and keeps every share of the dims that is as good as its best; the
    next one chooses among what these leave, and so on. Every choice that the axes so far have left
    can be completed, so nothing better is passed over.
    """
    found: list[tuple[tuple[Sizes, ...], Sizes]] = [((), grid)]  # shares, what is left of each dim
    for axis in reversed(range(len(sizes))):
        grown: dict[tuple[int, int], list[tuple[tuple[Sizes, ...], Sizes]]] = {}
        for shares, left in found:
            for share in _shares(left, sizes[axis], split):
                rest = tuple(size // part for size, part in zip(left, share, strict=True))
                if split or _fits(rest, sizes[:axis]):
                    taken = (share, *shares)
                    cost = shortest_hops(_sides(taken, 0, grid, wraps))
                    grown.setdefault(cost, []).append((taken, rest))
        if not grown:
            return None
        found = grown[min(grown)]
    # Among equals, many dims for the busiest axes: each has links of its own.
    return min(
        (shares for shares, _ in found),
        key=lambda shares: ([-sum(part > 1 for part in share) for share in shares[::-1]], shares),
    )


def _fits(grid: Sizes, sizes: Sizes) -> bool:
    """Whether axes can be laid onto whole dims."""
    if not sizes:
        return all(size == 1 for size in grid)
    for share in _shares(grid, sizes[-1], False):
        left = tuple(size // part for size, part in zip(grid, share, strict=True))
        if _fits(left, sizes[:-1]):
            return True
    return False


def _sides(
    taken: Sequence[Sizes], axis: int, grid: Sizes, wraps: Sequence[bool]
) -> tuple[Side, ...]:
    """Return the box of chips that a group of an axis is; `taken` may begin at that axis."""
    return tuple(
        Side(taken[axis][dim], _stride(taken, axis, dim), grid[dim] if wraps[dim] else 0)
        for dim in range(len(grid))
    )


def _stride(taken: Sequence[Sizes], axis: int, dim: int) -> int:
    """Return how far apart an axis's chips are along a dim: busier axes lie between them."""
    return math.prod(row[dim] for row in taken[axis + 1 :])


def _shares(grid: Sizes, size: int, split: bool) -> Iterator[Sizes]:
    """Yield the ways to make up a size of parts of dims."""
    if not grid:
        if size == 1:
            yield ()
        return
    parts = (n for n in range(1, grid[0] + 1) if grid[0] % n == 0 and size % n == 0)
    for part in parts:
        if split or part in (1, grid[0]):
            for rest in _shares(grid[1:], size // part, split):
                yield (part, *rest)


def _whole(grid: Sizes, rank: int) -> Iterator[Sizes]:
    """Yield the meshes of so many axes that share no dim."""
    seen = set()
    for owners in itertools.product(range(rank), repeat=len(grid)):
        row = [1] * rank
        for size, owner in zip(grid, owners, strict=True):
            row[owner] *= size
        if tuple(row) not in seen:
            seen.add(tuple(row))
            yield tuple(row)
