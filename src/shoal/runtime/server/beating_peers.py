"""Peers of the meeting place that are no processes and must beat: services and gatherers.

They have no keeper: their silence alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from shoal.runtime.rules.liveness import Limits, Liveness, RunningClock
from shoal.runtime.server.callers import ECHO, ServiceCaller
from shoal.runtime.server.trunks import MOST_UNSENT_BYTES, BranchNumbers, TrunkCaller
from shoal.runtime.wire.frames import MAX_HELLO_BYTES, pack_frame
from shoal.runtime.wire.keepalive import watch_link
from shoal.runtime.wire.server_sockets import Connection, Connections, Listener


class Beating(Listener, Hashable, Protocol):
    """A peer whose silence ends it."""

    connection: Connection


class BeatingPeers:
    """The services and gatherers that are connected."""

    def __init__(
        self,
        connections: Connections,
        limits: Limits,
        clock: Callable[[], float],
        running: RunningClock,
        on_service_lost: Callable[[str, str], None],
    ) -> None:
        """`on_service_lost` is called with its name and why."""
        self.services: list[ServiceCaller] = []
        self._trunks: dict[TrunkCaller, None] = {}
        self._branch_numbers = BranchNumbers()
        self._connections = connections
        self._limits = limits
        self._clock = clock
        self._running = running
        self._on_service_lost = on_service_lost
        own = limits._replace(silent_lost_after_s=limits.lost_after_s)
        self._liveness: Liveness[Beating] = Liveness(own)

    def __bool__(self) -> bool:
        return self._liveness.is_watching

    def is_due(self, ran_s: float) -> bool:
        """Return whether `tick` must be called, at this time of the running clock."""
        return bool(self._trunks) or self._liveness.next_deadline() <= ran_s

    def tick(self, ran_s: float) -> None:
        """End the peers that have been silent for too long. A gatherer's sign of life may stand
        behind many bytes of its processes, and is not read before it has read: any bytes count."""
        for trunk in self._trunks:
            connection = trunk.connection
            if connection.has_spoken or connection.has_taken:
                connection.has_spoken = connection.has_taken = False
                self._liveness.beat(ran_s, trunk)
        for peer, state, words, _ in self._liveness.tick(ran_s):
            if state == "lost":
                self._connections.close(peer.connection)
                peer.on_end(peer.connection, words)

    def forget_ended(self) -> None:
        """Forget the services that are lost: another job begins."""
        self.services = [service for service in self.services if service.state == "here"]

    def add_service(self, connection: Connection, header: Mapping[str, Any]) -> None:
        """Take a service's first frame."""
        service = ServiceCaller(
            connection, header, on_beat=self._service_beats, on_gone=self._end_service
        )
        self.services.append(service)
        self._connections.trust(
            connection, service, max_header_bytes=MAX_HELLO_BYTES, max_body_bytes=0
        )
        self._watch(service)

    def add_trunk(self, connection: Connection, strangers: Listener) -> None:
        """Take a gatherer's first frame; `strangers` handles those of its branches."""
        trunk = TrunkCaller(
            connection,
            self._connections,
            strangers,
            self._branch_numbers,
            on_gone=self._forget_trunk,
        )
        self._trunks[trunk] = None
        self._connections.trust(connection, trunk, max_body_bytes=trunk.max_body_bytes)
        # Its signs of life come between the calls of many, so it is read while it is sent answers.
        connection.most_unsent_bytes = MOST_UNSENT_BYTES
        self._watch(trunk)

    def _watch(self, peer: Beating) -> None:
        self._liveness.watch(self._running.read(self._clock()), peer)
        watch_link(peer.connection.socket, self._limits.lost_after_s)
        welcome = {"is": "welcome", **self._limits.words}
        self._connections.send(peer.connection, pack_frame(welcome))

    def _forget_trunk(self, trunk: TrunkCaller) -> None:
        self._trunks.pop(trunk, None)
        self._liveness.forget(trunk)

    def _service_beats(self, service: ServiceCaller) -> None:
        if service.state == "here":
            self._liveness.beat(self._running.read(self._clock()), service)
        self._connections.send(service.connection, ECHO)

    def _end_service(self, service: ServiceCaller, state: str, words: str) -> None:
        """Record that a service has left in order, or is lost. Only the first report counts."""
        if service.state != "here":
            return
        self._liveness.forget(service)
        service.state, service.words = state, words
        if state == "left":
            self.services.remove(service)
        else:
            self._on_service_lost(service.name, words)
