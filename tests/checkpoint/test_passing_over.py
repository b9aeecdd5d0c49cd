"""Damaged steps are passed over where that is asked for, replaced, and deleted."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from cli.sample_checkpoints import flip
from collectives.thread_jobs import run_all
from shoal.checkpoint.disk import committing, sweep
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.store.step_names import step_name
from shoal.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    StepAlreadyCommittedError,
    UsageError,
)
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.system import fault_points

KINDS = ["COMMIT", "manifest-*", "index-*", "data-*"]


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


def run_of_three(root, client):
    with Checkpoints(root, client=client) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, state(step))
    return ckpts


def harm(root, step, kind, how="flip"):
    (path,) = (root / step_name(step)).glob(kind)
    if how == "flip":
        flip(path, 20 if kind == "COMMIT" else -1)
    else:
        path.unlink()
    return path


@pytest.mark.parametrize("how", ["flip", "remove"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_step_is_passed_over_on_all_with_a_warning(tmp_path, kind, how, alone, caplog):
    run_of_three(tmp_path, alone)
    path = harm(tmp_path, 3, kind, how)

    def resume(client):
        ckpts = Checkpoints(tmp_path, client=client)
        if (kind, how) != ("COMMIT", "remove"):  # else the step is not committed at all
            for ask in (ckpts.restore, lambda: ckpts.resume(None, dict)):
                with pytest.raises(CorruptCheckpointError, match="skip_corrupt=True"):
                    ask()
            with pytest.raises(CorruptCheckpointError):
                ckpts.restore(3, skip_corrupt=True)  # that step was asked for
        found = ckpts.resume(None, dict, skip_corrupt=True)
        return found[0]["step"], found[1], ckpts.restore(skip_corrupt=True)["step"]

    with caplog.at_level(logging.WARNING, "shoal"):
        assert run_all(LocalJob(2), resume) == [(2, 3, 2)] * 2
    told = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    if (kind, how) == ("COMMIT", "remove"):
        assert not told
    else:
        assert len(told) == 4  # by both processes, when they resume and when they restore
        assert all("step 3 is damaged" in words and path.name in words for words in told)


def test_several_are_passed_over_and_none_may_be_left(tmp_path, alone):
    ckpts = run_of_three(tmp_path, alone)
    for step, kind in ((3, "data-*"), (2, "COMMIT")):
        harm(tmp_path, step, kind)
    assert ckpts.restore(skip_corrupt=True)["step"] == 1
    harm(tmp_path, 1, "index-*")
    for ask in (ckpts.restore, lambda **options: ckpts.resume(None, {"w": 0}, **options)):
        with pytest.raises(NotCommittedError, match="1, 2, 3 are damaged"):
            ask(skip_corrupt=True)
    for step in (1, 2, 3):
        ckpts.delete(step)
    assert ckpts.resume(None, {"w": 0}, skip_corrupt=True) == ({"w": 0}, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_passed_over_a_step_comes_to_it_again_and_replaces_it(tmp_path, kind, caplog):
    run_of_three(tmp_path, LocalJob(1).clients[0])
    harm(tmp_path, 3, kind)

    def go_on(client):
        with Checkpoints(tmp_path, keep=2, client=client) as ckpts:
            _, first = ckpts.resume(None, dict, skip_corrupt=True)
            for step in range(first, 6):
                ckpts.save(step, state(10 * step))
        return first, ckpts.all_steps(), ckpts.restore()["step"]

    assert run_all(LocalJob(2), go_on) == [(3, (4, 5), 50)] * 2
    assert "save(3): that step was damaged, and is replaced" in caplog.text


def test_a_step_that_was_repaired_and_restored_counts_again(tmp_path, alone):
    run_of_three(tmp_path, alone)
    path = harm(tmp_path, 3, "data-*")
    with Checkpoints(tmp_path, keep=2, client=alone) as ckpts:
        assert ckpts.resume(None, dict, skip_corrupt=True)[1] == 3
        flip(path)  # the bit is back
        assert ckpts.restore(3)["step"] == 3
        with pytest.raises(StepAlreadyCommittedError):
            ckpts.save(3, state(30))


def test_a_damaged_step_that_others_deleted_is_saved_anew(tmp_path, alone):
    run_of_three(tmp_path, alone)
    harm(tmp_path, 3, "data-*")
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.resume(None, dict, skip_corrupt=True)
        Checkpoints(tmp_path, client=alone).delete(3)
        ckpts.save(3, state(30))
    assert ckpts.restore()["step"] == 30


def test_a_damaged_step_takes_no_whole_one_s_place(tmp_path, alone):
    run_of_three(tmp_path, alone)
    harm(tmp_path, 3, "data-*")
    with Checkpoints(tmp_path, keep=2, client=alone) as ckpts:
        ckpts.resume(None, dict, skip_corrupt=True)
        ckpts.save(7, state(7))
        ckpts.wait()
        assert ckpts.all_steps() == (2, 3, 7), "3 does not count, and nobody deletes it"
        ckpts.delete(3)
        assert ckpts.all_steps() == (2, 7)


@pytest.mark.parametrize("how", ["flip", "remove"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_step_can_be_deleted(tmp_path, kind, how, alone):
    ckpts = run_of_three(tmp_path, alone)
    harm(tmp_path, 2, kind, how)
    if (kind, how) == ("COMMIT", "remove"):
        with pytest.raises(NotCommittedError):
            ckpts.delete(2)
        return
    ckpts.delete(2)
    assert not (tmp_path / step_name(2)).exists()
    assert ckpts.all_steps() == (1, 3)


def test_a_pinned_one_stays_damaged_or_not(tmp_path, alone):
    ckpts = run_of_three(tmp_path, alone)
    ckpts.pin(2)
    harm(tmp_path, 2, "COMMIT")
    with pytest.raises(UsageError, match="pinned"):
        ckpts.delete(2)
    assert len(list((tmp_path / step_name(2)).iterdir())) == 5


@pytest.mark.parametrize("point", ["delete.marked", "delete.half"])
def test_interrupted_deletion_of_a_damaged_step_is_finished_later(
    tmp_path, point, alone, monkeypatch
):
    ckpts = run_of_three(tmp_path, alone)
    harm(tmp_path, 2, "COMMIT")
    monkeypatch.setenv("SHOAL_FAULTS", f"{point}:raise")
    with pytest.raises(fault_points.InjectedError):
        ckpts.delete(2)
    monkeypatch.delenv("SHOAL_FAULTS")
    assert ckpts.all_steps() == (1, 3)
    assert Checkpoints(tmp_path, client=alone).all_steps() == (1, 3)
    assert not (tmp_path / step_name(2)).exists()


def test_live_attempt_survives_the_deletion_of_a_damaged_commit(tmp_path):
    from shoal.testing.store_contract import Save

    folder = LocalFolder(tmp_path / step_name(5))
    living = Save("1" * 12)
    living.begin(folder)
    other = Save("2" * 12).prepare(folder)
    committing.commit(folder, other.attempt)
    (tmp_path / step_name(5) / "COMMIT").write_text("{}")
    sweep.delete_damaged(folder)
    names = folder.names()
    assert names
    assert all("1" * 12 in name for name in names)
