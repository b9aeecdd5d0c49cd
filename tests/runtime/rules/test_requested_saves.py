"""The rules of requests to save, in any order of calls, requests, notices, commits and deaths."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.runtime.rules.requested_saves import (
    ANSWERED,
    BY_STEPS,
    COMMITTED,
    EACH_CALL,
    FAILED,
    NO_CHECKPOINTS,
    SaveOrder,
    SaveReport,
    SaveRequests,
)
from shoal.runtime.rules.stopping import PreemptionState, ReceivedNotice

TERM = ReceivedNotice("Terminated", "SIGTERM")


class World:
    """N processes that save at each step, a place, and frames between them, in order."""

    def __init__(self, processes, *, saves_each=0):
        self.has_notice = False
        self.requests = SaveRequests(processes, lambda: self.has_notice)
        self.stops = [PreemptionState(p, lambda: 0.0) for p in range(processes)]
        for stop in self.stops:
            stop.saves.begin_history(BY_STEPS, is_all=True)
        self.up = [deque() for _ in self.stops]
        self.down = [deque() for _ in self.stops]
        self.living = set(range(processes))
        self.next = [(0, "should_save")] * processes
        self.running = [deque() for _ in self.stops]  # the steps of saves
        self.every = saves_each
        self.requested = [[] for _ in self.stops]  # the steps saved for requests
        self.states = []  # what the observers have received

    def send(self, sent):
        for message in sent:
            if isinstance(message, SaveOrder):
                for queue in self.down:
                    queue.append(message)
            else:
                self.states.append((message.to, message.answer.state, message.answer.step))

    def call(self, p):
        """Go on in a loop: it asks at each step, calls `save` if it shall, which asks and begins.

        A frame may arrive between any two of these; the save ends later.
        """
        step, call = self.next[p]
        saves = self.stops[p].saves
        if call == "begin":
            saves.begin(step)
            self.running[p].append(step)
            self.next[p] = step + 1, "should_save"
            return
        is_due = saves.is_due(step)
        if is_due is None:
            return  # it waits: the call is made again
        wants = is_due or (self.every and step % self.every == self.every - 1)
        if not wants:
            self.next[p] = step + 1, "should_save"
        elif call == "should_save":
            self.next[p] = step, "save"
        else:
            if is_due:
                self.requested[p].append(step)
            self.next[p] = step, "begin"

    def commit(self, p):
        """End the oldest save that runs."""
        if self.running[p]:
            report = self.stops[p].saves.end(self.running[p].popleft(), COMMITTED)
            self.up[p] += [report] if report else []

    def request(self, to):
        self.send(self.requests.request(to, 1))

    def notice(self):
        if not self.has_notice:
            self.has_notice = True
            self.send(self.requests.overtake())
            for queue in self.down:
                queue.append(TERM)

    def kill(self, p):
        if len(self.living) > 1:
            self.living.discard(p)
            self.send(self.requests.depart(p))

    def carry_up(self, p):
        if self.up[p]:
            self.send(self.requests.receive(p, self.up[p].popleft()))

    def carry_down(self, p):
        if not self.down[p]:
            return
        frame = self.down[p].popleft()
        if frame is TERM:
            self.stops[p].receive(1, 0, TERM)
        elif (report := self.stops[p].saves.receive(frame)) is not None:
            self.up[p].append(report)

    def act(self, name, p, number):
        if p not in self.living:
            return
        if name == "request":
            self.request(number)
        elif name == "notice":
            self.notice()
        else:
            getattr(self, name)(p)

    def settle(self):
        """Carry all frames, and let all processes come to one step beyond every other one."""
        last = max(step for step, _ in self.next) + 3
        for _ in range(1000):
            for p in self.living:
                self.carry_up(p)
                self.carry_down(p)
                self.commit(p)
                if self.next[p][0] < last:
                    self.call(p)
        assert all(self.next[p][0] == last for p in self.living), "a call waits for ever"
        assert not any(self.up[p] or self.down[p] for p in self.living)


ACTIONS = ["call"] * 8 + ["commit"] * 2 + ["carry_up", "carry_down"] * 4 + ["request"] * 2


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([0, 3]),
    st.lists(
        st.tuples(
            st.sampled_from([*ACTIONS, "notice", "kill"]), st.integers(0, 3), st.integers(0, 9)
        ),
        max_size=120,
    ),
)
def test_processes_save_the_same_steps(processes, every, actions):
    """Requests at any moment, also while one is open; a notice overtakes; processes die."""
    world = World(processes, saves_each=every)
    for name, p, number in actions:
        world.act(name, p, number)
    world.settle()
    first, *others = (world.requested[p] for p in sorted(world.living))
    assert all(other == first for other in others)
    asked = {number for name, p, number in actions if name == "request"}
    states = {state for _, state, _ in world.states}
    if not world.has_notice and world.states:
        assert "preempted" not in states
        assert len(first) == len(set(first))
        committed = {to for to, state, _ in world.states if state == "committed"}
        assert {to for to, _, _ in world.states} <= committed <= asked
        steps = [step for _, state, step in world.states if state == "committed"]
        assert set(steps) == set(first), "each request is answered by a step that was saved for it"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=40), st.booleans())
def test_each_request_of_a_sequence_saves_one_more_step(turns, has_every):
    world = World(2, saves_each=5 if has_every else 0)
    for number in range(3):
        for p, choice in turns:
            (world.call, world.carry_up, world.carry_down)[choice](p)
        world.request(number)
        while not any(to == number and state == "committed" for to, state, _ in world.states):
            for p in (0, 1):
                world.carry_up(p)
                world.carry_down(p)
                world.call(p)
                world.commit(p)
    world.settle()
    assert world.requested[0] == world.requested[1]
    assert len(set(world.requested[0])) == 3


def test_the_step_is_the_first_that_no_process_has_passed():
    world = World(2)
    for _ in range(11):
        world.call(0)
    for _ in range(9):
        world.call(1)
    world.request("cli")
    world.settle()
    assert world.requested == [[11], [11]]
    assert world.states == [("cli", "agreed", 11), ("cli", "committed", 11)]
    for _ in range(10):  # it is closed
        world.call(0)
        world.commit(0)
    assert world.requested[0] == [11]


def test_a_step_that_is_saved_anyway_answers():
    world = World(2, saves_each=5)
    for p in (0, 1):
        for _ in range(4):
            world.call(p)
    world.request("cli")
    world.settle()
    assert world.requested == [[4], [4]]


def test_all_checkpoints_of_a_program_save_the_step():
    world = World(1)
    world.request("cli")
    for _ in range(4):
        world.carry_down(0)
        world.carry_up(0)
    saves = world.stops[0].saves
    for _ in range(2):
        assert saves.is_due(0)
        saves.begin(0)
    assert saves.end(0, COMMITTED) == SaveReport(1, COMMITTED, 0)
    assert saves.end(0, COMMITTED) is None
    assert [saves.is_due(1), saves.is_due(0)] == [False, False]


def test_the_steps_of_a_second_run_may_begin_at_0_again():
    world = World(1)
    for _ in range(100):
        world.call(0)
    world.stops[0].saves.begin_history(BY_STEPS, is_all=True)
    world.next[0] = 3, "should_save"
    world.request("cli")
    world.settle()
    assert world.requested == [[3]]


def test_a_later_request_has_a_save_of_its_own():
    requests = SaveRequests(1, lambda: False)
    requests.request("a", 1)
    assert requests.request("b", 1) == []  # it joins: no step is agreed
    replies = requests.receive(0, SaveReport(1, ANSWERED, 4, EACH_CALL))[1:]
    assert [(reply.to, reply.answer.state, reply.answer.is_by_steps) for reply in replies] == [
        ("a", "agreed", False),
        ("b", "agreed", False),
    ]
    assert requests.request("c", 1) == [SaveOrder(2)]  # while the save of the first may run
    order, told = requests.receive(0, SaveReport(2, ANSWERED, 5, BY_STEPS))
    assert (order, told.to) == (SaveOrder(2, 6), "c")
    told = requests.receive(0, SaveReport(1, COMMITTED, 5))
    assert [(reply.to, reply.answer.state) for reply in told] == [
        ("a", "committed"),
        ("b", "committed"),
    ]
    assert [reply.to for reply in requests.receive(0, SaveReport(2, COMMITTED, 6))] == ["c"]


def test_a_step_that_is_about_to_be_saved_is_passed():
    """Process 0 is within `save` of the agreed step when the next request arrives."""
    world = World(2)
    world.request("a")
    for p in (0, 1, 0, 1):
        world.carry_down(p)
        world.carry_up(p)
    world.carry_down(1)
    world.call(0)
    world.call(0)
    assert world.next[0] == (0, "begin")
    world.request("b")
    for p in (0, 1, 1):
        world.carry_down(p)
        world.carry_up(p)
    world.call(0)
    world.settle()
    assert world.requested == [[0, 1], [0, 1]]


def test_a_save_answers_earlier_requests_too():
    """As the one of a notice does while that of a request still runs, or has not begun."""
    world = World(2)
    world.request("first")
    for p in (0, 0, 1, 1):
        world.carry_down(p)
        world.carry_up(p)
    for p in (0, 1):
        world.carry_down(p)
    world.request("then stop")
    world.notice()
    for p in (0, 0, 1, 1):
        world.carry_down(p)
        world.carry_up(p)
    saves = world.stops[0].saves
    saves.begin(3)
    world.up[0].append(saves.end(3, COMMITTED))
    world.carry_up(0)
    assert world.states == [
        ("first", "agreed", 0),
        ("then stop", "preempted", None),
        ("first", "committed", 3),
        ("then stop", "committed", 3),
    ]


def test_a_failed_save_is_reported_and_closes_the_request():
    world = World(2)
    world.request("cli")
    for p in (0, 1, 0, 1):
        world.carry_down(p)
        world.carry_up(p)
    saves = world.stops[1].saves
    assert saves.is_due(0)
    saves.begin(0)
    world.up[1].append(saves.end(0, FAILED))
    world.carry_up(1)
    assert world.states[-1] == ("cli", "failed", 0)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_notice_overtakes_a_request_without_a_step(is_before):
    """Its save answers; no process saves at a step of its own for the request."""
    world = World(2)
    if is_before:
        world.notice()
    world.request("cli")
    if not is_before:
        world.notice()
    for p in (0, 0, 1, 1):
        world.carry_down(p)
        world.carry_up(p)
    assert world.states == [("cli", "preempted", None)]
    assert [stop.saves.is_due(0) for stop in world.stops] == [False, False]
    for p in (0, 1):
        world.stops[p].saves.begin(0)  # as the notice wants it
        world.up[p].append(world.stops[p].saves.end(0, COMMITTED))
        world.carry_up(p)
    assert world.states[1:] == [("cli", "committed", 0)]


def test_a_job_without_checkpoints_is_known_and_waits_for_nothing():
    requests, stop = SaveRequests(1, lambda: False), PreemptionState(0)
    (order,) = requests.request("cli", 1)
    report = stop.saves.receive(order)
    assert report.pace == NO_CHECKPOINTS
    withdrawn, told = requests.receive(0, report)
    assert told.answer.state == "no checkpoints"
    stop.saves.receive(withdrawn)
    stop.saves.begin_history(BY_STEPS, is_all=True)  # opened now
    assert stop.saves.is_due(0) is False


def test_the_end_of_the_job_is_reported():
    requests = SaveRequests(2, lambda: False)
    requests.request("cli", 1)
    assert requests.awaited == (0, 1)
    assert requests.depart(0) == []
    assert [reply.answer.state for reply in requests.depart(1)] == ["over"]
