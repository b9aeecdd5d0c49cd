"""Values between some of the processes of a job: only those that a call names."""

from __future__ import annotations

import re

import numpy as np
import pytest

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.allgather import allgather
from shoal.collectives.broadcast import broadcast
from shoal.collectives.check_finite import check_finite
from shoal.collectives.check_replicas import check_replicas
from shoal.collectives.live_processes import live_processes
from shoal.collectives.same import assert_same
from shoal.collectives.transport import stream, windows
from shoal.errors import DivergenceError, ProcessLostError, UsageError, UsageTypeError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob

LARGE = 300_000  # bytes: more than travel with a call


@pytest.fixture(params=["host memory", "coordinator"])
def way(request, monkeypatch):
    """Go through the memory of the host, or without it through the coordinator."""
    monkeypatch.setenv("SHOAL_SHARED_MEMORY", "1" if request.param == "host memory" else "0")
    monkeypatch.setattr(stream, "_ROUND_BYTES", 1 << 16)
    monkeypatch.setattr(windows, "_PIECE_BYTES", 1 << 16)


def value_of(process, num_bytes=LARGE):
    return np.random.default_rng([process, num_bytes]).integers(0, 256, num_bytes, dtype=np.uint8)


def works_among(client, group):
    """Try all that sends values among a group; return what is true of it."""
    options = {"processes": group, "timeout_s": PATIENCE_S}
    me, members = client.process, sorted(group)
    for num_bytes in (10, LARGE):
        own = value_of(me, num_bytes)
        for source in members:
            came = broadcast.on(client, own, source, **options)
            assert np.array_equal(came, value_of(source, num_bytes))
        rows = [value_of(p, num_bytes) for p in members]
        gathered = allgather.on(client, {"w": own, "who": f"process {me}"}, **options)
        assert np.array_equal(gathered["w"], rows)
        assert gathered["who"] == [f"process {p}" for p in members]
        long = allgather.on(client, own[: len(own) - me], tiled=True, **options)
        cut = [row[: len(row) - p] for row, p in zip(rows, members, strict=True)]
        assert np.array_equal(long, np.concatenate(cut))
        for to in members:
            gathered = allgather.on(client, own, to=to, **options)
            assert (gathered is None) == (me != to)
            assert gathered is None or np.array_equal(gathered, rows)
        assert_same.on(client, {"w": rows, "who": members}, **options)
        with pytest.raises(DivergenceError) as told:
            assert_same.on(client, np.arange(9) * (me != members[0]), **options)
        assert told.value.sides == {"[1] = 0": (members[0],), "[1] = 1": (*members[1:],)}
    return members


def test_groups_work_at_the_same_time(way):
    groups = {0: [2, 0], 1: [1, 3, 4], 2: [0, 2], 3: [4, 3, 1], 4: (1, 3, 4)}

    def go(client):
        members = works_among(client, groups[client.process])
        works_among(client, range(5))
        return members

    assert run_all(LocalJob(5), go) == [sorted(groups[p]) for p in range(5)]


def test_a_process_alone_is_a_group():
    def go(client):
        me = client.process
        options = {"processes": [me], "timeout_s": PATIENCE_S}
        assert broadcast.on(client, me, me, **options) == me
        assert_same.on(client, me, **options)
        return allgather.on(client, {"x": np.float32(me)}, **options)["x"].tolist()

    assert run_all(LocalJob(3), go) == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_survivors_go_on(victim, way):
    job = LocalJob(4)

    def go(client):
        works_among(client, range(4))  # what is known of all must not be taken for the group's
        if client.process == victim:
            return job.lose(victim)
        with pytest.raises(ProcessLostError):
            broadcast.on(client, value_of(0), victim, timeout_s=PATIENCE_S)
        alive = live_processes.on(client, timeout_s=PATIENCE_S)
        return works_among(client, alive)

    alive = [p for p in range(4) if p != victim]
    assert run_all(job, go) == [None if p == victim else alive for p in range(4)]


# The lowest of a group gives, so that all who name the same group name the same source as well.
CALLS = {
    "broadcast": lambda c, processes=None, **more: broadcast.on(
        c, 1, min(processes or [0]), processes=processes, **more
    ),
    "allgather": lambda c, **more: allgather.on(c, 1, **more),
    "assert_same": lambda c, **more: assert_same.on(c, 1, **more),
    "check_finite": lambda c, **more: check_finite.on(c, 1, **more),
    "check_replicas": lambda c, **more: check_replicas.on(c, 1, **more),
    "barrier": lambda c, **more: barrier.on(c, "x", **more),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_all_processes_by_number_are_all_of_the_job(call):
    def go(client):
        which = [None, (0, 1, 2), {2, 1, 0}][client.process]
        return call(client, processes=which, timeout_s=PATIENCE_S)

    assert not any(isinstance(result, Exception) for result in run_all(LocalJob(3), go))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("groups", [([0, 1], None), ([0, 1], [1, 2])])
def test_processes_that_pass_different_groups_raise_divergence(call, groups):
    """Process 0 waits for 1 where 1 does not come; the circle closes when 2 waits for 0."""
    closing = [0, 2] if groups[1] else None

    def go(client):
        which = (*groups, closing)[client.process]
        return call(client, processes=which, timeout_s=PATIENCE_S)

    results = run_all(LocalJob(3), go)
    assert [type(error) for error in results[:2]] == [DivergenceError] * 2
    assert re.search(r": processes gave \w+( 'x')? different groups\n", str(results[0]))
    assert "    process 0: processes=[0, 1]\n" in str(results[0])
    assert str(results[0]).endswith("Every process of a group must pass the same processes=.")
    assert results[0].difference.what == "group"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("processes", "kind", "told"),
    [
        ([1], UsageError, r"process 0 \(this one\) is not among the processes \[1\]"),
        ([], UsageError, "this one"),
        ([0, 7, -1], UsageError, r"has processes 0..2, not \[-1, 7\]"),
        ([0, 0, 1], UsageError, r"named more than once: \[0\]"),
        ([0, 1.5], UsageTypeError, "process indices are integers, not 1.5"),
        (0, UsageTypeError, r"processes=0 must be a list of process indices, such as \[0, 1\]"),
        ("01", UsageTypeError, "must be a list of process indices"),
    ],
)
def test_invalid_groups_are_refused(call, processes, kind, told):
    with pytest.raises(kind, match=told):
        call(LocalJob(3).clients[0], processes=processes)


def test_source_and_receiver_must_be_in_the_group():
    first = LocalJob(3).clients[0]
    with pytest.raises(UsageError, match=r"source=2 is not among the processes \[0, 1\]"):
        broadcast.on(first, 1, 2, processes=[0, 1])
    second = LocalJob(3).clients[1]
    with pytest.raises(UsageError, match=r"source=0 is not among the processes \[1, 2\]"):
        broadcast.on(second, 1, processes=[2, 1])
    with pytest.raises(UsageError, match=r"to=2 is not among the processes \[0, 1\]"):
        allgather.on(first, 1, to=2, processes=[0, 1])
