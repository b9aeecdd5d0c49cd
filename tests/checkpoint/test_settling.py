"""When the others can be asked no more: what the storage says, and what is not believed of it."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from checkpoint.kept import files_of, in_job, kept, messages
from shoal.checkpoint.disk import attempts
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.save import save_with
from shoal.errors import StorageError
from shoal.runtime import fault_points
from shoal.runtime.coordinator_local import LocalJob

TREE = {"w": np.arange(1 << 10, dtype=np.float32), "n": 1}


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
    errors = in_job(2, lambda one: save_with(one, path, TREE), job)
    assert StorageError in {type(error) for error in errors}, messages(errors)
    if not is_lead_lost:
        assert {type(error) for error in errors} == {StorageError}
        assert {error.errno for error in errors} == {errno.EIO}
    assert any("a crash of this host may undo that" in str(error) for error in errors)
    if is_lead_lost:  # the other may have come to its end
        return
    assert "PENDING" in files_of(path)  # were COMMIT lost now, it could be committed again
    (path / "COMMIT").unlink()
    attempts.recover(LocalFolder(path))
    assert set(kept(path)) == set(TREE)
