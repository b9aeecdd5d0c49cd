"""A history shared by several processes, and by jobs that follow each other or run at once."""

from __future__ import annotations

import functools
import logging
import threading
from datetime import timedelta

import numpy as np
import pytest

from cli import sample_checkpoints
from collectives.thread_jobs import run_all
from shoal.checkpoint.blocks.reader import verify_files
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history import saver as saving
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.history.saver import Rate, seconds_needed
from shoal.checkpoint.planning.policies import EverySeconds, Keep
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DeadlineError,
    DivergenceError,
    NotCommittedError,
    SaveAbortedError,
    StorageError,
)
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.preemption import preempted
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.system import fault_points


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


def together(count, function):
    """Run a function in all processes of a job, which agree in what they raise."""
    results = run_all(LocalJob(count), function)
    kinds = {type(result) for result in results if isinstance(result, BaseException)}
    assert not kinds or all(isinstance(result, BaseException) for result in results), results
    return results


def raised(results):
    (kind,) = {type(result) for result in results}
    return kind


def test_all_processes_save_and_see_the_same(tmp_path):
    def run(client):
        with Checkpoints(tmp_path, keep=2, every=2, client=client) as ckpts:
            _, first = ckpts.resume(None, state(-1))
            done = [ckpts.save(step, state(step)) for step in range(first, 8)]
            ckpts.wait()
            return first, done, ckpts.all_steps(), ckpts.restore()["step"]

    assert together(3, run) == [(0, [False, True] * 4, (5, 7), 7)] * 3
    assert together(2, run) == [(8, [], (5, 7), 7)] * 2
    files = sorted(path.name[:4] for path in (tmp_path / "step_000000000007").iterdir())
    assert set(files) == {"COMM", "data", "inde", "mani"}


def test_different_checkpoints_options_raise_divergence(tmp_path):
    def run(client):
        Checkpoints(tmp_path, keep=1 + client.process, client=client)

    results = together(2, run)
    assert raised(results) is DivergenceError
    assert "keep=" in str(results[0])


class Even(Keep):
    """A policy of somebody's own."""

    def kept(self, saved):
        return frozenset(one.step for one in saved if one.step % 2 == 0)


def test_policies_and_rules_of_ones_own_are_the_same_on_all(tmp_path):
    def run(client):
        rule = functools.partial(lambda least, step: step >= least, 3)
        with Checkpoints(tmp_path, keep=Even() | 1, every=rule, client=client) as ckpts:
            for step in range(7):
                ckpts.save(step, state(step))
        return ckpts.all_steps()

    assert together(2, run) == [(4, 6)] * 2


@pytest.mark.parametrize("limit_s", [0.5, None])
def test_a_function_that_outlasts_the_deadline_fails_the_next_save_alone(
    tmp_path, monkeypatch, limit_s
):
    go = threading.Event()

    def run(client):
        ckpts = Checkpoints(
            tmp_path, on_commit=lambda step, path: step > 1 or go.wait(60), client=client
        )
        ckpts.save(1, state(1))
        if client.process == 1:
            ckpts.wait()
        barrier.on(client, "saved", timeout_s=60)
        monkeypatch.setenv("SHOAL_TIMEOUT_S", "0.5")
        try:
            with pytest.raises((SaveAbortedError, DeadlineError)):
                ckpts.save(2, state(2), timeout_s=limit_s)
        finally:
            if limit_s or client.process == 1:  # process 0 waits for as long as it takes
                go.set()
        monkeypatch.setenv("SHOAL_TIMEOUT_S", "60")
        barrier.on(client, "failed", timeout_s=60)
        with ckpts:
            ckpts.save(3, state(3))
        return ckpts.all_steps()

    assert together(2, run) == [(1, 3)] * 2


def test_error_of_the_leader_is_raised_on_every_process(tmp_path):
    (tmp_path / "file").touch()

    def on_a_file(client):
        Checkpoints(tmp_path / "file", client=client)

    results = together(2, on_a_file)
    assert raised(results) is StorageError
    assert results[1].path == results[0].path

    def on_nothing(client):
        Checkpoints(tmp_path / "run", client=client).restore()

    assert raised(together(2, on_nothing)) is NotCommittedError

    def with_one_damaged(client):
        with Checkpoints(tmp_path / "run", client=client) as ckpts:
            ckpts.save(1, state(1))
            ckpts.wait()
            (tmp_path / "run" / "step_000000000001" / "COMMIT").write_text("{}")
            ckpts.restore()

    assert raised(together(2, with_one_damaged)) is CorruptCheckpointError


def test_seconds_are_the_leads(tmp_path):
    def run(client):
        ckpts = Checkpoints(tmp_path, every=timedelta(days=1), client=client)
        if client.process == 1:  # its clock is a week ahead
            ckpts._cadence._began -= 7 * 86_400
        later = [ckpts.should_save(step) for step in range(5)]
        if client.process == 0:
            ckpts._cadence._began -= 7 * 86_400
        return later, [ckpts.should_save(step) for step in range(5, 100)]

    results = together(3, run)
    assert results == [results[0]] * 3
    assert results[0][0] == [False] * 5
    assert True in results[0][1]


def test_always_due_is_always_saved(tmp_path):
    def run(client):
        with Checkpoints(tmp_path, every=EverySeconds(1e-9), client=client) as ckpts:
            return [ckpts.save(step, state(step)) for step in range(3)]

    assert together(2, run) == [[True] * 3] * 2


def test_failed_deletion_raises_once_on_all(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_FAULTS", "retain.before:raise")

    def run(client):
        with Checkpoints(tmp_path, keep=1, client=client) as ckpts:
            ckpts.save(1, state(1))
            try:
                ckpts.wait()
            except Exception as error:  # noqa: BLE001 - compared below
                found = error
            ckpts.wait()
            assert ckpts.save(2, state(2))
            ckpts.wait()
            return type(found).__name__, ckpts.all_steps()

    assert together(2, run) == [("InjectedError", (2,)), ("PeerFailedError", (2,))]


def test_loss_during_a_save_aborts_it_once_on_all_others(tmp_path, monkeypatch):
    job = LocalJob(3)
    reach = fault_points.reach

    def dying(point, process=None):
        if point == "save.write" and process == 2 and (tmp_path / "step_000000000001").exists():
            job.lose(2)
            raise KeyError("it is dead")
        reach(point, process)

    def run(client):
        ckpts = Checkpoints(tmp_path, client=client)
        ckpts.save(1, state(1))
        ckpts.wait()
        if client.process == 0:
            monkeypatch.setattr(fault_points, "reach", dying)
        assert ckpts.all_steps() == (1,)
        ckpts.save(2, state(2))
        with pytest.raises(CheckpointError if client.process < 2 else Exception) as caught:
            ckpts.wait()
        ckpts.wait()
        return type(caught.value), getattr(caught.value, "exit_code", 1), ckpts.all_steps()

    results = run_all(job, run)
    assert results[:2] == [(SaveAbortedError, 71, (1,))] * 2


def test_a_notice_makes_a_save_synchronous_and_its_deadline_counts(tmp_path, caplog, monkeypatch):
    job = LocalJob(2)
    limits = []
    start = saving_of(monkeypatch, limits)

    def run(client):
        ckpts = Checkpoints(tmp_path, client=client)
        ckpts.save(1, state(1))
        ckpts.wait()
        if client.process == 1:
            client.give_notice(ReceivedNotice("maintenance", "a test", deadline_s=500.0))
        step = 2
        while not preempted.on(client, step):
            step += 1
        ckpts._saver._rate = Rate(1, 1000.0)  # a very slow disk
        ckpts.save(step, state(step))
        latest = ckpts.latest()  # nobody waited
        ckpts.close()
        return latest == step, client.stop.exit_code

    with caplog.at_level(logging.WARNING, "shoal"):
        assert run_all(job, run) == [(True, 75)] * 2
    assert start is not None
    assert len(limits) == 4
    assert sorted(limit is None for limit in limits) == [False, False, True, True]
    assert all(0 < limit <= 500.0 for limit in limits if limit is not None)
    warnings = [record.message for record in caplog.records if "may not finish" in record.message]
    assert len(warnings) == 1
    assert "notice of process 1 (a test: maintenance) leaves" in warnings[0]


def saving_of(monkeypatch, limits):
    """Note the deadline of each save that begins."""
    from shoal.checkpoint.saving import background

    start = background.start_save

    def noting(client, request, *arguments, **named):
        limits.append(request.waits.until and request.waits.each_s)
        return start(client, request, *arguments, **named)

    monkeypatch.setattr(background, "start_save", noting)
    return start


def test_the_loop_of_the_documents_survives_preemption(tmp_path):
    """Until somebody is told to leave; then another job, of another size, goes on."""

    def train(client, told_at):
        with Checkpoints(tmp_path, keep=2, client=client) as ckpts:
            value, first = ckpts.resume(None, lambda: {"w": np.zeros(4)})
            for step in range(first, 50):
                value = {"w": value["w"] + step}
                if step == told_at and client.process == 0:
                    client.give_notice(ReceivedNotice("drained", "a test", None))
                stop = preempted.on(client, step)
                if stop or step % 10 == 9:
                    ckpts.save(step, value)
                if stop:
                    break
        return step, value["w"].tolist(), client.stop.exit_code

    first = run_all(LocalJob(3), lambda client: train(client, 23))
    stopped = first[0][0]
    assert first == [(stopped, [float(sum(range(stopped + 1)))] * 4, 75)] * 3
    assert stopped >= 23
    second = run_all(LocalJob(2), lambda client: train(client, -1))
    assert second == [(49, [float(sum(range(50)))] * 4, 0)] * 2


def test_an_attempt_that_is_complete_is_recovered_and_a_stale_one_ends(tmp_path, child_env):
    run = sample_checkpoints.run_of_two(tmp_path / "run")
    stale = sample_checkpoints.begun(run, 25)
    sample_checkpoints.killed_before_commit(run / "step_000000000030", child_env)
    alone = LocalJob(1).clients[0]
    Checkpoints(run, recover=False, client=alone)
    assert (run / "step_000000000025" / f"PENDING-{stale}").exists()
    ckpts = Checkpoints(run, client=alone)
    assert ckpts.all_steps() == (10, 20, 30)
    assert verify_files(open_checkpoint(LocalStore(run / "step_000000000030"))) == []
    assert (run / "step_000000000025" / f"PENDING-{stale}").exists(), "it may still be written"
    Checkpoints(run, lease_s=1e-9, client=alone)
    assert not (run / "step_000000000025").exists()


@pytest.mark.parametrize("file", ["manifest-", "index-", "data-"])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_newest_is_restored_though_a_job_deletes_the_one_that_was(
    tmp_path, monkeypatch, file, processes
):
    """At a read of one process, a running job saves two more steps, and keeps the last."""

    def train(steps):
        with Checkpoints(tmp_path, keep=1, client=LocalJob(1).clients[0]) as ckpts:
            for step in steps:
                ckpts.save(step, state(step))

    def goes_on(read):
        def call(self, name, *arguments):
            if name.startswith(file) and turn.acquire(blocking=False):
                train([2, 3])
            return read(self, name, *arguments)

        return call

    train([1])
    turn = threading.Semaphore(1)
    for name in ("read", "read_at"):
        monkeypatch.setattr(LocalFolder, name, goes_on(getattr(LocalFolder, name)))

    def look(client):
        with Checkpoints(tmp_path, recover=False, client=client) as ckpts:
            return ckpts.resume(None, dict)

    found = together(processes, look)
    assert [(value["step"], first) for value, first in found] == [(3, 4)] * processes


def test_last_step_deleted_during_resume_does_not_restart_the_run(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, client=LocalJob(1).clients[0]) as ckpts:
        ckpts.save(1, state(1))
        ckpts.wait()

        def deleted(self, *arguments):
            saved_steps.delete_step(LocalStore(tmp_path), 1)
            return read_at(self, *arguments)

        read_at = LocalFolder.read_at
        monkeypatch.setattr(LocalFolder, "read_at", deleted)
        with pytest.raises(NotCommittedError, match="was deleted while it was read"):
            ckpts.resume(None, dict)


@pytest.mark.parametrize(("lease_s", "stays"), [(60.0, True), (1e-9, False)])
def test_stale_attempts_go_with_old_steps_and_active_ones_are_kept(tmp_path, lease_s, stays):
    run = sample_checkpoints.run_of_two(tmp_path / "run")
    alone = LocalJob(1).clients[0]
    with Checkpoints(run, keep=1, lease_s=lease_s, client=alone) as ckpts:
        sample_checkpoints.begun(run, 25)
        ckpts.save(30, state(30))
    assert ckpts.all_steps() == (30,)
    assert (run / "step_000000000025").exists() is stays


def test_seconds_needed_grow_with_bytes():
    assert seconds_needed(10, Rate(0, 1.0)) == 10.0
    assert saving.total_bytes({"a": np.zeros(4), "b": 3, "c": "x"}) == 32
