"""What every store promises, on each store."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import threading
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

import shoal
from checkpoint.bucket import servers
from checkpoint.file_level_saves import OWNER, Save, names_of, value_of
from checkpoint.forgetful_file_system import Disk
from shoal import Bucket
from shoal.checkpoint.at import store_at
from shoal.checkpoint.bucket.object_store import ObjectStore
from shoal.checkpoint.bucket.objects import MemoryObjects
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    SaveAbortedError,
    StepAlreadyCommittedError,
    UsageError,
)
from shoal.runtime.client.in_process import LocalJob

FIRST, SECOND = Save("00000000000a", value=7), Save("00000000000b", value=8)
PATIENCE_S = 60
TRIES = 20


def in_memory_disk(clock, _):
    disk = Disk()
    clock.disk = disk
    return LocalStore(disk.folder("/run"))


def on_disk(_, tmp_path):
    return LocalStore(tmp_path / "run")


def in_memory_bucket(clock, _):
    return ObjectStore(MemoryObjects(clock=lambda: clock.now))


def on_moto(_, tmp_path):
    name = f"bucket-{secrets.token_hex(6)}"
    servers.make_bucket(moto(), name)
    return store_at(Bucket(f"s3://{name}/some/run", **servers.options(moto())), "")


@cache
def moto():
    """Return the address of one server for all tests here."""
    server = servers.moto()
    atexit.register(server.__exit__, None, None, None)
    return server.__enter__()


STORES = {
    "disk": on_disk,
    "disk in memory": in_memory_disk,
    "bucket in memory": in_memory_bucket,
    "moto": on_moto,
}


class Clock:
    """The clock of a store."""

    def __init__(self):
        self.now, self.disk = 1000.0, SimpleNamespace(now=0.0)

    def advance(self, seconds):
        self.now += seconds
        self.disk.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=STORES)
def root(request, clock, tmp_path):
    return STORES[request.param](clock, tmp_path)


@pytest.fixture
def store(root):
    return root.step(5)


@pytest.fixture
def has_clock(request):
    """Skip stores whose clock is the system's."""
    if "in memory" not in request.node.name:
        pytest.skip("its clock is the system's")


def test_nothing_is_there(root, store):
    assert store.committed() is store.standing() is None
    assert (store.names(), root.steps(), store.is_pinned, store.is_link) == ([], [], False, False)
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


def test_an_attempt_from_its_beginning_to_its_end(store):
    FIRST.begin(store)
    (attempt,) = store.state().attempts
    assert (attempt.id, attempt.is_live, attempt.is_complete) == (FIRST.attempt, True, False)
    assert (attempt.owner, attempt.idle_s) == (OWNER, pytest.approx(0, abs=30))
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


def test_a_part_of_a_file_is_read(store):
    commit = FIRST.save(store)
    (name, *_) = [one for one in store.names() if "data" in one]
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


def test_what_is_saved_is_saved(store):
    FIRST.save(store)
    for act in (lambda: SECOND.begin(store), lambda: store.commit(SECOND.attempt)):
        with pytest.raises(StepAlreadyCommittedError, match="nothing is overwritten") as caught:
            act()
        assert (caught.value.attempt, caught.value.path) == (FIRST.attempt, store.path)
    assert store.abandon(FIRST.attempt) == store.committed()
    assert store.abandon(SECOND.attempt) is None
    assert store.recover().attempt == FIRST.attempt
    assert store.collect_garbage(idle_s=0) == []
    assert store.delete(SECOND.attempt)
    assert value_of(store, store.committed()) == 7


@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_attempt_that_was_ended_is_never_committed(store, written):
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


def test_a_deleted_step_is_saved_again_and_its_writer_stays_out(store):
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


def test_a_pinned_step_stays_until_it_is_unpinned(store):
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


def test_a_complete_attempt_is_recovered_and_no_other(store):
    FIRST.begin(store)
    assert store.recover() is None
    SECOND.prepare(store)
    assert store.recover().attempt == SECOND.attempt
    assert value_of(store, store.committed()) == 8
    assert [one.id for one in store.state().attempts] == [FIRST.attempt]
    store.collect_garbage(idle_s=0)
    assert store.names() == names_of(store, store.committed())


def test_garbage_is_what_was_not_refreshed(store, clock, has_clock):
    FIRST.begin(store)
    clock.advance(100)
    SECOND.begin(store)
    assert {one.id: one.idle_s for one in store.state().attempts} == {
        FIRST.attempt: 100.0,
        SECOND.attempt: 0.0,
    }
    clock.advance(50)
    store.refresh(FIRST.attempt)
    store.refresh("00000000000c")  # of which nothing is there
    assert {name[:7] for name in store.collect_garbage(idle_s=50)} == {"PENDING", "manifes"}
    assert [one.id for one in store.state().attempts] == [FIRST.attempt]


def test_files_of_others_are_spared(store):
    FIRST.save(store)
    store.leave("notes.txt")
    assert store.state().others == ("notes.txt",)
    store.collect_garbage(idle_s=0)
    assert "notes.txt" in store.names()
    store.remove("notes.txt")
    store.remove("notes.txt")
    assert "notes.txt" not in store.names()


def test_of_many_threads_exactly_one_commits(root):
    saves = [Save(f"00000000000{n}", value=n, step=None) for n in range(1, 5)]
    for turn in range(TRIES):
        store, start = root.step(turn), threading.Barrier(len(saves))
        outcomes = {}

        def run(save, store=store, start=start, outcomes=outcomes):
            start.wait(PATIENCE_S)
            try:
                outcomes[save.attempt] = save.save(store).attempt
            except (StepAlreadyCommittedError, SaveAbortedError) as error:
                outcomes[save.attempt] = error

        threads = [threading.Thread(target=run, args=(save,)) for save in saves]
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


def test_all_processes_of_a_job_may_commit_at_once(root):
    for turn in range(TRIES):
        store, start, commits = root.step(turn), threading.Barrier(4), []
        one = Save(FIRST.attempt, step=None).prepare(store)

        def run(number, store=store, start=start, commits=commits, one=one):
            start.wait(PATIENCE_S)
            commits.append(store.recover() if number else store.commit(one.attempt))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert commits == [store.committed()] * 4


def test_a_step_in_the_place_of_another(root):
    Save(FIRST.attempt, step=4).prepare(root.step(5))
    with pytest.raises(CorruptCheckpointError, match="is of step 4"):
        root.step(5).commit(FIRST.attempt)


def test_the_steps_of_a_run(root):
    for number in (3, 1, 2):
        Save(f"00000000000{number}", step=number).save(root.step(number))
    Save("00000000000d", step=9).begin(root.step(9))
    assert [step for step, _ in root.steps()] == [1, 2, 3, 9]
    assert [one.step for one in saved_steps.commits(root)] == [1, 2, 3]
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


TREE = {"w": np.arange(5000.0).reshape(50, 100), "step": 3, "name": "run"}


def test_a_tree_is_saved_and_comes_back(store):
    one = LocalJob(1).coordinators[0]
    save.on(one, store, TREE, step=5)
    back = restore.on(one, store)
    assert back["w"].tobytes() == TREE["w"].tobytes()
    assert (back["step"], back["name"]) == (3, "run")
    with pytest.raises(StepAlreadyCommittedError):
        save.on(one, store, TREE, step=5)
    assert shoal.checkpoint_info(store).leaves["w"].shape == (50, 100)


def test_a_run_keeps_its_newest_steps_and_goes_on(root):
    one = LocalJob(1).coordinators[0]
    with Checkpoints(root, keep=2, coordinator=one) as ckpts:
        assert ckpts.resume(None, TREE)[1] == 0
        for step in range(5):
            ckpts.save(step, {**TREE, "step": step}, metrics={"loss": 1 / (1 + step)})
    with Checkpoints(root, keep=2, coordinator=one) as ckpts:
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
