"""Whatever happened before, those who are left can agree on who that is, and go on together."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.point import Departure, Point

PROCESSES = range(3)
POINTS = [
    Point("a"),
    Point("b"),
    Point("a", lane="side"),
    Point("a", group=(0, 1)),
    Point("a", group=(0, 2)),
    Point("live", survivors=True),
    Point("live", group=(0, 1), survivors=True),
    Point("live", lane="side", survivors=True),
]
ACTIONS = st.one_of(
    st.tuples(
        st.just("arrive"),
        st.sampled_from(PROCESSES),
        st.sampled_from(POINTS),
        st.sampled_from([1.0, 10.0]),
    ),
    st.tuples(st.just("advance"), st.sampled_from([0.3, 1.0, 4.0])),
    st.tuples(
        st.just("depart"), st.sampled_from(PROCESSES), st.sampled_from(["lost", "failed", "left"])
    ),
    st.tuples(st.just("service")),
    st.tuples(st.just("stacks"), st.sampled_from(PROCESSES)),
)


class History:
    """A meeting with all that happened in it."""

    def __init__(self, grace_s):
        self.now = 0.0
        self.meeting = Meeting(["h"] * len(PROCESSES), 0.0, stack_grace_s=grace_s)
        self.waits = {}  # ticket: (process, point)
        self.ends = {}  # ticket: answer
        self.gone = {}
        self.asked = []
        self.tickets = 0

    def take(self, replies):
        for to, ticket, answer in replies:
            process, point = self.waits.pop(ticket)
            assert to == process
            self.ends[ticket] = answer
            members = set(point.group or PROCESSES)
            if answer.kind == "ok":
                assert not point.survivors
                assert set(answer.payloads) == members
            if answer.kind == "live":
                assert point.survivors
                gone = {p: state for p, state, _ in answer.facts["gone"]}
                assert set(answer.facts["alive"]) | set(gone) == members
                assert gone == {p: s for p, s in self.gone.items() if p in members}
                assert process in answer.facts["alive"]

    def arrive(self, process, point, timeout_s=10.0):
        waiting = any(p == process and place.lane == point.lane for p, place in self.waits.values())
        if waiting or process in self.gone or process not in (point.group or PROCESSES):
            return None
        self.tickets += 1
        self.waits[self.tickets] = (process, point)
        self.take(
            self.meeting.arrive(
                self.now, process, point, b"", timeout_s=timeout_s, to=process, ticket=self.tickets
            )
        )
        return self.tickets

    def advance(self, seconds):
        self.now += seconds
        self.take(self.meeting.tick(self.now))
        self.asked += self.meeting.take_stack_requests()

    def depart(self, process, state):
        self.gone.setdefault(process, state)
        self.take(self.meeting.depart(self.now, process, Departure("gone", state)))

    def service(self):
        self.take(self.meeting.lose_service(self.now, "JAX's service", "killed"))

    def stacks(self, process):
        for ticket, asked in self.asked:
            if asked == process:
                self.take(self.meeting.take_stacks(self.now, process, ticket, "here"))

    def agree(self, alive):
        """Let each process call `live_processes` until it does not fail; who is late hears of each
        failure of the others first."""
        tickets = {}
        for process in alive:
            for _ in range(len(self.ends) + 1):
                ticket = tickets[process] = self.arrive(process, Point("live", survivors=True))
                if ticket not in self.ends or self.ends[ticket].kind == "live":
                    break
        return [self.ends[ticket] for ticket in tickets.values()]


@given(st.lists(ACTIONS, max_size=40), st.sampled_from([0.0, 0.5]))
def test_survivors_agree_and_continue_after_any_history(actions, grace_s):
    history = History(grace_s)
    for verb, *values in actions:
        getattr(history, verb)(*values)
    history.advance(10.0)
    history.advance(0.5)
    assert not history.waits, "somebody waits for ever"
    alive = [p for p in PROCESSES if p not in history.gone]
    answers = history.agree(alive)
    assert all(a.kind == "live" and a.facts["alive"] == alive for a in answers)
    group = None if len(alive) == len(PROCESSES) else tuple(alive)
    for name in ("next", "and next"):
        tickets = [history.arrive(p, Point(name, group)) for p in alive]
        assert all(history.ends[ticket].kind == "ok" for ticket in tickets)
    for process in PROCESSES:
        history.depart(process, "left")
    assert not history.meeting._lines, "something is kept for nobody"
