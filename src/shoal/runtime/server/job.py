"""One job of the coordinator: its joining, its meeting, its liveness and its connections.

It connects the sockets to the rules, and notifies all processes of losses.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.runtime.rules.endings import Endings
from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.joining import OTHER_VERSION, Hello, Joining, JoinReply, host_runs
from shoal.runtime.rules.liveness import Limits, Liveness, RunningClock
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.meeting_answers import (
    AllMet,
    Answer,
    MembersKnown,
    ReportAsked,
    StacksHeard,
    StepsAwaited,
    SurvivorsMet,
    TooLate,
)
from shoal.runtime.rules.messages import (
    ArrivalHeaders,
    Beat,
    departure_header,
    notice_header,
    save_order_header,
    step_text,
)
from shoal.runtime.rules.point import Departure
from shoal.runtime.rules.programs import Differences, Noted, ProgramSets
from shoal.runtime.rules.record_marks import Found, LatestMarks, RecordMarks
from shoal.runtime.rules.reporting import Named, Reporting
from shoal.runtime.rules.requested_saves import (
    SaveOrder,
    SaveReport,
    SaveRequests,
    SaveState,
    Sent,
)
from shoal.runtime.rules.stalls import Idle, Stalls, seen_words
from shoal.runtime.rules.stopping import PreemptionRounds, ReceivedNotice, StopAgreement, StopReport
from shoal.runtime.system.callsite import line_of
from shoal.runtime.system.process_status import Seen
from shoal.runtime.wire.frames import join_payloads, pack_answer, pack_frame
from shoal.runtime.wire.server_sockets import Connection, Connections, with_guess

_STACKS_GRACE_S = 0.5  # how long late processes may take to send their stacks
_STACKS_S = 2.0  # the same, for a query
_JUDGE_S = 0.001  # for each process, between two looks whether the job is stalled
_MOST_SHOWN = 3  # differences in compiled programs, in the log of a hang
_MOST_REPORTED = 8  # the same, in the report of a failure
_MOST_GROUPS = 64  # of processes at one place, that processes are sent of a stall
_LARGE_BYTES = 4096  # a list of hosts that is sent compressed


class ServedJob:
    """A job being served: its joining, its meeting, and the processes still connected."""

    def __init__(
        self,
        joining: Joining[Connection],
        connections: Connections,
        clock: Callable[[], float],
        limits: Limits,
        running: RunningClock,
    ) -> None:
        self.joining = joining
        self.meeting: Meeting[Connection] | None = None
        self.mail = JobMail(connections, self._is_member)
        self.leaving = Leaving(joining.num_processes, self.mail)
        self.now = clock
        self._limits = limits
        self._liveness: Liveness[int] = Liveness(limits)
        self._running = running  # the clock by which silence is counted
        self._host_agents = HostAgentConnections(connections)
        self._marks = LatestMarks()
        self._endings: Endings[Connection] = Endings(joining.num_processes, self._marks)
        self._stalls = Stalls()
        self._programs = ProgramSets(joining.num_processes)
        self._programs_at_wait = Differences()  # when a wait ended at its deadline
        self._has_warned = False  # of programs
        self._has_reported_programs = False  # to the launcher, which takes the first report
        self._reporting: Reporting[Connection] = Reporting()
        self.mail.on_survivors = self._forget_reporter
        self._judge_at = -math.inf
        self.left_at: dict[int, str] = {}  # the last place of each process that left in order
        self._has_left = False  # whether one has, and the others know
        self.arrival_headers = ArrivalHeaders()
        self.near = ""  # see `wire.sockets`
        self.service_rows: Callable[[], list[list[str]]] = list
        self.on_news: Callable[..., None] = lambda **_news: None  # see `coordinator.Coordinator`

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.joining.num_processes

    @property
    def next_deadline(self) -> float:
        """The time at which `on_time` must be called, except for silence."""
        if self.meeting is None:
            return self.joining.next_deadline
        return min(self.meeting.next_deadline, self._endings.deadline, self._reporting.deadline)

    def is_over(self, now: float) -> bool:
        """Return whether no process is left in it."""
        return not self.mail.lives and (self.meeting is not None or self.joining.is_finished(now))

    def ended_for(self, process: int, now: float) -> bool:
        """Return whether a HELLO of this process belongs to another job than this one."""
        left = self.meeting is not None and self.meeting.has_gone(process)
        return left or self.joining.was_refused(process) or self.joining.is_finished(now)

    def _is_member(self, process: int) -> bool:
        return self.meeting is not None and not self.meeting.has_gone(process)

    def hello(self, connection: Connection, hello: Hello) -> Life | None:
        """Take a HELLO; return the process's life, or None if it is refused."""
        replies = self.joining.hello(self.now(), hello, connection)
        life = None
        if not any(reply.to is connection and reply.refusal is not None for reply in replies):
            life = self.mail.lives[hello.process] = Life(hello.process, connection)
            self.on_news(joined=hello.process)
        self.answer_joining(replies)
        return life

    def answer_joining(self, replies: list[JoinReply[Connection]]) -> None:
        """Send welcome or refusal to joining processes."""
        if self.joining.is_complete and self.meeting is None:
            self._begin()
        refused: set[Connection] = set()
        is_welcome = False
        for to, refusal in replies:
            if refusal is None:
                is_welcome = True  # and so are all
                continue
            refused.add(to)
            body = (refusal.words or OTHER_VERSION).encode(errors="replace")
            self.mail.send_last(to, pack_frame({"is": "refused", "refusal": refusal}, body))
        lives = self.mail.lives
        if refused:
            self.mail.lives = {p: a for p, a in lives.items() if a.connection not in refused}
        elif is_welcome:
            more = {"near": self.near, **self._limits.words}
            for processes, welcome in _welcomes(self.joining, more):
                self.mail.send_all([lives[p].connection for p in processes], welcome)

    def _begin(self) -> None:
        now, joining = self.now(), self.joining
        self.meeting = Meeting(joining.hosts, now, pids=joining.pids, stack_grace_s=_STACKS_GRACE_S)
        for process in range(self.num_processes):
            self._liveness.watch(self._running.read(now), process)

    def beat(self, process: int, beat: Beat) -> None:
        """Take a heartbeat of a process."""
        if self.meeting is not None:
            now = self.now()
            self.meeting.beat(now, process, beat)
            self._stalls.hear(process)
            if self._liveness.beat(self._running.read(now), process):
                self.meeting.mark_silent(process, None)

    def take_call_records(self, process: int, call_records: Iterable[RecordMarks]) -> None:
        """Take the call records of a process; notify all processes of a difference."""
        for marks in call_records:
            difference = self._marks.receive(process, marks)
            if difference is not None:
                self._push_difference(difference)

    def take_programs(self, process: int, noted: Iterable[Noted]) -> None:
        """Take the programs that a process has compiled; warn of a difference, once."""
        counts = self._programs.receive(process, noted)
        if not counts or self._has_warned or self.meeting is None:
            return
        self._has_warned = True
        lowest = min((p for p in self.mail.lives if not self.meeting.has_gone(p)), default=process)
        header = {"is": "programs", "programs": self._programs.differences().most(1)}
        self.mail.push((lowest,), pack_frame(header))

    def _known_programs(self) -> Differences:
        """Return the differences in compiled programs, for the report of a failure."""
        return self._programs_at_wait.joined(self._programs.differences())

    def _shown_programs(self) -> dict[str, Any]:
        """Return the header field with the first differences in compiled programs, if any."""
        differences = self._known_programs().most(_MOST_SHOWN)
        return {"programs": differences} if differences else {}

    def _push_difference(self, difference: Found) -> None:
        header = {
            "is": "trail",
            "group": difference.group,
            "lane": difference.lane,
            "base": difference.base,
        }
        header |= self._shown_programs()
        frame = pack_frame(header, json.dumps(difference.versions).encode())
        self.mail.push(difference.group or range(self.num_processes), frame)

    def end(
        self, process: int, call_records: Sequence[RecordMarks], to: Connection, ticket: int
    ) -> None:
        """Take the call records of a process whose program has ended in order, and which waits for
        the differences."""
        self._endings.end(
            now=self.now(), process=process, call_records=call_records, to=to, ticket=ticket
        )
        self._answer_ended()

    def _answer_ended(self) -> None:
        """Answer processes whose programs have ended, if it is time; notify all of differences."""
        differences, replies = self._endings.answer(self.now())
        self.mail.answer(replies)
        for difference in differences:
            self._push_difference(difference)

    def take_idle_report(self, process: int, idle: Idle | None) -> None:
        """Take a report that a process makes no progress; None: it makes it again.

        It is kept as the process's activity, which last words and `shoal watch` show.
        """
        if self.meeting is None:
            return
        self._stalls.receive(self._running.read(self.now()), process, idle)
        activity = ""
        if idle is not None:
            activity = f"no progress for {idle.idle_s:.0f} s, at {line_of(idle.site)}"
        self.meeting.set_idle_text(process, activity)
        if idle is not None:
            self._judge_stall(self.meeting)

    def take_seen(self, process: int, seen: Seen) -> None:
        """Take what another process of its host has seen of a silent one."""
        self._stalls.receive_seen(self._running.read(self.now()), process, seen)

    def _judge_stall(self, meeting: Meeting[Connection]) -> None:
        """Report the job as stalled, or end it, if it is."""
        if self.now() < self._judge_at:
            return  # others have just reported
        gone = meeting.gone
        living = [process for process in range(self.num_processes) if process not in gone]
        if meeting.owes_losses(living):
            return  # a loss, which ends it anyway
        self._judge_at = self.now() + _JUDGE_S * len(living)
        now = self._running.read(self.now())
        others = [process for process in living if not self._stalls.are_idle(now, [process])]
        silent_s = {process: self._liveness.silent_s(now, process) for process in others}
        least_s = 2 * self._limits.heartbeat_s
        if any(silent < least_s for silent in silent_s.values()):
            return
        awake = [process for process in living if process not in silent_s]
        for process in silent_s:
            self._locate(now, process, awake)
        left = {p: self.left_at.get(p, "") for p, state in gone.items() if state == "left"}
        stall = self._stalls.judge(now, living, left, silent_s)
        if stall is None:
            return
        representatives = [
            group.processes[0] for group in stall.groups if group.processes[0] in awake
        ]
        shower = awake[0]
        if stall.is_final and representatives:
            shower = representatives[0]
        header = {"is": "stalled", "shower": shower, "shows": representatives[:8]}
        programs = self._programs.differences(still=awake).most(_MOST_REPORTED)
        stall = stall._replace(programs=programs)
        if stall.is_final:
            self.on_news(stalled=stall)
            # Others are in native code, and cannot print a report of the job.
            reporter = min(self._stalls.waiting(awake), default=shower)
            stall = stall._replace(reporter=reporter)
        stall = stall._replace(groups=stall.groups[:_MOST_GROUPS])
        self.mail.push(living, pack_frame(header, json.dumps(stall).encode()))

    def _locate(self, now: float, silent: int, awake: Collection[int]) -> None:
        """Ask a process of the same host where a silent one stands, unless one was just asked."""
        if not self._stalls.ask(now, silent):
            return
        for pids in self.joining.shared_hosts.values():
            others = [process for process in awake if process in pids]
            if silent in pids and others:
                header = {"is": "locate", "process": silent, "pid": pids[silent]}
                self.mail.push(others[:1], pack_frame(header))

    def depart(self, process: int, departure: Departure, end: str = "") -> None:
        """Record that a process is gone. Only the first report counts.

        `end`: what it has recorded of a failure, as JSON; empty: nothing.
        """
        meeting = self.meeting
        if meeting is None or meeting.has_gone(process):
            return
        self._liveness.forget(process)
        state = departure.state
        self._endings.depart(process, is_lost=state != "left")
        news = {"words": departure.words, **departure_header(departure)}
        news["at"] = meeting.last_call(self.now(), process)
        if state != "left" and not self._has_reported_programs:
            news["programs"] = programs = self._known_programs().most(_MOST_REPORTED)
            self._has_reported_programs = bool(programs)
        if end and not departure.follows:
            news["end"] = end
        self.on_news(gone=process, at_s=self.now(), **news)
        replies = meeting.depart(self.now(), process, departure, end)
        if not self._stalls.has_ended:  # else all know why their waits end: see `_judge_stall`
            self.mail.answer(replies)
        name = f"process {process} ({self.joining.hosts[process]})"
        if state != "left":
            self.mail.push_gone(process, name, meeting.departure(process), self._shown_programs)
        elif not self._has_left:  # the first one: at the end of a large job all leave at once
            self._has_left = True
            self.mail.push(self.mail.lives, pack_frame({"is": "left"}))
        self.leaving.depart(process)
        self._answer_ended()

    def request_save(self, to: Connection, ticket: int, *, then_stops: bool) -> None:
        """Take an observer's request to save; with `then_stops`, as a preemption notice."""
        if self.meeting is None:
            self.mail.answer([Reply(to, ticket, SaveState("not joined"))])
        else:
            self.leaving.request_save(to, ticket, then_stops=then_stops)

    def end_life(self, life: Life, reason: str) -> None:
        """Handle the end of a process's lifetime connection."""
        self.mail.forget(life)
        if self.meeting is None:
            self.answer_joining(self.joining.depart(self.now(), life.process))
        else:
            self.depart(life.process, Departure(with_guess(reason), "lost", why=reason))
            self._answer_reporters(self._reporting.lose(life.process))
        if not self.mail.lives:
            self._host_agents.release()

    def life_of(self, process: int, incarnation: str) -> Life | None:
        """Return the life of a process of this job, if the incarnation is right."""
        return self.mail.lives.get(process) if self.joining.knows(process, incarnation) else None

    def lose_service(self, name: str, words: str) -> None:
        """Record the loss of a service."""
        if self.meeting is None:
            reason = f"{name} is lost ({words})"
            self.answer_joining(self.joining.abandon(self.now(), reason))
            return
        self.mail.answer(self.meeting.lose_service(self.now(), name, words))
        departure = Departure(words, "lost", why=words)
        self.mail.push_gone(None, name, departure, self._shown_programs)
        self._endings.lose()
        self._answer_ended()

    def keep(
        self, connection: Connection, process: int, incarnation: str
    ) -> tuple[str, Collection[int]] | None:
        """Return the host_id and the processes of the host agent that a host's leader started."""
        if self.meeting is None or not self.joining.knows(process, incarnation):
            return None
        host_id = self.joining.host_id(process)
        kept = self.joining.shared_hosts.get(host_id, {})
        if min(kept, default=None) != process:
            return None
        self._host_agents.add(host_id, connection)
        return host_id, kept

    def take_states(
        self, of: Collection[int], stopped: Collection[int], ended: Collection[int]
    ) -> None:
        """Take a host agent's report: which of its processes are stopped or have ended."""
        now = self.now()
        self._liveness.states(self._running.read(now), of, stopped=stopped, ended=ended)
        if self.meeting is not None:
            self.meeting.stop(now, of, stopped)

    def end_host_agent(self, host_id: str, connection: Connection) -> None:
        """Handle the end of a host agent: the states that it reported are no longer known."""
        if self._host_agents.discard(host_id, connection):
            self.on_news(keeper_gone=host_id, at_s=self.now())
            self.take_states(self.joining.shared_hosts[host_id], (), ())

    def answer_members(self, to: Connection, ticket: int) -> None:
        """Answer a query for the members."""
        meeting = self.meeting
        rows = meeting.members(self.now()) if meeting else self.joining.members()
        known = MembersKnown(rows, self.service_rows(), self._programs.differences())
        self.mail.answer([Reply(to, ticket, known)])

    def ask_report(
        self,
        process: int,
        sharing: Collection[int],
        to: Connection,
        ticket: int,
        *,
        waits: bool,
    ) -> None:
        """Answer whether a process that ends is to report the failure of the job.

        Args:
          sharing: the processes that may have the same failure.
          waits: see `Reporting.ask`.
        """
        meeting = self.meeting
        if meeting is None:
            return
        gone = meeting.gone
        living = [
            member
            for member in self.mail.lives
            if member in sharing
            and gone.get(member) not in ("left", "lost")
            and meeting.departure(member).how != "exited"  # a process that exits never asks
            and not self._liveness.is_quiet(member)
        ]
        before = self._reporting.expected
        self._answer_reporters(
            self._reporting.ask(
                now=self.now(), process=process, to=to, ticket=ticket, living=living, waits=waits
            )
        )
        expected = self._reporting.expected
        if expected not in (None, before, process):
            self.mail.push_to(expected, pack_frame({"is": "reporter"}))

    def confirm_reporter(self, process: int) -> None:
        """Take the answer of a process that is to report the failure of the job: it is there."""
        self._answer_reporters(self._reporting.confirm(process))

    def _answer_reporters(self, answers: Iterable[Named[Connection]]) -> None:
        for to, ticket, reports in answers:
            answer = ReportAsked(reports, [])
            if reports and self.meeting is not None:
                states = self.meeting.states(self.now())
                answer = answer._replace(states=states, programs=self._known_programs())
            self.mail.answer([Reply(to, ticket, answer)])

    def _forget_reporter(self) -> None:
        """Let the next failure have a report: the program goes on without the lost processes."""
        self._answer_reporters(self._reporting.tick(math.inf))
        self._reporting = Reporting()

    def request_stacks(self, processes: Iterable[int], to: Connection, ticket: int) -> None:
        """Request stacks of processes; send them to `to` when they have arrived."""
        if self.meeting is None:
            self.mail.answer([Reply(to, ticket, StacksHeard({}))])
        else:
            now, limit_s = self.now(), _STACKS_S
            self.mail.answer(self.meeting.request_stacks(now, processes, limit_s, to, ticket))
            self.mail.request_stacks(self.meeting.take_stack_requests())

    def take_stacks(self, process: int, ticket: int, text: str, beat: Beat) -> None:
        """Take the stacks of a process."""
        self.beat(process, beat)
        if self.meeting is not None:
            self._answer_waits(self.meeting.take_stacks(self.now(), process, ticket, text))

    def on_time(self, now: float) -> None:
        """End waits and requests that are past their deadline."""
        self.answer_joining(self.joining.tick(now))
        if self.meeting is not None:
            self._answer_waits(self.meeting.tick(now))
            self.mail.request_stacks(self.meeting.take_stack_requests())
            self._answer_ended()
            self._answer_reporters(self._reporting.tick(now))

    def _answer_waits(self, replies: Sequence[Reply[Connection]]) -> None:
        """Send answers; at a deadline keep the differences in compiled programs for the report.

        The late processes may only be behind; those that waited are not, once they have all sent a
        heartbeat.
        """
        for late in {id(reply.answer): reply.answer for reply in replies}.values():
            if isinstance(late, TooLate) and late.timeout_s >= 2 * self._limits.heartbeat_s:
                arrived = {*range(self.num_processes)}.difference(late.waiting.missing)
                self._programs_at_wait = self._programs.differences(still=arrived)
        self.mail.answer(replies)

    def is_silence_due(self, now: float) -> bool:
        """Return whether any silence is due to be judged."""
        return self._liveness.next_deadline() <= self._running.read(now)

    def judge_silence(self, now: float) -> None:
        """Report silent processes, drop lost ones. Bytes received by now must have been read."""
        meeting = self.meeting
        if meeting is None:
            return
        running_s = self._running.read(now)
        for process, state, reason, silent_s in self._liveness.tick(running_s):
            seen = self._stalls.seen(process)
            if state == "lost":
                where = ""
                if silent_s and seen is not None and seen.site:
                    where = f", {seen_words(seen)}"
                self._dismiss(process, Departure(reason + where, "lost", why=reason + where))
                continue
            meeting.mark_silent(process, now - silent_s)
            lives = (p for p in self.mail.lives if not self._liveness.is_quiet(p))
            awake = [p for p in lives if not meeting.has_gone(p)]
            lowest = min(awake, default=process)
            targets = meeting.waiters_for(process) | {lowest}
            header = {"is": "silent", "process": process}
            self.mail.push(targets - {process}, pack_frame(header, reason.encode()))
            self._locate(running_s, process, awake)

    def _dismiss(self, process: int, departure: Departure) -> None:
        """Notify a lost process that is still connected of its loss, for when it wakes."""
        self.on_news(dismissed=process)
        self.depart(process, departure)
        life = self.mail.lives.get(process)
        if life is not None:
            self.mail.forget(life)
            header = {**departure_header(departure), "is": "lost"}
            del header["state"]
            self.mail.send_last(life.connection, pack_frame(header, departure.words.encode()))


def _welcomes(
    joining: Joining[Connection], more: Mapping[str, Any]
) -> Iterator[tuple[Collection[int], bytes]]:
    """Yield the welcomes, each with its processes. Only the leader of a host needs the pids of its
    processes."""
    header: dict[str, Any] = {"is": "welcome", "jax_service": joining.jax_service, **more}
    if joining.is_on_one_host:
        header["one_host"] = True
    hosts = json.dumps(host_runs(joining.hosts)).encode()
    if len(hosts) > _LARGE_BYTES:
        header, hosts = {**header, "packed": True}, zlib.compress(hosts)
    alone = {*range(joining.num_processes)}
    for pids in joining.shared_hosts.values():
        leader = min(pids)
        alone.difference_update(pids)
        others = [process for process in pids if process != leader]
        yield (leader,), pack_frame({**header, "leader": leader, "keeps": pids}, hosts)
        yield others, pack_frame({**header, "leader": leader}, hosts)
    for process in alone:
        yield (process,), pack_frame({**header, "leader": process}, hosts)


# ---- Frames from the coordinator to the processes of one job.


# All processes are notified of this many losses until survivors meet; more are one disaster, in
# which notifying all of all would be a flood. Survivors learn of each when they meet.
_MOST_GONE = 64


class Life:
    """A process that sent HELLO: the connection whose end is its end, and those of its lanes."""

    def __init__(self, process: int, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.lanes: set[Connection] = set()
        # By connection: a lane and the callback of its arrival, held until earlier messages arrive.
        self.held: dict[Connection, tuple[str, Callable[[], None]]] = {}

    def release(self, lane: str) -> list[Callable[[], None]]:
        """Return the callbacks for the held arrivals of a lane."""
        released = [connection for connection, (held, _) in self.held.items() if held == lane]
        return [self.held.pop(connection)[1] for connection in released]


class JobMail:
    """The connections of a job's processes: frames to one process, and to all living ones."""

    def __init__(self, connections: Connections, is_member: Callable[[int], bool]) -> None:
        """`is_member`: whether all have joined and this process is not gone."""
        self.lives: dict[int, Life] = {}
        self._connections = connections
        self._is_member = is_member
        self._reported_gone = 0
        self.on_survivors: Callable[[], None] = lambda: None  # they have met

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send one frame."""
        self._connections.send(connection, frame)

    def send_all(self, connections: Iterable[Connection], frame: bytes) -> None:
        """Send one frame to each of these."""
        for connection in connections:
            self._connections.send(connection, frame)

    def send_last(self, connection: Connection, frame: bytes) -> None:
        """Send a frame, then close the connection."""
        self._connections.send(connection, frame, then_close=True)

    def push(self, processes: Iterable[int], frame: bytes) -> None:
        """Send a frame to the living ones of these processes."""
        lives = (self.lives.get(process) for process in processes if self._is_member(process))
        self.send_all([life.connection for life in lives if life is not None], frame)

    def push_to(self, process: int | None, frame: bytes) -> None:
        """Send a frame to a process that is connected, and may have reported a failure."""
        life = self.lives.get(-1 if process is None else process)
        if life is not None:
            self.send(life.connection, frame)

    def push_gone(
        self,
        process: int | None,
        name: str,
        departure: Departure,
        more: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Notify all living processes of a loss. `more` returns further fields of the header."""
        self._reported_gone += 1
        if self._reported_gone <= _MOST_GONE or process is None:
            header = {"is": "gone", "process": process, "name": name}
            header |= {**departure_header(departure), **more()}
            self.push(self.lives, pack_frame(header, departure.words.encode(errors="replace")))

    def request_stacks(self, requests: Iterable[tuple[int, int]]) -> None:
        """Request the stacks of (ticket, process)."""
        for ticket, process in requests:
            life = self.lives.get(process)
            if life is not None and not life.connection.is_blocked:  # it would not answer
                self.push((process,), pack_frame({"is": "stacks", "ticket": ticket}))

    def answer(self, replies: Iterable[Reply[Connection]]) -> None:
        """Send the answers; a frame for many is packed once, and so is each body."""
        bodies: dict[int, bytes] = {}
        packed: tuple[Answer | None, int] = None, 0
        frame = b""
        for to, ticket, answer in replies:
            if packed[0] is not answer or packed[1] != ticket:
                body = bodies.get(id(answer))
                if body is None:
                    body = bodies[id(answer)] = _body_of(answer)
                    if isinstance(answer, SurvivorsMet):
                        self._reported_gone = 0
                        self.on_survivors()
                packed, frame = (answer, ticket), pack_answer(ticket, answer.kind, body)
            self._connections.send(to, frame)

    def forget(self, life: Life) -> None:
        """Stop sending to a process, and close the connections of its lanes."""
        self.lives.pop(life.process, None)
        for lane in life.lanes:
            self._connections.close(lane)


def _body_of(answer: Answer) -> bytes:
    if isinstance(answer, AllMet):
        return join_payloads(list(answer.payloads.values()))
    return json.dumps(answer.facts).encode()


# ---- Preemption notices of one job, passed between its processes and the rules of stopping.


class Leaving:
    """The rounds in which the processes of a job agree on the step after which they stop, and
    requests to save at an agreed step."""

    def __init__(self, num_processes: int, mail: JobMail) -> None:
        self.rounds = PreemptionRounds(num_processes)
        self._requests: SaveRequests[Connection] = SaveRequests(
            num_processes, lambda: self.rounds.is_open
        )
        self.on_change: Callable[[], None] = lambda: None  # `rounds` has changed
        self._mail = mail

    def give_notice(self, process: int, given: ReceivedNotice) -> None:
        """Push a preemption notice of one process to all."""
        number = self.rounds.give()
        header = {"is": "notice", "number": number, "process": process, **notice_header(given)}
        self._mail.push(self._mail.lives, pack_frame(header))
        self._send(self._requests.overtake())
        self.on_change()

    def request_save(self, to: Connection, ticket: int, *, then_stops: bool) -> None:
        """See `ServedJob.request_save`."""
        self._send(self._requests.request(to, ticket))
        if then_stops and self._mail.lives:
            given = ReceivedNotice("--then-stop", "shoal save")
            self.give_notice(min(self._mail.lives), given)

    def take_save_report(self, process: int, report: SaveReport) -> None:
        """Take a process's answer to a request to save, or the end of that save."""
        self._send(self._requests.receive(process, report))

    def _send(self, sent: Sent[Connection]) -> None:
        for message in sent:
            if isinstance(message, SaveOrder):
                self._mail.push(self._mail.lives, pack_frame(save_order_header(message)))
            else:
                self._mail.answer([Reply(*message)])

    def take_stop_report(self, process: int, report: StopReport) -> None:
        """Take a process's answer about stopping, or its report of a save."""
        self._push_stop(self.rounds.receive(process, report))
        self.on_change()

    def depart(self, process: int) -> None:
        """Record that a process is gone and is not waited for."""
        self._push_stop(self.rounds.depart(process))
        self._send(self._requests.depart(process))

    def answer_awaited(self, to: Connection, ticket: int) -> None:
        """Answer a query for the processes that have not answered the open notice or request."""
        awaited = self.rounds.awaited or self._requests.awaited
        self._mail.answer([Reply(to, ticket, StepsAwaited(awaited))])

    def _push_stop(self, settled: StopAgreement | None) -> None:
        if settled is not None:
            header = {"is": "stop", "round": settled.round}
            if settled.save_step:
                header["save_step"] = settled.save_step
            self._mail.push(self._mail.lives, pack_frame(header, step_text(settled.step)))


# ---- The host agents of a job's hosts that are connected.


class HostAgentConnections:
    """At most one for each host: the newest."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._of_hosts: dict[str, Connection] = {}

    def add(self, host_id: str, connection: Connection) -> None:
        """Add a host agent's connection, perhaps in place of one that has fallen silent."""
        before = self._of_hosts.get(host_id)
        if before is not None:
            self._connections.close(before)  # its end is about to be read, or it is cut off
        self._of_hosts[host_id] = connection

    def discard(self, host_id: str, connection: Connection) -> bool:
        """Remove an ended connection; return whether it was that of its host's agent."""
        is_known = self._of_hosts.get(host_id) is connection
        if is_known:
            del self._of_hosts[host_id]
        return is_known

    def release(self) -> None:
        """Close all connections, which tells the host agents that the job is over."""
        for connection in self._of_hosts.values():
            self._connections.close(connection)
        self._of_hosts.clear()
