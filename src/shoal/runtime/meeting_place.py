"""The meeting place: the server that the processes of a job meet at.

::

    python -m shoal.runtime.meeting_place --processes 4 --until-empty

prints one line, `{"address": "127.0.0.1:43211"}`, when it listens. The token is taken from
SHOAL_TOKEN. It is one selectors loop that moves frames between sockets and two state machines,
`joining` and `meeting`, which hold all the rules.

A process keeps one connection open for its life: when that one ends without a BYE the process is
dead, and known to be so as soon as the kernel says it. Each lane has a connection of its own,
whose end means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable

from shoal.runtime.connections import Connection, Connections
from shoal.runtime.coordinator import Point
from shoal.runtime.frames import (
    Frame,
    FrameError,
    address_text,
    join_payloads,
    number_field,
    pack_frame,
    text_field,
    whole_field,
)
from shoal.runtime.joining import Joining, JoinReply, parse_hello
from shoal.runtime.meeting import Answer, Meeting, Reply

__all__ = ["MeetingPlace", "main"]


class _Life:
    """A process that said HELLO: the connection whose end is its end, and those of its lanes."""

    def __init__(self, process: int, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.lanes: set[Connection] = set()


class MeetingPlace:
    """Serves one job after the other, on a listening socket that it is given."""

    def __init__(
        self,
        server: socket.socket,
        num_processes: int,
        *,
        token: str = "",
        jax_service: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address_text(*server.getsockname()[:2])
        self._clock = clock
        self._connections = Connections(server, self, clock)
        self._start: Callable[[], Joining[Connection]] = lambda: Joining(
            num_processes, token=token, jax_service=jax_service
        )
        self._joining = self._start()
        self._meeting: Meeting[Connection] | None = None
        self._lives: dict[int, _Life] = {}
        self._who: dict[Connection, _Life] = {}

    def serve(
        self, *, until_closed: int | None = None, until_empty: bool = False, idle_s: float = 300.0
    ) -> None:
        """Serve until the other end of the pipe `until_closed` is closed, or nobody is left.

        With `until_empty` it also ends when nobody has come within `idle_s`.
        """
        if until_closed is not None:
            self._connections.hold_leash(until_closed)
        quiet_since = self._clock()
        while self._connections.poll(self._pause_s(quiet_since + idle_s if until_empty else None)):
            now = self._clock()
            self._answer_joining(self._joining.tick(now))
            if self._meeting is not None:
                self._answer(self._meeting.tick(now))
            if self._lives:
                quiet_since = now
            elif self._meeting is not None or self._joining.is_spent(now):
                if until_empty:
                    break
                self._joining, self._meeting = self._start(), None
            elif until_empty and now >= quiet_since + idle_s:
                break
        self._connections.close_all()

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `connections.Listener`."""
        verb = text_field(frame.header, "do")
        life = self._who.get(connection)
        if life is None:
            self._on_stranger(connection, verb, frame)
        elif self._meeting is None:
            raise FrameError(f"{verb[:40]!r} before everybody had joined")
        else:
            self._on_member(self._meeting, connection, life.process, verb, frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `connections.Listener`. The end of a lane's connection means nothing."""
        life = self._who.pop(connection, None)
        if life is None or life.connection is not connection:
            if life is not None:
                life.lanes.discard(connection)
            return
        del self._lives[life.process]
        for lane in life.lanes:
            del self._who[lane]
            self._connections.close(lane)
        if self._meeting is None:
            self._answer_joining(self._joining.depart(life.process))
        else:
            self._answer(self._meeting.depart(self._clock(), life.process, "lost", reason))

    def _pause_s(self, idle_until: float | None) -> float | None:
        due = min(self._connections.next_deadline, self._joining.next_deadline)
        if not self._lives:
            due = min(due, math.inf if idle_until is None else idle_until)
            if self._joining.refusal is not None:
                due = min(due, self._joining.deadline)  # then it has been heard long enough
        if self._meeting is not None:
            due = min(due, self._meeting.next_deadline)
        return None if due == math.inf else max(0.0, due - self._clock())

    def _on_stranger(self, connection: Connection, verb: str, frame: Frame) -> None:
        refusal = self._joining.stranger(frame.header, connection.origin)
        if refusal is not None:
            self._answer_joining([JoinReply(connection, refusal)])
        elif verb == "hello":
            hello = parse_hello(frame.header)
            replies = self._joining.hello(self._clock(), hello, connection)
            if not any(reply.to is connection and reply.refusal for reply in replies):
                life = _Life(hello.process, connection)
                self._lives[hello.process] = self._who[connection] = life
                self._connections.trust(connection)
            self._answer_joining(replies)
        elif verb == "lane":
            owner = self._lives.get(whole_field(frame.header, "process"))
            incarnation = text_field(frame.header, "incarnation")
            if owner is None or not self._joining.knows(owner.process, incarnation):
                raise FrameError("a lane of a process that is not here")
            owner.lanes.add(connection)
            self._who[connection] = owner
            self._connections.trust(connection)
        else:
            raise FrameError(f"{verb[:40]!r} from somebody who did not say who it is")

    def _on_member(
        self,
        meeting: Meeting[Connection],
        connection: Connection,
        process: int,
        verb: str,
        frame: Frame,
    ) -> None:
        now, header = self._clock(), frame.header
        if verb == "arrive":
            self._answer(
                meeting.arrive(
                    now,
                    process,
                    _point_of(header, process, self._joining.num_processes),
                    frame.body,
                    timeout_s=number_field(header, "timeout_s"),
                    to=connection,
                    ticket=whole_field(header, "ticket"),
                )
            )
        elif verb == "who":
            facts = meeting.waiting_for(now, process, text_field(header, "lane"))
            if facts is not None:
                ticket = whole_field(header, "ticket")
                self._answer([Reply(connection, ticket, Answer("waiting", facts))])
        elif verb == "members":
            answer = Answer("members", {"members": meeting.members(now)})
            self._answer([Reply(connection, whole_field(header, "ticket"), answer)])
        elif verb == "doing":
            meeting.say(now, process, text_field(header, "words"))
        elif verb == "failed":
            words = frame.body.decode(errors="replace")
            self._answer(meeting.depart(now, process, "failed", words))
        elif verb == "bye":
            self._answer(meeting.depart(now, process, "left", "left the job"))
        else:
            raise FrameError(f"unknown verb {verb[:40]!r}")

    def _answer_joining(self, replies: list[JoinReply[Connection]]) -> None:
        if self._joining.is_complete and self._meeting is None:
            self._meeting = Meeting(self._joining.hosts, self._clock())
        welcome = b""
        for to, refusal, missing in replies:
            if refusal is not None:
                refused = pack_frame({"is": "refused", "missing": missing}, refusal.encode())
                self._connections.send(to, refused, then_close=True)
                self._forget(to)
                continue
            welcome = welcome or pack_frame(
                {"is": "welcome", "jax_service": self._joining.jax_service},
                json.dumps(self._joining.hosts).encode(),
            )
            self._connections.send(to, welcome)

    def _forget(self, refused: Connection) -> None:
        life = self._who.pop(refused, None)
        if life is not None:
            del self._lives[life.process]

    def _answer(self, replies: Iterable[Reply[Connection]]) -> None:
        """Send each its answer; the body of an answer is packed once for all."""
        bodies: dict[int, bytes] = {}
        for to, ticket, answer in replies:
            body = bodies.get(id(answer))
            if body is None:
                body = bodies[id(answer)] = _body_of(answer)
            self._connections.send(to, pack_frame({"ticket": ticket, "is": answer.kind}, body))


def _body_of(answer: Answer) -> bytes:
    if answer.kind == "ok":
        return join_payloads(list(answer.payloads.values()))
    return json.dumps(answer.facts).encode()


def _point_of(header: dict[str, object], process: int, count: int) -> Point:
    return Point(
        name=text_field(header, "name"),
        group=_group_field(header, process, count),
        lane=text_field(header, "lane"),
        fingerprint=text_field(header, "fingerprint"),
        site=text_field(header, "site"),
    )


def _group_field(header: dict[str, object], process: int, count: int) -> tuple[int, ...] | None:
    """Return a group: sorted, without repetition, of this job, with the one who names it."""
    group = header.get("group")
    if group is None:
        return None
    if not isinstance(group, list) or not all(type(member) is int for member in group):
        raise FrameError("field 'group' is no list of processes")
    members = set(group)
    if process not in members or not all(0 <= member < count for member in members):
        raise FrameError("field 'group' names others than this job's, or not its sender")
    return None if len(members) == count else tuple(sorted(members))


def main(arguments: list[str] | None = None) -> int:
    """Run the server from the command line."""
    options = _parse(arguments)
    if options.until_stdin_closes or options.until_empty:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job; its end ends us
    _allow_many_connections()
    family = socket.AF_INET6 if ":" in options.bind else socket.AF_INET
    listener = socket.create_server((options.bind, options.port), family=family, backlog=4096)
    place = MeetingPlace(
        listener,
        options.processes,
        token=os.environ.get("SHOAL_TOKEN", ""),
        jax_service=options.jax_service,
    )
    print(json.dumps({"address": place.address}), flush=True)
    try:
        place.serve(
            until_closed=sys.stdin.fileno() if options.until_stdin_closes else None,
            until_empty=options.until_empty,
            idle_s=options.idle_s,
        )
    except KeyboardInterrupt:
        return 130
    except PermissionError:
        print("--until-stdin-closes: standard input must be a pipe", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.runtime.meeting_place")
    parser.add_argument("--processes", type=int, required=True, metavar="N")
    parser.add_argument("--bind", default="127.0.0.1", metavar="HOST")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--jax-service", default="", metavar="HOST:PORT")
    parser.add_argument("--until-stdin-closes", action="store_true")
    parser.add_argument("--until-empty", action="store_true")
    parser.add_argument("--idle-s", type=float, default=300.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: at least 1")
    return options


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as this process may: it needs two for each process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses "unlimited" here
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
