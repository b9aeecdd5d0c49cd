"""The keepers of a job's hosts that are connected."""

from __future__ import annotations

from shoal.runtime.wire.server_sockets import Connection, Connections


class KeeperConnections:
    """At most one for each host: the newest."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._of_hosts: dict[str, Connection] = {}

    def add(self, host_id: str, connection: Connection) -> None:
        """Add a keeper's connection, perhaps in place of one that has fallen silent."""
        if (before := self._of_hosts.get(host_id)) is not None:
            self._connections.close(before)  # its end is about to be read, or it is cut off
        self._of_hosts[host_id] = connection

    def discard(self, host_id: str, connection: Connection) -> bool:
        """Remove an ended connection; return whether it was that of the host's keeper."""
        is_known = self._of_hosts.get(host_id) is connection
        if is_known:
            del self._of_hosts[host_id]
        return is_known

    def release(self) -> None:
        """Close all connections, which tells the keepers that the job is over."""
        for connection in self._of_hosts.values():
            self._connections.close(connection)
        self._of_hosts.clear()
