"""What users do with a history that nobody had in mind."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from checkpoint.saving.test_save_ended import Clock
from cli import sample_checkpoints
from collectives.thread_jobs import run_all
from shoal.checkpoint.coordination import lead, lease
from shoal.checkpoint.history import saver
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.errors import (
    CorruptCheckpointError,
    UnsupportedCheckpointError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime.client.in_process import LocalJob


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


@pytest.mark.parametrize("path", ["", b"", "a\0b"])
def test_checkpoints_refuses_invalid_paths(alone, path):
    with pytest.raises(UsageError, match="path"):
        Checkpoints(path, client=alone)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (UsageTypeError, {"metrics": [("loss", 1.0)]}),
        (UsageTypeError, {"user": [1, 2]}),
        (UsageError, {"metrics": {f"{number}": 1 / 3 for number in range(99)}}),
        (UsageError, {"metrics": {"loss": 10**400}}),
    ],
)
def test_invalid_user_data_and_metrics_are_refused_before_anything_is_sent(
    tmp_path, alone, kind, options
):
    ckpts = Checkpoints(tmp_path, client=alone)
    with pytest.raises(kind, match=r"save\('.*step_000000000001'\): (user|metrics)"):
        ckpts.save(1, state(1), **options)
    assert ckpts.latest() is None


@pytest.mark.parametrize(
    ("kind", "limit"), [(UsageTypeError, "x"), (UsageTypeError, True), (UsageError, -1.0)]
)
def test_a_wait_for_no_time_forgets_no_save(tmp_path, alone, kind, limit):
    ckpts = Checkpoints(tmp_path, client=alone)
    ckpts.save(0, state(0))
    with pytest.raises(kind, match="wait: timeout_s="):
        ckpts.wait(timeout_s=limit)
    with pytest.raises(kind, match="save: timeout_s="):
        ckpts.save(1, state(1), timeout_s=limit)
    ckpts.wait()
    assert ckpts.all_steps() == (0,)


def test_options_that_a_restore_does_not_have(tmp_path, alone):
    ckpts = Checkpoints(tmp_path, client=alone)
    told = r"there is no onyl=, but only, .*; did you mean 'only'\?"
    with pytest.raises(UsageTypeError, match=f"restore: {told}"):
        ckpts.restore(onyl="w")
    with pytest.raises(UsageTypeError, match=f"resume: {told}"):
        ckpts.resume(None, dict, onyl="w")
    ckpts.save(0, state(0))
    ckpts.wait()
    for wrong in ({"dtype": np.zeros(3)}, {"mode": np.zeros(3)}, {"mode": "fast"}):
        with pytest.raises(UsageError, match="is not one of"):
            ckpts.restore(**wrong)


def test_threads_that_save_at_once_save_one_after_the_other(tmp_path, alone):
    together = threading.Barrier(5)
    ckpts = Checkpoints(tmp_path, client=alone)

    def save(step):
        together.wait(60)
        ckpts.save(step, {"w": np.full(200_000, float(step))})

    threads = [threading.Thread(target=save, args=(step,), daemon=True) for step in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ckpts.close()
    assert ckpts.all_steps() == (0, 1, 2, 3, 4)
    for step in range(5):
        assert (ckpts.restore(step)["w"] == step).all()


def test_a_run_that_goes_back_saves_from_there(tmp_path, alone):
    with Checkpoints(tmp_path, every=10, client=alone) as ckpts:
        for step in range(40):
            ckpts.save(step, state(step))
        ckpts.wait()
        for step in (29, 39):
            ckpts.delete(step)
        assert ckpts.restore()["step"] == 19
        assert [step for step in range(20, 40) if ckpts.save(step, state(-step))] == [29, 39]
        ckpts.wait()
        assert ckpts.restore()["step"] == -39


def test_error_of_a_damaged_step_suggests_skip_corrupt(tmp_path, alone):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.wait()
        (tmp_path / "step_000000000001" / "COMMIT").write_bytes(b"no")
        with pytest.raises(CorruptCheckpointError, match="skip_corrupt=True"):
            ckpts.resume(None, state(0))


def test_the_lease_is_a_setting_and_a_save_that_runs_fits_it(tmp_path, alone, monkeypatch):
    monkeypatch.setenv("SHOAL_SAVE_LEASE_S", "10")
    assert Checkpoints(tmp_path, client=alone)._saver._lease_s == 10.0
    seen, begin = [], lease.ProgressReporter.__init__

    def begins(self, *arguments, **options):
        begin(self, *arguments, **options)
        seen.append(self._every_s)

    monkeypatch.setattr(lease.ProgressReporter, "__init__", begins)
    save.on(alone, tmp_path / "one", state(1))
    assert seen == [2.0]
    monkeypatch.setenv("SHOAL_SAVE_LEASE_S", "soon")
    for begin_with in (lambda: Checkpoints(tmp_path), lambda: save.on(alone, "two", state(1))):
        with pytest.raises(UsageError, match="SHOAL_SAVE_LEASE_S"):
            begin_with()


def test_long_restore_logs_its_progress(tmp_path, monkeypatch, caplog):
    save.on(LocalJob(1).clients[0], tmp_path / "one", {"w": np.ones(1_000_000)})
    begin = lease.ProgressReporter.__init__

    def begins(self, *arguments, **options):
        begin(self, *arguments, **options)
        self._is_over = Clock(1)

    monkeypatch.setattr(lease.ProgressReporter, "__init__", begins)
    job = LocalJob(2)
    with caplog.at_level(logging.INFO, "shoal"):
        run_all(job, lambda client: restore.on(client, tmp_path / "one"))
    told = [record.getMessage() for record in caplog.records if "restoring" in record.message]
    assert len(told) == 2
    assert f"restoring {tmp_path / 'one'}: " in told[0]
    assert told[0].endswith(" MB/s")


def test_newest_save_is_kept_after_going_back_to_an_earlier_step(tmp_path, alone, caplog):
    with Checkpoints(tmp_path, keep=2, client=alone) as ckpts:
        for step in (1, 2, 8, 9):
            ckpts.save(step, state(step))
        ckpts.wait()
        assert "would resume the later" not in caplog.text
        ckpts.save(5, state(5))
        ckpts.wait()
        assert ckpts.all_steps() == (5, 8, 9)
        assert "step 5 is saved, but a run would resume the later step 9" in caplog.text
        ckpts.save(6, state(6))
        ckpts.wait()
        assert ckpts.all_steps() == (6, 8, 9)


def test_a_step_of_a_newer_shoal_stays_and_stops_nothing(tmp_path, alone):
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.wait()
        sample_checkpoints.from_the_future(tmp_path / "step_000000000001")
        for step in (2, 3):
            ckpts.save(step, state(step))
        ckpts.wait()
        assert ckpts.latest() == 3
        assert ckpts.path_of(1).endswith(min(path.name for path in tmp_path.iterdir()))
        with pytest.raises(UnsupportedCheckpointError):
            ckpts.all_steps(skip_corrupt=True)


def test_work_after_a_save_has_the_call_site_of_the_save(tmp_path, alone, monkeypatch):
    sites = []
    result_of_lead = lead.run_on_lead

    def says(*arguments, **options):
        sites.append(options["site"])
        return result_of_lead(*arguments, **options)

    monkeypatch.setattr(saver, "run_on_lead", says)
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(1, state(1))
    assert len(sites) == 1
    assert "test_history_misused.py" in sites[0]


def test_run_directory_and_checkpoint_directory_are_not_confused(tmp_path):
    def run(client):
        with Checkpoints(tmp_path / "run", client=client) as ckpts:
            ckpts.save(1, state(1))
        found = []
        for wrong in (
            lambda: Checkpoints(ckpts.path_of(1), client=client),
            lambda: save.on(client, tmp_path / "run", state(2)),
        ):
            with pytest.raises(UsageError, match="history of") as told:
                wrong()
            found.append(type(told.value))
        return found

    assert run_all(LocalJob(2), run) == [[UsageError] * 2] * 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_000000000001"]
