"""Every request of a run that fails, in every way in which a request can: nothing is lost.

In memory here, at each request of a run; `test_fault_proxy` does it on a server.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

import shoal
from shoal.checkpoint.bucket.object_store import ObjectStore
from shoal.checkpoint.bucket.objects import MemoryObjects, UnclearError
from shoal.checkpoint.store import opening, saved_steps
from shoal.errors import ShoalError, StorageError
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.store_contract import Save

STEPS = range(2)
WRITES = ("put", "put_new", "put_over", "remove", "finish")


class Line:
    """The line between client and bucket: which request fails, and how."""

    def __init__(self, kind="", at=0):
        self.kind, self.at = kind, at
        self.requests = self.fired = 0

    def ask(self, name, request):
        """Carry out a request of this name, or not."""
        self.requests += 1
        is_hit = self.requests == self.at or (self.kind == "down" and self.requests >= self.at > 0)
        if not is_hit or (self.kind == "conflict" and name not in ("put_new", "put_over")):
            return request()
        self.fired += 1
        if self.kind == "conflict":  # a 409, with nothing written
            raise FileExistsError(name)
        if self.kind == "after":
            request()
        is_unclear = self.kind != "refused" and name in WRITES
        raise (UnclearError if is_unclear else StorageError)(f"{name} fails", path=name)


class Faulty(MemoryObjects):
    """A bucket at the end of such a line."""

    line: Line

    def below(self, name):
        there = super().below(name)
        there.__class__, there.line = Faulty, self.line
        return there

    def open_new(self, name, num_bytes):
        file = super().open_new(name, num_bytes)
        finish = file.finish
        file.finish = lambda size: self.line.ask("finish", lambda: finish(size))
        return file


def _asked(name):
    real = getattr(MemoryObjects, name)

    def ask(self, *arguments):
        return self.line.ask(name, lambda: real(self, *arguments))

    return ask


for _name in ("listed", "listed_below", "info", "read", "read_at", "put", "put_new", "put_over",
              "remove"):  # fmt: skip
    setattr(Faulty, _name, _asked(_name))


def tree_of(step):
    return {"w": np.full((40, 30), step, np.float32), "step": step}


def one():
    return LocalJob(1).clients[0]


def run(root, saved, done):
    """Save a few steps, and restore; note what was acknowledged."""
    with shoal.Checkpoints(root, keep=1, asynchronous=False, client=one()) as ckpts:
        _, first = ckpts.resume(None, tree_of(0))
        for step in range(first, first + len(STEPS)):
            ckpts.save(step, tree_of(step))
            saved.append(step)
        done.append(ckpts.restore(step)["step"])


def test_opening_a_run_reads_one_object_of_each_step():
    lines = []
    for many in (3, 30):
        objects = Faulty()
        objects.line = Line()
        root = ObjectStore(objects)
        for step in range(many):
            Save(f"{step:012x}", step=step).save(root.step(step))
        objects.line = line = Line()
        assert saved_steps.open_history(root, idle_s=600) == many - 1
        lines.append(line.requests)
    assert (lines[0], lines[1] - lines[0]) == (7, 27)


@pytest.fixture
def quick(monkeypatch):
    """Let repeated writes come at once, and end after a few."""
    monkeypatch.setattr("shoal.checkpoint.bucket.register._PAUSE_S", 1e-4)
    monkeypatch.setattr("shoal.checkpoint.bucket.register._LONGEST_PAUSE_S", 1e-3)
    monkeypatch.setenv("SHOAL_TIMEOUT_S", "0.02")


def saves_the_next(ckpts, saved, tree_of):
    """What was acknowledged is there and whole, and the next step is saved; return it."""
    steps = ckpts.all_steps()
    # The last one, or one that was committed while an error was raised.
    assert max([-1, *saved]) <= max([-1, *steps]) <= max([-1, *saved]) + 1, (saved, steps)
    state, first = ckpts.resume(None, tree_of(-1))
    assert first == max([-1, *steps]) + 1
    if steps:
        assert np.array_equal(state["w"], tree_of(first - 1)["w"])
    ckpts.save(first, tree_of(first))
    return first


def check(objects, saved):
    """The next run goes on."""
    root = ObjectStore(objects)
    with shoal.Checkpoints(root, keep=2, lease_s=0.001, client=one()) as ckpts:
        first = saves_the_next(ckpts, saved, tree_of)
        ckpts.save(first + 1, tree_of(first + 1))
        ckpts.wait()
        assert ckpts.all_steps() == (first, first + 1)
    for _, store in root.steps():
        store.collect_garbage(idle_s=0)
        commit = store.committed()
        names = {"COMMIT", commit.manifest.name, commit.index.name}
        assert {name for name in store.names() if "data-" not in name} == names
        opening.open_checkpoint(store)
    assert len(saved_steps.commits(root)) == 2


def count():
    objects, line = Faulty(), Line()
    objects.line = line
    run(ObjectStore(objects), [], [])
    return line.requests


KINDS = ("refused", "before", "after", "conflict", "down")
PART = int(sys.version_info >= (3, 12))  # each Python tries some, make test-buckets all


SOME_KINDS = [
    *KINDS[PART::2],
    *(pytest.param(kind, marks=pytest.mark.buckets) for kind in KINDS[1 - PART :: 2]),
]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_request_that_fails_loses_nothing(kind, quick):
    total, fired, ended = count(), 0, 0
    assert total > 40
    for at in range(1, total + 1):
        objects, line = Faulty(), Line(kind, at)
        objects.line = line
        saved, done = [], []
        try:
            run(ObjectStore(objects), saved, done)
            assert done == [STEPS[-1]]
        except ShoalError:
            ended += 1
        fired += line.fired > 0
        line.at = 0  # the line is mended
        check(objects, saved)
    assert fired > 4 if kind == "conflict" else fired == total
    assert (ended == 0) == (kind == "conflict"), ended


# ---- a damaged step is saved again


def damaged():
    """Return a bucket with two steps of which the newest is damaged."""
    objects = Faulty()
    objects.line = Line()
    with shoal.Checkpoints(ObjectStore(objects), asynchronous=False, client=one()) as ckpts:
        for step in range(2):
            ckpts.save(step, tree_of(step))
    here = objects.below("step_000000000001")
    (name,) = [info.name for info in here.listed().infos if info.name.startswith("data-")]
    here.put(name, bytes(len(here.read(name)[0])))
    return objects, here


def replace(objects, line=None):
    """Save the step again that `resume` has skipped."""
    with shoal.Checkpoints(
        ObjectStore(objects), keep=2, lease_s=0.001, asynchronous=False, client=one()
    ) as ckpts:
        _, first = ckpts.resume(None, tree_of(0), skip_corrupt=True)
        if line is not None:
            objects.line.kind, objects.line.at, objects.line.requests = *line, 0
        ckpts.save(first, tree_of(first))
        objects.line.at = 0
        return first, ckpts.restore(first)["step"]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_replacement_that_fails_leaves_the_old_step_or_the_new_one(kind, quick):
    objects, _ = damaged()
    assert replace(objects, ("", 0)) == (1, 1)
    total, outcomes = objects.line.requests, set()
    for at in range(1, total + 1):
        objects, here = damaged()
        store, files = ObjectStore(here), {info.name for info in here.listed().infos}
        old = store.standing()
        try:
            replace(objects, (kind, at))
            outcome = "saved"
        except ShoalError:
            outcome = "failed"
        objects.line.at = 0
        if store.standing() == old:
            assert outcome == "failed"
            assert {info.name for info in here.listed().infos} >= files
            assert replace(objects)[0] in (1, 2), "a complete attempt is committed by the next run"
        else:
            outcome += ", and it is there"
        opening.open_checkpoint(store)
        assert np.array_equal(shoal.restore(store)["w"], tree_of(1)["w"])
        outcomes.add(outcome)
    assert "saved, and it is there" in outcomes
    assert ("failed" in outcomes) == (kind != "conflict")
