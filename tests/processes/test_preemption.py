"""Notices of every kind stop real processes at one step, whatever the others are doing."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from processes import leaving
from runtime.metadata_server import Metadata
from shoal.testing.cluster import Cluster

PLAN = list(itertools.product(["SIGTERM", "file", "gce"], [1, 7], [0, 2]))
REASONS = {"SIGTERM": "Terminated", "file": "drained", "gce": "preempted"}


@pytest.fixture
def metadata():
    server = Metadata()
    for number in range(len(PLAN)):
        server.answers[f"GET /{number}/preempted"] = "FALSE"
        server.answers[f"GET /{number}/maintenance-event"] = "NONE"

    def be_preempted(path):
        server.answers |= {f"PUT {path}": "", f"GET {path.replace('be-', '')}": "TRUE"}

    server.on_put = be_preempted
    yield server
    server.close()


def test_each_kind_of_notice_stops_all_at_one_step(metadata, child_env, tmp_path):
    """Called every step and every 7, on process 0 and on another, beyond 2**31."""
    with Cluster(3, start_method="fork", env=child_env) as bench:
        first, *others = bench.run(leaving.rounds, PLAN, metadata.url, tmp_path)
    assert others == [first] * 2
    begin = 2**31 - 40
    for (source, stride, noticed), (stop, agreed, process, told, reason) in zip(
        PLAN, first, strict=True
    ):
        assert begin + 2 * stride <= stop, "before there was a notice"
        assert agreed <= stop < agreed + stride
        assert (process, told.split()[0], reason) == (noticed, source, REASONS[source])
        begin = stop + stride
    assert begin > 2**31


def test_notice_does_not_wait_for_a_process_in_a_long_phase(child_env, tmp_path):
    fifo = tmp_path / "go on"
    os.mkfifo(fifo)
    with Cluster(3, start_method="fork", env=child_env) as bench:
        bench.start(leaving.long_phase, str(fifo))
        for process in (0, 2):
            bench.wait_for("has stopped", process)
        Path(fifo).write_bytes(b"")
        assert [ended.value for ended in bench.wait()] == [(False, True)] * 3


def test_process_killed_between_notice_and_agreement_is_left_out(child_env):
    with Cluster(3, start_method="fork", env=child_env) as bench:
        bench.start(leaving.lose_one)
        for process in range(3):
            bench.wait_for("ready", process)
        bench.stop(2)
        bench.terminate(0)
        for process in (0, 1):
            bench.wait_for("asks", process)
        bench.kill(2)
        ended = bench.wait(only=[0, 1])
    # They were told to go on at 0 and 1; what process 2 was told nobody knows any more.
    assert [one.value for one in ended] == [[[2], [0, 1], False, True, 0]] * 2
