"""`preempted` and what goes with it, over threads and over a real meeting place."""

from __future__ import annotations

import json
import re
import threading
from functools import partial

import numpy as np
import pytest

from runtime.bare_sockets import LIMITS, Place
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


def until_known(coordinator, number):
    """Return once a process has heard of so many notices."""
    while coordinator.stop.known < number:
        changes = coordinator.stop.changes
        if coordinator.stop.known < number:
            coordinator.stop.wait(changes, PATIENCE_S)
            assert coordinator.stop.changes > changes, "it was never told"


def loop(coordinator, steps, *, on_step=lambda step: None):
    """Run until told to stop; return where. Nobody gets further ahead than a few steps."""
    for step in steps:
        if step % 5 == 0:
            coordinator.arrive(Point(f"step {step}"), timeout_s=PATIENCE_S)
        if preempted.on(coordinator, step, timeout_s=PATIENCE_S):
            return step
        on_step(step)
    return None


@pytest.mark.parametrize("stride", [1, 7])
@pytest.mark.parametrize("given_to", [0, 2])
def test_all_stop_at_one_step_again_and_again(make_job, stride, given_to):
    job = make_job(3)
    begin = 2**31 - 50

    def run(coordinator):
        stops, first = [], begin
        for number in range(1, 9):

            def on_step(step, first=first, number=number):
                if step >= first + 3 * stride and coordinator.process == given_to:
                    coordinator.give_notice(TERM)

            stop = loop(coordinator, range(first, first + 10**9, stride), on_step=on_step)
            notice = coordinator.stop.notice()
            stops.append((stop, notice.step, notice.process, notice.reason))
            clear.on(coordinator, timeout_s=PATIENCE_S)
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
    first, second = job.coordinators
    for _ in range(100):
        assert preempted.on(first, 5) is False
    assert preempted.on(second, 4) is False
    second.give_notice(TERM)
    until_known(first, 1)
    assert job.on_all(lambda c: preempted.on(c, 5)) == [False, False]
    assert job.on_all(lambda c: preempted.on(c, 6)) == [True, True]
    assert job.on_all(lambda c: preempted.on(c, 5)) == [False, False]  # the loop goes back
    assert job.on_all(lambda c: preempted.on(c, 10**5000)) == [True, True]


def test_nobody_waits_for_a_process_that_computes(make_job):
    """The main line of process 1 does not come: its watcher answers."""
    job = make_job(2)
    assert preempted.on(job.coordinators[1], 3) is False
    job.coordinators[0].give_notice(TERM)
    until_known(job.coordinators[0], 1)
    assert preempted.on(job.coordinators[0], 4, timeout_s=PATIENCE_S) is True


def test_without_a_notice_nothing_is_sent(make_job, monkeypatch):
    job = make_job(2)
    for coordinator in job.coordinators:
        for name in ("arrive", "report_stop", "awaited", "members"):
            monkeypatch.setattr(coordinator, name, None)
    assert [preempted.on(c, 2**40) for c in job.coordinators] == [False, False]


def test_steps_of_numpy_are_numbers():
    coordinator = alone()
    assert preempted.on(coordinator, np.int64(7)) is False
    coordinator.give_notice(TERM)
    assert preempted.on(coordinator, np.uint8(7)) is False
    assert preempted.on(coordinator, np.int32(8)) is True


WRONG = [-1, True, 1.0, "3", [], np.bool_(True), np.float32(2), -(2**80), -(10**5000)]


@pytest.mark.parametrize("step", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("call", [preempted.on, mark_saved.on])
def test_a_step_that_is_none_is_refused(call, step):
    is_number = isinstance(step, int) and step is not True
    with pytest.raises(UsageError if is_number else UsageTypeError, match="the step must"):
        call(alone(), step)


def test_going_on_closes_what_all_knew_of(make_job):
    job = make_job(3)
    job.coordinators[1].give_notice(TERM)
    for coordinator in job.coordinators:
        until_known(coordinator, 1)
    assert job.on_all(lambda c: preempted.on(c, 0)) == [True] * 3
    assert job.on_all(partial(clear.on, timeout_s=PATIENCE_S)) == [None] * 3
    assert [c.stop.notice() for c in job.coordinators] == [None] * 3
    assert job.on_all(lambda c: preempted.on(c, 0)) == [False] * 3
    job.coordinators[1].give_notice(TERM)  # the same again
    for coordinator in job.coordinators:
        until_known(coordinator, 2)
    assert job.on_all(lambda c: preempted.on(c, 1)) == [True] * 3


@pytest.mark.parametrize("named", [False, True])
def test_survivors_of_a_loss_go_on_after_a_notice(make_job, named):
    job = make_job(3)
    job.coordinators[2].give_notice(TERM)
    for coordinator in job.coordinators:
        until_known(coordinator, 1)
    job.kill(1)
    left = [job.coordinators[p] for p in (0, 2)]

    def go_on(coordinator):
        alive = live_processes.on(coordinator, timeout_s=PATIENCE_S)
        stops = [preempted.on(coordinator, 0, timeout_s=PATIENCE_S)]
        with pytest.raises(PeerFailedError if coordinator.process else UsageError):
            clear.on(coordinator, timeout_s=PATIENCE_S if coordinator.process else "x")
        among = {"processes": iter(alive)} if named else {}
        clear.on(coordinator, timeout_s=PATIENCE_S, **among)
        stops.append(preempted.on(coordinator, 0, timeout_s=PATIENCE_S))
        coordinator.arrive(Point("go", alive), timeout_s=PATIENCE_S)
        if coordinator.process == 2:
            coordinator.give_notice(TERM)
        until_known(coordinator, 2)
        stops.append(preempted.on(coordinator, 1, timeout_s=PATIENCE_S))
        return alive, stops

    assert (
        run_together(*(partial(go_on, one) for one in left)) == [((0, 2), [True, False, True])] * 2
    )


def test_the_exit_code_asks_to_start_again_after_a_save(make_job):
    job = make_job(2)
    first, second = job.coordinators
    mark_saved.on(first, 3)
    first.give_notice(TERM)
    for coordinator in job.coordinators:
        until_known(coordinator, 1)
    assert [c.stop.exit_code for c in job.coordinators] == [0, 0]
    mark_saved.on(first, 4)
    assert [c.stop.exit_code for c in job.coordinators] == [75, 0]
    assert job.until_reported(0, "saved step 4")
    mark_saved.on(second)
    assert second.stop.exit_code == 75
    job.on_all(partial(clear.on, timeout_s=PATIENCE_S))
    assert [c.stop.exit_code for c in job.coordinators] == [0, 0]


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

    def run(coordinator):
        found, step, stop = [], 1000, False
        while not stop:
            coordinator.arrive(Point(f"step {step}"), timeout_s=PATIENCE_S)
            if len(found) == 5 and coordinator.process == 2:
                coordinator.give_notice(TERM)
            found.append(stops_at_save(coordinator, "save", number(step)))
            stop = preempted.on(coordinator, step, timeout_s=PATIENCE_S)
            step += stride
        return found

    first, *others = job.on_all(run)
    assert others == [first] * 2
    assert first == [False] * (len(first) - 1) + [True]


def test_saves_without_preempted_have_an_agreed_step_of_their_own(make_job):
    """It does not put off that of `preempted`, whose numbers are others."""
    job = make_job(2)

    def run(coordinator):
        step = 10**6
        while not stops_at_save(coordinator, "save", step):
            coordinator.arrive(Point(f"step {step}"), timeout_s=PATIENCE_S)
            if step == 1_005_000 and coordinator.process == 1:
                coordinator.give_notice(TERM)
            step += 1000
        return step, [preempted.on(coordinator, number) for number in (0, 1)]

    first, second = job.on_all(run)
    assert first == second
    assert first[0] >= 1_005_000
    assert first[1] == [True, True]


def test_a_program_that_has_finished_before_the_agreed_step_is_not_preempted(make_job):
    job = make_job(2)
    job.on_all(lambda c: preempted.on(c, 9))
    job.coordinators[1].give_notice(TERM)
    for coordinator in job.coordinators:
        until_known(coordinator, 1)
    assert job.on_all(lambda c: preempted.on(c, 9)) == [False] * 2
    job.on_all(lambda c: mark_saved.on(c, 9))
    assert [c.stop.exit_code for c in job.coordinators] == [0, 0]


def test_who_has_stopped_is_to_start_again_unless_a_save_has_failed_since(make_job):
    job = make_job(2)
    first, second = job.coordinators
    job.on_all(lambda c: preempted.on(c, 9))
    note_failed(first, "run", first.stop.number_of(9))  # the program knows, and goes on
    second.give_notice(TERM)
    for coordinator in job.coordinators:
        until_known(coordinator, 1)
    assert job.on_all(lambda c: preempted.on(c, 10)) == [True] * 2
    assert [c.stop.exit_code for c in job.coordinators] == [75, 75]
    note_failed(first, "run", first.stop.number_of(10))
    assert [c.stop.exit_code for c in job.coordinators] == [0, 75]
    mark_saved.on(first, 10)
    assert [c.stop.exit_code for c in job.coordinators] == [75, 75]
    job.on_all(partial(clear.on, timeout_s=PATIENCE_S))
    assert [c.stop.exit_code for c in job.coordinators] == [0, 0]


def test_who_is_gone_is_everybodys_error(make_job):
    job = make_job(3)
    job.kill(1)
    job.until_known(0, [1])
    with pytest.raises(ProcessLostError) as caught:
        preempted.on(job.coordinators[0], 7)
    assert set(caught.value.lost) == {1}
    assert "preempted(7) (" in str(caught.value)
    job.coordinators[2].report("failed", "ValueError: no")
    job.until_known(0, [1, 2])
    with pytest.raises(ProcessLostError):
        preempted.on(job.coordinators[0], 7)


def test_who_failed_is_everybodys_error(make_job):
    job = make_job(2)
    job.coordinators[1].report("failed", "ValueError: no")
    job.until_known(0, [1])
    with pytest.raises(PeerFailedError):
        preempted.on(job.coordinators[0], 7)


class Mute:
    """A job of two, whose process 1 is here but never says how far it is."""

    def __init__(self):
        self.place = Place(2, LIMITS._replace(lost_after_s=1e6, silent_lost_after_s=1e6))
        threads = []

        def enter():
            threads.append(
                join(
                    self.place.address,
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
        self.other = self.place.process(1)
        thread.join(PATIENCE_S)
        (self.coordinator,) = threads

    def close(self):
        self.coordinator.close()
        self.place.end()


@pytest.fixture
def mute():
    job = Mute()
    yield job
    job.close()


def waiting_for_the_step(mute):
    """Give a notice and ask in a thread; return the list for its error, and the thread."""
    mute.coordinator.give_notice(TERM)
    until_known(mute.coordinator, 1)
    results = []
    wait = threading.Thread(
        target=lambda: results.extend(_error(lambda: preempted.on(mute.coordinator, 1)))
    )
    wait.start()
    return results, wait


def until_it_waits(mute, wait):
    while not mute.coordinator.progress.is_waiting:
        assert wait.is_alive()
        mute.place.ask("members")


def test_a_deadline_names_who_has_not_said_how_far_it_is(mute, monkeypatch, shoal_log):
    monkeypatch.setenv("SHOAL_WARN_AFTER_S", "0.01")
    mute.coordinator.give_notice(TERM)
    until_known(mute.coordinator, 1)
    with pytest.raises(DeadlineError) as caught:
        preempted.on(mute.coordinator, 12, timeout_s=0.1)
    assert caught.value.missing == (1,)
    assert set(caught.value.last_words) == {1}
    assert re.search(r"preempted\(12\) \(\S*test_preemption.py:", str(caught.value))
    assert "for process 1" in str(caught.value)
    assert "for process 1" in shoal_log.lines[0][1]


def test_it_ends_the_wait_when_the_one_that_is_missing_dies(mute):
    results, wait = waiting_for_the_step(mute)
    until_it_waits(mute, wait)
    mute.other.close()
    wait.join(PATIENCE_S)
    assert [type(result) for result in results] == [ProcessLostError]
    assert set(results[0].lost) == {1}


def test_it_ends_the_wait_when_the_meeting_place_dies(mute):
    results, wait = waiting_for_the_step(mute)
    mute.coordinator.lose("the test says so")
    wait.join(PATIENCE_S)
    assert [type(result) for result in results] == [ProcessLostError]


def test_it_ends_the_wait_when_this_process_leaves(mute):
    results, wait = waiting_for_the_step(mute)
    until_it_waits(mute, wait)
    mute.coordinator.close()
    wait.join(PATIENCE_S)
    assert [str(result) for result in results if "has left the job" in str(result)]


def test_who_answers_late_is_heard(mute):
    """What a bare connection says as a process does: hexadecimal, of any size."""
    assert preempted.on(mute.coordinator, 2) is False
    mute.other.say("notice", reason="spot", source="aws", deadline_s=120)
    until_known(mute.coordinator, 1)
    mute.other.say("stop", b"%x" % 2**70, round=0, knows=True, saved=False)
    assert preempted.on(mute.coordinator, 2**70, timeout_s=PATIENCE_S) is False
    assert preempted.on(mute.coordinator, 2**70 + 1) is True
    notice = mute.coordinator.stop.notice()
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
def test_who_talks_nonsense_is_hung_up_on(mute, verb, body, fields):
    mute.other.say(verb, body, **fields)
    assert mute.other.told()["is"] == "welcome"
    assert mute.other.told() is None


def _error(call):
    try:
        return [call()]
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return [error]


def test_a_job_of_one_needs_no_job(monkeypatch):
    """What the public functions do where nobody called `initialize`."""
    job = LocalJob(1)
    monkeypatch.setattr(preemption.process, "coordinator", lambda: job.coordinators[0])
    monkeypatch.setattr(preemption.process, "last_coordinator", lambda: job.coordinators[0])
    monkeypatch.setattr(preemption.process, "is_watching", lambda: True)
    assert preemption.preempted(0) is False
    assert preemption.notice() is None
    job.coordinators[0].give_notice(TERM)
    assert (preemption.notice().source, preemption.notice().step) == ("SIGTERM", 1)
    assert (preemption.preempted(0), preemption.preempted(1)) == (False, True)
    preemption.mark_saved(1)
    assert preemption.exit_code() == 75
    preemption.clear()
    assert (preemption.exit_code(), preemption.notice()) == (0, None)
    assert preemption.preempted(1) is False


def test_the_meeting_place_prints_who_leaves_only_if_it_is_asked(meeting_places):
    """Others take whatever it prints after its address for its end."""
    printed = {}
    for options in ((), ("--print-leaving",)):
        server, address = meeting_places.start(1, "--until-stdin-closes", *options)
        coordinator = join(
            address, process=0, num_processes=1, token=meeting_places.token, timeout_s=PATIENCE_S
        )
        coordinator.give_notice(TERM)
        until_known(coordinator, 1)
        mark_saved.on(coordinator, 3)
        clear.on(coordinator, timeout_s=PATIENCE_S)
        coordinator.members(timeout_s=PATIENCE_S)
        coordinator.close()
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


def test_it_prints_what_a_job_leaves_behind(meeting_places):
    server, address = meeting_places.start(1, "--until-stdin-closes", "--print-leaving")
    coordinator = join(
        address, process=0, num_processes=1, token=meeting_places.token, timeout_s=PATIENCE_S
    )
    coordinator.give_notice(TERM)
    until_known(coordinator, 1)
    assert preempted.on(coordinator, 3, timeout_s=PATIENCE_S)
    note_failed(coordinator, "run", coordinator.stop.number_of(3))
    mark_saved.on(coordinator, 3)
    coordinator.members(timeout_s=PATIENCE_S)
    coordinator.close()
    server.stdin.close()
    printed = [json.loads(line) for line in server.stdout]
    server.stdout.close()
    assert server.wait(PATIENCE_S) == 0
    words = (
        "preempted at step 3: nothing of this attempt is saved, so it starts over where it began"
    )
    nothing = {"notice": True, "saved": False, "words": words}
    assert printed == [
        {"notice": True, "saved": False},
        {**nothing, "has_failed": False},
        {**nothing, "has_failed": True},
        {"notice": True, "saved": True},
    ]
