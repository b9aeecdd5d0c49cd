"""Edge colouring: schedule sends in the fewest rounds, one send and one receive per device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def edge_colours(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the round of each edge: as few rounds as the busiest device has sends or receives.

    Senders and receivers are the two sides of a bipartite graph, whose edges can be coloured with
    as many colours as its largest degree: D. Kőnig, "Über Graphen und ihre Anwendung auf
    Determinantentheorie und Mengenlehre", Math. Annalen 77 (1916). Each edge takes the first round
    in which both ends are free; where there is none, the rounds of a path of edges are swapped.

    Args:
      edges: sender and receiver of each; a pair may occur several times.

    Example:
      >>> edge_colours([(0, 1), (0, 2), (1, 2), (1, 0)])
      [0, 1, 0, 1]
    """
    if not edges:
        return []
    busy = Counter((side, edge[side]) for edge in edges for side in (0, 1))
    rounds = _Rounds(edges, max(busy.values()))
    for edge in range(len(edges)):
        rounds.place(edge)
    return rounds.chosen


class _Rounds:
    """The edges placed so far."""

    def __init__(self, edges: Sequence[tuple[int, int]], count: int) -> None:
        self.edges = edges
        self.chosen = [-1] * len(edges)
        ends = {(side, edge[side]) for edge in edges for side in (0, 1)}
        self.free = dict.fromkeys(ends, (1 << count) - 1)  # bit i: has no edge in round i
        self.taken: dict[tuple[int, int, int], int] = {}  # side, device, round → edge

    def place(self, edge: int) -> None:
        """Assign an edge a round that is free at both ends; add one if there is none."""
        sender, receiver = self.edges[edge]
        both = self.free[0, sender] & self.free[1, receiver]
        if not both:
            there = _first(self.free[1, receiver])
            both = self.free[0, sender]
            self._swap(receiver, _first(both), there)
        self._take(edge, _first(both))

    def _swap(self, receiver: int, wanted: int, other: int) -> None:
        """Swap two rounds along the path that begins at a receiver, so that `wanted` is free.

        The sender that needs the round has no edge in it. The path reaches senders by edges of that
        round, so it never reaches this one.
        """
        path, side, device, now = [], 1, receiver, wanted
        while (edge := self.taken.get((side, device, now))) is not None:
            path.append(edge)
            side = 1 - side
            device, now = self.edges[edge][side], wanted + other - now
        rounds = [self.chosen[edge] for edge in path]
        for edge in path:
            self._leave(edge)
        for edge, old in zip(path, rounds, strict=True):
            self._take(edge, wanted + other - old)

    def _take(self, edge: int, colour: int) -> None:
        self.chosen[edge] = colour
        for end in enumerate(self.edges[edge]):
            self.free[end] &= ~(1 << colour)
            self.taken[*end, colour] = edge

    def _leave(self, edge: int) -> None:
        colour = self.chosen[edge]
        for end in enumerate(self.edges[edge]):
            self.free[end] |= 1 << colour
            del self.taken[*end, colour]


def _first(mask: int) -> int:
    """Return the lowest bit that is set: 0b0110 → 1."""
    return (mask & -mask).bit_length() - 1
