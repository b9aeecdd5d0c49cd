"""Unix-socket fast path for clients on the server's host.

A barrier over loopback TCP takes about a tenth to a quarter longer (`benchmarks/control.py`, row
`barrier sockets`). The socket's name is in Linux's abstract
namespace (unix(7)): no file is left behind, only one network namespace sees it, and the name is
random; clients must show the token all the same. It carries calls only. Connections that determine
liveness stay on TCP, where the kernel watches the link.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_BACKLOG = 4096
_CREDENTIALS = struct.Struct("iII")  # pid, user, group


def listen_unix(name: str = "") -> socket.socket | None:
    """Return a socket that listens at this name, or at a random one; None where the platform has no
    abstract names.

    Raises:
      OSError: another socket on this host has the name.
    """
    if sys.platform != "linux":
        return None
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(f"\0{name or f'shoal-{os.urandom(16).hex()}'}")
    except OSError:
        server.close()
        raise
    server.listen(_BACKLOG)
    return server


def connect_unix(name: str) -> socket.socket:
    """Connect to the socket of this name, given without its leading zero byte.

    A name, unlike a port, may be anybody's: the token is not shown to another user's process.

    Raises:
      PermissionError: a socket of another user (nor root) has it.
      OSError: no socket on this host has it, or its backlog is full.
    """
    if sys.platform != "linux":
        raise OSError("no abstract socket names on this platform")
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(f"\0{name}")
        if _owner(sock) not in (0, os.geteuid()):
            raise PermissionError(f"the socket {name} is another user's")
    except OSError:
        sock.close()
        raise
    return sock


def may_call(sock: socket.socket) -> bool:
    """Return whether an accepted connection is of this user or of root; root serves all."""
    return os.geteuid() == 0 or _owner(sock) in (0, os.geteuid())


def peer_pid(sock: socket.socket) -> int:
    """Return the process at the other end, which listened or connected; 0: in another namespace."""
    return _credentials(sock)[0]


def _owner(sock: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return pid, user and group of the process at the other end: unix(7), SO_PEERCRED."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(packed)
    return pid, user, group
