"""A step that is still being written: this history waits for it, others say that its save runs."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import shoal
from cli import sample_checkpoints
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.store.step_names import step_name
from shoal.errors import DeadlineError, NotCommittedError, SaveAbortedError, ShoalError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.progress import Progress
from shoal.runtime.system import fault_points


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


class Held:
    """Saves stop before their data are written, until `go`; then they go on, or fail."""

    def __init__(self, monkeypatch):
        self.is_there, self.go, self.error = threading.Event(), threading.Event(), None
        reach = fault_points.reach

        def stopping(point, process=None):
            if point == "save.write":
                self.is_there.set()
                assert self.go.wait(PATIENCE_S)
                if self.error is not None:
                    raise self.error
            reach(point, process)

        monkeypatch.setattr(fault_points, "reach", stopping)


@pytest.fixture
def held(monkeypatch):
    one = Held(monkeypatch)
    yield one
    one.go.set()


@pytest.fixture
def released(held, monkeypatch):
    """The save goes on once the program waits for it, and not before."""
    begin_wait = Progress.begin_wait

    def waiting(progress, point, now):
        begin_wait(progress, point, now)
        if point.name.startswith("the end of the save"):
            held.go.set()

    monkeypatch.setattr(Progress, "begin_wait", waiting)
    return held


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


CALLS = {
    "pin": lambda ckpts: ckpts.pin(7) or 7,
    "info": lambda ckpts: ckpts.info(7).step,
    "newest info": lambda ckpts: ckpts.info().step,
    "restore": lambda ckpts: ckpts.restore(7)["step"],
    "restore the newest": lambda ckpts: ckpts.restore()["step"],
    "resume": lambda ckpts: ckpts.resume(None, dict)[0]["step"],
    "delete": lambda ckpts: ckpts.delete(7) or 7,
}
LOCAL = ("pin", "info", "newest info")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_needs_the_step_waits_for_its_save(tmp_path, alone, released, call):
    released.go.set()
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(6, state(6))
        ckpts.wait()
        released.go.clear()
        ckpts.save(7, state(7))
        assert CALLS[call](ckpts) == 7
        ckpts.wait()
    assert ckpts.all_steps() == (() if call == "delete" else (7,))
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(8, state(8))
    assert ckpts.all_steps() == ((7, 8) if call == "pin" else (8,))


def test_other_steps_and_listings_do_not_wait(tmp_path, alone, held):
    held.go.set()
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(5, state(5), metrics={"loss": 0.5})
        ckpts.save(6, state(6), metrics={"loss": 0.6})
        ckpts.wait()
        held.go.clear()
        ckpts.save(7, state(7), metrics={"loss": 0.1})
        assert (ckpts.latest(), ckpts.all_steps(), ckpts.best_step("loss")) == (6, (5, 6), 5)
        assert ckpts.all_metrics() == {5: {"loss": 0.5}, 6: {"loss": 0.6}}
        ckpts.pin(6)
        ckpts.unpin(6)
        ckpts.unpin(7)
        assert (ckpts.info(6).step, ckpts.restore(6)["step"]) == (6, 6)
        ckpts.delete(5)
        assert ckpts.is_saving
        held.go.set()
    assert ckpts.all_steps() == (6, 7)


@pytest.mark.parametrize("call", CALLS)
def test_the_error_of_the_save_is_raised_and_no_local_call_takes_it(
    tmp_path, alone, released, call
):
    ckpts = Checkpoints(tmp_path, client=alone)
    released.error = OSError("the disk is gone")
    ckpts.save(7, state(7))
    with pytest.raises(Exception, match="the disk is gone"):
        CALLS[call](ckpts)
    if call in LOCAL:
        with pytest.raises(Exception, match="the disk is gone"):
            CALLS[call](ckpts)
        with pytest.raises(Exception, match="the disk is gone") as caught:
            ckpts.wait()
        assert len([*_frames(caught.value.__traceback__)]) < 20, "it grows each time"
    ckpts.wait()
    with pytest.raises(NotCommittedError, match=r"step 7 is not saved; no step is$"):
        ckpts.pin(7)
    with pytest.raises(NotCommittedError, match=r"no step is saved$"):
        ckpts.info()


def _frames(trace):
    while trace is not None:
        yield trace
        trace = trace.tb_next


@pytest.mark.parametrize("call", ["restore", "restore the newest", "resume", "delete"])
@pytest.mark.parametrize("local", ["", *LOCAL])
def test_a_failed_save_is_raised_once_by_all_processes_in_step(
    tmp_path, monkeypatch, held, call, local
):
    """A local call of one process has waited for it before."""
    held.error = OSError("the disk is gone")
    held.go.set()

    def run(client):
        ckpts = Checkpoints(tmp_path, client=client)
        ckpts.save(7, state(7))
        if local and client.process == 1:
            with pytest.raises(ShoalError):
                CALLS[local](ckpts)
        with pytest.raises((SaveAbortedError, OSError)):
            CALLS[call](ckpts)
        held.error = None
        ckpts.save(8, state(8))
        return ckpts.restore()["step"], CALLS["newest info"](ckpts), ckpts.all_steps()

    assert run_all(LocalJob(2), run) == [(8, 8, (8,))] * 2


def test_the_deadline_of_a_restore_ends_its_wait(tmp_path, alone, held):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(7, state(7))
        for _ in range(2):
            with pytest.raises(DeadlineError, match=r"still runs after 0\.01 s"):
                ckpts.restore(7, timeout_s=0.01)
        held.go.set()
        assert ckpts.restore(7)["step"] == 7


@pytest.mark.parametrize(
    "ask",
    [
        lambda run, reader: reader.pin(7),
        lambda run, reader: reader.info(7),
        lambda run, reader: reader.restore(7),
        lambda run, reader: reader.delete(7),
        lambda run, reader: shoal.checkpoint_info(run, step=7),
        lambda run, reader: shoal.checkpoint_info(run / step_name(7)),
        lambda run, reader: shoal.restore(run / step_name(7)),
    ],
)
def test_another_job_learns_that_the_save_runs(tmp_path, alone, held, ask):
    held.go.set()
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(6, state(6))
        ckpts.wait()
        held.go.clear()
        held.is_there.clear()
        ckpts.save(7, state(7))
        assert held.is_there.wait(PATIENCE_S)
        reader = Checkpoints(tmp_path, recover=False, client=LocalJob(1).clients[0])
        assert (reader.restore()["step"], reader.info().step) == (6, 6)
        with pytest.raises(NotCommittedError, match="its save still runs") as caught:
            ask(tmp_path, reader)
        assert f"pid {os.getpid()}" in str(caught.value)
        held.go.set()
    assert reader.restore(7)["step"] == 7


@pytest.mark.parametrize("newest", [lambda r: r.restore(), lambda r: r.info()])
def test_another_job_learns_that_the_first_save_runs(tmp_path, alone, held, newest):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(7, state(7))
        assert held.is_there.wait(PATIENCE_S)
        reader = Checkpoints(tmp_path, recover=False, client=LocalJob(1).clients[0])
        with pytest.raises(
            NotCommittedError, match="no step is saved; the save of step 7 still runs"
        ):
            newest(reader)
        held.go.set()


def test_save_without_a_refreshed_lease_counts_as_ended(tmp_path, alone):
    run = sample_checkpoints.run_of_two(tmp_path / "run")
    attempt = sample_checkpoints.begun(run, 25)
    reader = Checkpoints(run, recover=False, client=alone)
    with pytest.raises(
        NotCommittedError, match=r"its save still runs \(by h7, pid 123, touched \d+ s"
    ):
        reader.pin(25)
    pending = run / step_name(25) / f"PENDING-{attempt}"
    os.utime(pending, (0, pending.stat().st_mtime - 600))
    ended = r"step 25 is not saved; its save ended before it was complete \(by h7, pid 123, touched"
    with pytest.raises(NotCommittedError, match=ended):
        reader.pin(25)
    pending.unlink()
    with pytest.raises(NotCommittedError, match="step 25 is not saved; saved are 10, 20"):
        reader.pin(25)


def test_complete_uncommitted_step_raises_with_the_recover_command(tmp_path, alone, child_env):
    path = tmp_path / step_name(30)
    sample_checkpoints.killed_before_commit(path, child_env)
    (pending,) = path.glob("PENDING-*")
    os.utime(pending, (0, pending.stat().st_mtime - 600))
    reader = Checkpoints(tmp_path, recover=False, client=alone)
    with pytest.raises(NotCommittedError, match=r"complete.*`shoal ckpt recover` commits it"):
        reader.info(30)


def test_a_fork_of_the_saving_process_does_not_wait(tmp_path, alone, held):
    """The thread that saves is not in it: it reads what the folder says."""
    ckpts = Checkpoints(tmp_path, client=alone)
    ckpts.save(7, state(7))
    assert held.is_there.wait(PATIENCE_S)
    saving = ckpts._saver._running.saving
    pid, saving._pid = saving._pid, -1
    with pytest.raises(NotCommittedError, match="its save still runs"):
        ckpts.pin(7)
    saving._pid = pid
    held.go.set()
    ckpts.wait()
    ckpts.save(8, state(8))
    ckpts._saver._running.saving.wait()
    ckpts._saver._running.saving._pid = -1
    ckpts.pin(8)
    assert ckpts.info().step == 8
