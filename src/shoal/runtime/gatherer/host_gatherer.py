"""Find the gatherer of this host, or start it: what each process of a large job does first."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import select
import socket
import time

from shoal.runtime.client.hello import host_id
from shoal.runtime.system.child_process import Spawned
from shoal.runtime.system.service_commands import job_argument
from shoal.runtime.wire.unix_socket import connect_unix, listen_unix

_MODULE = "shoal.runtime.gatherer.gathering"
_START_S = 30.0


class HostGatherer:
    """The gatherer of this host, user and meeting place: its name follows from these.

    Whichever process comes first starts it. While it does, it listens at a second name: the others
    connect to that, and wait until it is closed.
    """

    def __init__(self, address: str, token: str, *, host: str | None = None, job: str = "") -> None:
        """Prepare; `connect` starts it.

        Args:
          address: host:port of the meeting place.
          token: what its processes present there.
          host: equal for the processes that share it; None: determined from the kernel.
          job: its name, for `ps`.
        """
        self._job = job
        self._orders = {"meeting_place": address, "token": token}
        here = host_id() if host is None else host
        key = f"{address}\n{token}\n{os.geteuid()}\n{here}".encode(errors="surrogatepass")
        self.name = f"shoal-gatherer-{hashlib.blake2b(key, digest_size=16).hexdigest()}"

    def connect(self, limit: float) -> socket.socket:
        """Return a connection to it; start it first if nothing has its name.

        Raises:
          PermissionError: another user's process has its name, or names are forbidden here.
          OSError: it cannot be reached yet, or not be started.
        """
        try:
            return connect_unix(self.name)
        except ConnectionRefusedError:
            pass  # nothing has the name
        starting = f"{self.name}-starting"
        try:
            start = listen_unix(starting)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _wait_for_the_end(connect_unix(starting), limit)
            return connect_unix(self.name)
        if start is None:
            raise OSError("no abstract socket names on this platform")
        with start:
            try:
                return connect_unix(self.name)  # started just now, by the one before
            except ConnectionRefusedError:
                self._start(limit)
            return connect_unix(self.name)

    def _start(self, limit: float) -> None:
        spawned = Spawned(_MODULE, job_argument(self._job))
        try:
            spawned.stdin.write(json.dumps({**self._orders, "name": self.name}).encode() + b"\n")
            spawned.stdin.close()
        except BrokenPipeError:
            pass  # its last words tell why
        line = spawned.first_line(_left_s(limit))
        words = "" if line else spawned.last_words()
        spawned.detach()
        if not line:
            raise OSError(f"the gatherer of this host did not start: {words}")


def _wait_for_the_end(sock: socket.socket, limit: float) -> None:
    """Wait until the other end is closed, and close this one.

    Raises:
      TimeoutError: it is not closed by `limit` of the monotonic clock.
    """
    closed = select.poll()
    with sock:
        closed.register(sock, 0)  # POLLHUP and POLLERR are always reported
        if not closed.poll(math.ceil(_left_s(limit) * 1e3)):
            raise TimeoutError("another process of this host is starting it")


def _left_s(limit: float) -> float:
    """Return how long the start of a gatherer may take now."""
    return max(0.001, min(limit - time.monotonic(), _START_S))
