"""Saves that begin whenever none is running: at the same step on all processes."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.history.test_while_it_saves import Held
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.checkpoint.history import saver
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.history.saver import _NextSave
from shoal.errors import DivergenceError, ProcessLostError, SaveAbortedError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.system import fault_points
from shoal.runtime.system.fault_points import InjectedError


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


def first_error(ckpts):
    """Save each step from 1 on; return the first that raises, and the error."""
    for step in range(1, 10**9):
        try:
            assert not ckpts.save(step, state(step))
        except Exception as error:  # noqa: BLE001 - compared by the test
            return step, error
    raise AssertionError("no save raised")


@given(st.integers(1, 5), st.integers(0))
def test_the_next_save_begins_at_the_first_step_that_no_process_has_passed(count, seed):
    random = Random(seed)
    following = [_NextSave() for _ in range(count)]
    reached, begun, sent = [0] * count, [0] * count, {}

    def walk(most):
        for _ in range(random.randrange(most)):
            one = random.randrange(count)
            answer = None if begun[one] else following[one].is_here()
            if answer is not None:
                reached[one] += 1
                begun[one] = reached[one] if answer else 0

    def agree(processes):
        if not processes:
            return

        def largest(number):
            sent[processes[0]] = number
            walk(9)
            agree(processes[1:])
            walk(9)
            return max(sent.values())

        following[processes[0]].agree(lambda: walk(9), largest)
        walk(9)

    walk(30)
    assert not any(begun)
    agree(random.sample(range(count), count))
    while not all(begun):
        walk(9)
    assert begun == [max(sent.values()) + 1] * count


def fails(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "arguments", [(fails, lambda reached: reached), (lambda: None, fails)], ids=["end", "next"]
)
def test_an_agreement_that_fails_lets_the_next_save_report_it(arguments):
    following = _NextSave()
    with pytest.raises(ZeroDivisionError):
        following.agree(*arguments)
    assert following.is_here()


def test_no_step_waits_for_the_function_that_is_called_at_a_commit(tmp_path, monkeypatch):
    is_over, go, agree = threading.Event(), threading.Event(), saver.agree

    def agreeing(client, *args, **options):
        if client.process == 1:
            is_over.set()
        return agree(client, *args, **options)

    monkeypatch.setattr(saver, "agree", agreeing)

    def run(client):
        with Checkpoints(
            tmp_path, every="free", on_commit=lambda *_: go.wait(PATIENCE_S),
            client=client,
        ) as ckpts:  # fmt: skip
            ckpts.save(0, state(0))
            if client.process == 0:
                return False
            assert is_over.wait(PATIENCE_S)
            chosen = [ckpts.should_save(step) for step in range(1, 50)]
            go.set()
            return any(chosen)

    assert run_all(LocalJob(2), run) == [False, False]


@pytest.mark.parametrize("count", [1, 2])
def test_a_failed_save_is_raised_at_one_step_and_the_next_step_is_saved(
    tmp_path, monkeypatch, count
):
    monkeypatch.setenv("SHOAL_FAULTS", "save.write@0#1:raise")

    def run(client):
        with Checkpoints(tmp_path, every="free", client=client) as ckpts:
            assert ckpts.save(0, state(0))
            step, error = first_error(ckpts)
            assert isinstance(error, (InjectedError, SaveAbortedError)[client.process])
            assert ckpts.save(step + 1, state(step + 1))
            return step, ckpts.wait() or ckpts.all_steps()

    results = run_all(LocalJob(count), run)
    assert results == [(results[0][0], (results[0][0] + 1,))] * count


def test_a_process_that_is_lost_before_they_agree_is_reported_by_the_next_save(
    tmp_path, monkeypatch
):
    job, reach = LocalJob(3), fault_points.reach

    def dying(point, process=None):
        if (point, process) == ("save.announced", 2):
            job.lose(2)
            raise KeyError("it is dead")
        reach(point, process)

    monkeypatch.setattr(fault_points, "reach", dying)

    def run(client):
        ckpts = Checkpoints(tmp_path, every="free", client=client)
        ckpts.save(0, state(0))
        error = first_error(ckpts)[1]
        ckpts.wait()
        return type(error), ckpts.all_steps()

    assert run_all(job, run)[:2] == [(ProcessLostError, (0,))] * 2


def test_a_step_chosen_by_is_saving_differs_and_the_error_names_free(tmp_path, monkeypatch):
    held = Held(monkeypatch)

    def run(client):
        ckpts = Checkpoints(tmp_path, client=client)
        for step in range(9):
            if client.process == 1 and step == 1:
                assert held.go.wait(PATIENCE_S)
                ckpts._saver.settle(None)
            if not ckpts.is_saving:
                ckpts.save(step, state(step))
            elif step == 5:
                held.go.set()
                ckpts._saver.settle(None)

    results = run_all(LocalJob(2), run)
    for error in results:
        assert isinstance(error, DivergenceError)
        assert set(error.sides) == {"step=1", "step=6"}
        assert 'If is_saving chose it, use Checkpoints(every="free") instead.' in str(error)
