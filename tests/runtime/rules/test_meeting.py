"""The rules of meeting under a clock that the test turns; no socket, no thread."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.rules.deadline import Allowance
from shoal.runtime.rules.gathering import Gathering, Line, WaitingProcess, find_cycle
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.meeting_answers import WaitCycle
from shoal.runtime.rules.point import Departure, Point


class Table:
    """A meeting, its clock, and all answers that it gave, by (process, ticket)."""

    def __init__(self, processes):
        self.now = 0.0
        self.meeting = Meeting([f"host{p}" for p in range(processes)], self.now)
        self.answers = {}
        self.tickets = 0

    def take(self, replies):
        for reply in replies:
            assert (reply.to, reply.ticket) not in self.answers, "answered twice"
            self.answers[reply.to, reply.ticket] = reply.answer

    def arrive(self, process, name="x", *, group=None, lane="main", payload=b"", timeout_s=10.0,
               operation="", site=""):  # fmt: skip
        self.tickets += 1
        point = Point(name, group, lane, operation, site)
        self.take(
            self.meeting.arrive(
                self.now, process, point, payload,
                timeout_s=timeout_s, to=process, ticket=self.tickets,
            )
        )  # fmt: skip
        return process, self.tickets

    def depart(self, process, state, words="gone"):
        self.take(self.meeting.depart(self.now, process, Departure(words, state)))

    def advance(self, seconds):
        self.now += seconds
        self.take(self.meeting.tick(self.now))

    def kind(self, key):
        return self.answers[key].kind if key in self.answers else "waits"


def test_the_last_arrival_releases_all_with_all_payloads_in_order():
    table = Table(3)
    keys = [table.arrive(p, payload=bytes([p])) for p in (2, 0)]
    assert [table.kind(k) for k in keys] == ["waits", "waits"]
    keys.append(table.arrive(1, payload=b"\x01"))
    assert {table.kind(k) for k in keys} == {"ok"}
    assert list(table.answers[keys[0]].payloads.items()) == [(0, b"\0"), (1, b"\1"), (2, b"\2")]


def test_job_of_one_process_meets_at_once():
    table = Table(1)
    assert table.kind(table.arrive(0)) == "ok"


def test_earliest_deadline_ends_the_wait_and_answers_late_arrivals_at_once():
    table = Table(3)
    patient = table.arrive(0, timeout_s=100)
    hasty = table.arrive(1, timeout_s=5)
    assert table.meeting.next_deadline == 5
    table.advance(4.9)
    assert table.kind(patient) == "waits"
    table.advance(0.1)
    late = table.arrive(2)
    answers = [table.answers[key] for key in (patient, hasty, late)]
    assert answers[0] is answers[1] is answers[2]
    assert answers[0].kind == "deadline"
    assert answers[0].facts["missing"] == [2]
    assert (answers[0].facts["by"], answers[0].facts["timeout_s"]) == (1, 5)
    assert answers[0].facts["words"] == [[2, "joined, 5.0 s ago"]]
    keys = [table.arrive(p, "next") for p in range(3)]
    assert {table.kind(k) for k in keys} == {"ok"}


def test_process_several_points_behind_gets_the_deadline_of_each():
    table = Table(2)
    for name in ("a", "b"):
        table.arrive(0, name, timeout_s=1)
        table.advance(1)
    kinds = [table.kind(table.arrive(1, name)) for name in ("a", "b", "c")]
    assert kinds == ["deadline", "deadline", "waits"]
    assert table.kind(table.arrive(0, "c")) == "ok"


def test_a_wait_without_deadline_never_ends_by_time():
    table = Table(2)
    key = table.arrive(0, timeout_s=math.inf)
    assert table.meeting.next_deadline == math.inf
    table.advance(1e9)
    assert table.kind(key) == "waits"


@pytest.mark.parametrize("differ", [{"name": "y"}, {"operation": "save"}])
def test_another_name_or_operation_ends_it_at_once_for_all_with_both_sides(differ):
    table = Table(4)
    keys = [table.arrive(0, site="a.py:1 (f)"), table.arrive(2, site="a.py:1 (f)")]
    keys.append(table.arrive(1, **{"name": "x", "site": "b.py:2 (g)", **differ}))
    late = table.arrive(3)
    assert {table.kind(k) for k in [*keys, late]} == {"diverged"}
    sides = table.answers[late].facts["sides"]
    other = {"name": "x", "operation": "", **differ}
    assert sides == [
        ["x", "", "a.py:1 (f)", [0, 2], None],
        [other["name"], other["operation"], "b.py:2 (g)", [1], None],
    ]


def test_groups_and_lanes_are_counted_apart():
    table = Table(3)
    first = table.arrive(0, "a", group=(0, 2))
    other = table.arrive(1, "b", lane="save")
    assert table.kind(table.arrive(2, "a", group=(0, 2))) == table.kind(first) == "ok"
    table.arrive(0, "b", lane="save")
    table.arrive(2, "b", lane="save")
    assert table.kind(other) == "ok"


def test_processes_that_wait_for_each_other_diverge_at_once():
    table = Table(3)
    pair = table.arrive(0, "pair", group=(0, 1))
    everybody = table.arrive(1, "all")
    assert table.kind(pair) == table.kind(everybody) == "diverged"
    circle = table.answers[pair].facts["circle"]
    assert sorted(circle) == [
        [("all", "", "", [1], None), "all 3 processes", [0, 2]],
        [("pair", "", "", [0], None), "processes=[0, 1]", [1]],
    ]
    assert table.kind(table.arrive(2, "all")) == "diverged"


def test_processes_that_wait_at_one_point_are_one_side_of_the_cycle():
    table = Table(4)
    keys = [table.arrive(p, "all", site="t.py:1 (f)") for p in (1, 2)]
    keys.append(table.arrive(0, "pair", group=(0, 1)))
    assert table.answers[keys[0]].facts["circle"] == [
        [("pair", "", "", [0], None), "processes=[0, 1]", [1]],
        [("all", "", "t.py:1 (f)", [1, 2], None), "all 4 processes", [0, 3]],
    ]


def test_deadline_answer_has_the_given_seconds_and_where_the_others_waited():
    table = Table(2)
    waits = table.arrive(0, "epoch", timeout_s=Allowance(1.8, 4.0), site="t.py:1 (f)")
    table.advance(1.8)
    late = table.arrive(1, "other")
    assert table.answers[waits] is table.answers[late]
    facts = table.answers[late].facts
    assert (facts["timeout_s"], facts["by"]) == (4.0, 0)
    assert facts["at"] == "'epoch' (t.py:1)"


def test_a_circle_of_three_is_found_and_a_bystander_waits_on():
    table = Table(4)
    bystander = table.arrive(3, "d", group=(0, 3))
    keys = [table.arrive(p, "abc"[p], group=tuple(sorted((p, (p + 1) % 3)))) for p in range(2)]
    assert {table.kind(k) for k in keys} == {"waits"}
    keys.append(table.arrive(2, "c", group=(0, 2)))
    assert {table.kind(k) for k in keys} == {"diverged"}
    assert table.kind(bystander) == "waits"


def test_waiting_for_a_process_that_waits_elsewhere_is_not_a_cycle():
    table = Table(3)
    everybody = table.arrive(0, "all")
    pair = table.arrive(1, "pair", group=(1, 2))
    assert table.kind(table.arrive(2, "pair", group=(1, 2))) == table.kind(pair) == "ok"
    table.arrive(1, "all")
    table.arrive(2, "all")
    assert table.kind(everybody) == "ok"


def test_other_lanes_of_a_process_are_no_circle():
    table = Table(2)
    first = table.arrive(0, "a", lane="a")
    second = table.arrive(1, "b", lane="b")
    assert table.kind(first) == table.kind(second) == "waits"


@pytest.mark.parametrize(("state", "kind"), [("lost", "lost"), ("failed", "failed")])
def test_departed_process_ends_present_and_later_waits_for_it_only(state, kind):
    table = Table(3)
    waiting = table.arrive(0)
    others = table.arrive(0, "pair", group=(0, 2), lane="side")
    table.depart(1, state, "line one\nthe reason")
    assert table.kind(waiting) == kind
    assert table.answers[waiting].gone == [(1, Departure("line one\nthe reason", state))]
    assert table.kind(table.arrive(2)) == kind
    assert table.kind(table.arrive(2, "pair", group=(0, 2), lane="side")) == "ok"
    assert table.kind(others) == "ok"
    assert [table.kind(table.arrive(p)) for p in (0, 2)] == [kind, kind]


def test_loss_of_a_process_that_had_arrived_ends_the_wait():
    table = Table(3)
    table.arrive(1)
    waiting = table.arrive(0)
    table.depart(1, "lost")
    assert table.kind(waiting) == "lost"


def test_arrival_of_a_process_that_left_in_order_still_counts():
    table = Table(3)
    table.arrive(1, "last")
    waiting = table.arrive(0, "last")
    table.depart(1, "left", "left the job")
    assert table.kind(table.arrive(2, "last")) == table.kind(waiting) == "ok"
    assert table.kind(table.arrive(0, "after")) == "failed"


def test_the_first_that_did_not_leave_in_peace_is_the_cause():
    table = Table(4)
    for process, state in ((3, "left"), (2, "failed"), (1, "lost")):
        table.depart(process, state, f"words of\n{process}")
    (first, second) = table.answers[table.arrive(0)].gone
    assert first == (2, Departure("words of\n2"))
    assert second == (3, Departure("words of", "left"))


def test_only_the_first_word_on_how_a_process_went_counts():
    table = Table(2)
    table.depart(1, "failed", "Traceback")
    table.depart(1, "lost", "connection closed")
    assert table.meeting.members(0.0)[1][2:4] == ("failed", "Traceback, 0.0 s ago")


def test_last_words_say_where_a_process_waits_or_what_it_did_last():
    table = Table(3)
    for p in range(3):
        table.arrive(p, "start", site="t.py:1 (main)")
    table.advance(2)
    table.arrive(0, "epoch", site="t.py:9 (main)")
    table.meeting.record_activity(table.now, 1, "step 7")
    table.advance(1)
    said = [member.last_words for member in table.meeting.members(table.now)]
    assert said == [
        "waits at 'epoch' (t.py:9) for 1.0 s",
        "step 7, 1.0 s ago",
        "last at 'start' (t.py:1), 3.0 s ago",
    ]
    assert table.meeting.waiting_for(table.now, 0, "main").missing == [1, 2]
    assert table.meeting.waiting_for(table.now, 1, "main") is None


def test_of_those_that_wait_at_one_place_the_first_reports_it():
    table = Table(4)
    for p, line in ((2, 9), (0, 9), (1, 12)):
        table.arrive(p, "epoch", site=f"t.py:{line} (main)")
    said = [table.meeting.waiting_for(table.now, p, "main") for p in (2, 0, 1, 2)]
    assert [report and report.missing for report in said] == [[3], None, [3], None]
    for p in (3, 2, 0):
        table.arrive(p, "epoch", site="t.py:9 (main)")
    assert table.meeting.waiting_for(table.now, 0, "main").missing == [1, 3]


def test_an_interrupted_wait_has_been_counted():
    table = Table(2)
    table.arrive(0, "a")  # and then Ctrl-C: nobody reads the answer
    again = table.arrive(0, "b")
    assert table.kind(table.arrive(1, "a")) == "ok"
    assert table.kind(table.arrive(1, "b")) == table.kind(again) == "ok"


POINTS = [
    Point("a"),
    Point("b"),
    Point("a", lane="side"),
    Point("a", group=(0, 1)),
    Point("a", group=(1, 2)),
    Point("a", group=(0, 2), operation="f"),
    Point("a", group=(0, 2)),
]
ACTIONS = st.one_of(
    st.tuples(
        st.just("arrive"),
        st.integers(0, 2),
        st.sampled_from(POINTS),
        st.sampled_from([1.0, 3.0, 10.0]),
    ),
    st.tuples(st.just("advance"), st.sampled_from([0.5, 1.0, 4.0])),
    st.tuples(st.just("depart"), st.integers(0, 2), st.sampled_from(["lost", "failed", "left"])),
)


class Oracle:
    """What every sequence must obey, told from counts that never forget."""

    def __init__(self):
        self.table = Table(3)
        self.counts = {}
        self.came = {}  # (group, lane, n): {process: key}
        self.passed = set()  # (group, lane, n, process): it has had that failure elsewhere
        self.points = {}
        self.deadlines = {}
        self.gone = {}

    def arrive(self, process, point, timeout_s):
        waiting = any(
            key not in self.table.answers and key[0] == process and p.lane == point.lane
            for key, p in self.points.items()
        )
        if process in self.gone or waiting or process not in (point.group or range(3)):
            return
        line = (point.group, point.lane)
        n = self.counts.get((line, process), -1) + 1
        while (*line, n, process) in self.passed:
            n += 1
        self.counts[line, process] = n
        key = self.table.arrive(
            process, point.name, group=point.group, lane=point.lane,
            operation=point.operation, timeout_s=timeout_s,
        )  # fmt: skip
        self.came.setdefault((*line, n), {})[process] = key
        self.points[key] = point
        self.deadlines[key] = self.table.now + timeout_s
        self.pass_circles()

    def pass_circles(self):
        """The meetings of a circle fail together, once for each process that is in one of them."""
        circles = {}
        for meeting, keys in self.came.items():
            answer = self.table.answers.get(next(iter(keys.values())))
            if isinstance(answer, WaitCycle):
                circles.setdefault(id(answer), []).append(meeting)
        for meetings in circles.values():
            told = {process for meeting in meetings for process in self.came[meeting]}
            for meeting in meetings:
                for process in told - self.came[meeting].keys():
                    self.passed.add((*meeting, process))

    def check(self):
        table = self.table
        for (group, _, _), keys in self.came.items():
            members = set(group or range(3))
            answers = {id(table.answers.get(key)) for key in keys.values()}
            assert len(answers) == 1, "some were told, some not, or not the same"
            kind = table.kind(next(iter(keys.values())))
            points = {self.points[key] for key in keys.values()}
            if kind == "ok":
                assert set(keys) == members
                assert len(points) == 1
            if kind == "diverged":
                answer = table.answers[next(iter(keys.values()))]
                assert isinstance(answer, WaitCycle) or len(points) > 1
            if kind == "deadline":
                assert min(self.deadlines[key] for key in keys.values()) <= table.now
            if kind in ("lost", "failed"):
                assert members & set(self.gone)
            if kind == "waits":
                assert set(keys) < members
                assert len(points) == 1
                assert min(self.deadlines[key] for key in keys.values()) > table.now
                assert table.meeting.next_deadline <= min(self.deadlines[k] for k in keys.values())
                away = {p: s for p, s in self.gone.items() if p in members}
                assert all(state == "left" and p in keys for p, state in away.items())


@given(st.lists(ACTIONS, max_size=40))
def test_any_history_answers_all_or_none_and_no_wait_exceeds_its_deadline(actions):
    oracle = Oracle()
    for verb, *values in actions:
        if verb == "arrive":
            oracle.arrive(*values)
        elif verb == "advance":
            oracle.table.advance(*values)
        else:
            process, state = values
            oracle.gone.setdefault(process, state)
            oracle.table.depart(process, state)
        oracle.check()
    oracle.table.advance(10)
    assert not set(oracle.points) - set(oracle.table.answers), "somebody waits for ever"
    for process in range(3):
        oracle.table.depart(process, "left")
    assert not oracle.table.meeting._lines, "something is kept for nobody"


def test_a_small_group_is_not_compared_with_thousands_of_others():
    class BystanderState(list):
        def __iter__(self):
            raise AssertionError("looked at all of them")

    start = Gathering(Line(((0, 1), "main"), range(9)), Point("x"))
    start.arrived[0] = WaitingProcess("to", 1, Point("x"), b"", 0.0)
    others = BystanderState(5 * [start])
    assert find_cycle(0, start, others, lambda process: None, gone=()) == []
