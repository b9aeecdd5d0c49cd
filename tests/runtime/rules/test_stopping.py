"""The rules of leaving, against what they promise: any order of calls, notices, rearms, deaths."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.runtime.rules.stopping import (
    LAST,
    PreemptionRounds,
    PreemptionState,
    ReceivedNotice,
    StopAgreement,
    StopReport,
)
from shoal.testing.clock import Clock

TERM = ReceivedNotice("Terminated", "SIGTERM")


class World:
    """N processes, a place, and words on their way between them, in order for each pair."""

    def __init__(self, processes):
        self.rounds = PreemptionRounds(processes)
        self.stops = [PreemptionState(p, lambda: 0.0) for p in range(processes)]
        self.up = [deque() for _ in self.stops]
        self.down = [deque() for _ in self.stops]
        self.living = set(range(processes))
        self.round = [0] * processes
        self.said = [defaultdict(list) for _ in self.stops]  # by round: (step, answer)
        self.rearming = {}  # who has come to a rearm: what it knew
        self.returns = {}  # who has yet to go on from one: what is closed
        self.settled = {}

    def call(self, p, step):
        """A call that has to wait is one that was not made: it comes again."""
        if p in self.rearming or p in self.returns:
            return
        answer = self.stops[p].should_stop(step)
        if answer is not None:
            self.said[p][self.round[p]].append((step, answer))

    def notice(self, p, number):
        if self.stops[p].offers(TERM._replace(reason=str(number))):
            self.up[p].append(TERM._replace(reason=str(number)))

    def rearm(self, p):
        if p in self.rearming or p in self.returns:
            return
        self.rearming[p] = self.stops[p].known
        self._meet()

    def go_on(self, p):
        if p in self.returns:
            told = self.stops[p].rearm(self.returns.pop(p))
            self.round[p] += 1
            self.up[p].append(told)

    def kill(self, p):
        if len(self.living) == 1:
            return
        self.living.discard(p)
        for pending in (self.rearming, self.returns):
            pending.pop(p, None)
        self._push(self.rounds.depart(p))
        self._meet()

    def carry_up(self, p):
        if not self.up[p]:
            return
        message = self.up[p].popleft()
        if isinstance(message, StopReport):
            self._push(self.rounds.receive(p, message))
        else:
            number = self.rounds.give()
            for queue in self.down:
                queue.append((number, p, message))

    def carry_down(self, p):
        if not self.down[p]:
            return
        message = self.down[p].popleft()
        if isinstance(message, StopAgreement):
            self.stops[p].settle(message)
        elif (told := self.stops[p].receive(*message)) is not None:
            self.up[p].append(told)

    def _meet(self):
        """Nobody comes back from a rearm before all have come; nobody comes to the next before."""
        if self.rearming.keys() == self.living and not self.returns:
            self.returns = dict.fromkeys(self.living, min(self.rearming.values()))
            self.rearming = {}

    def _push(self, settled):
        if settled is not None:
            assert settled.round not in self.settled, "agreed twice"
            self.settled[settled.round] = settled.step
            for queue in self.down:
                queue.append(settled)

    def act(self, name, p, number):
        if p not in self.living:
            return
        if name in ("call", "notice"):
            getattr(self, name)(p, number)
        else:
            getattr(self, name)(p)

    def settle_down(self):
        """Let all who have to go on do so, and all words arrive."""
        for p in self.living & self.returns.keys():
            self.go_on(p)
        while any(self.up[p] or self.down[p] for p in self.living):
            for p in self.living:
                self.carry_up(p)
                self.carry_down(p)

    def check(self):
        """Who died before it could say where it was is left out; it may have gone further."""
        for p, said in enumerate(self.said):
            for number, answers in said.items():
                step = self.settled.get(number)
                for asked, answer in answers:
                    if step is None:
                        assert answer is False, "stopped without having agreed"
                    elif answer or p in self.living:
                        assert answer is (asked >= step), (asked, answer, step)


ACTIONS = ["call"] * 6 + ["carry_up", "carry_down"] * 4 + ["notice", "rearm", "go_on", "go_on"]


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from([*ACTIONS, "kill"]), st.integers(0, 3), st.integers(0, 9)),
        max_size=120,
    ),
)
def test_processes_agree_on_the_step_in_any_order_of_events(processes, actions):
    world = World(processes)
    for name, p, number in actions:
        world.act(name, p, number)
    world.settle_down()
    world.check()
    # Whoever has a notice open knows the step, and it is the same on all of that round.
    for p in world.living - world.rearming.keys():
        stop = world.stops[p]
        if stop.notice() is not None:
            assert stop.should_stop(0) is not None
            assert stop.notice().step == world.settled[world.round[p]]
        assert stop.known == max(world.stops[q].known for q in world.living)


def test_agreed_step_is_the_first_at_which_no_process_was_told_to_continue():
    """A was told to go on at 10, B has not asked at 10 yet: B must not stop there."""
    world = World(2)
    for step in range(11):
        world.call(0, step)
    for step in range(10):
        world.call(1, step)
    world.notice(1, 0)
    world.settle_down()
    assert [stop.notice().step for stop in world.stops] == [11, 11]
    assert [stop.should_stop(10) for stop in world.stops] == [False, False]
    assert [stop.should_stop(11) for stop in world.stops] == [True, True]
    assert [stop.should_stop(10**6000) for stop in world.stops] == [True, True]


def test_before_the_first_call_it_is_step_0():
    world = World(3)
    world.notice(2, 0)
    world.settle_down()
    assert [stop.should_stop(0) for stop in world.stops] == [True] * 3


def test_unanswered_processes_are_listed_and_awaited_until_they_depart():
    rounds = PreemptionRounds(3)
    assert rounds.awaited == ()
    rounds.give()
    assert rounds.awaited == (0, 1, 2)
    assert rounds.receive(1, StopReport(0, 4)) is None
    assert rounds.awaited == (0, 2)
    assert rounds.depart(2) is None
    assert rounds.receive(0, StopReport(0, 2**80)) == StopAgreement(0, 2**80 + 1)
    assert rounds.awaited == ()
    assert rounds.depart(0) is None  # agreed already


def test_notice_unknown_to_a_process_opens_the_next_round():
    rounds, stop = PreemptionRounds(1), PreemptionState(0)
    for reason in "ab":
        assert stop.receive(rounds.give(), 0, ReceivedNotice(reason, "x")) in (
            StopReport(0, -1),
            None,
        )
    assert stop.rearm(1) == StopReport(1, -1)
    assert (stop.notice().reason, stop.notice().step) == ("b", None)
    assert rounds.receive(0, StopReport(1, -1)) == StopAgreement(1, 0)
    assert stop.rearm(2) == StopReport(2, None)
    assert stop.notice() is None
    rounds.receive(0, StopReport(2, None))
    assert not rounds.is_open


def test_pending_notice_is_offered_only_once():
    stop = PreemptionState(0)
    assert [stop.offers(TERM), stop.offers(TERM)] == [True, False]
    stop.rearm(0)
    assert not stop.offers(TERM)  # on its way
    stop.receive(1, 0, TERM)
    assert not stop.offers(TERM)
    assert stop.offers(TERM._replace(source="SIGUSR1"))
    stop.rearm(1)
    assert stop.offers(TERM)


def test_the_earliest_deadline_counts_and_runs():
    clock = Clock()
    stop = PreemptionState(0, clock)
    stop.receive(1, 2, ReceivedNotice("maintenance", "gce", 60.0))
    clock.advance(10.0)
    stop.receive(2, 1, TERM)
    stop.receive(3, 0, ReceivedNotice("spot", "aws", 20.0))
    clock.advance(5.0)
    first = stop.notice()
    assert (first.reason, first.source, first.process) == ("maintenance", "gce", 2)
    assert (first.deadline_s, first.step) == (15.0, None)
    assert [(other.reason, other.deadline_s) for other in first.others] == [
        ("Terminated", None),
        ("spot", 15.0),
    ]
    clock.advance(100.0)
    assert stop.notice().deadline_s == 0.0


@pytest.mark.parametrize("has_notice", [False, True])
def test_a_save_counts_after_a_notice_until_it_is_closed(has_notice):
    rounds, stop = PreemptionRounds(1), PreemptionState(0)
    if has_notice:
        stop.receive(rounds.give(), 0, TERM)
    told = stop.save()
    assert stop.has_saved is has_notice
    assert (told is not None) is has_notice
    if told is not None:
        rounds.receive(0, told)
    assert rounds.has_saved is has_notice
    rounds.receive(0, stop.rearm(1))
    assert not stop.has_saved
    assert not rounds.has_saved


def test_an_answer_of_an_earlier_round_does_not_count():
    """Process 1 comes back from the rearm late: until then it may be told to go on again."""
    rounds = PreemptionRounds(2)
    rounds.give()
    assert rounds.receive(0, StopReport(0, 3)) is None
    assert rounds.receive(0, StopReport(1, -1)) is None
    assert rounds.receive(1, StopReport(0, 5)) is None
    assert rounds.awaited == (1,)
    assert rounds.receive(1, StopReport(1, 7)) == StopAgreement(1, 8)


def test_steps_are_compared_anew_after_a_rearm():
    rounds, stop = PreemptionRounds(1), PreemptionState(0)
    assert stop.should_stop(1000) is False
    rounds.receive(0, stop.rearm(0))
    assert stop.should_stop(3) is False  # the loop was begun again
    stop.settle(rounds.receive(0, stop.receive(rounds.give(), 0, TERM)))
    assert [stop.should_stop(step) for step in (3, 4)] == [False, True]


def program(order, steps, evaluation, numbered):
    """Yield what a loop asks in each step: (is it a save, its number); sent is the answer."""
    for step in steps:
        for batch in range(evaluation):
            yield False, batch
        stop = (yield False, step) if order == "asks, saves" else None
        yield True, numbered(step)
        if (yield False, step) if stop is None else stop:
            return


FIRST = 500
NUMBERED = {
    "by steps": lambda step: step,
    "by tokens": lambda step: (step + 1) * 512,
    "from the start of this run": lambda step: step - FIRST,
}


@settings(max_examples=200, deadline=None)
@given(
    order=st.sampled_from(["asks, saves", "saves, asks"]),
    evaluation=st.integers(0, 5),
    stride=st.integers(1, 3),
    numbered=st.sampled_from(sorted(NUMBERED)),
    fails=st.booleans(),
    turns=st.lists(st.integers(0, 8), max_size=60),
    noticed=st.tuples(st.integers(0, 1), st.integers(0, 40)),
)
def test_loops_save_what_they_stop_at(order, evaluation, stride, numbered, fails, turns, noticed):
    """In either order, also where an evaluation within the step asks with numbers of its own."""
    world = World(2)
    steps = range(FIRST, FIRST + 60 * stride, stride)
    loops = [program(order, steps, evaluation, NUMBERED[numbered]) for _ in world.stops]
    asked = [next(loop) for loop in loops]
    answers = [[], []]

    def move(p):
        """Let a process make its next call; one that has to wait makes it again."""
        stop, (is_save, number) = world.stops[p], asked[p] or (None, 0)
        answer = None
        if asked[p]:
            answer = stop.should_save(number) if is_save else stop.should_stop(number)
        if answer is None:
            return
        told = None
        if is_save and answer:
            called = stop.number_of(number)
            told = stop.fail("run", called) if fails else stop.keep("run", called)
        elif answer:
            told = stop.stop_at(number)
        world.up[p] += [told] if told else []
        answers[p].append((is_save, number, answer))
        try:
            asked[p] = loops[p].send(answer)
        except StopIteration:
            asked[p] = None

    for turn, choice in enumerate(turns):
        if turn == noticed[1]:
            world.notice(noticed[0], 1)
        act = (move, move, move, world.carry_up, world.carry_down)[choice % 5]
        act(choice % 2)
    world.notice(noticed[0], 1)
    while any(asked):
        for p in (0, 1):
            move(p)
            world.carry_up(p)
            world.carry_down(p)
    world.settle_down()
    assert answers[0] == answers[1]
    assert answers[0][-1][2], "the loop has stopped"
    if order == "saves, asks":
        # The first save precedes any number of `preempted`; two strides are known after three.
        if len(answers[0]) <= (2 + evaluation) * (3 if stride > 1 else 1):
            return
        assert answers[0][-2][2], "the step that it stops at was saved"
    assert [stop.verdict for stop in world.stops] == [2 if fails else 1] * 2
    if not fails:
        assert [stop.stopped.kept for stop in world.stops] == [LAST] * 2
