"""Answers that are wrong, though the bucket is intact: no step is lost, replaced or passed over.

In memory here, at each request of a run; `test_fault_proxy` does it on a server.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import numpy as np
import pytest

import shoal
from checkpoint.bucket.test_faults import one, tree_of
from shoal.checkpoint.bucket.object_store import ObjectStore
from shoal.checkpoint.bucket.objects import FoundPart, MemoryObjects, ObjectInfo, PrefixContents
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store import opening, saved_steps
from shoal.checkpoint.store.step_names import COMMIT
from shoal.errors import CheckpointError, ShoalError, StorageError
from shoal.testing.store_contract import Save

PAGE = b"<!DOCTYPE html><html><body>Sign in to this network</body></html>"
KINDS = ("absent", "page", "flipped", "cut")
LISTINGS = {"listed": PrefixContents([], []), "listed_below": {}}


class Answers:
    """Which requests are answered wrongly, and how."""

    def __init__(self, kind="", at=0, times=1, of=""):
        """`of`: only requests for a name that begins with it."""
        self.kind, self.at, self.times, self.of = kind, at, times, of
        self.requests = self.fired = 0

    def ask(self, name, request, arguments):
        is_meant = not self.of or str(arguments[:1]).startswith(f"('{self.of}")
        self.requests += is_meant
        if not (is_meant and self.at <= self.requests < self.at + self.times):
            return request()
        self.fired += 1
        answer = wrong(self.kind, name, request, arguments)
        if answer is not None:
            return answer
        self.fired -= 1
        return request()


def wrong(kind, name, request, arguments):
    """Return a wrong answer; None: there is none of this kind to such a request."""
    if name in LISTINGS:
        return LISTINGS[name] if kind == "page" else None
    if kind == "absent":
        raise FileNotFoundError(name)
    if name == "info":
        return ObjectInfo(arguments[0], len(PAGE), "7", 0.0) if kind == "page" else None
    if name == "read" and kind == "page":
        return PAGE, "7"
    if name == "read":
        data, version = request()
        return harmed(kind, data), version
    part = arguments[2][0]
    if kind == "page":
        part[: len(PAGE)] = PAGE[: len(part)]
        return FoundPart(min(len(part), len(PAGE)), len(PAGE))
    found = request()
    if kind == "cut":
        return FoundPart(found.num_bytes // 2, found.size)
    part[:] = harmed(kind, bytes(part))
    return found


def harmed(kind, data):
    if kind == "cut":
        return data[: len(data) // 2]
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :] if data else data


class Lying(MemoryObjects):
    """A bucket that answers wrongly at times."""

    answers = Answers()

    def below(self, name):
        there = super().below(name)
        there.__class__, there.answers = Lying, self.answers
        return there


def _asked(name):
    real = getattr(MemoryObjects, name)

    def ask(self, *arguments):
        return self.answers.ask(name, lambda: real(self, *arguments), arguments)

    return ask


for _name in ("listed", "listed_below", "info", "read", "read_at"):
    setattr(Lying, _name, _asked(_name))


def saved(steps=2):
    """Return a bucket with a run of a few steps."""
    objects = Lying()
    with shoal.Checkpoints(ObjectStore(objects), asynchronous=False, client=one()) as ckpts:
        for step in range(steps):
            ckpts.save(step, tree_of(step))
    return objects


def run(objects):
    """Go on from the newest step; return what was restored and acknowledged."""
    root = ObjectStore(objects)
    with shoal.Checkpoints(root, keep=2, asynchronous=False, client=one()) as ckpts:
        state, first = ckpts.resume(None, tree_of(-1), skip_corrupt=True)
        assert np.array_equal(state["w"], tree_of(first - 1)["w"])
        ckpts.save(first, tree_of(first))
        return [first, ckpts.restore(skip_corrupt=True)["step"], ckpts.latest()]


def committed(objects):
    """Return the attempts of all steps, each of which is intact."""
    found = {one.step: one for one in saved_steps.commits(ObjectStore(objects))}
    for one_step in found.values():
        opening.open_checkpoint(one_step.store)
        value = shoal.restore(one_step.store)
        assert np.array_equal(value["w"], tree_of(one_step.step)["w"])
    return {step: one.commit.attempt for step, one in found.items()}


@functools.cache
def total():
    objects = saved()
    objects.answers = Answers()
    assert run(objects) == [2, 2, 2]
    return objects.answers.requests


# `make test` tries some requests, other ones on each Python, and `make test-buckets` all.
SHARES = 8
SOME = 1 + int(sys.version_info >= (3, 12))
SHARE = [
    SOME, *(pytest.param(n, marks=pytest.mark.buckets) for n in range(SHARES) if n != SOME)
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARE)
def test_one_wrong_answer_changes_nothing(kind, share):
    fired = 0
    for at in range(1 + share, total() + 1, SHARES):
        objects = saved()
        before = committed(objects)
        objects.answers = answers = Answers(kind, at)
        assert run(objects) == [2, 2, 2], at
        fired += answers.fired
        objects.answers = Answers()
        after = committed(objects)
        assert sorted(after) == [1, 2]
        assert after[1] == before[1]
    assert fired >= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "times", [2, *(pytest.param(n, marks=pytest.mark.buckets) for n in (3, 6))]
)
@pytest.mark.parametrize("share", SHARE)
def test_more_wrong_answers_lose_and_replace_nothing(kind, times, share):
    for at in range(1 + share, total() + 1, SHARES):
        objects = saved()
        before = committed(objects)
        objects.answers = Answers(kind, at, times)
        first = None
        with contextlib.suppress(ShoalError):
            first, *_ = run(objects)
        objects.answers = Answers()
        after = committed(objects)
        assert after[1] == before[1]
        assert first in (None, 2), at
        assert max(after) == 2 or first is None


@pytest.mark.parametrize("saved_steps", [0, 2])
def test_a_page_for_every_request_is_no_new_run(saved_steps):
    objects = saved(saved_steps)
    objects.answers = Answers("page", 1, 1 << 30)
    root = ObjectStore(objects)
    with pytest.raises(StorageError, match="a proxy may answer in place of the bucket"):
        shoal.Checkpoints(root, recover=False, client=one())
    with pytest.raises(CheckpointError):
        save.on(one(), root, tree_of(0))


def test_a_listing_that_ends_with_a_whole_page_is_made_again():
    objects = saved(0)
    root = ObjectStore(objects)
    for step in range(1000):
        root.step(step).leave("x")
    objects.answers = Answers()
    assert len(root.steps()) == 1000
    assert objects.answers.requests == 2
    root.step(1000).leave("x")
    assert len(root.steps()) == 1001
    assert objects.answers.requests == 3


def test_a_commit_that_is_listed_and_cannot_be_read_is_an_error():
    objects = saved()
    for skip_corrupt in (False, True):
        with shoal.Checkpoints(ObjectStore(objects), recover=False, client=one()) as ckpts:
            objects.answers = Answers("absent", 1, 1 << 30, of=COMMIT)
            with pytest.raises(StorageError, match="step_000000000001: the bucket lists a COMMIT"):
                ckpts.resume(None, tree_of(0), skip_corrupt=skip_corrupt)
            objects.answers = Answers()


@pytest.mark.parametrize("of", ["COMMIT", "manifest-", "index-", "data-"])
@pytest.mark.parametrize("is_mended", [False, True])
def test_a_step_that_was_skipped_is_replaced_only_if_it_is_still_damaged(of, is_mended):
    objects = saved()
    before = committed(objects)
    with shoal.Checkpoints(
        ObjectStore(objects), asynchronous=False, client=one(), recover=False
    ) as ckpts:
        objects.answers = Answers("flipped", 1, 2, of=of)  # of the newest step
        _, first = ckpts.resume(None, tree_of(0), skip_corrupt=True)
        assert first == 1
        if is_mended:
            with pytest.raises(StorageError, match=f"this run skipped step 1, since {of}.* intact"):
                ckpts.save(1, tree_of(1))
            assert committed(objects) == before
            assert ckpts.resume(None, tree_of(0))[1] == 2
        else:
            step = objects.below("step_000000000001")
            (name,) = [info.name for info in step.listed().infos if info.name.startswith(of)]
            step.put(name, harmed("flipped", step.read(name)[0]))
            ckpts.save(1, tree_of(1))
            assert committed(objects)[1] != before[1]


@pytest.mark.parametrize("kind", ["absent", "page"])
@pytest.mark.parametrize("times", [2, 6, 1 << 30])
def test_a_delete_that_returns_has_deleted(kind, times):
    def by_checkpoints(objects):
        root = ObjectStore(objects)
        with shoal.Checkpoints(root, client=one(), recover=False) as ckpts:
            ckpts.delete(1)

    def by_command(objects):
        saved_steps.delete_saved(ObjectStore(objects).step(1))

    for delete in (by_checkpoints, by_command):
        objects, at, is_over = saved(), 0, False
        while not is_over:
            at += 1
            objects.answers = answers = Answers(kind, at, times)
            try:
                delete(objects)
                is_deleted = True
            except ShoalError:
                is_deleted = False
            objects.answers, is_over = Answers(), answers.requests < at
            is_there = ObjectStore(objects).step(1).standing() is not None
            assert not (is_there and is_deleted), (delete, at)
            if not is_there:
                objects = saved()
        assert at > 5


@pytest.mark.parametrize("kind", ["absent", "page", "cut"])
def test_lease_that_is_misread_keeps_its_owner(kind):
    """It says what its attempt replaces: a beat that wrote back a page would lose that."""
    objects, at, is_over = Lying(), 0, False
    store, owner = ObjectStore(objects), {"host": "here", "replaces": "00000000000b"}
    store.begin(Save("00000000000a").manifest, owner)
    while not is_over:
        at += 1
        objects.answers = answers = Answers(kind, at, times=1 + at % 2)
        store.refresh("00000000000a")
        objects.answers, is_over = Answers(), answers.requests < at
        (attempt,) = store.state().attempts
        assert attempt.owner == owner
    assert at > 1
