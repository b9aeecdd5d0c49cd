"""A call of a history that one process leaves by an exception ends for the others."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.errors import PeerFailedError, SaveAbortedError, UsageError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.system import fault_points

LEFT = {
    "save": (lambda ckpts, wrong: ckpts.save(2, W, user={"x": wrong and set()}), SaveAbortedError),
    "save for no time": (
        lambda ckpts, wrong: ckpts.save(2, W, timeout_s=-1 if wrong else None),
        SaveAbortedError,
    ),
    "a leaf": (
        lambda ckpts, wrong: ckpts.save(2, {"w": object() if wrong else 1}),
        SaveAbortedError,
    ),
    "restore": (lambda ckpts, wrong: ckpts.restore("x" if wrong else 1), PeerFailedError),
    "restore what": (
        lambda ckpts, wrong: ckpts.restore(1, only=7 if wrong else None),
        PeerFailedError,
    ),
    "options": (
        lambda ckpts, wrong: ckpts.restore(1, **({"onyl": "w"} if wrong else {})),
        PeerFailedError,
    ),
    "resume": (
        lambda ckpts, wrong: ckpts.resume(None, W, **({"onyl": "w"} if wrong else {})),
        PeerFailedError,
    ),
    "delete": (lambda ckpts, wrong: ckpts.delete(-1 if wrong else 1), PeerFailedError),
}
W = {"w": np.arange(4)}
# Arguments that Python itself refuses, or that are checked before anything else.
REFUSED = {
    "save what": (lambda ckpts, wrong: ckpts.save(2, W, **unknown(wrong)), SaveAbortedError),
    "save of no step": (
        lambda ckpts, wrong: ckpts.save(*(() if wrong else (2, W))),
        SaveAbortedError,
    ),
    "save when": (lambda ckpts, wrong: ckpts.save("2" if wrong else 2, W), SaveAbortedError),
    "save how": (
        lambda ckpts, wrong: ckpts.save(2, W, force="yes" if wrong else False),
        SaveAbortedError,
    ),
    "restore more": (
        lambda ckpts, wrong: ckpts.restore(*([1, None, 2][: 3 if wrong else 1])),
        None,
    ),
    "resume without": (lambda ckpts, wrong: ckpts.resume(*([None, W][: 1 if wrong else 2])), None),
    "delete what": (lambda ckpts, wrong: ckpts.delete(1, **unknown(wrong)), None),
}


def unknown(wrong):
    return {"onyl": "w"} if wrong else {}


def saved(ckpts, step):
    ckpts.save(step, W)
    ckpts.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", LEFT)
def test_a_wrong_argument_of_one_process_ends_the_call_of_all(tmp_path, name, asynchronous):
    call, others_get = LEFT[name]

    def run(client):
        ckpts = Checkpoints(
            tmp_path, asynchronous=asynchronous, timeout_s=PATIENCE_S / 2, client=client
        )
        saved(ckpts, 1)
        with pytest.raises(UsageError if client.process == 1 else others_get):
            call(ckpts, client.process == 1)
        barrier.on(client, "the next call", timeout_s=PATIENCE_S / 2)
        ckpts.save(3, W)
        ckpts.close()
        return ckpts.all_steps()

    # The lead deletes before it meets the others: what was asked of it is done.
    kept = (3,) if name == "delete" else (1, 3)
    assert run_all(LocalJob(3), run) == [kept] * 3


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_one_process_cannot_pass_end_the_call_of_all(tmp_path, name):
    call, others_get = REFUSED[name]

    def run(client):
        ckpts = Checkpoints(tmp_path, timeout_s=PATIENCE_S / 2, client=client)
        saved(ckpts, 1)
        is_wrong = client.process == 1
        with pytest.raises((TypeError, UsageError) if is_wrong else others_get or PeerFailedError):
            call(ckpts, is_wrong)
        barrier.on(client, "the next call", timeout_s=PATIENCE_S / 2)
        ckpts.save(3, W)
        ckpts.close()
        return 3 in ckpts.all_steps()

    assert run_all(LocalJob(3), run) == [True] * 3


@pytest.mark.parametrize("wrong", [{"step": "4"}, {"step": 4, "onyl": 1}, {"step": 4, "force": 2}])
def test_refused_save_of_a_step_that_is_not_due_aborts_nothing(tmp_path, wrong):
    def run(client):
        ckpts = Checkpoints(tmp_path, every=10, timeout_s=PATIENCE_S / 2, client=client)
        if client.process == 1:
            with pytest.raises((TypeError, UsageError)):
                ckpts.save(**({"state": W} | wrong))
        else:
            assert ckpts.save(4, W) is False
        barrier.on(client, "the next call", timeout_s=PATIENCE_S / 2)
        with pytest.raises((TypeError, UsageError) if client.process == 1 else SaveAbortedError):
            ckpts.save(9, W, **unknown(client.process == 1))
        barrier.on(client, "and the next", timeout_s=PATIENCE_S / 2)
        ckpts.close()
        return ckpts.all_steps()

    assert run_all(LocalJob(3), run) == [()] * 3


@pytest.mark.parametrize("wrong", [{}, {"step": "2"}, {"step": 2, "onyl": 1}])
@pytest.mark.parametrize("looks", [True, False])
def test_a_refused_question_ends_that_of_all_only_where_they_read_the_lead_s_clock(
    tmp_path, wrong, looks
):
    every = timedelta(microseconds=1) if looks else 2

    def run(client):
        ckpts = Checkpoints(tmp_path, every=every, timeout_s=PATIENCE_S / 2, client=client)
        assert ckpts.should_save(1) is True
        saved(ckpts, 1)
        if client.process == 1:
            with pytest.raises((TypeError, UsageError)):
                ckpts.should_save(**wrong)
        elif looks:
            with pytest.raises(PeerFailedError):
                ckpts.should_save(2)
        else:
            assert ckpts.should_save(2) is False
        assert ckpts.should_save(3) is True
        saved(ckpts, 3)
        ckpts.close()
        return ckpts.all_steps()

    assert run_all(LocalJob(3), run) == [(1, 3)] * 3


@pytest.mark.parametrize("meets", [False, True])
def test_an_initial_state_that_one_process_cannot_make_is_made_by_none(tmp_path, meets):
    def run(client):
        def init():
            if client.process == 1:
                raise ZeroDivisionError
            if meets:
                barrier.on(client, "in init", timeout_s=PATIENCE_S / 2)
            return W

        ckpts = Checkpoints(tmp_path, timeout_s=PATIENCE_S / 2, client=client)
        with pytest.raises(ZeroDivisionError if client.process == 1 else PeerFailedError):
            ckpts.resume(None, init)
        for name in "ab":
            barrier.on(client, name, timeout_s=PATIENCE_S / 2)
        return ckpts.resume(None, lambda: W)[1]

    assert run_all(LocalJob(3), run) == [0] * 3


def test_a_history_that_one_process_cannot_name_is_made_by_none(tmp_path):
    def run(client):
        options = {"client": client, "timeout_s": PATIENCE_S / 2}
        is_wrong = client.process == 1
        with pytest.raises(TypeError if is_wrong else PeerFailedError):
            Checkpoints(tmp_path, **options, **unknown(is_wrong))
        with Checkpoints(tmp_path, **options) as ckpts:
            ckpts.save(1, W)
        return ckpts.all_steps()

    assert run_all(LocalJob(3), run) == [(1,)] * 3


def test_a_history_that_one_process_cannot_make_is_made_by_none(tmp_path):
    def run(client):
        options = {"client": client, "timeout_s": PATIENCE_S / 2}
        with pytest.raises(UsageError if client.process == 1 else PeerFailedError):
            Checkpoints(tmp_path, keep=-1 if client.process == 1 else None, **options)
        with Checkpoints(tmp_path, **options) as ckpts:
            ckpts.save(1, W)
        return ckpts.all_steps()

    assert run_all(LocalJob(3), run) == [(1,)] * 3


@pytest.mark.parametrize("point", ["save.preflight", "save.snapshot", "save.written"])
def test_an_interrupt_of_one_process_aborts_the_save_of_all(tmp_path, monkeypatch, point):
    """In the main line, and in the thread, where it stands for whatever is no Exception."""

    def reach(reached, process=None):
        if (reached, process) == (point, 1):
            raise KeyboardInterrupt

    def run(client):
        options = {"client": client, "timeout_s": PATIENCE_S / 2}
        ckpts = Checkpoints(tmp_path, **options)
        is_left = client.process == 1
        with pytest.raises(KeyboardInterrupt if is_left else SaveAbortedError):
            saved(ckpts, 1)
        barrier.on(client, "the next call", timeout_s=PATIENCE_S / 2)
        if is_left:
            monkeypatch.undo()
        barrier.on(client, "the fault is over", timeout_s=PATIENCE_S / 2)
        ckpts.save(2, W)
        ckpts.close()
        return ckpts.all_steps()

    monkeypatch.setattr(fault_points, "reach", reach)
    assert run_all(LocalJob(3), run) == [(2,)] * 3


def test_the_lanes_of_saves_that_are_over_are_forgotten(tmp_path):
    job = LocalJob(2)

    def run(client):
        with Checkpoints(tmp_path, keep=2, client=client) as ckpts:
            for step in range(4):
                ckpts.save(step, W)
        return {*client._lanes._sent}

    lanes = {"main", f"save retention {tmp_path}"}
    assert run_all(job, run) == [lanes] * 2
    assert [{*record.arrivals} for record in job._meeting._records.values()] == [lanes] * 2
