"""When the others can be asked no more: what the storage says, and what is not believed of it."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from checkpoint.saved_contents import files_of, in_job, kept, messages
from shoal.checkpoint.disk import committing, sweep
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.saving import save_members
from shoal.checkpoint.saving.save import save, save_request
from shoal.checkpoint.saving.save_members import MeetingFailed, SaveAttempt, SaveMembers
from shoal.errors import ProcessLostError, SaveAbortedError, StorageError
from shoal.runtime.client.group import group_in
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.system import fault_points
from shoal.testing.store_contract import Save, value_of

TREE = {"w": np.arange(1 << 10, dtype=np.float32), "n": 1}


def attempt_of(client, request, name):
    """Return the attempt that all processes have agreed on."""
    members = SaveMembers(client, request, group_in(client, "save", None))
    return SaveAttempt(members, name, replaces="", paths={}, lane="main")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model"


@pytest.mark.parametrize("is_lead_lost", [False, True])
def test_a_commit_that_cannot_be_made_durable_is_no_success(path, monkeypatch, is_lead_lost):
    """An fsync after one that failed succeeds, whatever was lost: it says nothing."""
    job = LocalJob(2)
    sync, failed, parted = LocalFolder.sync, [], []

    def fails_once(folder):
        if (path / "COMMIT").exists() and not failed:
            failed.append(1)
            raise StorageError("cannot fsync", path=folder.path, errno=errno.EIO)
        sync(folder)

    def reach(name, where=None):
        if name == "save.parted":
            parted.append(where)
            if is_lead_lost and len(parted) == 2:
                job.lose(0)

    monkeypatch.setattr(LocalFolder, "sync", fails_once)
    monkeypatch.setattr(fault_points, "reach", reach)
    errors = in_job(2, lambda client: save.on(client, path, TREE), job)
    assert StorageError in {type(error) for error in errors}, messages(errors)
    if not is_lead_lost:
        assert {type(error) for error in errors} == {StorageError}
        assert {error.errno for error in errors} == {errno.EIO}
    assert any("a crash of this host may undo that" in str(error) for error in errors)
    if is_lead_lost:  # the other may have come to its end
        return
    assert "PENDING" in files_of(path)  # were COMMIT lost now, it could be committed again
    (path / "COMMIT").unlink()
    sweep.recover_step(LocalFolder(path))
    assert set(kept(path)) == set(TREE)


@pytest.mark.parametrize("where", ["sync", "rewrite"])
def test_an_fsync_that_failed_before_another_process_committed_is_no_success(
    path, monkeypatch, where
):
    """Two processes commit at the same time, and the fsync of one fails before the link."""
    one, folder = Save("00000000000a", 7), LocalFolder(path)
    real, others = getattr(LocalFolder, where), []

    def fails(there, *_):
        monkeypatch.setattr(LocalFolder, where, real)
        others.append(committing.commit(folder, one.attempt))  # as another process does
        raise StorageError("cannot fsync", path=there.path, errno=errno.EIO)

    def fail_from_here_on(name, _):
        if name == "save.assemble":
            monkeypatch.setattr(fault_points, "reach", lambda *_: None)
            monkeypatch.setattr(LocalFolder, where, fails)

    one.prepare(folder)
    monkeypatch.setattr(fault_points, "reach", fail_from_here_on)
    with pytest.raises(StorageError, match="a crash of this host may undo that") as caught:
        committing.commit(folder, one.attempt)
    assert caught.value.errno == errno.EIO
    assert value_of(folder, others[0]) == 7


def test_failure_before_the_commit_of_another_process_leaves_the_commit(path):
    """What a process met with in committing stays its answer when another one's commit stands."""
    one, folder = Save("00000000000a", 7), LocalFolder(path)
    commit = one.save(folder)
    request = save_request(path, step=5, timeout_s=1.0)
    attempt = attempt_of(LocalJob(2).clients[1], request, one.attempt)
    met = StorageError("cannot fsync", path=str(path), errno=errno.EIO)
    with pytest.raises(StorageError, match="a crash of this host may undo that"):
        save_members.ended_by(attempt, met)
    assert save_members.ended_by(attempt, OSError("another one")).commit == commit
    assert value_of(folder, commit) == 7


def test_a_storage_that_fails_while_settling_leaves_no_error_of_its_own(path, monkeypatch):
    job = LocalJob(2)
    save.on(LocalJob(1).clients[0], path.parent / "other", TREE)
    request = save_request(path, step=5, timeout_s=1.0)
    attempt = attempt_of(job.clients[1], request, "00000000000a")

    def fails(self, attempt):
        raise StorageError("503 Slow Down", path=str(path))

    for name in ("is_open", "abandon"):
        monkeypatch.setattr(LocalStore, name, fails)
    cause = ProcessLostError("process 0 is lost", lost={0: "killed"})
    words = "whether it was committed is not known, since the storage fails .503 Slow Down"
    with pytest.raises(SaveAbortedError, match=words):
        save_members.settle(attempt, MeetingFailed("commit", cause, None), has_part=True)


def test_an_fsync_that_failed_before_a_process_was_lost_is_not_tried_again(path):
    """The lead's fsync after the link failed, and the rendezvous that would say so fails, too."""
    one, folder = Save("00000000000a", 7), LocalFolder(path)
    one.save(folder)
    request = save_request(path, step=5, timeout_s=1.0)
    attempt = attempt_of(LocalJob(2).clients[0], request, one.attempt)
    met = StorageError("cannot fsync", path=str(path), errno=errno.EIO)
    failed = MeetingFailed("commit", ProcessLostError("gone", lost={1: "killed"}), met)
    with pytest.raises(StorageError, match="a crash of this host may undo that"):
        save_members.settle(attempt, failed, has_part=True)


def test_a_wait_in_a_save_is_shown_as_save(path, monkeypatch):
    """The phase and the lane of its own are compared, and not shown."""
    client, points = LocalJob(1).clients[0], []
    arrive = client.arrive

    def recorded(point, *given, **options):
        points.append(point)
        return arrive(point, *given, **options)

    monkeypatch.setattr(client, "arrive", recorded)
    save.on(client, path, TREE)
    assert {point.place.partition(" (")[0] for point in points} == {"save"}
    assert {point.call for point in points} == {"save"}
    assert len({point.fingerprint for point in points}) > 3
