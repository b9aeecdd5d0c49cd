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
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shoal.plan.cost import cost
from shoal.plan.hardware.links import Links
from shoal.plan.hardware.wiring import Topology
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.blocks import Tiles, grid_of, lacking, missing, tiles_of
from shoal.plan.transfer.digits import bases
from shoal.plan.transfer.layout_states import (
    LayoutState,
    Transition,
    edges,
    every,
    layout_of_state,
    members,
    state_of,
    tiles,
)
from shoal.plan.transfer.move_steps import Step, pairs

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
    ends = SearchNode(0, state_of(begin)), SearchNode(len(meshes) - 1, state_of(end))
    search = _PathSearch(meshes, shape, item_bytes, weigh, most_rounds, ends)
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
        ends: tuple[SearchNode, SearchNode],
    ) -> None:
        self._meshes, self._shape, self._weigh = meshes, tuple(shape), weigh
        self._whole, self._item_bytes = math.prod(shape) * item_bytes, item_bytes
        self._most_rounds = most_rounds
        self._first, self._last = ends
        self._most_bytes = max(map(self._held, ends))
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
        return layout_of_state(node.state, self._meshes[node.basis])

    def _held(self, node: SearchNode) -> int:
        """Return the bytes that a device holds."""
        return self._whole // math.prod(tiles(node.state, self._meshes[node.basis].shape))

    def _tiles_of(self, node: SearchNode) -> Tiles:
        if node not in self._tiles:
            self._tiles[node] = tiles_of(self._layout(node), self._meshes[0])
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
                if (found := self._exchange(node, after)) is not None:
                    yield found

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
            found: dict[bytes, list[SearchNode]] = {}
            for node in self._members(counts):
                found.setdefault(self._tiles_of(node).coords.tobytes(), []).append(node)
            self._equal[counts] = found
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
    return Transition(kind, (), None, None, after.state)


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
