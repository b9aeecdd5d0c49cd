"""Images of files: what is in them, whole or window by window, from memory or through buffers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.forgetful_file_system import Disk
from checkpoint.interrupts import Interrupt
from shoal.checkpoint.blocks import memory as arenas
from shoal.checkpoint.blocks import writer
from shoal.checkpoint.blocks.image import FileImage, Filler, Piece, whole_pages
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.blocks.writer import write_files
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.format.records import BLOCK_BYTES, PAGE_BYTES
from shoal.checkpoint.tree import dtypes
from shoal.runtime.system.threads import in_threads

HEADER = b"h" * PAGE_BYTES
DTYPES = (
    "bool", "int8", "uint16", "float32", "bfloat16", "float64", "complex64", "complex128",
    "int4", "uint2", "int1", "float4_e2m1fn", "float8_e4m3fn", "S5", "U3", "datetime64[ns]",
)  # fmt: skip


def _array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return random bits of a dtype; those of packed ones as they are in memory."""
    kind = dtypes.dtype_of(dtype)
    per_byte = dtypes.storage_of(kind).per_byte
    size = math.prod(shape) * kind.itemsize
    high = 2 if dtype == "bool" else 128 if kind.kind in "SU" else 256
    bits = np.random.default_rng(seed).integers(0, high, size, np.uint8)
    if kind.kind == "U":
        bits.reshape(-1, 4)[:, 1:] = 0
    if per_byte > 1:
        bits &= (1 << 8 // per_byte) - 1
    return bits.view(kind).reshape(shape)


def _pieces(array: np.ndarray, begin: int, cuts: tuple[int, ...], order: str) -> list[Piece]:
    """Cut a chunk into pieces along each dim, as shards are; `order`: of their memory."""
    how = dtypes.storage_of(array.dtype)
    edges = [
        sorted({0, size, *(size * k // cut for k in range(cut))})
        for size, cut in zip(array.shape, cuts, strict=True)
    ]
    boxes: list[tuple[slice, ...]] = [()]
    for edge in edges:
        spans = [slice(a, b) for a, b in itertools.pairwise(edge)]
        boxes = [(*box, span) for box in boxes for span in spans]
    pieces = []
    for box in boxes:
        values = np.array(array[(*box, ...)], order=order)  # the ellipsis keeps scalars arrays
        get = functools.partial(_once, [values])
        pieces.append(Piece(begin, array.shape, array.dtype, how.per_byte, box, get))
    return pieces


def _once(values: list[np.ndarray]) -> np.ndarray:
    """Values are asked for once, or this fails."""
    return values.pop()


arrays = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 7), max_size=3).map(tuple),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.sampled_from("CF"),
    st.integers(0, 1000),
)


def _image(specs: list[tuple]) -> tuple[FileImage, bytes]:
    """Return an image and what it is to be, in descending alignment."""
    specs = sorted(specs, key=lambda spec: -dtypes.storage_of(dtypes.dtype_of(spec[0])).align)
    expected, pieces = HEADER, []
    for dtype, shape, cuts, order, seed in specs:
        array = _array(dtype, shape, seed)
        pieces += _pieces(array, len(expected), tuple(cuts[: len(shape)]), order)
        expected += dtypes.pack_elements(array).tobytes()
    return FileImage("x", HEADER, len(expected), tuple(pieces)), expected


@settings(max_examples=200)
@given(st.lists(arrays, max_size=6), st.sampled_from([8, 24, 64, 1 << 20]))
def test_windows_of_an_image_have_its_content(specs, window):
    image, expected = _image(specs)
    size = whole_pages(image.num_bytes)
    out = np.full(size, 0xAA, np.uint8)
    filler = Filler(image)
    for begin in range(0, size, window):
        filler.fill(out[begin : begin + window], begin)
    assert out.tobytes() == expected.ljust(size, b"\0")


BIG = [
    ("float32", (300, 1000), (1, 1, 1), "C", 1),
    ("float32", (300, 1000), (1, 2, 1), "C", 2),
    ("float64", (77, 501), (2, 3, 1), "F", 3),
    ("int4", (333, 1001), (2, 2, 1), "C", 4),
    ("uint8", (1 << 20,), (3, 1, 1), "C", 5),
    ("S5", (20001,), (2, 1, 1), "C", 6),
    ("bfloat16", (), (), "C", 7),
    ("bfloat16", (0, 3), (1, 1), "C", 8),
]


@pytest.fixture(params=["disk", "of tests"])
def folder(request, tmp_path):
    if request.param == "disk":
        return LocalFolder(tmp_path)
    there = Disk().folder("/step")
    there.make()
    return there


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    """Several windows, in several threads, with little data."""
    monkeypatch.setattr(writer, "_WINDOW_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(arenas, "_WINDOW_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(arenas, "num_cores", lambda: 4)


@pytest.mark.parametrize("has_arena", [True, False])
def test_files_and_the_hashes_of_their_blocks(folder, has_arena):
    images, expected = [], []
    for number, specs in enumerate([BIG, BIG[4:], []]):
        image, content = _image(specs)
        images.append(image._replace(name=f"x{number}"))
        expected.append(content)
    arena = None
    if has_arena:
        arena = Arena()
        arena.take(images)
    written: list[int] = []
    hashes = write_files(folder, images, arena, written.append)
    assert sum(written) == sum(map(len, expected))
    for number, content in enumerate(expected):
        assert folder.read(f"x{number}") == content
        assert hashes[number].tolist() == [
            xxhash.xxh3_64_intdigest(content[at : at + BLOCK_BYTES])
            for at in range(0, len(content), BLOCK_BYTES)
        ]


def test_an_arena_is_kept_and_grows(folder):
    arena = Arena()
    arena.reserve(10)
    assert arena.num_bytes == PAGE_BYTES
    for turn, specs in enumerate([BIG[5:], BIG, BIG[5:]]):
        image, content = _image(specs)
        before = arena.num_bytes
        arena.take([image._replace(name=f"x{turn}")])
        assert arena.num_bytes == max(before, whole_pages(image.num_bytes))
        write_files(folder, [image._replace(name=f"x{turn}")], arena, lambda _: None)
        assert folder.read(f"x{turn}") == content


def test_memory_that_is_reserved_later_takes_nothing_away(folder):
    image, content = _image(BIG)
    arena = Arena()
    arena.take([image])
    arena.reserve(1 << 24)
    write_files(folder, [image], arena, lambda _: None)
    assert folder.read("x") == content


def test_big_endian_values_are_stored_little(folder):
    values = np.arange(10, dtype=">f4")
    where = (slice(0, 10),)
    for number, array in enumerate([values, np.repeat(values, 2)[::2]]):
        piece = Piece(PAGE_BYTES, (10,), values.dtype, 1, where, lambda array=array: array)
        image = FileImage(f"x{number}", HEADER, PAGE_BYTES + 40, (piece,))
        write_files(folder, [image], None, lambda _: None)
        assert folder.read(image.name)[PAGE_BYTES:] == values.astype("<f4").tobytes()


def test_bits_of_nans_are_kept(folder):
    for dtype, word in (("float32", "u4"), ("bfloat16", "u2"), ("complex64", "u8")):
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        bits = np.full((4, 6), (1 << 8 * kind.itemsize) - 3, word)
        array = bits.view(kind)
        where = (slice(0, 4), slice(0, 3))
        halves = [
            Piece(PAGE_BYTES, (4, 6), kind, 1, where, lambda array=array: array[:, :3]),
            Piece(PAGE_BYTES, (4, 6), kind, 1, (where[0], slice(3, 6)),
                  lambda array=array: array[:, 3:]),
        ]  # fmt: skip
        image = FileImage(dtype, HEADER, PAGE_BYTES + bits.nbytes, tuple(halves))
        write_files(folder, [image], None, lambda _: None)
        assert folder.read(dtype)[PAGE_BYTES:] == bits.tobytes()


def test_values_that_cannot_be_had_leave_no_file(folder):
    image, _ = _image(BIG)
    error = RuntimeError("deleted")

    def fail() -> np.ndarray:
        raise error

    piece = image.pieces[0]._replace(values=fail)
    broken = FileImage(
        "y", HEADER, PAGE_BYTES + math.prod(piece.extent) * piece.dtype.itemsize, (piece,)
    )
    with pytest.raises(RuntimeError) as caught:
        write_files(folder, [image, broken], None, lambda _: None)
    assert caught.value is error
    assert folder.names() == []


@pytest.mark.parametrize("has_arena", [True, False])
def test_an_interrupt_in_the_middle_leaves_no_file(folder, has_arena):
    image, _ = _image(BIG)
    arena = None
    if has_arena:
        arena = Arena()
        arena.take([image])

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_files(folder, [image], arena, interrupt)
    assert folder.names() == []
    assert not [one for one in threading.enumerate() if one.name == "shoal files"]


def test_an_interrupt_anywhere_in_a_write_ends_it(tmp_path, monkeypatch):
    """As a signal does, also inside what `threading` has in Python."""
    monkeypatch.setattr(writer, "num_cores", lambda: 2)
    write = writer._write
    values = np.zeros(8 * BLOCK_BYTES, np.uint8)
    piece = Piece(PAGE_BYTES, values.shape, values.dtype, 1, (slice(None),), lambda: values)
    image = FileImage("x", HEADER, PAGE_BYTES + values.size, (piece,))

    def interrupted(*window) -> None:
        on = interrupt.on() if threading.current_thread() is main else contextlib.nullcontext()
        with on:
            write(*window)

    def save() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            write_files(LocalFolder(tmp_path), [image], None, lambda _: None)
            LocalFolder(tmp_path).remove("x")

    monkeypatch.setattr(writer, "_write", interrupted)
    for place in range(1, 20):
        interrupt = Interrupt(place, (writer, threading))
        main = threading.Thread(target=save, daemon=True)
        main.start()
        main.join(30)
        assert not main.is_alive(), f"waits for ever after an interrupt at place {place}"
        assert LocalFolder(tmp_path).names() == []


AT_EXIT = """
import sys, threading
import numpy as np
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.blocks.image import FileImage, Piece
from shoal.checkpoint.blocks.writer import write_files

values = np.full(16 << 20, 7, np.uint8)
piece = Piece(4096, values.shape, values.dtype, 1, (slice(0, len(values)),), lambda: values)
image = FileImage("x", b"h" * 4096, 4096 + len(values), (piece,))


def write():
    threading.main_thread().join()
    write_files(LocalFolder(sys.argv[1]), [image], None, lambda _: None)


threading.Thread(target=write).start()
"""


def test_files_are_written_after_the_end_of_the_program(tmp_path, child_env):
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    subprocess.run(command, env=child_env, check=True, timeout=60)
    assert LocalFolder(tmp_path).read("x") == b"h" * 4096 + b"\x07" * (16 << 20)


def test_a_file_that_is_there_stays(folder):
    folder.write_new("x", b"before")
    image, _ = _image(BIG[5:])
    with pytest.raises(FileExistsError):
        write_files(folder, [image._replace(name="w"), image], None, lambda _: None)
    assert folder.names() == ["x"]
    assert folder.read("x") == b"before"


def test_the_first_error_of_any_thread_ends_all():
    seen: list[int] = []
    first = threading.Event()

    def work(items) -> None:
        for item in items:
            seen.append(item)
            if item == 1:
                first.set()
                raise KeyError(item)
            first.wait(60)

    with pytest.raises(KeyError):
        in_threads(work, range(100), 4)
    assert len(seen) < 10
    assert not [one for one in threading.enumerate() if one.name == "shoal files"]


def test_in_threads_runs_everything_here_if_no_thread_can_start(monkeypatch):
    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen: list[int] = []
    in_threads(seen.extend, range(100), 4)
    assert seen == list(range(100))
