"""Steps that are links: what they lead to belongs to whoever keeps it there."""

from __future__ import annotations

import os

import numpy as np
import pytest
from typer.testing import CliRunner

from cli import sample_checkpoints
from shoal.checkpoint.blocks.reader import verify_files
from shoal.checkpoint.disk import committing, step_folder
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.store.step_names import step_name
from shoal.cli.main import build
from shoal.errors import UsageError
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.store_contract import Save


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


@pytest.fixture
def archive(tmp_path):
    """An archive of two steps, and a run whose steps are links to it."""
    archive = sample_checkpoints.run_of_two(tmp_path / "archive")
    (tmp_path / "run").mkdir()
    for step in (10, 20):
        (tmp_path / "run" / step_name(step)).symlink_to(archive / step_name(step))
    return archive


def whole(archive):
    for step in (10, 20):
        assert verify_files(open_checkpoint(LocalStore(archive / step_name(step)))) == []
    return True


def test_retention_removes_the_link_alone(archive, tmp_path, alone):
    run = tmp_path / "run"
    with Checkpoints(run, keep=1, client=alone) as ckpts:
        assert ckpts.restore()["step"] == 20
        ckpts.save(30, {"w": np.ones(3)})
    assert os.listdir(run) == [step_name(30)]
    assert whole(archive)


def test_delete_removes_the_link_alone_and_a_pin_holds_it(archive, tmp_path, alone):
    run = tmp_path / "run"
    (archive / step_name(20) / "KEEP").touch()
    with Checkpoints(run, client=alone) as ckpts:
        with pytest.raises(UsageError, match="pinned"):
            ckpts.delete(20)
        ckpts.delete(10)
        assert ckpts.all_steps() == (20,)
    assert os.listdir(run) == [step_name(20)]
    assert whole(archive)


@pytest.mark.parametrize("target", [10, 20])
def test_deleting_a_damaged_link_keeps_its_target(archive, tmp_path, alone, target):
    (tmp_path / "run" / step_name(40)).symlink_to(archive / step_name(target))
    if target == 20:
        (archive / step_name(20) / "COMMIT").write_text("{}")
    before = sorted(path.name for path in (archive / step_name(target)).iterdir())
    Checkpoints(tmp_path / "run", client=alone).delete(40)
    assert not (tmp_path / "run" / step_name(40)).is_symlink()
    assert sorted(path.name for path in (archive / step_name(target)).iterdir()) == before


def test_attempts_behind_a_link_are_not_ended(archive, tmp_path, alone):
    run = tmp_path / "run"
    attempt = sample_checkpoints.begun(archive, 25)
    (run / step_name(25)).symlink_to(archive / step_name(25))
    with Checkpoints(run, keep=1, lease_s=1e-9, client=alone) as ckpts:
        ckpts.save(30, {"w": np.ones(3)})
    told = CliRunner().invoke(build(["ckpt"]), ["ckpt", "gc", str(run), "--older", "0"]).output
    assert "step 25: is a link: clean up its target instead" in told
    assert step_folder.see(LocalFolder(archive / step_name(25)), attempt)
    arguments = ["ckpt", "gc", str(run / step_name(25)), "--older", "0"]  # this very folder
    assert "2 files" in CliRunner().invoke(build(["ckpt"]), arguments).output


def test_an_attempt_that_ends_behind_a_link_leaves_the_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    folder = LocalFolder(tmp_path / "here")
    one = Save("1" * 12)
    one.begin(folder)
    assert committing.abandon(folder, one.attempt) is None
    assert (tmp_path / "here").is_symlink()
    assert list((tmp_path / "there").iterdir()) == []
