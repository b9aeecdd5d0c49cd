"""The gatherer of a host: a small process between the host's processes and the meeting place.

::

    python -P -m shoal.runtime.gatherer.gathering    reads its orders, one line of JSON, from stdin

    process ──┐
    process ──┼─ Unix socket ─▶ gatherer ── trunk, TCP ──▶ meeting place
    process ──┘

The processes speak to it as they would to the meeting place, and it passes their frames on, each
connection as a *branch* of one connection, the *trunk* (`server.trunks` has the frames). Equal
arrivals, and signs of life, go together; an answer to several comes once. So the meeting place
works per host, and not per process.

Nothing is decided here. The end of a process's connection is passed on at once. When the trunk
ends, or the meeting place does not answer, so do all connections, and the gatherer with them; it
ends by itself with the last process of its host. A meeting place that does not read is waited for:
meanwhile the processes are not read either.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from shoal.runtime.client.heartbeat import SilenceDetector
from shoal.runtime.gatherer.packing import HeldArrivals, HeldBeats
from shoal.runtime.rules.joining import WRONG_TOKEN, is_same_secret
from shoal.runtime.rules.messages import ArrivalHeaders, beat_of, trails_of
from shoal.runtime.system.job_signals import ignore_job_signals
from shoal.runtime.system.service_commands import show_part
from shoal.runtime.wire.connection import open_socket, what_failed
from shoal.runtime.wire.frames import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    number_field,
    numbers_field,
    pack_frame,
    repack,
    split_address,
    text_field,
    whole_field,
)
from shoal.runtime.wire.keepalive import watch_link
from shoal.runtime.wire.server_sockets import (
    Connection,
    Connections,
    allow_many_connections,
)
from shoal.runtime.wire.unix_socket import listen_unix

MOST_UNSENT_BYTES = 32 << 20  # to the meeting place; until it reads, the processes are not read

_ECHO = pack_frame({"is": "beat"})
_DIRECT = pack_frame({"is": "direct"})
_CONNECT_S = 5.0
_RETRY_S = 0.05  # a meeting place that could not be reached is not tried again sooner
_IDLE_S = 10.0  # how long it waits for a first process
_LEAVE_S = 2.0  # how long the meeting place may take to confirm the end
_LATE_S = 0.25  # waking up so much later than intended is not the meeting place's silence
_DAY_S = 86_400.0


class _Member(NamedTuple):
    """A connection of a process of this host."""

    branch: int
    process: int
    is_life: bool  # or for calls
    num_processes: int  # of the job, as its HELLO says


class Gatherer:
    """One gatherer: its processes' connections, and the trunk. Listens to both."""

    def __init__(self, orders: Mapping[str, Any], server: socket.socket) -> None:
        self._address = text_field(orders, "meeting_place")
        self._token = text_field(orders, "token")
        self._clock = time.monotonic
        # Apart, so that the processes can be left unread.
        self._near = Connections([server], self, self._clock)
        self._far = Connections([], self, self._clock)
        self._far_alone, self._both = select.poll(), select.poll()
        for poll in (self._far_alone, self._both):
            poll.register(self._far.fileno(), select.POLLIN)
        self._both.register(self._near.fileno(), select.POLLIN)
        self._members: dict[Connection, _Member] = {}
        self._ends: dict[int, Connection] = {}  # by branch
        self._lives: dict[int, _Member] = {}  # by process
        self._next_branch = 0
        self._trunk: Connection | None = None
        self._is_welcome = False
        self._refused = (-math.inf, "", "")  # when the meeting place could not be reached, and why
        self._headers = ArrivalHeaders()
        self._arrivals = HeldArrivals(self._send)
        self._beats = HeldBeats(math.inf)
        self._heartbeat_s = math.inf
        self._beat_at = math.inf
        self._echo = SilenceDetector(math.inf)
        self._quiet_since = self._clock()
        self._leaves_at = math.inf
        self._is_over = False

    def run(self) -> None:
        """Serve until no process of the host is left, or the meeting place is lost."""
        while not self._is_over:
            self.turn()
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._near.close_all()
        self._far.close_all()

    @property
    def is_full(self) -> bool:
        """Whether the meeting place does not read fast enough for more to be read here."""
        return self._trunk is not None and self._trunk.unsent_bytes > MOST_UNSENT_BYTES

    def turn(self) -> None:
        """Wait until something has come or is due, and do it."""
        due = self._due()
        self._poll(due)
        now = self._clock()
        if now - due > _LATE_S:
            self._echo.suspended(now - due)
        if self._trunk is not None and self._trunk.has_spoken:
            self._trunk.has_spoken = False
            self._take_sign_of_life()
        self._on_time(now)

    def _poll(self, due: float) -> None:
        is_full = self.is_full
        wait_s = min(max(0.0, due - self._clock()), _DAY_S)
        (self._far_alone if is_full else self._both).poll(math.ceil(wait_s * 1e3))
        self._far.poll(0)
        if not is_full:
            self._near.poll(0)

    def _due(self) -> float:
        idle_at = math.inf if self._members else self._quiet_since + _IDLE_S
        held = min(self._arrivals.due, self._beats.due, self._beat_at)
        stranger_at = math.inf if self.is_full else self._near.next_deadline
        return min(held, idle_at, self._leaves_at, self._echo.due, stranger_at)

    def _on_time(self, now: float) -> None:
        if now >= self._arrivals.due:
            self._arrivals.expire(now)
        if now >= min(self._beats.due, self._beat_at):
            self._beat(now)
        is_idle = not self._members and now >= self._quiet_since + _IDLE_S
        if is_idle or now >= min(self._echo.due, self._leaves_at):
            self._is_over = True

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`: from the meeting place, or from a process."""
        if connection is self._trunk:
            self._on_trunk_frame(frame)
        elif (member := self._members.get(connection)) is None:
            self._on_first(connection, frame)
        elif not self._is_held(member, frame):
            self._forward(member.branch, frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        if connection is self._trunk:
            self._is_over = True
            if not self._is_welcome:  # perhaps it is of an earlier version, and tells processes so
                for near in self._ends.values():
                    self._near.send(near, _DIRECT, then_close=True)
        elif (member := self._members.get(connection)) is not None:
            self._arrivals.flush()
            end = {"do": "end", "number": member.branch}
            self._send(pack_frame(end, reason.encode(errors="replace")))
            self._drop(connection)

    def _is_held(self, member: _Member, frame: Frame) -> bool:
        """Hold what may go together with frames of others. What is not valid does not: the meeting
        place judges it as if it had come directly, and ends this process's connection alone."""
        verb, header, process = frame.header.get("do"), frame.header, member.process
        life = self._lives.get(process)
        if life is None:
            return False
        now, count = self._clock(), life.num_processes
        try:
            if verb == "beat" and member.is_life:
                beat, trails = beat_of(header), trails_of(header, process, count)
                self._beats.add(now, member.branch, beat, trails, len(self._lives))
                return True
            if verb == "arrive" and not member.is_life and "ticket" not in header:
                arrival = self._headers.read(header, process, count)
                here = self._here(arrival.point.group)
                return self._arrivals.add(now, member.branch, process, frame, arrival, here)
        except FrameError:
            pass
        return False

    def _here(self, group: tuple[int, ...] | None) -> Collection[int]:
        """Return the processes of this host that take part in a point."""
        return self._lives.keys() if group is None else self._lives.keys() & {*group}

    def _on_first(self, connection: Connection, frame: Frame) -> None:
        """Give a new connection that has the token its branch. Before, nothing else is read."""
        if not is_same_secret(text_field(frame.header, "token"), self._token):
            refusal = pack_frame({"is": "refused", "missing": []}, WRONG_TOKEN.encode())
            self._near.send(connection, refusal, then_close=True)
            return
        verb, process = text_field(frame.header, "do"), whole_field(frame.header, "process")
        if verb not in ("hello", "lane"):
            raise FrameError(f"{verb[:40]!r} to a gatherer")
        is_life = verb == "hello"
        count = whole_field(frame.header, "processes") if is_life else 0
        self._quiet_since = self._clock()
        if not self._reach(process):
            _, what, why = self._refused
            refusal = pack_frame({"is": "unreachable", "what": what}, why.encode(errors="replace"))
            self._near.send(connection, refusal, then_close=True)
            return
        member = _Member(self._next_branch, process, is_life, count)
        self._next_branch += 1
        self._members[connection] = member
        self._ends[member.branch] = connection
        self._near.trust(connection, max_body_bytes=MAX_PAYLOAD_BYTES)
        if is_life:
            self._lives.setdefault(process, member)  # an index taken twice is refused
        self._forward(member.branch, frame)

    def _forward(self, branch: int, frame: Frame) -> None:
        data = repack(frame)
        self._arrivals.flush()  # what was sent before arrives before
        self._send(pack_frame({"do": "branch", "number": branch}, data))

    def _send(self, data: bytes) -> None:
        if self._trunk is not None:
            self._far.send(self._trunk, data)

    def _drop(self, connection: Connection) -> None:
        """Forget a connection; leave after the last."""
        member = self._members.pop(connection)
        del self._ends[member.branch]
        self._arrivals.answered(member.branch)
        if self._lives.get(member.process) is member:
            del self._lives[member.process]
            self._arrivals.left(member.process)
        if not self._members:
            # The meeting place closes the trunk once it has read everything.
            self._send(pack_frame({"do": "bye"}))
            self._leaves_at = self._clock() + _LEAVE_S

    def _reach(self, process: int) -> bool:
        """Return whether there is a trunk; open it, for this process."""
        if self._trunk is not None:
            self._refused = self._clock(), "the gatherer of this host is ending", ""
            return self._leaves_at == math.inf
        if self._clock() < self._refused[0] + _RETRY_S:
            return False
        try:
            sock = open_socket(split_address(self._address), time.monotonic() + _CONNECT_S)
        except OSError as error:
            self._refused = self._clock(), *what_failed(error)
            return False
        self._trunk = self._far.adopt(sock, self)
        self._trunk.most_unsent_bytes = math.inf  # or both ends could wait for the other to read
        self._trunk.reader.max_body_bytes = sys.maxsize
        self._send(pack_frame({"do": "trunk", "token": self._token, "process": process}))
        return True

    def _take_sign_of_life(self) -> None:
        """Take bytes of the meeting place as a sign of life: the answer to one may stand behind
        many of them."""
        self._echo.heard()
        for branch in self._beats.answered():
            if (end := self._ends.get(branch)) is not None:
                self._near.send(end, _ECHO)

    def _on_trunk_frame(self, frame: Frame) -> None:
        kind = frame.header.get("is")
        if kind == "branches":
            for branch in numbers_field(frame.header, "numbers"):
                self._arrivals.answered(branch)
                if (end := self._ends.get(branch)) is not None:
                    self._near.send(end, frame.body)
        elif kind == "close":
            if (end := self._ends.get(whole_field(frame.header, "number"))) is not None:
                self._near.send(end, b"", then_close=True)
                self.on_end(end, "closed by the meeting place")
        elif kind == "welcome":
            self._begin_beating(frame.header)
        elif kind == "refused":  # the token is wrong
            self._is_welcome = self._is_over = True
            for end in self._ends.values():
                self._near.send(end, repack(frame))

    def _begin_beating(self, header: Mapping[str, Any]) -> None:
        self._is_welcome = True
        lost_after_s = number_field(header, "lost_after_s")
        self._heartbeat_s = number_field(header, "heartbeat_s")
        self._echo = SilenceDetector(lost_after_s)
        self._beats = HeldBeats(self._heartbeat_s / 4)
        if self._trunk is not None:
            watch_link(self._trunk.socket, lost_after_s)
        self._beat_at = self._clock() + self._heartbeat_s

    def _beat(self, now: float) -> None:
        for frame in self._beats.frames(now):
            self._send(frame)
        self._echo.sent(now)
        self._beat_at = now + self._heartbeat_s


def main() -> int:
    """Run the gatherer given by the orders on stdin."""
    show_part("shoal-gatherer")
    ignore_job_signals()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the starter has died
    orders = json.loads(line)
    server = None
    with contextlib.suppress(OSError):  # another gatherer of this host has the name
        server = listen_unix(text_field(orders, "name"))
    with contextlib.suppress(BrokenPipeError):  # the starter died; other processes may connect
        print("ready", flush=True)
    if server is None:
        return 0
    allow_many_connections()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    os.close(nothing)
    Gatherer(orders, server).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
