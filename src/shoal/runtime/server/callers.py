"""The callers of the meeting place: each kind of connection, and the verbs it may use.

::

    Process   a process of a job, one way in each direction: its end is the end of the process
    Lane      calls of a process that wait for an answer; its end has no meaning
    Observer  queries from outside the job; its end has no meaning
    Keeper    watches the processes of one host from outside
    Service   a service that all processes need, which wants to be monitored
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from shoal.runtime.rules.gathering import Answer, Reply
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.messages import (
    Arrival,
    abandoned_of,
    arrival_of,
    beat_of,
    notice_of,
    processes_of,
    stop_report_of,
    trails_of,
)
from shoal.runtime.server.job import Life, ServedJob
from shoal.runtime.system.failure_words import one_line
from shoal.runtime.wire.frames import (
    Frame,
    FrameError,
    pack_frame,
    text_field,
    whole_field,
)
from shoal.runtime.wire.server_sockets import Connection

ECHO = pack_frame({"is": "beat"})
_MAX_WORDS = 1000


class ProcessCaller:
    """A process that sent HELLO, one way in each direction."""

    max_body_bytes = 1 << 20  # a traceback, or stacks

    def __init__(self, job: ServedJob, life: Life) -> None:
        self._job = job
        self._life = life

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        verb, header, job = text_field(frame.header, "do"), frame.header, self._job
        process = self._life.process
        if verb == "who":
            if job.meeting is None:
                absent = json.dumps(job.joining.absent()).encode()
                job.send(connection, pack_frame({"is": "waiting"}, absent))
        elif job.meeting is None:
            raise FrameError(f"{verb[:40]!r} before all processes had joined")
        elif verb == "beat":
            job.beat(process, beat_of(header))
            if "trails" in header:
                job.hear_trails(process, trails_of(header, process, job.num_processes))
            job.send(connection, ECHO)
        elif verb == "stacks":
            ticket = whole_field(header, "ticket")
            text = frame.body.decode(errors="replace")
            job.hear_stacks(process, ticket, text, beat_of(header))
        elif verb == "abandon":
            left = abandoned_of(frame, process, job.num_processes)
            job.answer(job.meeting.abandon(job.now(), process, left))
            for arrive in self._life.release(left.point.lane):
                arrive()
        elif verb == "end lane":
            job.meeting.end_lane(process, text_field(header, "lane"))
        elif verb == "doing":
            words = text_field(header, "words")[:_MAX_WORDS]
            job.meeting.say(job.now(), process, words)
        elif verb == "notice":
            job.give_notice(process, notice_of(header))
        elif verb == "stop":
            job.hear_stop(process, stop_report_of(frame))
        elif verb == "failed":
            job.depart(process, "failed", frame.body.decode(errors="replace"))
        elif verb == "bye":
            words = one_line(frame.body.decode(errors="replace"))
            job.depart(process, "left", words or "left the job")
        else:
            raise FrameError(f"unknown verb {verb[:40]!r}")

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._job.end_life(self._life, reason)


class LaneCaller:
    """A connection for the calls of a process."""

    def __init__(self, job: ServedJob, life: Life) -> None:
        self._job = job
        self._life = life
        self._count = job.num_processes
        self._last: tuple[Mapping[str, Any], Arrival] | None = None  # a header, parsed

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        header, job, process = frame.header, self._job, self._life.process
        meeting = job.meeting
        if self._last and header is self._last[0] and meeting is not None:
            self._arrive(meeting, connection, self._last[1], frame.body)
            return
        verb = text_field(header, "do")
        if meeting is None:
            raise FrameError(f"{verb[:40]!r} before all processes had joined")
        if verb == "arrive":
            arrival = arrival_of(header, process, self._count)
            self._last = header, arrival
            self._arrive(meeting, connection, arrival, frame.body)
        elif verb == "who":
            facts = meeting.waiting_for(job.now(), process, text_field(header, "lane"))
            if facts is not None:
                ticket = whole_field(header, "ticket")
                job.answer([Reply(connection, ticket, Answer("waiting", facts))])
        else:
            _ask(job, connection, verb, header)

    def _arrive(
        self, meeting: Meeting[Connection], connection: Connection, arrival: Arrival, body: bytes
    ) -> None:
        """Take an arrival in sending order: after the calls abandoned before it, not later."""
        job, lane = self._job, arrival.point.lane
        abandoned = meeting.abandoned(self._life.process, lane)
        if arrival.after < abandoned:  # interrupted meanwhile: it does not wait
            return
        if arrival.after > abandoned:
            if connection in self._life.held:
                raise FrameError("an arrival before the previous one was answered")
            again = partial(self._arrive, meeting, connection, arrival, body)
            self._life.held[connection] = lane, again
            return
        replies = meeting.arrive(
            job.now(),
            self._life.process,
            arrival.point,
            body,
            timeout_s=arrival.timeout_s,
            to=connection,
            ticket=arrival.ticket,
            step=arrival.step,
        )
        if replies:
            job.answer(replies)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._life.lanes.discard(connection)
        self._life.held.pop(connection, None)


def _ask(job: ServedJob, connection: Connection, verb: str, header: Mapping[str, Any]) -> None:
    """Answer the queries that members and observers share."""
    if verb == "members":
        job.answer_members(connection, whole_field(header, "ticket"))
    elif verb == "stacks":
        all_processes = range(job.num_processes)
        requested = all_processes if header.get("processes") is None else None
        processes = requested or processes_of(header, "processes", all_processes)
        job.ask_stacks(processes, connection, whole_field(header, "ticket"))
    elif verb == "awaited":
        job.answer_awaited(connection, whole_field(header, "ticket"))
    else:
        raise FrameError(f"unknown verb {verb[:40]!r}")


class ObserverCaller:
    """A client outside the job that queries the newest one."""

    def __init__(self, newest_job: Callable[[], ServedJob]) -> None:
        self._newest_job = newest_job

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        _ask(self._newest_job(), connection, text_field(frame.header, "do"), frame.header)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""


class KeeperCaller:
    """The keeper of one host."""

    def __init__(self, job: ServedJob, host_id: str, processes: Collection[int]) -> None:
        self._job = job
        self._host_id = host_id
        self._processes = processes

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        verb = text_field(frame.header, "do")
        if verb != "states":
            raise FrameError(f"unknown verb {verb[:40]!r}")
        stopped = processes_of(frame.header, "stopped", self._processes)
        ended = processes_of(frame.header, "ended", self._processes)
        self._job.hear_states(self._processes, stopped, ended)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._job.end_keeper(self._host_id, connection)


class ServiceCaller:
    """A service that all processes need: JAX's."""

    def __init__(
        self,
        connection: Connection,
        header: Mapping[str, Any],
        *,
        on_beat: Callable[[ServiceCaller], None],
        on_gone: Callable[[ServiceCaller, str, str], None],
    ) -> None:
        self.connection = connection
        self.name = text_field(header, "name")[:100]
        self.host = text_field(header, "host")[:200]
        self.pid = whole_field(header, "pid")
        self._on_beat = on_beat
        self._on_gone = on_gone
        self.state = "here"
        self.words = "serves"

    @property
    def row(self) -> list[str]:
        """The row for observers."""
        return [self.name, self.host, self.state, self.words]

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        verb = text_field(frame.header, "do")
        if verb == "beat":
            self._on_beat(self)
        elif verb == "bye":
            self._on_gone(self, "left", "left in order")
        else:
            raise FrameError(f"unknown verb {verb[:40]!r}")

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._on_gone(self, "lost", reason)
