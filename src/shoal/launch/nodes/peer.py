"""What the launcher of each node is to the others: connections, heartbeats, what it passes on.

Everything happens in the loop of the launcher; nothing blocks. A launcher that gives no heartbeat
for `lost_after_s` is lost, as is one whose connection closes before the job has ended.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoal.launch.environment import JobStart
from shoal.launch.launchers import Judge, PassedSignal
from shoal.launch.loop import Console
from shoal.launch.news import News
from shoal.launch.nodes.joining import NodeCard
from shoal.launch.order import NodesOrder
from shoal.launch.services import ServiceProcesses
from shoal.runtime.rules.liveness import Limits, Liveness, RunningClock
from shoal.runtime.wire.frames import address_text
from shoal.runtime.wire.server_sockets import Connection, Connections


class Peer(ABC):
    """A launcher among those of all nodes; see `launchers.Launchers`."""

    services: ServiceProcesses | None = None  # node 0 runs them

    def __init__(self, nodes: NodesOrder, own: NodeCard, console: Console, judge: Judge) -> None:
        self._nodes, self._own, self._console, self._judge = nodes, own, console, judge
        self._connections: Connections | None = None
        self._began_s = time.monotonic()
        self._live_by(Limits.of_settings())
        self._has_warned = False  # of nodes that are missing
        self._names_others_s = math.inf  # when to say which nodes still run
        self._start: JobStart | None = None
        self._signals: list[PassedSignal] = []
        self._lines: list[str] = []
        self.news = News(1)
        self.problem = ""
        self.has_failure = False
        self.next_s = 0.0

    def _live_by(self, limits: Limits) -> None:
        """Judge the silence of others by these limits: no host agent reports it for a launcher."""
        self._limits = limits._replace(silent_lost_after_s=limits.lost_after_s)
        self._running = RunningClock(time.monotonic(), tick_s=limits.tick_s)
        self._living: Liveness[int] = Liveness(self._limits)

    @property
    def start(self) -> JobStart | None:
        """The addresses for the processes of this host, once the job begins."""
        return self._start

    @property
    def _address(self) -> str:
        return address_text(self._nodes.host, self._nodes.port)

    def _listen(self, connections: Connections) -> None:
        """Take frames from these connections in the loop of the launcher."""
        self._connections = connections
        self._console.loop.watch(connections.fileno(), self._poll)

    def _poll(self) -> None:
        if self._connections is not None:
            self._connections.poll(0)

    def _send(self, connection: Connection, data: bytes, *, then_close: bool = False) -> None:
        if self._connections is not None:
            self._connections.send(connection, data, then_close=then_close)

    def _expect_beats(self, node: int) -> None:
        """Judge the silence of a node from now on."""
        self._living.watch(self._running.read(time.monotonic()), node)

    def _note_beat(self, node: int, now: float) -> None:
        """Take a heartbeat."""
        self._living.beat(self._running.read(now), node)

    def _on_closed(self, node: int, reason: str) -> None:
        """Handle the end of the connection to a launcher that has joined."""
        self._lose(node, f"its launcher ended, or its host: {reason}", time.monotonic())

    @abstractmethod
    def _lose(self, node: int, reason: str, last_seen_s: float) -> None:
        """Record that a launcher is lost."""

    @abstractmethod
    def _advance(self, now: float) -> None:
        """Perform what is due in this turn of the loop."""

    @abstractmethod
    def _check_time(self, now: float) -> None:
        """Report launchers that have not joined in time. Called once a tick."""

    @abstractmethod
    def _still_running(self) -> list[str]:
        """Return the line that says which nodes still run."""

    def turn(self) -> Sequence[str]:
        """Judge silence, and whether all launchers are there; return lines to print."""
        now = time.monotonic()
        if now >= self.next_s:
            self.next_s = now + self._limits.tick_s
            self._poll()  # signs of life that arrived while this launcher was busy
            for node, state, reason, silent_s in self._living.tick(self._running.read(now)):
                if state == "lost":
                    self._lose(node, f"its launcher sends no heartbeats: {reason}", now - silent_s)
            self._check_time(now)
        self._advance(now)
        if now >= self._names_others_s:
            self._names_others_s = math.inf
            self._lines += self._still_running()
        lines, self._lines = self._lines, []
        return lines

    def take_signals(self) -> Sequence[PassedSignal]:
        """Return the signals of other nodes since the last call."""
        signals, self._signals = self._signals, []
        return signals

    def _name_others_later(self) -> None:
        """Say which nodes still run, if they do for long: those of this host have ended."""
        self._names_others_s = time.monotonic() + self._nodes.warn_after_s

    def close(self) -> None:
        """End the services and all connections."""
        if self.services is not None:
            self.services.close()
        if self._connections is not None:
            self._console.loop.ignore(self._connections.fileno())
            self._connections.close_all()
