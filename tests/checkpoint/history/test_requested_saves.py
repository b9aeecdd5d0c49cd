"""A history of which a save is requested: at steps that `every=` skips, in two of them, failing."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from collectives.thread_jobs import run_all
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.errors import CheckpointError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.preemption import preempted
from shoal.runtime.rules.requested_saves import SaveState
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.system import fault_points


def state(step):
    return {"w": np.full(4, float(step))}


class Job:
    """A job of two threads, and what those who requested saves were answered."""

    def __init__(self):
        self.local = LocalJob(2)
        self.answers = []

    @property
    def ends(self):
        return [one for one in self.answers if one.state in ("committed", "failed")]

    def request_at(self, client, step, moments):
        """Request a save on process 0 when both processes come to one of these steps."""
        if step in moments:
            if client.process == 0:
                self.local.request_save(self.answers.append)
            barrier.on(client, f"requested at {step}")

    def run(self, function):
        results = run_all(self.local, function)
        errors = [result for result in results if isinstance(result, BaseException)]
        assert not errors, errors
        assert results[0] == results[1]
        return results[0]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_a_step_that_every_skips_is_saved_on_request(tmp_path, asynchronous, asks):
    job = Job()

    def train(client):
        options = {"every": 10, "asynchronous": asynchronous, "client": client}
        with Checkpoints(tmp_path, **options) as ckpts:
            saved = []
            for step in range(20):
                job.request_at(client, step, {3, 7, 9})
                if (not asks or ckpts.should_save(step)) and ckpts.save(step, state(step)):
                    saved.append(step)
            return saved, ckpts.wait() or ckpts.all_steps()

    assert job.run(train) == ([3, 7, 9, 19], (3, 7, 9, 19))
    assert job.ends == [SaveState("committed", step) for step in (3, 7, 9)]
    assert {one.is_by_steps for one in job.answers if one.state == "agreed"} == {True}


def test_a_last_save_by_force_finds_the_last_step_saved_on_request(tmp_path):
    """Without the request it is the only save of this step."""
    job = Job()

    def train(client):
        with Checkpoints(tmp_path, every=10, client=client) as ckpts:
            for step in range(6):
                job.request_at(client, step, {5})
                ckpts.save(step, state(step))
            assert ckpts.save(5, state(5), force=True)
            return ckpts.all_steps()

    assert job.run(train) == (5,)
    assert job.ends == [SaveState("committed", 5)]


def test_a_loop_that_chooses_its_steps_answers_with_the_next(tmp_path):
    job = Job()

    def train(client):
        with Checkpoints(tmp_path, client=client) as ckpts:
            for step in range(10):
                job.request_at(client, step, {2})
                if step % 5 == 4:
                    ckpts.save(step, state(step))

    job.run(train)
    assert job.answers == [SaveState("agreed", 0, False), SaveState("committed", 4)]


def test_all_histories_of_a_program_save_the_step(tmp_path):
    job = Job()

    def train(client):
        options = {"every": 100, "client": client}
        with (
            Checkpoints(tmp_path / "a", **options) as first,
            Checkpoints(tmp_path / "b", **options) as second,
        ):
            for step in range(6):
                job.request_at(client, step, {3})
                first.save(step, state(step))
                second.save(step, state(step))
            first.wait()
            second.wait()
            return first.all_steps(), second.all_steps()

    assert job.run(train) == ((3,), (3,))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_is_reported_and_the_next_request_is_saved(
    tmp_path, monkeypatch, asynchronous
):
    job, reach = Job(), fault_points.reach

    def failing(point, process=None):
        if point == "save.write" and process == 1 and not job.ends:
            raise OSError(errno.ENOSPC, "no space is left, says the test")
        reach(point, process)

    def train(client):
        options = {"every": 100, "asynchronous": asynchronous, "client": client}
        failed = []
        with Checkpoints(tmp_path, **options) as ckpts:
            for step in range(8):
                job.request_at(client, step, {2, 5})
                try:
                    ckpts.save(step, state(step))
                    ckpts.wait()
                except (CheckpointError, OSError):
                    failed.append(step)
            return failed, ckpts.all_steps()

    monkeypatch.setattr(fault_points, "reach", failing)
    assert job.run(train) == ([2], (5,))
    assert job.ends == [SaveState("failed", 2), SaveState("committed", 5)]


def test_a_notice_takes_the_place_of_a_request_that_comes_after_it(tmp_path):
    job = Job()

    def train(client):
        with Checkpoints(tmp_path, every=100, client=client) as ckpts:
            for step in range(20):
                if step == 4 and client.process == 0:
                    client.give_notice(ReceivedNotice("Terminated", "SIGTERM"))
                job.request_at(client, step, {4})
                stop = preempted.on(client, step)
                ckpts.save(step, state(step))
                if stop:
                    break
            return ckpts.all_steps()

    assert job.run(train) == (4,)
    assert job.answers == [SaveState("preempted"), SaveState("committed", 4)]
