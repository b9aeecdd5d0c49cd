"""Unix-socket fast path for clients on the server's host.

A barrier over loopback TCP takes about a tenth to a quarter longer (`benchmarks/control.py`, row
`barrier sockets`). The socket's name is in Linux's abstract
namespace (unix(7)): no file is left behind, only one network namespace sees it, and the name is
random; clients must show the token all the same. It carries calls only. Connections that determine
liveness stay on TCP, where the kernel watches the link.
"""

from __future__ import annotations

import secrets
import socket
import sys

_BACKLOG = 4096


def listen_unix() -> socket.socket | None:
    """Return a listening socket, or None where the platform has no abstract names."""
    if sys.platform != "linux":
        return None
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0shoal-{secrets.token_hex(16)}")
    server.listen(_BACKLOG)
    return server


def connect_unix(name: str) -> socket.socket:
    """Connect to the socket of this name, given without its leading zero byte.

    Raises:
      OSError: no socket on this host has it, or its backlog is full.
    """
    if sys.platform != "linux":
        raise OSError("no abstract socket names on this platform")
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(f"\0{name}")
    except OSError:
        sock.close()
        raise
    return sock
