"""Three processes feed: readers that fail, are slow, empty or uneven; and go on as another job."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from processes import feeding
from shoal.testing.cluster import Cluster


@pytest.fixture(scope="module")
def told():
    """What each of three processes says of all scenes."""
    with Cluster(3, devices=2, start_method="fork") as cluster:
        return cluster.run(feeding.play)


def of(told, scene):
    return [one[scene] for one in told]


def test_every_batch_is_what_all_have_read(told):
    sums = [sum(range(12 * n, 12 * n + 12)) for n in range(3)]
    assert of(told, "whole") == [[*sums, 36] * 5] * 3


def test_readers_of_different_lengths_end_together(told):
    for count, kind, _, _ in (one["drop"] for one in of(told, "uneven")):
        assert (count, kind) == (3, "")
    for count, kind, words, _ in (one["error"] for one in of(told, "uneven")):
        assert (count, kind) == (3, "UsageError")
        assert "batch 3 of feed" in words
        assert (
            "not a whole one of 12 rows: 0 rows of process 0, 3 rows of process 1, 4 rows" in words
        )
    assert [one["pad"] for one in of(told, "uneven")] == [
        [4, 4, 4, 0, 0], [4, 4, 4, 3, 0], [4, 4, 4, 4, 4],
    ]  # fmt: skip
    (line,) = [line for line in told[0]["log"] if "is dropped" in line]
    assert "the reader of process 0 has ended, that of processes 1-2 has more" in line


def test_errors_of_a_reader_come_at_its_batch_on_all(told):
    for process, (disk, again, row, narrow, program) in enumerate(of(told, "failing")):
        own = process == 1
        assert disk[:2] == (2, "OSError" if own else "PeerFailedError")
        assert again[:2] == (0, disk[1]), "it is raised again"
        assert "the disk is on fire" in disk[2]
        assert disk[3] == ([] if own else [1])
        assert row[:2] == (1, "ValueError" if process == 2 else "PeerFailedError")
        assert row[3] == ([] if process == 2 else [2])
        assert narrow[:2] == (0, "UsageError" if process == 2 else "PeerFailedError")
        assert "holds 1e+39, which does not fit float32" in narrow[2]
        if process == 0:
            assert program == "KeyError"
        else:
            assert program[1] == "PeerFailedError"
            assert program[3] == [0]
            assert "raised KeyError: 'the program of process 0'" in program[2]


def test_empty_readers(told):
    for everywhere, one, padded, columns in of(told, "empty"):
        assert everywhere[:2] == columns[:2] == (0, "")
        for count, kind, words, _ in (one, padded):
            assert (count, kind) == (0, "UsageError")
            assert "the reader of process 2 is empty, that of processes 0-1 is not" in words


def test_rows_that_several_processes_read_must_be_equal(told):
    for values, unchecked, lengths, dtypes, options in of(told, "replicas"):
        assert values[:2] == (1, "DivergenceError")
        assert "processes that hold the same rows (processes 0,1,2) have read" in values[2]
        assert "process 2: ['x']: float32[rows,3] as (model, -): values" in values[2]
        assert unchecked == (3, "")
        assert lengths[:2] == (1, "DivergenceError")
        assert dtypes[:2] == options[:2] == (0, "DivergenceError")
        assert "process 1: ['x']: float16[rows,3] as (model, -)" in dtypes[2]
        assert "prefetch=1" in options[2]
    assert any("prefetch=" in one["diverged"]["replicas"] for one in told)


def test_all_processes_leave_a_feed_at_the_same_batch_or_raise(told):
    assert told[0]["early"] == [1]
    for _, kind, words, _ in of(told[1:], "early"):
        assert kind == "DivergenceError"
        assert "process 0: closed its feed after" in words
    assert of(told, "threads") == [0, 0, 0]


def test_rows_by_number(told):
    rows, masks = zip(*of(told, "by_number"), strict=True)
    assert rows == (24, 24, 24)
    assert sorted(masks) == [[4, 0], [4, 1], [4, 4]]


def test_a_reader_that_hangs_is_named_within_the_deadline(told):
    for process, (count, kind, words, _) in enumerate(of(told, "held_up")):
        assert (count, kind) == (1, "DeadlineError")
        # The deadlines of the others are two: who comes to its own later misses the first, too.
        named = (
            "its own reader has returned no batch" if process == 1 else "process 1 (vm): last at"
        )
        assert named.replace("vm", socket.gethostname()) in words


def test_a_program_that_is_busy_is_not_late(told):
    assert of(told, "late") == [(4, ""), (5, ""), (4, "")]


def test_the_same_rows_on_every_process_are_suspicious(told):
    (line,) = [line for line in told[0]["log"] if "equal those of this" in line]
    assert "the values of processes 1-2 equal those of this process, for other rows" in line
    assert told[1]["log"] == told[2]["log"] == []


def test_a_feed_goes_on_in_a_job_of_other_processes():
    with Cluster(3, devices=2, start_method="fork") as cluster:
        before = cluster.run(feeding.part, 0, 2)
    with Cluster(2, devices=2, start_method="fork") as cluster:
        after = cluster.run(feeding.part, before[0][0][1], 2)
    for way in range(2):
        fed = [*(one[way] for one in before)], [*(one[way] for one in after)]
        assert [rows for _, rows in fed[0]] == [24] * 3
        assert [rows for _, rows in fed[1]] == [48] * 2
        for part, numbers in enumerate((range(24), range(24, 48))):
            came = np.concatenate([np.concatenate(n) for n, _ in fed[part]])
            assert sorted(came.tolist()) == [*numbers]


def test_feed_that_waits_for_a_killed_process_raises():
    with Cluster(3, devices=2, start_method="fork") as cluster:
        cluster.start(feeding.dies)
        for process in (0, 2):
            assert cluster.wait_for("saw", process) == "saw (2, 'ProcessLostError') True"


def test_feeds_that_stay_open_keep_no_process_from_its_end():
    with Cluster(3, devices=2) as cluster:
        cluster.start(feeding.leaves_them_open)
        ended = cluster.wait()
    assert [one.code for one in ended] == [0, 0, 0]
    assert sorted(n for one in ended for n in one.value[0]) == [*range(6)]
