"""`preempted` and what goes with it, over threads and over a real coordinator."""

from __future__ import annotations

import json
import re
import threading
from functools import partial

import numpy as np
import pytest

from runtime.bare_sockets import LIMITS, BareCoordinator
from runtime.coordinator_contract import run_together
from shoal.collectives.live_processes import live_processes
from shoal.errors import (
    DeadlineError,
    PeerFailedError,
    ProcessLostError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime import preemption
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.over_tcp import join
from shoal.runtime.preemption import (
    clear,
    mark_saved,
    note_failed,
    preempted,
    stops_at_save,
)
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.startup.single_process import alone

PATIENCE_S = 60.0
TERM = ReceivedNotice("Terminated", "SIGTERM")


def until_known(client, number):
    """Return once a process has heard of so many notices."""
    while client.stop.known < number:
        changes = client.stop.changes
        if client.stop.known < number:
            client.stop.wait(changes, PATIENCE_S)
            assert client.stop.changes > changes, "it was never told"


def loop(client, steps, *, on_step=lambda step: None):
    """Run until told to stop; return where. Nobody gets further ahead than a few steps."""
    for step in steps:
        if step % 5 == 0:
            client.arrive(Point(f"step {step}"), timeout_s=PATIENCE_S)
        if preempted.on(client, step, timeout_s=PATIENCE_S):
            return step
        on_step(step)
    return None


@pytest.mark.parametrize("stride", [1, 7])
@pytest.mark.parametrize("given_to", [0, 2])
def test_all_stop_at_one_step_again_and_again(make_job, stride, given_to):
    job = make_job(3)
    begin = 2**31 - 50

    def run(client):
        stops, first = [], begin
        for number in range(1, 9):

            def on_step(step, first=first, number=number):
                if step >= first + 3 * stride and client.process == given_to:
                    client.give_notice(TERM)

            stop = loop(client, range(first, first + 10**9, stride), on_step=on_step)
            notice = client.stop.notice()
            stops.append((stop, notice.step, notice.process, notice.reason))
            clear.on(client, timeout_s=PATIENCE_S)
            first = stop + stride
        return stops

    first, *others = job.on_all(run)
    assert others == [first] * 2
    assert len({stop for stop, *_ in first}) == 8
    for (stop, step, *who), begin_of in zip(first, [begin, *(s[0] for s in first)], strict=False):
        assert begin_of < step <= stop < step + stride
        assert who == [given_to, "Terminated"]


def test_a_long_phase_asks_for_one_step_again_and_again(make_job):
    """One process asks for step 5 many times; others are in later calls of the same step."""
    job = make_job(2)
    first, second = job.clients
    for _ in range(100):
        assert preempted.on(first, 5) is False
    assert preempted.on(second, 4) is False
    second.give_notice(TERM)
    until_known(first, 1)
    assert job.on_all(lambda c: preempted.on(c, 5)) == [False, False]
    assert job.on_all(lambda c: preempted.on(c, 6)) == [True, True]
    assert job.on_all(lambda c: preempted.on(c, 5)) == [False, False]  # the loop goes back
    assert job.on_all(lambda c: preempted.on(c, 10**5000)) == [True, True]


def test_watcher_answers_a_notice_for_a_computing_process(make_job):
    """The main line of process 1 does not come: its watcher answers."""
    job = make_job(2)
    assert preempted.on(job.clients[1], 3) is False
    job.clients[0].give_notice(TERM)
    until_known(job.clients[0], 1)
    assert preempted.on(job.clients[0], 4, timeout_s=PATIENCE_S) is True


def test_without_a_notice_nothing_is_sent(make_job, monkeypatch):
    job = make_job(2)
    for client in job.clients:
        for name in ("arrive", "report_stop", "awaited", "members"):
            monkeypatch.setattr(client, name, None)
    assert [preempted.on(c, 2**40) for c in job.clients] == [False, False]


def test_steps_of_numpy_are_numbers():
    client = alone()
    assert preempted.on(client, np.int64(7)) is False
    client.give_notice(TERM)
    assert preempted.on(client, np.uint8(7)) is False
    assert preempted.on(client, np.int32(8)) is True


WRONG = [-1, True, 1.0, "3", [], np.bool_(True), np.float32(2), -(2**80), -(10**5000)]


@pytest.mark.parametrize("step", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("call", [preempted.on, mark_saved.on])
def test_invalid_steps_are_refused(call, step):
    is_number = isinstance(step, int) and step is not True
    with pytest.raises(UsageError if is_number else UsageTypeError, match="the step must"):
        call(alone(), step)


def test_rearming_closes_the_notices_that_all_processes_know(make_job):
    job = make_job(3)
    job.clients[1].give_notice(TERM)
    for client in job.clients:
        until_known(client, 1)
    assert job.on_all(lambda c: preempted.on(c, 0)) == [True] * 3
    assert job.on_all(partial(clear.on, timeout_s=PATIENCE_S)) == [None] * 3
    assert [c.stop.notice() for c in job.clients] == [None] * 3
    assert job.on_all(lambda c: preempted.on(c, 0)) == [False] * 3
    job.clients[1].give_notice(TERM)  # the same again
    for client in job.clients:
        until_known(client, 2)
    assert job.on_all(lambda c: preempted.on(c, 1)) == [True] * 3


@pytest.mark.parametrize("named", [False, True])
def test_survivors_of_a_loss_go_on_after_a_notice(make_job, named):
    job = make_job(3)
    job.clients[2].give_notice(TERM)
    for client in job.clients:
        until_known(client, 1)
    job.kill(1)
    left = [job.clients[p] for p in (0, 2)]

    def go_on(client):
        alive = live_processes.on(client, timeout_s=PATIENCE_S)
        stops = [preempted.on(client, 0, timeout_s=PATIENCE_S)]
        with pytest.raises(PeerFailedError if client.process else UsageError):
            clear.on(client, timeout_s=PATIENCE_S if client.process else "x")
        among = {"processes": iter(alive)} if named else {}
        clear.on(client, timeout_s=PATIENCE_S, **among)
        stops.append(preempted.on(client, 0, timeout_s=PATIENCE_S))
        client.arrive(Point("go", alive), timeout_s=PATIENCE_S)
        if client.process == 2:
            client.give_notice(TERM)
        until_known(client, 2)
        stops.append(preempted.on(client, 1, timeout_s=PATIENCE_S))
        return alive, stops

    assert (
        run_together(*(partial(go_on, survivor) for survivor in left))
        == [((0, 2), [True, False, True])] * 2
    )


def test_the_exit_code_asks_to_start_again_after_a_save(make_job):
    job = make_job(2)
    first, second = job.clients
    mark_saved.on(first, 3)
    first.give_notice(TERM)
    for client in job.clients:
        until_known(client, 1)
    assert [c.stop.exit_code for c in job.clients] == [0, 0]
    mark_saved.on(first, 4)
    assert [c.stop.exit_code for c in job.clients] == [75, 0]
    assert job.until_reported(0, "saved step 4")
    mark_saved.on(second)
    assert second.stop.exit_code == 75
    job.on_all(partial(clear.on, timeout_s=PATIENCE_S))
    assert [c.stop.exit_code for c in job.clients] == [0, 0]


NUMBERS = {
    "the same": lambda step: step,
    "steps that are done": lambda step: step + 1,
    "tokens": lambda step: 4096 * step,
    "epochs": lambda step: step // 100,
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("stride", [1, 7])
def test_a_loop_that_saves_before_it_asks_saves_where_it_stops(make_job, number, stride):
    """However its saves are numbered: `save` is True at the step at which all stop, not before."""
    job = make_job(3)

    def run(client):
        answers, step, stop = [], 1000, False
        while not stop:
            client.arrive(Point(f"step {step}"), timeout_s=PATIENCE_S)
            if len(answers) == 5 and client.process == 2:
                client.give_notice(TERM)
            answers.append(stops_at_save(client, "save", number(step)))
            stop = preempted.on(client, step, timeout_s=PATIENCE_S)
            step += stride
        return answers

    first, *others = job.on_all(run)
    assert others == [first] * 2
    assert first == [False] * (len(first) - 1) + [True]


def test_saves_without_preempted_have_an_agreed_step_of_their_own(make_job):
    """It does not put off that of `preempted`, whose numbers are others."""
    job = make_job(2)

    def run(client):
        step = 10**6
        while not stops_at_save(client, "save", step):
            client.arrive(Point(f"step {step}"), timeout_s=PATIENCE_S)
            if step == 1_005_000 and client.process == 1:
                client.give_notice(TERM)
            step += 1000
        return step, [preempted.on(client, step_number) for step_number in (0, 1)]

    first, second = job.on_all(run)
    assert first == second
    assert first[0] >= 1_005_000
    assert first[1] == [True, True]


def test_a_program_that_has_finished_before_the_agreed_step_is_not_preempted(make_job):
    job = make_job(2)
    job.on_all(lambda c: preempted.on(c, 9))
    job.clients[1].give_notice(TERM)
    for client in job.clients:
        until_known(client, 1)
    assert job.on_all(lambda c: preempted.on(c, 9)) == [False] * 2
    job.on_all(lambda c: mark_saved.on(c, 9))
    assert [c.stop.exit_code for c in job.clients] == [0, 0]


def test_exit_code_is_75_unless_a_save_failed_since_the_stop(make_job):
    job = make_job(2)
    first, second = job.clients
    job.on_all(lambda c: preempted.on(c, 9))
    note_failed(first, "run", first.stop.number_of(9))  # the program knows, and goes on
    second.give_notice(TERM)
    for client in job.clients:
        until_known(client, 1)
    assert job.on_all(lambda c: preempted.on(c, 10)) == [True] * 2
    assert [c.stop.exit_code for c in job.clients] == [75, 75]
    note_failed(first, "run", first.stop.number_of(10))
    assert [c.stop.exit_code for c in job.clients] == [0, 75]
    mark_saved.on(first, 10)
    assert [c.stop.exit_code for c in job.clients] == [75, 75]
    job.on_all(partial(clear.on, timeout_s=PATIENCE_S))
    assert [c.stop.exit_code for c in job.clients] == [0, 0]


def test_lost_process_raises_on_every_other_process(make_job):
    job = make_job(3)
    job.kill(1)
    job.until_known(0, [1])
    with pytest.raises(ProcessLostError) as caught:
        preempted.on(job.clients[0], 7)
    assert set(caught.value.lost) == {1}
    assert "preempted(7) (" in str(caught.value)
    job.clients[2].report("failed", "ValueError: no")
    job.until_known(0, [1, 2])
    with pytest.raises(ProcessLostError):
        preempted.on(job.clients[0], 7)


def test_failed_process_raises_on_every_other_process(make_job):
    job = make_job(2)
    job.clients[1].report("failed", "ValueError: no")
    job.until_known(0, [1])
    with pytest.raises(PeerFailedError):
        preempted.on(job.clients[0], 7)


class Mute:
    """A job of two, whose process 1 is here but never says how far it is."""

    def __init__(self):
        self.coordinator = BareCoordinator(
            2, LIMITS._replace(lost_after_s=1e6, silent_lost_after_s=1e6)
        )
        threads = []

        def enter():
            threads.append(
                join(
                    self.coordinator.address,
                    process=0,
                    num_processes=2,
                    token="the secret",
                    timeout_s=PATIENCE_S,
                    versions="",
                    warn_after_s=1e6,
                )
            )

        thread = threading.Thread(target=enter)
        thread.start()
        self.other = self.coordinator.process(1)
        thread.join(PATIENCE_S)
        (self.client,) = threads

    def close(self):
        self.client.close()
        self.coordinator.end()


@pytest.fixture
def mute():
    job = Mute()
    yield job
    job.close()


def waiting_for_the_step(mute):
    """Give a notice and ask in a thread; return the list for its error, and the thread."""
    mute.client.give_notice(TERM)
    until_known(mute.client, 1)
    results = []
    wait = threading.Thread(
        target=lambda: results.extend(_error(lambda: preempted.on(mute.client, 1)))
    )
    wait.start()
    return results, wait


def until_it_waits(mute, wait):
    while not mute.client.progress.is_waiting:
        assert wait.is_alive()
        mute.coordinator.ask("members")


def test_deadline_names_the_process_that_has_not_reported_its_step(mute, monkeypatch, shoal_log):
    monkeypatch.setenv("SHOAL_WARN_AFTER_S", "0.01")
    mute.client.give_notice(TERM)
    until_known(mute.client, 1)
    with pytest.raises(DeadlineError) as caught:
        preempted.on(mute.client, 12, timeout_s=0.1)
    assert caught.value.missing == (1,)
    assert set(caught.value.last_words) == {1}
    assert re.search(r"preempted\(12\) \(\S*test_preemption.py:", str(caught.value))
    assert "for process 1" in str(caught.value)
    assert "for process 1" in shoal_log.lines[0][1]


def test_loss_of_the_missing_process_ends_the_wait(mute):
    results, wait = waiting_for_the_step(mute)
    until_it_waits(mute, wait)
    mute.other.close()
    wait.join(PATIENCE_S)
    assert [type(result) for result in results] == [ProcessLostError]
    assert set(results[0].lost) == {1}


def test_loss_of_the_coordinator_ends_the_wait(mute):
    results, wait = waiting_for_the_step(mute)
    mute.client.lose("the test says so")
    wait.join(PATIENCE_S)
    assert [type(result) for result in results] == [ProcessLostError]


def test_leaving_the_job_ends_the_wait(mute):
    results, wait = waiting_for_the_step(mute)
    until_it_waits(mute, wait)
    mute.client.close()
    wait.join(PATIENCE_S)
    assert [str(result) for result in results if "has left the job" in str(result)]


def test_late_answer_to_a_notice_is_accepted(mute):
    """What a bare connection says as a process does: hexadecimal, of any size."""
    assert preempted.on(mute.client, 2) is False
    mute.other.say("notice", reason="spot", source="aws", deadline_s=120)
    until_known(mute.client, 1)
    mute.other.say("stop", b"%x" % 2**70, round=0, knows=True, saved=False)
    assert preempted.on(mute.client, 2**70, timeout_s=PATIENCE_S) is False
    assert preempted.on(mute.client, 2**70 + 1) is True
    notice = mute.client.stop.notice()
    assert notice[:3] == ("spot", "aws", 1)
    assert 0 < notice.deadline_s <= 120
    welcome, heard, stop = (mute.other.told() for _ in range(3))
    assert welcome["is"] == "welcome"
    assert (heard["is"], heard["process"], heard["number"]) == ("notice", 1, 1)
    assert stop == {"is": "stop", "round": 0, "body": f"{2**70 + 1:x}"}


@pytest.mark.parametrize(
    ("verb", "body", "fields"),
    [
        ("stop", b"12 monkeys", {"round": 0, "knows": True}),
        ("stop", b"", {"round": 0, "knows": True}),
        ("stop", b"1", {"round": "0", "knows": True}),
        ("stop", b"1", {"knows": True}),
        ("stop", b"1", {"round": 0, "knows": True, "stopped": [3, "", False]}),
        ("stop", b"1", {"round": 0, "knows": True, "stopped": [2, None, False]}),
        ("stop", b"1", {"round": 0, "knows": True, "highest_save": "1"}),
        ("notice", b"", {"source": "aws", "deadline_s": None}),
        ("notice", b"", {"reason": "spot", "source": 3, "deadline_s": None}),
        ("notice", b"", {"reason": "spot", "source": "aws", "deadline_s": "soon"}),
        ("notice", b"", {"reason": "spot", "source": "aws"}),
    ],
)
def test_malformed_notice_or_stop_closes_the_connection(mute, verb, body, fields):
    mute.other.say(verb, body, **fields)
    assert mute.other.told()["is"] == "welcome"
    assert mute.other.told() is None


def _error(call):
    try:
        return [call()]
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return [error]


def test_preemption_functions_work_without_initialize(monkeypatch):
    """What the public functions do where nobody called `initialize`."""
    job = LocalJob(1)
    monkeypatch.setattr(preemption.process, "client", lambda: job.clients[0])
    monkeypatch.setattr(preemption.process, "last_client", lambda: job.clients[0])
    monkeypatch.setattr(preemption.process, "is_watching", lambda: True)
    assert preemption.preempted(0) is False
    assert preemption.notice() is None
    job.clients[0].give_notice(TERM)
    assert (preemption.notice().source, preemption.notice().step) == ("SIGTERM", 1)
    assert (preemption.preempted(0), preemption.preempted(1)) == (False, True)
    preemption.mark_saved(1)
    assert preemption.exit_code() == 75
    preemption.clear()
    assert (preemption.exit_code(), preemption.notice()) == (0, None)
    assert preemption.preempted(1) is False


def test_coordinator_prints_notices_only_with_print_leaving(coordinators):
    """Others take whatever it prints after its address for its end."""
    printed = {}
    for options in ((), ("--print-leaving",)):
        server, address = coordinators.start(1, "--until-stdin-closes", *options)
        client = join(
            address, process=0, num_processes=1, token=coordinators.token, timeout_s=PATIENCE_S
        )
        client.give_notice(TERM)
        until_known(client, 1)
        mark_saved.on(client, 3)
        clear.on(client, timeout_s=PATIENCE_S)
        client.members(timeout_s=PATIENCE_S)
        client.close()
        server.stdin.close()
        printed[options] = [json.loads(line) for line in server.stdout]
        assert server.wait(PATIENCE_S) == 0
        server.stdout.close()
    assert printed[()] == []
    assert printed["--print-leaving",] == [
        {"notice": True, "saved": False},
        {"notice": True, "saved": True},
        {"notice": False, "saved": False},
    ]


def test_coordinator_prints_the_stop_state_that_a_job_leaves(coordinators):
    server, address = coordinators.start(1, "--until-stdin-closes", "--print-leaving")
    client = join(
        address, process=0, num_processes=1, token=coordinators.token, timeout_s=PATIENCE_S
    )
    client.give_notice(TERM)
    until_known(client, 1)
    assert preempted.on(client, 3, timeout_s=PATIENCE_S)
    note_failed(client, "run", client.stop.number_of(3))
    mark_saved.on(client, 3)
    client.members(timeout_s=PATIENCE_S)
    client.close()
    server.stdin.close()
    printed = [json.loads(line) for line in server.stdout]
    server.stdout.close()
    assert server.wait(PATIENCE_S) == 0
    summary = (
        "preempted at step 3: nothing of this attempt is saved, so it starts over where it began"
    )
    nothing = {"notice": True, "saved": False, "words": summary}
    assert printed == [
        {"notice": True, "saved": False},
        {**nothing, "has_failed": False},
        {**nothing, "has_failed": True},
        {"notice": True, "saved": True},
    ]
