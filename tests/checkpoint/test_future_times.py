"""Attempts and steps with times in the future: clocks were set, or files copied from elsewhere."""

from __future__ import annotations

import json
import logging
import os
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from cli import sample_checkpoints
from shoal.checkpoint.disk import step_folder, sweep
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.store.step_names import step_name
from shoal.cli.main import build
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.store_contract import Save

DAY_S = 86_400.0


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


@pytest.fixture
def run(tmp_path):
    return sample_checkpoints.run_of_two(tmp_path / "run")


def set_ahead(run, attempt, step=25, ahead_s=DAY_S):
    path = run / step_name(step) / f"PENDING-{attempt}"
    os.utime(path, (time.time() + ahead_s,) * 2)
    return path


def ckpt(*arguments):
    return CliRunner().invoke(build(["ckpt"]), ["ckpt", *map(str, arguments)]).output


def test_ls_says_that_the_time_is_to_come(run):
    attempt = sample_checkpoints.begun(run)
    set_ahead(run, attempt)
    told = ckpt("ls", run)
    assert (
        f"attempt {attempt} by h7 (pid 123), its timestamp is 24.0 h in the future, waits"
    ) in told
    assert "0 us" not in told
    (begun,) = json.loads(ckpt("ls", run, "--json"))[2]["attempts"]
    assert begun["idle_s"] is None
    assert begun["ahead_s"] == pytest.approx(DAY_S, abs=60)
    set_ahead(run, attempt, ahead_s=-10)
    (begun,) = json.loads(ckpt("ls", run, "--json"))[2]["attempts"]
    assert begun["idle_s"] == pytest.approx(10, abs=9)
    assert begun["ahead_s"] is None


def test_step_saved_in_the_future_is_marked_as_ahead(tmp_path, monkeypatch):
    later = time.time_ns() + int(3 * 3600e9)
    with monkeypatch.context() as patched:
        patched.setattr("shoal.checkpoint.saving.request.time.time_ns", lambda: later)
        sample_checkpoints.save(tmp_path / "one", {"w": np.ones(3)})
    assert "3.0 h ahead" in ckpt("ls", tmp_path / "one")


def test_an_attempt_of_the_future_ends_a_lease_after_it_was_seen(run, alone, caplog):
    attempt = sample_checkpoints.begun(run)
    path = set_ahead(run, attempt)
    with caplog.at_level(logging.WARNING, "shoal"):
        Checkpoints(run, lease_s=5.0, client=alone)
    assert path.exists(), "it may still be written"
    assert f"attempt {attempt}: its time is 86" in caplog.text
    assert abs(path.stat().st_mtime - time.time()) < 60
    os.utime(path, (time.time() - 6,) * 2)  # six seconds later
    Checkpoints(run, lease_s=5.0, client=alone)
    assert not path.parent.exists()


def test_gc_reports_attempts_with_future_timestamps(run):
    attempt = sample_checkpoints.begun(run)
    path = set_ahead(run, attempt)
    told = ckpt("gc", run, "--dry-run")
    assert f"attempt {attempt} is spared: its timestamp is 24.0 h in the future, and" in told
    assert path.stat().st_mtime > time.time() + 3600, "a dry run changes nothing"
    assert ckpt("gc", run) == told
    assert path.stat().st_mtime < time.time() + 60
    set_ahead(run, attempt)
    assert "2 files" in ckpt("gc", run, "--older", 0)
    assert not path.parent.exists()


def test_complete_attempt_with_a_past_timestamp_is_preferred(tmp_path):
    folder = LocalFolder(tmp_path / step_name(5))
    for number in (1, 2):
        Save(f"{number}" * 12, value=number).prepare(folder)
    set_ahead(tmp_path, "1" * 12, step=5)
    set_ahead(tmp_path, "2" * 12, step=5, ahead_s=-600)
    assert sweep.recover_step(folder).attempt == "2" * 12


def test_clocks_that_differ_by_little_are_no_matter(run):
    attempt = sample_checkpoints.begun(run)
    set_ahead(run, attempt, ahead_s=0.3)
    (one,) = step_folder.folder_state(LocalFolder(run / step_name(25))).attempts
    assert not one.is_ahead
    assert one.idle_s == pytest.approx(0, abs=0.3)
