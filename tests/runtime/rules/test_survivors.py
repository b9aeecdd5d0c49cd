"""Points of survivors, lost services, and those who are late: rules under a turned clock."""

import math

import pytest

from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.messages import Beat
from shoal.runtime.rules.point import Departure, Point
from shoal.runtime.wire.frames import FrameError


class Table:
    """A meeting, its clock, and all answers that it gave, by (process, ticket)."""

    def __init__(self, processes, **options):
        self.now = 0.0
        self.meeting = Meeting([f"host{p}" for p in range(processes)], self.now, **options)
        self.answers = {}
        self.tickets = 0

    def take(self, replies):
        for reply in replies:
            assert (reply.to, reply.ticket) not in self.answers, "answered twice"
            self.answers[reply.to, reply.ticket] = reply.answer

    def arrive(self, process, name="x", group=None, *, lane="main", survivors=False,
               timeout_s=10.0, step=None):  # fmt: skip
        self.tickets += 1
        point = Point(name, group, lane, survivors=survivors)
        self.take(
            self.meeting.arrive(
                self.now, process, point, b"",
                timeout_s=timeout_s, to=process, ticket=self.tickets, step=step,
            )
        )  # fmt: skip
        return process, self.tickets

    def live(self, process, group=None, **more):
        return self.arrive(process, "live", group, survivors=True, **more)

    def depart(self, process, state="lost", words="killed"):
        self.take(self.meeting.depart(self.now, process, Departure(words, state)))

    def advance(self, seconds):
        self.now += seconds
        self.take(self.meeting.tick(self.now))

    def kind(self, *keys):
        kinds = {self.answers[key].kind if key in self.answers else "waits" for key in keys}
        assert len(kinds) == 1, kinds
        return kinds.pop()


def test_survivors_meet_without_departed_processes_and_agree_on_which_those_are():
    table = Table(4)
    table.depart(2, "failed", "Traceback\nValueError: no data")
    table.depart(1, "left", "left the job")
    first = table.live(3)
    assert table.kind(first) == "waits"
    second = table.live(0)
    assert table.kind(first, second) == "live"
    assert table.answers[first] is table.answers[second]
    assert table.answers[first].facts == {
        "alive": [0, 3],
        "gone": [[2, "failed", "Traceback\nValueError: no data"], [1, "left", "left the job"]],
        "services": [],
    }


def test_all_processes_are_alive_when_none_has_departed():
    table = Table(2)
    keys = [table.live(p) for p in (1, 0)]
    assert table.kind(*keys) == "live"
    assert table.answers[keys[0]].facts["alive"] == [0, 1]


@pytest.mark.parametrize("state", ["lost", "failed", "left"])
def test_process_that_departs_while_survivors_wait_is_not_waited_for(state):
    table = Table(4)
    keys = [table.live(p) for p in (0, 1)]
    table.depart(2, state)
    assert table.kind(*keys) == "waits"
    table.depart(3)
    assert table.kind(*keys) == "live"
    assert table.answers[keys[0]].facts["alive"] == [0, 1]
    again = [table.live(p) for p in (0, 1)]
    assert table.kind(*again) == "live", "again, and after further deaths"


def test_a_survivor_that_goes_while_it_waits_is_not_among_the_living():
    table = Table(3)
    gone, waiting = table.live(0), table.live(1)
    table.depart(0, "lost", "silent for 60 s")
    assert table.kind(gone) == "lost"
    assert table.kind(waiting) == "waits"
    last = table.live(2)
    assert table.kind(waiting, last) == "live"
    assert table.answers[last].facts["alive"] == [1, 2]
    alone = table.live(1, (1, 2))
    table.depart(2)
    assert table.answers[alone].facts["alive"] == [1]
    only = table.live(1)
    table.depart(1)
    assert table.kind(only) == "live"
    assert not table.meeting._lines


def test_survivors_start_again_from_different_places():
    table = Table(3)
    table.arrive(0, "a")
    table.depart(2)  # 0 is told; 1 is three points behind, and has yet to hear of it
    table.arrive(0, "b")
    table.arrive(0, "c")
    keys = [table.live(0), table.live(1)]
    assert table.kind(*keys) == "live"
    pair = [table.arrive(p, "next", (0, 1)) for p in (0, 1)]
    assert table.kind(*pair) == "ok"
    assert table.kind(*(table.live(p) for p in (1, 0))) == "live"


def test_arrival_at_an_ordinary_point_while_survivors_wait_gets_the_loss():
    table = Table(3)
    table.depart(2)
    waiting = table.live(0)
    late = table.arrive(1, "epoch")
    assert table.kind(late) == "lost"
    assert table.answers[late].gone == [(2, Departure("killed", "lost"))]
    assert table.kind(waiting) == "waits"
    assert table.kind(table.live(1), waiting) == "live"


def test_wait_at_an_ordinary_point_gets_the_loss_when_survivors_arrive():
    table = Table(3)
    waiting = table.arrive(1, "pair", (0, 1))
    table.depart(2)
    assert table.kind(waiting) == "waits", "others' deaths are none of its business"
    first = table.live(0, (0, 1))
    assert table.kind(waiting) == "lost"
    assert table.kind(table.live(1, (0, 1)), first) == "live"
    assert table.kind(*(table.arrive(p, "pair", (0, 1)) for p in (0, 1))) == "ok"


def test_wait_for_a_survivor_in_another_group_gets_the_loss():
    table = Table(3)
    waiting = table.arrive(1, "pair", (0, 1))
    table.depart(2)
    first = table.live(0)
    assert table.kind(waiting) == "lost"
    assert table.kind(first) == "waits"
    assert table.kind(table.live(1), first) == "live"
    pair = [table.arrive(p, "pair", (0, 1)) for p in (0, 1)]
    assert table.kind(*pair) == "ok", "what one owed to the pair counts no more"


def test_without_a_loss_survivors_and_others_disagree():
    table = Table(2)
    waiting = table.arrive(0, "epoch")
    assert table.kind(table.live(1), waiting) == "diverged"
    table = Table(3)
    pair, everybody = table.live(0, (0, 1)), table.live(1)
    assert table.kind(pair, everybody) == "diverged"
    assert "circle" in table.answers[pair].facts


def test_survivors_compare_names_as_ever():
    table = Table(3)
    table.depart(2)
    first = table.live(0)
    assert table.kind(table.arrive(1, "other", survivors=True), first) == "diverged"


def test_deadline_of_survivors_names_living_processes_that_did_not_arrive():
    table = Table(4)
    table.depart(3)
    first = table.live(0, timeout_s=5.0)
    table.live(2)
    table.advance(5.0)
    assert table.kind(first) == "deadline"
    assert table.answers[first].facts["missing"] == [1]
    assert table.kind(table.live(1)) == "deadline", "late, it gets what the others got"
    second = [table.live(p) for p in (1, 0, 2)]
    assert table.kind(*second) == "live", "and their next calls are one"


def test_groups_without_the_dead_go_on():
    table = Table(3)
    table.depart(2)
    for _ in range(2):
        assert table.kind(*(table.arrive(p, "pair", (0, 1)) for p in (0, 1))) == "ok"
    assert table.kind(table.arrive(0, "all")) == "lost"


def test_departed_process_gets_its_own_state_and_is_not_counted():
    table = Table(2)
    table.depart(1, "failed", "ValueError: no data")
    zombie = table.live(1)
    assert table.kind(zombie) == "failed"
    assert table.answers[zombie].gone == [(1, Departure("ValueError: no data"))]
    assert table.answers[table.live(0)].facts["alive"] == [0]


def test_lost_service_ends_every_wait_until_the_survivors_have_met():
    table = Table(2)
    waiting = table.arrive(0, "epoch")
    aside = table.arrive(1, "alone", (0, 1), lane="save")
    survivors = table.live(0, lane="live")
    table.take(table.meeting.lose_service(0.0, "JAX's service", "killed"))
    assert table.kind(waiting, aside) == "lost"
    assert table.answers[waiting].facts == {"gone": [], "services": [["JAX's service", "killed"]]}
    assert table.kind(survivors) == "waits"
    late = [table.arrive(1, "epoch"), table.arrive(0, "next"), table.arrive(1, "next")]
    assert table.kind(*late) == "lost"
    both = [survivors, table.live(1, lane="live")]
    assert table.kind(*both) == "live"
    assert table.answers[survivors].facts["services"] == [["JAX's service", "killed"]]
    assert table.kind(*(table.arrive(p, "on") for p in (0, 1))) == "ok"


def test_late_arrival_gets_the_lost_service_and_not_the_processes_it_ended():
    table = Table(3)
    table.take(table.meeting.lose_service(0.0, "JAX's service", "cut off"))
    table.depart(0, "failed")
    late = table.arrive(2, "epoch")
    assert table.kind(late) == "lost"
    assert table.answers[late].facts["services"] == [["JAX's service", "cut off"]]


def test_stacks_of_late_processes_are_requested():
    table = Table(4, stack_grace_s=0.5)
    waiting = table.arrive(0, timeout_s=5.0)
    table.advance(5.0)
    assert table.kind(waiting) == "waits"
    assert table.meeting.next_deadline == 5.5
    questions = table.meeting.take_stack_requests()
    assert [process for _, process in questions] == [1, 2, 3]
    assert table.meeting.take_stack_requests() == []
    [ticket] = {ticket for ticket, _ in questions}
    for process, text in ((3, "in fit"), (1, "in load" + "." * 10_000), (1, "again")):
        table.take(table.meeting.take_stacks(5.1, process, ticket, text))
    assert table.kind(waiting) == "waits"
    table.now = 5.1
    table.take(table.meeting.take_stacks(5.2, 2, ticket, "in sleep"))
    facts = table.answers[waiting].facts
    assert (facts["by"], facts["timeout_s"], facts["missing"]) == (0, 5.0, [1, 2, 3])
    stacks = dict(facts["stacks"])
    assert (stacks[2], stacks[3]) == ("in sleep", "in fit")
    assert stacks[1].startswith("in load.")
    assert len(stacks[1]) == 8192
    assert table.meeting.take_stacks(5.3, 2, ticket, "too late") == []


def test_missing_stacks_delay_the_deadline_only_for_the_grace_period():
    table = Table(3, stack_grace_s=0.5)
    waiting = table.arrive(0, timeout_s=5.0)
    table.advance(6.0)
    ticket = table.meeting.take_stack_requests()[0][0]
    table.take(table.meeting.take_stacks(6.0, 2, ticket, "in fit"))
    table.advance(0.5)
    assert table.kind(waiting) == "deadline"
    assert table.answers[waiting].facts["stacks"] == [[2, "in fit"]]
    assert table.meeting.next_deadline == math.inf


def test_arrival_within_the_grace_period_completes_the_wait_for_all():
    table = Table(2, stack_grace_s=0.5)
    waiting = table.arrive(0, timeout_s=5.0)
    table.advance(5.0)
    [(ticket, _)] = table.meeting.take_stack_requests()
    assert table.kind(table.arrive(1, timeout_s=0.1), waiting) == "ok"
    assert table.meeting.take_stacks(5.1, 1, ticket, "in arrive") == []
    table.advance(10.0)
    assert table.meeting.next_deadline == math.inf


def test_at_most_sixteen_stacks_are_requested_and_lost_processes_are_not_waited_for():
    table = Table(40, stack_grace_s=0.5)
    waiting = table.arrive(0, timeout_s=5.0, group=tuple(range(39)))
    table.depart(39)
    table.advance(5.0)
    questions = table.meeting.take_stack_requests()
    assert [process for _, process in questions] == list(range(1, 17))
    table.depart(1)
    assert table.kind(waiting) == "lost"


def test_stack_request_is_answered_when_all_replied_or_at_its_limit():
    table = Table(3)
    table.depart(2)
    ask = table.meeting.request_stacks
    assert ask(0.0, range(3), 2.0, "observer", 7) == []
    questions = table.meeting.take_stack_requests()
    assert [process for _, process in questions] == [0, 1]
    hear = table.meeting.take_stacks
    assert hear(0.1, 2, questions[0][0], "who asked you?") == []
    assert hear(0.1, 0, questions[0][0], "in fit") == []
    [reply] = hear(0.2, 1, questions[1][0], "in load")
    assert (reply.to, reply.ticket, reply.answer.kind) == ("observer", 7, "stacks")
    assert reply.answer.facts == {"stacks": {0: "in fit", 1: "in load"}}
    ask(1.0, [0, 1], 2.0, "observer", 8)
    hear(1.1, 1, questions[1][0] + 1, "in load")
    assert table.meeting.tick(2.9) == []
    [reply] = table.meeting.tick(3.0)
    assert reply.answer.facts == {"stacks": {1: "in load"}}
    ask(4.0, [0, 1], 2.0, "observer", 9)
    [reply] = ask(4.0, [2], 2.0, "observer", 10)
    assert reply.answer.facts == {"stacks": {}}
    hear(4.1, 1, questions[1][0] + 2, "in load")
    [reply] = table.meeting.depart(4.2, 0, Departure("killed", "lost"))
    assert (reply.ticket, reply.answer.facts) == (9, {"stacks": {1: "in load"}})


@pytest.mark.parametrize("ticket", [0, -1, 1, 10**30])
def test_an_answer_to_what_was_never_asked_is_refused(ticket):
    with pytest.raises(FrameError, match="never sent"):
        Table(2).meeting.take_stacks(0.0, 1, ticket, "in fit")


def beat(**more):
    fields = {"step": None, "place": "", "since_s": 0.0, "step_s": None, "memory_bytes": 0}
    return Beat(**{**fields, **more})


def test_members_say_what_their_beats_and_arrivals_say_whichever_is_newer():
    table = Table(4, pids=[10, 11, 12, 13])
    table.arrive(0, "epoch", step=12)
    table.advance(4.0)
    meeting = table.meeting
    meeting.beat(4.0, 0, beat(step=12, place="'epoch'", since_s=4.0, step_s=0.5))
    meeting.beat(4.0, 1, beat(step=3, place="step 3 (a.py:1 (f))", since_s=1.0, memory_bytes=9))
    meeting.mark_silent(2, 1.0)
    zero, one, two, three = meeting.members(4.0)
    assert zero.last_words == "step 12, waits at 'epoch' for 4.0 s"
    assert (zero.step, zero.place, zero.since_s, zero.is_waiting) == (12, "'epoch'", 4.0, True)
    assert (zero.step_s, zero.pid) == (0.5, 10)
    assert one.last_words == "step 3, last at step 3 (a.py:1 (f)), 1.0 s ago"
    assert (one.place, one.since_s, one.is_waiting) == ("step 3 (a.py:1 (f))", 1.0, False)
    assert one.memory_bytes == 9
    assert (two.state, two.last_words) == ("silent", "silent for 3.0 s; joined, 4.0 s ago")
    assert three[1:4] == ("host3", "here", "joined, 4.0 s ago")
    meeting.mark_silent(2, None)
    assert meeting.members(4.0)[2].state == "here"
    table.depart(2, "lost", "its connection closed")
    meeting.mark_silent(2, 1.0)
    meeting.beat(5.0, 2, beat(step=99))
    gone = meeting.members(6.0)[2]
    assert (gone.state, gone.last_words) == ("lost", "its connection closed, 2.0 s ago")
    assert (gone.step, gone.since_s, gone.is_waiting) == (None, 2.0, False)


def test_waiters_for_a_process_are_known():
    table = Table(4)
    table.arrive(0, "all")
    table.arrive(1, "pair", (1, 2), lane="save")
    assert table.meeting.waiters_for(2) == {0, 1}
    assert table.meeting.waiters_for(3) == {0}
    assert table.meeting.waiters_for(0) == set()
