"""The keepers of a job's hosts that are connected."""

from __future__ import annotations

from shoal.runtime.wire.server_sockets import Connection, Connections


class KeeperConnections:
    """At most one for each host: the one that came last."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._of_hosts: dict[str, Connection] = {}

    def add(self, host_id: str, connection: Connection) -> None:
        """A keeper has come, perhaps in place of one that is no longer heard."""
        if (before := self._of_hosts.get(host_id)) is not None:
            self._connections.close(before)  # its end is about to be read, or it is cut off
        self._of_hosts[host_id] = connection

    def discard(self, host_id: str, connection: Connection) -> bool:
        """A connection has ended; return whether it was that of the host's keeper."""
        is_known = self._of_hosts.get(host_id) is connection
        if is_known:
            del self._of_hosts[host_id]
        return is_known

    def release(self) -> None:
        """The job is over. Its processes may live on; who keeps them hears it by the end."""
        for connection in self._of_hosts.values():
            self._connections.close(connection)
        self._of_hosts.clear()
