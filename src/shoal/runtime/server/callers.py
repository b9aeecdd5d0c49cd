"""The callers of the coordinator: each kind of connection, and the verbs it may use.

::

    Process   a process of a job, one way in each direction: its end is the end of the process
    Lane      calls of a process that wait for an answer; its end has no meaning
    Observer  queries from outside the job, and requests to save; its end has no meaning
    Agent     watches the processes of one host from outside: its host agent
    Service   a service that all processes need, which wants to be monitored
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.meeting_answers import Explanation
from shoal.runtime.rules.messages import (
    Arrival,
    abandoned_of,
    beat_of,
    ended_of,
    failed_of,
    notice_of,
    processes_of,
    programs_of,
    records_of,
    save_report_of,
    step_of,
    stop_report_of,
)
from shoal.runtime.rules.point import Departure
from shoal.runtime.rules.stalls import idle_of, seen_of
from shoal.runtime.server.job import Life, ServedJob
from shoal.runtime.system.foreign_text import one_line
from shoal.runtime.wire.frames import (
    Frame,
    FrameError,
    pack_frame,
    text_field,
    whole_field,
)
from shoal.runtime.wire.server_sockets import Connection, with_guess

_Verb = TypeVar("_Verb")

ECHO = pack_frame({"is": "beat"})
_MAX_WORDS = 1000


class ProcessCaller:
    """A process that sent HELLO; no frame on its connection is a reply."""

    max_body_bytes = 1 << 20  # a traceback, or stacks

    def __init__(self, job: ServedJob, life: Life) -> None:
        self._job = job
        self._life = life

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        verb, meeting = text_field(frame.header, "do"), self._job.meeting
        if verb == "who":
            self._answer_absent()
        elif meeting is None:
            raise FrameError(f"{verb[:40]!r} before all processes had joined")
        else:
            _known(self.VERBS, verb)(self, meeting, frame)

    def _answer_absent(self) -> None:
        if self._job.meeting is None:
            joining = self._job.joining
            absent = json.dumps(joining.absent()).encode()
            answer = pack_frame({"is": "waiting", "strangers": joining.strangers}, absent)
            self._job.mail.send(self._life.connection, answer)

    def _beat(self, _meeting: Meeting[Connection], frame: Frame) -> None:
        job, process, header = self._job, self._life.process, frame.header
        job.beat(process, beat_of(header))
        if "trails" in header:
            job.take_call_records(process, records_of(header, process, job.num_processes))
        if "programs" in header:
            job.take_programs(process, programs_of(header, process, job.num_processes))
        job.mail.send(self._life.connection, ECHO)

    def _stacks(self, _meeting: Meeting[Connection], frame: Frame) -> None:
        ticket = whole_field(frame.header, "ticket")
        text = frame.body.decode(errors="replace")
        self._job.take_stacks(self._life.process, ticket, text, beat_of(frame.header))

    def _abandon(self, meeting: Meeting[Connection], frame: Frame) -> None:
        job, process = self._job, self._life.process
        left = abandoned_of(frame, process, job.num_processes)
        job.mail.answer(meeting.abandon(job.now(), process, left))
        for arrive in self._life.release(left.point.lane):
            arrive()

    def _end_lane(self, meeting: Meeting[Connection], frame: Frame) -> None:
        meeting.end_lane(self._life.process, text_field(frame.header, "lane"))

    def _doing(self, meeting: Meeting[Connection], frame: Frame) -> None:
        activity = text_field(frame.header, "words")[:_MAX_WORDS]
        is_ending, now = bool(frame.header.get("ending")), self._job.now()
        meeting.record_activity(now, self._life.process, activity, is_ending=is_ending)

    def _explain(self, meeting: Meeting[Connection], frame: Frame) -> None:
        key = text_field(frame.header, "key")[:_MAX_WORDS]
        meeting.explain(key, frame.body.decode(errors="replace"))

    def _notice(self, _meeting: Meeting[Connection], frame: Frame) -> None:
        self._job.leaving.give_notice(self._life.process, notice_of(frame.header))

    def _stop(self, _meeting: Meeting[Connection], frame: Frame) -> None:
        self._job.leaving.take_stop_report(self._life.process, stop_report_of(frame))

    def _save(self, _meeting: Meeting[Connection], frame: Frame) -> None:
        self._job.leaving.take_save_report(self._life.process, save_report_of(frame.header))

    def _idle(self, _meeting: Meeting[Connection], frame: Frame) -> None:
        self._job.take_idle_report(self._life.process, idle_of(frame.header))

    def _seen(self, _meeting: Meeting[Connection], frame: Frame) -> None:
        allowed, header = range(self._job.num_processes), frame.header
        process = processes_of({"of": [header.get("process")]}, "of", allowed)[0]
        self._job.take_seen(process, seen_of(header))

    def _failed(self, meeting: Meeting[Connection], frame: Frame) -> None:
        meeting.record_step(self._life.process, step_of(frame.header))  # newer than its last beat
        departure, end = failed_of(frame)
        self._job.depart(self._life.process, departure, end)

    def _reporter(self, _meeting: Meeting[Connection], _frame: Frame) -> None:
        self._job.confirm_reporter(self._life.process)

    def _bye(self, meeting: Meeting[Connection], frame: Frame) -> None:
        meeting.record_step(self._life.process, step_of(frame.header))
        message = one_line(frame.body.decode(errors="replace"))
        header = {"exited_at": "", **frame.header}
        if "place" in header:
            self._job.left_at[self._life.process] = text_field(header, "place")[:_MAX_WORDS]
        why = one_line(text_field(header, "exited_at"))
        how = "exited" if message else ""
        departure = Departure(message or "left the job", "left", how, why)
        self._job.depart(self._life.process, departure)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._job.end_life(self._life, reason)

    # The verbs of a process once all have joined; before, "who" alone.
    VERBS: ClassVar[Mapping[str, Callable[[ProcessCaller, Meeting[Connection], Frame], None]]] = {
        "beat": _beat,  # a sign of life, with its activity
        "stacks": _stacks,  # of its threads, as requested
        "abandon": _abandon,  # it left a call by an exception
        "end lane": _end_lane,
        "doing": _doing,  # text for the processes that wait for it
        "explain": _explain,  # the difference that it has found, for those that arrive later
        "notice": _notice,  # of preemption
        "stop": _stop,  # the step it answered, or that it has saved
        "save": _save,  # its answer to a request to save, or what has become of that save
        "idle": _idle,  # it has made no progress for long, or makes it again
        "seen": _seen,  # a silent process of its host
        "failed": _failed,  # with a traceback
        "reporter": _reporter,  # it is there to report the failure of the job
        "bye": _bye,
    }


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
            arrival = job.arrival_headers.read(header, process, self._count)
            self._last = header, arrival
            self._arrive(meeting, connection, arrival, frame.body)
        elif verb == "who":
            waiting = meeting.waiting_for(job.now(), process, text_field(header, "lane"))
            if waiting is not None:
                ticket = whole_field(header, "ticket")
                job.mail.answer([Reply(connection, ticket, waiting)])
        elif verb == "ended":
            call_records = ended_of(frame, process, self._count)
            job.end(process, call_records, connection, whole_field(header, "ticket"))
        elif verb == "report":
            sharing = processes_of(header, "sharing", range(self._count))
            ticket, waits = whole_field(header, "ticket"), bool(header.get("waits"))
            job.ask_report(process, sharing, connection, ticket, waits=waits)
        else:
            _known(_QUERIES, verb)(job, connection, header)

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
            job.mail.answer(replies)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._life.lanes.discard(connection)
        self._life.held.pop(connection, None)


def _members(job: ServedJob, connection: Connection, header: Mapping[str, Any]) -> None:
    job.answer_members(connection, whole_field(header, "ticket"))


def _others_stacks(job: ServedJob, connection: Connection, header: Mapping[str, Any]) -> None:
    all_processes = range(job.num_processes)
    requested = all_processes if header.get("processes") is None else None
    processes = requested or processes_of(header, "processes", all_processes)
    job.request_stacks(processes, connection, whole_field(header, "ticket"))


def _awaited(job: ServedJob, connection: Connection, header: Mapping[str, Any]) -> None:
    job.leaving.answer_awaited(connection, whole_field(header, "ticket"))


def _explanation(job: ServedJob, connection: Connection, header: Mapping[str, Any]) -> None:
    process = processes_of({"of": [header.get("process")]}, "of", range(job.num_processes))[0]
    key, ticket = text_field(header, "key")[:_MAX_WORDS], whole_field(header, "ticket")
    explanation = Explanation("") if job.meeting is None else job.meeting.explanation(key, process)
    job.mail.answer([Reply(connection, ticket, explanation)])


# The queries that members and observers share.
_QUERIES: Mapping[str, Callable[[ServedJob, Connection, Mapping[str, Any]], None]] = {
    "members": _members,
    "stacks": _others_stacks,
    "awaited": _awaited,
    "explanation": _explanation,
}


def _known(verbs: Mapping[str, _Verb], verb: str) -> _Verb:
    """Return the function of a verb.

    Raises:
      FrameError: the verb is unknown.
    """
    function = verbs.get(verb)
    if function is None:
        raise FrameError(f"unknown verb {verb[:40]!r}")
    return function


class ObserverCaller:
    """A client outside the job that queries the newest one, and may request a save of it."""

    def __init__(self, newest_job: Callable[[], ServedJob]) -> None:
        self._newest_job = newest_job

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        verb, header, job = text_field(frame.header, "do"), frame.header, self._newest_job()
        if verb == "save":
            ticket, then_stops = whole_field(header, "ticket"), bool(header.get("then_stops"))
            job.request_save(connection, ticket, then_stops=then_stops)
        else:
            _known(_QUERIES, verb)(job, connection, header)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""


class HostAgentCaller:
    """The host agent of one host."""

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
        self._job.take_states(self._processes, stopped, ended)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`."""
        self._job.end_host_agent(self._host_id, connection)


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
        self._on_gone(self, "lost", with_guess(reason))
