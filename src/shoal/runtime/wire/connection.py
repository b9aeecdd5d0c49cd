"""The client side of a connection: send and receive frames, with a deadline."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import time
from typing import Any

from shoal.runtime.wire.frames import MAX_HEADER_BYTES, Frame, FrameReader
from shoal.runtime.wire.socket_calls import (
    LinkError,
    LinkTimeoutError,
    encoded_name,
    socket_call,
)

_MOMENT_S = 1e-4  # the least time-out of a socket: 0 would make it non-blocking
_DAY_S = 86_400.0
_LOOK_S = 100e-6  # how long to spin before sleeping; other threads may run meanwhile


class UnknownNameError(LinkError):
    """The name of a host does not resolve."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"the name {name!r} does not resolve: {why}")
        self.name, self.why = name, why


class Channel:
    """A connected socket that carries frames. One thread at a time.

    The socket does not block; one poll waits for it. A socket with a time-out would need two more
    system calls for every call that waits.
    """

    def __init__(self, sock: socket.socket, *, max_body_bytes: int) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._unsent = memoryview(b"")
        self._reader = FrameReader(max_header_bytes=MAX_HEADER_BYTES, max_body_bytes=max_body_bytes)

    def send(self, data: bytes, limit: float) -> None:
        """Send all of `data` by the time `limit` of the monotonic clock.

        The rest of a frame whose time is over, or whose wait was interrupted, is sent before the
        next frame: half a frame would make everything after it unreadable.

        Raises:
          LinkError: the connection is gone; as LinkTimeoutError: not sent by `limit`.
        """
        if not self._unsent:
            sent = self._send_some(data)
            if sent == len(data):
                return
            self._unsent, data = memoryview(data)[sent:], b""
        writable = select.poll()
        socket_call(writable.register, self._socket, select.POLLOUT)
        while self._unsent:
            _wait(writable, limit)
            self._unsent = self._unsent[self._send_some(self._unsent) :]
            if not self._unsent:
                self._unsent, data = memoryview(data), b""

    def receive(self, limit: float) -> Frame:
        """Return the next frame.

        Raises:
          LinkError: the connection is gone; as LinkTimeoutError: no whole frame by `limit`.
          FrameError: the bytes are not a frame.
        """
        while (frame := self._reader.next()) is None:
            data = self._receive_some(limit)
            if not data:
                raise LinkError("it closed the connection")
            self._reader.feed(data)
        return frame

    def _receive_some(self, limit: float) -> bytes:
        """Spin for a moment before sleeping: if all processes arrive at the same time, waking up
        costs more than the wait."""
        look_until = min(time.monotonic() + _LOOK_S, limit)
        while True:
            if self._readable.poll(0):
                break
            if time.monotonic() >= look_until:
                _wait(self._readable, limit)
                break
            os.sched_yield()
        return socket_call(self._socket.recv, self._reader.chunk_bytes)

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return socket_call(self._socket.send, data)
        except LinkError as error:
            if error.errno != errno.EAGAIN:
                raise
            return 0

    def shut(self) -> None:
        """Shut the connection down, which wakes a thread in `receive`. Never blocks."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was faster

    def close(self) -> None:
        """Close this process's copy; a forked process keeps its own."""
        self._socket.close()


def connect(address: tuple[str, int], limit: float, *, max_body_bytes: int) -> Channel:
    """Connect once.

    Raises:
      UnknownNameError: the name of the host does not resolve.
      LinkError: nothing listens there.
    """
    return Channel(open_socket(address, limit), max_body_bytes=max_body_bytes)


def what_failed(error: LinkError) -> tuple[str, str]:
    """Return what is wrong where a connection failed, and the details.

    >>> what_failed(LinkError(111, "Connection refused"))
    ('nothing listens there', '[Errno 111] Connection refused')
    """
    if isinstance(error, UnknownNameError):
        return f"the name {error.name!r} does not resolve", error.why
    return "nothing listens there", str(error)


def open_socket(address: tuple[str, int], limit: float) -> socket.socket:
    """Return a socket connected to another one. Raises as `connect` does."""
    host, port = address
    try:
        name = encoded_name(host)
    except LinkError:
        raise UnknownNameError(host, "it is not a valid name") from None
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UnknownNameError(host, error.strerror or str(error)) from None
    problems = []
    for family, kind, protocol, _, where in addresses:
        try:
            return _connected(family, kind, protocol, where, limit)
        except LinkError as error:
            problems.append(error)
    raise problems[0]


def _connected(
    family: int, kind: int, protocol: int, where: tuple[Any, ...], limit: float
) -> socket.socket:
    try:
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LinkError(*error.args) from None
    try:
        left_s = _left_s(limit)
        sock.settimeout(None if left_s is None else max(left_s, _MOMENT_S))
        socket_call(sock.connect, where)
        socket_call(sock.setsockopt, socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if socket_call(sock.getsockname) == socket_call(sock.getpeername):
            # Linux lets a socket connect to itself if it tries a free port of the ephemeral range
            # often enough; this process would then wait for its own HELLO.
            raise LinkError(errno.ECONNREFUSED, "Connection refused")
    except BaseException:
        sock.close()
        raise
    return sock


def _wait(socket_poll: select.poll, limit: float) -> None:
    while True:
        left_s = _left_s(limit)
        # poll counts whole milliseconds; round up, to avoid a busy loop of early returns.
        if socket_poll.poll(None if left_s is None else math.ceil(left_s * 1e3)):
            return
        if time.monotonic() >= limit:
            raise LinkTimeoutError("timed out")


def _left_s(limit: float) -> float | None:
    """Return how long to wait now: at most a day, which overflows no timer."""
    return None if limit == math.inf else min(max(limit - time.monotonic(), 0.0), _DAY_S)
