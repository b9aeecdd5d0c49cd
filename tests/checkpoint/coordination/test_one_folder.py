"""Paths that differ and lead to one folder are as good as one path; others are refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

from collectives.thread_jobs import run_all
from shoal.checkpoint.coordination import one_folder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.errors import DivergenceError
from shoal.runtime.client.in_process import LocalJob


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


@pytest.fixture
def names(tmp_path):
    """Two names for one folder."""
    (tmp_path / "shared").mkdir()
    for name in ("l0", "l1"):
        (tmp_path / name).symlink_to("shared")
    return [tmp_path / "l0" / "c", tmp_path / "l1" / "c"]


def each(function):
    return run_all(LocalJob(2), function)


def test_checkpoint_can_have_a_different_path_on_each_process(names):
    def run(client):
        path = names[client.process]
        save.on(client, path, state(3), step=3)
        return restore.on(client, path)["step"]

    assert each(run) == [3, 3]


@pytest.mark.parametrize("recover", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_run_directory_can_have_a_different_path_on_each_process(names, asynchronous, recover):
    def run(client):
        options = {"asynchronous": asynchronous, "recover": recover, "client": client}
        with Checkpoints(names[client.process], keep=2, **options) as ckpts:
            _, first = ckpts.resume(None, state(-1))
            for step in range(first, first + 4):
                ckpts.save(step, state(step))
            ckpts.wait()
            ckpts.delete(step)
            return first, ckpts.all_steps(), ckpts.restore()["step"]

    assert each(run) == [(0, (2,), 2)] * 2
    assert each(run) == [(3, (5,), 5)] * 2
    assert os.listdir(names[0]) == ["step_000000000005"], "nothing else is left"


def refused(results, paths):
    for error in results:
        assert type(error) is DivergenceError, error
        assert error.sides == {str(path): (p,) for p, path in enumerate(paths)}
        assert "lead to different directories" in str(error)


@pytest.mark.parametrize("recover", [True, False])
def test_paths_to_different_folders_are_refused(tmp_path, recover):
    paths = [tmp_path / "0", tmp_path / "1"]
    if not recover:  # nothing is written: what is there is compared
        paths[1].mkdir()
        (paths[1] / "step_000000000001").mkdir()
    refused(
        each(lambda client: Checkpoints(paths[client.process], recover=recover, client=client)),
        paths,
    )
    paths = [tmp_path / "a", tmp_path / "b"]
    refused(each(lambda client: save.on(client, paths[client.process], state(1))), paths)
    assert not any(path.exists() for path in paths), "what was begun is gone"


def test_contents_are_compared_where_the_folder_is_read_only(names, monkeypatch):
    each(
        lambda client: save.on(
            client, names[client.process] / "step_000000000001", state(1), step=1
        )
    )
    monkeypatch.setattr(one_folder, "_leave_mark", lambda *_: None)  # root may write anywhere
    assert each(lambda client: Checkpoints(names[client.process], client=client).latest()) == [1, 1]


def test_restore_names_the_paths_that_lead_elsewhere(tmp_path):
    paths = [tmp_path / "0", tmp_path / "1"]
    alone = LocalJob(1).clients[0]
    save.on(alone, paths[0], state(1))

    def run(client):
        return restore.on(client, paths[client.process])

    refused(each(run), paths)
    save.on(alone, paths[1], state(2))
    for error in each(run):
        assert type(error) is DivergenceError
        assert "see different checkpoints" in str(error)
        assert {text.rpartition(" at ")[2] for text in error.sides} == {str(p) for p in paths}
