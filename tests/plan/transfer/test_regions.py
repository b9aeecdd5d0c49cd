"""Regions to move, held against owners of single elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from plan.transfer.moves import Move, box_elements, elements, moves, terms
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region
from shoal.plan.transfer.regions import Region, regions

EIGHT = Mesh({"a": 2, "b": 2, "c": 2})


def by_hand(move: Move):
    """For each element that moves: its terms' holders, and its needers."""
    holders, needers = elements(move.source, move.shape), elements(move.target, move.shape)
    term_of = terms(move.source)
    rows = sorted(set(term_of.values()))
    by_element = {}
    for element in range(math.prod(move.shape)):
        groups = tuple(
            frozenset(d for d, held in holders.items() if element in held and term_of[d] == row)
            for row in rows
        )
        wanting = {device for device, needed in needers.items() if element in needed}
        if len(rows) == 1:
            wanting -= groups[0]
        if wanting:
            by_element[element] = (groups, frozenset(wanting))
    return by_element


@given(moves(partial=True))
def test_every_element_that_moves_is_in_one_region_with_its_holders_and_needers(move):
    seen = {}
    for box, groups, needers in regions(*move):
        for element in box_elements(box, move.shape):
            assert element not in seen
            seen[element] = (tuple(map(frozenset, groups)), frozenset(needers))
        assert len(set(needers)) == len(needers)
    assert seen == by_hand(move)


@given(moves(partial=True))
def test_regions_are_whole_intersections_of_shards(move):
    boxes = list(regions(*move))
    assert all(box.num_elements > 0 for box in boxes)
    for box in boxes:
        for layout, device in ((move.source, box.terms[0][0]), (move.target, box.needers[0])):
            own = region(layout, move.shape, device)
            inside = zip(own, box.box, strict=True)
            assert all(cut.start <= first < end <= cut.stop for cut, (first, end) in inside)
    pairs = [(box.terms, region(move.target, move.shape, box.needers[0])) for box in boxes]
    assert len(set(map(str, pairs))) == len(pairs)


@given(moves(partial=True))
def test_arrays_and_values_are_the_same(move):
    result = regions(*move)
    values = list(result)
    assert len(result) == len(values)
    assert [result[i] for i in range(len(result))] == values
    assert result[1:] == tuple(values[1:])
    boxes = [list(zip(*row, strict=True)) for row in zip(result.first.tolist(), result.end.tolist(),
                                                          strict=True)]  # fmt: skip
    assert boxes == [list(value.box) for value in values] == sorted(boxes)
    assert result.num_elements.tolist() == [value.num_elements for value in values]
    rows = result.holders[result.source_shards].tolist()
    assert [tuple(map(tuple, row)) for row in rows] == [value.terms for value in values]
    wanted = result.wanted[result.target_shards].tolist()
    assert all(set(value.needers) <= set(row) for value, row in zip(values, wanted, strict=True))


def test_uneven_shards_of_two_meshes():
    source = Layout(Mesh({"x": 4}, device_ids=[9, 8, 7, 6]), "x")  # 2, 2, 2, 1 of 7
    target = Layout(Mesh({"x": 3}, device_ids=[6, 7, 1]), "x")  # 3, 3, 1
    assert list(regions(source, target, (7,))) == [
        Region(((0, 2),), ((9,),), (6,)),
        Region(((2, 3),), ((8,),), (6,)),
        Region(((3, 4),), ((8,),), (7,)),
        Region(((6, 7),), ((6,),), (1,)),
    ]


def test_terms_of_a_pending_sum_are_rows():
    mesh = Mesh({"sum": 2, "copy": 2})
    source = Layout(mesh, None, partial={"sum": "sum"})
    rows = regions(source, Layout(mesh, "sum"), (4,))
    assert list(rows) == [
        Region(((0, 2),), ((0, 1), (2, 3)), (0, 1)),
        Region(((2, 4),), ((0, 1), (2, 3)), (2, 3)),
    ]


def test_a_reduction_over_one_device_is_done():
    mesh = Mesh({"one": 1, "x": 2})
    partial = {"one": "max"}
    assert not regions(Layout(mesh, "x", partial=partial), Layout(mesh, "x"), (4,))
    assert not regions(Layout(mesh, "x"), Layout(mesh, "x", partial=partial), (4,))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_arrays_move_nothing(shape):
    assert list(regions(Layout(EIGHT, "a", "b"), Layout(EIGHT, ("c", "b"), "a"), shape)) == []


def test_scalars():
    one, other = Mesh({}, device_ids=[4]), Mesh({"x": 2}, device_ids=[4, 5])
    assert list(regions(Layout(one), Layout(other), ())) == [Region((), ((4,),), (5,))]
    assert list(regions(Layout(other), Layout(one), ())) == []


def test_4096_devices_to_4096():
    mesh = Mesh({"a": 16, "b": 16, "c": 16})
    turned = Mesh({"a": 16, "b": 16, "c": 16}, device_ids=np.arange(4096)[::-1])
    source, shape = Layout(mesh, "a", "b", "c"), (48, 48, 48)
    assert len(regions(source, Layout(mesh, "c", "b", "a"), shape)) == 4096 - 16 * 16
    assert len(regions(source, Layout(turned, "c", "b", "a"), shape)) == 4096
    assert len(regions(source, Layout(mesh, "b", "c", None), shape)) == 4096
    sheets = Layout(mesh, ("a", "b", "c"), None, None)
    rows = Layout(mesh, None, None, ("a", "b", "c"))
    every = regions(sheets, rows, (4096, 2, 4096))
    assert len(every) == 4096 * 4095
    assert every[-1] == Region(((4095, 4096), (0, 2), (4094, 4095)), ((4095,),), (4094,))


def test_every_problem_of_a_region_request_is_reported_at_once():
    layout = Layout(EIGHT, "a", "b")
    with pytest.raises(UsageError) as caught:
        regions(Layout(EIGHT, "a"), Layout(EIGHT, None, None, partial={"b": "sum"}), (4, -4))
    assert len(caught.value.problems) == 4
    for words in ("keeps the dims", "has rank 1", "negative", "sum over 'b'", "leave partial out"):
        assert words in str(caught.value)
    with pytest.raises(UsageTypeError, match=r"source=\(2, 2\) must be a Layout"):
        regions((2, 2), layout, (4, 4))  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match="sequence of integers"):
        regions(layout, layout, (4.0, 4))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"more than 2\^62 bytes"):
        regions(layout, layout, (1 << 40, 1 << 40))
    with pytest.raises(UsageError, match=r"more than 2\^62 bytes"):
        regions(layout, layout, (0, 1 << 70))
