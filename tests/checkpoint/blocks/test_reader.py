"""Boxes of leaves come out of files right, whatever they are read into, with little memory."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import hand_written
from shoal.checkpoint.blocks import reader
from shoal.checkpoint.blocks.image import digests
from shoal.checkpoint.blocks.reader import Want, read_boxes, verify_files
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.format.records import BLOCK_BYTES
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import StorageError, UsageError

TREE = {
    "box": np.arange(40 * 30 * 20, dtype=np.float64).reshape(40, 30, 20),
    "narrow": np.arange(2000).astype(np.uint8).reshape(40, 50).astype(ml_dtypes.uint4),
    "point": np.array(7, np.int32),
    "wide": np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10),
}
NUMBER = {name: number for number, name in enumerate(TREE)}
SLOW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "saved"
    hand_written.write(path, TREE, hand_written.grid(3, 2), processes=2, max_file_bytes=1 << 21)
    found = open_checkpoint(LocalStore(path))
    assert len(found.index.files) > 2
    return found


@st.composite
def boxes(draw):
    name = draw(st.sampled_from(list(TREE)))
    cuts = []
    for size in TREE[name].shape:
        low = draw(st.integers(0, size))
        cuts.append(slice(low, draw(st.integers(low, size))))
    return name, tuple(cuts)


def want_of(name, cuts, out):
    return Want(NUMBER[name], tuple(cut.start for cut in cuts), out)


@SLOW
@given(
    st.lists(boxes(), max_size=5),
    st.sampled_from((BLOCK_BYTES, 1 << 20, 1 << 26)),
    st.sampled_from((1, 2000, reader._LEAST_RUN_BYTES)),
)
def test_read_boxes_fills_any_boxes(checkpoint, monkeypatch, asked, most_bytes, least_run_bytes):
    monkeypatch.setattr(reader, "_LEAST_RUN_BYTES", least_run_bytes)
    outs = [np.empty(TREE[name][cuts].shape, TREE[name].dtype) for name, cuts in asked]
    wants = [want_of(name, cuts, out) for (name, cuts), out in zip(asked, outs, strict=True)]
    told = []
    read_bytes = read_boxes(checkpoint, wants, most_bytes=most_bytes, progress=told.append)
    assert sum(told) == read_bytes
    for (name, cuts), out in zip(asked, outs, strict=True):
        assert out.tobytes() == TREE[name][cuts].tobytes()


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), max_size=6))
def test_hashes_of_blocks_in_several_parts_of_memory(sizes):
    parts = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    whole = b"".join(part.tobytes() for part in parts)
    expected = [
        xxhash.xxh3_64_intdigest(whole[at : at + BLOCK_BYTES])
        for at in range(0, len(whole), BLOCK_BYTES)
    ]
    assert list(digests(parts)) == expected


def test_memory_that_is_not_contiguous(checkpoint):
    around = np.zeros((40, 60, 20))
    turned = np.zeros((20, 30, 40)).T
    cuts = (slice(0, 40), slice(0, 30), slice(0, 20))
    wants = [want_of("box", cuts, around[:, ::2]), want_of("box", cuts, turned)]
    read_boxes(checkpoint, wants, most_bytes=1 << 22)
    assert (around[:, ::2] == TREE["box"]).all()
    assert (around[:, 1::2] == 0).all()
    assert (turned == TREE["box"]).all()


def test_block_is_read_once_for_several_requests(checkpoint, monkeypatch):
    amounts = []
    read_at = LocalFolder.read_at
    lock = threading.Lock()

    def counting(self, name, offset, into):
        with lock:
            amounts.append((name, offset, len(into)))
        return read_at(self, name, offset, into)

    monkeypatch.setattr(LocalFolder, "read_at", counting)
    outs = [np.empty((1 << 10, 1 << 10), np.float32) for _ in range(3)]
    wants = [Want(NUMBER["wide"], (0, 0), out) for out in outs]
    read_bytes = read_boxes(checkpoint, wants, most_bytes=1 << 22)
    assert sum(size for _, _, size in amounts) == read_bytes
    blocks = [
        (name, block)
        for name, offset, size in amounts
        for block in range(offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES))
    ]
    assert len(blocks) == len(set(blocks))
    assert read_bytes <= outs[0].nbytes + 2 * BLOCK_BYTES * len(checkpoint.index.files)


def test_read_boxes_refuses_invalid_boxes(checkpoint):
    for out in (np.empty(3, np.float64), np.empty((1, 1, 1), np.float32)):
        with pytest.raises(UsageError, match=r"box: .* is not a box of it"):
            read_boxes(checkpoint, [Want(NUMBER["box"], (0, 0, 0), out)], most_bytes=1 << 22)
    with pytest.raises(UsageError, match=r"box: a box reaches out of \(40, 30, 20\)"):
        read_boxes(
            checkpoint, [Want(NUMBER["box"], (39, 0, 0), np.empty((2, 1, 1)))], most_bytes=1 << 22
        )


def test_the_first_error_ends_the_reading(checkpoint, monkeypatch):
    calls = []

    def refuse(self, name, offset, into):
        calls.append(name)
        raise StorageError("cannot read", path=name)

    monkeypatch.setattr(LocalFolder, "read_at", refuse)
    want = Want(NUMBER["wide"], (0, 0), np.empty((1 << 10, 1 << 10), np.float32))
    with pytest.raises(StorageError, match="cannot read"):
        read_boxes(checkpoint, [want], most_bytes=BLOCK_BYTES)
    assert len(calls) == 1  # one thread: there is memory for one block


def test_verify_reads_every_byte_and_reports_every_problem(tmp_path):
    hand_written.write(tmp_path / "saved", TREE, hand_written.grid(3), processes=2)
    checkpoint = open_checkpoint(LocalStore(tmp_path / "saved"))
    told = []
    assert verify_files(checkpoint, told.append) == []
    sizes = [one.bytes for one in checkpoint.index.files]
    assert sum(told) == sum(sizes)
    first, second = (tmp_path / "saved" / one.name for one in checkpoint.index.files)
    content = bytearray(first.read_bytes())
    for at in (0, 600_000, 600_001, len(content) - 1):
        content[at] ^= 1
    first.write_bytes(content)
    second.unlink()
    found = verify_files(checkpoint)
    assert len(found) == 4  # three blocks, one file
    assert all(first.name in words for words in found[:3])
    assert second.name in found[3]
    assert "is missing" in found[3]
