"""Connecting to the launcher of node 0, which may start later."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from shoal.runtime.wire.connection import open_socket

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
