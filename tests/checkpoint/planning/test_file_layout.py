"""Who writes which box, held against brute force; and where it lies in the files."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.checkpoint.format import header
from shoal.checkpoint.format.records import FileRecord, LeafRecord, Manifest, Part
from shoal.checkpoint.format.tiling import check_tiling, join_chunks
from shoal.checkpoint.planning.file_layout import PartPlan, lay_out
from shoal.checkpoint.planning.who_writes import (
    SHARE_BYTES,
    Box,
    HeldLeaf,
    ShardMap,
    WriteBox,
    merge,
    own_boxes,
)
from shoal.checkpoint.tree import names
from shoal.checkpoint.tree.dtypes import dtype_of, num_bytes
from shoal.checkpoint.tree.nodes import Branch

MIB = 1 << 20
ATTEMPT = "0123456789ab"


class Job(NamedTuple):
    """Leaves and how many processes hold them."""

    processes: int
    held: tuple[HeldLeaf, ...]


def leaf(
    number: int, dtype: str, shape: tuple[int, ...], boxes: dict[Box, tuple[int, ...]]
) -> HeldLeaf:
    rank = len(shape)
    origin = np.array([box.origin for box in boxes], np.int64).reshape(len(boxes), rank)
    extent = np.array([box.extent for box in boxes], np.int64).reshape(len(boxes), rank)
    record = LeafRecord(f"leaf/{number}", "array", dtype, shape)
    return HeldLeaf(number, record, ShardMap(origin, extent, tuple(boxes.values())))


def whole(
    number: int, shape: tuple[int, ...], holders: tuple[int, ...], dtype: str = "float32"
) -> HeldLeaf:
    return leaf(number, dtype, shape, {Box((0,) * len(shape), shape): holders})


@st.composite
def leaves(draw: st.DrawFn, number: int, processes: int) -> HeldLeaf:
    """A grid of boxes, cut anywhere; each is held by some processes."""
    rank = draw(st.integers(0, 3))
    # A long last dim, so that boxes are large enough to be cut.
    shape = tuple(draw(st.integers(0, 6)) for _ in range(rank))
    if draw(st.booleans()):
        shape = (*shape[:2], draw(st.sampled_from([MIB, 3 * MIB // 2, 5 * MIB])))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    counts = [max(1, len(cut) - 1) for cut in cuts]
    boxes = {}
    for at in np.ndindex(*counts):
        ends = [(cut * 2)[i : i + 2] for cut, i in zip(cuts, at, strict=True)]
        origin = tuple(first for first, _ in ends)
        extent = tuple(end - first for first, end in ends)
        some = draw(st.sets(st.integers(0, processes - 1), min_size=1, max_size=4))
        boxes[Box(origin, extent)] = tuple(sorted(some))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int4", "bool", "complex128"]))
    return leaf(number, dtype, shape, boxes)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    processes = draw(st.integers(1, 5))
    count = draw(st.integers(0, 5))
    return Job(processes, tuple(draw(leaves(number, processes)) for number in range(count)))


def planned(
    own: list[WriteBox], process: int, processes: int, max_file_bytes: int = MIB
) -> PartPlan:
    return lay_out(
        own, ATTEMPT, process=process, num_processes=processes, max_file_bytes=max_file_bytes
    )


def parts(job: Job, max_file_bytes: int = 1 << 40) -> list[PartPlan]:
    return [
        planned(own_boxes(job.held, process), process, job.processes, max_file_bytes)
        for process in range(job.processes)
    ]


def written(process: int, plan: PartPlan) -> Part:
    files = tuple(FileRecord(file.name, file.num_bytes, process) for file in plan.files)
    return Part(ATTEMPT, process, files, plan.chunks, np.zeros(0, np.uint64))


def manifest(job: Job) -> Manifest:
    records = tuple(one.record for one in job.held)
    inner = Branch("dict", tuple(str(n) for n in range(len(records))), tuple(range(len(records))))
    tree = Branch("dict", ("leaf",), (inner,))
    return Manifest(ATTEMPT, None, 0, job.processes, tree, records)


def corners(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.origin, tuple(a + n for a, n in zip(box.origin, box.extent, strict=True))


def holds(shards: ShardMap, process: int, box: Box) -> bool:
    """Does a process hold every element of a box? By volume: held boxes are disjoint."""
    volume = 0
    for origin, extent, holders in zip(shards.origin, shards.extent, shards.holders, strict=True):
        if process in holders:
            ends = np.minimum(origin + extent, corners(box)[1]) - np.maximum(origin, box.origin)
            volume += math.prod(np.maximum(ends, 0).tolist())
    return volume == math.prod(box.extent)


@given(jobs())
@example(Job(2, (whole(0, (), (0, 1)), whole(1, (0, 3), (0, 1)))))
def test_every_element_is_written_once_by_a_process_that_has_it(job: Job) -> None:
    own = [own_boxes(job.held, process) for process in range(job.processes)]
    for process, boxes in enumerate(own):
        for number, record, box in boxes:
            assert holds(job.held[number].shards, process, box) or 0 in record.stored_shape
    joined = join_chunks([written(process, plan) for process, plan in enumerate(parts(job))])
    check_tiling(manifest(job), joined)


@given(jobs(), st.randoms())
def test_processes_decide_alike_whatever_order_boxes_come_in(job: Job, random: Random) -> None:
    again = []
    for held in job.held:
        shards = held.shards
        order = list(range(len(shards.holders)))
        random.shuffle(order)
        holders = tuple(shards.holders[i] for i in order)
        shuffled = ShardMap(shards.origin[order], shards.extent[order], holders)
        again.append(held._replace(shards=shuffled))
    for process in range(job.processes):
        mine = [(one.leaf, one.box) for one in own_boxes(job.held, process)]
        assert mine == [(one.leaf, one.box) for one in own_boxes(again, process)]


@given(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=20), st.integers(2, 9))
@example([1024 * MIB], 7)
@example([3] * 20, 9)
def test_replicated_leaves_are_shared_evenly(sizes: list[int], processes: int) -> None:
    """No further apart than what is too small to be cut, and one that is given whole."""
    everyone = tuple(range(processes))
    job = Job(processes, tuple(whole(i, (n,), everyone, "uint8") for i, n in enumerate(sizes)))
    loads = [sum(p.chunks.end - p.chunks.begin) for p in parts(job)]
    largest_whole = max([size for size in sizes if size < 2 * SHARE_BYTES], default=0)
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= 2 * (SHARE_BYTES + largest_whole) + processes


@given(st.integers(2, 8), st.data())
def test_shared_data_evens_out_the_write_loads(processes: int, data: st.DataObject) -> None:
    own = data.draw(st.lists(st.integers(0, 20), min_size=processes, max_size=processes))
    held = [whole(p, (mib * MIB,), (p,), "uint8") for p, mib in enumerate(own)]
    held.append(whole(processes, (500 * MIB,), tuple(range(processes)), "uint8"))
    loads = [sum(p.chunks.end - p.chunks.begin) for p in parts(Job(processes, tuple(held)))]
    assert max(loads) - min(loads) <= 4 * SHARE_BYTES


def test_leaves_that_need_not_be_cut_stay_whole() -> None:
    held = tuple(whole(number, (MIB,), (0, 1)) for number in range(16))
    plans = parts(Job(2, held))
    assert [len(plan.chunks.leaf) for plan in plans] == [8, 8]


def test_a_large_one_is_cut_into_as_many_as_hold_it() -> None:
    plans = parts(Job(4, (whole(0, (1024, 1024), (0, 1, 2, 3)),)))
    assert [plan.chunks.origin.tolist() for plan in plans] == [[[256 * p, 0]] for p in range(4)]
    assert [plan.chunks.extent.tolist() for plan in plans] == [[[256, 1024]]] * 4


def test_a_dim_that_is_too_coarse_is_not_cut() -> None:
    plans = parts(Job(4, (whole(0, (2, 8 * MIB), (0, 1, 2, 3), "uint8"),)))
    assert [plan.chunks.extent.tolist() for plan in plans] == [[[2, 2 * MIB]]] * 4


def test_shards_of_one_process_are_merged() -> None:
    rows = {Box((row, 0), (1, 4)): (row // 4,) for row in range(8)}
    plans = parts(Job(2, (leaf(0, "float32", (8, 4), rows),)))
    assert [plan.chunks.origin.tolist() for plan in plans] == [[[0, 0]], [[4, 0]]]
    assert [plan.chunks.extent.tolist() for plan in plans] == [[[4, 4]], [[4, 4]]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.randoms())
def test_a_grid_is_merged_into_one_box(counts: list[int], random: Random) -> None:
    boxes = [Box(tuple(3 * i for i in at), (3,) * len(counts)) for at in np.ndindex(*counts)]
    random.shuffle(boxes)
    assert merge(boxes) == [Box((0,) * len(counts), tuple(3 * n for n in counts))]


def test_boxes_that_form_none_stay_apart() -> None:
    boxes = [Box((0, 0), (1, 2)), Box((1, 0), (1, 1)), Box((5, 0), (1, 1))]
    assert merge(boxes) == boxes


def test_boxes_of_overlapping_groups_are_balanced_and_written_once() -> None:
    """Boxes held by overlapping groups: 0 and 1, 1 and 2, all of them."""
    size = (4 * MIB,)
    held = tuple(whole(n, size, who, "uint8") for n, who in enumerate([(0, 1), (1, 2), (0, 1, 2)]))
    loads = [int(sum(p.chunks.end - p.chunks.begin)) for p in parts(Job(3, held))]
    assert sum(loads) == 12 * MIB
    assert max(loads) - min(loads) <= 2 * SHARE_BYTES


@given(jobs(), st.sampled_from([1, MIB, 3 * MIB, 1 << 40]))
def test_files_are_headers_and_chunks_without_holes(job: Job, most: int) -> None:
    for plan in parts(job, most):
        seen = []
        for number, file in enumerate(plan.files):
            found = header.parse_header(file.header, file.num_bytes, "a file")
            assert found.metadata["attempt"] == ATTEMPT
            sizes = [entry.end - entry.begin for entry in found.entries]
            assert len(file.rows) == 1 or sum(sizes) <= most
            ordered = [found.entries[i] for i in np.argsort([e.begin for e in found.entries])]
            assert len(ordered) == len(file.rows)
            for entry, row in zip(ordered, file.rows, strict=True):
                record = job.held[plan.chunks.leaf[row]].record
                rank = len(record.stored_shape)
                extent = tuple(plan.chunks.extent[row][:rank].tolist())
                origin = tuple(plan.chunks.origin[row][:rank].tolist())
                told = None if extent == record.stored_shape else origin
                assert entry.name == names.entry(record.name, told)
                assert plan.chunks.file[row] == number
                assert plan.chunks.begin[row] == len(file.header) + entry.begin
                assert plan.chunks.end[row] - plan.chunks.begin[row] == num_bytes(
                    dtype_of(record.dtype), extent
                )
                seen.append(row)
        assert sorted(seen) == list(range(len(plan.chunks.leaf)))


def test_wider_elements_come_first_so_that_all_are_aligned() -> None:
    held = tuple(
        whole(n, (3,), (0,), dtype)
        for n, dtype in enumerate(["bool", "float64", "bfloat16", "int32"])
    )
    (plan,) = parts(Job(1, held))
    (file,) = plan.files
    assert [held[row].record.dtype for row in file.rows] == ["float64", "int32", "bfloat16", "bool"]
    assert plan.chunks.begin[1] == len(file.header)
    assert len(file.header) % 4096 == 0


def test_a_process_that_holds_nothing_writes_no_file() -> None:
    plan = planned(own_boxes([whole(0, (3,), (0,))], 1), 1, 2)
    assert plan.files == ()
    assert plan.chunks.origin.shape == (0, 1)


@pytest.mark.parametrize("process", [0, 1])
def test_the_values_of_a_process_bear_its_number(process: int) -> None:
    write = WriteBox(0, LeafRecord("loader", "per_process", "uint8"), Box((process,), (5,)))
    plan = planned([write], process, 2)
    found = header.parse_header(plan.files[0].header, plan.files[0].num_bytes, "a file")
    assert found.entries[0].name == f"loader#p{process}"
    assert found.entries[0].shape == (5,)


def test_sharing_shard_map_objects_makes_no_difference() -> None:
    everyone = tuple(range(3))
    apart = [whole(n, (2 * MIB + n % 2,), everyone, "uint8") for n in range(9)]
    firsts = {one.record.stored_shape: one.shards for one in apart}
    shared = [one._replace(shards=firsts[one.record.stored_shape]) for one in apart]
    for process in everyone:
        mine = [(one.leaf, one.box) for one in own_boxes(apart, process)]
        assert mine == [(one.leaf, one.box) for one in own_boxes(shared, process)]
