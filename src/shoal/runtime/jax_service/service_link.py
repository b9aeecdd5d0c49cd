"""Let the coordinator monitor a service that all processes need."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import time

from shoal.runtime.wire.connection import Channel, connect
from shoal.runtime.wire.frames import (
    FrameError,
    number_field,
    pack_frame,
    split_address,
    text_field,
)
from shoal.runtime.wire.proof import introduce

_ANSWER_S = 10.0
_SEND_S = 1.0
_BEAT = pack_frame({"do": "beat"})
_BYE = pack_frame({"do": "bye"})


class ServiceLink:
    """A connection to the coordinator. If it ends without a BYE, the service is lost.

    Uses one thread, which has nothing else to do: the one that waits for the service's own end.
    """

    def __init__(self, name: str, token: str) -> None:
        self._name, self._token = name, token
        self._channel: Channel | None = None
        self._heartbeat_s = math.inf

    def open(self, coordinator: str) -> None:
        """Register this service with the coordinator. A coordinator that is gone is ignored."""
        host, port = split_address(coordinator)
        limit = time.monotonic() + _ANSWER_S
        with contextlib.suppress(OSError, FrameError):
            sock_address = (_reachable(host), port)
            channel = connect(sock_address, limit, max_body_bytes=1 << 16)
            try:
                if introduce(channel, self._card(), self._token, limit) is not None:
                    raise FrameError("refused")
                welcome = channel.receive(limit).header
                if text_field(welcome, "is") != "welcome":
                    raise FrameError("refused")
                self._heartbeat_s = number_field(welcome, "heartbeat_s")
            except BaseException:
                channel.close()
                raise
            self._channel = channel

    def _card(self) -> dict[str, object]:
        return {
            "do": "serve",
            "name": self._name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def stay(self, file: int) -> None:
        """Wait until a pipe closes; a line of JSON on it gives the coordinator's address."""
        received = b""
        while self.wait(file) and (data := os.read(file, 4096)):
            received += data
            if received.endswith(b"\n"):
                self.open(json.loads(received)["coordinator"])
                received = b""
        self.close()

    def wait(self, *files: int) -> list[int]:
        """Wait until any of `files` is readable or closed; return those. Send heartbeats."""
        readable = select.poll()
        for file in files:
            readable.register(file, select.POLLIN)
        while True:
            pause_ms = None if self._heartbeat_s == math.inf else self._heartbeat_s * 1000
            ready = [file for file, _ in readable.poll(pause_ms if self._channel else None)]
            if ready:
                return ready
            self._beat()

    def _beat(self) -> None:
        """Send a heartbeat, and read the answers to earlier ones."""
        channel = self._channel
        if channel is None:
            return
        try:
            channel.send(_BEAT, time.monotonic() + _SEND_S)
            with contextlib.suppress(TimeoutError):
                while True:
                    channel.receive(time.monotonic())
        except (OSError, FrameError):
            self._channel = None  # the coordinator is gone; the service is still needed
            channel.close()

    def close(self) -> None:
        """Report an orderly end of the service."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(_BYE, time.monotonic() + _SEND_S)
            self._channel.close()
            self._channel = None


def _reachable(host: str) -> str:
    """Return a host to connect to, given the one that was bound."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
