"""A checkpoint that was damaged or meddled with is an error, and never a value."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from checkpoint import hand_written
from shoal.checkpoint.blocks.reader import Want, read_boxes, verify_files
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.format.records import BLOCK_BYTES
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError

TREE = {
    "w": np.arange(200_000, dtype=np.float32).reshape(400, 500),
    "b": {"c": np.arange(99, dtype=np.int16), "n": 3},
    "small": [np.float64(k) * np.ones(4) for k in range(40)],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("good") / "saved"
    hand_written.write(path, TREE, hand_written.grid(3, 2), processes=2, step=1)
    return path


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "bad"))


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*"))


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def test_every_flipped_bit_is_found(good, bad):
    rng = random.Random(5)
    files = sorted(bad.iterdir())
    assert len(files) == 5  # COMMIT, manifest, index, two data files
    turns = [file for file in files for _ in range(20)]
    turns += rng.choices(files, [file.stat().st_size for file in files], k=100)
    missed = []
    for file in turns:
        bit = rng.randrange(file.stat().st_size * 8)
        flip(file, bit)
        try:
            restore(bad)
        except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
            told = getattr(error, "file", "") or str(error)
            assert file.name in told or file.name == "COMMIT", (file, bit, told)
        else:
            missed.append((file.name, bit))
        flip(file, bit)
    assert len(turns) == 200
    assert not missed
    assert (restore(bad)["w"] == TREE["w"]).all()  # all bits are back


def test_the_block_and_the_leaf_are_named(bad):
    last = data_files(bad)[-1]
    flip(last, 8 * (last.stat().st_size - 1))
    with pytest.raises(CorruptCheckpointError) as info:
        restore(bad)
    error = info.value
    assert (error.path, error.file) == (str(bad), last.name)
    assert error.offset == (last.stat().st_size - 1) // BLOCK_BYTES * BLOCK_BYTES
    assert error.leaf in [f"small/{n}" for n in range(40)] + ["w", "b/c"]
    found = verify_files(open_checkpoint(LocalStore(bad)))
    assert len(found) == 1
    assert last.name in found[0]


def test_memory_that_was_asked_for_is_not_handed_out(bad):
    """The process that wanted values gets an error; what it gave for them is no result."""
    for file in data_files(bad):
        flip(file, 8 * (file.stat().st_size // 2))
    checkpoint = open_checkpoint(LocalStore(bad))
    out = np.empty((400, 500), np.float32)
    number = [leaf.name for leaf in checkpoint.manifest.leaves].index("w")
    with pytest.raises(CorruptCheckpointError):
        read_boxes(checkpoint, [Want(number, (0, 0), out)], most_bytes=1 << 22)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def extend(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"\0")


def empty(file: Path) -> None:
    os.truncate(file, 0)


def remove(file: Path) -> None:
    file.unlink()


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("harm", [truncate, extend, empty, remove, zero])
@pytest.mark.parametrize("pattern", ["data-*-00000-*", "data-*-00001-*", "manifest-*", "index-*"])
def test_a_file_of_another_length_is_named(bad, harm, pattern):
    (file,) = bad.glob(pattern)
    harm(file)
    with pytest.raises(CorruptCheckpointError) as info:
        restore(bad)
    assert info.value.file == file.name
    assert str(bad) in str(info.value)
    if pattern.startswith("data"):
        assert any(file.name in words for words in verify_files(open_checkpoint(LocalStore(bad))))


def held_in(path: Path, begin: int = 0) -> list[tuple[str, str]]:
    """Return each data file, and what an error says that it holds from a byte on."""
    checkpoint = open_checkpoint(LocalStore(path))
    chunks, leaves = checkpoint.index.chunks, checkpoint.manifest.leaves
    found = []
    for number, file in enumerate(checkpoint.index.files):
        rows = [row for row in range(len(chunks.leaf)) if chunks.file[row] == number]
        rows = [row for row in rows if chunks.end[row] > begin]
        names = list(dict.fromkeys(leaves[chunks.leaf[row]].name for row in by_begin(rows, chunks)))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        found.append((file.name, f"(it holds {', '.join(names[:3])}{more})"))
    return found


def by_begin(rows: list[int], chunks) -> list[int]:
    return sorted(rows, key=lambda row: (chunks.begin[row], row))


@pytest.mark.parametrize(("harm", "words"), [(remove, "is missing"), (empty, "has 0 bytes, ")])
def test_all_files_that_are_gone_are_named_and_what_lay_in_them(bad, harm, words):
    held = held_in(bad)
    for file in data_files(bad):
        harm(file)
    with pytest.raises(CorruptCheckpointError) as info:
        restore(bad)
    assert info.value.file == held[0][0]
    assert info.value.leaf
    assert info.value.leaf in held[0][1]
    lines = [str(info.value).splitlines()[0], str(info.value).splitlines()[-1]]
    for line, told, (name, leaves) in zip(
        lines, verify_files(open_checkpoint(LocalStore(bad))), held, strict=True
    ):
        for text in (line, told.splitlines()[0]):
            assert f"{name}: {words}" in text
            assert text.endswith(leaves)


def test_what_lay_behind_a_cut_is_named(bad):
    block = BLOCK_BYTES
    held = held_in(bad, block)
    os.truncate(bad / held[0][0], block + 7)
    with pytest.raises(CorruptCheckpointError) as info:
        restore(bad)
    assert f"has {block + 7:,} bytes, " in str(info.value)
    assert str(info.value).splitlines()[0].endswith(held[0][1])
    assert info.value.offset == block + 7


@pytest.mark.parametrize("harm", [truncate, extend, empty, zero])
def test_a_commit_of_another_length_is_no_commit(bad, harm):
    harm(bad / "COMMIT")
    with pytest.raises(CorruptCheckpointError):
        restore(bad)


def test_files_that_changed_places(bad):
    first, second = data_files(bad)
    size = max(first.stat().st_size, second.stat().st_size)
    shutil.move(first, bad / "aside")
    shutil.move(second, first)
    shutil.move(bad / "aside", second)
    with pytest.raises(CorruptCheckpointError):
        restore(bad)
    for file in (first, second):  # of one length, they still hold one another's blocks
        content = file.read_bytes()
        file.write_bytes(content + bytes(size - len(content)))
    with pytest.raises(CorruptCheckpointError):
        restore(bad)


@pytest.mark.parametrize("prefix", ["manifest", "index", "data", "COMMIT"])
def test_files_of_another_checkpoint(bad, prefix, tmp_path):
    """All are of the same attempt by name, tree and size: only the values differ."""
    other = {**TREE, "w": TREE["w"] + 1, "b": {"c": TREE["b"]["c"], "n": 4}}
    hand_written.write(tmp_path / "other", other, hand_written.grid(3, 2), processes=2, step=2)
    for file in (tmp_path / "other").glob(f"{prefix}*"):
        shutil.copy(file, bad / file.name)
    with pytest.raises(CorruptCheckpointError):
        restore(bad)


def test_a_data_file_that_is_a_folder_or_leads_away(bad, tmp_path):
    file = data_files(bad)[0]
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError):
        restore(bad)
    file.rmdir()
    (tmp_path / "elsewhere").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        restore(bad)


def test_a_file_cut_while_it_is_read(bad, monkeypatch):
    """The length was right when it was looked at."""
    checkpoint = open_checkpoint(LocalStore(bad))
    file = data_files(bad)[0]
    monkeypatch.setattr(
        type(checkpoint.store), "size", lambda self, name: (bad / name).stat().st_size + 9
    )
    os.truncate(file, file.stat().st_size - 9)
    wants = [
        Want(n, (0,) * len(leaf.shape), np.empty(leaf.shape, leaf.dtype))
        for n, leaf in enumerate(checkpoint.manifest.leaves)
        if leaf.has_data
    ]
    for one in checkpoint.index.files:
        object.__setattr__(one, "bytes", (bad / one.name).stat().st_size + 9)
    with pytest.raises(CorruptCheckpointError, match="ends at byte"):
        read_boxes(checkpoint, wants, most_bytes=1 << 22)


def test_a_commit_that_vouches_for_files_elsewhere(bad):
    lines = (bad / "COMMIT").read_bytes().rstrip(b"\n").rsplit(b"\n", 1)[0]
    said = json.loads(lines)
    said["manifest"]["name"] = "../good/" + said["manifest"]["name"]
    text = json.dumps(said).encode() + b"\n"
    (bad / "COMMIT").write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")
    with pytest.raises(CorruptCheckpointError):
        restore(bad)


@pytest.mark.parametrize("impl", ["nonsense", "rbg"])
def test_keys_of_an_unknown_kind_raise_unsupported_checkpoint(tmp_path, monkeypatch, impl):
    """Sealed by its author: all hashes are right."""
    real = hand_written.LeafRecord

    def key(name, kind, dtype="", shape=(), **more):
        if kind == "array":
            return real(name, "key", dtype, shape[:-1], (2,), impl, **more)
        return real(name, kind, dtype, shape, **more)

    monkeypatch.setattr(hand_written, "LeafRecord", key)
    hand_written.write(tmp_path / "keys", {"k": np.zeros((3, 2), np.uint32)})
    for target in (None, SingleDeviceSharding(jax.devices()[0])):
        with pytest.raises(UnsupportedCheckpointError, match="k: this JAX makes no key"):
            restore(tmp_path / "keys", target)
