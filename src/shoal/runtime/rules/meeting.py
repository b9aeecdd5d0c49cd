"""The rules of meeting, as a pure state machine: no socket, no thread, no clock.

`coordinator` drives it from a socket loop and `in_process` under a lock, so both obey one set of
rules. Every method takes the time and returns the replies that are now due.

The n-th arrival of each process in a *line* (a group and a lane) is one *gathering*. Arrivals are
counted here and not by the processes, so the counts cannot drift apart: a gathering that failed
stays in its line until every living member has arrived and was answered. One answer object is given
to all, hence all or none.

A point of *survivors* does not wait for lost processes. There the remaining processes start again
after a loss, each from another place of the program: a process is no longer answered with a failure
from before the loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from shoal.runtime.rules.deadline import given_s
from shoal.runtime.rules.gathering import (
    Gathering,
    OpenGatherings,
    Reply,
    WaitingProcess,
    abandoned_answer,
    cycle_of,
    differ,
    divergence,
    find_cycle,
)
from shoal.runtime.rules.meeting_answers import (
    AllMet,
    CallLeft,
    Loss,
    Outcome,
    RecordsApart,
    StacksHeard,
    StillMissing,
    SurvivorsMet,
    TooLate,
)
from shoal.runtime.rules.messages import Abandoned
from shoal.runtime.rules.point import Departure, Point
from shoal.runtime.rules.record_marks import UNKNOWN
from shoal.runtime.rules.roster import Record, Roster
from shoal.runtime.wire.frames import FrameError

To = TypeVar("To", bound=Hashable)

_WORDS = 64  # an answer quotes the last words of this many processes; it is sent to all members
_MOST_STACKS = 16  # late processes whose stacks are requested
_STACK_CHARACTERS = 8 << 10  # of each stack in an answer


class Meeting(Roster[To]):
    """All points of a job, once all processes have joined; `to` is any address for the answers.

    `stack_grace_s` is how long late processes may take to send their stacks: the driver of the
    meeting sends `take_stack_requests` to them and passes their answers to `take_stacks`.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        now: float,
        *,
        pids: Sequence[int] = (),
        stack_grace_s: float = 0.0,
    ) -> None:
        super().__init__(hosts, now, pids)
        self._all_processes = range(len(hosts))
        self._lines: OpenGatherings[To] = OpenGatherings(self._all_processes)
        self._stack_grace_s = stack_grace_s
        # About a gathering that is late, or for a query: (to, ticket).
        self._stack_requests: StackRequests[Gathering[To] | tuple[To, int]] = StackRequests()
        self._next = math.inf

    @property
    def next_deadline(self) -> float:
        """The time at which `tick` must be called; never too late, perhaps too early."""
        return self._next

    def arrive(
        self,
        now: float,
        process: int,
        point: Point,
        payload: bytes,
        *,
        timeout_s: float,
        to: To,
        ticket: int,
        step: int | None = None,
    ) -> list[Reply[To]]:
        """Take an arrival; return the answers that are now due, if any."""
        record = self._records[process]
        record.count_arrival(point, step)
        if process in self._gone:
            return [Reply(to, ticket, self._losses.gone_answer(self._all_processes, process))]
        gathering, answer, replies = self._next_gathering(now, process, point)
        line = gathering.line
        if point.survivors and self._has_lost(process):
            point = point._replace(call_record=UNKNOWN)  # a loss may have ended its calls anywhere
        if answer is not None:
            record.note_met(now, point)
            return [*replies, Reply(to, ticket, answer)]
        gathering.arrived[process] = WaitingProcess(to, ticket, point, payload, now)
        gathering.restarts |= point.survivors
        record.blocked[line.lane] = gathering
        self._limit(gathering, now, process, timeout_s)
        return replies + self._judge(now, process, gathering)

    def abandon(self, now: float, process: int, left: Abandoned) -> list[Reply[To]]:
        """Record that a process left a call by an exception: the call fails for all members.

        Its past arrivals stand: the call fails at the next point at which it would have arrived.
        An arrival that the process sent and that is still on its way will not be taken.
        """
        record = self._records[process]
        if left.number <= record.abandoned.get(left.point.lane, 0):
            return []
        if process in self._gone:  # the count of its next arrival includes this one anyway
            record.abandoned[left.point.lane] = left.number
            return []
        point = record.abandon(now, left)
        answer = self._cause(record, point, left)
        waits = record.blocked.get(point.lane)
        if waits is not None and point.follows:
            self._lines.leave(process, waits, answer)
            return []
        replies: list[Reply[To]] = []
        for gathering in self._lines.left_by(process, point, after_loss=self._has_lost(process)):
            replies += self._finish(now, gathering, answer)
            self._lines.settle(process, gathering)
        return replies

    def end_lane(self, process: int, lane: str) -> None:
        """Drop the counts of a lane in which a process makes no more calls."""
        super().end_lane(process, lane)
        self._lines.end_lane(lane)

    def tick(self, now: float) -> list[Reply[To]]:
        """End every wait whose earliest deadline has passed, and every stack request."""
        if now < self._next:
            return []
        waiting = self._lines.all_open()
        late = [g for g in waiting if g.deadline <= now and not self._request_late_stacks(now, g)]
        answers = [
            (g, self._late_answer(now, g, self._stack_requests.take(g.stack_request))) for g in late
        ]
        replies = [r for g, answer in answers for r in self._finish(now, g, answer)]
        for stack_request in self._stack_requests.tick(now):
            replies += self._answered(now, stack_request)
        deadlines = [g.deadline for g in waiting if g.answer is None]
        self._next = min(*deadlines, math.inf, self._stack_requests.next_deadline)
        return replies

    def depart(
        self, now: float, process: int, departure: Departure, end: str = ""
    ) -> list[Reply[To]]:
        """Record that a process is gone. Only the first report counts.

        A lost or failed process ends every gathering of its groups; one that left in order ends
        only those at which it had not arrived. Survivors no longer wait for it.
        """
        if process in self._gone:
            return []
        state = self._gone[process] = departure.state
        self._records[process].leave(now, departure, end)
        self._num_losses += 1
        if state != "left":
            self._last_loss = self._num_losses
        replies: list[Reply[To]] = []
        self._lines.drop_process(process)
        for line in self._lines.of(process):
            for gathering in list(line.gatherings):
                if gathering.answer is not None:
                    continue
                if gathering.survivors:
                    replies += self._do_without(now, process, gathering)
                elif not (state == "left" and process in gathering.arrived):
                    replies += self._finish(now, gathering, self._losses.gone_answer(line.members))
        for stack_request in self._stack_requests.forget(process):
            replies += self._answered(now, stack_request)
        return replies

    def lose_service(self, now: float, name: str, words: str) -> list[Reply[To]]:
        """Record the loss of a service: every wait ends but those of survivors.

        It is an error on all processes until the survivors have met.
        """
        self._losses.services.append((name, words))
        self._num_losses += 1
        self._last_loss = self._num_losses
        answer = self._losses.service_answer()
        ended = [g for g in self._lines.all_open() if not g.survivors]
        return [reply for g in ended for reply in self._finish(now, g, answer)]

    def waiting_for(self, now: float, process: int, lane: str) -> StillMissing | None:
        """Return the members missing where `process` waits; only to the first of each place.

        None if it does not wait, or another one that waits at the same place was answered.
        """
        gathering = self._records[process].blocked.get(lane)
        if gathering is None:
            return None
        place = gathering.arrived[process].point.place
        if place in gathering.reported:
            return None
        gathering.reported += (place,)
        return self._missing(gathering, now)

    def waiters_for(self, process: int) -> set[int]:
        """Return the processes that wait for this one."""
        waiting = [g for g in self._lines.all_open() if process in g.missing(self._gone)]
        return {p for g in waiting for p in g.arrived}

    def request_stacks(
        self, now: float, processes: Iterable[int], limit_s: float, to: To, ticket: int
    ) -> list[Reply[To]]:
        """Request stacks; "stacks" is sent to `to` when all have answered, or at the limit."""
        targets = [p for p in processes if p not in self._gone]
        if not targets:
            return [Reply(to, ticket, StacksHeard({}))]
        self._stack_requests.add((to, ticket), targets, now + limit_s)
        self._next = min(self._next, now + limit_s)
        return []

    def take_stack_requests(self) -> list[tuple[int, int]]:
        """Return (ticket, process) of each stack request to be sent now."""
        questions, self._stack_requests.to_send = self._stack_requests.to_send, []
        return questions

    def take_stacks(self, now: float, process: int, ticket: int, text: str) -> list[Reply[To]]:
        """Take an answer to a stack request.

        Raises:
          FrameError: there was no such request.
        """
        stack_request = self._stack_requests.receive(process, ticket, text)
        return [] if stack_request is None else self._answered(now, stack_request)

    def _limit(self, gathering: Gathering[To], now: float, by: int, timeout_s: float) -> None:
        if now + timeout_s < gathering.deadline and gathering.stack_request is None:
            gathering.deadline, gathering.limit = now + timeout_s, (by, timeout_s)
            self._next = min(self._next, gathering.deadline)

    def _next_gathering(
        self, now: float, process: int, point: Point
    ) -> tuple[Gathering[To], Outcome | None, list[Reply[To]]]:
        """Return the gathering of an arrival, or its immediate answer.

        Gatherings that the process has left on the way there are answered for their members.
        """
        replies: list[Reply[To]] = []
        after_loss = self._has_lost(process)
        while True:
            gathering = self._lines.next_of(process, point, after_loss=after_loss)
            if gathering is None:
                gathering = self._lines.open(process, point)
            if gathering.answer is not None:
                if gathering.follows or not point.follows:
                    self._lines.settle(process, gathering)
                return gathering, gathering.answer, replies
            answer, is_left = self._apart(process, point, gathering)
            if answer is None or not is_left:
                return gathering, answer, replies
            replies += self._finish(now, gathering, answer)

    def _apart(
        self, process: int, point: Point, gathering: Gathering[To]
    ) -> tuple[Outcome | None, bool]:
        """Return the answer if an arrival is not of the call of an open gathering, else None; and
        whether the process has left that one, so that the answer is for those who wait there."""
        members, arrived = gathering.line.members, gathering.arrived
        if gathering.survivors != point.survivors and self._losses.affect(members):
            # Some start again, some have yet to hear of the loss.
            return self._losses.any_answer(members), point.survivors
        if gathering.follows == point.follows or not arrived:
            return None, False
        if not point.follows:
            return abandoned_answer(process, point), True
        other, wait = next(iter(arrived.items()))
        return abandoned_answer(other, wait.point), False

    def _cause(self, record: Record[To], point: Point, left: Abandoned) -> Loss | CallLeft:
        """Return why a call fails that a process has left: perhaps a loss that it knew of."""
        members = point.group or self._all_processes
        if record.acknowledged < len(self._losses.services):
            return self._losses.service_answer()
        if any(process in self._gone for process in members):
            return self._losses.gone_answer(members)
        return CallLeft(record.index, left.words)

    def _judge(self, now: float, process: int, gathering: Gathering[To]) -> list[Reply[To]]:
        line, arrived = gathering.line, gathering.arrived
        first = next(iter(arrived.values())).point
        mine = arrived[process].point
        if not gathering.survivors:
            # Services first: processes may have died of their loss.
            if self._records[process].acknowledged < len(self._losses.services):
                return self._finish(now, gathering, self._losses.service_answer())
            if self._gone and len(arrived) == 1 and any(p in line.members for p in self._gone):
                return self._finish(now, gathering, self._losses.gone_answer(line.members))
        if mine is not first and differ(mine, first):
            return self._finish(now, gathering, divergence(gathering.points, line.failing))
        if "\n" in mine.call_record:
            versions = gathering.marks.add(process, mine.call_record)
            if versions:
                return self._finish(now, gathering, RecordsApart(versions))
        if self._is_complete(gathering):
            return self._complete(now, gathering)
        waiting = self._lines.open_in(line.lane)
        if len(waiting) == 1:  # the common case
            return []

        def waits_at(other: int) -> Gathering[To] | None:
            return self._records[other].blocked.get(line.lane)

        cycle = find_cycle(process, gathering, waiting, waits_at, self._gone)
        return self._break(now, cycle) if cycle else []

    def _break(self, now: float, cycle: list[Gathering[To]]) -> list[Reply[To]]:
        """End a cycle. Members that wait for survivors that start again get that loss."""
        ordinary = [g for g in cycle if not g.survivors]
        answer: Outcome
        if ordinary and len(ordinary) < len(cycle) and self._losses.affect(()):
            cycle, answer = ordinary, self._losses.any_answer(())
        else:
            answer = cycle_of(cycle, self._gone, len(self._all_processes))
        answered = {process for g in cycle for process in g.arrived}
        replies = [reply for g in cycle for reply in self._finish(now, g, answer)]
        self._lines.join(cycle, answered)
        return replies

    def _is_complete(self, gathering: Gathering[To]) -> bool:
        missing = len(gathering.line.members) - len(gathering.arrived)
        if missing and gathering.survivors and missing <= len(self._gone):
            missing -= sum(p in gathering.line.members for p in self._gone)
        return not missing

    def _complete(self, now: float, gathering: Gathering[To]) -> list[Reply[To]]:
        """Complete a gathering at which all have arrived."""
        line, arrived = gathering.line, gathering.arrived
        if not gathering.survivors:
            payloads = {p: arrived[p].payload for p in line.members}
            replies = self._finish(now, gathering, AllMet(payloads))
            self._lines.settle_before(gathering, line.members)
            return replies
        alive = dict.fromkeys(sorted(arrived))
        replies = self._finish(now, gathering, self._losses.survivors(alive, line.members))
        self._start_again(gathering, alive)
        return replies

    def _start_again(self, met: Gathering[To], alive: Collection[int]) -> None:
        """Settle the lane: all survivors are at one point, so earlier failures are not owed."""
        for process in alive:
            self._records[process].acknowledged = len(self._losses.services)
            self._records[process].met_after = self._num_losses
        self._lines.settle_before(met, {*alive, *self._gone})

    def _do_without(self, now: float, process: int, gathering: Gathering[To]) -> list[Reply[To]]:
        """Remove a process from points of survivors, at which it may be waiting itself."""
        replies: list[Reply[To]] = []
        wait = gathering.arrived.pop(process, None)
        if wait is not None:
            self._records[process].blocked.pop(gathering.line.lane, None)
            replies.append(Reply(wait.to, wait.ticket, self._losses.gone_answer((process,))))
        if not gathering.arrived:
            return replies + self._finish(now, gathering, SurvivorsMet())
        if self._is_complete(gathering):
            replies += self._complete(now, gathering)
        return replies

    def _finish(self, now: float, gathering: Gathering[To], answer: Outcome) -> list[Reply[To]]:
        """Answer all waiting members; keep the answer for living ones that have yet to arrive."""
        gathering.answer = answer
        if gathering.stack_request is not None:
            self._stack_requests.take(gathering.stack_request)
        if not answer.is_success:
            missing = gathering.missing(self._gone)
            gathering.unanswered = {p for p in missing if p not in self._gone}
        elif gathering.left:
            self._lines.fail_after(gathering, self._gone)
        arrived, gathering.arrived = gathering.arrived, {}
        self._lines.close(gathering, has_failed=not answer.is_success)
        lane = gathering.line.lane
        for process, wait in arrived.items():
            record = self._records[process]
            if record.blocked.get(lane) is gathering:
                del record.blocked[lane]
            if process not in self._gone:
                record.note_met(now, wait.point)
        return [Reply(wait.to, wait.ticket, answer) for wait in arrived.values()]

    def _request_late_stacks(self, now: float, gathering: Gathering[To]) -> bool:
        """Request the stacks of late processes; return whether there is any answer to wait for."""
        if gathering.stack_request is not None or self._stack_grace_s <= 0:
            return False
        targets = [p for p in gathering.missing(self._gone) if p not in self._gone][:_MOST_STACKS]
        if not targets:
            return False
        gathering.deadline = now + self._stack_grace_s
        gathering.stack_request = self._stack_requests.add(gathering, targets, gathering.deadline)
        return True

    def _answered(
        self, now: float, stack_request: StackRequest[Gathering[To] | tuple[To, int]]
    ) -> list[Reply[To]]:
        """Finish a stack request, answered or not."""
        about = stack_request.about
        if isinstance(about, tuple):
            return [Reply(*about, StacksHeard(stack_request.stacks))]
        if about.answer is not None:  # settled meanwhile
            return []
        return self._finish(now, about, self._late_answer(now, about, stack_request.stacks))

    def _late_answer(
        self, now: float, gathering: Gathering[To], stacks: Mapping[int, str]
    ) -> TooLate:
        by, timeout_s = gathering.limit
        place = next(iter(gathering.arrived.values())).point.place
        shown = [(process, text[:_STACK_CHARACTERS]) for process, text in stacks.items()]
        since = gathering.line.failing
        return TooLate(
            waiting=self._missing(gathering, now),
            by=by,
            timeout_s=given_s(timeout_s),
            at=place,
            stacks=shown,
            since=since,
        )

    def _missing(self, gathering: Gathering[To], now: float) -> StillMissing:
        missing = gathering.missing(self._gone)
        last_words = [(p, self._records[p].last_words(now)) for p in missing[:_WORDS]]
        last_calls = [(p, self._records[p].last_call(now)) for p in missing[:_WORDS]]
        return StillMissing(missing, last_words, last_calls)


# ---- Stack requests under way: which processes have yet to answer. Pure rules.


About = TypeVar("About")

_MOST_CHARACTERS = 64 << 10  # of one answer
_MOST_TOGETHER = 64 << 20  # of all answers to one request


class StackRequest(Generic[About]):
    """One stack request: the processes that have yet to answer, and the answers so far."""

    def __init__(self, about: About, processes: list[int], limit: float) -> None:
        self.about = about
        self.limit = limit
        self.stacks: dict[int, str] = {}
        self.awaited = set(processes)
        self._most = min(_MOST_CHARACTERS, _MOST_TOGETHER // max(1, len(processes)))

    def take(self, process: int, text: str) -> None:
        """Take the answer of a process; only its first counts."""
        if process in self.awaited:
            self.awaited.discard(process)
            self.stacks[process] = text[: self._most]


class StackRequests(Generic[About]):
    """All stack requests under way, by ticket."""

    def __init__(self) -> None:
        self._open: dict[int, StackRequest[About]] = {}
        self._tickets = 0
        self.to_send: list[tuple[int, int]] = []  # (ticket, process); the sender clears it

    @property
    def next_deadline(self) -> float:
        """The time at which `tick` must be called."""
        return min((request.limit for request in self._open.values()), default=math.inf)

    def add(self, about: About, processes: Iterable[int], limit: float) -> int:
        """Add a request; return its ticket."""
        targets = list(processes)
        self._tickets += 1
        self._open[self._tickets] = StackRequest(about, targets, limit)
        self.to_send += [(self._tickets, process) for process in targets]
        return self._tickets

    def take(self, ticket: int | None) -> dict[int, str]:
        """End a request, if it is under way; return the answers so far."""
        request = None if ticket is None else self._open.pop(ticket, None)
        return request.stacks if request else {}

    def receive(self, process: int, ticket: int, text: str) -> StackRequest[About] | None:
        """Take an answer; return the request if it was the last one, which ends it.

        Raises:
          FrameError: there was no such request.
        """
        if not 1 <= ticket <= self._tickets:
            raise FrameError(f"an answer to request {ticket}, which was never sent")
        request = self._open.get(ticket)
        if request is None:
            return None  # the request is over
        request.take(process, text)
        return None if request.awaited else self._open.pop(ticket)

    def forget(self, process: int) -> list[StackRequest[About]]:
        """Expect no more answers of a process; return the requests that this ends."""
        for request in self._open.values():
            request.awaited.discard(process)
        done = [ticket for ticket, request in self._open.items() if not request.awaited]
        return [self._open.pop(ticket) for ticket in done]

    def tick(self, now: float) -> list[StackRequest[About]]:
        """Return the requests whose time is over."""
        done = [ticket for ticket, request in self._open.items() if request.limit <= now]
        return [self._open.pop(ticket) for ticket in done]
