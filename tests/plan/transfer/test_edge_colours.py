"""Rounds in which each end has one edge, and no more of them than there must be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.transfer.edge_colours import edge_colours

ends = st.integers(0, 6)


@given(st.lists(st.tuples(ends, ends), max_size=60))
def test_as_many_rounds_as_the_largest_degree(edges):
    colours = edge_colours(edges)
    assert len(colours) == len(edges)
    for end in (0, 1):
        met = Counter((edge[end], colour) for edge, colour in zip(edges, colours, strict=True))
        assert set(met.values()) <= {1}
    degrees = Counter((end, edge[end]) for edge in edges for end in (0, 1))
    assert set(colours) == set(range(max(degrees.values(), default=0)))


def test_a_path_of_rounds_is_swapped():
    edges = [(0, 0), (1, 1), (0, 1), (1, 0)]
    assert edge_colours([(0, 0), (1, 0), (1, 1)]) == [0, 1, 0]
    assert len(set(edge_colours(edges))) == 2
    assert len(set(edge_colours([(0, 0), (1, 1), (2, 0), (2, 1)]))) == 2
