"""The cheapest sequence of collectives from one layout to another over the same devices.

A shortest path over the states of `states` (P. Hart, N. Nilsson and B. Raphael, "A formal basis for
the heuristic determination of minimum cost paths", IEEE Trans. SSC 4, 1968: Dijkstra's, with a
lower bound of what is left to receive). No state on the way holds more on a device than the larger
of both ends, as in Rink et al. (arXiv:2112.01075); where they rewrite a trivial program to a normal
form, this searches for a path, since a mesh has few layouts.

Where the target's axes cannot be expressed in digits of the source's mesh (2x3 against 3x2, or
devices in another order), its digits are a second basis, and a permute leads from one to the other.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.cost import cost
from shoal.plan.hardware.links import Links
from shoal.plan.hardware.wiring import Topology
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.placement import prime_factors
from shoal.plan.transfer.blocks import Tiles, grid_of, lacking, missing, tiles_by
from shoal.plan.transfer.move_steps import Step, pairs
from shoal.plan.transfer.same_devices import in_one_order, positions

# The layouts that a move may pass through, and the collectives between them.
#
# A state specifies which digits cut which dim, and which have a pending sum; the others replicate.
# One collective joins the least significant digits of a dim, or moves them to another dim, or cuts
# a dim further by digits that replicate or have a pending sum (Rink et al., arXiv:2112.01075). A
# permute leads to every state that cuts each dim into equally many tiles.


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
    index_of = {axis: i for i, axis in enumerate(layout.mesh.axis_names)}
    dims = tuple(tuple(index_of[axis] for axis in dim) for dim in layout.axes_of_dims)
    return LayoutState(dims, frozenset(index_of[axis] for axis in layout.partial))


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
            yield Transition(
                kind="slice",
                digits=(digit,),
                dim=dim,
                to_dim=None,
                after=_grown(state, dim, (digit,)),
            )
    for dim, row in enumerate(state.dims):
        for taken in range(1, len(row) + 1):
            kept, moved = row[: len(row) - taken], row[len(row) - taken :]
            less = state._replace(dims=(*state.dims[:dim], kept, *state.dims[dim + 1 :]))
            yield Transition(kind="all_gather", digits=moved, dim=dim, to_dim=None, after=less)
            for to_dim in _dims_cut_by(math.prod(sizes[d] for d in moved), counts, shape):
                if to_dim != dim:
                    yield Transition(
                        kind="all_to_all",
                        digits=moved,
                        dim=dim,
                        to_dim=to_dim,
                        after=_grown(less, to_dim, moved),
                    )
    if state.pending:
        yield from _sums(state, sizes, shape, counts)


def _sums(
    state: LayoutState, sizes: Sequence[int], shape: Sequence[int], counts: Sequence[int]
) -> Iterator[Transition]:
    """Yield the ways to reduce pending sums: all of them at once, or along one digit."""
    groups = {(digit,) for digit in state.pending} | {tuple(sorted(state.pending))}
    for group in sorted(groups):
        done = state._replace(pending=state.pending - set(group))
        yield Transition(kind="all_reduce", digits=group, dim=None, to_dim=None, after=done)
        for dim in _dims_cut_by(math.prod(sizes[d] for d in group), counts, shape):
            for order in permutations(group) if len(group) < 4 else [group]:
                yield Transition(
                    kind="reduce_scatter",
                    digits=order,
                    dim=dim,
                    to_dim=None,
                    after=_grown(done, dim, order),
                )


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


# The axes of two meshes over the same devices, split into common prime factors.
#
# A device's position along an axis of size 4 is a number of two binary digits. With that split,
# most layouts of one mesh can be expressed on another: `data=2, model=4` and `x=4, y=2` over one
# row of devices are both `2, 2, 2`. Collectives then move digits, not axes (N. Rink et al.,
# "Memory-efficient array redistribution through portable collective communication",
# arXiv:2112.01075, section 4).


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
        sizes, own, _ = _coarsened(sizes, own, other={}, rank=source.rank, most=most_states // 2)
        other_sizes, other, _ = _coarsened(
            sizes=other_sizes, own=other, other={}, rank=source.rank, most=most_states // 2
        )
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
    for index, (axis, size) in enumerate(mesh.axes.items()):
        low = math.prod(mesh.shape[index + 1 :])
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
    index_of = {digit: i for i, digit in enumerate(own)}
    if any(digit not in index_of for digit in other):
        return None
    return {i: index_of[digit] for i, digit in enumerate(other)}


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
        index = groups.index(first)
        groups[index : index + 2] = [first + second]
    index_of = {group[0]: i for i, group in enumerate(groups)}

    def merged(axes: Axes) -> Axes:
        return {axis: [index_of[d] for d in row if d in index_of] for axis, row in axes.items()}

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
    fine = Mesh(
        pairs, device_ids=mesh.device_ids.ravel(), processes=mesh.processes.ravel(), kind=mesh.kind
    )
    return Basis(fine, digits)


MOST_STATES = 3000  # searching all of them takes about a second
MOST_ROUNDS = 16  # messages of an exchange, one after the other
_MESSAGE_BYTES = 256 << 10  # overhead of a message, as bytes written by a device

# The cost of a collective over digits of a mesh, given the bytes that each device holds before.
Weigh = Callable[[str, Mesh, tuple[str, ...], int], float]


class SearchNode(NamedTuple):
    """A state, in the digits of one of the two meshes."""

    basis: int
    state: LayoutState


def by_bytes(kind: str, mesh: Mesh, digits: tuple[str, ...], held_bytes: int) -> float:
    """Weigh a collective by the bytes that a device receives."""
    size = math.prod(mesh.axes[digit] for digit in digits)
    part = held_bytes * (size - 1) / size
    return {
        "slice": 0.0,
        "all_gather": held_bytes * (size - 1.0),
        "all_to_all": part,
        "reduce_scatter": part,
        "all_reduce": 2 * part,
        "permute": float(held_bytes),
    }[kind]


def by_seconds(topology: Topology, links: Links | None = None) -> Weigh:
    """Weigh collectives by the seconds they take on a topology.

    A permute between arbitrary devices takes the time of an all-to-all of as many bytes: on
    average its messages travel equally far.
    """

    @functools.cache
    def weigh(kind: str, mesh: Mesh, digits: tuple[str, ...], held_bytes: int) -> float:
        if kind == "slice" or not digits:
            return 0.0
        size = math.prod(mesh.axes[digit] for digit in digits)
        payload = held_bytes * size if kind == "all_gather" else held_bytes
        name = "all_to_all" if kind == "permute" else kind
        return cost(topology, mesh, name, digits, payload, links=links).seconds

    return weigh


def shortest(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    item_bytes: int,
    *,
    weigh: Weigh = by_bytes,
    most_states: int = MOST_STATES,
    most_rounds: int = MOST_ROUNDS,
) -> tuple[Step, ...] | None:
    """Return the cheapest steps, among equals those with the least work; None if there is no path.

    Args:
      source, target: over the same devices, cutting every dim of `shape` evenly. Sums pending in
        the source are carried out; the target has none, or some of the same axes and mesh.
      item_bytes: size of an element.
      weigh: returns the cost of a collective.
      most_states: digits are merged until there are at most this many layouts.
      most_rounds: limit on the rounds of an exchange.

    Example:
      >>> grid = Mesh({"a": 2, "b": 2})
      >>> rows, columns = Layout(grid, ("a", "b"), None), Layout(grid, None, ("a", "b"))
      >>> [str(step) for step in shortest(rows, columns, (8, 8), 4)]
      ['all_to_all over a+b of dim 0 → dim 1']
    """
    here, there = bases(source, target, most_states)
    begin, end = here.on(source), there.on(target)
    meshes = [here.mesh] if here.mesh == there.mesh else [here.mesh, there.mesh]
    search = _PathSearch(meshes, shape, item_bytes, weigh, most_rounds, ends=(begin, end))
    path = search.run()
    return None if path is None else tuple(_joined([search.step(*hop) for hop in path]))


Hop = tuple[SearchNode, Transition, SearchNode]
Weighed = tuple[float, int, Hop]  # its weight, and its work: decides among equal weights


class _PathSearch:
    """One search for the cheapest path."""

    def __init__(
        self,
        meshes: Sequence[Mesh],
        shape: Sequence[int],
        item_bytes: int,
        weigh: Weigh,
        most_rounds: int,
        ends: tuple[Layout, Layout],  # on the first mesh and on the last
    ) -> None:
        self._meshes, self._shape, self._weigh = meshes, tuple(shape), weigh
        self._whole, self._item_bytes = math.prod(shape) * item_bytes, item_bytes
        self._most_rounds = most_rounds
        self._first = SearchNode(0, state_of(ends[0]))
        self._last = SearchNode(len(meshes) - 1, state_of(ends[1]))
        self._layouts = {self._first: ends[0], self._last: ends[1]}
        self._most_bytes = max(map(self._held, (self._first, self._last)))
        self._permuted: set[tuple[int, ...]] = set()
        self._tiles: dict[SearchNode, Tiles] = {}
        self._rest: dict[SearchNode, int] = {}
        self._equal: dict[tuple[int, ...], dict[bytes, list[SearchNode]]] = {}

    def run(self) -> list[Hop] | None:
        """Return the hops of a cheapest path, or None."""
        best: dict[SearchNode, tuple[float, int]] = {self._first: (0.0, 0)}
        came: dict[SearchNode, Hop] = {}
        count = itertools.count()
        heap = [(0.0, 0, next(count), self._first)]
        done: set[SearchNode] = set()
        while heap:
            _, _, _, node = heapq.heappop(heap)
            if node == self._last:
                return _walked_back(came, self._first, self._last)
            if node in done:
                continue
            done.add(node)
            price, done_work = best[node]
            for weight, work, hop in self._hops(node):
                key, after = (price + weight, done_work + work), hop[2]
                if after not in done and key < best.get(after, (math.inf, 0)):
                    best[after], came[after] = key, hop
                    rest = self._least(after)
                    heapq.heappush(heap, (key[0] + rest, key[1], next(count), after))
        return None

    def _least(self, node: SearchNode) -> float:
        """Return a lower bound on the weight of the rest of the path; 0 if unknown.

        A device must receive all it needs and does not hold; data dropped on the way only add to
        that, so no step reduces the bound by more than its own weight.
        """
        if self._weigh is not by_bytes or node.state.pending:
            return 0.0
        if node not in self._rest:
            self._rest[node] = lacking(
                self._tiles_of(node), self._tiles_of(self._last), self._shape
            )
        return float(self._rest[node] * self._item_bytes)

    def step(self, before: SearchNode, edge: Transition, after: SearchNode) -> Step:
        """Return a hop as a step of the plan."""
        mesh = self._meshes[before.basis]
        axes = tuple(mesh.axis_names[digit] for digit in edge.digits)
        return Step(edge.kind, axes, edge.dim, edge.to_dim, *map(self._layout, (before, after)))

    def _layout(self, node: SearchNode) -> Layout:
        if node not in self._layouts:
            self._layouts[node] = layout_of_state(node.state, self._meshes[node.basis])
        return self._layouts[node]

    def _held(self, node: SearchNode) -> int:
        """Return the bytes that a device holds."""
        return self._whole // math.prod(tiles(node.state, self._meshes[node.basis].shape))

    def _tiles_of(self, node: SearchNode) -> Tiles:
        if node not in self._tiles:
            self._tiles[node] = tiles_by(node.state.dims, self._meshes[node.basis], self._meshes[0])
        return self._tiles[node]

    def _hops(self, node: SearchNode) -> Iterator[Weighed]:
        """Yield the hops from a state."""
        mesh, held = self._meshes[node.basis], self._held(node)
        for edge in edges(node.state, mesh.shape, self._shape):
            after = SearchNode(node.basis, edge.after)
            if self._held(after) <= self._most_bytes:
                axes = tuple(mesh.axis_names[digit] for digit in edge.digits)
                weight = self._weigh(edge.kind, mesh, axes, held)
                yield weight, _work(edge, held, self._held(after)), (node, edge, after)
        if node.state.pending:
            return
        yield from self._permutes(node, held)
        yield from self._exchanges(node)

    def _permutes(self, node: SearchNode, held: int) -> Iterator[Weighed]:
        """Yield the states with equally many tiles: reached by a permute, or the same placement."""
        mesh = self._meshes[node.basis]
        counts = tiles(node.state, mesh.shape)
        if len(self._meshes) > 1:
            for after in self._same(counts)[self._tiles_of(node).coords.tobytes()]:
                yield 0.0, 0, (node, _to("permute", after), after)
        if counts not in self._permuted:  # reached first by the cheapest state
            self._permuted.add(counts)
            weight = self._weigh("permute", mesh, mesh.axis_names, held)
            work = _MESSAGE_BYTES + held
            for after in self._members(counts):
                yield weight, work, (node, _to("permute", after), after)

    def _exchanges(self, node: SearchNode) -> Iterator[Weighed]:
        """Yield the exchange to the last state; if there is none, from the first state to any."""
        direct = self._exchange(node, self._last)
        if direct is not None:
            yield direct
        elif node == self._first:
            for after in self._states():
                exchange = self._exchange(node, after)
                if exchange is not None:
                    yield exchange

    def _exchange(self, node: SearchNode, after: SearchNode) -> Weighed | None:
        """Return an exchange, if the blocks are equal and few enough."""
        mesh, old, new = self._meshes[0], self._tiles_of(node), self._tiles_of(after)
        grid = grid_of(old.counts, new.counts)
        if grid is None or any(size % n for size, n in zip(self._shape, grid, strict=True)):
            return None
        rounds = int(missing(old, new).max(initial=0))
        if rounds > self._most_rounds or self._held(after) > self._most_bytes:
            return None
        block = self._whole // math.prod(grid)
        weight = rounds * self._weigh("permute", mesh, mesh.axis_names, block)
        cut_sent_filled_and_written = 2 * rounds * block + 2 * self._held(after)
        work = (rounds + 1) * _MESSAGE_BYTES + cut_sent_filled_and_written
        return weight, work, (node, _to("exchange", after), after)

    def _states(self) -> Iterator[SearchNode]:
        """Yield all states that divide the dims evenly."""
        for basis, mesh in enumerate(self._meshes):
            for state in every(len(mesh.shape), len(self._shape)):
                counts = tiles(state, mesh.shape)
                if not any(size % n for size, n in zip(self._shape, counts, strict=True)):
                    yield SearchNode(basis, state)

    def _members(self, counts: tuple[int, ...]) -> list[SearchNode]:
        """Return the states of both meshes with these numbers of tiles."""
        return [
            SearchNode(basis, state)
            for basis, mesh in enumerate(self._meshes)
            for state in members(counts, mesh.shape)
        ]

    def _same(self, counts: tuple[int, ...]) -> dict[bytes, list[SearchNode]]:
        """Return the states with these numbers of tiles, by the data that devices hold."""
        if counts not in self._equal:
            groups: dict[bytes, list[SearchNode]] = {}
            for node in self._members(counts):
                groups.setdefault(self._tiles_of(node).coords.tobytes(), []).append(node)
            self._equal[counts] = groups
        return self._equal[counts]


def _work(edge: Transition, held: int, holds: int) -> int:
    """Estimate the bytes that a device writes for a collective, temporaries and result.

    It decides among paths that receive equally many bytes. A gather or an all-to-all writes the
    received data, and writes them again unless tiles are joined along the first dim; an
    all-to-all first cuts the data to send. Slices are part of the next step.
    """
    times = {
        "slice": 0,
        "all_gather": 1 if edge.dim == 0 else 2,
        "all_to_all": 3,
        "reduce_scatter": 2,
        "all_reduce": 2,
    }
    return _MESSAGE_BYTES // (4 if edge.kind == "slice" else 1) + times[edge.kind] * max(
        held, holds
    )


def _to(kind: str, after: SearchNode) -> Transition:
    return Transition(kind, digits=(), dim=None, to_dim=None, after=after.state)


def _walked_back(came: dict[SearchNode, Hop], first: SearchNode, last: SearchNode) -> list[Hop]:
    path = []
    while last != first:
        path.append(came[last])
        last = came[last][0]
    return path[::-1]


def _joined(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps that change a device's data, with slices of one dim merged."""
    held: Step | None = None
    for step in steps:
        if step.kind == "permute" and not pairs(step.before, step.after):
            continue  # the same placement on the other mesh
        if held and (held.kind, held.dim) == (step.kind, step.dim) and step.kind == "slice":
            held = step._replace(axes=held.axes + step.axes, before=held.before)
            continue
        if held:
            yield held
        held = step
    if held:
        yield held
