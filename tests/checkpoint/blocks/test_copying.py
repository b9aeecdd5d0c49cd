"""Copies between stores: verified, committed or absent, and gone on with."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.checkpoint.blocks import copying
from shoal.checkpoint.blocks.copying import copy_checkpoint
from shoal.checkpoint.blocks.reader import verify_files
from shoal.checkpoint.bucket.object_store import ObjectStore
from shoal.checkpoint.bucket.objects import MemoryObjects
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import CorruptCheckpointError, NotCommittedError, StepAlreadyCommittedError
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.store_contract import Save, value_of

NUMBERS = np.random.default_rng(0).random((700, 1000))
# Thousands of leaves make a header of several blocks.
TREE = {"w": NUMBERS, "many": {f"leaf{n:05}": np.int32(n) for n in range(4000)}, "name": "run"}


def one():
    return LocalJob(1).clients[0]


@pytest.fixture
def source(tmp_path):
    store = LocalStore(tmp_path / "source")
    save.on(one(), store, TREE, step=7, metrics={"loss": 0.5}, user={"a": [1]})
    return store


def bucket():
    return ObjectStore(MemoryObjects())


def test_copy_of_a_copy_equals_the_original(source, tmp_path):
    there, back = bucket(), LocalStore(tmp_path / "back")
    seen = []
    first = copy_checkpoint(source, there, seen.append)
    assert (first.was_there, first.copied_bytes) == (False, first.commit.data_bytes)
    assert sum(seen) == first.commit.data_bytes
    second = copy_checkpoint(there, back)
    commits = [source.committed(), there.committed(), back.committed()]
    assert len({one.attempt for one in commits}) == 3
    assert len({(one.step, one.created_ns, one.data_bytes) for one in commits}) == 1
    assert second.commit == commits[2]
    for store in (there, back):
        assert verify_files(open_checkpoint(store)) == []
        found = restore.on(one(), store)
        assert found["w"].tobytes() == NUMBERS.tobytes()
        assert {name: int(leaf) for name, leaf in found["many"].items()} == {
            f"leaf{n:05}": n for n in range(4000)
        }
    (data,) = (tmp_path / "back").glob("data-*")
    assert load_file(data)["w"].tobytes() == NUMBERS.tobytes()


@pytest.mark.parametrize("processes", [2, 3])
def test_the_files_of_several_processes(processes, tmp_path):
    store, there = LocalStore(tmp_path / "x"), bucket()
    Save("00000000000a", value=9, processes=processes).save(store)
    copied = copy_checkpoint(store, there)
    assert copied.commit.num_files == processes
    assert value_of(there, there.committed()) == 9
    assert verify_files(open_checkpoint(there)) == []


def test_copying_again_copies_nothing_and_another_checkpoint_is_refused(source, tmp_path):
    there = bucket()
    first = copy_checkpoint(source, there)
    again = copy_checkpoint(source, there)
    assert (again.was_there, again.copied_bytes, again.commit) == (True, 0, first.commit)
    assert copy_checkpoint(there, source).was_there
    other = LocalStore(tmp_path / "other")
    save.on(one(), other, {**TREE, "w": NUMBERS + 1}, step=7)
    with pytest.raises(StepAlreadyCommittedError, match="another checkpoint is saved there"):
        copy_checkpoint(other, there)
    assert there.committed() == first.commit
    with pytest.raises(NotCommittedError):
        copy_checkpoint(bucket(), there)


@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_damage_is_not_copied(source, tmp_path, place):
    (data,) = (tmp_path / "source").glob("data-*")
    content = bytearray(data.read_bytes())
    content[{"header": 100, "middle": len(content) // 2, "end": -5}[place]] ^= 1
    data.write_bytes(content)
    there = bucket()
    with pytest.raises(CorruptCheckpointError, match=data.name):
        copy_checkpoint(source, there)
    assert there.committed() is None


def interrupted(source, there, at):
    """Begin a copy, and interrupt it after some of its files; return the attempt."""
    counted = itertools.count(1)

    def interrupt(_):
        if next(counted) > at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(source, there, interrupt)
    (attempt,) = there.state().attempts
    return attempt.id


def test_an_interrupted_copy_to_a_bucket_goes_on(tmp_path, monkeypatch):
    source, there = LocalStore(tmp_path / "x"), bucket()
    Save("00000000000a", value=9, processes=4).save(source)
    attempt = interrupted(source, there, 2)
    whole = sorted(name for name in there.names() if "data-" in name)[:2]
    assert there.committed() is None
    monkeypatch.setattr(copying, "_runs", lambda pid: False)
    there._objects.put(whole[1], b"damaged")
    copied = copy_checkpoint(source, there)
    assert copied.commit.attempt == attempt
    assert copied.copied_bytes == 3 * copied.commit.data_bytes // 4
    assert {*whole} < {*there.names()}
    assert value_of(there, there.committed()) == 9


def test_a_copy_that_wakes_after_another_one_went_on_harms_nothing(tmp_path, monkeypatch):
    source, there = LocalStore(tmp_path / "x"), bucket()
    Save("00000000000a", value=9, processes=3).save(source)
    monkeypatch.setattr(copying, "_runs", lambda pid: False)
    copied = []

    def freeze(_):
        if not copied:
            copied.append(None)
            copied[0] = copy_checkpoint(source, there)

    woken = copy_checkpoint(source, there, freeze)
    assert woken.commit == copied[0].commit == there.committed()
    assert value_of(there, there.committed()) == 9
    assert verify_files(open_checkpoint(there)) == []


def test_an_interrupted_copy_to_a_directory_begins_anew(tmp_path, monkeypatch):
    """A killed copy leaves files of any contents there, if only of the right length."""
    source, there = LocalStore(tmp_path / "x"), LocalStore(tmp_path / "y")
    Save("00000000000a", value=9, processes=4).save(source)
    attempt = interrupted(source, there, 2)
    monkeypatch.setattr(copying, "_runs", lambda pid: False)
    copied = copy_checkpoint(source, there)
    assert copied.commit.attempt != attempt
    assert copied.copied_bytes == copied.commit.data_bytes
    there.collect_garbage(idle_s=0)
    assert not [name for name in there.names() if attempt in name]
    assert value_of(there, there.committed()) == 9


def test_a_step_that_is_deleted_while_it_is_copied(tmp_path):
    source, there = LocalStore(tmp_path / "x"), bucket()
    Save("00000000000a", processes=3).save(source)
    with pytest.raises(NotCommittedError, match="was deleted while it was read"):
        copy_checkpoint(source, there, lambda _: source.delete("00000000000a"))


def test_concurrent_copy_finds_the_finished_one(source):
    there, done = bucket(), []

    def another(_):
        if not done:
            done.append(None)
            done[0] = copy_checkpoint(source, there)

    late = copy_checkpoint(source, there, another)
    assert (late.was_there, late.commit) == (True, done[0].commit)
    assert [one.id for one in there.state().attempts] == []


def test_two_copies_at_once_are_two_attempts(source):
    there = bucket()
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(source, there, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    (first,) = there.state().attempts
    assert first.owner["pid"] == os.getpid()  # it runs
    copied = copy_checkpoint(source, there)
    assert copied.commit.attempt != first.id


def test_a_process_that_runs():
    assert copying._runs(os.getpid())
    assert copying._runs("1")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not copying._runs(child.pid)
    assert copying._runs(None)
