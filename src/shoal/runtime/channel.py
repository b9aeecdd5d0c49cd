"""The client's end of one connection to the meeting place: frames out, frames in, by a deadline."""

from __future__ import annotations

import math
import socket
import time

from shoal.runtime.frames import MAX_HEADER_BYTES, Frame, FrameReader

__all__ = ["Channel", "connect"]

_CHUNK_BYTES = 1 << 18
_MOMENT_S = 1e-4  # the least time-out of a socket: 0 would mean "do not wait", in other words


class Channel:
    """A connected socket that carries frames. One thread at a time."""

    def __init__(self, sock: socket.socket, *, max_body_bytes: int) -> None:
        self._socket = sock
        self._reader = FrameReader(max_header_bytes=MAX_HEADER_BYTES, max_body_bytes=max_body_bytes)

    def send(self, data: bytes, limit: float) -> None:
        """Send all of `data` by the time `limit` of the monotonic clock.

        Raises:
          OSError: the connection is gone; as TimeoutError: not sent by then.
        """
        self._socket.settimeout(_pause_s(limit))
        self._socket.sendall(data)

    def receive(self, limit: float) -> Frame:
        """Return the next frame.

        Raises:
          OSError: the connection is gone; as TimeoutError: nothing whole came by `limit`.
          FrameError: what came is no frame.
        """
        while (frame := self._reader.next()) is None:
            self._socket.settimeout(_pause_s(limit))
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionError("it closed the connection")
            self._reader.feed(data)
        return frame

    def shut(self) -> None:
        """End the connection; a thread that waits in `receive` is woken. Nothing waits."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was faster

    def close(self) -> None:
        """Close this process's end; a forked twin keeps its own."""
        self._socket.close()


def connect(address: tuple[str, int], limit: float, *, max_body_bytes: int) -> Channel:
    """Connect once.

    Raises:
      OSError: nobody listens, or the name is unknown.
    """
    sock = socket.create_connection(address, timeout=_pause_s(limit))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.getsockname() == sock.getpeername():
        # Linux lets a socket connect to itself when it dials a free port of the ephemeral range
        # often enough; we would wait for our own HELLO.
        sock.close()
        raise ConnectionRefusedError("Connection refused")
    return Channel(sock, max_body_bytes=max_body_bytes)


def _pause_s(limit: float) -> float | None:
    return None if limit == math.inf else max(limit - time.monotonic(), _MOMENT_S)
