"""The client of the meeting place: the coordinator of a real process.

One connection lives as long as the process and only talks one way (its end tells the meeting place
that the process is gone). Calls that wait take a connection of their own from a pool, so several
threads may wait at once, each in its lane, and each reads its own answer: no thread in between.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar

from shoal import settings
from shoal.errors import DeadlineError, ProcessLostError, ShoalError, UsageError
from shoal.runtime.channel import Channel, connect
from shoal.runtime.coordinator import Member, Point, checked
from shoal.runtime.frames import (
    Frame,
    pack_frame,
    pack_text,
    split_address,
    split_payloads,
    text_field,
)
from shoal.runtime.hello import Card, Welcome, say_hello
from shoal.runtime.lanes import Lanes
from shoal.runtime.meeting import Answer
from shoal.runtime.verdicts import Self, error_of, waiting_line

__all__ = ["TcpCoordinator", "join"]

T = TypeVar("T")

_LOG = logging.getLogger("shoal")
_MARGIN_S = 1.0  # how much later than the deadline the meeting place may answer
_TELL_S = 1.0  # a one-way word that cannot be sent within this is not said
_MAX_WORDS = 64 << 10


def join(
    address: str,
    *,
    process: int,
    num_processes: int,
    token: str = "",
    timeout_s: float,
    jax_service: str | None = None,
    versions: str | None = None,
    host: str | None = None,
    warn_after_s: float | None = None,
) -> TcpCoordinator:
    """Say HELLO at the meeting place and wait until all `num_processes` have said it.

    Nobody is in before all are. A meeting place that does not listen yet is tried again until the
    deadline.

    Args:
      address: host:port of the meeting place.
      timeout_s: deadline in seconds; the earliest of all ends the joining for all.
      jax_service: host:port of JAX's service, if this process knows it; told to all.
      versions: what must be equal on all; None: the versions of shoal and JAX.
      host: how this host is called in messages; None: its name.
      warn_after_s: None: SHOAL_WARN_AFTER_S.

    Raises:
      InitializeError: on every process that came: a process is missing at the earliest deadline,
        an index comes twice or is out of range, counts or versions differ, a process died
        meanwhile. On this one: nobody listens, or the token is wrong.
    """
    card = Card(
        process, num_processes, host or socket.gethostname(), token, versions, jax_service or ""
    )
    warn_after_s = warn_after_s or settings.seconds("SHOAL_WARN_AFTER_S")
    channel, welcome = say_hello(address, card, timeout_s, warn_after_s)
    return TcpCoordinator(address, process, token, channel, welcome, warn_after_s)


class TcpCoordinator:
    """A process of a job that meets at a meeting place; made by `join`. A `Coordinator`."""

    def __init__(
        self,
        address: str,
        process: int,
        token: str,
        life: Channel,
        welcome: Welcome,
        warn_after_s: float,
    ) -> None:
        self.address = address
        self._welcome = welcome
        self._me = Self(process, welcome.hosts)
        self._token = token
        self._life = life
        self._warn_after_s = warn_after_s
        self._lock = threading.RLock()  # a signal's handler may tell while its thread tells
        self._lanes = Lanes(self._me)
        self._channels: set[Channel] = set()
        self._free: list[Channel] = []
        self._tickets = itertools.count(1)
        self._over: _Over | None = None  # why no call can succeed any more, if so
        _abandon_in_forked_children(self)

    @property
    def process(self) -> int:
        """This process's index."""
        return self._me.process

    @property
    def num_processes(self) -> int:
        """How many processes the job has."""
        return len(self._welcome.hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each process."""
        return self._welcome.hosts

    @property
    def jax_service(self) -> str:
        """host:port of JAX's service, or empty if nobody knew it."""
        return self._welcome.jax_service

    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """See `Coordinator.arrive`. Also raises ProcessLostError if the meeting place is gone."""
        me, count = self._me, len(self._me.hosts)
        point = checked(point, payload, timeout_s, process=me.process, num_processes=count)
        if self._over is not None:
            self._raise_over(repr(point.name))
        started = time.monotonic()
        self._lanes.enter(point)
        try:
            answer = self._meet(point, payload, timeout_s, started)
        finally:
            self._lanes.leave(point)
        if answer.kind == "ok":
            return answer.payloads
        waited_s = time.monotonic() - started
        raise error_of(answer.kind, answer.facts, self._me, point, waited_s)

    def tell(self, kind: str, words: str) -> None:
        """See `Coordinator.tell`. Never raises for a meeting place that is gone."""
        if kind == "failed":
            # The end of a traceback says what happened; its beginning where.
            if len(words) > _MAX_WORDS:
                words = words[: _MAX_WORDS // 4] + "\n...\n" + words[-_MAX_WORDS * 3 // 4 :]
            self._say(pack_frame({"do": "failed"}, words.encode(errors="replace")))
        elif kind == "doing":
            self._say(pack_frame({"do": "doing", "words": words[:1000]}))
        else:
            raise UsageError(f"tell({kind!r}): the kinds are 'failed' and 'doing'")

    def members(self, *, timeout_s: float) -> tuple[Member, ...]:
        """See `Coordinator.members`.

        Raises:
          DeadlineError: the meeting place did not answer within `timeout_s`.
          ProcessLostError: the meeting place is gone.
        """
        asked = "members()"
        if self._over is not None:
            self._raise_over(asked)
        limit = time.monotonic() + timeout_s

        def talk(channel: Channel) -> Frame:
            ticket = next(self._tickets)
            try:
                channel.send(pack_frame({"do": "members", "ticket": ticket}), limit)
                return _receive(channel, ticket, limit)
            except TimeoutError:
                told = f"the meeting place did not answer within {timeout_s:g} s"
                raise DeadlineError(f"{self._me}: {asked}: {told}", waited_s=timeout_s) from None

        frame = self._on_channel(asked, limit, talk)
        return tuple(Member(*row) for row in json.loads(frame.body)["members"])

    def close(self) -> None:
        """See `Coordinator.close`. Calls that other threads still wait in end with an error."""
        if self._over is None:
            self._say(pack_frame({"do": "bye"}))
            self._hang_up(_Over(UsageError, "this process has left the job"))

    def _meet(self, point: Point, payload: bytes, timeout_s: float, started: float) -> Answer:
        ticket = next(self._tickets)
        limit = started + timeout_s + _MARGIN_S
        arrival = _arrive_frame(point, payload, timeout_s, ticket)

        def talk(channel: Channel) -> Frame:
            channel.send(arrival, limit)
            try:
                frame = _receive(channel, ticket, min(started + self._warn_after_s, limit))
            except TimeoutError:
                who = {"do": "who", "ticket": ticket, "lane": point.lane}
                channel.send(pack_frame(who), limit)
                frame = _receive(channel, ticket, limit)
            if frame.header.get("is") == "waiting":
                self._warn(point, json.loads(frame.body), time.monotonic() - started)
                frame = _receive(channel, ticket, limit)
            return frame

        frame = self._on_channel(repr(point.name), limit, talk)
        return _answer_of(frame, point.group or range(self.num_processes))

    def _warn(self, point: Point, facts: Mapping[str, Any], waited_s: float) -> None:
        _LOG.warning("%s", waiting_line(facts, self._me, point, waited_s))

    def _raise_over(self, asked: str) -> NoReturn:
        why = self._over or _Over(ProcessLostError, "the meeting place is lost")
        raise why.kind(f"{self._me}: {asked}: {why.reason}")

    def _on_channel(self, asked: str, limit: float, talk: Callable[[Channel], T]) -> T:
        """Talk over a connection. If anything goes wrong it is closed: an answer may be half read.

        The meeting place counts what it got, so an interrupted wait (Ctrl-C) leaves the others'
        count right.
        """
        channel: Channel | None = None
        try:
            channel = self._take_channel(limit)
            result = talk(channel)
        except ShoalError:
            self._drop(channel)
            raise
        except (OSError, ValueError) as error:  # ValueError: no frame, no JSON
            self._drop(channel)
            told = "it does not answer" if isinstance(error, TimeoutError) else str(error)
            reason = f"the meeting place at {self.address} is lost ({told})"
            self._hang_up(_Over(ProcessLostError, reason))
            self._raise_over(asked)
        except BaseException:
            self._drop(channel)
            raise
        self._free.append(channel)
        if self._over is not None:  # hung up meanwhile, by another thread
            self._drop(channel)
        return result

    def _take_channel(self, limit: float) -> Channel:
        try:
            return self._free.pop()
        except IndexError:
            pass  # all are in use
        most = self._welcome.max_body_bytes
        channel = connect(split_address(self.address), limit, max_body_bytes=most)
        lane = {
            "do": "lane",
            "token": self._token,
            "process": self.process,
            "incarnation": self._welcome.incarnation,
        }
        try:
            channel.send(pack_frame(lane), limit)
        except BaseException:
            channel.close()
            raise
        self._channels.add(channel)
        return channel

    def _drop(self, channel: Channel | None) -> None:
        if channel is not None:
            channel.close()
            self._channels.discard(channel)

    def _say(self, frame: bytes) -> None:
        """Send one way, on the connection that lives as long as the process."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed under our hands
            self._life.send(frame, time.monotonic() + _TELL_S)

    def _hang_up(self, why: _Over) -> None:
        """End all connections. Those that other threads wait in are shut, and closed by them."""
        with self._lock:
            self._over = self._over or why
        self._life.shut()
        self._life.close()
        free, self._free = self._free, []
        for channel in free:
            self._drop(channel)
        for channel in tuple(self._channels):
            channel.shut()

    def _abandon(self) -> None:
        """In a forked child: close our copies of the sockets, for they would hide our parent's
        death; shut nothing, for the connections are the parent's."""
        self._lock = threading.RLock()  # the parent's may have been held
        told = f"this is a forked child of process {self.process}, no member of the job"
        self._over = self._over or _Over(UsageError, told)
        for channel in (self._life, *self._channels):
            channel.close()


class _Over(NamedTuple):
    """Why a coordinator is of no use any more."""

    kind: type[ShoalError]
    reason: str


def _arrive_frame(point: Point, payload: bytes, timeout_s: float, ticket: int) -> bytes:
    return pack_text(b'{"ticket":%d,%b' % (ticket, _arrival(point, timeout_s)), payload)


@lru_cache(maxsize=256)
def _arrival(point: Point, timeout_s: float) -> bytes:
    """The part of an arrival's header that a loop repeats: most of the time that a barrier takes
    on this side would be spent writing it anew."""
    limit_s = None if timeout_s == math.inf else timeout_s
    return json.dumps({"do": "arrive", "timeout_s": limit_s, "point": point})[1:].encode()


def _receive(channel: Channel, ticket: int, limit: float) -> Frame:
    """Return the next frame of this call; frames of a call that is over are passed by."""
    while True:
        frame = channel.receive(limit)
        if frame.header.get("ticket") == ticket:
            return frame


def _answer_of(frame: Frame, group: Sequence[int]) -> Answer:
    kind = text_field(frame.header, "is")
    if kind == "ok":
        if not frame.body:
            return Answer(kind, payloads=dict.fromkeys(group, b""))
        payloads = split_payloads(frame.body, len(group))
        return Answer(kind, payloads=dict(zip(group, payloads, strict=True)))
    return Answer(kind, json.loads(frame.body))


def _abandon_in_forked_children(coordinator: TcpCoordinator) -> None:
    here = weakref.ref(coordinator)

    def abandon() -> None:
        coordinator = here()
        if coordinator is not None:
            coordinator._abandon()

    os.register_at_fork(after_in_child=abandon)
