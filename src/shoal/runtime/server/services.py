"""The services that monitor themselves at the meeting place: JAX's.

They have no keeper: their silence alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.runtime.rules.liveness import Limits, Liveness, RunningClock
from shoal.runtime.server.callers import ECHO, ServiceCaller
from shoal.runtime.wire.frames import MAX_HELLO_BYTES, pack_frame
from shoal.runtime.wire.keepalive import watch_link
from shoal.runtime.wire.server_sockets import Connection, Connections


class Services:
    """The services that are connected."""

    def __init__(
        self,
        connections: Connections,
        limits: Limits,
        clock: Callable[[], float],
        running: RunningClock,
        on_lost: Callable[[str, str], None],
    ) -> None:
        """`on_lost` is called with a service's name and why."""
        self._here: list[ServiceCaller] = []
        self._connections = connections
        self._limits = limits
        self._clock = clock
        self._running = running
        self._on_lost = on_lost
        own = limits._replace(silent_lost_after_s=limits.lost_after_s)
        self._liveness: Liveness[ServiceCaller] = Liveness(own)

    def __bool__(self) -> bool:
        return self._liveness.is_watching

    @property
    def rows(self) -> list[list[str]]:
        """The rows for observers."""
        return [service.row for service in self._here]

    def is_due(self, ran_s: float) -> bool:
        """Return whether `tick` must be called, at this time of the running clock."""
        return self._liveness.next_deadline() <= ran_s

    def tick(self, ran_s: float) -> None:
        """End the services that have been silent for too long."""
        for service, state, words, _ in self._liveness.tick(ran_s):
            if state == "lost":
                self._connections.close(service.connection)
                service.on_end(service.connection, words)

    def forget_ended(self) -> None:
        """Forget the services that are lost: another job begins."""
        self._here = [service for service in self._here if service.state == "here"]

    def add(self, connection: Connection, header: Mapping[str, Any]) -> None:
        """Take a service's first frame."""
        service = ServiceCaller(connection, header, on_beat=self._beat, on_gone=self._end)
        self._here.append(service)
        self._connections.trust(
            connection, service, max_header_bytes=MAX_HELLO_BYTES, max_body_bytes=0
        )
        self._liveness.watch(self._running.read(self._clock()), service)
        watch_link(connection.socket, self._limits.lost_after_s)
        welcome = {"is": "welcome", **self._limits.words}
        self._connections.send(connection, pack_frame(welcome))

    def _beat(self, service: ServiceCaller) -> None:
        if service.state == "here":
            self._liveness.beat(self._running.read(self._clock()), service)
        self._connections.send(service.connection, ECHO)

    def _end(self, service: ServiceCaller, state: str, words: str) -> None:
        """Record that a service has left in order, or is lost. Only the first report counts."""
        if service.state != "here":
            return
        self._liveness.forget(service)
        service.state, service.words = state, words
        if state == "left":
            self._here.remove(service)
        else:
            self._on_lost(service.name, words)
