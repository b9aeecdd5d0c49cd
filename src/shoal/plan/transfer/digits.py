"""The axes of two meshes over the same devices, split into common prime factors.

A device's position along an axis of size 4 is a number of two binary digits. With that split, most
layouts of one mesh can be expressed on another: `data=2, model=4` and `x=4, y=2` over one row of
devices are both `2, 2, 2`. Collectives then move digits, not axes (N. Rink et al.,
"Memory-efficient array redistribution through portable collective communication",
arXiv:2112.01075, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.primes import prime_factors
from shoal.plan.transfer.same_devices import in_one_order, positions

IntArray = NDArray[np.int64]
Axes = dict[str, list[int]]  # axis → its digits, most significant first


class Basis(NamedTuple):
    """A mesh whose axes are digits of the axes of another, over the same devices in that order."""

    mesh: Mesh
    digits: Mapping[str, tuple[str, ...]]  # of each axis, most significant first

    def on(self, layout: Layout) -> Layout:
        """Return a layout of the other mesh in terms of digits."""
        dims = [tuple(d for axis in dim for d in self.digits[axis]) for dim in layout.axes_of_dims]
        partial = {d: how for axis, how in layout.partial.items() for d in self.digits[axis]}
        return Layout(self.mesh, *dims, partial=partial)


def bases(source: Layout, target: Layout, most_states: int) -> tuple[Basis, Basis]:
    """Return the digits of both meshes: on one mesh of digits if it can express the target.

    Args:
      source, target: layouts over the same devices, in any order.
      most_states: limit on the number of layouts of this rank; digits are as fine as it permits.

    Example:
      >>> rows = Layout(Mesh({"data": 2, "model": 4}), "model", None)
      >>> mine, other = bases(rows, Layout(Mesh({"x": 4, "y": 2}), None, "x"), 1000)
      >>> mine.on(rows), other.mesh == mine.mesh
      (Layout(model.0+model.1, - @ data=2 model.0=2 model.1=2), True)
    """
    here, there = source.mesh, target.mesh
    cuts = _common_cuts(here, there)
    sizes, own = _split(here, cuts)
    other_sizes, other = _split(there, cuts)
    own_coords = _coords(sizes, np.arange(here.size))
    twin = _twins(own_coords, _coords(other_sizes, positions(here, there)))
    if twin is None:
        sizes, own, _ = _coarsened(sizes, own, {}, source.rank, most_states // 2)
        other_sizes, other, _ = _coarsened(other_sizes, other, {}, source.rank, most_states // 2)
        return _basis(here, sizes, own), _basis(there, other_sizes, other)
    shared = {axis: [twin[digit] for digit in digits] for axis, digits in other.items()}
    sizes, own, shared = _coarsened(sizes, own, shared, source.rank, most_states)
    basis = _basis(here, sizes, own)
    names = basis.mesh.axis_names
    return basis, Basis(basis.mesh, {a: tuple(names[d] for d in ds) for a, ds in shared.items()})


def count_states(digits: int, rank: int) -> int:
    """Return how many layouts of a rank there are: any digits, in any order, on any dims.

    >>> count_states(3, 2), count_states(3, 3)
    (49, 106)
    """
    if rank == 0:
        return 1
    return sum(math.perm(digits, n) * math.comb(n + rank - 1, n) for n in range(digits + 1))


def _common_cuts(here: Mesh, there: Mesh) -> set[int]:
    """Return the number of devices below each boundary of an axis, for both meshes together.

    Empty if these do not divide each other, or the devices are in another order.
    """
    if not in_one_order(here, there):
        return set()
    cuts = sorted({math.prod(m.shape[i:]) for m in (here, there) for i in range(len(m.shape) + 1)})
    return set() if any(high % low for low, high in pairwise(cuts)) else set(cuts)


def _split(mesh: Mesh, cuts: set[int]) -> tuple[list[int], Axes]:
    """Return the sizes of the digits in mesh order, and the digits of each axis."""
    sizes: list[int] = []
    axes: Axes = {}
    for number, (axis, size) in enumerate(mesh.axes.items()):
        low = math.prod(mesh.shape[number + 1 :])
        inside = sorted(c // low for c in cuts if c % low == 0 and low < c < low * size)
        begin = len(sizes)
        for less, more in reversed(list(pairwise([1, *inside, size]))):
            sizes += prime_factors(more // less)
        axes[axis] = list(range(begin, len(sizes)))
    return sizes, axes


def _coords(sizes: Sequence[int], places: IntArray) -> list[bytes]:
    """Return each digit of many positions."""
    return [digit.tobytes() for digit in np.unravel_index(places, sizes)] if sizes else []


def _twins(own: list[bytes], other: list[bytes]) -> dict[int, int] | None:
    """Return for each digit of the other mesh its equal in this one, or None."""
    number = {digit: i for i, digit in enumerate(own)}
    if any(digit not in number for digit in other):
        return None
    return {i: number[digit] for i, digit in enumerate(other)}


def _coarsened(
    sizes: list[int], own: Axes, other: Axes, rank: int, most: int
) -> tuple[list[int], Axes, Axes]:
    """Merge digits that are adjacent in all axes, the smallest first, until few are left."""
    groups = [[digit] for digit in range(len(sizes))]
    rows = [*own.values(), *other.values()]
    while count_states(len(groups), rank) > most:
        pairs = [(a, b) for a, b in pairwise(groups) if all(_side_by_side(a, b, r) for r in rows)]
        if not pairs:
            break
        first, second = min(
            pairs, key=lambda pair: math.prod(sizes[d] for d in (*pair[0], *pair[1]))
        )
        at = groups.index(first)
        groups[at : at + 2] = [first + second]
    number = {group[0]: i for i, group in enumerate(groups)}

    def merged(axes: Axes) -> Axes:
        return {axis: [number[d] for d in row if d in number] for axis, row in axes.items()}

    return [math.prod(sizes[d] for d in g) for g in groups], merged(own), merged(other)


def _side_by_side(first: list[int], second: list[int], row: list[int]) -> bool:
    """True if a row of digits has both, one right after the other, or neither."""
    if first[-1] not in row and second[0] not in row:
        return True
    return (first[-1], second[0]) in pairwise(row)


def _basis(mesh: Mesh, sizes: Sequence[int], axes: Axes) -> Basis:
    names: list[str] = []
    digits = {}
    for axis, row in axes.items():
        own = [axis] if len(row) == 1 else [f"{axis}.{i}" for i in range(len(row))]
        while set(own) & {*names, *(set(mesh.axis_names) - {axis})}:  # a user's own axis
            own = [f"{name}'" for name in own]
        digits[axis] = tuple(own)
        names += own
    pairs = list(zip(names, sizes, strict=True))
    fine = Mesh(pairs, mesh.device_ids.ravel(), mesh.processes.ravel(), mesh.kind)
    return Basis(fine, digits)
