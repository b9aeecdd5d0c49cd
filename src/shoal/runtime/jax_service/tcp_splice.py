"""A TCP splice: a proxy whose near connection outlives its far one.

JAX's client ends its process in C++ within a tenth of a second of the end of its connection. Behind
a splice on its own host it never sees that end: when JAX's service dies, or its host does, the near
connection stays open and silent, and the loss becomes a Python exception (by the meeting place).

::

    JAX's client ──near──▶ splice (loopback) ──far──▶ JAX's service

Forwarded: bytes both ways, with at most one chunk buffered in each direction; the near end's close,
half or whole; a refusal by the far end, as long as none has accepted yet. Not forwarded: the close
of the far end, unless the near end has closed before.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any

from shoal.runtime.wire.frames import address_text
from shoal.runtime.wire.server_sockets import EXHAUSTED

_CHUNK_BYTES = 1 << 16
_PAUSE_S = 0.05  # between attempts while the far end does not listen yet

Address = tuple[Any, ...]  # as in `socket`: two fields, or four with IPv6


def find(host: str, port: int, limit: float) -> tuple[socket.AddressFamily, Address]:
    """Return the first address of a name that accepts connections.

    Raises:
      OSError: none did by `limit`, on the monotonic clock.
    """
    while True:
        left_s = limit - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.001, left_s)) as found:
                return found.family, found.getpeername()
        except OSError:
            if left_s <= _PAUSE_S:
                raise
        time.sleep(_PAUSE_S)


class Splices:
    """All connections to one far address, in a selector that the caller drives.

    The caller calls the `data` of each key that is ready, with its mask.
    """

    def __init__(
        self, selector: selectors.BaseSelector, family: socket.AddressFamily, far: Address
    ) -> None:
        self.selector = selector
        self.family, self.far = family, far
        self.has_connected = False  # to the far end, at least once
        self.pairs: set[_Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.address = address_text(*self._listener.getsockname())
        self.resume_accepting()

    @property
    def is_idle(self) -> bool:
        """Return whether no near end is open; a closed one may still wait for a frozen far end."""
        return all(pair.near_ended for pair in self.pairs)

    def close(self) -> None:
        """Close everything."""
        for pair in tuple(self.pairs):
            pair.close()
        if self._listener.fileno() in self.selector.get_map():
            self.selector.unregister(self._listener)
        self._listener.close()

    def resume_accepting(self) -> None:
        """Accept again, if it has stopped; to be called now and then, as descriptors become free.

        A pair that closes calls it too.
        """
        if self._listener.fileno() not in self.selector.get_map():
            self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        far = None
        try:
            far = socket.socket(self.family, socket.SOCK_STREAM)
            near, _ = self._listener.accept()
        except OSError as error:
            if far is not None:
                far.close()
            if error.errno in EXHAUSTED:  # otherwise select would report it forever
                self.selector.unregister(self._listener)
        else:
            self.pairs.add(_Pair(self, near, far))


class _Pair:
    """One connection, in two halves. `to_far` and `to_near` buffer unsent bytes."""

    def __init__(self, splices: Splices, near: socket.socket, far: socket.socket) -> None:
        self._splices = splices
        self._near, self._far = near, far
        self._to_far = self._to_near = b""
        self.near_ended = False  # it sends nothing more
        self._far_ended = self._is_shut = False
        self._is_connecting = True
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.connect_ex(splices.far)  # the outcome is known when it becomes writable
        self._watch()

    def close(self) -> None:
        """Close both ends."""
        for end in (self._near, self._far):
            self._await(end, 0, self._on_near)
            end.close()
        self._splices.pairs.discard(self)
        self._splices.resume_accepting()

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
                self._to_near = data or b""
        except OSError:
            if not self._splices.has_connected:
                self.close()  # refused, as it would be without a splice
                return
            self._lose()
        self._go_on()

    def _note_connected(self) -> None:
        error = self._far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "not connected")
        self._is_connecting = False
        self._splices.has_connected = True

    def _lose(self) -> None:
        self._await(self._far, 0, self._on_far)
        self._far.close()
        self._splices.resume_accepting()
        self._far_ended, self._is_connecting, self._to_far = True, False, b""

    def _go_on(self) -> None:
        """Forward a pending close, or wait for the next event."""
        if self.near_ended and not (self._to_far or self._is_connecting or self._is_shut):
            self._is_shut = True
            with contextlib.suppress(OSError):  # it is gone, as the next read will show
                self._far.shutdown(socket.SHUT_WR)
        if self.near_ended and self._far_ended and not self._to_near:
            self.close()
        else:
            self._watch()

    def _watch(self) -> None:
        wants = selectors.EVENT_WRITE if self._to_near else 0
        if not (self.near_ended or self._to_far or self._is_connecting):
            wants |= selectors.EVENT_READ
        self._await(self._near, wants, self._on_near)
        if self._is_lost:
            return
        wants = selectors.EVENT_WRITE if self._to_far or self._is_connecting else 0
        if not (self._far_ended or self._to_near or self._is_connecting):
            wants |= selectors.EVENT_READ
        self._await(self._far, wants, self._on_far)

    def _await(self, end: socket.socket, events: int, then: Any) -> None:
        selector = self._splices.selector
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
