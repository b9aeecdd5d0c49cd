"""The plan of reads, against one that looks at every byte."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.format.records import Chunks
from shoal.checkpoint.planning.read_plan import Boxes, Items, ReadPlan, plan_reads

BLOCK = 4


def grid_of(draw, size: int) -> list[tuple[int, int]]:
    cuts = draw(st.lists(st.integers(1, max(size - 1, 1)), max_size=2, unique=True))
    edges = [0, *sorted(cut for cut in cuts if cut < size), size]
    return list(itertools.pairwise(edges))


@st.composite
def checkpoints(draw):
    """Leaves cut into grids, their chunks in a few files in any order; boxes of them."""
    rank = 3
    leaves, rows = [], []
    for leaf in range(draw(st.integers(1, 3))):
        shape = [draw(st.integers(1, 7)) for _ in range(draw(st.integers(0, rank)))]
        per_byte = draw(st.sampled_from((1, 1, 2, 4)))
        item = 1 if per_byte > 1 else draw(st.sampled_from((1, 2, 8)))
        leaves.append((shape, item, per_byte))
        boxes: list[list[tuple[int, int]]] = [[]]
        for size in [*shape, *[1] * (rank - len(shape))]:
            boxes = [[*box, cut] for box in boxes for cut in grid_of(draw, size)]
        rows += [(leaf, box) for box in boxes]
    files = draw(st.integers(1, 2))
    tables = {name: [] for name in ("leaf", "file", "begin", "end", "origin", "extent")}
    upto = [draw(st.integers(0, 9)) for _ in range(files)]
    for number in draw(st.permutations(range(len(rows)))):
        leaf, box = rows[number]
        _, item, per_byte = leaves[leaf]
        length = -(-math.prod(b - a for a, b in box) * item // per_byte)
        file = draw(st.integers(0, files - 1))
        tables["leaf"].append(leaf)
        tables["file"].append(file)
        tables["begin"].append(upto[file])
        upto[file] += length
        tables["end"].append(upto[file])
        tables["origin"].append([a for a, _ in box])
        tables["extent"].append([b - a for a, b in box])
    order = np.argsort(tables["leaf"], kind="stable")
    arrays = {name: np.array(rows, dtype=np.int64)[order] for name, rows in tables.items()}
    return leaves, Chunks(**arrays), np.array(upto, dtype=np.int64)


@st.composite
def wants(draw, leaves):
    leaf, origin, extent = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(leaves) - 1))
        shape = [*leaves[number][0], *[1] * (3 - len(leaves[number][0]))]
        low = [draw(st.integers(0, size - 1)) for size in shape]
        leaf.append(number)
        origin.append(low)
        extent.append([draw(st.integers(0, s - a)) for s, a in zip(shape, low, strict=True)])
    rows = np.array(origin, dtype=np.int64).reshape(-1, 3)
    return Boxes(np.array(leaf, dtype=np.int64), rows, np.array(extent, np.int64).reshape(-1, 3))


def items_of(leaves) -> Items:
    return Items(np.array([item for _, item, _ in leaves]), np.array([per for *_, per in leaves]))


def wanted_bytes(leaves, chunks: Chunks, boxes: Boxes) -> set[tuple[int, int]]:
    """Every (file, byte) that holds an element of a box, one element after the other."""
    found = set()
    for leaf, origin, extent in zip(*boxes, strict=True):
        _, item, per_byte = leaves[leaf]
        for step in np.ndindex(*extent):
            place = origin + step
            for row in np.flatnonzero(chunks.leaf == leaf):
                inside = place - chunks.origin[row]
                if (inside < 0).any() or (inside >= chunks.extent[row]).any():
                    continue
                element = int(np.ravel_multi_index(inside, chunks.extent[row]))
                first = chunks.begin[row] + element * item // per_byte
                last = chunks.begin[row] - (-(element + 1) * item // per_byte)
                found |= {(int(chunks.file[row]), byte) for byte in range(first, last)}
    return found


def plan_of(found, boxes, gap=0, most=2 * BLOCK) -> ReadPlan:
    leaves, chunks, sizes = found
    return plan_reads(
        chunks, sizes, items_of(leaves), boxes,
        most_request_bytes=most, gap_bytes=gap, block_bytes=BLOCK,
    )  # fmt: skip


@given(st.data(), st.sampled_from((0, 3, 9)), st.sampled_from((1, BLOCK, 3 * BLOCK, 1000)))
def test_every_byte_that_is_wanted_is_read_once_in_whole_blocks(data, gap, most):
    found = data.draw(checkpoints())
    boxes = data.draw(wants(found[0]))
    plan = plan_of(found, boxes, gap, most)
    read: dict[tuple[int, int], int] = {}
    for file, begin, end in zip(plan.file, plan.begin, plan.end, strict=True):
        assert begin % BLOCK == 0
        assert end % BLOCK == 0 or end == found[2][file]
        assert 0 < end - begin <= max(most, BLOCK)
        for byte in range(begin, end):
            read[int(file), byte] = read.get((int(file), byte), 0) + 1
    assert set(read.values()) <= {1}
    assert plan.read_bytes == len(read)
    wanted = wanted_bytes(found[0], found[1], boxes)
    assert wanted <= read.keys()
    if gap == 0:  # nothing but the blocks of what is wanted
        assert {(f, b // BLOCK) for f, b in read} == {(f, b // BLOCK) for f, b in wanted}
    assert (np.diff(plan.file * 10_000 + plan.begin) > 0).all()


@given(st.data())
def test_pieces_cover_the_boxes_and_are_assigned_to_requests(data):
    found = data.draw(checkpoints())
    boxes = data.draw(wants(found[0]))
    plan = plan_of(found, boxes)
    volume = np.zeros(len(boxes.leaf), dtype=np.int64)
    np.add.at(volume, plan.box, plan.extent.prod(axis=1))
    assert (volume == boxes.extent.prod(axis=1)).all()
    row, starts = plan.pieces_of_requests(found[1].file)
    has = {(r, int(p)) for r in range(plan.num_requests) for p in row[starts[r] : starts[r + 1]]}
    files = found[1].file[plan.chunk]
    assert has == {
        (r, p)
        for r in range(plan.num_requests)
        for p in range(len(plan.box))
        if plan.file[r] == files[p] and plan.begin[r] < plan.last[p] and plan.first[p] < plan.end[r]
    }


def one_chunk(shape, item=1):
    row = np.array([[*shape]], dtype=np.int64)
    size = math.prod(shape) * item
    none = np.zeros(1, dtype=np.int64)
    chunks = Chunks(none, none, none + 8, none + 8 + size, row * 0, row)
    return chunks, np.array([8 + size]), Items(np.array([item]), np.array([1]))


def test_the_worked_example():
    chunks, sizes, items = one_chunk((4, 8))
    box = Boxes(np.array([0]), np.array([[1, 2]]), np.array([[2, 2]]))
    plan = plan_reads(chunks, sizes, items, box, gap_bytes=0, block_bytes=4)
    assert list(zip(plan.begin, plan.end, strict=True)) == [(16, 20), (24, 28)]
    assert (plan.needed_bytes, plan.read_bytes) == (4, 8)
    plan = plan_reads(chunks, sizes, items, box, gap_bytes=4, block_bytes=4)
    assert list(zip(plan.begin, plan.end, strict=True)) == [(16, 28)]


@pytest.mark.parametrize(("gap", "requests"), [(255, 16), (256, 1)])
def test_rows_are_read_through_when_the_gap_is_small(gap, requests):
    chunks, sizes, items = one_chunk((4, 4, 512))
    box = Boxes(np.array([0]), np.zeros((1, 3), np.int64), np.array([[4, 4, 256]]))
    plan = plan_reads(chunks, sizes, items, box, gap_bytes=gap, block_bytes=8)
    assert plan.num_requests == requests


def test_plan_without_boxes_reads_nothing():
    chunks, sizes, items = one_chunk((4, 8))
    none = np.zeros((0, 2), np.int64)
    plan = plan_reads(chunks, sizes, items, Boxes(none[:, 0], none, none))
    assert (plan.num_requests, plan.read_bytes, plan.needed_bytes, plan.files) == (0, 0, 0, [])


def test_a_box_inside_another_takes_nothing_away():
    chunks, sizes, items = one_chunk((64,))
    boxes = Boxes(np.array([0, 0]), np.array([[0], [8]]), np.array([[64], [2]]))
    plan = plan_reads(chunks, sizes, items, boxes, gap_bytes=0, block_bytes=4)
    assert list(zip(plan.begin, plan.end, strict=True)) == [(8, 72)]
