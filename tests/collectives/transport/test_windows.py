"""The memory that processes of one host see of each other: found, refused, safe in two slots."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.transport import chunks, windows
from shoal.collectives.transport.device_transfer import DeviceTransfer
from shoal.collectives.transport.stream import broadcast_bytes
from shoal.collectives.transport.windows import WINDOW_BYTES, WindowTransfer, meet_at_windows
from shoal.errors import DeadlineError
from shoal.runtime.agreement import Call
from shoal.runtime.client.in_process import LocalJob


def find(client):
    transfer = DeviceTransfer(client, Call("test", "test", ""), PATIENCE_S)
    return meet_at_windows(transfer, WindowTransfer(None, {}, {0: 1}))


def found_by_all(num_processes):
    return run_all(LocalJob(num_processes), find)


def test_processes_of_one_host_see_each_others_memory():
    memories = found_by_all(3)
    for process, seen in enumerate(memories):
        seen._windows[process][:] = process + 1
    for seen in memories:
        assert [(window == p + 1).all() for p, window in seen._windows.items()] == [True] * 3
        assert [window.size for window in seen._windows.values()] == [WINDOW_BYTES] * 3


def switched_off(monkeypatch):
    monkeypatch.setenv("SHOAL_SHARED_MEMORY", "0")


def on_two_hosts(monkeypatch):
    names = iter(["one", "other"])
    lock = threading.Lock()

    def host_id():
        with lock:
            return next(names)

    monkeypatch.setattr(windows, "host_id", host_id)


def on_an_unknown_host(monkeypatch):
    monkeypatch.setattr(windows, "host_id", lambda: "")


def without_such_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")


def without_memory(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def hidden_from_each_other(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 0)


def of_somebody_else(monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)  # there is a file, but without the mark


@pytest.mark.parametrize(
    "how",
    [switched_off, on_two_hosts, on_an_unknown_host, without_such_memory, without_memory,
     hidden_from_each_other, of_somebody_else],
)  # fmt: skip
def test_all_do_without_if_one_cannot(how, monkeypatch):
    how(monkeypatch)
    assert found_by_all(2) == [None, None]


def test_shared_windows_are_searched_for_once():
    job = LocalJob(2)

    def find_twice(client):
        return find(client) is find(client) is not None

    assert run_all(job, find_twice) == [True, True]


@pytest.mark.parametrize("how", [None, switched_off])
def test_all_look_again_if_one_was_interrupted_while_it_looked(how, monkeypatch):
    if how is not None:
        how(monkeypatch)
    job = LocalJob(3)
    before = run_all(job, find)
    job.clients[1].kept.clear()
    after = run_all(job, find)
    assert {type(seen) for seen in after} == {type(before[0])}
    assert all(new is not old for new, old in zip(after, before, strict=True)) or how
    assert run_all(job, find) == after


def test_missing_process_is_reported_with_the_call_of_the_program():
    job = LocalJob(2)

    def find_alone(client):
        if client.process == 0:
            transfer = DeviceTransfer(
                client, Call("broadcast", "params", "train.py:3 (main)"), 0.05
            )
            meet_at_windows(transfer, WindowTransfer(None, {}, {0: 1}))

    error, _ = run_all(job, find_alone)
    assert isinstance(error, DeadlineError), error
    assert "'params' (train.py:3) waited" in str(error)


def test_a_slow_process_finds_each_piece_as_it_was_laid_out(monkeypatch):
    """Process 1 copies a piece only when process 0 can do no more: then the next piece lies in the
    other slot, and the one after it may not be laid out."""
    monkeypatch.setattr(windows, "_PIECE_BYTES", 100)
    value = np.random.default_rng(0).integers(0, 256, 1050, dtype=np.uint8)
    laid_out = threading.Semaphore(0)
    fill, write = chunks.Bytes.fill, chunks.Bytes.write

    def fill_and_say(self, place, begin):
        count = fill(self, place, begin)
        if begin:
            laid_out.release()
        return count

    def wait_and_write(self, begin, values):
        if self.num_bytes and begin + 100 < value.size:  # there will be a next piece
            assert laid_out.acquire(timeout=PATIENCE_S)
        write(self, begin, values)

    def go(client):
        data = [value] if client.process == 0 else None
        came = np.empty_like(value)
        into = [came] if data is None else []
        broadcast_bytes(client, 0, data, value.size, into=into, timeout_s=PATIENCE_S)
        return came

    job = LocalJob(2)
    run_all(job, find)
    monkeypatch.setattr(chunks.Bytes, "fill", fill_and_say)
    monkeypatch.setattr(chunks.Bytes, "write", wait_and_write)
    _, came = run_all(job, go)
    assert np.array_equal(came, value)
