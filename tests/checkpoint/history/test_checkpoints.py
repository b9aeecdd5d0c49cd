"""A history of steps: saved, kept, listed, resumed, tidied."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import shoal
from collectives.device_trees import SHAPE, placed, replicas
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.history.saver import _Running
from shoal.checkpoint.planning.policies import Best, EverySteps, Last
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.step_names import KEEP, step_name
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.errors import (
    CorruptCheckpointError,
    DeadlineError,
    DivergenceError,
    NotCommittedError,
    StepAlreadyCommittedError,
    StorageError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime import process
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.progress import Progress
from shoal.runtime.preemption import preempted
from shoal.runtime.rules.stopping import EARLIER, LAST, ReceivedNotice
from shoal.runtime.system.fault_points import InjectedError

PATIENCE_S = 60.0


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


def restored(ckpts, step=None):
    return ckpts.restore(step)["step"]


def names(root):
    return sorted(path.name for path in root.iterdir())


def save_and_fail(ckpts, error=None):
    ckpts.save(1, state(1))
    raise error or KeyError("of the block")


def test_saved_steps_are_listed_and_restored(tmp_path, alone):
    with Checkpoints(tmp_path / "run", client=alone) as ckpts:
        assert ckpts.latest() is None
        assert ckpts.all_steps() == ()
        assert ckpts.save(3, state(3), user={"run": "blue"}) is True
        assert ckpts.save(7, state(7))
        ckpts.wait()
        assert ckpts.all_steps() == (3, 7)
        assert (restored(ckpts), restored(ckpts, 3)) == (7, 3)
        np.testing.assert_array_equal(ckpts.restore(3)["w"], np.full(4, 3.0))
    assert names(tmp_path / "run") == [step_name(3), step_name(7)]
    assert ckpts.path_of(3) == str(tmp_path / "run" / step_name(3))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_state_may_change_right_after(tmp_path, alone, asynchronous):
    value = state(0)
    with Checkpoints(tmp_path, asynchronous=asynchronous, client=alone) as ckpts:
        for step in range(5):
            value["w"][:] = step
            ckpts.save(step, value)
            value["w"][:] = -1
    for step in range(5):
        assert ckpts.restore(step)["w"].tolist() == [step] * 4


def test_every_says_which_steps(tmp_path, alone):
    with Checkpoints(tmp_path, every=10, client=alone) as ckpts:
        done = [step for step in range(25) if ckpts.save(step, state(step))]
        assert done == [9, 19]
        assert not ckpts.should_save(24)
        assert ckpts.save(24, state(24), force=True)
    with Checkpoints(tmp_path, every=10, client=alone) as ckpts:
        _, first = ckpts.resume(None, None)
        assert [step for step in range(first, 41) if ckpts.save(step, state(step))] == [29, 39]


def test_old_steps_go_and_chosen_ones_stay(tmp_path, alone):
    keep = Last(2) | Best(1, "loss") | EverySteps(10)
    losses = {0: 0.9, 4: 0.1, 8: 0.5, 12: 0.4, 16: 0.3, 20: 0.2}
    with Checkpoints(tmp_path, keep=keep, client=alone) as ckpts:
        for step, loss in losses.items():
            ckpts.save(step, state(step), metrics={"loss": loss})
            if step == 8:
                ckpts.wait()
                ckpts.pin(8)
    assert ckpts.all_steps() == (0, 4, 8, 12, 16, 20)
    ckpts.unpin(8)
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(21, state(21))
    assert ckpts.all_steps() == (21,)
    assert names(tmp_path) == [step_name(21)]


def test_nothing_is_overwritten(tmp_path, alone):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(5, state(5))
        with pytest.raises(StepAlreadyCommittedError):
            ckpts.save(5, state(6), force=True)
    assert restored(ckpts) == 5


def test_resume_begins_or_goes_on(tmp_path, alone):
    made = []

    def init():
        made.append(1)
        return state(-1)

    with Checkpoints(tmp_path, client=alone) as ckpts:
        value, first = ckpts.resume(None, init)
        assert (value["step"], first, made) == (-1, 0, [1])
        assert ckpts.resume(None, state(-2))[0]["step"] == -2
        ckpts.save(11, state(11))
        ckpts.wait()
        value, first = ckpts.resume(None, init, check_init=False)
        assert (value["step"], first, made) == (11, 12, [1])


def test_restore_of_an_unsaved_step_raises_not_committed(tmp_path, alone):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        with pytest.raises(NotCommittedError, match="no step is saved"):
            ckpts.restore()
        ckpts.save(5, state(5))
        ckpts.wait()
        with pytest.raises(NotCommittedError, match="step 4 is not saved; saved are 5"):
            ckpts.restore(4)


def test_a_damaged_step_is_an_error_unless_it_may_be_skipped(tmp_path, alone):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.save(2, state(2))
    (tmp_path / step_name(2) / "COMMIT").write_text("{}")
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        for ask in (ckpts.latest, ckpts.all_steps, ckpts.restore, lambda: ckpts.resume(None, 0)):
            with pytest.raises(CorruptCheckpointError):
                ask()
        assert ckpts.latest(skip_corrupt=True) == 1
        assert ckpts.all_steps(skip_corrupt=True) == (1,)
        assert ckpts.resume(None, 0, skip_corrupt=True)[1] == 2
        ckpts.save(3, state(3))
        ckpts.wait()
        assert ckpts.all_steps(skip_corrupt=True) == (3,)
    assert (tmp_path / step_name(2)).exists(), "what is damaged is nobody's to delete"


def test_steps_come_from_storage_alone(tmp_path, alone):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.save(2, state(2))
        ckpts.wait()
        other = Checkpoints(tmp_path, client=LocalJob(1).clients[0])
        other.delete(2)
        assert ckpts.all_steps() == (1,)
        assert restored(ckpts) == 1
        (tmp_path / "step_5").mkdir()
        (tmp_path / step_name(9)).mkdir()
        assert ckpts.latest() == 1


def test_pinned_steps_are_not_deleted(tmp_path, alone):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.wait()
        ckpts.pin(1)
        ckpts.pin(1)
        assert KEEP in names(tmp_path / step_name(1))
        with pytest.raises(UsageError, match="pinned"):
            ckpts.delete(1)
        ckpts.unpin(1)
        ckpts.unpin(1)
        ckpts.delete(1)
        for act in (ckpts.delete, ckpts.pin):
            with pytest.raises(NotCommittedError):
                act(1)
    assert names(tmp_path) == []


def test_a_background_error_surfaces_once_at_the_next_call(tmp_path, alone, monkeypatch):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        for surface in (ckpts.wait, lambda: ckpts.save(2, state(2))):
            monkeypatch.setenv("SHOAL_FAULTS", "save.write:raise")
            ckpts.save(1, state(1))
            with pytest.raises(Exception, match=r"save\.write"):
                surface()
            ckpts.wait()
            assert ckpts.all_steps() == ()
        ckpts.save(2, state(2))
    assert ckpts.all_steps() == (2,)


def test_the_end_of_the_block_raises_it(tmp_path, alone, monkeypatch):
    monkeypatch.setenv("SHOAL_FAULTS", "save.write:raise")
    with pytest.raises(Exception, match=r"save\.write"):  # noqa: SIM117
        with Checkpoints(tmp_path, client=alone) as ckpts:
            ckpts.save(1, state(1))
    with pytest.raises(UsageError, match="is closed"):
        ckpts.save(2, state(2))


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_program_whose_last_save_failed_does_not_end_with_success(
    tmp_path, alone, monkeypatch, code
):
    monkeypatch.setenv("SHOAL_FAULTS", "save.write:raise")
    ckpts = Checkpoints(tmp_path, client=alone)
    with pytest.raises(SystemExit if code else InjectedError), ckpts:
        save_and_fail(ckpts, SystemExit(code))


def test_an_exception_of_the_block_wins_and_the_save_is_finished(tmp_path, alone):
    ckpts = Checkpoints(tmp_path, client=alone)
    with pytest.raises(KeyError), ckpts:
        save_and_fail(ckpts)
    assert ckpts.all_steps() == (1,)


def test_an_exception_of_the_block_wins_over_that_of_a_save(tmp_path, alone, monkeypatch, caplog):
    monkeypatch.setenv("SHOAL_FAULTS", "save.write:raise")
    ckpts = Checkpoints(tmp_path, client=alone)
    with pytest.raises(KeyError), ckpts:
        save_and_fail(ckpts)
    assert "next to KeyError" in caplog.text


def test_a_failed_deletion_never_loses_the_save(tmp_path, alone, monkeypatch, caplog):
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.wait()
        monkeypatch.setenv("SHOAL_FAULTS", "retain.before:raise")
        ckpts.save(2, state(2))
        with pytest.raises(Exception, match=r"retain\.before"):
            ckpts.wait()
        assert ckpts.all_steps() == (1, 2)
        assert "step 2 is saved; deleting old steps failed" in caplog.text
        ckpts.save(3, state(3))
    assert ckpts.all_steps() == (3,)


@pytest.mark.parametrize("point", ["delete.marked", "delete.half"])
def test_a_deletion_that_was_interrupted_is_finished(tmp_path, alone, monkeypatch, point):
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.wait()
        monkeypatch.setenv("SHOAL_FAULTS", f"{point}:raise")
        ckpts.save(2, state(2))
        with pytest.raises(Exception, match=point):
            ckpts.wait()
    assert ckpts.all_steps() == (2,)
    assert step_name(1) in names(tmp_path)
    Checkpoints(tmp_path, client=alone)
    assert names(tmp_path) == [step_name(2)]


def test_two_at_once_are_one_after_the_other(tmp_path, alone, caplog, monkeypatch):
    monkeypatch.setattr("shoal.checkpoint.history.saver._BLOCKED_S", 0.0)
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(1, state(1))
        ckpts.save(2, state(2))
    assert "save(2): blocked on the previous save, of step 1, for" in caplog.text
    assert ckpts.all_steps() == (1, 2)


def test_a_wait_has_a_deadline_and_the_save_goes_on(tmp_path, alone, monkeypatch):
    go_on = threading.Event()

    def retain(*_, **__):
        go_on.wait(PATIENCE_S)
        return saved_steps.Retained([], 0, [])

    monkeypatch.setattr("shoal.checkpoint.store.saved_steps.retain", retain)
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(1, state(1))
        with pytest.raises(DeadlineError):
            ckpts.wait(timeout_s=0.01)
        go_on.set()
        ckpts.wait()
    assert ckpts.all_steps() == (1,)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"keep": 0}, UsageError),
        ({"keep": "2"}, UsageTypeError),
        ({"every": 1.5}, UsageTypeError),
        ({"timeout_s": 0}, UsageError),
        ({"lease_s": -1}, UsageError),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, kind):
    with pytest.raises(kind):
        Checkpoints(tmp_path, **options)
    assert names(tmp_path) == []


def test_wrong_steps_and_paths_are_refused(tmp_path, alone):
    ckpts = Checkpoints(tmp_path, client=alone)
    with pytest.raises(UsageTypeError):
        Checkpoints(7, client=alone)
    for step in (True, 1.0, "1", None):
        with pytest.raises(UsageTypeError):
            ckpts.save(step, state(1))
    for step in (-1, 1 << 62):
        with pytest.raises(UsageError):
            ckpts.save(step, state(1))
    assert ckpts.save(np.int64(3), state(3))
    ckpts.close()
    assert ckpts.latest() == 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_any_tree_that_can_be_saved(tmp_path, alone, asynchronous):
    tree = {1: np.ones(2), "1": [None, {"x": 2**80}], (1, "a"): 0.5, "loader": PerProcess([3])}
    with Checkpoints(tmp_path, asynchronous=asynchronous, client=alone) as ckpts:
        with pytest.raises(UsageTypeError, match="resume: what cannot be saved: is an object"):
            ckpts.resume(None, {"what cannot be saved": object()})
        ckpts.resume(None, tree)
        alone.give_notice(ReceivedNotice("drained", "a test", 60.0))
        ckpts.save(1, tree)
    back = ckpts.restore()
    assert back.keys() == tree.keys()
    assert back["1"] == [None, {"x": 2**80}]


def test_an_error_that_comes_at_the_deadline_of_a_wait_is_not_lost(tmp_path, alone):
    errors = [DeadlineError("it still runs"), StorageError("the disk failed")]

    class JustTooLate:
        done = True

        def wait(self, timeout_s):
            if errors:
                raise errors.pop(0)

    ckpts = Checkpoints(tmp_path, client=alone)
    ckpts._saver._running = _Running(1, JustTooLate())
    with pytest.raises(DeadlineError):
        ckpts.wait(timeout_s=0.01)
    with pytest.raises(StorageError):
        ckpts.wait()
    ckpts.wait()


def test_process_that_waits_for_a_save_is_shown_as_waiting(tmp_path, alone, monkeypatch):
    seen, waits, begin_wait = [], threading.Event(), Progress.begin_wait

    def coming(progress, point, now):
        begin_wait(progress, point, now)
        if point.name.startswith("the end of"):
            waits.set()

    def retain(*_, **__):
        assert waits.wait(PATIENCE_S)
        seen.append((alone.progress.is_waiting, alone.progress.place))
        return saved_steps.Retained([], 0, [])

    monkeypatch.setattr(Progress, "begin_wait", coming)
    monkeypatch.setattr("shoal.checkpoint.store.saved_steps.retain", retain)
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        ckpts.save(7, state(7))
        ckpts.wait()
    ((is_waiting, place),) = seen
    assert is_waiting
    assert place.startswith(
        "'the end of the save of step 7' (tests/checkpoint/history/test_checkpoints.py:"
    )
    assert not alone.progress.is_waiting


def test_memory_for_copies_is_there_before_the_first_save(tmp_path, alone):
    value = {"w": np.zeros(1_000_000), "b": [np.ones(3, np.int8)] * 50}
    for first in (0, 1):
        with Checkpoints(tmp_path, client=alone) as ckpts:
            value, begins = ckpts.resume(None, value)
            assert begins == first
            ckpts._saver._await_memory()
            reserved = ckpts._saver._arena.num_bytes
            assert 8_000_000 < reserved < 10_000_000
            ckpts.save(first, value)
            assert ckpts._saver._arena.num_bytes == reserved, "it did not suffice"
    with Checkpoints(tmp_path, asynchronous=False, client=alone) as ckpts:
        ckpts.resume(None, value)
        ckpts.save(2, value)
        assert ckpts._saver._arena.num_bytes == 0, "values are written from where they are"
    assert ckpts.all_steps() == (0, 1, 2)


@pytest.mark.parametrize("metrics", [{"loss": 0.5}, {}, {"accuracy": 1, "loss": 2}])
def test_metrics_that_keep_cannot_rank_are_refused_before_anything_is_written(
    tmp_path, alone, metrics
):
    keep = Last(1) | Best(1, "los")
    with Checkpoints(tmp_path, keep=keep, client=alone) as ckpts:
        ckpts.save(0, state(0), metrics={"los": 1.0})
        for step in (1, 2):
            with pytest.raises(
                UsageError, match=rf"save\({step}\): keep=Best\(1, 'los'\): the metrics"
            ):
                ckpts.save(step, state(step), metrics=metrics)
        ckpts.save(3, state(3), metrics={"los": 2.0})
    assert ckpts.all_steps() == (0, 3)
    with pytest.raises(UsageTypeError, match="missing_ok=1 must be True or False"):
        Best(1, "loss", missing_ok=1)


@pytest.mark.parametrize("beside", [None, Last(1)])
def test_a_metric_of_some_steps_alone_and_saves_without_any(tmp_path, alone, caplog, beside):
    """In an emergency there is no metric at hand, and the state must not be lost."""
    keep = Best(1, "loss", missing_ok=True) | (beside or Best(1, "loss", missing_ok=True))
    with Checkpoints(tmp_path, keep=keep, client=alone) as ckpts:
        for step, metrics in enumerate([{"loss": 1.0}, {"rate": 0.1}, None, {"loss": 2.0}]):
            ckpts.save(step, state(step), metrics=metrics)
    assert ckpts.all_steps() == ((0, 3) if beside else (0, 1, 2, 3))
    assert not caplog.messages
    keep = Best(1, "loss") | (beside or Best(1, "loss"))
    with Checkpoints(tmp_path / "other", keep=keep, client=alone) as ckpts:
        ckpts.save(0, state(0))
        ckpts.save(1, state(1))
        alone.give_notice(ReceivedNotice("drained", "a test", 60.0))
        ckpts.save(2, state(2), metrics={"los": 1.0})
    assert ckpts.all_steps() == ((2,) if beside else (0, 1, 2))
    if beside:
        (warning,) = caplog.messages
        assert "save(0): keep=Best(1, 'loss'): the metrics have no 'loss', but nothing" in warning
    else:
        assert not caplog.messages, "nothing is lost"


NOTICE = ReceivedNotice("drained", "a test")


@pytest.mark.parametrize("rule", [10, EverySteps(10), lambda step: step == 9])
def test_a_notice_wants_a_step_that_every_does_not(tmp_path, alone, rule):
    with Checkpoints(tmp_path, every=rule, client=alone) as ckpts:
        for step in range(13):
            assert preempted.on(alone, step) is False
            assert ckpts.save(step, state(step)) is (step == 9)
        alone.give_notice(NOTICE)
        assert preempted.on(alone, 12) is False
        assert not ckpts.should_save(12)
        assert preempted.on(alone, 13) is True
        assert ckpts.should_save(12), "a loop that asks first saves what it has done"
        assert ckpts.should_save(13)
        assert ckpts.save(13, state(13)) is True
        assert not ckpts.is_saving, "it is committed"
        assert not ckpts.should_save(13), "it is saved"
        assert ckpts.save(13, state(13)) is False
        assert ckpts.save(13, state(13), force=True) is True
        with pytest.raises(StepAlreadyCommittedError):
            ckpts.save(9, state(9), force=True)
        assert ckpts.all_steps() == (9, 13)
    assert (alone.stop.exit_code, alone.stop.stopped.kept) == (75, LAST)


def test_the_step_that_was_saved_last_is_enough(tmp_path, alone):
    """It was due, just before the notice: also in the attempt that resumes there."""
    for _ in range(2):
        with Checkpoints(tmp_path, every=10, client=alone) as ckpts:
            assert ckpts.should_save(9) is (ckpts.latest() is None)
            if ckpts.latest() is None:
                ckpts.save(9, state(9))
            assert preempted.on(alone, 8) is False
            alone.give_notice(NOTICE)
            assert preempted.on(alone, 9) is True
            assert ckpts.save(9, state(9)) is False
            assert alone.stop.exit_code == 75


def test_save_that_failed_before_the_notice_is_repeated(tmp_path, alone, monkeypatch):
    """The program knew, and went on; the newest step is that before."""
    ckpts = Checkpoints(tmp_path, client=alone)
    preempted.on(alone, 0)
    ckpts.save(0, state(0))
    ckpts.wait()
    monkeypatch.setenv("SHOAL_FAULTS", "save.open:raise")
    ckpts.save(1, state(1))
    with pytest.raises(InjectedError):
        ckpts.wait()
    assert preempted.on(alone, 5) is False
    alone.give_notice(NOTICE)
    assert preempted.on(alone, 6) is True
    assert (alone.stop.exit_code, alone.stop.stopped.kept) == (75, EARLIER)
    assert "step 0 is the newest saved" in alone.stop.stopped.words
    monkeypatch.setenv("SHOAL_FAULTS", "save.open:raise")
    with pytest.raises(InjectedError):
        ckpts.save(6, state(6))
    assert alone.stop.exit_code == 0


def test_a_wrong_step_is_refused_as_before_in_a_program_that_asks(tmp_path, alone, monkeypatch):
    monkeypatch.setattr(process, "client", lambda: alone)
    preempted.on(alone, 3)
    with pytest.raises(UsageTypeError, match="must be a whole number"):
        shoal.save(tmp_path / "one", state(1), step="4")


def test_a_notice_waits_for_the_function_at_a_commit(tmp_path, alone):
    calls = []
    on_commit = lambda step, path: calls.append((step, alone.stop.stopped.kept))  # noqa: E731
    with Checkpoints(tmp_path, every=10, on_commit=on_commit, client=alone) as ckpts:
        alone.give_notice(NOTICE)
        assert preempted.on(alone, 1) is True
        assert ckpts.save(1, state(1)) is True
        assert calls == [(1, LAST)], "the state is safe before the function is called"


def test_a_program_that_ends_waits_for_the_function_at_a_commit(tmp_path, child_env):
    program = """
import threading, numpy as np, shoal
def on_commit(step, path):
    threading.main_thread().join()
    print("uploaded", step)
shoal.Checkpoints("run", on_commit=on_commit).save(1, {"w": np.ones(3)})
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "uploaded 1\n"), done.stderr


def test_replicas_are_compared_before_each_save_if_asked(tmp_path, alone):
    def change(piece):
        piece[1, 2] = 7

    good = {"params": {"w": placed(np.zeros(SHAPE, "f4"), ())}, "epoch": 3, "own": PerProcess(1)}
    bad = good | {"params": {"w": replicas(np.zeros(SHAPE, "f4"), (), (5, change))}}
    with Checkpoints(tmp_path / "checked", check_replicas=True, client=alone) as ckpts:
        ckpts.save(1, good)
        with pytest.raises(DivergenceError) as caught:
            ckpts.save(2, bad)
        ckpts.save(3, good)
    assert "check_replicas 'save' found different replicas" in str(caught.value)
    assert "at params/w[1, 2], in params/w: float32[8,4]:" in str(caught.value)
    assert caught.value.sides["device 5 holds 7.0 (0x40e00000)"] == (0,)
    assert ckpts.all_steps() == (1, 3)
    with Checkpoints(tmp_path / "unchecked", client=alone) as ckpts:
        ckpts.save(2, bad)
    assert ckpts.all_steps() == (2,)
