"""Histories on a disk and in a bucket, of one process and of two."""

from __future__ import annotations

import copy
import itertools
import json
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from checkpoint.saved_contents import damage
from collectives.thread_jobs import PATIENCE_S
from shoal import Bucket
from shoal.checkpoint.at import store_at
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.planning.policies import (
    Best,
    EverySteps,
    Keep,
    Last,
    LastSeconds,
    Multiples,
)
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving import request as saving_request
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store.step_names import step_name
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.errors import (
    NotCommittedError,
    RestoreMismatchError,
    StorageError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.progress import Progress
from shoal.runtime.system import fault_points


def state(step):
    return {"w": np.full(4, float(step)), "step": step}


def test_a_run_whose_steps_are_all_damaged_does_not_begin_anew(place, job):
    def run(client):
        with Checkpoints(place, client=client) as ckpts:
            for step in (100, 200):
                ckpts.save(step, state(step))
            ckpts.wait()
            if client.process == 0:
                damage(place, 100)
                damage(place, 200)
            barrier.on(client, "damaged")
            called = []
            with pytest.raises(NotCommittedError, match="saved: 100, 200 are damaged") as caught:
                ckpts.resume(None, lambda: called.append(1), skip_corrupt=True)
            assert not called
            for step in (100, 200):
                ckpts.delete(step)
            return str(caught.value), ckpts.resume(None, state(0), skip_corrupt=True)[1]

    first, *others = job(run)
    assert "delete them (`delete(step)`)" in first[0]
    assert first[1] == 0
    assert all(one == first for one in others)


def leave_file(place, name):
    """Leave a file, or an object, in a history."""
    if isinstance(place, Bucket):
        store_at(place, "")._objects.put(name, b"notes")
    else:
        (place / name).write_text("notes")


def test_a_file_that_is_named_like_a_step_is_ignored(place, job, caplog):
    with Checkpoints(place, client=LocalJob(1).clients[0]) as ckpts:
        ckpts.save(1, state(1))
    leave_file(place, step_name(9))

    def run(client):
        with Checkpoints(place, keep=1, client=client) as ckpts:
            found = [ckpts.latest(), ckpts.all_steps(), ckpts.resume(None, dict)[1]]
            ckpts.save(2, state(2))
            ckpts.wait()
            return [*found, ckpts.info().step, ckpts.all_steps(), ckpts.best_step("loss")]

    found = job(run)
    assert all(one == [1, (1,), 2, 2, (2,), None] for one in found)
    told = [text for text in caplog.messages if "could not" in text or "ignored" in text]
    if isinstance(place, Bucket):  # its key is no step's: a step 9 can be saved beside it
        assert not told
    else:
        words = f"{place / step_name(9)} is a file, not the directory of a step: it is ignored"
        assert told == [words] * len(found)
        with pytest.raises(StorageError, match="Not a directory"):
            Checkpoints(place, client=LocalJob(1).clients[0]).save(9, state(9))
        assert (place / step_name(9)).read_text() == "notes"


def test_best_keeps_the_steps_between_evaluations_and_says_so_once(place, job, caplog):
    def run(client):
        found = []
        for keep, count in ((Best(2, "loss"), 14), (Best(2, "loss") | Last(3), 4)):
            with Checkpoints(place, keep=keep, client=client) as ckpts:
                _, first = ckpts.resume(None, state(0))
                for step in range(first, first + count):
                    metrics = {"loss": 20.0 - step} if step % 4 == 3 else None
                    ckpts.save(step, state(step), metrics=metrics)
            found.append(ckpts.all_steps())
        return found

    alone = (0, 1, 2, *range(4, 14))  # of 3, 7 and 11, which were evaluated, the best two
    assert all(found == [alone, (11, 15, 16, 17)] for found in job(run))
    (warning,) = [text for text in caplog.messages if "has only Best" in text]
    assert "without 'loss'; there are 11; to delete old ones, write keep=Best(…) | " in warning


def test_ages_are_those_of_the_clock_that_saved(place, job, monkeypatch):
    """By its stored time, each step is a minute after the one before: of the last two minutes."""
    times = iter([*range(0, 660, 60), 100_000])  # the lead alone reads the clock, once a save
    clock = SimpleNamespace(time_ns=lambda: next(times) * 10**9)
    monkeypatch.setattr(saving_request, "time", clock)

    def run(client):
        found = []
        for steps in (range(11), [11]):  # the second run begins a day later
            keep = LastSeconds(120) | Multiples(4)
            with Checkpoints(place, keep=keep, client=client) as ckpts:
                for step in steps:
                    ckpts.save(step, state(step))
            found.append(ckpts.all_steps())
        return found

    assert all(found == [(0, 4, 8, 9, 10), (0, 4, 8, 11)] for found in job(run))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_function_is_called_on_process_0_after_each_commit(place, job, asynchronous, caplog):
    calls, ckpts_of = [], {}

    def on_commit(step, path):
        ckpts = ckpts_of[0]
        assert str(path) == str(ckpts.path_of(step))
        calls.append((step, ckpts.all_steps(), ckpts.info(step).step))
        if step == 3:
            ckpts.pin(step)
            raise ValueError("no uplink")
        if step != 4:
            return
        for call in (
            ckpts.wait,
            ckpts.close,
            lambda: ckpts.save(9, state(9)),
            ckpts.restore,
            lambda: ckpts.resume(None, dict),
            lambda: ckpts.delete(step),
        ):
            with pytest.raises(UsageError, match="in on_commit="):
                call()

    def run(client):
        me = client.process
        ckpts = Checkpoints(
            place, keep=2, every=lambda step: step != 2, on_commit=on_commit,
            asynchronous=asynchronous, client=client,
        )  # fmt: skip
        ckpts_of[me] = ckpts
        barrier.on(client, "made")
        with ckpts:
            saved = [ckpts.save(step, state(step)) for step in range(6)]
        return saved, ckpts.all_steps()

    steps = (3, 4, 5)
    assert all(found == ([True, True, False, True, True, True], steps) for found in job(run))
    listed = {0: (0,), 1: (0, 1), 3: (1, 3), 4: (3, 4), 5: steps}
    assert calls == [(step, there, step) for step, there in listed.items()]
    (words,) = [one for one in caplog.records if "on_commit" in one.message]
    assert words.message == "step 3 is saved; on_commit raised: ValueError('no uplink')"
    assert "in on_commit" in words.exc_text, "the user's line"


@pytest.mark.parametrize("every", [None, "free"])
def test_a_function_that_exits_ends_nothing(place, job, every, caplog):
    """As commands of libraries do, which end by `sys.exit(0)`."""

    def run(client):
        with Checkpoints(
            place, every=every, on_commit=lambda *_: sys.exit(0), client=client
        ) as ckpts:
            for step in range(3):
                ckpts.save(step, state(step), force=True)
        return ckpts.all_steps()

    assert all(found == (0, 1, 2) for found in job(run))
    words = "is saved; on_commit raised: SystemExit(0)"
    assert sum(words in one.message for one in caplog.records) == 3


def test_the_next_save_waits_for_the_function_and_its_step_stays_meanwhile(place, job, monkeypatch):
    is_called, go, seen, progress_of = threading.Event(), threading.Event(), [], {}
    begin_wait = Progress.begin_wait

    def waiting(progress, point, now):
        begin_wait(progress, point, now)
        if progress is progress_of.get(0) and point.name == "the end of the save of step 1":
            go.set()

    monkeypatch.setattr(Progress, "begin_wait", waiting)

    def on_commit(step, path):
        if step == 1:
            is_called.set()
            assert go.wait(PATIENCE_S)
        seen.append((step, restore(path, processes=[0])["step"]))

    def run(client):
        me = client.process
        progress_of[me] = client.progress
        with Checkpoints(place, keep=1, on_commit=on_commit, client=client) as ckpts:
            ckpts.save(1, state(1))
            if me == 0:
                assert is_called.wait(PATIENCE_S)
                assert ckpts.is_saving
                assert ckpts.all_steps() == (1,)
            ckpts.save(2, state(2))
            found = [*seen]
        return me == 1 or (1, 1) in found, ckpts.all_steps()

    assert all(found == (True, (2,)) for found in job(run))
    assert seen == [(1, 1), (2, 2)]


def test_on_commit_must_be_a_function(place, job):
    def run(client):
        with pytest.raises(UsageTypeError, match=r"^Checkpoints: on_commit must be a function"):
            Checkpoints(place, on_commit="upload.sh", client=client)
        return True

    assert all(job(run))


def test_every_joins_a_number_a_time_and_a_function(place, job):
    def run(client):
        found = []
        for every in (
            EverySteps(5) | timedelta(hours=1) | (lambda step: step == 1),
            EverySteps(9) | 3,
        ):
            with Checkpoints(place, every=every, client=client) as ckpts:
                _, first = ckpts.resume(None, state(0))
                steps = range(first, first + 6)
                found.append([step for step in steps if ckpts.save(step, state(step))])
        return found

    assert all(found == [[1, 4], [5, 8]] for found in job(run))


class Thousands(Keep):
    """Keeps every thousandth step, if it returns anything."""

    def __init__(self, *, returns):
        self.returns = returns

    def kept(self, saved):
        return [one.step for one in saved if one.step % 1000 == 0] if self.returns else None


def test_a_policy_of_ones_own_that_returns_no_steps_is_refused_before_the_commit(place, job):
    def run(client):
        with Checkpoints(place, keep=Thousands(returns=True), client=client) as ckpts:
            for step in (1000, 1500, 2000, 2500):
                ckpts.save(step, state(step))
        found = [ckpts.all_steps()]
        keep = Last(1) | Thousands(returns=False)
        ckpts = Checkpoints(place, keep=keep, client=client)
        with pytest.raises(UsageTypeError, match=r"keep=Thousands\(\): kept\(\) returned None"):
            ckpts.save(3000, state(3000))
        return [*found, ckpts.all_steps()]

    assert all(found == [(1000, 2000, 2500)] * 2 for found in job(run))


def test_a_target_with_the_parameters_alone_is_restored_by_a_word(place, job):
    def run(client):
        tree = {"params": {"w": np.ones(4)}, "opt": {"mu": np.ones(4), "nu": np.ones(4)}}
        target = {"params": {"w": np.zeros(4)}}
        with Checkpoints(place, client=client) as ckpts:
            ckpts.save(7, tree)
            with pytest.raises(RestoreMismatchError, match=r"only='params/\*\*' or only='target'"):
                ckpts.restore(target=target)
            back = ckpts.restore(target=target, only="target")
            again, first = ckpts.resume(target, None, only="target")
        return [back.keys(), again.keys(), back["params"]["w"].tolist(), first]

    assert all(found == [{"params"}, {"params"}, [1.0] * 4, 8] for found in job(run))


def test_each_process_has_a_key_of_its_own(place, job):
    def run(client):
        keys = jax.random.split(jax.random.key(client.process, impl="rbg"), 3)
        own = PerProcess({"keys": keys, "step": 7, "old": np.asarray(jax.random.PRNGKey(1))})
        with Checkpoints(place, client=client) as ckpts:
            ckpts.save(1, {"rng": own})
            for target in (None, {"rng": own}):
                back = ckpts.restore(target=target)["rng"].value
                assert back["keys"].dtype == keys.dtype
                assert jax.random.bits(back["keys"][2]) == jax.random.bits(keys[2])
            again, first = ckpts.resume({"rng": own}, None)
        return jax.random.key_data(again["rng"].value["keys"]).tolist(), first

    found = job(run)
    for process, one in enumerate(found):
        keys = jax.random.split(jax.random.key(process, impl="rbg"), 3)
        assert one == (jax.random.key_data(keys).tolist(), 2)


def test_unsupported_per_process_values_raise_with_supported_types(place, job):
    one = {"a": object(), "b": PerProcess(1), "c": jax.numpy.ones(2), "d": jax.random.key(0)}

    def run(client):
        with pytest.raises(UsageTypeError) as caught:
            save.on(client, store_at(place, ""), {"own": PerProcess(one)})
        return caught.value.problems

    for problems in job(run):
        assert [*problems] == [
            "own: a: is an object; pass NumPy arrays, numbers, str, bytes, PRNG keys or None",
            "own: b: is a PerProcess in another; pass its .value",
            "own: c: is an ArrayImpl; save np.asarray(…) of it",
        ]


def test_user_data_and_metrics_can_be_dumped_as_json(place, job):
    user = {"data": {"files": ["a", "b"], "seed": None}, "rate": 0.5}

    def run(client):
        with Checkpoints(place, client=client) as ckpts:
            ckpts.save(1, state(1), user=user, metrics={"loss": 0.5})
            found = copy.deepcopy(ckpts.info())
        return json.loads(json.dumps([found.user, found.metrics]))

    assert all(found == [user, {"loss": 0.5}] for found in job(run))


def test_free_begins_no_save_while_one_runs_and_the_next_at_one_step(place, job, monkeypatch):
    go, reach = threading.Event(), fault_points.reach

    def held(point, process=None):
        if point == "save.write":
            assert go.wait(PATIENCE_S)
        reach(point, process)

    monkeypatch.setattr(fault_points, "reach", held)

    def run(client):
        with Checkpoints(place, keep=2, every="free", client=client) as ckpts:
            begun = [step for step in range(9) if ckpts.save(step, state(step))]
            assert ckpts.is_saving
            barrier.on(client, "the save is held")
            go.set()
            second = next(step for step in itertools.count(9) if ckpts.save(step, state(step)))
            assert not ckpts.should_save(second)
            ckpts.wait()
            assert not ckpts.should_save(second), "it is saved"
            assert ckpts.save(second + 1, state(second + 1)), "no save runs"
        return begun, second, ckpts.all_steps()

    results = job(run)
    begun, second, steps = results[0]
    assert results == [results[0]] * len(results)
    assert (begun, steps) == ([0], (second, second + 1))


def test_free_without_a_thread_saves_each_step(place, job):
    def run(client):
        options = {"asynchronous": False, "client": client}
        with Checkpoints(place, every="free", **options) as ckpts:
            return [ckpts.save(step, state(step)) for step in range(3)]

    for result in job(run):
        assert result == [True] * 3
