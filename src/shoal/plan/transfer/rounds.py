"""Sends in rounds, in each of which every device sends at most once and receives at most once.

A colouring of the edges of the bipartite graph of senders and receivers. It needs as many colours
as the busiest of them has sends (D. König, Mathematische Annalen 77, 1916): where a send finds no
colour that is free at both its ends, the two colours of a path of alternating sends change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["rounds_of"]

Send = TypeVar("Send", bound=tuple[object, ...])
End = tuple[bool, int]  # is it the receiving end, and of which device


def rounds_of(sends: Sequence[Send]) -> tuple[tuple[Send, ...], ...]:
    """Return the sends in rounds, as few as there can be.

    Args:
      sends: sender, receiver, and whatever else belongs to it.

    Example:
      >>> rounds_of([(0, 1, "a"), (0, 2, "b"), (1, 2, "c")])
      (((0, 1, 'a'), (1, 2, 'c')), ((0, 2, 'b'),))
    """
    at: dict[End, dict[int, int]] = {}  # at each end, the send of each colour
    colour_of: list[int] = []
    for number, send in enumerate(sends):
        ends = _ends(send)
        first, second = (_free(at.setdefault(end, {})) for end in ends)
        if first != second and first in at[ends[1]]:
            _swap(ends[1], first, second, at, colour_of, sends)
        colour_of.append(first)
        for end in ends:
            at[end][first] = number
    rounds: list[list[Send]] = [[] for _ in range(max(colour_of, default=-1) + 1)]
    for send, colour in zip(sends, colour_of, strict=True):
        rounds[colour].append(send)
    return tuple(map(tuple, rounds))


def _ends(send: tuple[object, ...]) -> tuple[End, End]:
    return (False, send[0]), (True, send[1])  # type: ignore[return-value]


def _free(used: dict[int, int]) -> int:
    """Return the first colour that is not used."""
    colour = 0
    while colour in used:
        colour += 1
    return colour


def _swap(
    end: End,
    first: int,
    second: int,
    at: dict[End, dict[int, int]],
    colour_of: list[int],
    sends: Sequence[tuple[object, ...]],
) -> None:
    """Change both colours along the path that leaves `end` by `first`: then that is free here."""
    path = []
    here, colour = end, first
    while (number := at[here].get(colour)) is not None:
        path.append(number)
        one, other = _ends(sends[number])
        here = other if here == one else one
        colour = second if colour == first else first
    for number in path:
        for own in _ends(sends[number]):
            if at[own].get(colour_of[number]) == number:
                del at[own][colour_of[number]]
    for number in path:
        colour_of[number] = second if colour_of[number] == first else first
        for own in _ends(sends[number]):
            at[own][colour_of[number]] = number
