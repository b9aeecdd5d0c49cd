"""Folders of steps that were copied, renamed or linked: the step that was saved counts."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from cli import sample_checkpoints
from shoal.checkpoint.disk import sweep
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import plan_restore, restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store.step_names import step_name
from shoal.cli.main import build
from shoal.errors import CorruptCheckpointError, NotCommittedError, UsageError
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.store_contract import Save

WORDS = r"step_000000000040: COMMIT is of step 10, and the directory is named after step 40"


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


def copy(run):
    shutil.copytree(run / step_name(10), run / step_name(40))


def move(run):
    (run / step_name(10)).rename(run / step_name(40))


def link(run):
    (run / step_name(40)).symlink_to(step_name(10))


@pytest.fixture(params=[copy, move, link])
def run(request, tmp_path):
    run = sample_checkpoints.run_of_two(tmp_path / "run")
    request.param(run)
    return run


def test_a_history_refuses_it_in_words(run, alone):
    with Checkpoints(run, client=alone) as ckpts:
        for ask in (
            ckpts.latest,
            ckpts.all_steps,
            ckpts.restore,
            lambda: ckpts.restore(40),
            lambda: ckpts.resume(None, dict),
            lambda: ckpts.pin(40),
            lambda: ckpts.save(40, {"w": 1}),
            lambda: plan_restore(ckpts.path_of(40)),
            lambda: restore.on(alone, ckpts.path_of(40)),
        ):
            with pytest.raises(CorruptCheckpointError, match=WORDS):
                ask()
        assert ckpts.latest(skip_corrupt=True) == 20
        state, first = ckpts.resume(None, dict, skip_corrupt=True)
        assert (state["step"], first) == (20, 21)


def ckpt(*arguments):
    result = CliRunner().invoke(build(["ckpt"]), ["ckpt", *map(str, arguments)])
    return result.exit_code, result.output, result.exception


@pytest.mark.parametrize("command", ["ls", "verify", "recover", "gc"])
def test_commands_that_look_at_all_say_it_of_the_one(run, command):
    code, told, _ = ckpt(command, run)
    assert code == 76
    assert "COMMIT is of step 10, and the directory is named after step 40" in told
    code, told, _ = ckpt(command, run, "--json")
    problems = [one.get("problem") or one.get("problems") for one in json.loads(told)]
    assert [bool(one) for one in problems] == [False] * (len(problems) - 1) + [True]


def test_commands_that_look_at_one_refuse_it(run):
    for arguments in (["show", run], ["diff", run / step_name(20), run]):
        _, _, error = ckpt(*arguments)
        assert isinstance(error, CorruptCheckpointError)
        assert "named after step 40" in str(error)


def test_retention_works_beside_a_misplaced_step_and_keeps_it(run, alone, caplog):
    with Checkpoints(run, keep=1, client=alone) as ckpts:
        ckpts.save(30, {"w": 1})
    assert {step_name(30), step_name(40)} <= set(os.listdir(run))
    assert ckpts.all_steps(skip_corrupt=True) == (30,)
    assert "named after step 40" in caplog.text


def test_a_run_that_comes_to_that_step_destroys_nothing_that_is_whole(run, alone):
    before = sorted(os.listdir(run / step_name(40)))
    with Checkpoints(run, client=alone) as ckpts:
        ckpts.resume(None, dict, skip_corrupt=True)
        if (run / step_name(40)).is_symlink():
            ckpts.save(40, {"w": 1})
            ckpts.wait()
            assert (ckpts.all_steps(), ckpts.restore()) == ((10, 20, 40), {"w": 1})
            return
        with pytest.raises(CorruptCheckpointError, match=WORDS):
            ckpts.save(40, {"w": 1})
        assert sorted(os.listdir(run / step_name(40))) == before
        ckpts.delete(40)
        ckpts.save(40, {"w": 1})
    assert ckpts.latest() == 40


def test_copied_steps_can_be_restored_elsewhere(tmp_path, alone):
    run = sample_checkpoints.run_of_two(tmp_path / "run")
    shutil.copytree(run / step_name(10), tmp_path / "best")
    shutil.copytree(run / step_name(10), tmp_path / "other" / step_name(10))
    for path in (tmp_path / "best", tmp_path / "other" / step_name(10)):
        assert restore.on(alone, path)["step"] == 10
    sample_checkpoints.save(run / step_name(30), sample_checkpoints.tree(30))  # it says no step
    assert Checkpoints(run, client=alone).latest() == 30


def test_a_copied_attempt_is_not_committed_under_another_step(tmp_path):
    run = tmp_path / "run"
    Save("0" * 12, step=10).prepare(LocalFolder(run / step_name(10)))
    copy(run)
    assert sweep.recover_step(LocalFolder(run / step_name(40))) is None
    assert sweep.recover_step(LocalFolder(run / step_name(10))).step == 10
    with pytest.raises(NotCommittedError):
        restore.on(LocalJob(1).clients[0], run / step_name(40))


def test_a_step_is_not_saved_as_another(tmp_path, alone):
    with pytest.raises(UsageError, match=r"step=10, and the directory is named after step 40"):
        save.on(alone, tmp_path / step_name(40), {"w": 1}, step=10)
    assert not (tmp_path / step_name(40)).exists()
