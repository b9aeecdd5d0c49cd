"""The layouts that a move may pass through, and the collectives between them.

A state specifies which digits cut which dim, and which have a pending sum; the others replicate.
One collective joins the least significant digits of a dim, or moves them to another dim, or cuts
a dim further by digits that replicate or have a pending sum (Rink et al., arXiv:2112.01075). A
permute leads to every state that cuts each dim into equally many tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh


class LayoutState(NamedTuple):
    """A layout in numbers: digits are positions in the axes of a mesh."""

    dims: tuple[tuple[int, ...], ...]  # the digits that cut each dim, most significant first
    pending: frozenset[int] = frozenset()  # digits with a pending sum


class Transition(NamedTuple):
    """A collective from one state to another."""

    kind: str
    digits: tuple[int, ...]
    dim: int | None
    to_dim: int | None
    after: LayoutState


def state_of(layout: Layout) -> LayoutState:
    """Return the state of a layout of a mesh of digits."""
    number = {axis: i for i, axis in enumerate(layout.mesh.axis_names)}
    dims = tuple(tuple(number[axis] for axis in dim) for dim in layout.axes_of_dims)
    return LayoutState(dims, frozenset(number[axis] for axis in layout.partial))


def layout_of_state(state: LayoutState, mesh: Mesh) -> Layout:
    """Return the layout of a state."""
    names = mesh.axis_names
    dims = [tuple(names[digit] for digit in dim) for dim in state.dims]
    return Layout(mesh, *dims, partial={names[digit]: "sum" for digit in state.pending})


def tiles(state: LayoutState, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of tiles of each dim."""
    return tuple(math.prod(sizes[digit] for digit in dim) for dim in state.dims)


def edges(state: LayoutState, sizes: Sequence[int], shape: Sequence[int]) -> Iterator[Transition]:
    """Yield the results of one collective on a state; only tiles that divide the dims evenly."""
    counts = tiles(state, sizes)
    used = {digit for dim in state.dims for digit in dim} | state.pending
    for digit in (d for d in range(len(sizes)) if d not in used):
        for dim in _dims_cut_by(sizes[digit], counts, shape):
            yield Transition("slice", (digit,), dim, None, _grown(state, dim, (digit,)))
    for dim, row in enumerate(state.dims):
        for taken in range(1, len(row) + 1):
            kept, moved = row[: len(row) - taken], row[len(row) - taken :]
            less = state._replace(dims=(*state.dims[:dim], kept, *state.dims[dim + 1 :]))
            yield Transition("all_gather", moved, dim, None, less)
            for to_dim in _dims_cut_by(math.prod(sizes[d] for d in moved), counts, shape):
                if to_dim != dim:
                    yield Transition("all_to_all", moved, dim, to_dim, _grown(less, to_dim, moved))
    if state.pending:
        yield from _sums(state, sizes, shape, counts)


def _sums(
    state: LayoutState, sizes: Sequence[int], shape: Sequence[int], counts: Sequence[int]
) -> Iterator[Transition]:
    """Yield the ways to reduce pending sums: all of them at once, or along one digit."""
    groups = {(digit,) for digit in state.pending} | {tuple(sorted(state.pending))}
    for group in sorted(groups):
        done = state._replace(pending=state.pending - set(group))
        yield Transition("all_reduce", group, None, None, done)
        for dim in _dims_cut_by(math.prod(sizes[d] for d in group), counts, shape):
            for order in permutations(group) if len(group) < 4 else [group]:
                yield Transition("reduce_scatter", order, dim, None, _grown(done, dim, order))


def _dims_cut_by(parts: int, counts: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the dims that can be cut further by this factor."""
    return [dim for dim, size in enumerate(shape) if size % (counts[dim] * parts) == 0]


def _grown(state: LayoutState, dim: int, digits: tuple[int, ...]) -> LayoutState:
    row = state.dims[dim] + digits
    return state._replace(dims=(*state.dims[:dim], row, *state.dims[dim + 1 :]))


def every(digits: int, rank: int) -> Iterator[LayoutState]:
    """Yield every state without pending sums."""

    def fill(dims: tuple[tuple[int, ...], ...], left: tuple[int, ...]) -> Iterator[LayoutState]:
        if len(dims) == rank:
            yield LayoutState(dims)
            return
        for count in range(len(left) + 1):
            for row in permutations(left, count):
                rest = tuple(digit for digit in left if digit not in row)
                yield from fill((*dims, row), rest)

    yield from fill((), tuple(range(digits)))


def members(counts: Sequence[int], sizes: Sequence[int]) -> Iterator[LayoutState]:
    """Yield every state without pending sums that cuts the dims into these numbers of tiles."""

    def fill(dims: tuple[tuple[int, ...], ...], left: tuple[int, ...]) -> Iterator[LayoutState]:
        if len(dims) == len(counts):
            yield LayoutState(dims)
            return
        for row in _rows(counts[len(dims)], left, sizes):
            yield from fill((*dims, row), tuple(digit for digit in left if digit not in row))

    yield from fill((), tuple(range(len(sizes))))


def _rows(count: int, left: tuple[int, ...], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every row of digits whose sizes multiply to `count`."""
    if count == 1:
        yield ()
        return
    for digit in left:
        if count % sizes[digit] == 0:
            rest = tuple(other for other in left if other != digit)
            for row in _rows(count // sizes[digit], rest, sizes):
                yield (digit, *row)
