"""The launcher of any node but 0: it joins that of node 0, and starts and ends with it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time

from shoal.launch.conclusion import Conclusion, Loss, conclude
from shoal.launch.launchers import JobExit, Judge, PassedSignal, facts_of
from shoal.launch.loop import Console
from shoal.launch.news import News
from shoal.launch.nodes.joining import NodeCard
from shoal.launch.nodes.messages import (
    MAX_BODY_BYTES,
    first_card,
    pack_end,
    signal_of,
    start_of,
    verdict_of,
)
from shoal.launch.nodes.peer import Peer
from shoal.launch.order import NodesOrder
from shoal.launch.services import EarlyServices
from shoal.runtime.failures.shortening import printable
from shoal.runtime.rules.liveness import Limits
from shoal.runtime.startup.job_token import LACKING_S
from shoal.runtime.wire.connection import open_socket
from shoal.runtime.wire.frames import (
    Frame,
    FrameError,
    number_field,
    pack_frame,
    text_field,
    whole_field,
)
from shoal.runtime.wire.proof import CHALLENGE, Introduction
from shoal.runtime.wire.server_sockets import Connection, Connections

_AGAIN_S = 0.5  # until the next attempt, after an answer of an earlier job
_BETWEEN_S = 6.0  # node 0 does not listen meanwhile: it ends the rest of the earlier attempt


class Follower(Peer):
    """The launcher of a node, connected to that of node 0."""

    def __init__(self, nodes: NodesOrder, own: NodeCard, console: Console, judge: Judge) -> None:
        super().__init__(nodes, own, console, judge)
        self._connecting: Connecting | None = None
        self._connection: Connection | None = None
        self._answered_s = self._began_s
        self._has_joined = False
        self._connect_problem = ""  # with the connection; empty: there is no answer
        self._leader, self._leader_processes = "node 0", 0
        self._beat_at_s = math.inf
        self._least_trip_s = math.inf
        self._shift_s = 0.0  # from this clock to node 0's
        self._start_s = math.inf
        self._loss: Loss | None = None
        self._verdict: Conclusion | None = None
        self._introduction = Introduction(nodes.token.secret)
        self._is_proved = False

    # Joining.

    def open(self, early: EarlyServices) -> None:
        """Begin to connect to node 0, which starts the services."""
        self._listen(Connections([], self, time.monotonic))
        self._connect(0.0)

    def _connect(self, after_s: float) -> None:
        self._connecting = Connecting(self._nodes.host, self._nodes.port, after_s=after_s)
        self._console.loop.watch(self._connecting.fd, self._on_connected)

    def _on_connected(self) -> None:
        """Send the card of this node."""
        connecting, self._connecting = self._connecting, None
        if connecting is None:
            return
        self._console.loop.ignore(connecting.fd)
        connecting.close()
        if connecting.socket is not None and self._connections is not None:
            self._connection = self._connections.adopt(connecting.socket, self)
            self._connections.trust(self._connection, max_body_bytes=MAX_BODY_BYTES)
            self._introduction, self._is_proved = Introduction(self._nodes.token.secret), False
            self._tell(self._introduction.first_frame(first_card(self._own)))

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame of node 0. See `server_sockets.Listener`."""
        kind, now = text_field(frame.header, "is"), time.monotonic()
        if kind == CHALLENGE:
            self._tell(self._introduction.answer(frame))
            return
        if kind == "proof":
            self._introduction.check(frame)
            self._is_proved = True
            return
        if not (self._is_proved or kind in ("refused", "later")):
            raise FrameError(f"{kind[:40]!r} before a proof")
        self._answered_s = now
        self._note_beat(0, now)
        if kind == "heard":
            self._on_accepted(frame, now)
        elif kind == "later":
            self._connect_problem = "a job runs there, or has ended just now"
        elif kind == "refused":
            self.problem = printable(text_field(frame.header, "words"), keeps_lines=True)
        elif kind == "beat":
            self._take_time(frame, now)
        elif kind == "start":
            self._start, self._start_s = start_of(frame.header, self._nodes.token.secret), now
            self.news = News(self._start.total)
        elif kind == "news":
            self._take_news(frame)
        elif kind == "failure":
            self.has_failure = True
        elif kind == "signal":
            source = text_field(frame.header, "source")
            self._signals.append(PassedSignal(signal_of(frame), source))
        elif kind == "verdict":
            self._verdict = verdict_of(frame.body)
            if self._start is None:
                self.problem = "no job has begun"  # why is in the verdict
        else:
            raise FrameError(f"{kind[:40]!r} of node 0")

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._connection = None
        if not self._has_joined:
            if not self.problem:
                if not self._connect_problem:
                    self._connect_problem = f"what listens there is no launcher of shoal: {reason}"
                self._connect(_AGAIN_S)
            return
        self._on_closed(0, reason)

    def _on_accepted(self, frame: Frame, now: float) -> None:
        lost_after_s = frame.header.get("lost_after_s")
        lost_after_s = math.inf if lost_after_s is None else float(lost_after_s)
        limits = Limits(number_field(frame.header, "heartbeat_s"), lost_after_s, lost_after_s)
        self._leader = f"node 0 ({text_field(frame.header, 'host')})"
        self._leader_processes = whole_field(frame.header, "processes")
        self._live_by(limits)  # node 0's
        self._expect_beats(0)
        self._beat_at_s, self._has_joined = now, True

    def _take_time(self, frame: Frame, now: float) -> None:
        """Estimate node 0's clock from the fastest answer, assuming symmetric delays."""
        trip_s = now - number_field(frame.header, "sent")
        if 0 <= trip_s < self._least_trip_s:
            self._least_trip_s = trip_s
            self._shift_s = number_field(frame.header, "at") - (now - trip_s / 2)

    def _take_news(self, frame: Frame) -> None:
        try:
            line = dict(frame.header["line"])
            if "at_s" in line:
                line["at_s"] = float(line["at_s"]) - self._shift_s
            self.news.receive(line)
        except (KeyError, TypeError, ValueError):
            raise FrameError("not news") from None

    # While the processes run.

    def _advance(self, now: float) -> None:
        """Give heartbeats."""
        if now >= self._beat_at_s:
            self._beat_at_s = now + self._limits.heartbeat_s
            self._tell(pack_frame({"do": "beat", "at": now}))

    def _still_running(self) -> list[str]:
        ended = f"all processes of node {self._own.node} ({self._own.host}) have ended"
        return [f"{ended}; those of other nodes still run"] if self.is_waiting else []

    def _check_time(self, now: float) -> None:
        if self._has_joined or self.problem:
            return
        if self._connecting is not None and self._connecting.problem:
            self._connect_problem = self._connecting.problem
        waited_s, lack = now - self._began_s, self._nodes.token.lack
        if lack and waited_s >= LACKING_S:
            self.problem = self._nodes.token.refusal(self._address)
            return
        message = (
            f"the launcher of node 0 cannot be reached at {self._address} after {waited_s:.0f} s: "
            f"{self._connect_problem or 'no answer'}"
        )
        lost_after_s = max(self._nodes.lost_after_s, _BETWEEN_S)
        if self._nodes.is_announced and now - self._answered_s >= lost_after_s:
            self.problem = f"{message}\nit was lost between two restart attempts"
        elif waited_s >= self._nodes.timeout_s:
            self.problem = message
        elif waited_s >= self._nodes.warn_after_s and not self._has_warned:
            self._has_warned = True
            self._lines.append(message)

    def _lose(self, node: int, reason: str, last_seen_s: float) -> None:
        """Record that node 0 is lost, unless it has reported how the job ended."""
        if self._connection is not None and self._connections is not None:
            self._connections.close(self._connection)
        self._living.forget(node)
        self._connection, self._beat_at_s = None, math.inf
        if self._verdict is None:
            processes = tuple(range(self._leader_processes))  # node 0's come first
            self._loss = Loss(self._leader, reason, last_seen_s, processes)
            self.has_failure = True
            if self._start is None:
                self.problem = f"{self._leader} was lost before the job began: {reason}"

    def report_failure(self) -> None:
        """Report the first failure on this host."""
        self._tell(pack_frame({"do": "failure"}))

    def report_signal(self, number: signal.Signals) -> None:
        """Report a signal that ends the job."""
        self._tell(pack_frame({"do": "signal", "number": int(number)}))

    # The end.

    @property
    def is_waiting(self) -> bool:
        """Whether node 0 has yet to report how the job ended."""
        return self._has_joined and self._connection is not None and self._verdict is None

    def finish(self, end: JobExit) -> None:
        """Report that all processes of this host have ended."""
        self._name_others_later()
        self._tell(pack_end(end, self._shift_s))

    def conclude(self, end: JobExit) -> Conclusion:
        """Return how the whole job ended: as reported by node 0, or if that is lost, as known."""
        attempt = self._start.attempt if self._start else self._own.attempt
        conclusion = self._verdict or self._conclude(end)
        if self._verdict is not None:  # node 0 is there, and prints the report
            conclusion = conclusion._replace(is_announced=True, reported_by=self._leader)
        return self._judge(conclusion, end.progress, attempt)

    def _conclude(self, end: JobExit) -> Conclusion:
        total = len(end.exits) if self._start is not None else -1
        end = end._replace(start_s=min(self._start_s, end.start_s))
        losses = [self._loss] if self._loss else ()
        facts = facts_of(end, end.exits, self.news, total, losses)
        return conclude(facts._replace(of_job=self._start.total if self._start else 0))

    def close(self) -> None:
        """End the connection to node 0."""
        super().close()
        if self._connecting is not None:
            self._console.loop.ignore(self._connecting.fd)
            self._connecting.close()

    def _tell(self, data: bytes) -> None:
        """Send to node 0, if it is there."""
        if self._connection is not None:
            self._send(self._connection, data)


# ---- Connecting to the launcher of node 0, which may start later.


_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 0.5
_TRY_S = 2.0  # a host that is off does not answer


class Connecting:
    """Attempts to connect, in a thread: resolving a name cannot be interrupted.

    `fd` becomes readable when `socket` is there.
    """

    def __init__(self, host: str, port: int, *, after_s: float = 0.0) -> None:
        """Begin, after a pause."""
        self._host, self._port = host, port
        self.socket: socket.socket | None = None
        self.problem = ""  # of the last attempt
        self._ended = threading.Event()
        self.fd, self._wakes = os.pipe()
        name = "shoal connects to node 0"
        threading.Thread(target=self._run, args=(after_s,), name=name, daemon=True).start()

    def close(self) -> None:
        """Give up, or forget: `socket` belongs to the caller now."""
        self._ended.set()
        os.close(self.fd)

    def _run(self, pause_s: float) -> None:
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            try:
                self.socket = open_socket((self._host, self._port), began_s + _TRY_S)
                break
            except OSError as error:
                self.problem = error.strerror or str(error)
            used_s = time.monotonic() - began_s
            pause_s = max(0.0, min(max(2 * pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S) - used_s)
        with contextlib.suppress(OSError):  # closed
            os.write(self._wakes, b".")
        os.close(self._wakes)
