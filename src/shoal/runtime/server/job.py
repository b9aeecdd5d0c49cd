"""One job at a meeting place: its joining, its meeting, its liveness and its connections.

It connects the sockets to the rules, and notifies all processes of losses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from shoal.runtime.rules.gathering import Answer, Reply
from shoal.runtime.rules.joining import Hello, Joining, JoinReply
from shoal.runtime.rules.liveness import Limits, Liveness, RunningClock
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.messages import Beat, notice_header, step_text
from shoal.runtime.rules.stopping import ReceivedNotice, Rounds, StopAgreement, StopReport
from shoal.runtime.rules.trail_marks import LatestMarks, TrailMarks
from shoal.runtime.wire.frames import join_payloads, pack_answer, pack_frame
from shoal.runtime.wire.server_sockets import Connection, Connections

_STACKS_GRACE_S = 0.5  # how long late processes may take to send their stacks
_STACKS_S = 2.0  # the same, for a query
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
        self.lives: dict[int, Life] = {}
        self.now = clock
        self._connections = connections
        self._limits = limits
        self._liveness: Liveness[int] = Liveness(limits)
        self._running = running  # the clock by which silence is counted
        self._keepers: dict[str, Connection] = {}
        self._reported_gone = 0
        self._marks = LatestMarks()
        self.near = ""  # see `unix_socket`
        self.service_rows: Callable[[], list[list[str]]] = list
        self.rounds = Rounds(joining.num_processes)
        self.on_leaving: Callable[[], None] = lambda: None  # `rounds` has changed
        self.on_news: Callable[..., None] = lambda **_news: None  # see `meeting_place.MeetingPlace`

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.joining.num_processes

    @property
    def next_deadline(self) -> float:
        """The time at which `on_time` must be called, except for silence."""
        return self.meeting.next_deadline if self.meeting else self.joining.next_deadline

    def is_over(self, now: float) -> bool:
        """Return whether no process is left in it."""
        return not self.lives and (self.meeting is not None or self.joining.is_finished(now))

    def ended_for(self, process: int, now: float) -> bool:
        """Return whether a HELLO of this process belongs to another job than this one."""
        left = self.meeting is not None and self.meeting.has_gone(process)
        return left or self.joining.was_refused(process) or self.joining.is_finished(now)

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send one frame."""
        self._connections.send(connection, frame)

    # ---- joining

    def hello(self, connection: Connection, hello: Hello) -> Life | None:
        """Take a HELLO; return the process's life, or None if it is refused."""
        replies = self.joining.hello(self.now(), hello, connection)
        life = None
        if not any(reply.to is connection and reply.refusal for reply in replies):
            life = self.lives[hello.process] = Life(hello.process, connection)
            self.on_news(joined=hello.process)
        self.answer_joining(replies)
        return life

    def answer_joining(self, replies: list[JoinReply[Connection]]) -> None:
        """Send welcome or refusal to joining processes."""
        if self.joining.is_complete and self.meeting is None:
            self._begin()
        refused: set[Connection] = set()
        is_welcome = False
        for to, refusal, missing in replies:
            if refusal is None:
                is_welcome = True  # and so are all
                continue
            refused.add(to)
            words = refusal.encode(errors="replace")  # JSON may contain half a surrogate pair
            frame = pack_frame({"is": "refused", "missing": missing}, words)
            self._connections.send(to, frame, then_close=True)
        if refused:
            lives = self.lives.items()
            self.lives = {p: life for p, life in lives if life.connection not in refused}
        elif is_welcome:
            for process, welcome in enumerate(self._welcomes()):
                self._connections.send(self.lives[process].connection, welcome)

    def _begin(self) -> None:
        now, joining = self.now(), self.joining
        self.meeting = Meeting(joining.hosts, now, pids=joining.pids, stack_grace_s=_STACKS_GRACE_S)
        for process in range(self.num_processes):
            self._liveness.watch(self._running.read(now), process)

    def _welcomes(self) -> Iterator[bytes]:
        """Yield the welcome of each process, in order."""
        leads = {min(pids): pids for pids in self.joining.shared_hosts().values()}
        leader_of = {process: leader for leader, pids in leads.items() for process in pids}
        header = {
            "is": "welcome",
            "jax_service": self.joining.jax_service,
            "near": self.near,
            **self._limits.words,
        }
        hosts = json.dumps(self.joining.hosts).encode()
        for process in range(self.num_processes):
            welcome: dict[str, Any] = {**header, "leader": leader_of.get(process, process)}
            if process in leads:
                welcome["keeps"] = leads[process]
            yield pack_frame(welcome, hosts)

    # ---- members

    def beat(self, process: int, beat: Beat) -> None:
        """Take a sign of life of a process."""
        if self.meeting is not None:
            now = self.now()
            self.meeting.beat(now, process, beat)
            if self._liveness.beat(self._running.read(now), process):
                self.meeting.mark_silent(process, None)

    def hear_trails(self, process: int, trails: Iterable[TrailMarks]) -> None:
        """Take the trails of a process; notify all processes of a difference."""
        for marks in trails:
            found = self._marks.hear(process, marks)
            if found is not None:
                header = {"is": "trail", "group": found.group, "lane": found.lane}
                frame = pack_frame({**header, "base": found.base}, json.dumps(found.rows).encode())
                self._push(found.group or range(self.num_processes), frame)

    def depart(self, process: int, state: str, words: str) -> None:
        """Record that a process is "left", "failed" or "lost". Only the first report counts."""
        meeting = self.meeting
        if meeting is None or meeting.has_gone(process):
            return
        self._liveness.forget(process)
        self.on_news(gone=process, state=state, words=words, at_s=self.now())
        self.answer(meeting.depart(self.now(), process, state, words))
        if state != "left":
            name = f"process {process} ({self.joining.hosts[process]})"
            self.push_gone(process, name, state, meeting.departure_reason(process))
        self._push_stop(self.rounds.depart(process))

    def end_life(self, life: Life, reason: str) -> None:
        """Handle the end of a process's lifetime connection."""
        self.lives.pop(life.process, None)
        for lane in life.lanes:
            self._connections.close(lane)
        if self.meeting is None:
            self.answer_joining(self.joining.depart(self.now(), life.process))
        else:
            self.depart(life.process, "lost", reason)
        if not self.lives:
            self._release_keepers()

    def life_of(self, process: int, incarnation: str) -> Life | None:
        """Return the life of a process of this job, if the incarnation is right."""
        return self.lives.get(process) if self.joining.knows(process, incarnation) else None

    def push_gone(self, process: int | None, name: str, state: str, words: str) -> None:
        """Notify all living processes of a loss."""
        if self.meeting is None:
            return
        self._reported_gone += 1
        if self._reported_gone <= _MOST_GONE or process is None:
            header = {"is": "gone", "process": process, "name": name, "state": state}
            self._push(self.lives, pack_frame(header, words.encode(errors="replace")))

    def _push(self, processes: Iterable[int], frame: bytes) -> None:
        meeting = self.meeting
        for process in processes:
            life = self.lives.get(process)
            if life is not None and meeting is not None and not meeting.has_gone(process):
                self._connections.send(life.connection, frame)

    def lose_service(self, name: str, words: str) -> None:
        """Record the loss of a service."""
        if self.meeting is None:
            reason = f"{name} is lost ({words})"
            self.answer_joining(self.joining.abandon(self.now(), reason))
            return
        self.answer(self.meeting.lose_service(self.now(), name, words))
        self.push_gone(None, name, "lost", words)

    # ---- leaving

    def give_notice(self, process: int, given: ReceivedNotice) -> None:
        """Push a preemption notice of one process to all."""
        number = self.rounds.give()
        header = {"is": "notice", "number": number, "process": process, **notice_header(given)}
        self._push(self.lives, pack_frame(header))
        self.on_leaving()

    def hear_stop(self, process: int, report: StopReport) -> None:
        """Take a process's answer about stopping, or its report of a save."""
        self._push_stop(self.rounds.hear(process, report))
        self.on_leaving()

    def _push_stop(self, settled: StopAgreement | None) -> None:
        if settled is not None:
            header = {"is": "stop", "round": settled.round}
            self._push(self.lives, pack_frame(header, step_text(settled.step)))

    def answer_awaited(self, to: Connection, ticket: int) -> None:
        """Answer a query for the processes that have not answered the open notice."""
        self.answer([Reply(to, ticket, Answer("awaited", {"awaited": self.rounds.awaited}))])

    # ---- keepers

    def keep(
        self, connection: Connection, process: int, incarnation: str
    ) -> tuple[str, Collection[int]] | None:
        """Return the host_id and the processes of a keeper that the leader of a host started."""
        if self.meeting is None or not self.joining.knows(process, incarnation):
            return None
        host_id = self.joining.host_id(process)
        kept = self.joining.shared_hosts().get(host_id, {})
        if min(kept, default=None) != process:
            return None
        if (before := self._keepers.get(host_id)) is not None:
            self._connections.close(before)  # its end is about to be read, or it is cut off
        self._keepers[host_id] = connection
        return host_id, kept

    def hear_states(
        self, of: Collection[int], stopped: Collection[int], ended: Collection[int]
    ) -> None:
        """Take a keeper's report: its processes that are stopped or have ended."""
        now = self.now()
        self._liveness.states(self._running.read(now), of, stopped=stopped, ended=ended)
        if self.meeting is not None:
            self.meeting.stop(now, of, stopped)

    def _release_keepers(self) -> None:
        """Close the keepers' connections, which tells them that the job is over."""
        for connection in self._keepers.values():
            self._connections.close(connection)
        self._keepers.clear()

    def end_keeper(self, host_id: str, connection: Connection) -> None:
        """Handle the end of a keeper: what it reported is no longer known."""
        if self._keepers.get(host_id) is connection:
            del self._keepers[host_id]
            self.on_news(keeper_gone=host_id, at_s=self.now())
            self.hear_states(self.joining.shared_hosts()[host_id], (), ())

    # ---- queries

    def answer_members(self, to: Connection, ticket: int) -> None:
        """Answer a query for the members."""
        meeting = self.meeting
        rows = meeting.members(self.now()) if meeting else self.joining.members()
        facts = {"members": rows, "services": self.service_rows()}
        self.answer([Reply(to, ticket, Answer("members", facts))])

    def ask_stacks(self, processes: Iterable[int], to: Connection, ticket: int) -> None:
        """Request stacks of processes; send them to `to` when they have arrived."""
        if self.meeting is None:
            self.answer([Reply(to, ticket, Answer("stacks", {"stacks": {}}))])
        else:
            now, limit_s = self.now(), _STACKS_S
            self.answer(self.meeting.ask_stacks(now, processes, limit_s, to, ticket))
            self._send_stack_requests()

    def hear_stacks(self, process: int, ticket: int, text: str, beat: Beat) -> None:
        """Take the stacks of a process."""
        self.beat(process, beat)
        if self.meeting is not None:
            self.answer(self.meeting.hear_stacks(self.now(), process, ticket, text))

    # ---- time

    def on_time(self, now: float) -> None:
        """End waits and requests that are past their deadline."""
        self.answer_joining(self.joining.tick(now))
        if self.meeting is not None:
            self.answer(self.meeting.tick(now))
            self._send_stack_requests()

    def is_silence_due(self, now: float) -> bool:
        """Return whether any silence is due to be judged."""
        return self._liveness.next_deadline() <= self._running.read(now)

    def judge_silence(self, now: float) -> None:
        """Report silent processes, drop lost ones. Bytes received by now must have been read."""
        meeting = self.meeting
        if meeting is None:
            return
        for process, state, words, silent_s in self._liveness.tick(self._running.read(now)):
            if state == "lost":
                self._dismiss(process, words)
                continue
            meeting.mark_silent(process, now - silent_s)
            awake = (p for p in self.lives if not self._liveness.is_quiet(p))
            lowest = min((p for p in awake if not meeting.has_gone(p)), default=process)
            targets = meeting.waiters_for(process) | {lowest}
            header = {"is": "silent", "process": process}
            self._push(targets - {process}, pack_frame(header, words.encode()))

    def _dismiss(self, process: int, words: str) -> None:
        """Tell a lost process, whose connection stands, that it is lost, for when it wakes."""
        self.on_news(dismissed=process)
        self.depart(process, "lost", words)
        life = self.lives.pop(process, None)
        if life is not None:
            for lane in life.lanes:
                self._connections.close(lane)
            farewell = pack_frame({"is": "lost"}, words.encode())
            self._connections.send(life.connection, farewell, then_close=True)

    def answer(self, replies: Iterable[Reply[Connection]]) -> None:
        """Send the answers; the body of each is packed once for all."""
        bodies: dict[int, bytes] = {}
        for to, ticket, answer in replies:
            body = bodies.get(id(answer))
            if body is None:
                body = bodies[id(answer)] = _body_of(answer)
                if answer.kind == "live":
                    self._reported_gone = 0
            self._connections.send(to, pack_answer(ticket, answer.kind, body))

    def _send_stack_requests(self) -> None:
        if self.meeting is not None:
            for ticket, process in self.meeting.take_stack_requests():
                life = self.lives.get(process)
                if life is not None and not life.connection.is_blocked:  # it would not answer
                    self._push((process,), pack_frame({"is": "stacks", "ticket": ticket}))


def _body_of(answer: Answer) -> bytes:
    if answer.kind == "ok":
        return join_payloads(list(answer.payloads.values()))
    return json.dumps(answer.facts).encode()
