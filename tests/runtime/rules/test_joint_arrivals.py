"""Arrivals of several processes together: what each does by itself, whatever happened before."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.runtime.rules.deadline import JointLimits
from shoal.runtime.rules.joint_arrivals import JointMeeting
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.messages import Abandoned, Beat
from shoal.runtime.rules.point import Point

PROCESSES = range(4)
POINTS = [
    Point("a"),
    Point("a", trail="1:aa"),
    Point("b"),
    Point("a", follows=True),
    Point("a", lane="side"),
    Point("a", group=(0, 1)),
    Point("a", group=(1, 2, 3)),
    Point("live", survivors=True),
    Point("a", trail='1:aa\n"side"\tbase\t1:00'),
    Point("a", trail='1:aa\n"side"\tbase\t1:11'),
]
LIMITS = st.lists(st.sampled_from([1.0, 2.0, 10.0]), min_size=4, max_size=4)
SETS = st.one_of(
    st.sampled_from([[0, 1], [2, 3]]),  # mostly those of two hosts
    st.lists(st.sampled_from(PROCESSES), min_size=1, unique=True),
)
ARRIVALS = st.tuples(
    st.just("arrive"),
    SETS,
    # Mostly one point, so that many gatherings are completed.
    st.sampled_from([*POINTS[:1] * 3, *POINTS[5:7], *POINTS]),
    LIMITS,
    st.booleans(),
)
# Where a process or a service is gone nothing is done together: most happens before.
PEACEFUL = st.one_of(
    ARRIVALS,
    ARRIVALS,
    st.tuples(st.just("abandon"), st.sampled_from(PROCESSES), st.sampled_from(POINTS[:7])),
    st.tuples(st.just("advance"), st.sampled_from([0.3, 4.0])),
    st.tuples(st.just("beat"), st.sampled_from(PROCESSES), st.sampled_from([None, 100])),
    st.tuples(st.just("look"), st.sampled_from(PROCESSES)),
)
ACTIONS = st.one_of(
    PEACEFUL,
    st.tuples(
        st.just("depart"), st.sampled_from(PROCESSES), st.sampled_from(["lost", "failed", "left"])
    ),
    st.tuples(st.just("service")),
)
HISTORIES = st.builds(list.__add__, st.lists(PEACEFUL, max_size=20), st.lists(ACTIONS, max_size=10))


class History:
    """A meeting, and every answer that a process got, by (process, number of its arrival)."""

    def __init__(self, *, together):
        self.together = together
        self.now = 0.0
        self.meeting = (JointMeeting if together else Meeting)(["h"] * len(PROCESSES), 0.0)
        self.waits = {}  # (process, number): point
        self.answers = {}
        self.numbers = dict.fromkeys(PROCESSES, 0)
        self.abandoned = {}
        self.seen = []  # of the meeting, on the way
        self.step = 0
        self.dropped = set()  # waits that were interrupted: their processes may arrive again

    def take(self, replies):
        for to, ticket, answer in replies:
            assert ticket == 0
            for key in to:
                del self.waits[key]  # it waits, and is answered once
                self.answers[key] = (answer.kind, getattr(answer, "facts", None) or answer)

    def arrive(self, wanted, point, limits, with_payloads):
        group = point.group or PROCESSES
        busy = {process for process, _ in self.waits.keys() - self.dropped}
        coming = [p for p in wanted if p in group and p not in busy]
        if not coming:
            return
        self.step += 1
        payloads = [b"%d" % p if with_payloads else b"" for p in coming]
        keys = []
        for process in coming:
            self.numbers[process] += 1
            keys.append((process, self.numbers[process]))
        self.waits.update(dict.fromkeys(keys, point))
        if self.together:
            own = limits[: len(coming)]
            self.take(
                self.meeting.arrive_together(
                    self.now, coming, point, payloads, limits=JointLimits(own, own),
                    to=tuple(keys), each=[(key,) for key in keys], step=self.step,
                )
            )  # fmt: skip
            return
        for key, payload, timeout_s in zip(keys, payloads, limits, strict=False):
            self.take(
                self.meeting.arrive(
                    self.now, key[0], point, payload,
                    timeout_s=timeout_s, to=(key,), ticket=0, step=self.step,
                )
            )  # fmt: skip

    def abandon(self, process, point):
        if process not in (point.group or PROCESSES):
            return
        number = self.abandoned[process, point.lane] = (
            self.abandoned.get((process, point.lane), 0) + 1
        )
        self.dropped |= {key for key in self.waits if key[0] == process}
        sent = self.meeting._records[process].arrivals.get(point.lane, 0)
        left = Abandoned(point, min(1, sent), sent, number, "KeyboardInterrupt")
        self.take(self.meeting.abandon(self.now, process, left))

    def advance(self, seconds):
        self.now += seconds
        self.take(self.meeting.tick(self.now))

    def beat(self, process, step):
        beat = Beat(step, f"step {step}", 0.0, None, 0)
        self.meeting.beat(self.now, process, beat)

    def look(self, process):
        """Look at one process, and by that at those that arrived together with it."""
        self.seen.append(self.meeting.waiting_for(self.now, process, "main"))
        self.seen.append(self.meeting._records[process].member(self.now))

    def arrivals(self):
        """Return the number of arrivals of each process, by lane."""
        return [record.arrivals for record in self.meeting._records.values()]

    def depart(self, process, state):
        self.take(self.meeting.depart(self.now, process, state, "gone"))

    def service(self):
        self.take(self.meeting.lose_service(self.now, "JAX's service", "gone"))

    def play(self, actions):
        for verb, *more in actions:
            getattr(self, verb)(*more)
        return self


@settings(max_examples=400)
@given(HISTORIES)
@example([("depart", 3, "lost"), ("beat", 3, 100), ("look", 3)])
def test_processes_that_arrive_together_get_what_each_would_get(actions):
    alone, together = (History(together=way).play(actions) for way in (False, True))
    assert together.answers == alone.answers
    assert together.waits == alone.waits
    assert together.seen == alone.seen
    assert together.meeting.members(together.now) == alone.meeting.members(alone.now)
    assert together.arrivals() == alone.arrivals()
    assert together.meeting.next_deadline == alone.meeting.next_deadline


def test_hosts_that_all_arrive_are_answered_once_each_with_all_payloads():
    meeting = JointMeeting(["a", "a", "b", "b"], 0.0)
    options = {"limits": JointLimits([5.0, 5.0], [5.0, 5.0]), "each": [None, None]}
    point = Point("x")
    assert meeting.arrive_together(0.0, (2, 3), point, [b"", b"3"], to="b", **options) == []
    replies = meeting.arrive_together(0.0, (0, 1), point, [b"", b""], to="a", **options)
    assert [(to, ticket) for to, ticket, _ in replies] == [("b", 0), ("a", 0)]
    assert dict(replies[0].answer.payloads) == {0: b"", 1: b"", 2: b"", 3: b"3"}
    assert replies[0].answer is replies[1].answer


def test_the_deadline_names_who_is_missing_of_a_host_that_came_in_part():
    meeting = JointMeeting(["a", "a", "b", "b"], 0.0)
    options = {"limits": JointLimits([6.0, 5.0], [6.0, 7.0]), "each": [("a",), ("b",)]}
    meeting.arrive_together(0.0, (0, 1), Point("x"), [b"", b""], to="a", **options)
    (reply,) = meeting.tick(5.0)
    late = reply.answer
    assert (reply.to, late.waiting.missing, late.by, late.timeout_s) == ("a", [2, 3], 1, 7.0)


def arrive(meeting, processes, to, point=POINTS[0]):
    """Let processes arrive together; return who is answered, and how."""
    limits = [5.0] * len(processes)
    replies = meeting.arrive_together(
        0.0, processes, point, [b""] * len(processes), limits=JointLimits(limits, limits),
        to=to, each=[f"{to}{process}" for process in processes],
    )  # fmt: skip
    return {reply.to: reply.answer.kind for reply in replies}


def test_processes_that_arrive_twice_are_at_two_meetings():
    meeting = JointMeeting(["a", "a", "b", "b"], 0.0)
    assert arrive(meeting, (0, 1), "first ") == {}
    assert arrive(meeting, (0, 1), "second ") == {}
    assert arrive(meeting, (2, 3), "b") == {"first ": "ok", "b2": "ok", "b3": "ok"}
    assert arrive(meeting, (2, 3), "c") == {"second 0": "ok", "second 1": "ok", "c": "ok"}


def test_processes_that_complete_a_cycle_of_waits_are_answered_at_once():
    meeting = JointMeeting(["a", "a", "b", "b"], 0.0)
    assert arrive(meeting, (2, 3), "b") == {}
    assert arrive(meeting, (0,), "pair", Point("pair", group=(0, 1))) == {}
    found = arrive(meeting, (1,), "a")
    assert found == {"b": "diverged", "pair0": "diverged", "a1": "diverged"}


def test_each_host_that_met_is_at_its_own_call_site():
    meeting = JointMeeting(["a", "a", "b", "b"], 0.0)
    assert arrive(meeting, (0, 1), "a", Point("x", site="train.py:1")) == {}
    met = arrive(meeting, (2, 3), "b", Point("x", site="train.py:2"))
    assert met == {"a": "ok", "b": "ok"}
    places = [member.place for member in meeting.members(0.0)]
    assert places == ["'x' (train.py:1)"] * 2 + ["'x' (train.py:2)"] * 2
