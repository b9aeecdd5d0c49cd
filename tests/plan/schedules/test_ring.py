"""Closed walks over boxes of chips: each chip once, in hops as short as can be."""

import itertools
import math

import numpy as np
import pytest

from shoal.plan.schedules.ring import Side, best_walk, hops


def proven(counts):
    """Return the least (longest, total) of a box without wrap: see the module."""
    count, wide = math.prod(counts), [n for n in counts if n > 1]
    if count == 1:
        return (0, 0)
    if len(wide) == 1:
        return (1, 2) if count == 2 else (2, 2 * count - 2)
    return (1, count) if count % 2 == 0 else (2, count + 1)


@pytest.mark.parametrize("counts", list(itertools.product(range(1, 6), repeat=3)), ids=str)
def test_walks_are_as_short_as_can_be(counts):
    walk = best_walk(tuple(map(Side, counts)))
    assert walk[:2] == proven(counts)
    assert sorted(map(tuple, walk.chips.tolist())) == list(np.ndindex(*counts))


@pytest.mark.parametrize(
    "counts", [(3, 3), (3, 5), (5, 5), (3, 3, 3), (3, 1, 3), (5, 3, 3)], ids=str
)
def test_linked_ends_close_a_box_of_an_odd_number(counts):
    for rings in itertools.product((False, True), repeat=len(counts)):
        sides = [Side(n, 1, n * ring) for n, ring in zip(counts, rings, strict=True)]
        helps = any(ring and n > 1 for n, ring in zip(counts, rings, strict=True))
        wanted = (1, math.prod(counts)) if helps else proven(counts)
        assert best_walk(tuple(sides))[:2] == wanted, rings


def test_large_boxes_too():
    for counts in [(16, 16), (9, 7, 5), (8, 8, 8), (1, 64), (3, 128)]:
        assert best_walk(tuple(map(Side, counts)))[:2] == proven(counts)


@pytest.mark.parametrize(
    "sides",
    [(Side(5),), (Side(8, ring=8),), (Side(3), Side(2)), (Side(4, 2), Side(2)), (Side(3, ring=3),),
     (Side(4, ring=16),), (Side(2, 2), Side(2, 1), Side(2, 4)), (Side(2, 8, 16), Side(4, 1)),
     (Side(7),), (Side(4, 2, 8), Side(2)), (Side(2, 3), Side(4)), (Side(3, ring=3), Side(2))],
    ids=str,
)  # fmt: skip
def test_no_order_of_all_is_shorter(sides):
    cells = np.array(list(np.ndindex(*(side.chips for side in sides))))
    best = best_walk(sides)
    for order in itertools.permutations(range(1, len(cells))):
        lengths = hops(cells[[0, *order]], sides)
        assert best[:2] <= (lengths.max(), lengths.sum())


def test_hops_take_the_shorter_way_round():
    line = np.array([[0], [3], [7]])
    assert hops(line, (Side(8, ring=8),)).tolist() == [3, 4, 1]
    assert hops(line, (Side(8),)).tolist() == [3, 4, 7]
    assert hops(line, (Side(8, 2, 16),)).tolist() == [6, 8, 2]
