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
import errno
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
    pack_answer,
    pack_frame,
    text_field,
    whole_field,
)
from shoal.runtime.joining import Hello, Joining, JoinReply, parse_hello
from shoal.runtime.meeting import Answer, Meeting, Reply

__all__ = ["MeetingPlace", "main"]

_LETTING_GO_S = 5.0  # how long an earlier job may take to give its address back


class _Life:
    """A process that said HELLO: the connection whose end is its end, and those of its lanes."""

    def __init__(self, job: _Job, process: int, connection: Connection) -> None:
        self.job = job
        self.process = process
        self.connection = connection
        self.lanes: set[Connection] = set()


class _Job:
    """One joining, what followed from it, and who of it is still connected."""

    def __init__(self, joining: Joining[Connection]) -> None:
        self.joining = joining
        self.meeting: Meeting[Connection] | None = None
        self.lives: dict[int, _Life] = {}

    @property
    def next_deadline(self) -> float:
        return self.meeting.next_deadline if self.meeting else self.joining.next_deadline

    def is_over(self, now: float) -> bool:
        return not self.lives and (self.meeting is not None or self.joining.is_spent(now))

    def ended_for(self, process: int, now: float) -> bool:
        """Does a HELLO of this process belong to another job than this one?"""
        left = self.meeting is not None and self.meeting.has_gone(process)
        return left or self.joining.has_told(process) or self.joining.is_spent(now)


class MeetingPlace:
    """Serves one job after the other, on a listening socket that it is given.

    A process that left may say HELLO for the next job while others of the last are still here.
    """

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
        self._num_processes = num_processes
        self._token = token
        self._jax_service = jax_service
        self._clock = clock
        self._connections = Connections(server, self, clock)
        self._who: dict[Connection, _Life] = {}
        self._is_for_one_job = False
        self._earlier: list[_Job] = []  # with somebody in them still
        self._job = self._new_job()  # the one that a HELLO is for

    def serve(
        self, *, until_closed: int | None = None, until_empty: bool = False, idle_s: float = 300.0
    ) -> None:
        """Serve until the other end of the pipe `until_closed` is closed, or nobody is left.

        With `until_empty` it serves one job, and also ends when nobody has come within `idle_s`.
        """
        self._is_for_one_job = until_empty
        if until_closed is not None:
            self._connections.hold_leash(until_closed)
        now = quiet_since = self._clock()
        while True:
            due = min(self._due(), quiet_since + idle_s if until_empty else math.inf)
            if not self._connections.poll(None if due == math.inf else max(0.0, due - now)):
                self._answer_joining(self._job, self._job.joining.abandon(now))
                break
            now = self._clock()
            if now >= due:
                self._on_time(now)
            if self._who:
                quiet_since = now
            elif until_empty and (self._job.is_over(now) or now >= quiet_since + idle_s):
                break
        self._connections.close_all()

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `connections.Listener`."""
        verb = text_field(frame.header, "do")
        life = self._who.get(connection)
        if life is None:
            self._on_stranger(connection, verb, frame)
        elif life.job.meeting is None and verb == "who":
            absent = json.dumps(life.job.joining.absent()).encode()
            self._connections.send(connection, pack_frame({"is": "waiting"}, absent))
        elif life.job.meeting is None:
            raise FrameError(f"{verb[:40]!r} before everybody had joined")
        else:
            self._on_member(life.job.meeting, connection, life.process, verb, frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `connections.Listener`. The end of a lane's connection means nothing."""
        life = self._who.pop(connection, None)
        if life is None:
            return
        if life.connection is not connection:
            life.lanes.discard(connection)
            return
        job, process = life.job, life.process
        del job.lives[process]
        for lane in life.lanes:
            del self._who[lane]
            self._connections.close(lane)
        if job.meeting is None:
            self._answer_joining(job, job.joining.depart(self._clock(), process))
        else:
            self._answer(job.meeting.depart(self._clock(), process, "lost", reason))

    def _new_job(self) -> _Job:
        return _Job(Joining(self._num_processes, token=self._token, jax_service=self._jax_service))

    def _due(self) -> float:
        """When something must be done though nobody says anything."""
        due = min(self._job.next_deadline, self._connections.next_deadline)
        if self._earlier:
            due = min(due, *(job.next_deadline for job in self._earlier))
        return due if self._who else min(due, self._job.joining.stands_until)

    def _on_time(self, now: float) -> None:
        self._earlier = [job for job in self._earlier if job.lives]
        for job in (*self._earlier, self._job):
            self._answer_joining(job, job.joining.tick(now))
            if job.meeting is not None:
                self._answer(job.meeting.tick(now))

    def _on_stranger(self, connection: Connection, verb: str, frame: Frame) -> None:
        refusal = self._job.joining.stranger(frame.header, connection.origin)
        if refusal is not None:
            self._answer_joining(self._job, [JoinReply(connection, refusal)])
        elif verb == "hello":
            self._on_hello(connection, parse_hello(frame.header))
        elif verb == "lane":
            process = whole_field(frame.header, "process")
            incarnation = text_field(frame.header, "incarnation")
            for job in (*self._earlier, self._job):
                if process in job.lives and job.joining.knows(process, incarnation):
                    self._who[connection] = job.lives[process]
                    job.lives[process].lanes.add(connection)
                    self._connections.trust(connection)
                    return
            raise FrameError("a lane of a process that is not here")
        else:
            raise FrameError(f"{verb[:40]!r} from somebody who did not say who it is")

    def _on_hello(self, connection: Connection, hello: Hello) -> None:
        now = self._clock()
        if self._job.ended_for(hello.process, now):
            if self._is_for_one_job:
                self._connections.send(connection, pack_frame({"is": "later"}), then_close=True)
                return
            self._earlier.append(self._job)
            self._job = self._new_job()
        job = self._job
        replies = job.joining.hello(now, hello, connection)
        if not any(reply.to is connection and reply.refusal for reply in replies):
            job.lives[hello.process] = _Life(job, hello.process, connection)
            self._who[connection] = job.lives[hello.process]
            self._connections.trust(connection)
        self._answer_joining(job, replies)

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
                    _point_of(header, process, self._num_processes),
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

    def _answer_joining(self, job: _Job, replies: list[JoinReply[Connection]]) -> None:
        if job.joining.is_complete and job.meeting is None:
            job.meeting = Meeting(job.joining.hosts, self._clock())
        welcome = b""
        for to, refusal, missing in replies:
            if refusal is not None:
                refused = pack_frame({"is": "refused", "missing": missing}, refusal.encode())
                self._connections.send(to, refused, then_close=True)
                if (life := self._who.pop(to, None)) is not None:
                    del job.lives[life.process]
                continue
            welcome = welcome or pack_frame(
                {"is": "welcome", "jax_service": job.joining.jax_service},
                json.dumps(job.joining.hosts).encode(),
            )
            self._connections.send(to, welcome)

    def _answer(self, replies: Iterable[Reply[Connection]]) -> None:
        """Send each its answer; the body of an answer is packed once for all."""
        bodies: dict[int, bytes] = {}
        for to, ticket, answer in replies:
            body = bodies.get(id(answer))
            if body is None:
                body = bodies[id(answer)] = _body_of(answer)
            self._connections.send(to, pack_answer(ticket, answer.kind, body))


def _body_of(answer: Answer) -> bytes:
    if answer.kind == "ok":
        return join_payloads(list(answer.payloads.values()))
    return json.dumps(answer.facts).encode()


def _point_of(header: dict[str, object], process: int, count: int) -> Point:
    row = header.get("point")
    if not isinstance(row, list) or len(row) != len(Point._fields):
        raise FrameError("field 'point' is no point")
    point = Point(*row)
    for text in (point.name, point.lane, point.fingerprint, point.site):
        if type(text) is not str:
            raise FrameError("field 'point' has no text where it must")
    return point if point.group is None else point._replace(group=_group(row[1], process, count))


def _group(members: object, process: int, count: int) -> tuple[int, ...] | None:
    """Return a group: sorted, without repetition, of this job, with the one who names it."""
    if not isinstance(members, list) or not all(type(member) is int for member in members):
        raise FrameError("a group is no list of processes")
    group = sorted(set(members))
    if process not in members or group[0] < 0 or group[-1] >= count:
        raise FrameError("a group names others than this job's, or not its sender")
    return None if len(group) == count else tuple(group)


def main(arguments: list[str] | None = None) -> int:
    """Run the server from the command line."""
    options = _parse(arguments)
    if options.until_stdin_closes or options.until_empty:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job; its end ends us
    _allow_many_connections()
    listener = _listen(options.bind, options.port, min(options.idle_s, _LETTING_GO_S))
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


def _listen(host: str, port: int, patience_s: float) -> socket.socket:
    """Listen there; an earlier job of the same address may be about to end."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    limit = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= limit:
                raise
        time.sleep(0.02)


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
