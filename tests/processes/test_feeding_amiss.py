"""Feeds on three processes whose users err: what all of them are told, and that the job goes on."""

from __future__ import annotations

import pytest

from processes import feeding_amiss
from shoal.testing.cluster import Cluster


@pytest.fixture(scope="module")
def told():
    """What each of three processes says of all scenes."""
    with Cluster(3, devices=2, start_method="fork") as cluster:
        return cluster.run(feeding_amiss.play)


def of(told, scene):
    return [one[scene] for one in told]


def test_no_thread_is_left_over(told):
    assert of(told, "threads") == [0, 0, 0]


def test_the_first_reader_that_fails_ends_it_for_all(told):
    for process, (count, kind, words, failed) in enumerate(of(told, "other_batches")):
        assert (count, kind) == (1, "PeerFailedError" if process else "OSError")
        assert "the disk of 0" in words
        assert failed == ([0] if process else [])


def test_values_without_dims_are_equal(told):
    for values, unchecked, equal, ended in of(told, "without_dims"):
        assert values[:2] == (1, "DivergenceError")
        assert "that hold values without dims (processes 0,1,2) have read" in values[2]
        assert "process 2: [1]: int32[] as (): values" in values[2]
        assert unchecked == equal == (3, "")
        assert ended == (1, "DivergenceError"), "nothing stands for the value of an ended reader"


def test_replicas_are_compared_as_a_whole(told):
    for count, kind, words, _ in of(told, "large_replicas"):
        assert (count, kind) == (0, "DivergenceError")
        assert "process 2: the array: float32[rows,524288] as (model, -)" in words


def test_trees_are_compared_with_their_nodes(told):
    for count, kind, words, _ in of(told, "other_trees"):
        assert (count, kind) == (0, "DivergenceError")
        assert "process 1: tree: PyTreeDef([*])" in words


def test_a_reader_that_stops_before_it_began(told):
    for process, (count, kind, words, _) in enumerate(of(told, "stops")):
        assert (count, kind) == (0, "UsageError" if process == 1 else "PeerFailedError")
        assert "StopIteration" in words


def test_feeds_that_are_taken_from_in_another_order(told):
    assert all(
        "the difference was found at barrier 'both'" in one for one in of(told, "other_order")
    )


def test_batches_may_change_if_all_do(told):
    for dtypes, (count, kind, words, _) in of(told, "changing"):
        assert dtypes == ["int32", "int16", "int16"]
        assert (count, kind) == (1, "DivergenceError")
        assert "process 1: the array: int16[rows] as (data)" in words


def test_loops_that_all_leave_early(told):
    assert of(told, "again_and_again") == [[6, 12, 18, 24]] * 3


def test_interrupt_in_a_feed_raises_on_the_others(told):
    first, *others = of(told, "interrupted")
    assert first == "KeyboardInterrupt"
    for count, kind, words, failed in others:
        assert 2 <= count <= 4, "what was read ahead when it came is given"
        assert (kind, failed) == ("PeerFailedError", [0])
        assert "process 0" in words
        assert "KeyboardInterrupt" in words


def test_a_mesh_of_some_processes(told):
    first, outside, second = of(told, "some_processes")
    assert first == [[*range(n, n + 4)] for n in (0, 8, 16)]
    assert second == [[*range(n, n + 4)] for n in (4, 12, 20)]
    assert "this process owns no device of" in outside


def test_a_first_batch_that_is_short(told):
    for process, (masks, (count, kind, words, _)) in enumerate(of(told, "short_first")):
        assert masks == [min(4, process + 2), 4]
        assert (count, kind) == (0, "DivergenceError")
        assert "processes that hold the same rows (processes 0,1,2)" in words


def test_a_state_goes_on_in_a_job_of_other_processes():
    """Also where batches are filled up, and the reader of a process has ended before."""
    with Cluster(3, devices=2, start_method="fork") as cluster:
        whole = cluster.run(feeding_amiss.goes_on, 0, 4)
        before = cluster.run(feeding_amiss.goes_on, 0, 2)
        after = cluster.run(feeding_amiss.goes_on, before[0][1], 2)
        last = cluster.run(feeding_amiss.goes_on, whole[0][1] | {"rows": 36}, 1)
    assert [one[1] for one in before] == [{"order": 0, "rows": 24}] * 3
    for process, (numbers, state, is_over) in enumerate(whole):
        assert before[process][0] + after[process][0] == numbers
        assert last[process][0] == numbers[3:]
        assert (state, is_over) == ({"order": 0, "rows": 48}, True)
    with Cluster(2, devices=2, start_method="fork") as cluster:
        fewer = cluster.run(feeding_amiss.goes_on, before[0][1], 1)
    assert sorted(n for one in fewer for n in one[0][0]) == [24, 25, 26, 27, 28, 30, 31, 32, 33]
