"""Part and index: what is written comes back; chunks fill every leaf exactly once, or not."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.samples import ATTEMPT, checkpoint, manifest, part_of, records
from shoal.checkpoint.format import records as format_records
from shoal.checkpoint.format import table_files, tiling
from shoal.checkpoint.tree import flatten, nodes
from shoal.errors import CorruptCheckpointError

COLUMNS = ("leaf", "file", "begin", "end", "origin", "extent")


def parts():
    found = records()[1]
    return [part_of(process, found, 2)[1] for process in range(2)]


def test_parts_and_index_come_back():
    for part in parts():
        data = table_files.encode_part(part)
        again = table_files.decode_part(data)
        assert (again.attempt, again.process, again.files) == (ATTEMPT, part.process, part.files)
        assert table_files.encode_part(again) == data
        assert np.array_equal(again.block_hash, part.block_hash)
        for column in COLUMNS:
            assert np.array_equal(getattr(again.chunks, column), getattr(part.chunks, column))
    index = table_files.join_parts(manifest(), parts())
    data = table_files.encode_index(index)
    assert data == table_files.encode_index(table_files.join_parts(manifest(), parts()[::-1]))
    again = table_files.decode_index(data)
    assert table_files.encode_index(again) == data
    tiling.check_index(manifest(), again)
    assert list(again.first_block) == [0, 1, 2]
    assert again.chunks.leaf.tolist() == sorted(again.chunks.leaf.tolist())
    assert set(safetensors.numpy.load(data)) == {*COLUMNS, "first_block", "block_hash", "sha256"}


def test_an_index_of_nothing():
    empty, none = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    chunks = format_records.Chunks(empty, empty, empty, empty, none, none)
    part = format_records.Part(ATTEMPT, 0, (), chunks, np.zeros(0, np.uint64))
    said = format_records.Manifest(ATTEMPT, None, 5, 1, nodes.Branch("dict", (), ()), ())
    index = table_files.join_parts(said, [table_files.decode_part(table_files.encode_part(part))])
    assert table_files.decode_index(table_files.encode_index(index)).files == ()


def test_parts_that_do_not_belong_together():
    one, two = parts()
    with pytest.raises(CorruptCheckpointError, match=r"parts of the processes \[0\]"):
        table_files.join_parts(manifest(), [one])
    with pytest.raises(CorruptCheckpointError, match=r"parts of the processes \[0, 0\]"):
        table_files.join_parts(manifest(), [one, one])
    with pytest.raises(CorruptCheckpointError, match=r"processes \[1\] are of another attempt"):
        table_files.join_parts(manifest(), [one, replace(two, attempt="a" * 12)])


def test_forged_process_count_raises_corrupt_checkpoint():
    with pytest.raises(CorruptCheckpointError, match="one of each of 2147483647"):
        table_files.join_parts(replace(manifest(), num_processes=(1 << 31) - 1), parts())


def table(boxes, dims, item=4):
    """Return the manifest and the chunks of leaves [(boxes of leaf 0), …], one behind the other."""
    rank = max(len(shape) for shape in dims)
    rows = []
    at = 4096
    for leaf, inner in enumerate(boxes):
        for origin, extent in sorted(inner):
            more = rank - len(origin)
            size = int(np.prod(extent)) * item
            row = (leaf, 0, at, at + size, *origin, *(0,) * more, *extent, *(1,) * more)
            rows.append(row)
            at += size
    found = np.array(rows, np.int64).reshape(len(rows), 4 + 2 * rank)
    chunks = format_records.Chunks(*found.T[:4], found[:, 4 : 4 + rank], found[:, 4 + rank :])
    record = format_records.FileRecord(format_records.data_name(ATTEMPT, 0, 1), at, 0)
    _, structure = flatten.flatten_tree([0] * len(dims))
    leaves = tuple(
        format_records.LeafRecord(str(number), "array", "float32", shape)
        for number, shape in enumerate(dims)
    )
    return format_records.Manifest(ATTEMPT, None, 5, 1, structure, leaves), chunks, record


def refused(boxes, dims):
    """Say whether chunks are refused."""
    said, chunks, record = table(boxes, dims)
    try:
        tiling.check_places(chunks, [record], "f")
        tiling.check_tiling(said, chunks, "f")
    except CorruptCheckpointError:
        return True
    return False


def count(boxes, shape):
    """Return how often each element is filled; brute force."""
    times = np.zeros(shape, int)
    for origin, extent in boxes:
        times[tuple(slice(o, o + e) for o, e in zip(origin, extent, strict=True))] += 1
    return times


@st.composite
def cut_leaves(draw):
    """Draw a shape and boxes that tile it, cut anywhere: also such that no plane cuts them all."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        origin, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[dim]))
        left = (*extent[:dim], at, *extent[dim + 1 :])
        right = (*extent[:dim], extent[dim] - at, *extent[dim + 1 :])
        moved = (*origin[:dim], origin[dim] + at, *origin[dim + 1 :])
        boxes += [box for box in ((origin, left), (moved, right)) if 0 not in box[1]]
    return shape, boxes


PINWHEEL = [
    ((0, 0), (1, 2)),
    ((0, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 0), (2, 1)),
    ((1, 1), (1, 1)),
]


@given(st.lists(cut_leaves(), min_size=1, max_size=4))
def test_valid_tilings_are_accepted(leaves):
    assert not refused([boxes for _, boxes in leaves], [shape for shape, _ in leaves])
    assert not refused([PINWHEEL], [(3, 3)])


@given(cut_leaves(), st.data())
def test_invalid_tilings_are_refused(leaf, data):
    """Move, resize, drop or repeat boxes: refused unless brute force counts one everywhere."""
    shape, boxes = leaf
    changed = list(boxes)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        if not changed:
            break
        origin, extent = changed.pop(at)
        if data.draw(st.booleans()):
            origin = tuple(data.draw(st.integers(0, 3)) for _ in origin)
            extent = tuple(data.draw(st.integers(0, 6)) for _ in extent)
            changed.append((origin, extent))
    inside = all(
        o + e <= s
        for origin, extent in changed
        for o, e, s in zip(origin, extent, shape, strict=True)
    )
    fills = inside and bool((count(changed, shape) == 1).all())
    fills = fills and all(0 not in extent for _, extent in changed)
    assert refused([changed, [((), ())]], [shape, ()]) == (not fills)


def test_every_pair_of_boxes_of_a_small_leaf():
    spans = [(o, e) for o in range(3) for e in range(1, 4 - o)]
    every = [
        (tuple(o for o, _ in two), tuple(e for _, e in two))
        for two in itertools.product(spans, repeat=2)
    ]
    for pair in itertools.combinations(every, 2):
        assert refused([pair], [(3, 3)]) == (not (count(pair, (3, 3)) == 1).all())


def test_a_chunk_of_nothing_in_a_leaf_of_something():
    assert not refused([[((0,), (2,)), ((2,), (1,))]], [(3,)])
    assert refused([[((0,), (2,)), ((1,), (0,)), ((2,), (1,))]], [(3,)])


def test_empty_leaves_have_one_chunk():
    whole = ((0, 0), (0, 8))
    assert not refused([[whole]], [(0, 8)])
    assert refused([[]], [(0, 8)])
    assert refused([[((0, 0), (0, 4)), ((0, 4), (0, 4))]], [(0, 8)])
    assert refused([[((0, 0), (0, 4))]], [(0, 8)])


def test_a_thousand_leaves_of_ten_chunks():
    boxes = [((8 * (k // 2), 3 * (k % 2)), (8, 3)) for k in range(10)]
    assert not refused([boxes] * 1_000, [(40, 6)] * 1_000)
    assert refused([boxes] * 999 + [boxes[:-1]], [(40, 6)] * 1_000)
    assert refused([*[boxes] * 999, [*boxes[:-1], ((32, 2), (8, 3))]], [(40, 6)] * 1_000)


def changed_chunks(**columns):
    """Return the index of the sample with some cells changed: column → (row, value)."""
    index = table_files.decode_index(checkpoint()[format_records.index_name(ATTEMPT)])
    tables = {column: getattr(index.chunks, column).copy() for column in COLUMNS}
    for column, (row, value) in columns.items():
        tables[column][row] = value
    return replace(index, chunks=format_records.Chunks(**tables))


ROWS = {leaf.name: number for number, leaf in enumerate(manifest().leaves)}
W = 10  # the row of the first piece of params/w


@pytest.mark.parametrize(
    ("columns", "what"),
    [({"leaf": (0, -1)}, "an unknown leaf"), ({"leaf": (-1, 99)}, "does not list"),
     ({"file": (0, 2)}, "does not list"), ({"file": (0, -1)}, "does not list"),
     ({"begin": (0, -4)}, "outside"), ({"end": (0, 1 << 40)}, "outside"),
     ({"begin": (0, 1 << 61)}, "outside"),
     ({"origin": (W, (-1, 0))}, "outside"), ({"extent": (W, (1 << 62, 1))}, "outside"),
     ({"extent": (W, (2, 5))}, "number of bytes"), ({"origin": (W, (1, 0))}, "'params/w' "),
     ({"origin": (W, (2, 0))}, "or twice"),
     ({"extent": (W, (6, 2))}, "'params/w' has a chunk outside"),
     ({"leaf": (4, ROWS["opt/mu/0"])}, "'opt/mu/0' has chunks, and its value is"),
     ({"origin": (2, (2, 0))}, "an unknown process"), ({"origin": (1, (1, 0))}, "twice"),
     ({"extent": (1, (1, 2))}, "unknown process"), ({"file": (1, 1)}, "overlapping|another")],
    ids=str,
)  # fmt: skip
def test_rows_that_lie_are_refused(columns, what):
    data = table_files.encode_index(changed_chunks(**columns))
    with pytest.raises(CorruptCheckpointError, match=what):
        tiling.check_index(manifest(), table_files.decode_index(data))


@pytest.mark.parametrize("by", [-1, 1, -8])
def test_chunks_that_share_bytes_are_refused(by):
    chunks = changed_chunks().chunks
    ends = {int(chunks.begin[W]) + by, int(chunks.end[W]) + by}
    moved = changed_chunks(begin=(W, min(ends)), end=(W, max(ends)))
    with pytest.raises(CorruptCheckpointError, match="overlapping chunks"):
        table_files.decode_index(table_files.encode_index(moved))


def test_a_value_of_one_process_lies_in_a_file_of_that_process():
    index = changed_chunks()
    swapped = {}
    for column in ("file", "begin", "end", "extent"):
        swapped[column] = getattr(index.chunks, column).copy()
        swapped[column][[1, 2]] = swapped[column][[2, 1]]
    lie = replace(index, chunks=replace(index.chunks, **swapped))
    with pytest.raises(CorruptCheckpointError, match="own value in a file of another"):
        tiling.check_index(manifest(), table_files.decode_index(table_files.encode_index(lie)))


def test_rows_in_another_order_are_refused():
    index = changed_chunks()
    back = format_records.Chunks(*(getattr(index.chunks, column)[::-1] for column in COLUMNS))
    with pytest.raises(CorruptCheckpointError, match="not in the order"):
        table_files.decode_index(table_files.encode_index(replace(index, chunks=back)))
