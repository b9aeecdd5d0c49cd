"""Programs of calls that differ between processes, at random; see `program_of`.

All processes of a program make one sequence of calls, in lanes and groups, and catch every error.
In some calls one process differs: in what it calls, in when it arrives, or in how it leaves. A call
*more or less* than the others moves a process; every other difference must leave all at one count.
"""

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import settings

from shoal.runtime.rules import gathering
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.messages import Abandoned
from shoal.runtime.rules.point import Point

PROGRAMS = 20_000 if settings.get_current_profile_name() == "explore" else 600

# What differs, and the call still counts as one on each process.
IN_STEP = ("name", "value", "kind", "trail", "late", "deadline", "interrupt", "before", "between",
           "after", "some")  # fmt: skip
# A call less than the others, one more, one in another lane, or of another group. ("some": a call
# of all, of which a process names a few, and all wait until they have arrived.)
APART = ("less", "more", "lane", "group")
LANES = ("main", "side")
MOST_CALLS = 30
LIMITS_S = {"deadline": 3.0, "at last": 1e6, "some": 1e6, "waits": 1e6}


class Call(NamedTuple):
    """One call of all members of a group."""

    name: str
    group: tuple[int, ...] | None
    lane: str
    points: int
    survivors: bool


class Program(NamedTuple):
    """All of it; the same seed makes the same one."""

    seed: int
    processes: int
    calls: tuple[Call, ...]
    differences: dict[tuple[int, int], str]  # by process and number of the call

    @property
    def keeps_count(self):
        """Whether no process makes a call more or less than the others."""
        return not {*self.differences.values()} & {*APART}

    def kinds(self, call):
        """What differs in a call."""
        return {kind for (_, index), kind in self.differences.items() if index == call}

    @property
    def lines(self):
        """Every group and lane, and that of all in each lane."""
        calls = {(call.group, call.lane) for call in self.calls}
        return sorted(calls | {(None, lane) for lane in LANES}, key=repr)


def program_of(seed, kinds=(*IN_STEP, *APART)):
    """Return the program of a seed, with differences of these kinds."""
    chance = random.Random(f"calls {seed}")
    processes = chance.choice([2, 2, 3, 3, 4])
    calls = []
    for number in range(chance.randint(1, MOST_CALLS)):
        group = None
        if processes > 2 and chance.random() < 0.4:
            group = tuple(sorted(chance.sample(range(processes), chance.randint(2, processes - 1))))
        name = chance.choice(["a", "b", f"call {number}"])
        lane = chance.choice(["main", "main", *LANES])
        is_live = chance.random() < 0.1
        calls.append(Call(name, group, lane, 1 if is_live else chance.choice([1, 1, 2]), is_live))
    differences = {}
    for _ in range(chance.choice([1, 2, 2, 3, 5, 8, 20])):
        number = chance.randrange(len(calls))
        process = chance.choice(calls[number].group or range(processes))
        kind = chance.choice(kinds)
        others = [other for (_, index), other in differences.items() if index == number]
        is_of_all = processes > 2 and calls[number].group is None
        if "some" not in others and (kind != "some" or (is_of_all and not others)):
            differences[process, number] = kind
    return Program(seed, processes, tuple(calls), differences)


class Ended(NamedTuple):
    """How a call of a process ended."""

    number: int
    answer: object  # the last one; None: it left the call by an exception of its own


class Actor:
    """One process: its calls, and what it has told the meeting of them."""

    def __init__(self, play, process):
        self.play, self.process = play, process
        self.sent = dict.fromkeys((*LANES, "aside"), 0)
        self.abandoned = dict.fromkeys(self.sent, 0)
        self.ends = []
        self.last = {}  # by line: how the call after all others ended

    def steps(self):
        """Make all calls; yield the tickets to wait for, or a time to wait until."""
        program, chance = self.play.program, self.play.chance
        for number, call in enumerate(program.calls):
            if self.process not in (call.group or range(program.processes)):
                continue
            kind = program.differences.get((self.process, number), "")
            if "some" in program.kinds(number):
                kind = kind or "waits"
            if kind == "less":
                continue
            if kind == "more":
                yield from self.call(number, call._replace(name=chance.choice([call.name, "more"])))
            if kind == "late":
                yield self.play.now + chance.choice([1.0, 5.0, 20.0])
            answer = yield from self.call(number, self.changed(call, kind), kind)
            self.ends.append(Ended(number, answer))
        yield from self.come_together()
        for group, lane in program.lines:
            if self.process in (group or range(program.processes)):
                call = Call("at last", group, lane, 1, survivors=False)
                self.last[group, lane] = yield from self.call(-1, call, "at last")

    def changed(self, call, kind):
        """Return the call as this process makes it."""
        if kind == "name":
            return call._replace(name=f"{call.name}, of another name")
        if kind == "kind":
            return call._replace(survivors=not call.survivors, points=1)
        if kind == "lane":
            return call._replace(lane=self.play.chance.choice(["aside", *LANES]))
        if kind in ("group", "some"):
            others = [p for p in range(self.play.program.processes) if p != self.process]
            most = len(others) - (kind == "some")
            some = self.play.chance.sample(others, self.play.chance.randint(1, most))
            group = tuple(sorted([self.process, *some]))
            return call._replace(group=None if len(some) == len(others) else group)
        return call

    def come_together(self):
        """After calls more or less: call `live_processes` until it returns, of all in each lane or,
        in every other program, in each line."""
        program = self.play.program
        of_all = [(None, lane) for lane in (*LANES, "aside")]
        for group, lane in program.lines if program.seed % 2 else of_all:
            if program.keeps_count or self.process not in (group or range(program.processes)):
                continue
            call = Call("live", group, lane, 1, survivors=True)
            while not (yield from self.call(-1, call, "at last")).is_success:
                pass

    def call(self, number, call, kind=""):
        """Make one call; return its last answer, or None if it was left by an exception."""
        play, lane, answer = self.play, call.lane, None
        value = "of another value" if kind == "value" else "equal"
        for stage in range(call.points):
            if (stage, kind) in ((0, "before"), (1, "between")):
                return self.leave(call, stage)
            call_record = f"1:{'ab' if kind == 'trail' else 'cd'}"
            point = Point(call.name, call.group, lane, value, survivors=call.survivors,
                          follows=stage > 0, call_record=call_record)  # fmt: skip
            self.sent[lane] += 1
            ticket = play.arrive(self.process, point, b"%d" % number, LIMITS_S.get(kind, 10.0))
            if kind == "interrupt" and ticket not in play.answers:
                yield play.now + play.chance.choice([0.0, 2.0])
                if ticket not in play.answers:
                    return self.leave(call, stage + 1)
            yield ticket
            answer = play.answers[ticket]
            if not answer.is_success:
                return answer
        if kind == "after":
            return self.leave(call, call.points)
        return answer

    def leave(self, call, arrivals):
        """Leave a call by an exception."""
        lane, follows = call.lane, arrivals > 1
        self.abandoned[lane] += 1
        point = Point(call.name, call.group, lane, survivors=call.survivors, follows=follows)
        counts = arrivals, self.sent[lane], self.abandoned[lane]
        left = Abandoned(point, *counts, "KeyboardInterrupt")
        self.play.take(self.play.meeting.abandon(self.play.now, self.process, left))


class Play:
    """A program on a meeting whose clock stands still while any process can do something."""

    def __init__(self, program):
        self.program, self.now = program, 0.0
        self.chance = random.Random(f"turns {program.seed}")
        hosts = [f"h{process}" for process in range(program.processes)]
        self.meeting = Meeting(hosts, self.now)
        self.answers, self.tickets = {}, {}  # by ticket: the answer; its process
        self.actors = [Actor(self, process) for process in range(program.processes)]

    def arrive(self, process, point, payload, timeout_s):
        ticket = len(self.tickets) + 1
        self.tickets[ticket] = (process, point)
        self.take(
            self.meeting.arrive(
                self.now, process, point, payload, timeout_s=timeout_s, to=process, ticket=ticket
            )
        )
        return f"ticket {ticket}"

    def take(self, replies):
        for reply in replies:
            assert f"ticket {reply.ticket}" not in self.answers, "answered twice"
            self.answers[f"ticket {reply.ticket}"] = reply.answer

    def run(self):
        """Play it to its end; return what is wrong, if anything."""
        steps = {actor: actor.steps() for actor in self.actors}
        waits = dict.fromkeys(steps, 0.0)
        turns = 0
        while steps:
            turns += 1
            if turns > 20_000:
                return "it never ends"
            ready = [actor for actor in steps if self.is_over(waits[actor])]
            if not ready:
                times = [wait for wait in waits.values() if isinstance(wait, float)]
                due = min([self.meeting.next_deadline, *times])
                if due == math.inf:
                    return "all wait, and nothing is due"
                self.now = max(self.now, due)
                self.take(self.meeting.tick(self.now))
                continue
            actor = self.chance.choice(ready)
            try:
                waits[actor] = next(steps[actor])
            except StopIteration:
                del steps[actor], waits[actor]
        return self.finding()

    def is_over(self, wait):
        return wait <= self.now if isinstance(wait, float) else wait in self.answers

    def finding(self):
        """Return what is wrong, if anything: are all at one count?"""
        for line in self.program.lines:
            members = line[0] or range(self.program.processes)
            answers = [self.actors[process].last[line] for process in members]
            if not all(answer is answers[0] and answer.is_success for answer in answers):
                return f"line {line}: {answers}"
        if self.program.keeps_count and (found := self.uneven()):
            return found
        if not self.program.keeps_count and self.program.seed % 2:
            return ""  # calls in lines of one process's own are kept for the others
        return "something is kept for nobody" if self.meeting._lines else ""

    def uneven(self):
        """Return the call that did not end alike on all: with its own payloads, or in one error."""
        for number, call in enumerate(self.program.calls):
            members = call.group or range(self.program.processes)
            ends = [end for p in members for end in self.actors[p].ends if end.number == number]
            answers = [end.answer for end in ends if end.answer is not None]
            if any(answer != answers[0] for answer in answers):
                return f"call {number}: {answers}"
            payloads = {*getattr(answers[0], "payloads", {}).values()} if answers else set()
            if payloads - {b"%d" % number}:
                return f"call {number}: {answers}"
        return ""


@pytest.mark.parametrize("kinds", [IN_STEP, APART, (*IN_STEP, *APART)], ids=["one", "more", "all"])
def test_after_any_differences_all_are_at_one_count(kinds):
    for seed in range(PROGRAMS):
        program = program_of(seed, kinds)
        problem = Play(program).run()
        assert not problem, f"seed {seed}: {problem}\n{program}"


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (gathering.OpenGatherings, "settle_before", lambda self, met, members: None),
        (gathering.OpenGatherings, "join", lambda self, gatherings, answered: None),
        (gathering.OpenGatherings, "fail_after", lambda self, left, gone: None),
        (gathering, "_is_before", lambda gathering, met: True),
        (gathering.Gathering, "expects", lambda self, process: self.answer is None),
    ],
    ids=["settled", "joined", "left", "before", "owed"],
)
def test_the_programs_find_what_breaks_the_rule(monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    assert any(is_wrong(seed) for seed in range(PROGRAMS))


def is_wrong(seed):
    try:
        return Play(program_of(seed)).run()
    except AssertionError as error:  # such as: answered twice
        return str(error)
