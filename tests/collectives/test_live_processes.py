"""`live_processes`: all who return from it return the same, and it is true, whatever happened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.live_processes import live_processes
from shoal.errors import (
    DeadlineError,
    DivergenceError,
    ProcessLostError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.rules.point import Departure

NEVER = 99


def live_in(client, **more):
    return live_processes.on(client, **{"timeout_s": PATIENCE_S, **more})


def test_alone():
    assert live_processes() == live_processes(processes=[0]) == (0,)


@given(
    st.lists(st.sampled_from([0, 1, 2, NEVER]), min_size=1, max_size=5),
    st.sampled_from(["lost", "failed", "left"]),
    st.booleans(),
)
def test_each_call_returns_exactly_those_that_are_left(dies_at, how, waits_first):
    job = LocalJob(len(dies_at))

    def go_on(client):
        process, results = client.process, []
        for turn in range(3):
            if dies_at[process] == turn:
                job.depart(process, Departure("as the test wants it", how))
                return results
            if waits_first:
                try:
                    barrier.on(client, f"turn {turn}", timeout_s=PATIENCE_S)
                except Exception as error:  # noqa: BLE001 - a process is gone, or came from live
                    assert not isinstance(error, DeadlineError)  # noqa: PT017
            results.append(live_in(client))
        return results

    everyone = range(len(dies_at))
    expected = [tuple(p for p in everyone if dies_at[p] > turn) for turn in range(3)]
    for process, results in enumerate(run_all(job, go_on)):
        assert results == expected[: min(dies_at[process], 3)]


@given(st.integers(2, 5), st.data())
def test_process_lost_while_others_wait_is_not_waited_for(processes, data):
    order = data.draw(st.permutations(range(processes)))
    killer, *victims = order[: data.draw(st.integers(1, processes))]
    job = LocalJob(processes)

    def go(client):
        if client.process == killer:
            for victim in victims:  # some wait already, some have yet to come
                job.lose(victim, "killed")
        return live_in(client)

    left = tuple(sorted(set(range(processes)) - set(victims)))
    for process, result in enumerate(run_all(job, go)):
        if process in victims:
            assert isinstance(result, ProcessLostError)
        else:
            assert result == left


def test_the_loss_is_known_afterwards_and_the_next_one_is_news():
    job = LocalJob(4)
    job.lose(3, "killed")

    def first(client):
        if client.process == 3:
            return None
        with pytest.raises(ProcessLostError):
            client.check("step")
        left = live_in(client)
        client.check("step")
        barrier.on(client, "go on", processes=left, timeout_s=PATIENCE_S)
        return left

    assert run_all(job, first) == [(0, 1, 2)] * 3 + [None]
    job.lose(1, "killed too")
    for process in (0, 2):
        with pytest.raises(ProcessLostError) as caught:
            job.clients[process].check("step")
        assert caught.value.lost[1].startswith("killed too; last at barrier 'go on' (tests/")

    def second(client):
        return live_in(client, processes=[2, 0, 1]) if client.process in (0, 2) else None

    assert run_all(job, second) == [(0, 2), None, (0, 2), None]


def test_losses_outside_the_group_are_not_acknowledged():
    job = LocalJob(4)
    job.lose(0, "killed")

    def pair(client):
        return live_in(client, processes=(3, 2)) if client.process in (2, 3) else None

    assert run_all(job, pair)[2:] == [(2, 3)] * 2
    with pytest.raises(ProcessLostError):
        job.clients[2].check("step")  # of process 0 it has not been told yet


def test_a_living_one_that_does_not_come_is_a_deadline():
    job = LocalJob(3)
    job.lose(2, "killed")
    with pytest.raises(DeadlineError) as caught:
        live_in(job.clients[0], timeout_s=0.05)
    assert caught.value.missing == (1,)


def test_different_call_raises_divergence_when_no_process_is_lost():
    job = LocalJob(2)

    def go(client):
        if client.process:
            return live_in(client)
        return barrier.on(client, "live", timeout_s=PATIENCE_S)

    assert [type(result) for result in run_all(job, go)] == [DivergenceError] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"processes": [1]}, "this one"),
        ({"processes": [0, 7]}, r"not \[7\]"),
        ({"processes": []}, "this one"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"lane": ""}, "lane"),
    ],
)
def test_wrong_arguments_are_refused(arguments, told):
    with pytest.raises(UsageError, match=told):
        live_processes.on(LocalJob(2).clients[0], **arguments)
    with pytest.raises(UsageTypeError):
        live_processes.on(LocalJob(2).clients[0], **{**arguments, "lane": 3})


@pytest.mark.parametrize("one", [0, "01", 1.5])
def test_invalid_processes_argument_raises_type_error(one):
    first = LocalJob(2).clients[0]
    for call, asked in ((live_processes.on, ()), (barrier.on, ("x",))):
        with pytest.raises(UsageTypeError, match=r"must be a list of process indices, such as \[0"):
            call(first, *asked, processes=one)
