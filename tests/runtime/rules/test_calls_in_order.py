"""The n-th call of each process meets the n-th of the others: the traces of the page, played."""

import re
from pathlib import Path

import pytest

from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.messages import Abandoned
from shoal.runtime.rules.point import Departure, Point

PAGE = Path(__file__).parents[3] / "docs" / "how-it-works" / "meeting.md"
ROW = re.compile(r"\| (?P<what>[^|]*) \| `(?P<trace>[^`]*)` \| `(?P<answers>[^`]*)` "
                 r"\| (?P<end>in step|apart) \|")  # fmt: skip
EVENT = re.compile(r"(?P<process>\d):?(?P<name>\w*)(?P<later>\+?)(?P<leaves>!?)"
                   r"(?:\[(?P<group>[\d,]+)\])?(?:@(?P<lane>\w+))?")  # fmt: skip
ROWS = [match.groupdict() for match in map(ROW.fullmatch, PAGE.read_text("utf-8").splitlines())
        if match]  # fmt: skip


class Trace:
    """A trace on a meeting."""

    def __init__(self, events):
        self.events = events.split()
        self.processes = 1 + max(int(event[0]) for event in self.events if ":" in event)
        self.now = 0.0
        self.meeting = Meeting([f"h{p}" for p in range(self.processes)], self.now)
        self.answers = {}  # by ticket
        self.tickets = {p: [] for p in range(self.processes)}  # of each process, but those it left
        self.lines = {(None, "main")}  # of the calls made
        self.lost = None
        self.calls = {}  # by process: the last point, and the number of those of its call
        self.sent, self.left, self.count = {}, {}, 0

    def take(self, replies):
        for reply in replies:
            assert reply.ticket not in self.answers, "answered twice"
            self.answers[reply.ticket] = reply.answer

    def play(self):
        for event in self.events:
            if event.endswith("s"):
                self.now += float(event[:-1])
                self.take(self.meeting.tick(self.now))
                continue
            match = EVENT.fullmatch(event)
            process, name, lane = int(match["process"]), match["name"], match["lane"] or "main"
            group = match["group"] and tuple(map(int, match["group"].split(",")))
            if name == "lost":
                self.lost = process  # the highest
                self.take(self.meeting.depart(self.now, process, Departure("killed", "lost")))
            elif match["leaves"]:
                self.leave(process, name)
            else:
                self.lines.add((group, lane))
                self.arrive(process, name, group, lane, follows=bool(match["later"]))
        return self

    def arrive(self, process, name, group, lane, *, follows=False):
        point = Point(name, group, lane, survivors=name == "live", follows=follows)
        number = self.calls[process][1] + 1 if follows else 1
        self.calls[process] = point, number
        self.sent[process, lane] = self.sent.get((process, lane), 0) + 1
        self.count += 1
        self.tickets[process].append(self.count)
        self.take(
            self.meeting.arrive(
                self.now, process, point, b"", timeout_s=10.0, to=process, ticket=self.count
            )
        )
        return self.count

    def leave(self, process, name):
        point, arrivals = (Point(name), 0) if name else self.calls[process]
        if self.tickets[process] and self.tickets[process][-1] not in self.answers:
            self.tickets[process].pop()
        self.left[process] = self.left.get(process, 0) + 1
        sent = self.sent.get((process, point.lane), 0)
        left = Abandoned(point, arrivals, sent, self.left[process], "KeyboardInterrupt")
        self.take(self.meeting.abandon(self.now, process, left))

    def kind(self, ticket):
        return self.answers[ticket].kind if ticket in self.answers else "waits"

    @property
    def ends(self):
        """What each process got, in words."""
        rows = {p: [self.kind(ticket) for ticket in got] for p, got in self.tickets.items()}
        return ", ".join(" ".join([f"{p}", *kinds]) for p, kinds in rows.items() if kinds)

    def are_in_step(self):
        """Make the next call in each line; return whether all of them meet."""
        if any(self.kind(t) == "waits" for tickets in self.tickets.values() for t in tickets):
            return False
        kinds = set()
        lines = sorted(self.lines, key=repr)
        if self.lost is not None:
            lines = [(tuple(range(self.lost)), "main")]
        for group, lane in lines:
            members = group or range(self.processes)
            tickets = [self.arrive(process, "next", group, lane) for process in members]
            kinds |= {*map(self.kind, tickets)}
        return kinds == {"ok"}


def test_the_page_has_rows():
    assert len(ROWS) == 19
    assert {row["end"] for row in ROWS} == {"in step", "apart"}


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_each_trace_of_the_page_ends_as_it_says(row):
    trace = Trace(row["trace"]).play()
    assert trace.ends == row["answers"]
    assert trace.are_in_step() is (row["end"] == "in step")
    assert row["end"] == "apart" or not trace.meeting._lines, "something is kept for nobody"


def since(trace, process):
    """Return what the last error of a process says of the calls before: a number, a place."""
    answer_since = trace.answers[trace.tickets[process][-1]].since
    return answer_since and tuple(answer_since)


def test_errors_say_since_which_call_they_follow_each_other():
    """Calls are counted in their line; a success, or one among more processes, begins anew."""
    first = "0:a 1:a 0:b 1:x"
    assert since(Trace(first).play(), 0) is None
    for more in ("0:c 1:y", "0:c 10s 1:y", "0:c 1:c! 0:d 1:y", "0:c@side 1:c@side 0:d 1:e"):
        trace = Trace(f"{first} {more}").play()
        assert since(trace, 0) == since(trace, 1) == (2, "'b'"), more
    for more in ("0:c 1:c 0:d 1:y", "0:live 1:live 0:d 1:y", "0:c@side 1:d@side"):
        assert since(Trace(f"{first} {more}").play(), 0) is None, more
    among = "0:b[0,1] 1:x[0,1] 0:all 1:all 2:all 0:c[0,1] 1:y[0,1]"
    assert since(Trace(among).play(), 0) is None
    late = Trace("0:a 1:b 2:a 0:c 1:d 2:e").play()
    assert [since(late, process) for process in range(3)] == [(1, "'a'")] * 3


def test_lines_in_which_nothing_is_owed_are_counted_until_their_lane_ends():
    trace = Trace("0:a@side 1:b@side").play()
    for process in range(2):
        trace.meeting.end_lane(process, "side")
    for process in range(2):
        trace.arrive(process, "ab"[process], None, "side")
    assert since(trace, 0) is None


def test_a_deadline_that_passes_while_all_meet_among_more_ends_nothing():
    """Stacks were asked for a call that its only process had left, and that counts no more."""
    trace = Trace("0:p[0,1] 10s 0! 0:all 1:all 2:all")
    trace.meeting = Meeting(["h"] * 3, 0.0, stack_grace_s=0.5)
    trace.play()
    assert trace.ends == "0 ok, 1 ok, 2 ok"
    trace.now += 1.0
    trace.take(trace.meeting.tick(trace.now))
    assert trace.are_in_step()
