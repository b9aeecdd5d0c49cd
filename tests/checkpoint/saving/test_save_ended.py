"""Saves that do not come to their end: whoever fails, all hear of it, and nothing is half."""

from __future__ import annotations

import errno
import logging
import os
import threading

import numpy as np
import pytest

from checkpoint.saved_contents import CLEAN, files_of, in_job, kept, messages
from shoal.checkpoint.coordination.lead import decode_error, encode_error, failed_processes
from shoal.checkpoint.coordination.lease import LeaseKeeper
from shoal.checkpoint.disk import sweep
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.saving.agreeing import check_numbers
from shoal.checkpoint.saving.save import save
from shoal.errors import (
    CorruptCheckpointError,
    DeadlineError,
    NotSharedError,
    PeerFailedError,
    ProcessLostError,
    SaveAbortedError,
    ShoalError,
    StepAlreadyCommittedError,
    StorageError,
    StorageFullError,
    UsageError,
)
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.system import fault_points
from shoal.runtime.system.fault_points import InjectedError

TREE = {"w": np.arange(1 << 20, dtype=np.float32), "n": 1}


COMMITTING = ("assemble", "indexed", "link", "committed", "tidied")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model"


@pytest.fixture
def at_point(monkeypatch):
    """Return a function that has something happen at a point, in one process of the threads."""

    def let(point, process, action):
        def reach(name, where=None):
            if name == f"save.{point}" and where == process:
                action()

        monkeypatch.setattr(fault_points, "reach", reach)

    return let


def raises(error):
    def action():
        raise error

    return action


def full(path):
    return StorageFullError(
        "no space", path=str(path), errno=errno.ENOSPC, needed_bytes=5, free_bytes=3
    )


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("point", ["snapshot", "write", "written"])
def test_a_full_disk_on_one_process_is_the_error_of_all(path, at_point, point, process):
    at_point(point, process, raises(full(path)))
    errors = in_job(3, lambda client: save.on(client, path, TREE))
    assert {type(error) for error in errors} == {StorageFullError}, messages(errors)
    for error in errors:
        assert (error.errno, error.needed_bytes, error.free_bytes) == (errno.ENOSPC, 5, 3)
        assert error.path == str(path)
        assert str(error).startswith(f"process {process} of 3 (")
    assert files_of(path) == []


@pytest.mark.parametrize("point", ["open", "opened", "write", "parted"])
def test_one_process_alone_raises_its_own_error(path, at_point, point):
    mine = full(path)
    at_point(point, 0, raises(mine))
    with pytest.raises(StorageFullError) as caught:
        save(path, TREE)
    assert caught.value is mine
    assert files_of(path) == []


@pytest.mark.parametrize("point", ["snapshot", "open", "write", "written", "parted"])
def test_foreign_error_is_raised_unchanged_and_aborts_the_save_on_the_others(path, at_point, point):
    at_point(point, 0, raises(ZeroDivisionError("mine")))
    errors = in_job(3, lambda client: save.on(client, path, TREE))
    assert [type(error) for error in errors] == [
        ZeroDivisionError,
        SaveAbortedError,
        SaveAbortedError,
    ]
    assert errors[1].processes == (0,)
    assert errors[1].exit_code == PeerFailedError.exit_code
    assert "ZeroDivisionError: mine" in str(errors[1])
    assert "test_save_ended.py" in errors[1].__cause__.failed[0]
    assert files_of(path) == []


def test_all_processes_raise_the_error_of_the_lowest_failed_one(path, monkeypatch):
    def reach(name, where=None):
        if name == "save.write" and where == 1:
            raise full(path)
        if name == "save.write" and where == 2:
            raise StorageError("broken", path="x", errno=errno.EIO)

    monkeypatch.setattr(fault_points, "reach", reach)
    errors = in_job(3, lambda client: save.on(client, path, TREE))
    assert {type(error) for error in errors} == {StorageFullError}


@pytest.mark.parametrize(
    ("point", "is_saved"),
    [
        ("assemble", False),
        ("indexed", False),
        ("link", False),
        ("committed", True),
        ("tidied", True),
    ],
)
def test_an_error_of_the_lead_when_it_commits(path, monkeypatch, point, is_saved):
    seen = []

    def reach(name, where=None):
        if name == f"save.{point}" and not seen:
            seen.append(name)
            raise StorageError("broken", path=str(path), errno=errno.EIO)

    monkeypatch.setattr(fault_points, "reach", reach)
    results = in_job(2, lambda client: save.on(client, path, TREE))
    if is_saved:
        assert results == [None, None], messages(results)
        assert set(kept(path)) == set(TREE)
        sweep.recover_step(LocalFolder(path))  # what was left
        assert [kind for kind in files_of(path) if kind != "data"] == [
            "COMMIT",
            "index",
            "manifest",
        ]
    else:
        assert {type(error) for error in results} == {StorageError}
        assert files_of(path) == []


@pytest.mark.parametrize("point", ["snapshot", "open", "write", "parted", "announced"])
def test_an_interrupt_leaves_nothing_half(path, at_point, point):
    at_point(point, 0, raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(path, TREE)
    assert files_of(path) == (CLEAN if point == "announced" else [])


@pytest.mark.parametrize(("point", "left"), [("link", []), ("committed", CLEAN)])
def test_an_interrupt_while_it_commits(path, monkeypatch, point, left):
    seen: list[str] = []

    def reach(name, where=None):
        if name == f"save.{point}" and not seen:
            seen.append(name)
            raise KeyboardInterrupt

    monkeypatch.setattr(fault_points, "reach", reach)
    with pytest.raises(KeyboardInterrupt):
        save(path, TREE)
    assert files_of(path) == left


def test_save_does_not_wait_for_an_interrupted_process(path, at_point):
    at_point("write", 1, raises(KeyboardInterrupt()))
    job = LocalJob(3)

    def work(client):
        try:
            save.on(client, path, TREE)
        finally:
            if client.process == 1:
                client.report("failed", "KeyboardInterrupt")

    errors = in_job(3, work, job)
    assert [type(error) for error in errors] == [
        SaveAbortedError,
        KeyboardInterrupt,
        SaveAbortedError,
    ]
    assert errors[0].exit_code == PeerFailedError.exit_code
    assert files_of(path) == []


@pytest.mark.parametrize(
    ("point", "is_saved"),
    [("preflight", False), ("write", False), ("parted", True), ("announced", True)],
)
def test_lost_process_aborts_the_save_unless_all_parts_exist(path, at_point, point, is_saved):
    job = LocalJob(3)

    def vanish():
        job.lose(2)
        raise InjectedError

    at_point(point, 2, vanish)
    if point == "parted":  # not told: lost on the way to the others
        at_point(point, 2, lambda: job.lose(2))
    results = in_job(3, lambda client: save.on(client, path, TREE, timeout_s=30), job)
    assert isinstance(results[2], ShoalError | InjectedError) or point == "parted"
    if is_saved:
        assert results[:2] == [None, None], messages(results)
        assert set(kept(path)) == set(TREE)
    else:
        assert [type(error) for error in results[:2]] == [SaveAbortedError] * 2, messages(results)
        assert {error.exit_code for error in results[:2]} == {ProcessLostError.exit_code}
        assert {error.processes for error in results[:2]} == {(2,)}
        assert files_of(path) == []


def test_survivor_that_still_writes_is_waited_for_after_a_loss(path, monkeypatch):
    """By what the storage shows: the others cannot be asked any more."""
    job = LocalJob(3)
    looked = threading.Event()

    def looks(look):
        def looking(*arguments):
            looked.set()
            return look(*arguments)

        return looking

    monkeypatch.setattr(LocalStore, "missing_parts", looks(LocalStore.missing_parts))

    def reach(name, where=None):
        if (name, where) == ("save.write", 1):
            assert looked.wait(30)
        elif (name, where) == ("save.parted", 2):
            job.lose(2)

    monkeypatch.setattr(fault_points, "reach", reach)
    results = in_job(3, lambda client: save.on(client, path, TREE), job)
    assert results[:2] == [None, None], messages(results)
    assert set(kept(path)) == set(TREE)


@pytest.mark.parametrize("point", ["opened", "write", "written"])
def test_frozen_save_that_was_collected_raises_save_aborted(path, at_point, point):
    """Whether its folder is gone or not; nothing of it remains."""
    at_point(point, 0, lambda: sweep.collect_garbage(LocalFolder(path), idle_s=0))
    errors = in_job(2, lambda client: save.on(client, path, {"w": np.arange(1 << 18)}))
    assert {type(error) for error in errors} == {SaveAbortedError}, messages(errors)
    assert "ended by another process" in str(errors[0])
    assert files_of(path) == []


def test_late_process_is_not_waited_for_beyond_the_deadline(path, at_point):
    goes_on = threading.Event()
    at_point("write", 1, goes_on.wait)
    ended = []

    def work(client):
        try:
            save.on(client, path, TREE, timeout_s=2.0)
        finally:
            ended.append(client.process)
            if sorted(ended) == [0, 2]:
                goes_on.set()

    errors = in_job(3, work)
    assert {type(error) for error in errors} == {SaveAbortedError}, messages(errors)
    assert {error.exit_code for error in errors[::2]} == {DeadlineError.exit_code}
    assert {error.processes for error in errors[::2]} == {(1,)}
    assert {error.phase for error in errors} == {"write"}
    assert files_of(path) == []


def test_after_an_error_the_next_save_works(path, at_point, monkeypatch):
    at_point("write", 1, raises(full(path)))
    job = LocalJob(3)
    in_job(3, lambda client: save.on(client, path, TREE), job)
    monkeypatch.undo()
    assert in_job(3, lambda client: save.on(client, path, TREE), job) == [None] * 3
    assert set(kept(path)) == set(TREE)


def test_a_save_under_a_notice_says_that_the_state_is_safe(path):
    job = LocalJob(2)
    job.clients[1].give_notice(ReceivedNotice("SIGTERM", "a test", None))
    assert in_job(2, lambda client: save.on(client, path, TREE, step=7), job) == [None, None]
    assert all(one.stop.has_saved for one in job.clients)


def test_an_aborted_save_under_a_notice_does_not(path, at_point):
    at_point("write", 1, raises(full(path)))
    job = LocalJob(2)
    job.clients[1].give_notice(ReceivedNotice("SIGTERM", "a test", None))
    in_job(2, lambda client: save.on(client, path, TREE, step=7), job)
    assert not any(one.stop.has_saved for one in job.clients)


KNOWN = [
    full("/there"),
    StorageError("refused", path="/x", errno=errno.EACCES),
    NotSharedError("alone", path="/x", processes=[1, 2]),
    StepAlreadyCommittedError("there", path="/x", attempt="abc"),
    CorruptCheckpointError("bad", path="/x", file="f", leaf="l", offset=3),
    SaveAbortedError("ended", path="/x", phase="write", processes=(1,), exit_code=71),
    UsageError("wrong", problems=["a", "b"]),
]


@pytest.mark.parametrize("error", KNOWN, ids=lambda error: type(error).__name__)
def test_error_keeps_its_type_and_facts_when_sent_to_peers(error):
    payload = encode_error(error)
    assert failed_processes({0: b"", 1: payload, 2: b'{"a": 1}'}) == (1,)
    again = decode_error(payload, 1, ThisProcess(0, ["here", "there"]))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
    assert str(again) == f"process 1 of 2 (there): {error}"


class Clock(threading.Event):
    """Waits that a test counts: so many are over at once, then the event is set."""

    def __init__(self, beats):
        super().__init__()
        self._left = beats

    def wait(self, timeout=None):
        self._left -= 1
        return self._left < 0 or super().wait(0)


def test_long_save_logs_its_progress_and_keeps_its_lease(path, monkeypatch, caplog):
    job = LocalJob(2)
    folder = LocalFolder(path)
    folder.make()
    pending = path / "PENDING-abcabcabcabc"
    pending.write_text("")
    os.utime(pending, (0, 0))
    with caplog.at_level(logging.INFO, "shoal"):
        for client in job.clients:
            keeper = LeaseKeeper(client, LocalStore(folder), "abcabcabcabc", 4_000_000_000)
            keeper.add(1_000_000_000)
            keeper._is_over = Clock(4)
            keeper._run()
            if client.process == 0:
                assert pending.stat().st_mtime > 1000
                os.utime(pending, (0, 0))
    assert pending.stat().st_mtime == 0  # the other leaves it to the first
    reported = [record.getMessage() for record in caplog.records]
    assert len(reported) == 4  # of four beats the first and the fourth, of each process
    assert f"saving {path}: 25% of 4.00 GB, " in reported[0]
    assert reported[0].endswith(" MB/s")
    assert job.members()[1].last_words.startswith(f"saving {path}: 25%")


def test_the_next_process_keeps_the_lease_when_the_first_is_gone(path):
    job = LocalJob(2)
    folder = LocalFolder(path)
    folder.make()
    pending = path / "PENDING-abcabcabcabc"
    pending.write_text("")
    os.utime(pending, (0, 0))
    job.lose(0)
    LeaseKeeper(job.clients[1], LocalStore(folder), "abcabcabcabc", 1).keep()
    assert pending.stat().st_mtime > 1000
    pending.unlink()
    LeaseKeeper(
        job.clients[1], LocalStore(folder), "abcabcabcabc", 1
    ).keep()  # it is committed: that is fine


@pytest.mark.parametrize("lane", ["main", "its own"])
def test_a_save_on_the_main_line_shows_that_it_works(path, lane):
    one = LocalJob(1).clients[0]
    seen = [one.progress.worked]
    beat = LeaseKeeper(one, LocalStore(path), "abcabcabcabc", 2, lane=lane)
    for work in (beat.keep, lambda: beat.add(1), beat.keep, lambda: beat.add(1), beat.keep):
        work()
        beat.is_opening = False
        seen.append(one.progress.worked)
    # A beat alone is none, unless only the disk is waited for: at first, and once all is written.
    assert seen == ([0, 1, 2, 2, 3, 4] if lane == "main" else [0] * 6)


def test_the_numbers_of_jax_may_come_in_any_order_but_must_be_those_of_the_job(path):
    """Who holds what is said by JAX's numbers of processes."""
    operation = f"save({str(path)!r})"
    check_numbers(operation, {0: {"number": 2}, 1: {}, 2: {"number": 0}})
    for wrong in ({"number": 1}, {"number": 3}):
        with pytest.raises(UsageError, match="the numbers"):
            check_numbers(operation, {0: wrong, 1: {}, 2: {}})
