"""Threads of one process that save and restore, and in a job of several their lanes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.errors import NotCommittedError, UsageError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob

TREE = {"w": np.arange(1000.0)}


def in_a_thread(function, *arguments, **options):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **options).result(PATIENCE_S)


def save_and_restore(client, path, **options):
    options = {"timeout_s": PATIENCE_S, **options}
    save.on(client, path, TREE, **options)
    with pytest.raises(NotCommittedError):
        restore.on(client, f"{path} of another run", **options)
    return restore.on(client, path, **options)["w"].tolist() == TREE["w"].tolist()


def test_in_a_job_of_one_process_threads_need_no_lane(tmp_path):
    (alone,) = LocalJob(1).clients

    def train():
        with Checkpoints(tmp_path / "other", client=alone) as ckpts:
            ckpts.save(1, TREE)
            ckpts.wait()
            return ckpts.resume(None, TREE)[1]

    with alone.call("save"):  # this thread is in a call
        assert in_a_thread(save_and_restore, alone, tmp_path / "one")
        assert in_a_thread(train) == 2
        assert save_and_restore(alone, tmp_path / "two")


def test_in_a_job_of_several_a_thread_has_its_lane(tmp_path):
    job = LocalJob(2)

    def both(client):
        with client.call("barrier"):  # its main thread is in a call
            assert in_a_thread(save_and_restore, client, tmp_path / "a", lane="side")
            for name in ("save", "restore"):
                with pytest.raises(UsageError, match=r"lane= of its own .* save or restore"):
                    in_a_thread(refused, client, name, tmp_path)
        barrier.on(client, "end", timeout_s=PATIENCE_S)
        return True

    assert run_all(job, both) == [True, True]


def refused(client, name, tmp_path):
    if name == "save":
        save.on(client, tmp_path / "b", TREE, timeout_s=PATIENCE_S)
    else:
        restore.on(client, tmp_path / "a", timeout_s=PATIENCE_S)


@pytest.mark.parametrize("lane", ["", None, 3])
def test_the_lane_is_checked(tmp_path, lane):
    (alone,) = LocalJob(1).clients
    for call in (lambda: save.on(alone, tmp_path / "a", TREE, lane=lane),
                 lambda: restore.on(alone, tmp_path / "a", lane=lane)):  # fmt: skip
        with pytest.raises(UsageError, match="lane"):
            call()
