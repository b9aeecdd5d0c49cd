"""The launcher of node 0: it runs the services, and the launchers of all nodes meet at it."""

from __future__ import annotations

import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.errors import InitializeError
from shoal.launch.conclusion import Conclusion, Loss, conclude
from shoal.launch.environment import Addresses, HostShare, JobStart
from shoal.launch.launchers import JobExit, Judge, PassedSignal, facts_of
from shoal.launch.loop import Console
from shoal.launch.nodes.joining import (
    Assembly,
    NodeCard,
    Refused,
    missing_words,
    open_ports,
    strange_address,
    stranger_words,
)
from shoal.launch.nodes.messages import (
    MAX_BODY_BYTES,
    NodeExit,
    attempt_token,
    card_of,
    end_of,
    pack_news,
    pack_refused,
    pack_signal,
    pack_start,
    pack_verdict,
    process_of,
    signal_of,
)
from shoal.launch.nodes.peer import Peer
from shoal.launch.order import JobOrder, NodesOrder
from shoal.launch.services import EarlyServices, ServiceProcesses, late_words
from shoal.runtime.startup.job_token import LACKING_S
from shoal.runtime.system.progress_file import StepProgress, reached_together
from shoal.runtime.wire.frames import (
    Frame,
    FrameError,
    address_text,
    number_field,
    pack_frame,
    text_field,
)
from shoal.runtime.wire.server_sockets import Connection, Connections

_FAILURE = pack_frame({"is": "failure"})
_SERVICES_S = 60.0  # for the services to listen
_PARTING_S = 2.0  # for the other launchers to take the verdict


class Leader(Peer):
    """The launcher of node 0 among those of all nodes."""

    def __init__(
        self,
        order: JobOrder,
        nodes: NodesOrder,
        own: NodeCard,
        console: Console,
        judge: Judge,
    ) -> None:
        super().__init__(nodes, own, console, judge)
        self._order, self._attempt = order, own.attempt
        self._rules = Assembly(own)
        self._joined: dict[int, Connection] = {}
        self._refused = Refused()
        self._node_of: list[int] = []  # each process
        self._has_spread_failure = False
        self._spread_signals: set[signal.Signals] = set()
        self._early = EarlyServices()
        self._services_by_s = math.inf
        self._is_late = False
        self._parts_by_s = math.inf
        self._losses: list[Loss] = []
        self._ends: dict[int, NodeExit] = {}  # by node
        self._seed = secrets.token_hex(16)  # of the attempt's token, which is never sent
        self._token = attempt_token(nodes.token.secret, self._seed)
        self._turned_away: set[int] = set()  # nodes, if there is no token

    # Before the processes.

    def open(self, early: EarlyServices) -> None:
        """Listen for the other launchers; the services listen once all have joined."""
        self._early = early
        try:
            server = open_ports(self._nodes.host, self._nodes.port)
        except InitializeError as error:
            self.problem = str(error)
            return
        if not (self._nodes.token.secret or self._nodes.token.lack):
            warning = f"any program that reaches {self._address} can join this job, and end it"
            self._lines.append(f"SHOAL_INSECURE=1: {warning}")
        self._listen(Connections([server], self, time.monotonic))

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Handle the first frame of a connection. See `server_sockets.Listener`."""
        if self._connections is None:
            return
        if self._nodes.token.lack:
            self._turn_away(connection, frame)
            return
        introduced = self._connections.introduced(connection, frame, self._nodes.token.secret)
        if introduced is None:
            return
        frame, is_proved = introduced
        if text_field(frame.header, "do") != "node":
            raise FrameError("not a launcher")
        card = card_of(frame.header)
        if not is_proved:
            self._refuse_stranger(connection, card)
        elif self._rules.is_complete or self.problem:
            self._send(connection, pack_frame({"is": "later"}), then_close=True)
        elif refusal := self._rules.join(card):
            self._send(connection, pack_refused(refusal), then_close=True)
            if self._own.attempt:  # this job has run: a launcher of another one must not end it
                self._lines += self._refused.note(refusal)
            else:
                self._abandon(refusal)
        else:
            self._welcome(connection, card)

    def on_end(self, connection: Connection, reason: str) -> None:
        """The end of a connection that never joined has no meaning."""

    def _refuse_stranger(self, connection: Connection, card: NodeCard) -> None:
        self._lines += self._refused.note(stranger_words(self._own, card))
        # A stranger need not know where the token of this host is from.
        reason = stranger_words(self._own._replace(token=""), card)
        self._send(connection, pack_refused(reason), then_close=True)

    def _turn_away(self, connection: Connection, frame: Frame) -> None:
        """Refuse a node of a job that has no token; give up once all nodes know."""
        reason = self._nodes.token.refusal(self._address)
        self._turned_away.add(card_of(frame.header).node)
        self._send(connection, pack_refused(reason), then_close=True)
        if len(self._turned_away) >= self._nodes.nodes - 1:
            self._abandon(reason)

    def _welcome(self, connection: Connection, card: NodeCard) -> None:
        if self._connections is None:
            return
        self._joined[card.node] = connection
        self._attempt = max(self._attempt, card.attempt)
        self._connections.trust(connection, self._caller(card.node), max_body_bytes=MAX_BODY_BYTES)
        self._expect_beats(card.node)
        own = {"host": self._own.host, "processes": self._own.processes}
        heard = {"is": "heard", **own, **self._limits.words}
        self._send(connection, pack_frame(heard))
        if self._rules.is_complete:
            self._start_services()
        elif self._has_warned:
            left = ", ".join(map(str, self._rules.missing))
            self._lines.append(f"{card.name} has joined; still missing: {left}")

    def _caller(self, node: int) -> NodeCaller:
        verbs: Mapping[str, Callable[[Frame], None]] = {
            "beat": lambda frame: self._beat(node, frame),
            "failure": lambda _: self._spread_failure(node),
            "signal": lambda frame: self._take_signal(node, signal_of(frame)),
            "done": lambda frame: self._note_done(node, frame.body),
        }
        return NodeCaller(verbs, lambda reason: self._on_closed(node, reason))

    def _start_services(self) -> None:
        env = {**os.environ, "SHOAL_TOKEN": self._token}
        log_dir = self._order.attempt_dir(self._attempt)
        try:
            os.makedirs(log_dir, exist_ok=True)
            self.services = ServiceProcesses(
                self._rules.total,
                env,
                log_dir,
                self._console.loop,
                early=self._early,
                host=self._nodes.host,
                first_port=self._nodes.port + 1,
                on_line=self._pass_on,
            )
        except OSError as error:
            self._abandon(f"the services cannot start: {error}")
            return
        self.news = self.services.news
        self._services_by_s = time.monotonic() + _SERVICES_S

    def _begin(self, addresses: Sequence[str]) -> None:
        """Let all nodes start their processes."""
        master = address_text(self._nodes.host, self._nodes.port + 3)
        where = Addresses.of(addresses, master)
        self._node_of = self._rules.node_of_each()
        for node in range(self._nodes.nodes):
            mine = self._rules.processes_of(node)
            share = HostShare(node, mine.start, len(mine))
            start = JobStart(share, self._rules.total, where, self._token, self._attempt)
            if node == 0:
                self._start = start
            else:
                self._send_to(node, pack_start(start, self._seed))

    def _abandon(self, reason: str) -> None:
        """Give up: no job starts."""
        self.problem = self.problem or reason

    # While they run.

    def _pass_on(self, line: Mapping[str, Any]) -> None:
        """Pass a line of news on: to the node of the process that it is about, or to all."""
        process = process_of(line)
        if "notice" in line or "service" in line:
            self._broadcast(pack_news(line))
        elif process is not None and process < len(self._node_of):
            gone = self.news.gone.get(process)
            self._send_to(self._node_of[process], pack_news(line, gone))

    def _advance(self, now: float) -> None:
        """Let the job begin, once the services listen."""
        if self.services is not None and self._start is None and self.services.addresses:
            self._begin(self.services.addresses)

    def _check_time(self, now: float) -> None:
        if self._start is not None or self.problem:
            return
        if now >= self._services_by_s:
            self._is_late = True
            self._abandon(late_words(_SERVICES_S))
        if self._rules.is_complete:
            return
        waited_s = now - self._began_s
        if self._nodes.token.lack and waited_s >= LACKING_S:
            self._abandon(self._nodes.token.refusal(self._address))
            return
        message = missing_words(self._rules.missing, self._nodes.nodes, self._address, waited_s)
        if waited_s >= self._nodes.timeout_s:
            notes = [*self._refused.all, strange_address(self._nodes.host)]
            self._abandon("\n".join([message, *filter(None, notes)]))
        elif waited_s >= self._nodes.warn_after_s and not self._has_warned:
            self._has_warned = True
            note = strange_address(self._nodes.host)
            self._lines += [message, note] if note else [message]

    def _still_running(self) -> list[str]:
        names = [self._rules.card(node).name for node in self._joined if node not in self._ends]
        ended = f"all processes of node 0 ({self._own.host}) have ended; those of "
        return [f"{ended}{', '.join(sorted(names))} still run"] if names else []

    def _beat(self, node: int, frame: Frame) -> None:
        """Take a heartbeat, and answer it with the time."""
        now = time.monotonic()
        self._note_beat(node, now)
        sent_s = number_field(frame.header, "at")
        self._send_to(node, pack_frame({"is": "beat", "sent": sent_s, "at": now}))

    def _spread_failure(self, node: int) -> None:
        """Let all nodes begin their failure grace, at the first failure of any node: of `node`."""
        if not self._has_spread_failure:
            self._has_spread_failure = True
            self.has_failure |= node != 0
            self._broadcast(_FAILURE, but=node)

    def _take_signal(self, node: int, number: signal.Signals) -> None:
        """Take a signal of a node, and pass it on."""
        card = self._rules.card(node)
        self._signals.append(PassedSignal(number, card.name))
        self._spread_signal(node, number)

    def _spread_signal(self, node: int, number: signal.Signals) -> None:
        """Pass a signal on, once: all launchers may get the same one from their scheduler."""
        if number not in self._spread_signals:
            self._spread_signals.add(number)
            self._broadcast(pack_signal(number, self._rules.card(node).name), but=node)

    def _note_done(self, node: int, body: bytes) -> None:
        """Take how the processes of a node ended, and why, if none of them was the cause."""
        card = self._rules.card(node)
        end = self._ends[node] = end_of(body, card.host)
        if end.problem:
            self._abandon(f"{card.name}: {end.problem}")

    def _lose(self, node: int, reason: str, last_seen_s: float) -> None:
        connection = self._joined.pop(node, None)
        self._living.forget(node)
        if connection is not None and self._connections is not None:
            self._connections.close(connection)
        if self._parts_by_s < math.inf:
            return  # the job is over
        card = self._rules.card(node)
        if not self._rules.is_complete:
            self._rules.leave(node)
            self._lines.append(f"{card.name} has left before the job began: {reason}")
            return
        if node in self._ends:
            self._lines.append(f"{card.name} has left after its processes had ended: {reason}")
            return
        processes = self._rules.processes_of(node)
        self._losses.append(Loss(card.name, reason, last_seen_s, tuple(processes)))
        if self._start is None:
            self._abandon(f"{card.name} was lost before the job began: {reason}")
        self._spread_failure(node)

    def report_failure(self) -> None:
        """Let the other nodes begin their failure grace."""
        self._spread_failure(0)

    def report_signal(self, number: signal.Signals) -> None:
        """Pass a signal on to the other nodes."""
        self._spread_signal(0, number)

    # The end.

    @property
    def is_waiting(self) -> bool:
        """Whether processes of other nodes may still run, or launchers lack the verdict."""
        if self._parts_by_s < math.inf:
            return bool(self._joined) and time.monotonic() < self._parts_by_s
        return self._start is not None and any(node not in self._ends for node in self._joined)

    def finish(self, end: JobExit) -> None:
        """Report that all processes of this host have ended."""
        host = self._own.host
        self._name_others_later()
        exits = [process_exit._replace(host=host) for process_exit in end.exits]
        self._ends[0] = NodeExit(exits, remaining=end.remaining)

    def conclude(self, end: JobExit) -> Conclusion:
        """Return how the whole job ended, and let the other launchers know."""
        conclusion = self._judge(self._conclude(end), self._progress(end), self._attempt)
        self._names_others_s = math.inf
        self._broadcast(pack_verdict(conclusion))
        self._parts_by_s = time.monotonic() + _PARTING_S
        return conclusion

    def _conclude(self, end: JobExit) -> Conclusion:
        remaining = [
            f"{node_end.remaining} of {self._rules.card(node).name}"
            for node, node_end in sorted(self._ends.items())
            if node_end.remaining
        ]
        end = end._replace(
            is_of_services=end.is_of_services or self._is_late,
            progress=self._progress(end),
            remaining="; ".join(remaining),
        )
        exits = sorted(process_exit for node in self._ends.values() for process_exit in node.exits)
        total = self._rules.total if self._start is not None else -1
        return conclude(facts_of(end, exits, self.news, total, self._losses))

    def _progress(self, end: JobExit) -> StepProgress:
        return reached_together([end.progress, *(node.progress for node in self._ends.values())])

    def _broadcast(self, data: bytes, *, but: int = 0) -> None:
        for node in list(self._joined):
            if node != but:
                self._send_to(node, data)

    def _send_to(self, node: int, data: bytes) -> None:
        if node in self._joined:
            self._send(self._joined[node], data)


# ---- The connection of another node's launcher, at that of node 0.


class NodeCaller:
    """Hands each frame to the function of its verb. See `server_sockets.Listener`."""

    def __init__(
        self, verbs: Mapping[str, Callable[[Frame], None]], ended: Callable[[str], None]
    ) -> None:
        """`ended`: called with the reason when the connection ends."""
        self._verbs, self._ended = verbs, ended

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame of a launcher that has joined."""
        verb = text_field(frame.header, "do")
        if verb not in self._verbs:
            raise FrameError(f"{verb[:40]!r} of a launcher")
        self._verbs[verb](frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """Handle the end of its connection."""
        self._ended(reason)
