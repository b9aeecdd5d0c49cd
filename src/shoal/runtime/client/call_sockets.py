"""A pool of connections for calls that wait: one for each waiting thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from shoal.errors import ProcessLostError, ShoalError
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.rules.point import Departure
from shoal.runtime.wire.connection import Channel, connect
from shoal.runtime.wire.frames import Frame, FrameError, split_address
from shoal.runtime.wire.proof import introduce
from shoal.runtime.wire.socket_calls import LinkError, LinkTimeoutError
from shoal.runtime.wire.sockets import connect_unix

T = TypeVar("T")

_VERDICT_S = 0.5  # a call's connection may close just before the reason arrives
_CONNECT_S = 3.0  # a server that is cut off would be tried for minutes: look meanwhile


class Closed(NamedTuple):
    """The reason why the pool is closed: no call can succeed any more."""

    kind: type[ShoalError]
    reason: str
    lost: Mapping[int, Departure] = MappingProxyType({})

    def error(self, me: ThisProcess, caller: str) -> ShoalError:
        """Return the exception for a call."""
        message = f"{me}: {caller}: {self.reason}" if caller else f"{me}: {self.reason}"
        if issubclass(self.kind, ProcessLostError):
            lost = {process: departure.words for process, departure in self.lost.items()}
            return self.kind(message, lost=lost, ends=self.lost)
        return self.kind(message)


class Calls:
    """A pool of connections to one address; each begins with `card` as its first frame."""

    def __init__(
        self,
        address: str,
        near: str,
        card: Mapping[str, Any],
        token: str,
        me: ThisProcess,
        *,
        max_body_bytes: int,
        lose: Callable[[str], None],
    ) -> None:
        self.closed: Closed | None = None
        self._address = address
        self._near = near  # cleared once it fails to open: the server is on another host
        self._card, self._token = card, token
        self._me = me
        self._max_body_bytes = max_body_bytes
        self._lose = lose  # called with the reason when the coordinator is lost
        self._is_judged = threading.Event()
        self._channels: set[Channel] = set()
        self._free: list[Channel] = []

    def run(
        self,
        caller: str,
        limit: float,
        exchange: Callable[[Channel], T],
        *,
        late: ShoalError | None = None,
    ) -> T:
        """Run an exchange on a connection. A connection that fails is closed: it may hold half an
        answer.

        The coordinator counts the arrivals it received, so an interrupted wait (Ctrl-C, or what a
        signal handler raises) leaves the count right. Without an answer by `limit` the
        coordinator is lost, or `late` is raised if given.

        Raises:
          ProcessLostError: the coordinator is gone, or this process was declared lost.
          UsageError: this process has left the job.
        """
        if self.closed is not None:
            raise self.closed.error(self._me, caller)
        channel: Channel | None = None
        try:
            channel = self._take(limit)
            result = exchange(channel)
        except ShoalError:
            self._drop(channel)
            raise
        except (LinkError, FrameError) as error:
            self._drop(channel)
            if late is not None and isinstance(error, LinkTimeoutError):
                raise late from None
            self._end(caller, error)
        except BaseException:
            self._drop(channel)
            raise
        # Without a lock: this puts the connection back before it looks at `closed`, and `close_all`
        # sets that before it takes all that are free. So one of the two sees it, perhaps both; and
        # a connection may be dropped twice.
        self._free.append(channel)
        if self.closed is not None:
            self._drop(channel)
        return result

    def close_all(self, why: Closed) -> None:
        """Close all connections. Those in use are shut down, and closed by their threads."""
        self.closed = self.closed or why
        self._is_judged.set()
        free, self._free = self._free, []
        for channel in free:
            self._drop(channel)
        for channel in tuple(self._channels):
            channel.shut()

    def abandon(self, why: Closed) -> None:
        """In a forked child: close the copies without shutting down the parent's connections."""
        self.closed = self.closed or why
        for channel in self._channels:
            channel.close()

    def _take(self, limit: float) -> Channel:
        try:
            return self._free.pop()
        except IndexError:
            pass  # all are in use
        channel = self._connect(limit)
        self._channels.add(channel)  # from here on `close_all` ends its waits
        try:
            self._check_open()
            if introduce(channel, self._card, self._token, limit) is not None:
                raise FrameError("it refused a connection of this process")
        except BaseException:
            self._drop(channel)
            raise
        return channel

    def _check_open(self) -> None:
        if self.closed is not None:
            raise LinkError("the pool is closed")  # `run` has the reason

    def _connect(self, limit: float) -> Channel:
        if self._near:
            try:
                return Channel(connect_unix(self._near), max_body_bytes=self._max_body_bytes)
            except LinkError:
                self._near = ""
        address = split_address(self._address)
        while True:
            until = min(limit, time.monotonic() + _CONNECT_S)
            try:
                return connect(address, until, max_body_bytes=self._max_body_bytes)
            except LinkTimeoutError:
                self._check_open()
                if until == limit:
                    raise

    def _drop(self, channel: Channel | None) -> None:
        if channel is not None:
            channel.close()
            self._channels.discard(channel)

    def _end(self, caller: str, error: Exception) -> NoReturn:
        """Raise the reason why an exchange failed; the watcher may be about to receive it."""
        is_late = isinstance(error, LinkTimeoutError)
        if is_late or not self._is_judged.wait(_VERDICT_S):
            self._lose("it does not answer" if is_late else str(error))
        closed = self.closed or Closed(ProcessLostError, "the coordinator is lost")
        raise closed.error(self._me, caller) from None


def receive(channel: Channel, limit: float, ticket: int | None = None) -> Frame:
    """Return the answer to an arrival or to `ticket`; skip answers to earlier questions."""
    while True:
        frame = channel.receive(limit)
        if frame.header.get("ticket") in (None, ticket):
            return frame
