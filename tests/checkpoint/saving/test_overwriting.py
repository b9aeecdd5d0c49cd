"""`save(overwrite=True)`, on a disk and in a bucket, of one process and of two.

Deaths are in `processes/test_checkpoint_deaths`, losses of power in `disk/test_crash_prefixes`, and
requests that arrive in any order in `bucket/test_register`.
"""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import shoal
from checkpoint.saved_contents import CLEAN, files_of
from collectives.thread_jobs import run_all
from shoal.checkpoint.at import store_at
from shoal.checkpoint.bucket import register
from shoal.checkpoint.bucket.object_store import ObjectStore
from shoal.checkpoint.bucket.objects import MemoryObjects
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.format.records import Register
from shoal.checkpoint.history.checkpoint_info import checkpoint_info
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import plan_restore, restore
from shoal.checkpoint.saving.save import save
from shoal.cli.main import build
from shoal.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    StepAlreadyCommittedError,
    StorageError,
    UsageError,
)
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.system import fault_points
from shoal.testing.store_contract import Save


def tree(number):
    return {"w": np.full((300, 1000), number, np.int32), "number": number}


def overwrite(place, number):
    return lambda client: save.on(client, place, tree(number), overwrite=True, name="save")


def held(place):
    """Return which one is saved, after a look at all of it."""
    one = LocalJob(1).clients[0]
    back = restore.on(one, place)
    assert (back["w"] == back["number"]).all()
    return back["number"]


def kinds(place):
    return [name.split("-")[0] for name in store_at(place, "").names()]


def test_the_new_one_takes_the_place_of_the_old_one(place, job):
    for number in range(3):
        assert {*job(overwrite(place, number))} == {None}
        assert held(place) == number
        assert {*kinds(place)} == {*CLEAN}
    commit = store_at(place, "").committed()
    (number,) = (leaf for leaf in checkpoint_info(place).to_json()["leaves"] if leaf["value"])
    assert (number["name"], number["value"]) == ("number", "2")
    assert plan_restore(place).read_bytes >= commit.data_bytes - 4096
    errors = job(lambda client: save.on(client, place, tree(3), name="save"))
    assert {type(error) for error in errors} == {StepAlreadyCommittedError}
    assert "pass overwrite=True to replace it" in str(errors[0])
    assert store_at(place, "").committed() == commit


def test_commands_see_the_new_one(tmp_path):
    path, runner = tmp_path / "latest.ckpt", CliRunner()
    for number in (7, 8):
        shoal.save(path, tree(number), user={"number": number}, overwrite=True)
    for command in ("ls", "show", "verify", "recover", "gc"):
        result = runner.invoke(build(["ckpt"]), ["ckpt", command, str(path)])
        assert result.exit_code == 0, result.output
    assert held(path) == 8
    assert files_of(path) == CLEAN


def test_a_failure_leaves_the_old_one(place, job, monkeypatch):
    assert {*job(overwrite(place, 1))} == {None}
    monkeypatch.setenv("SHOAL_FAULTS", "save.written@0:raise")
    assert None not in job(overwrite(place, 2))
    assert held(place) == 1
    assert {*kinds(place)} == {*CLEAN}


def test_a_step_of_a_history_gets_other_advice(tmp_path):
    with Checkpoints(tmp_path, asynchronous=False) as ckpts:
        ckpts.save(1, {"w": 1})
        with pytest.raises(StepAlreadyCommittedError, match="save another step, or delete this"):
            ckpts.save(1, {"w": 2})


# ---- what is not a checkpoint


def test_other_files_in_its_directory_stay(tmp_path):
    path = tmp_path / "mine"
    (path / "photos").mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    for number in range(3):
        shoal.save(path, tree(number), overwrite=True)
    assert held(path) == 2
    assert (path / "notes.txt").read_text() == "mine"
    assert sorted(files_of(path)) == [*CLEAN, "notes.txt", "photos"]


def snapshot(path):
    return {one: one.read_bytes() for one in path.rglob("*") if one.is_file()}


def a_history(path):
    with Checkpoints(path, asynchronous=False) as ckpts:
        ckpts.save(1, {"w": 1})


def a_link(path):
    a_history(path.parent / "run")
    path.symlink_to(path.parent / "run" / "step_000000000001")


def a_pinned_one(path):
    shoal.save(path, tree(1))
    (path / "KEEP").touch()


def a_file_of_that_name(path):
    path.mkdir()
    (path / "COMMIT").write_text("what I have committed myself to")


def one_whose_commit_is_cut(path):
    shoal.save(path, tree(1))
    text = (path / "COMMIT").read_bytes()
    (path / "COMMIT").write_bytes(text[: len(text) // 2])


def test_a_step_of_a_history_stays(place, job):
    def run(client):
        with Checkpoints(place, client=client) as ckpts:
            ckpts.save(1, tree(1))
        save.on(client, ckpts.path_of(1), tree(2), overwrite=True, name="save")

    errors = job(run)
    assert {type(one) for one in errors} == {UsageError}
    assert "step of a history" in str(errors[0])
    assert held(store_at(place, "").step(1)) == 1


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda path: path.write_text("mine"), StorageError, "is a file, not a directory"),
        (a_history, UsageError, "is a history of 1 step"),
        (a_link, UsageError, "symbolic link"),
        (a_pinned_one, UsageError, "is pinned"),
        (a_file_of_that_name, CorruptCheckpointError, "replaces what it can read"),
        (one_whose_commit_is_cut, CorruptCheckpointError, "replaces what it can read"),
    ],
)
def test_refused_overwrite_leaves_the_files_unchanged(tmp_path, job, make, error, words):
    make(tmp_path / "path")
    before = snapshot(tmp_path)
    errors = job(overwrite(tmp_path / "path", 2))
    assert {type(one) for one in errors} == {error}
    assert words in str(errors[0])
    assert snapshot(tmp_path) == before


def test_a_damaged_one_is_replaced(place, job):
    assert {*job(overwrite(place, 1))} == {None}
    store = store_at(place, "")
    store.remove(store.committed().manifest.name)
    with pytest.raises(CorruptCheckpointError):
        held(place)
    assert {*job(overwrite(place, 2))} == {None}
    assert held(place) == 2
    assert {*kinds(place)} == {*CLEAN}


# ---- beside others


def test_a_reader_gets_one_of_them_whole_or_an_error(place):
    """Never a mix."""
    run_all(LocalJob(1), overwrite(place, 0))
    is_over, seen, refused = threading.Event(), [], []

    def read():
        while not is_over.is_set():
            try:
                seen.append(held(place))
            except NotCommittedError as error:
                refused.append(str(error))

    def write(one):
        try:
            for number in range(1, 20):
                overwrite(place, number)(one)
        finally:
            is_over.set()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert run_all(LocalJob(1), write) == [None]
    for reader in readers:
        reader.join(60)
    assert len({*seen}) > 1
    assert all("was replaced by another save while it was read" in words for words in refused)
    assert held(place) == 19


def test_checkpoint_replaced_while_it_is_read_raises_not_committed(tmp_path, job, monkeypatch):
    path, turns = tmp_path / "latest.ckpt", iter(range(100))
    assert {*job(overwrite(path, 1))} == {None}

    def replaced_first(self, name, offset, into):
        if next(turns) == 0:
            shoal.save(path, tree(2), overwrite=True)
        return read_at(self, name, offset, into)

    read_at = LocalFolder.read_at
    monkeypatch.setattr(LocalFolder, "read_at", replaced_first)
    with pytest.raises(NotCommittedError, match="was replaced by another save while it was read"):
        held(path)
    assert held(path) == 2


@pytest.mark.parametrize("point", ["save.opened", "save.assemble", "save.indexed", "save.link"])
def test_one_of_two_concurrent_overwrites_stays(place, point, monkeypatch):
    run_all(LocalJob(1), overwrite(place, 1))
    real, seen = fault_points.reach, []

    def reach(name, process=None):
        if name == point and not seen:
            seen.append(name)
            assert run_all(LocalJob(1), overwrite(place, 3)) == [None]
        real(name, process)

    monkeypatch.setattr("shoal.runtime.system.fault_points.reach", reach)
    (error,) = run_all(LocalJob(1), overwrite(place, 2))
    assert isinstance(error, StepAlreadyCommittedError)
    assert "was committed or pinned there while this save ran; it stays" in str(error)
    assert held(place) == 3
    assert {*kinds(place)} == {*CLEAN}


# ---- what a killed one has left


class Clock:
    def __init__(self):
        self.now = 1000.0


@pytest.fixture(params=["disk", "bucket"])
def aging(request, tmp_path):
    """A store, and what makes all that is in it older than any lease."""
    if request.param == "bucket":
        clock = Clock()

        def pass_by():
            clock.now += 1e4

        objects = MemoryObjects("memory://bucket/latest.ckpt", clock=lambda: clock.now)
        return SimpleNamespace(store=ObjectStore(objects), pass_by=pass_by)
    path = tmp_path / "latest.ckpt"

    def age():
        for file in path.iterdir():
            os.utime(file, (1.0, 1.0))

    return SimpleNamespace(store=LocalStore(path), pass_by=age)


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_the_next_one_cleans_up(aging, job, parts):
    store = aging.store
    assert {*job(overwrite(store, 1))} == {None}
    killed = Save("00000000000b", step=None)
    killed.begin(store, store.committed().attempt)
    for process in range(parts):
        killed.write(store, process)
    if parts < 2:  # a complete one is committed, and then replaced
        assert {*job(overwrite(store, 2))} == {None}
        assert killed.attempt in {name[-12:] for name in store.names()}, "it may still be alive"
    aging.pass_by()
    assert {*job(overwrite(store, 3))} == {None}
    assert held(store) == 3
    assert {*kinds(store)} == {*CLEAN}


def test_room_is_looked_for_after_cleaning_up(tmp_path, job, monkeypatch):
    path = tmp_path / "latest.ckpt"
    assert {*job(overwrite(path, 1))} == {None}
    (path / "data-00000000000b-00000-of-00001.safetensors").write_bytes(b"left")

    def free_bytes(self):
        return 100 if any("00000000000b" in name for name in self.names()) else 1 << 30

    monkeypatch.setattr(LocalFolder, "free_bytes", free_bytes)
    assert {*job(overwrite(path, 2))} == {None}


def test_register_of_an_often_replaced_checkpoint_stays_small(monkeypatch):
    monkeypatch.setattr(register, "_MOST_ENDS", 5)
    store = ObjectStore(MemoryObjects())
    for number in range(12):
        assert run_all(LocalJob(1), overwrite(store, number)) == [None]
    found: Register = register.read(store._objects).register
    assert len(found.ended) == 5
    assert held(store) == 11
    assert {*kinds(store)} == {*CLEAN}
