"""A call that one process leaves by an exception fails for all, and the next call is one again."""

import pytest

from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.messages import Abandoned
from shoal.runtime.rules.point import Departure, Point


class Table:
    """A meeting of N processes that make calls of one or more points, and leave some."""

    def __init__(self, processes):
        self.now = 0.0
        self.meeting = Meeting([f"host{p}" for p in range(processes)], self.now)
        self.answers = {}
        self.tickets = 0
        self.sent = {}
        self.numbers = {}
        self.stages = {}

    def take(self, replies):
        for reply in replies:
            assert (reply.to, reply.ticket) not in self.answers, "answered twice"
            self.answers[reply.to, reply.ticket] = reply.answer

    def arrive(
        self,
        process,
        name="x",
        group=None,
        *,
        lane="main",
        stage=0,
        survivors=False,
        timeout_s=10.0,
    ):
        self.tickets += 1
        self.sent[process] = self.sent.get(process, 0) + 1
        self.stages[process] = stage + 1
        point = Point(name, group, lane, survivors=survivors, follows=stage > 0)
        self.take(
            self.meeting.arrive(
                self.now, process, point, b"", timeout_s=timeout_s, to=process, ticket=self.tickets
            )
        )
        return process, self.tickets

    def abandon(self, process, name="x", group=None, *, arrivals=None, unseen=0, survivors=False):
        """`unseen`: arrivals that it sent and that the coordinator has not got."""
        self.numbers[process] = self.numbers.get(process, 0) + 1
        self.sent[process] = self.sent.get(process, 0) + unseen
        arrivals = self.stages.get(process, 0) if arrivals is None else arrivals
        left = Abandoned(
            Point(name, group, survivors=survivors), arrivals + unseen, self.sent[process],
            self.numbers[process], "KeyboardInterrupt",
        )  # fmt: skip
        self.take(self.meeting.abandon(self.now, process, left))
        return left

    def kinds(self, *keys):
        return [self.answers[key].kind if key in self.answers else "waits" for key in keys]

    def all_meet(self, processes, name, **more):
        keys = [self.arrive(p, name, **more) for p in processes]
        assert set(self.kinds(*keys)) == {"ok"}, (name, self.kinds(*keys))

    def is_empty(self):
        return not self.meeting._lines


@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_a_process_never_came_to_fails_for_all(late):
    table = Table(3)
    keys = [] if late else [table.arrive(0, "a"), table.arrive(1, "a")]
    table.abandon(2, "a", arrivals=0)
    keys += [table.arrive(0, "a"), table.arrive(1, "a")] if late else []
    assert table.kinds(*keys) == ["abandoned"] * 2
    assert table.answers[keys[0]].facts == {"process": 2, "words": "KeyboardInterrupt"}
    table.all_meet((2, 0, 1), "b")
    assert table.is_empty()


def test_process_that_leaves_while_it_waits_has_arrived():
    table = Table(3)
    keys = [table.arrive(0, "a"), table.arrive(2, "a")]
    table.abandon(2, "a")
    keys.append(table.arrive(1, "a"))
    assert table.kinds(*keys) == ["ok"] * 3
    table.all_meet((0, 1, 2), "b")
    assert table.is_empty()


def test_a_call_that_two_left_while_they_waited_fails_at_its_next_point():
    table = Table(4)
    first = [table.arrive(2, "a"), table.arrive(3, "a")]
    table.abandon(2, "a")
    table.abandon(3, "a")
    second = table.arrive(2, "b")  # its next call, while the others are yet to come to this one
    first += [table.arrive(0, "a"), table.arrive(1, "a")]
    assert table.kinds(*first, second) == ["ok"] * 4 + ["waits"]
    assert table.kinds(*(table.arrive(p, "a", stage=1) for p in (0, 1))) == ["abandoned"] * 2
    table.arrive(0, "b")
    table.arrive(1, "b")
    assert table.kinds(second, table.arrive(3, "b")) == ["ok"] * 2
    table.all_meet((0, 1, 2, 3), "b", stage=1)
    assert table.is_empty()


def test_a_process_that_leaves_two_calls_in_a_row_is_counted_in_both():
    table = Table(2)
    waits = table.arrive(1, "a")
    table.abandon(1, "a")
    table.abandon(1, "b", arrivals=0)
    keys = [table.arrive(0, "a"), table.arrive(0, "a", stage=1), table.arrive(0, "b")]
    assert table.kinds(waits, *keys) == ["ok", "ok", "abandoned", "abandoned"]
    table.all_meet((0, 1), "c")
    assert table.is_empty()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_process_that_leaves_between_two_points_ends_the_call_for_all(order):
    table = Table(3)
    table.all_meet((0, 1, 2), "a")
    first = table.arrive(order[0], "a", stage=1)
    table.abandon(2, "a")
    second = table.arrive(order[1], "a", stage=1)
    assert table.kinds(first, second) == ["abandoned"] * 2
    table.all_meet((2, *order), "b")
    assert table.is_empty()


def test_a_process_that_leaves_after_the_last_point_ends_nothing():
    table = Table(3)
    table.all_meet((0, 1, 2), "a")
    table.abandon(2, "a")
    table.all_meet((0, 2, 1), "b")
    assert table.is_empty()


def test_an_arrival_that_never_came_is_no_part_of_the_call():
    table = Table(2)
    waits = table.arrive(0, "a")
    table.abandon(1, "a", arrivals=0, unseen=1)
    assert table.kinds(waits) == ["abandoned"]
    table.all_meet((0, 1), "b")
    table.arrive(0, "b", stage=1)
    table.abandon(1, "b", unseen=1)
    table.all_meet((0, 1), "c")


def test_repeated_abandon_counts_once():
    table = Table(2)
    left = table.abandon(1, "a", arrivals=0)
    table.take(table.meeting.abandon(table.now, 1, left))
    assert table.kinds(table.arrive(0, "a")) == ["abandoned"]
    table.all_meet((0, 1), "b")


def test_all_that_leave_are_in_step():
    table = Table(3)
    for process in range(3):
        table.abandon(process, "a", arrivals=0)
    table.all_meet((0, 1, 2), "b")
    table.all_meet((0, 1, 2), "b", stage=1)
    for process in range(3):
        table.abandon(process, "b")
    table.all_meet((0, 1, 2), "c")
    assert table.is_empty()


def test_starting_another_call_abandons_the_one_in_which_others_wait():
    table = Table(3)
    table.all_meet((0, 1, 2), "a")
    waiting = table.arrive(0, "a", stage=1)
    begins = table.arrive(2, "b")  # and nothing was said of its leaving
    assert table.kinds(waiting, begins) == ["abandoned", "waits"]
    assert "it is at 'b' now" in table.answers[waiting].facts["words"]
    late = table.arrive(1, "a", stage=1)
    assert table.kinds(late) == ["abandoned"]
    assert table.kinds(table.arrive(0, "b"), table.arrive(1, "b"), begins) == ["ok"] * 3


def test_a_failure_of_the_next_call_is_not_that_of_a_later_point_of_this_one():
    table = Table(3)
    table.all_meet((0, 1, 2), "a")
    table.abandon(1, "a")
    table.abandon(2, "a")
    ends = [table.arrive(1, "b", timeout_s=1), table.arrive(2, "b", timeout_s=1)]
    table.now = 1.0
    table.take(table.meeting.tick(table.now))
    late = [table.arrive(0, "a", stage=1), table.arrive(0, "b")]
    assert table.kinds(*late, *ends) == ["abandoned", "deadline", "deadline", "deadline"]
    table.all_meet((0, 1, 2), "c")


def test_process_that_abandoned_two_calls_is_waited_for_in_neither():
    table = Table(2)
    table.all_meet((0, 1), "a")
    table.abandon(1, "a")
    table.abandon(1, "b", arrivals=0)
    keys = [table.arrive(0, "a", stage=1), table.arrive(0, "b")]
    assert table.kinds(*keys) == ["abandoned"] * 2
    table.all_meet((0, 1), "c")
    assert table.is_empty()


def test_a_call_of_survivors_that_one_leaves_fails_for_all():
    table = Table(3)
    first = table.arrive(0, "live", survivors=True)
    table.abandon(1, "live", arrivals=0, survivors=True)
    late = table.arrive(2, "live", survivors=True)
    assert table.kinds(first, late) == ["abandoned"] * 2
    again = [table.arrive(p, "live", survivors=True) for p in range(3)]
    assert table.kinds(*again) == ["live"] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("late_is_live", [False, True])
def test_live_against_a_barrier_leaves_all_in_step(order, late_is_live):
    table = Table(3)
    keys = [table.arrive(p, "live", survivors=p == 0) for p in order[:2]]
    keys.append(table.arrive(2, "live", survivors=late_is_live))
    assert table.kinds(*keys) == ["diverged"] * 3
    table.all_meet((2, 0, 1), "next")
    assert table.is_empty()


def test_live_with_other_deadlines_leaves_all_in_step():
    table = Table(3)
    keys = [
        table.arrive(0, "live", survivors=True, timeout_s=1.0),
        table.arrive(1, "live", survivors=True, timeout_s=6.0),
    ]
    table.now = 1.0
    table.take(table.meeting.tick(table.now))
    table.now = 3.0
    keys.append(table.arrive(2, "live", survivors=True, timeout_s=6.0))
    assert table.kinds(*keys) == ["deadline"] * 3
    table.all_meet((2, 0, 1), "next")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_groups_that_differ_leave_all_in_step(order):
    table = Table(3)
    keys = {p: table.arrive(p, "a", (0, 1) if p == 0 else None) for p in order}
    assert table.kinds(*keys.values()) == ["diverged"] * 3
    table.all_meet(order, "b")
    table.all_meet((0, 1), "pair", group=(0, 1))
    assert table.is_empty()


def test_late_arrival_at_differing_groups_diverges_once():
    table = Table(4)
    table.arrive(0, "a", (0, 1, 3))
    table.arrive(1, "a")
    late = table.arrive(3, "a")
    assert table.kinds(late, table.arrive(2, "a")) == ["diverged"] * 2
    table.all_meet((3, 0, 1, 2), "b")
    table.all_meet((3, 0, 1), "c", group=(0, 1, 3))
    assert table.is_empty()


def test_abandon_caused_by_a_loss_is_answered_as_the_loss():
    table = Table(3)
    table.all_meet((0, 1), "a", group=(0, 1))
    table.take(table.meeting.lose_service(table.now, "JAX's service", "killed"))
    table.abandon(0, "a", (0, 1))
    assert table.kinds(table.arrive(1, "a", (0, 1), stage=1)) == ["lost"]
    table = Table(3)
    table.all_meet((0, 1), "a", group=(0, 1))
    table.take(table.meeting.depart(table.now, 2, Departure("killed", "lost")))
    table.abandon(0, "a", (0, 1))  # of a loss that is none of the other's business
    assert table.kinds(table.arrive(1, "a", (0, 1), stage=1)) == ["abandoned"]
    table.abandon(0, "b", arrivals=0)
    assert table.kinds(table.arrive(1, "b")) == ["lost"]
