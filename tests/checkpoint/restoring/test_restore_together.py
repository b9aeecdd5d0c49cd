"""All processes restore the same, or all get the same error. Threads are processes here."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest

from checkpoint import hand_written
from collectives.thread_jobs import run_all
from shoal.arrays.named_sharding import named_sharding
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.restoring.restore import restore
from shoal.errors import (
    CorruptCheckpointError,
    DivergenceError,
    NotCommittedError,
    NotSharedError,
    PeerFailedError,
    RestoreMismatchError,
    StorageError,
    UsageError,
)
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.client.in_process import LocalJob

TREE = {"w": np.arange(300_000.0), "n": 3}


class Mounted(LocalFolder):
    """A folder that each process sees at the same path, with files of its own."""

    path = "/mounted/run"


@pytest.fixture
def saved(tmp_path):
    """The files that each of three processes sees."""
    path = tmp_path / "0"
    hand_written.write(path, TREE, hand_written.grid(3), step=4)
    others = [shutil.copytree(path, tmp_path / str(number)) for number in (1, 2)]
    return [path, *others]


def restore_all(saved, *targets, **options):
    """Restore in three processes; return what each got: a tree, or an error."""

    def run(client):
        number = client.process
        target = targets[number] if targets else None
        asked = {key: value[number] for key, value in options.items()}
        store = LocalStore(Mounted(saved[number]))
        return restore.on(client, store, target, name="same", timeout_s=30, **asked)

    return run_all(LocalJob(3), run)


def all_are(found, kind, words):
    for error in found:
        assert type(error) is kind, error
        assert words in str(error)
    return found


def test_all_get_the_same(saved):
    for back in restore_all(saved):
        assert back["n"] == 3
        assert (back["w"] == TREE["w"]).all()


def test_a_path_that_one_process_does_not_see(saved):
    shutil.rmtree(saved[1])
    found = restore_all(saved)
    all_are(found, NotSharedError, "process 1 (")
    assert {error.processes for error in found} == {(1,)}


def test_path_that_is_empty_on_every_process_raises_not_committed(saved):
    for path in saved:
        shutil.rmtree(path)
    all_are(restore_all(saved), NotCommittedError, "nothing is saved there")


def test_a_path_where_one_sees_another_save(saved):
    shutil.rmtree(saved[2])
    hand_written.write(saved[2], TREE, step=5, attempt="00000000000b")
    found = all_are(restore_all(saved), DivergenceError, "see different checkpoints")
    assert set(found[0].sides.values()) == {(0, 1), (2,)}


def test_a_block_that_is_damaged_for_one(saved):
    (file,) = saved[1].glob("data-*")
    content = bytearray(file.read_bytes())
    content[1_000_000] ^= 16
    file.write_bytes(content)
    found = all_are(restore_all(saved), CorruptCheckpointError, file.name)
    assert {error.leaf for error in found} == {"w"}
    assert {error.offset for error in found} == {1_000_000 >> 18 << 18}
    assert "process 1 of 3" in str(found[0])


def test_a_step_that_is_deleted_while_it_is_read(saved, monkeypatch):
    def delete_first(self, name, offset, into):
        if self._path == str(saved[1]):
            shutil.rmtree(saved[1], ignore_errors=True)
        return read_at(self, name, offset, into)

    read_at = LocalFolder.read_at
    monkeypatch.setattr(LocalFolder, "read_at", delete_first)
    all_are(restore_all(saved), NotCommittedError, "was deleted while it was read")


def test_storage_error_on_one_process_is_raised_on_all(saved, monkeypatch):
    def refuse(self, name, offset, into):
        if self._path == str(saved[2]):
            raise StorageError("cannot read: Input/output error", path=self._path, errno=5)
        return read_at(self, name, offset, into)

    read_at = LocalFolder.read_at
    monkeypatch.setattr(LocalFolder, "read_at", refuse)
    found = all_are(restore_all(saved), StorageError, "Input/output error")
    assert {error.errno for error in found} == {5}


def test_foreign_error_in_a_restore_raises_peer_failed_on_the_others(saved, monkeypatch):
    def fail(self, name, offset, into):
        if self._path == str(saved[0]):
            raise ZeroDivisionError("a bug")
        return read_at(self, name, offset, into)

    read_at = LocalFolder.read_at
    monkeypatch.setattr(LocalFolder, "read_at", fail)
    first, *others = restore_all(saved)
    assert type(first) is ZeroDivisionError
    all_are(others, PeerFailedError, "ZeroDivisionError: a bug")


def test_targets_and_options_must_agree(saved):
    good, bad = {"w": np.zeros(300_000), "n": 0}, {"w": np.zeros(3), "n": 0}
    all_are(restore_all(saved, good, good, bad), DivergenceError, "float64[3]")
    found = restore_all(saved, only=["w", "w", "n"])
    all_are(found, DivergenceError, "only=")
    found = all_are(restore_all(saved, bad, bad, bad), RestoreMismatchError, "has shape (300000,)")
    assert {error.wrong_shape for error in found} == {("w",)}


MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
ON_X, ON_Y = Layout(MESH, "x"), Layout(MESH, "y")


def like(dtype, layout, count=300_000):
    return jax.ShapeDtypeStruct((count,), dtype, sharding=named_sharding(layout))


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (ON_X, ON_Y, "layouts"),
        (ON_X, Layout(MESH, ("x", "y")), "layouts"),
        (ON_X, MESH, "layouts"),
        (ON_X, "stored", "layouts"),
        (MESH, Mesh({"x": 2, "y": 4}, kind="cpu"), "layouts"),
        (like("float64", ON_X), like("float64", ON_Y), "layouts"),
        (like("float64", ON_X), np.zeros(300_000), "layouts"),
        (like("float64", ON_X), like("float32", ON_Y), "dtypes"),
        (like("float64", ON_X), like("float64", ON_X, 8), "shapes"),
    ],
)
def test_differing_targets_raise_divergence_with_the_difference(saved, one, other, what):
    with jax.enable_x64(True):
        found = restore_all(saved, *({"w": place, "n": 0} for place in (one, one, other)))
    words = f"processes gave restore 'same' different {what}\n"
    assert {type(error) for error in found} == {DivergenceError}
    assert all(words in str(error) for error in found), found[0]
    assert str(found[0]).endswith("\nrestore needs the same target and options on every process.")


def test_values_of_other_processes(tmp_path):
    own = hand_written.PerProcess([{"at": number} for number in range(3)])
    hand_written.write(tmp_path / "own", {"own": own}, processes=3)
    paths = [tmp_path / "own"] * 3
    assert [back["own"].value["at"] for back in restore_all(paths)] == [0, 1, 2]
    hand_written.write(tmp_path / "two", {"own": hand_written.PerProcess([1, 2])}, processes=2)
    found = restore_all([tmp_path / "two"] * 3)
    all_are(found, UsageError, "of each of 2 processes, and there are 3 now")
    found = restore_all([tmp_path / "two"] * 3, merge=[sum, sum, sum])
    assert [back["own"].value for back in found] == [3, 3, 3]
