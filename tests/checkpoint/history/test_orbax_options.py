"""The options and policies of orbax in the page about it: none is forgotten, each row holds."""

from __future__ import annotations

import ast
import itertools
import re
import threading
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from cli import sample_checkpoints
from collectives.thread_jobs import run_all
from meta.source import ROOT
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.planning.policies import (
    Best,
    EverySeconds,
    EverySteps,
    Keep,
    Last,
    LastSeconds,
    Multiples,
    Pinned,
)
from shoal.checkpoint.saving import request as saving_request
from shoal.errors import SaveAbortedError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.notices import ReceivedNotice
from shoal.runtime.preemption import preempted

OPTIONS = (
    "save_interval_steps", "max_to_keep", "keep_time_interval", "keep_period", "best_fn",
    "best_mode", "keep_checkpoints_without_metrics", "step_prefix", "step_format_fixed_length",
    "step_name_format", "create", "cleanup_tmp_directories", "save_on_steps",
    "single_host_load_and_broadcast", "todelete_subdir", "todelete_full_path",
    "enable_background_delete", "num_deletion_threads", "read_only", "enable_async_checkpointing",
    "async_options", "multiprocessing_options", "should_save_fn", "file_options",
    "atomicity_options", "save_root_metadata", "temporary_path_class", "save_decision_policy",
    "preservation_policy", "prevent_write_metrics",
    "enable_should_save_is_saving_in_progress_check", "enable_per_process_directory_creation",
    "lightweight_initialize",
)  # fmt: skip
SAVING = (
    "FixedIntervalPolicy", "SpecificStepsPolicy", "ContinuousCheckpointingPolicy",
    "PreemptionCheckpointingPolicy", "InitialSavePolicy", "AnySavePolicy", "SaveDecisionPolicy",
)  # fmt: skip
KEEPING = (
    "PreserveAll", "LatestN", "EveryNSeconds", "EveryNSteps", "EveryNStepsClosest", "CustomSteps",
    "AnyPreservationPolicy", "BestN", "LatestDuration", "PreservationPolicy",
)  # fmt: skip
LISTS = {
    "Options of a `CheckpointManager`": OPTIONS,
    "When a step is saved": SAVING,
    "Which steps are kept": KEEPING,
}
PAGE = (ROOT / "docs/coming-from/orbax.md").read_text(encoding="utf-8")


# ---- none is forgotten


class Row(NamedTuple):
    names: list[str]  # orbax's, of the list
    is_here: bool
    reason: str


def rows(heading: str) -> list[Row]:
    """Return the rows of the first table below a heading."""
    text = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = []
    for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[2:]:
        first, ours, *more = (cell.strip() for cell in re.split(r"(?<!\\)\|", line))
        names = [name for name in re.findall(r"\w+", first) if name in LISTS[heading]]
        reason = " ".join([ours.removeprefix("not here").lstrip(":"), *more]).strip()
        found.append(Row(names, not ours.startswith("not here"), reason))
    return found


@pytest.mark.parametrize("heading", LISTS)
def test_each_has_a_row_with_a_test_or_a_reason(heading):
    table = rows(heading)
    assert all(row.names for row in table), "each row names one of the list"
    assert {name for row in table for name in row.names} == set(LISTS[heading])
    here = {name for row in table if row.is_here for name in row.names}
    assert here == set(LISTS[heading]) & set(itertools.chain(*HELD_TOGETHER))
    assert all(len(row.reason) > 20 for row in table if not row.is_here)


ORBAX = find_spec("orbax.checkpoint") if find_spec("orbax") else None


@pytest.mark.skipif(ORBAX is None, reason="the environment of the newest Python has orbax")
def test_the_lists_are_those_of_orbax():
    (folder,) = map(Path, ORBAX.submodule_search_locations)
    policies = folder / "experimental/v1/_src/training"
    classes = ast.parse((folder / "checkpoint_manager.py").read_text()).body
    (options,) = (one for one in classes if getattr(one, "name", "") == "CheckpointManagerOptions")
    fields = [one.target.id for one in options.body if isinstance(one, ast.AnnAssign)]
    assert sorted(fields) == sorted(OPTIONS)
    for file, names in (("save_decision_policies", SAVING), ("preservation_policies", KEEPING)):
        body = ast.parse((policies / f"{file}.py").read_text()).body
        given = {one.targets[0].id for one in body if isinstance(one, ast.Assign)}
        given |= {one.name for one in body if isinstance(one, ast.ClassDef)}
        others = {"PyTree", "NestedDict", "PreservationContext", "DecisionContext"}
        assert {name for name in given if name[0] != "_"} - others == set(names)


# ---- each row holds

HELD_TOGETHER = {}


def holds(*names):
    """Register what the rows say of these names."""

    def register(function):
        HELD_TOGETHER[names] = function
        return function

    return register


class Room(NamedTuple):
    """Where a row is tried."""

    path: Path
    env: dict[str, str]
    monkeypatch: pytest.MonkeyPatch
    numbers: itertools.count

    def new(self, *, number=None, client=None, **options):
        """Make a history, in a directory of its own unless a number is given."""
        path = self.path / f"{next(self.numbers) if number is None else number}"
        client = client or LocalJob(1).clients[0]
        return Checkpoints(path, client=client, **options)


def saved(ckpts, steps=range(30), **metrics):
    """Save steps, with a function of the step for each metric; return those that are there."""
    with ckpts:
        for step in steps:
            found = {name: of(step) for name, of in metrics.items()}
            ckpts.save(step, {"w": np.full(2, step)}, metrics=found or None)
    return ckpts.all_steps()


@holds("save_interval_steps", "FixedIntervalPolicy")
def _(room):
    assert saved(room.new(every=10)) == (9, 19, 29)
    assert saved(room.new(every=lambda step: step % 10 == 0)) == (0, 10, 20)


@holds("save_on_steps", "SpecificStepsPolicy", "should_save_fn", "SaveDecisionPolicy")
def _(room):
    assert saved(room.new(every=lambda step: step in {5, 7})) == (5, 7)


@holds("save_decision_policy", "AnySavePolicy")
def _(room):
    every = EverySteps(10) | timedelta(hours=1) | (lambda step: step in {5, 7})
    assert saved(room.new(every=every)) == (5, 7, 9, 19, 29)


@holds("InitialSavePolicy")
def _(room):
    every = EverySteps(10) | (lambda step: step == 0)
    assert saved(room.new(number=1, every=every)) == (0, 9, 19, 29)
    assert saved(room.new(number=1, every=every), range(30, 45))[-2:] == (29, 39)


@holds("ContinuousCheckpointingPolicy")
def _(room):
    is_over = threading.Event()
    with room.new(every="free", on_commit=lambda *_: is_over.wait()) as ckpts:
        for step in range(5):
            assert ckpts.save(step, {"w": step}) is (step == 0)  # the first save still runs
        is_over.set()
        ckpts.wait()
        assert ckpts.save(5, {"w": 5})
    assert ckpts.all_steps() == (0, 5)


@holds("PreemptionCheckpointingPolicy")
def _(room):
    alone = LocalJob(1).clients[0]
    with room.new(every=10, client=alone) as ckpts:
        for step in range(13):
            if step == 11:
                alone.give_notice(ReceivedNotice("drained", "a test"))
            stops = preempted.on(alone, step)
            assert ckpts.save(step, {"w": step}) is (step == 9 or stops)
            if stops:
                break
    assert stops
    assert ckpts.all_steps() == (9, step)


@holds("max_to_keep", "LatestN")
def _(room):
    assert saved(room.new(keep=2)) == saved(room.new(keep=Last(2))) == (28, 29)


@holds("keep_time_interval", "EveryNSeconds", "preservation_policy", "AnyPreservationPolicy")
def _(room):
    assert saved(room.new(keep=Last(2) | EverySeconds(600))) == (0, 10, 20, 28, 29)


@holds("LatestDuration")
def _(room):
    assert saved(room.new(keep=LastSeconds(180))) == (26, 27, 28, 29)


@holds("keep_period", "EveryNSteps")
def _(room):
    assert saved(room.new(keep=Multiples(10))) == (0, 10, 20, 29)
    assert saved(room.new(keep=Multiples(10), every=5)) == (29,)
    assert saved(room.new(keep=EverySteps(10), every=5)) == (4, 14, 24, 29)


@holds("best_fn", "best_mode", "BestN")
def _(room):
    assert saved(room.new(keep=Best(2, "score", "max")), score=lambda step: -abs(step - 9.8)) == (
        9, 10, 29,
    )  # fmt: skip
    assert saved(room.new(keep=Best(1, "loss")), loss=lambda step: abs(step - 9.8)) == (10, 29)


@holds("keep_checkpoints_without_metrics")
def _(room):
    for keep, stay in ((Best(1, "loss"), (0, 2, 3)), (Best(1, "loss") | Pinned(), (2, 3))):
        with room.new(keep=keep) as ckpts:
            for step in range(4):
                metrics = {1: {"loss": 0.9}, 2: {"loss": 0.5}}.get(step)
                ckpts.save(step, {"w": step}, metrics=metrics)
        assert ckpts.all_steps() == stay


@holds("PreserveAll")
def _(room):
    assert saved(room.new()) == tuple(range(30))


@holds("CustomSteps")
def _(room):
    with room.new(keep=1) as ckpts:
        for step in range(4):
            ckpts.save(step, {"w": step})
            if step == 1:
                ckpts.pin(step)
    assert ckpts.all_steps() == (1, 3)


class Thirds(Keep):
    """Returns every third step, and notes which thread asks."""

    def __init__(self):
        self.threads = set()

    def kept(self, saved):
        if len(saved) > 1:
            self.threads.add(threading.current_thread())
        return [one.step for one in saved if one.step % 3 == 0]


@holds("PreservationPolicy")
def _(room):
    assert saved(room.new(keep=Thirds()), range(8)) == (0, 3, 6, 7)


@holds("enable_background_delete", "enable_async_checkpointing")
def _(room):
    for asynchronous in (True, False):
        keep = Thirds()
        saved(room.new(keep=keep, asynchronous=asynchronous), range(8))
        assert keep.threads
        assert (threading.current_thread() in keep.threads) is not asynchronous


@holds("create")
def _(room):
    assert saved(room.new(number="a/b/run"), [1]) == (1,)


@holds("cleanup_tmp_directories", "read_only")
def _(room):
    root = sample_checkpoints.run_of_two(room.path / "run")
    sample_checkpoints.begun(root, 25)
    sample_checkpoints.killed_before_commit(root / "step_000000000030", room.env)
    alone = LocalJob(1).clients[0]
    reader = Checkpoints(root, recover=False, lease_s=1e-9, client=alone)
    assert reader.all_steps() == (10, 20)
    assert (root / "step_000000000025").exists()
    assert Checkpoints(root, lease_s=1e-9, client=alone).all_steps() == (10, 20, 30)
    assert not (root / "step_000000000025").exists()


@holds("async_options")
def _(room):
    done = []

    def run(client):
        ckpts = room.new(
            number=1, timeout_s=0.5, on_commit=lambda *given: done.append(given),
            client=client,
        )  # fmt: skip
        ckpts.save(1, {"w": 1})
        ckpts.wait()
        if client.process == 0:  # the other never saves this one
            with pytest.raises(SaveAbortedError, match=r"0\.5 s"):
                ckpts.save(2, {"w": 2})
        return ckpts.all_steps()

    assert run_all(LocalJob(2), run) == [(1,), (1,)]
    assert done == [(1, str(room.path / "1/step_000000000001"))]


@holds("multiprocessing_options")
def _(room):
    def run(client):
        if client.process == 0:
            return None
        return saved(room.new(processes=[1], client=client), [1])

    assert run_all(LocalJob(2), run) == [None, (1,)]


@holds("single_host_load_and_broadcast")
def _(room):
    steps, is_counting, by = LocalStore.steps, threading.Event(), set()

    def listing(store, first=0):
        if is_counting.is_set():
            by.add(threading.get_ident())
        return steps(store, first)

    room.monkeypatch.setattr(LocalStore, "steps", listing)

    def run(client):
        with room.new(number=1, client=client) as ckpts:
            ckpts.save(1, {"w": 1})
            ckpts.wait()
            barrier.on(client, "saved")
            is_counting.set()
            barrier.on(client, "counting")
            found = ckpts.restore()["w"], ckpts.resume(None, None)[1]
        return *found, threading.get_ident() in by

    assert run_all(LocalJob(2), run) == [(1, 2, True), (1, 2, False)]


@holds("prevent_write_metrics")
def _(room):
    ckpts = room.new()
    assert saved(ckpts, [1]) == (1,)
    assert ckpts.all_metrics() == {1: {}}


@pytest.mark.parametrize("names", HELD_TOGETHER, ids="-".join)
def test_each_row_of_the_options_table_holds(names, tmp_path, child_env, monkeypatch):
    """By the stored times, each save begins a minute after the one before."""
    seconds = itertools.count(0, 60)
    clock = SimpleNamespace(time_ns=lambda: next(seconds) * 10**9, monotonic=time.monotonic)
    monkeypatch.setattr(saving_request, "time", clock)
    HELD_TOGETHER[names](Room(tmp_path, child_env, monkeypatch, itertools.count()))
