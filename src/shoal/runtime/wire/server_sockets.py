"""The sockets of a server: one selectors loop that turns bytes into frames, and back.

Enforces limits and handles partial frames and full buffers, but does not know what a frame means.
No peer can make it block, spin or keep more than the declared limits: an untrusted connection may
send one small header within `STRANGER_S`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import selectors
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.runtime.wire.frames import (
    MAX_HEADER_BYTES,
    MAX_HELLO_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    FrameReader,
    begins_frame,
    pack_frame,
)
from shoal.runtime.wire.proof import CHALLENGE, is_proof, new_nonce, proof
from shoal.runtime.wire.sockets import is_cut_off, may_call

STRANGER_S = 30.0  # a connection not trusted by then is closed

_ACCEPTS_AT_ONCE = 64
CLOSED = "its connection closed"
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # of `accept`
_AGAIN_S = 1.0  # after it, where no connection of this server could close


class Connection:
    """One socket: the received part of the next frame, and unsent bytes."""

    def __init__(self, sock: socket.socket, origin: str, since: float, listener: Listener) -> None:
        self.socket = sock
        self.origin = origin
        self.since = since
        self.listener = listener
        self.reader = FrameReader(max_header_bytes=MAX_HELLO_BYTES, max_body_bytes=0)
        self.out: deque[memoryview] = deque()
        self.is_new = True  # nothing was received
        self.is_blocked = False  # whether `out` holds more than the kernel would take
        self.is_closed = False
        self.is_closing = False  # close as soon as `out` is sent
        self.first: Frame | None = None  # until its sender has proved itself
        self.nonce = ""  # of the challenge
        self.events = selectors.EVENT_READ  # that are waited for


class Listener(Protocol):
    """The handler of a connection's events."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame. On FrameError the connection is closed."""

    def on_end(self, connection: Connection, reason: str) -> None:
        """Handle the end of a connection. Not called for one closed by this server."""


class Connections:
    """All connections of some listening sockets, driven by `poll`.

    `listener` handles untrusted connections; `trust` sets the listener of a trusted one.
    """

    def __init__(
        self,
        servers: Sequence[socket.socket],
        listener: Listener,
        clock: Callable[[], float],
        *,
        on_other: Callable[[socket.socket, bytes], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
          on_other: called with a connection of another protocol, which is no longer among these,
            and its first bytes; None: it is closed.
        """
        self._servers = tuple(servers)
        self._on_other = on_other
        self._listener = listener
        self._clock = clock
        # Oldest first. A dict would look at each that was removed to find the first.
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        self._accepts = False
        self._accepts_at = math.inf  # the latest, if it does not
        self._resume_accepting()
        self._leash_ended = False

    @property
    def next_deadline(self) -> float:
        """The latest time at which `poll` must be called again."""
        waits_until = math.inf if self._accepts else self._accepts_at
        return next((min(s.since + STRANGER_S, waits_until) for s in self._strangers), waits_until)

    def hold_leash(self, file: int) -> None:
        """Watch a pipe; once its other end is closed `poll` returns False.

        Raises:
          PermissionError: it is neither pipe nor socket nor terminal.
        """
        self._selector.register(file, selectors.EVENT_READ, file)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._selector.fileno()

    def adopt(self, sock: socket.socket, listener: Listener) -> Connection:
        """Add a connection that this process has opened, trusted."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, "", self._clock(), listener)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self.trust(connection)
        return connection

    def poll(self, timeout_s: float | None) -> bool:
        """Wait for events and handle them. Return False once the leash has ended."""
        for key, mask in self._selector.select(timeout_s):
            about = key.data
            if about is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif not isinstance(about, Connection):
                if not os.read(about, 4096):
                    self._leash_ended = True
                    self._selector.unregister(about)
            else:
                if mask & selectors.EVENT_READ:
                    self._read(about)
                if mask & selectors.EVENT_WRITE:
                    self._flush(about)
                    self._take_frames(about)  # those received before it was blocked
        now = self._clock()
        while (stranger := next(iter(self._strangers), None)) is not None:
            if now < stranger.since + STRANGER_S:
                break
            self.close(stranger)
        if not self._accepts and now >= self._accepts_at:
            self._resume_accepting()
        return not self._leash_ended

    def trust(
        self,
        connection: Connection,
        listener: Listener | None = None,
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_body_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        """Trust a connection, with the limits of members."""
        self._strangers.pop(connection, None)
        connection.listener = listener or connection.listener
        connection.reader.max_header_bytes = max_header_bytes
        connection.reader.max_body_bytes = max_body_bytes

    def introduced(
        self, connection: Connection, frame: Frame, secret: str, *, proves: bool = True
    ) -> tuple[Frame, bool] | None:
        """Take a frame of an untrusted connection; see `runtime.wire.proof`.

        Args:
          proves: whether this server proves itself then; otherwise the caller lets `prove` do it.

        Returns:
          None: its sender is asked for a proof. Else its first frame, and whether it proved itself.
        """
        first = connection.first
        if first is None:
            if not isinstance(frame.header.get("nonce"), str):
                return frame, False  # another version
            connection.first, connection.nonce = frame, new_nonce()
            self.send(connection, pack_frame({"is": CHALLENGE, "nonce": connection.nonce}))
            return None
        known = connection.nonce, first.header
        if not is_proof(frame.header.get("proof"), secret, "client", *known):
            return first, False
        if proves:
            self.prove(connection, first, secret)
        return first, True

    def prove(self, connection: Connection, first: Frame, secret: str) -> None:
        """Send this server's proof."""
        own = proof(secret, "server", connection.nonce, first.header)
        self.send(connection, pack_frame({"is": "proof", "proof": own}))

    def send(self, connection: Connection, data: bytes, *, then_close: bool = False) -> None:
        """Send as much as can be sent now, the rest when there is room."""
        if connection.is_closed:
            return
        if not connection.out and not then_close:  # the common case: the kernel takes it whole
            try:
                sent = connection.socket.send(data)
            except OSError:
                sent = 0
            if sent == len(data):
                return
            connection.out.append(memoryview(data)[sent:])
        else:
            connection.is_closing |= then_close
            connection.out.append(memoryview(data))
        if connection.is_blocked:
            self._watch(connection)
        else:
            self._flush(connection)

    def release(self, connection: Connection, data: bytes = b"") -> tuple[socket.socket, bytes]:
        """Return the socket of a connection, which is no longer among these, and unread bytes."""
        connection.is_closed = True
        self._selector.unregister(connection.socket)
        self._strangers.pop(connection, None)
        return connection.socket, connection.reader.rest() + data

    def close(self, connection: Connection) -> None:
        """Close a connection. Its listener's `on_end` is not called."""
        if connection.is_closed:
            return
        connection.is_closed = True
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._strangers.pop(connection, None)
        self._resume_accepting()  # its descriptor is free

    def close_all(self) -> None:
        """Close all connections and listening sockets."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Connection):
                self.close(key.data)
        self._selector.close()
        for server in self._servers:
            server.close()

    def _resume_accepting(self) -> None:
        if not self._accepts:
            self._accepts = True
            for server in self._servers:
                server.setblocking(False)
                self._selector.register(server, selectors.EVENT_READ, None)

    def _accept(self, server: socket.socket) -> None:
        """Accept those that wait; one at a time, a large job would overflow the kernel's queue."""
        for _ in range(_ACCEPTS_AT_ONCE):
            if not (self._accepts and self._accept_one(server)):
                return

    def _accept_one(self, server: socket.socket) -> bool:
        """Accept a connection; return whether there may be more."""
        try:
            sock, origin = server.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                # The connection stays in the kernel's queue: select would report it for ever, and
                # the loop spin. `close` resumes accepting, or the clock where nothing may close.
                self._accepts = False
                self._accepts_at = self._clock() + _AGAIN_S
                for each in self._servers:
                    self._selector.unregister(each)
            return False  # none is left, or the peer has gone
        if sock.family == socket.AF_UNIX:
            if not may_call(sock):
                sock.close()
                return True
            origin = ("this host",)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        connection = Connection(sock, str(origin[0]), self._clock(), self._listener)
        self._strangers[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return True

    def _read(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        try:
            data = connection.socket.recv(connection.reader.chunk_bytes)
        except BlockingIOError:
            return
        except OSError as error:
            cut = is_cut_off(error)
            self._end(connection, f"cut off ({error.strerror})" if cut else CLOSED)
            return
        if not data:
            self._end(connection, CLOSED)
            return
        is_new, connection.is_new = connection.is_new, False
        if is_new and self._on_other is not None and not begins_frame(data):
            self._on_other(*self.release(connection, data))
            return
        connection.reader.feed(data)
        self._take_frames(connection)

    def _take_frames(self, connection: Connection) -> None:
        """Pass received frames to the listener, unless the peer does not read its answers: those to
        further requests would fill this process's memory."""
        try:
            while not (connection.is_closing or connection.is_closed):
                if connection.out:
                    return
                frame = connection.reader.next()
                if frame is None:
                    return
                connection.listener.on_frame(connection, frame)
        except FrameError as error:
            self._end(connection, f"it sent an invalid frame: {error}")
        except Exception:
            if connection not in self._strangers:
                raise
            sys.excepthook(*sys.exc_info())  # a bug, which no stranger may use to end the server
            self.close(connection)

    def _flush(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        out = connection.out
        try:
            while out:
                sent = connection.socket.send(out[0])
                if sent < len(out[0]):
                    out[0] = out[0][sent:]
                else:
                    out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            out.clear()  # it is gone, as the next read will show
        if connection.is_closing and not out:
            self.close(connection)
            return
        connection.is_blocked = bool(out)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait until it can be written, if anything is unsent; else until it can be read."""
        events = selectors.EVENT_WRITE if connection.out else selectors.EVENT_READ
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _end(self, connection: Connection, reason: str) -> None:
        if not connection.is_closed:
            self.close(connection)
            connection.listener.on_end(connection, reason)


def with_guess(reason: str) -> str:
    """Return why a connection ended, for people: with the likeliest reason."""
    return f"{reason} (killed?)" if reason is CLOSED else reason


def allow_many_connections() -> None:
    """Raise this process's limit of open files to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses "unlimited" here
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
