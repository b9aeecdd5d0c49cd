"""What is in the folder of a step, and what each operation leaves there."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np
import pytest

from checkpoint.forgetful_file_system import Disk
from shoal.checkpoint.disk import committing, step_folder, sweep
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.format import records, table_files
from shoal.checkpoint.store.interface import StoreState
from shoal.checkpoint.store.step_names import new_attempt
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    SaveAbortedError,
    StepAlreadyCommittedError,
    UnsupportedCheckpointError,
)
from shoal.testing.store_contract import OWNER, Save, names_of, value_of

FIRST, SECOND = Save("00000000000a", value=7), Save("00000000000b", value=9)


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def folder(disk):
    return disk.folder("/run/step")


def test_attempts_have_names_of_their_own():
    some = {new_attempt() for _ in range(1000)}
    assert len(some) == 1000
    assert all(len(one) == 12 and int(one, 16) >= 0 for one in some)


def test_missing_directory_has_no_attempts_or_commit(folder):
    assert step_folder.committed(folder) is None
    assert step_folder.folder_state(folder) == StoreState(None, [], (), False, ())
    assert not step_folder.see(folder, FIRST.attempt)
    with pytest.raises(FileNotFoundError):
        LocalStore(folder).missing_parts(FIRST.attempt)
    assert sweep.recover_step(folder) is None
    assert sweep.collect_garbage(folder, idle_s=0) == []
    assert committing.abandon(folder, FIRST.attempt) is None
    sweep.delete_committed(folder, FIRST.attempt)
    assert folder.names() == []


def test_an_attempt_from_its_beginning_to_its_end(disk, folder):
    FIRST.begin(folder)
    disk.now += 12
    (attempt,) = step_folder.folder_state(folder).attempts
    assert attempt == step_folder.Attempt(
        FIRST.attempt, True, False, 12.0, OWNER,
        ("PENDING-00000000000a", "manifest-00000000000a.json"),
    )  # fmt: skip
    assert step_folder.see(folder, FIRST.attempt)
    FIRST.write(folder, 1)
    assert LocalStore(folder).missing_parts(FIRST.attempt)
    with pytest.raises(SaveAbortedError, match="process 0 has not finished") as caught:
        committing.commit(folder, FIRST.attempt)
    assert caught.value.processes == (0,)
    FIRST.write(folder, 0)
    assert not LocalStore(folder).missing_parts(FIRST.attempt)
    assert step_folder.folder_state(folder).attempts[0].is_complete
    commit = committing.commit(folder, FIRST.attempt)
    assert step_folder.committed(folder) == commit == committing.commit(folder, FIRST.attempt)
    assert (commit.attempt, commit.step, commit.metrics) == (FIRST.attempt, 5, {"loss": 0.5})
    assert commit.num_files == 2
    assert commit.data_bytes == sum(folder.size(n) for n in folder.names() if "data" in n)
    assert step_folder.folder_state(folder) == StoreState(commit, [], (), False, ())
    assert folder.names() == names_of(folder, commit)
    assert value_of(folder, commit) == 7


def test_committed_step_is_not_overwritten(folder):
    FIRST.save(folder)
    for act in (
        lambda: SECOND.begin(folder),
        lambda: committing.commit(folder, SECOND.attempt),
    ):
        with pytest.raises(StepAlreadyCommittedError, match="nothing is overwritten") as caught:
            act()
        assert (caught.value.attempt, caught.value.path) == (FIRST.attempt, folder.path)
    assert committing.abandon(folder, FIRST.attempt) == step_folder.committed(folder)
    assert committing.abandon(folder, SECOND.attempt) is None
    assert sweep.recover_step(folder).attempt == FIRST.attempt
    assert sweep.collect_garbage(folder, idle_s=0) == []
    sweep.delete_committed(folder, SECOND.attempt)
    assert value_of(folder, step_folder.committed(folder)) == 7


def test_pins_and_foreign_files_are_kept(folder):
    folder.make()
    for name in ("KEEP", "notes.txt", "PENDING-xyz", "data-00000000000a"):
        folder.write_new(name, b"")
    state = step_folder.folder_state(folder)
    assert state.is_pinned
    assert state.others == ("PENDING-xyz", "notes.txt")
    assert sweep.collect_garbage(folder, idle_s=0) == ["data-00000000000a"]
    assert folder.names() == ["KEEP", "PENDING-xyz", "notes.txt"]


def test_a_deletion_takes_the_pin_along_only_if_nothing_else_is_there(folder):
    for others in ([], ["notes.txt"]):
        FIRST.save(folder)
        folder.rename("COMMIT", step_folder.tombstone_name(FIRST.attempt))
        for name in ("KEEP", *others):
            folder.write_new(name, b"")
        sweep.recover_step(folder)
        assert folder.names() == (["KEEP", *others] if others else [])


def test_garbage_collection_spares_live_attempts(disk, folder):
    FIRST.begin(folder)
    disk.now += 30
    SECOND.begin(folder)
    disk.now += 30
    assert sweep.collect_garbage(folder, idle_s=61) == []
    folder.touch("PENDING-00000000000a")
    gone = sweep.collect_garbage(folder, idle_s=30)
    assert gone == ["PENDING-00000000000b", "manifest-00000000000b.json"]
    assert [one.id for one in step_folder.folder_state(folder).attempts] == [FIRST.attempt]


def test_garbage_collection_spares_a_recent_empty_directory(folder):
    folder.make()
    sweep.collect_garbage(folder, idle_s=60)
    folder.write_new("KEEP", b"")
    assert folder.names() == ["KEEP"]
    folder.remove("KEEP")
    sweep.collect_garbage(folder, idle_s=0)
    with pytest.raises(FileNotFoundError):
        folder.write_new("KEEP", b"")


def test_tombstone_beside_a_commit_is_ignored(folder):
    """A file system whose renames are not one step may show both names after a crash."""
    commit = FIRST.save(folder)
    folder.link("COMMIT", f"DELETING-{FIRST.attempt}")
    assert sweep.recover_step(folder) == commit
    assert folder.names() == names_of(folder, commit)
    assert value_of(folder, commit) == 7


def test_garbage_collection_spares_partially_listed_attempts(folder):
    """A listing that was begun before an attempt may show its files without its PENDING."""
    FIRST.begin(folder)
    names = folder.names
    folder.names = lambda: [name for name in names() if "PENDING" not in name]
    assert sweep.collect_garbage(folder, idle_s=60) == []
    assert step_folder.see(folder, FIRST.attempt)


def test_a_complete_attempt_is_recovered_not_collected(disk, folder):
    FIRST.prepare(folder)
    disk.now += 1e6
    sweep.collect_garbage(folder, idle_s=60)
    assert value_of(folder, step_folder.committed(folder)) == 7


def test_later_of_two_complete_attempts_is_recovered(disk, folder):
    FIRST.prepare(folder)
    disk.now += 1
    SECOND.prepare(folder)
    disk.now += 1e6
    commit = sweep.recover_step(folder)
    assert value_of(folder, commit) == 9
    sweep.collect_garbage(folder, idle_s=60)
    assert folder.names() == names_of(folder, commit)


def test_an_attempt_that_cannot_be_committed_gives_way_to_one_that_can(disk, folder):
    FIRST.prepare(folder)
    disk.now += 1
    SECOND.prepare(folder)
    folder.remove(records.data_name(SECOND.attempt, 0, 2))
    with pytest.raises(CorruptCheckpointError, match="is missing; process 0 wrote"):
        committing.commit(folder, SECOND.attempt)
    assert value_of(folder, sweep.recover_step(folder)) == 7


def _swap_parts(folder) -> None:
    names = [records.part_name(FIRST.attempt, process) for process in (0, 1)]
    one, other = (folder.read(name) for name in names)
    folder.rewrite(names[0], other)
    folder.rewrite(names[1], one)


def _swap_a_part(folder) -> None:
    other = folder.read(records.part_name(FIRST.attempt, 1))
    folder.rewrite(records.part_name(FIRST.attempt, 0), other)


def _flip(name: str):
    def flip(folder) -> None:
        data = bytearray(folder.read(name))
        data[len(data) // 2] ^= 1
        folder.rewrite(name, bytes(data))

    return flip


def _cut_data(folder) -> None:
    name = records.data_name(FIRST.attempt, 1, 2)
    folder.rewrite(name, folder.read(name)[:-1])


def _hole(folder) -> None:
    name = records.part_name(FIRST.attempt, 1)
    part = table_files.decode_part(folder.read(name))
    chunks = dataclasses.replace(
        part.chunks, extent=part.chunks.extent - np.array([[1, 0]]), end=part.chunks.end - 1000
    )
    folder.rewrite(name, table_files.encode_part(dataclasses.replace(part, chunks=chunks)))


@pytest.mark.parametrize(
    "damage", [_swap_a_part, _flip("part-00000000000a-00001.safetensors"), _cut_data, _hole],
    ids=["other part", "part", "data", "hole"],
)  # fmt: skip
def test_damaged_parts_are_not_committed(disk, folder, damage):
    FIRST.prepare(folder)
    damage(folder)
    with pytest.raises(CorruptCheckpointError) as caught:
        committing.commit(folder, FIRST.attempt)
    assert caught.value.path == folder.path
    assert folder.path in str(caught.value)
    assert step_folder.committed(folder) is None
    assert sweep.recover_step(folder) is None
    disk.now += 100
    sweep.collect_garbage(folder, idle_s=60)
    assert folder.names() == []


def test_parts_under_each_others_names_say_the_same(folder):
    FIRST.prepare(folder)
    _swap_parts(folder)
    assert value_of(folder, committing.commit(folder, FIRST.attempt)) == 7


def test_an_index_that_is_there_already_is_used_if_it_is_the_same(folder):
    FIRST.prepare(folder)
    folder.write_new(records.index_name(FIRST.attempt), b"something else")
    with pytest.raises(CorruptCheckpointError, match="contradicts the parts"):
        committing.commit(folder, FIRST.attempt)
    folder.remove(records.index_name(FIRST.attempt))
    committing.commit(folder, FIRST.attempt)


@pytest.mark.parametrize("what", ["manifest", "index"])
def test_a_commit_whose_files_are_missing_or_cut_is_corrupt(folder, what):
    commit = FIRST.save(folder)
    name = getattr(commit, what).name
    data = folder.read(name)
    for damage, words in (
        (lambda: folder.rewrite(name, data[:-1]), "bytes"),
        (lambda: folder.remove(name), "is missing"),
    ):
        damage()
        for look in (
            step_folder.committed, step_folder.folder_state, sweep.recover_step,
            lambda folder: sweep.collect_garbage(folder, idle_s=0),
        ):  # fmt: skip
            with pytest.raises(CorruptCheckpointError, match=words) as caught:
                look(folder)
            assert caught.value.file == name
    sweep.delete_committed(folder, FIRST.attempt)  # what is damaged can be deleted
    assert folder.names() == []


def test_a_commit_that_contradicts_itself_is_corrupt(folder):
    FIRST.save(folder)
    text = folder.read("COMMIT")
    for other in (b"", text[:-1], text + b" ", text * 20, text.replace(b"0.5", b"0.6")):
        folder.rewrite("COMMIT", other)
        names = folder.names()
        for act in (
            step_folder.committed, sweep.recover_step, SECOND.begin,
            lambda f: sweep.delete_committed(f, FIRST.attempt),
            lambda f: sweep.collect_garbage(f, idle_s=0),
        ):  # fmt: skip
            with pytest.raises((CorruptCheckpointError, UnsupportedCheckpointError)) as caught:
                act(folder)
            assert folder.path in str(caught.value)
        assert folder.names() == names


def test_an_attempt_whose_manifest_cannot_be_read_is_not_complete(folder):
    FIRST.prepare(folder)
    folder.rewrite(records.manifest_name(FIRST.attempt), b"{}")
    assert not step_folder.folder_state(folder).attempts[0].is_complete
    assert sweep.recover_step(folder) is None
    with pytest.raises(CheckpointError):
        committing.commit(folder, FIRST.attempt)


def test_malformed_pending_files_are_tolerated(folder):
    FIRST.begin(folder)
    for text in (b"", b"{", b"[1]", b"\xff\xfe", b"{}\nabc"):
        folder.rewrite("PENDING-00000000000a", text)
        assert step_folder.folder_state(folder).attempts[0].owner == {}


def test_an_attempt_that_ends_while_its_state_is_taken_is_not_alive(folder):
    FIRST.begin(folder)
    names = folder.names
    folder.names = lambda: (names(), folder.remove("PENDING-00000000000a"))[0]
    (attempt,) = step_folder.folder_state(folder).attempts
    assert not attempt.is_live
    assert attempt.idle_s == math.inf


def test_a_part_of_an_attempt_whose_folder_is_gone(folder):
    FIRST.begin(folder)
    image = FIRST.image(0)
    part = records.Part(
        FIRST.attempt, 0, (records.FileRecord(image.name, image.num_bytes, 0),),
        records.Chunks(*[np.zeros(0, np.int64)] * 4, *[np.zeros((0, 1), np.int64)] * 2),
        np.zeros(1, np.uint64),
    )  # fmt: skip
    committing.abandon(folder, FIRST.attempt)
    with pytest.raises(SaveAbortedError, match="PENDING is gone"):
        committing.write_part(folder, part)


def test_beginning_twice_is_beginning(folder):
    FIRST.begin(folder)
    FIRST.write(folder, 0)
    FIRST.begin(folder)
    FIRST.write(folder, 1)
    assert value_of(folder, committing.commit(folder, FIRST.attempt)) == 7


@pytest.mark.parametrize("often", [1, 1000])
def test_beginning_in_a_folder_that_others_remove(folder, often):
    make, count = folder.make, [0]

    def made_and_gone() -> None:
        make()
        count[0] += 1
        if count[0] <= often:
            folder.remove_folder()

    folder.make = made_and_gone
    if often > 1:
        with pytest.raises(SaveAbortedError):
            FIRST.begin(folder)
    else:
        FIRST.begin(folder)
        assert step_folder.see(folder, FIRST.attempt)


def test_beginning_fails_without_a_trace(disk, folder):
    class Full(type(folder)):
        def rename(self, old: str, new: str) -> None:
            raise OSError(28, os.strerror(28))

    with pytest.raises(OSError, match="No space"):
        FIRST.begin(Full(disk, folder.path, "one"))
    assert folder.names() == []


def test_leftovers_of_a_commit_are_tidied(tmp_path):
    folder = LocalFolder(tmp_path)
    commit = FIRST.save(folder)
    for name in ("PENDING-00000000000a", "part-00000000000a-00000.safetensors",
                 "tmp-00000000000a-01234567"):  # fmt: skip
        folder.write_new(name, b"")
    assert step_folder.folder_state(folder).attempts == []
    committing.tidy(folder, commit)
    assert folder.names() == names_of(folder, commit)
