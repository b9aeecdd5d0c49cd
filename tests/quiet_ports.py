"""Ports in a row that nothing else takes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys


def quiet_row(count: int) -> tuple[str, int]:
    """Return a loopback address and the first of `count` free ports there, in a row.

    On Linux all of 127/8 is loopback: no other test has this address. The ports are below those of
    outgoing connections.
    """
    host = "127.0.0.1"
    if sys.platform == "linux":
        host = ".".join(["127", *(str(1 + byte % 254) for byte in os.urandom(3))])
    while True:
        first = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server((host, port)))
            return host, first
