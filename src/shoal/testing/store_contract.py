"""What every store of checkpoints promises, as tests: for authors of stores.

Subclass `StoreContract` in a test file, and give it a fixture ::

    from shoal.testing.store_contract import StoreContract

    class TestMine(StoreContract):
        @pytest.fixture
        def root(self):
            return MyStore("somewhere/new")  # see shoal.checkpoint.store.interface.Store

With a fixture `clock`, whose `advance(seconds)` moves the clock that stamps the store's files, what
depends on time is tested, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shoal.checkpoint.blocks.image import FileImage, Piece
from shoal.checkpoint.blocks.writer import write_files
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.format import json_files, records, table_files, tiling
from shoal.checkpoint.format.header import Entry, build_header
from shoal.checkpoint.format.records import Chunks
from shoal.checkpoint.history.checkpoint_info import checkpoint_info
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.interface import Files, Store
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.tree.flatten import flatten_tree
from shoal.checkpoint.tree.names import entry
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    SaveAbortedError,
    StepAlreadyCommittedError,
    UsageError,
)
from shoal.hashing import block_hash
from shoal.runtime.client.in_process import LocalJob

ROWS, COLUMNS = 3, 1000  # of each process
OWNER = {"host": "here", "pid": 1}


def store_of(place: Any) -> Store:
    """Return a store, or that of a folder."""
    return place if hasattr(place, "commit") else LocalStore(place)


@dataclass(frozen=True)
class Save:
    """One attempt; every byte of its only leaf is `value`."""

    attempt: str
    value: int = 7
    processes: int = 2
    step: int | None = 5

    @property
    def manifest(self) -> records.Manifest:
        shape = (ROWS * self.processes, COLUMNS)
        _, structure = flatten_tree({"w": np.zeros(0)})
        leaves = (records.LeafRecord("w", "array", "uint8", shape),)
        return records.Manifest(
            self.attempt,
            self.step,
            created_ns=1_700_000_000 * 10**9 + self.value,
            num_processes=self.processes,
            tree=structure,
            leaves=leaves,
            metrics={"loss": 0.5},
        )

    def begin(self, place: Files, replaces: str = "") -> None:
        owner = {**OWNER, "replaces": replaces} if replaces else OWNER
        store_of(place).begin(self.manifest, owner)

    def image(self, process: int) -> FileImage:
        extent = (ROWS, COLUMNS)
        size = ROWS * COLUMNS
        name = entry("w", (ROWS * process, 0))
        header = build_header(
            [Entry(name, dtype="U8", shape=extent, begin=0, end=size)],
            table_files.data_metadata(self.attempt),
        )
        where = (slice(0, ROWS), slice(0, COLUMNS))

        def values() -> Any:
            return np.full(extent, self.value, np.uint8)

        piece = Piece(
            begin=len(header),
            extent=extent,
            dtype=np.dtype(np.uint8),
            per_byte=1,
            where=where,
            values=values,
        )
        name = records.data_name(self.attempt, process, self.processes)
        return FileImage(name, header, len(header) + size, (piece,))

    def write(self, place: Files, process: int) -> None:
        """Write the data of a process, and its part."""
        image = self.image(process)
        (hashes,) = write_files(store_of(place), [image], None, lambda _: None)
        row = np.array([0])
        chunks = Chunks(
            leaf=row, file=row, begin=row + len(image.header), end=row + image.num_bytes,
            origin=np.array([[ROWS * process, 0]]), extent=np.array([[ROWS, COLUMNS]]),
        )  # fmt: skip
        record = records.FileRecord(image.name, image.num_bytes, process)
        part = records.Part(
            self.attempt, process, files=(record,), chunks=chunks, block_hash=hashes
        )
        store_of(place).write_part(part)

    def prepare(self, place: Files, replaces: str = "") -> Save:
        """Do all but the commit."""
        self.begin(place, replaces)
        for process in range(self.processes):
            self.write(place, process)
        return self

    def save(self, place: Files) -> records.Commit:
        """Do all."""
        self.prepare(place)
        return store_of(place).commit(self.attempt)


def attempt_of(commit: records.Commit | None) -> str:
    """Return the attempt that is committed; "" if none is."""
    return "" if commit is None else commit.attempt


def value_of(place: Files, commit: records.Commit | None) -> int:
    """Check every byte that a commit vouches for; return the value of the leaf."""
    assert commit is not None
    blobs = []
    for blob in (commit.manifest, commit.index):
        data = place.read(blob.name)
        assert len(data) == blob.bytes
        assert hashlib.sha256(data).hexdigest() == blob.sha256
        blobs.append(data)
    manifest, index = json_files.decode_manifest(blobs[0]), table_files.decode_index(blobs[1])
    tiling.check_index(manifest, index)
    values = set()
    for file_index, file in enumerate(index.files):
        data = place.read(file.name)
        assert len(data) == file.bytes
        first = int(index.first_block[file_index])
        for block, offset in enumerate(range(0, len(data), records.BLOCK_BYTES)):
            digest = block_hash(memoryview(data)[offset : offset + records.BLOCK_BYTES])
            assert digest == int(index.block_hash[first + block])
        (row,) = np.flatnonzero(index.chunks.file == file_index)
        values |= set(data[index.chunks.begin[row] : index.chunks.end[row]])
    (value,) = values
    return value


def names_of(place: Files, commit: records.Commit | None) -> list[str]:
    """Return the files that remain of a save: COMMIT and what it vouches for."""
    assert commit is not None
    index = table_files.decode_index(place.read(commit.index.name))
    data = [file.name for file in index.files]
    return sorted(["COMMIT", commit.manifest.name, commit.index.name, *data])


FIRST, SECOND = Save("00000000000a", value=7), Save("00000000000b", value=8)
TREE: dict[str, Any] = {"w": np.arange(5000.0).reshape(50, 100), "step": 3, "name": "run"}
PATIENCE_S = 60
TRIES = 10


class StoreContract:
    """The promises; see `shoal.checkpoint.store.interface.Store`."""

    @pytest.fixture
    def root(self) -> Store:
        """Return a new, empty place for a run."""
        raise UsageError("give your test class a fixture `root`, which returns a store")

    @pytest.fixture
    def clock(self) -> Any:
        """Return the clock of the store, with `advance(seconds)`; None: the system's."""
        return None

    @pytest.fixture
    def store(self, root: Store) -> Store:
        return root.step(5)

    def test_nothing_is_there(self, root: Store, store: Store) -> None:
        assert store.committed() is store.standing() is None
        assert (store.names(), root.steps(), store.is_pinned, store.is_link) == (
            [],
            [],
            False,
            False,
        )
        assert store.state() == (None, [], (), False, ())
        assert not store.is_open(FIRST.attempt)
        assert store.recover() is None
        assert store.collect_garbage(idle_s=0) == []
        assert not store.pin()
        assert store.delete(FIRST.attempt)
        assert store.delete_damaged()
        with pytest.raises(FileNotFoundError):
            store.read("COMMIT")
        with pytest.raises(FileNotFoundError):
            store.size("COMMIT")
        with pytest.raises(NotCommittedError, match="nothing is saved there"):
            open_checkpoint(store)

    def test_an_attempt_from_its_beginning_to_its_end(self, store: Store) -> None:
        FIRST.begin(store)
        (attempt,) = store.state().attempts
        assert (attempt.id, attempt.is_live, attempt.is_complete) == (FIRST.attempt, True, False)
        assert attempt.owner == OWNER
        assert attempt.idle_s == pytest.approx(0, abs=30)
        assert store.is_open(FIRST.attempt)
        assert store.missing_parts(FIRST.attempt) == [0, 1]
        FIRST.write(store, 1)
        with pytest.raises(SaveAbortedError, match="process 0 has not finished") as caught:
            store.commit(FIRST.attempt)
        assert (caught.value.processes, caught.value.path) == ((0,), store.path)
        assert store.committed() is None
        FIRST.write(store, 0)
        assert store.missing_parts(FIRST.attempt) == []
        assert store.state().attempts[0].is_complete
        assert not store.is_standing(FIRST.attempt)
        commit = store.commit(FIRST.attempt)
        assert store.committed() == store.standing() == store.commit(FIRST.attempt) == commit
        assert store.is_standing(FIRST.attempt)
        assert not store.is_standing(SECOND.attempt)
        assert (commit.attempt, commit.step, commit.metrics) == (FIRST.attempt, 5, {"loss": 0.5})
        assert commit.data_bytes == sum(store.size(n) for n in store.names() if "data" in n)
        assert store.state() == (commit, [], (), False, ())
        assert store.names() == names_of(store, commit)
        assert value_of(store, commit) == 7
        assert open_checkpoint(store).commit == commit

    def test_a_part_of_a_file_is_read(self, store: Store) -> None:
        commit = FIRST.save(store)
        (name, *_) = [file for file in store.names() if "data" in file]
        whole = store.read(name)
        into = memoryview(bytearray(100))
        got = store.read_at(name, 4000, [into[:30], into[30:31], into[31:]])
        assert (got.num_bytes, got.size in (None, len(whole))) == (100, True)
        assert into == whole[4000:4100]
        assert store.read_at(name, len(whole) - 3, [into[:2], into[2:]]).num_bytes == 3
        assert into[:3] == whole[-3:]
        assert store.read_at(name, len(whole), [into]).num_bytes == 0
        with pytest.raises(FileNotFoundError):
            store.read_at("data", 0, [into])
        assert store.read(commit.manifest.name).startswith(b"{")

    def test_what_is_saved_is_saved(self, store: Store) -> None:
        FIRST.save(store)
        for act in (lambda: SECOND.begin(store), lambda: store.commit(SECOND.attempt)):
            with pytest.raises(StepAlreadyCommittedError, match="nothing is overwritten") as caught:
                act()
            assert (caught.value.attempt, caught.value.path) == (FIRST.attempt, store.path)
        assert store.abandon(FIRST.attempt) == store.committed()
        assert store.abandon(SECOND.attempt) is None
        assert attempt_of(store.recover()) == FIRST.attempt
        assert store.collect_garbage(idle_s=0) == []
        assert store.delete(SECOND.attempt)
        assert value_of(store, store.committed()) == 7

    @pytest.mark.parametrize("written", [0, 1, 2])
    def test_an_attempt_that_was_ended_is_never_committed(self, store: Store, written: int) -> None:
        FIRST.begin(store)
        for process in range(written):
            FIRST.write(store, process)
        assert store.abandon(FIRST.attempt) is None
        assert not store.is_open(FIRST.attempt)
        assert store.state().attempts == []
        for process in range(2):  # it wakes, and goes on
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                FIRST.write(store, process)
        with pytest.raises(SaveAbortedError):
            store.commit(FIRST.attempt)
        assert store.committed() is None
        commit = SECOND.save(store)
        store.collect_garbage(idle_s=0)
        assert store.names() == names_of(store, commit)
        assert value_of(store, commit) == 8

    def test_a_deleted_step_is_saved_again_and_its_writer_stays_out(self, store: Store) -> None:
        FIRST.save(store)
        assert store.delete(FIRST.attempt)
        assert store.committed() is None
        assert not [name for name in store.names() if FIRST.attempt in name]
        with pytest.raises((SaveAbortedError, FileNotFoundError)):
            store.commit(FIRST.attempt)
        assert store.committed() is None
        commit = SECOND.save(store)
        assert store.delete(FIRST.attempt), "it is gone already"
        assert store.committed() == commit
        assert value_of(store, commit) == 8

    def test_a_pinned_step_stays_until_it_is_unpinned(self, store: Store) -> None:
        commit = FIRST.save(store)
        assert store.pin()
        assert store.pin()
        assert store.is_pinned
        assert store.state().is_pinned
        assert not store.delete(FIRST.attempt)
        assert not store.delete_damaged()
        assert store.committed() == commit
        store.unpin()
        store.unpin()
        assert not store.is_pinned
        assert store.delete(FIRST.attempt)
        assert store.committed() is None

    @pytest.mark.parametrize("how", ["commit", "recover", "collect_garbage"])
    def test_a_replacement_ends_what_it_replaces(self, store: Store, how: str) -> None:
        old = FIRST.save(store)
        SECOND.begin(store, FIRST.attempt)
        SECOND.write(store, 0)
        assert store.recover() == store.committed() == old, "it is not complete"
        SECOND.write(store, 1)
        assert store.committed() == old
        if how == "commit":
            store.commit(SECOND.attempt, FIRST.attempt)
        elif how == "recover":
            store.recover()
        else:
            store.collect_garbage(idle_s=600)
        commit = store.committed()
        assert attempt_of(commit) == SECOND.attempt
        assert value_of(store, commit) == 8
        assert store.names() == names_of(store, commit)
        with pytest.raises(StepAlreadyCommittedError):
            store.commit(FIRST.attempt)
        assert store.delete(SECOND.attempt)
        with pytest.raises(SaveAbortedError):
            store.commit(FIRST.attempt)

    def test_a_replacement_spares_what_is_pinned_and_what_it_was_not_made_for(
        self, store: Store
    ) -> None:
        old = FIRST.save(store)
        SECOND.prepare(store, FIRST.attempt)
        assert store.pin()
        with pytest.raises(StepAlreadyCommittedError):
            store.commit(SECOND.attempt, FIRST.attempt)
        assert store.committed() == old
        store.unpin()
        assert store.delete(FIRST.attempt)
        third = Save("00000000000c", value=9).save(store)
        with pytest.raises(StepAlreadyCommittedError):
            store.commit(SECOND.attempt, FIRST.attempt)
        assert store.committed() == third
        assert value_of(store, third) == 9

    def test_a_complete_attempt_is_recovered_and_no_other(self, store: Store) -> None:
        FIRST.begin(store)
        assert store.recover() is None
        SECOND.prepare(store)
        assert attempt_of(store.recover()) == SECOND.attempt
        assert value_of(store, store.committed()) == 8
        assert [attempt.id for attempt in store.state().attempts] == [FIRST.attempt]
        store.collect_garbage(idle_s=0)
        assert store.names() == names_of(store, store.committed())

    def test_garbage_is_what_was_not_refreshed(self, store: Store, clock: Any) -> None:
        if clock is None:
            pytest.skip("its clock is the system's")
        FIRST.begin(store)
        clock.advance(100)
        SECOND.begin(store)
        assert {attempt.id: attempt.idle_s for attempt in store.state().attempts} == {
            FIRST.attempt: 100.0,
            SECOND.attempt: 0.0,
        }
        clock.advance(50)
        store.refresh(FIRST.attempt)
        store.refresh("00000000000c")  # of which nothing is there
        assert {name[:7] for name in store.collect_garbage(idle_s=50)} == {"PENDING", "manifes"}
        assert [attempt.id for attempt in store.state().attempts] == [FIRST.attempt]

    def test_files_of_others_are_spared(self, store: Store) -> None:
        FIRST.save(store)
        store.leave("notes.txt")
        assert store.state().others == ("notes.txt",)
        store.collect_garbage(idle_s=0)
        assert "notes.txt" in store.names()
        store.remove("notes.txt")
        store.remove("notes.txt")
        assert "notes.txt" not in store.names()

    def test_of_many_threads_exactly_one_commits(self, root: Store) -> None:
        saves = [Save(f"00000000000{n}", value=n, step=None) for n in range(1, 5)]
        for turn in range(TRIES):
            store, start = root.step(turn), threading.Barrier(len(saves))
            outcomes: dict[str, Any] = {}

            def run(
                save: Save, store: Store, start: threading.Barrier, outcomes: dict[str, Any]
            ) -> None:
                start.wait(PATIENCE_S)
                try:
                    outcomes[save.attempt] = save.save(store).attempt
                except (StepAlreadyCommittedError, SaveAbortedError) as error:
                    outcomes[save.attempt] = error

            threads = [
                threading.Thread(target=run, args=(save, store, start, outcomes)) for save in saves
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            (winner,) = [attempt for attempt, outcome in outcomes.items() if outcome == attempt]
            for attempt, outcome in outcomes.items():
                if attempt != winner:
                    assert isinstance(outcome, StepAlreadyCommittedError)
                    assert outcome.attempt == winner
            commit = store.committed()
            assert value_of(store, commit) == int(winner, 16)
            store.collect_garbage(idle_s=0)
            assert store.names() == names_of(store, commit)

    def test_all_processes_of_a_job_may_commit_at_once(self, root: Store) -> None:
        for turn in range(TRIES):
            store, start = root.step(turn), threading.Barrier(4)
            commits: list[Any] = []
            Save(FIRST.attempt, step=None).prepare(store)

            def run(index: int, store: Store, start: threading.Barrier, commits: list[Any]) -> None:
                start.wait(PATIENCE_S)
                commits.append(store.recover() if index else store.commit(FIRST.attempt))

            threads = [
                threading.Thread(target=run, args=(index, store, start, commits))
                for index in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            assert commits == [store.committed()] * 4

    def test_a_step_in_the_place_of_another(self, root: Store) -> None:
        Save(FIRST.attempt, step=4).prepare(root.step(5))
        with pytest.raises(CorruptCheckpointError, match="is of step 4"):
            root.step(5).commit(FIRST.attempt)

    def test_the_steps_of_a_run(self, root: Store) -> None:
        for step in (3, 1, 2):
            Save(f"00000000000{step}", step=step).save(root.step(step))
        Save("00000000000d", step=9).begin(root.step(9))
        assert [step for step, _ in root.steps()] == [1, 2, 3, 9]
        assert [step for step, _ in root.steps(3)] == [3, 9]
        assert root.steps(10) == []
        assert 9 in [step for step, _ in root.unsettled()]
        assert [commit.step for commit in saved_steps.commits(root)] == [1, 2, 3]
        assert saved_steps.chosen(root, skip_corrupt=False) == 3
        with pytest.raises(NotCommittedError, match="its save still runs"):
            saved_steps.require(root, 9)
        saved_steps.delete_step(root, 3)
        assert saved_steps.chosen(root, skip_corrupt=False) == 2
        saved_steps.pin(root, 1)
        with pytest.raises(UsageError, match="unpin"):
            saved_steps.delete_step(root, 1)
        with pytest.raises(NotCommittedError, match="step 3 is not saved"):
            saved_steps.pin(root, 3)

    # ---- as a program uses it

    def test_a_tree_is_saved_and_comes_back(self, store: Any) -> None:
        client = LocalJob(1).clients[0]
        save.on(client, store, TREE, step=5)
        back = restore.on(client, store)
        assert back["w"].tobytes() == TREE["w"].tobytes()
        assert (back["step"], back["name"]) == (3, "run")
        with pytest.raises(StepAlreadyCommittedError):
            save.on(client, store, TREE, step=5)
        assert checkpoint_info(store).leaves["w"].shape == (50, 100)

    def test_a_run_keeps_its_newest_steps_and_goes_on(self, root: Any) -> None:
        client = LocalJob(1).clients[0]
        with Checkpoints(root, keep=2, client=client) as ckpts:
            assert ckpts.resume(None, TREE)[1] == 0
            for step in range(5):
                ckpts.save(step, {**TREE, "step": step}, metrics={"loss": 1 / (1 + step)})
        with Checkpoints(root, keep=2, client=client) as ckpts:
            assert ckpts.all_steps() == (3, 4)
            assert ckpts.best_step("loss") == 4
            state, first = ckpts.resume(None, TREE)
            assert (state["step"], first) == (4, 5)
            ckpts.pin(3)
            for step in range(5, 7):
                ckpts.save(step, TREE)
            ckpts.wait()
            assert ckpts.all_steps() == (3, 5, 6)
            ckpts.unpin(3)
            ckpts.delete(5)
            assert ckpts.all_steps() == (3, 6)
            assert ckpts.info(6).step == 6
