"""The way from JAX's clients to JAX's service: a proxy on each host, and a gate at the service.

::

    JAX's client ──near──▶ proxy (loopback) ══proof, far══▶ gate ──Unix socket──▶ JAX's service

JAX's client ends its process in C++ within a tenth of a second of the end of its connection. Behind
a proxy on its own host it never sees that end: when JAX's service dies, or its host does, the near
connection stays open and silent, and the loss becomes a Python exception (by the coordinator).

Forwarded: bytes both ways, with at most one chunk buffered in each direction; the near end's close,
half or whole; a refusal by the far end, as long as none has accepted yet. A proxy does not forward
the close of the far end, unless the near end has closed before.

JAX's service has no token of its own: it listens where only this user can connect, and `JaxGate`
lets through what has proved the job's token. On the loopback it also lets clients of JAX alone
through, which know nothing of tokens, if they are of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import threading
import time
from typing import Any

from shoal.runtime.rules.joining import WRONG_TOKEN
from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import (
    MAX_HELLO_BYTES,
    Frame,
    FrameError,
    FrameReader,
    address_text,
    pack_frame,
)
from shoal.runtime.wire.proof import CHALLENGE, Introduction, introduce
from shoal.runtime.wire.server_sockets import EXHAUSTED, Connection, Connections
from shoal.runtime.wire.sockets import may_call

_JAX = {"do": "jax"}  # the first frame, before its nonce
_CHUNK_BYTES = 1 << 16
_QUEUE_S = 0.1  # for a Unix socket's queue to become shorter
_PAUSE_S = 0.05  # between attempts while the far end does not listen yet

Address = tuple[Any, ...]  # as in `socket`: two fields, or four with IPv6


def find(host: str, port: int, secret: str, limit: float) -> tuple[socket.AddressFamily, Address]:
    """Return the first address of a name at which a gate lets this end through.

    Raises:
      OSError: none did by `limit`, on the monotonic clock, or it refuses the token.
    """
    while True:
        left_s = limit - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.001, left_s)) as connection:
                where = connection.family, connection.getpeername()
                refusal = introduce(
                    Channel(connection, max_body_bytes=1 << 16), _JAX, secret, limit
                )
            if refusal is None:
                return where
            raise PermissionError(refusal.body.decode(errors="replace")[:200])
        except PermissionError:
            raise
        except FrameError as error:
            raise OSError(f"what listens there is no gate of shoal's: {error}") from None
        except OSError:
            if left_s <= _PAUSE_S:
                raise
        time.sleep(_PAUSE_S)


class ProxiedConnections:
    """All connections to one far address, in a selector that the caller drives.

    The caller calls the `data` of each key that is ready, with its mask.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        family: socket.AddressFamily,
        far: Address | str,
        *,
        secret: str | None = None,
        shields: bool = True,
    ) -> None:
        """Prepare.

        Args:
          far: the address of the far end; with the family AF_UNIX, its path.
          secret: the token that the far end, a `JaxGate`, asks for; None: it asks for none.
          shields: whether near ends stay open when their far end closes.
        """
        self.selector = selector
        self.shields = shields
        self.family, self.far, self.secret = family, far, secret
        self.has_connected = False  # to the far end, at least once
        self.pairs: set[_Pair] = set()
        self._listener: socket.socket | None = None
        self.address = ""  # once it listens

    def listen(self) -> None:
        """Accept near ends at a free port of the loopback."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.address = address_text(*self._listener.getsockname())
        self.resume_accepting()

    def reach(self) -> socket.socket | None:
        """Return a new connection to the far end, a Unix socket; None: it accepts none now."""
        limit = time.monotonic() + _QUEUE_S
        try:
            far = socket.socket(self.family, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left
            return None
        far.setblocking(False)
        while (error := far.connect_ex(self.far)) == errno.EAGAIN and time.monotonic() < limit:
            time.sleep(_QUEUE_S / 20)
        if error:
            far.close()
            return None
        return far

    def join(self, near: socket.socket, received: bytes, far: socket.socket) -> None:
        """Join two connections; the near end may have sent something already."""
        try:
            self.pairs.add(_Pair(self, near, far, received))
        except OSError:  # the near end is gone
            near.close()
            far.close()

    @property
    def is_idle(self) -> bool:
        """Return whether no near end is open; a closed one may still wait for a frozen far end."""
        return all(pair.near_ended for pair in self.pairs)

    def close(self) -> None:
        """Close everything."""
        for pair in tuple(self.pairs):
            pair.close()
        if self._listener is not None:
            if self._listener.fileno() in self.selector.get_map():
                self.selector.unregister(self._listener)
            self._listener.close()

    def resume_accepting(self) -> None:
        """Accept again, if it has stopped; to be called now and then, as descriptors become free.

        A pair that closes calls it too.
        """
        listener = self._listener
        if listener is not None and listener.fileno() not in self.selector.get_map():
            self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        far, listener = None, self._listener
        if listener is None:
            return
        try:
            far = socket.socket(self.family, socket.SOCK_STREAM)
            near, _ = listener.accept()
            if self.secret is not None and not may_call(near, root_serves_all=False):
                near.close()  # it would prove the token for another user
                far.close()
                return
        except OSError as error:
            if far is not None:
                far.close()
            if error.errno in EXHAUSTED:  # otherwise select would report it forever
                self.selector.unregister(listener)
        else:
            self.join(near, b"", far)


class _Pair:
    """One connection, in two halves. `to_far` and `to_near` buffer unsent bytes."""

    def __init__(
        self,
        proxied: ProxiedConnections,
        near: socket.socket,
        far: socket.socket,
        received: bytes = b"",
    ) -> None:
        self._proxied = proxied
        self._near, self._far = near, far
        self._to_far, self._to_near = received, b""
        self.near_ended = False  # it sends nothing more
        self._far_ended = self._is_shut = False
        self._is_connecting = True
        # While it proves the token to the far end, nothing is forwarded.
        self._introduction = None if proxied.secret is None else Introduction(proxied.secret)
        self._reader = FrameReader(max_header_bytes=MAX_HELLO_BYTES, max_body_bytes=MAX_HELLO_BYTES)
        for end in (near, far):
            end.setblocking(False)
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if far.family != socket.AF_UNIX:  # which is connected
            far.connect_ex(proxied.far)  # the outcome is known when it becomes writable
        self._watch()

    def close(self) -> None:
        """Close both ends."""
        for end in (self._near, self._far):
            self._await(end, 0, self._on_near)
            end.close()
        self._proxied.pairs.discard(self)
        self._proxied.resume_accepting()

    @property
    def _is_opening(self) -> bool:
        """Return whether nothing of the near end can be forwarded yet."""
        return self._is_connecting or self._introduction is not None

    @property
    def _is_lost(self) -> bool:
        """Return whether the far end is gone."""
        return self._far.fileno() < 0

    def _on_near(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                data = _read(self._near)
                self.near_ended |= data == b""
                self._to_far = b"" if self._is_lost else data or b""
            if mask & selectors.EVENT_WRITE:
                self._to_near = _write(self._near, self._to_near)
        except OSError:
            self.close()
            return
        self._go_on()

    def _on_far(self, mask: int) -> None:
        try:
            if self._is_connecting:
                self._note_connected()
            elif mask & selectors.EVENT_WRITE:
                self._to_far = _write(self._far, self._to_far)
            if mask & selectors.EVENT_READ:
                data = _read(self._far)
                self._far_ended |= data == b""
                if self._introduction is None:
                    self._to_near = data or b""
                elif data is not None:
                    self._introduce(data)
        except OSError:
            if not (self._proxied.has_connected and self._proxied.shields):
                self.close()  # refused, as it would be without a proxy
                return
            self._lose()
        self._go_on()

    def _note_connected(self) -> None:
        error = self._far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "not connected")
        self._is_connecting = False
        if self._introduction is None:
            self._proxied.has_connected = True
        else:
            self._to_far = self._introduction.first_frame(_JAX)

    def _introduce(self, data: bytes) -> None:
        """Take an answer of the gate.

        Raises:
          OSError: it refuses, is none, or has ended.
        """
        if self._introduction is None or not data:
            raise ConnectionError("it ended before a proof")
        self._reader.feed(data)
        try:
            while frame := self._reader.next():
                if frame.header.get("is") == CHALLENGE:
                    self._to_far += self._introduction.answer(frame)
                    continue
                self._introduction.check(frame)
                self._introduction, self._proxied.has_connected = None, True
                self._to_near = self._reader.rest()
                return
        except FrameError as error:
            raise ConnectionError(str(error)) from None

    def _lose(self) -> None:
        self._await(self._far, 0, self._on_far)
        self._far.close()
        self._proxied.resume_accepting()
        self._far_ended, self._is_connecting, self._to_far = True, False, b""
        self._introduction = None

    def _go_on(self) -> None:
        """Forward a pending close, or wait for the next event."""
        if self.near_ended and not (self._to_far or self._is_opening or self._is_shut):
            self._is_shut = True
            with contextlib.suppress(OSError):  # it is gone, as the next read will show
                self._far.shutdown(socket.SHUT_WR)
        is_over = self.near_ended or not self._proxied.shields
        if is_over and self._far_ended and not self._to_near:
            self.close()
        else:
            self._watch()

    def _watch(self) -> None:
        # An end is read only while nothing is left to be written to the other: so one chunk in each
        # direction is all that is kept, and the kernel slows down a sender that is too fast.
        wants = selectors.EVENT_WRITE if self._to_near else 0
        if not (self.near_ended or self._to_far or self._is_opening):
            wants |= selectors.EVENT_READ
        self._await(self._near, wants, self._on_near)
        if self._is_lost:
            return
        wants = 0
        if self._to_far or self._is_connecting:
            wants = selectors.EVENT_WRITE
        if not (self._far_ended or self._to_near or self._is_connecting):
            wants |= selectors.EVENT_READ
        self._await(self._far, wants, self._on_far)

    def _await(self, end: socket.socket, events: int, then: Any) -> None:
        selector = self._proxied.selector
        if end.fileno() < 0:
            return
        known = selector.get_map().get(end)
        if known is None and events:
            selector.register(end, events, then)
        elif known is not None and not events:
            selector.unregister(end)
        elif known is not None and known.events != events:
            selector.modify(end, events, then)


def _read(end: socket.socket) -> bytes | None:
    """Return the bytes received: b"" at the end, None if there were none."""
    try:
        return end.recv(_CHUNK_BYTES)
    except BlockingIOError:
        return None


def _write(end: socket.socket, data: bytes) -> bytes:
    """Return the bytes that could not be written yet."""
    try:
        return data[end.send(data) :]
    except BlockingIOError:
        return data


# ---- The gate at JAX's service.


class JaxGate:
    """Lets connections through to JAX's service, in a thread, from `open` until the process ends.

    What does not prove the token in time is closed. See `server_sockets` for what it may cost.
    """

    def __init__(
        self,
        server: socket.socket,
        path: str,
        secret: str,
        *,
        is_open: bool,
        has_tls: bool = False,
    ) -> None:
        """Prepare.

        Args:
          server: listens where JAX's clients, or their proxies, connect.
          path: of the Unix socket of JAX's service.
          secret: the job's token.
          is_open: whether clients of JAX alone, which speak HTTP/2 at once, are let through, too;
            with a token, only those of this user.
          has_tls: whether JAX's service asks for certificates by itself: all are let through to it.
        """
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._proxied = ProxiedConnections(self._selector, socket.AF_UNIX, path, shields=False)
        self._has_tls = has_tls
        takes_others = is_open or has_tls
        on_other = self._take_plain if takes_others else None
        self._connections = Connections([server], self, time.monotonic, on_other=on_other)
        callers = self._connections.fileno()
        self._selector.register(callers, selectors.EVENT_READ, lambda _: self._connections.poll(0))

    def open(self) -> None:
        """Let connections through from now on."""
        threading.Thread(target=self._run, name="shoal's gate", daemon=True).start()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # noqa: BLE001 (whatever it is, the thread would end in silence)
            import traceback  # which every service would load at its start

            traceback.print_exc()
            os._exit(1)  # without its gate the service is lost, and all processes are notified

    def _serve(self) -> None:
        while True:
            left_s = self._connections.next_deadline - time.monotonic()
            for key, mask in self._selector.select(None if left_s == math.inf else max(0, left_s)):
                key.data(mask)
            if left_s <= 0:
                self._connections.poll(0)

    def _take_plain(self, sock: socket.socket, received: bytes) -> None:
        """Let a client of JAX alone through, if it is this user's, or if anyone may join."""
        if self._secret and not (self._has_tls or may_call(sock, root_serves_all=False)):
            sock.close()
        elif (far := self._proxied.reach()) is None:
            sock.close()
        else:
            self._proxied.join(sock, received, far)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Handle the first frames of a connection. See `server_sockets.Listener`."""
        introduced = self._connections.introduced(connection, frame, self._secret, proves=False)
        if introduced is None:
            return
        first, is_proved = introduced
        if first.header.get("do") != "jax":  # it was meant for the coordinator
            raise FrameError("not for JAX's service")
        far = self._proxied.reach() if is_proved else None
        if far is None:
            reason = "JAX's service accepts no connection" if is_proved else WRONG_TOKEN
            refused = pack_frame({"is": "refused"}, reason.encode())
            self._connections.send(connection, refused, then_close=True)
            return
        self._connections.prove(connection, first, self._secret)
        self._proxied.join(*self._connections.release(connection), far)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`. The end of a stranger has no meaning."""
