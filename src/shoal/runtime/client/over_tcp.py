"""The job client of a real process, over TCP.

One connection lives as long as the process: its end tells the coordinator that the process is
gone, and the watcher uses it while the program computes. Calls that wait use connections of their
own, so several threads may wait at once, each in its lane, and each reads its own answer without
another thread in between.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from shoal import settings
from shoal.errors import DeadlineError, ProcessLostError, StalledError, UsageError
from shoal.runtime.client.base import BaseJobClient, conclude
from shoal.runtime.client.call_sockets import Calls, Closed, receive
from shoal.runtime.client.heartbeat import HeartbeatTiming, StallLook, Watcher
from shoal.runtime.client.hello import Identity, Welcome, handshake
from shoal.runtime.client.hello import host_id as this_host
from shoal.runtime.client.outcomes import ThisProcess, waiting_line
from shoal.runtime.client.record_search import compares_records
from shoal.runtime.failures.facts import to_json
from shoal.runtime.failures.last_record import LastRecord, how_of
from shoal.runtime.rules.deadline import given_s
from shoal.runtime.rules.endings import AT_END, WAIT_S
from shoal.runtime.rules.meeting_answers import (
    AllMet,
    MembersKnown,
    Outcome,
    StillMissing,
    outcome_of,
)
from shoal.runtime.rules.messages import (
    Abandoned,
    abandoned_header,
    notice_header,
    save_report_header,
    step_text,
    stop_report_header,
)
from shoal.runtime.rules.point import Departure, Member, Point, checked, checked_processes
from shoal.runtime.rules.programs import differences_of
from shoal.runtime.rules.record_marks import Found, RecordVersion
from shoal.runtime.rules.requested_saves import SaveReport
from shoal.runtime.rules.stopping import ReceivedNotice, StopReport
from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import (
    Frame,
    body_value,
    pack_frame,
    pack_text,
    split_payloads,
    text_field,
)
from shoal.runtime.wire.socket_calls import LinkError, LinkTimeoutError

_LOG = logging.getLogger("shoal")
_MARGIN_S = 2.0  # how much later than the deadline the answer, with stacks, may come
_MARGIN_AT_END_S = 1.0  # the same, of a program that has ended
_TELL_S = 1.0  # a one-way message that cannot be sent within this is dropped
_MUST_TELL_S = 10.0  # a required one that cannot be: the coordinator is lost
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
    host_id: str | None = None,
) -> TcpJobClient:
    """Send HELLO to the coordinator and wait until all `num_processes` have sent it.

    No process has joined before all have. A coordinator that does not listen yet is retried until
    the deadline.

    Args:
      address: host:port of the coordinator.
      timeout_s: deadline in seconds; the earliest deadline ends the joining for all.
      jax_service: host:port of JAX's service, if this process knows it; shared with all.
      versions: what must be equal on all processes; None: the versions of shoal and JAX.
      host: the name of this host in messages; None: its hostname.
      warn_after_s: None: SHOAL_WARN_AFTER_S.
      host_id: equal for processes that see each other's pids; None: determined from the kernel.

    Raises:
      InitializeError: on every process that arrived: a process is missing at the earliest deadline,
        an index is taken twice or out of range, counts or versions differ, a process died
        meanwhile. On this one: nothing listens at the address, or the token is wrong.
    """
    card = Identity(
        process,
        processes=num_processes,
        host=host or socket.gethostname(),
        token=token,
        versions=versions,
        jax_service=jax_service or "",
        host_id=this_host() if host_id is None else host_id,
    )
    warn_after_s = warn_after_s or settings.seconds("SHOAL_WARN_AFTER_S")
    channel, welcome = handshake(address, card, timeout_s, warn_after_s)
    return TcpJobClient(address, process, token, channel, welcome, warn_after_s)


class TcpJobClient(BaseJobClient):
    """The job client of one process, connected to the coordinator by `join`."""

    def __init__(
        self,
        address: str,
        process: int,
        token: str,
        life: Channel,
        welcome: Welcome,
        warn_after_s: float,
    ) -> None:
        super().__init__(
            ThisProcess(process, welcome.hosts),
            self._send_abandoned,
            lambda lane: self.send({"do": "end lane", "lane": lane}),
        )
        self.address = address
        self.welcome = welcome
        self.claim: socket.socket | None = None  # open as long as this process is in the job
        self._life = life
        self._warn_after_s = warn_after_s
        self._lock = threading.RLock()  # a signal handler may send while its thread sends
        self._tickets = itertools.count(1)
        lane = {"do": "lane", "process": process}
        self._calls = Calls(
            address,
            welcome.near,
            card={**lane, "incarnation": welcome.incarnation},
            token=token,
            me=self._me,
            max_body_bytes=welcome.max_body_bytes,
            lose=self.lose,
        )
        timing = HeartbeatTiming(welcome.heartbeat_s, welcome.lost_after_s)
        self._watcher = Watcher(life, timing, self._me, self)
        self._watcher.start()

    @property
    def jax_service(self) -> str:
        """host:port of JAX's service, or empty if no process knew it."""
        return self.welcome.jax_service

    @property
    def leader(self) -> int:
        """The lowest process of this host, which starts its host agent."""
        return self.welcome.leader

    @property
    def keeps(self) -> Mapping[int, int]:
        """On the leader of a host: the pid of each process there; else empty."""
        return self.welcome.keeps

    @compares_records
    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """See `JobClient.arrive`. Also raises ProcessLostError if the coordinator is gone."""
        me, count, progress = self._me, len(self._me.hosts), self.progress
        point = checked(point, payload, timeout_s, process=me.process, num_processes=count)
        is_main = point.lane == "main"
        started = time.monotonic()
        with self._lanes.arrival(point) as call:
            point, after = call.enter(point)
            try:
                if is_main:
                    progress.begin_wait(point, started)
                answer = self._meet(point, payload, timeout_s, started, after)
                call.has_failed = not answer.is_success
                if is_main and answer.is_success:
                    self.programs.meet(point.group)
            except ProcessLostError:
                if is_main:
                    self.peer_losses.mark_all_reported()
                raise
            finally:
                if is_main:
                    progress.end_wait(point)
                call.leave()
        return conclude(answer, point, me, self.peer_losses, waited_s=time.monotonic() - started)

    def check(self, caller: str = "") -> None:
        """See `JobClient.check`."""
        closed = self._calls.closed
        if closed is not None:
            self.peer_losses.mark_all_reported()
            raise closed.error(self._me, caller)
        self.peer_losses.check(caller)

    def report(self, kind: str, words: str, end: LastRecord | None = None) -> None:
        """See `JobClient.report`. Does not raise if the coordinator is gone."""
        if kind in ("failed", "followed"):
            # Of a long traceback keep both ends: where it began, and the error.
            if len(words) > _MAX_WORDS:
                words = words[: _MAX_WORDS // 4] + "\n...\n" + words[-_MAX_WORDS * 3 // 4 :]
            header = {"do": "failed", "step": self.progress.step, "follows": kind == "followed"}
            if end is not None:
                header |= {"how": how_of(end), "end": json.dumps(to_json(end))}
            self.send(header, words.encode(errors="replace"))
        elif kind in ("doing", "ending"):
            self.send({"do": "doing", "words": words[:1000], "ending": kind == "ending"})
        else:
            kinds = "'failed', 'followed', 'doing' and 'ending'"
            raise UsageError(f"report({kind!r}): the kinds are {kinds}")

    def ask_report(
        self, sharing: Iterable[int], *, waits: bool, timeout_s: float
    ) -> Mapping[str, Any] | None:
        """See `JobClient.ask_report`. Raises as `members` does."""
        query = {"do": "report", "sharing": [*sharing], "waits": waits}
        answer: Mapping[str, Any] = self._query("report()", query, timeout_s)
        return answer if answer["reports"] else None

    def explain(self, key: str, text: str) -> None:
        """See `JobClient.explain`."""
        self.send({"do": "explain", "key": key}, text.encode(errors="replace"))

    def explanation(self, key: str, process: int, *, timeout_s: float) -> str | None:
        """See `JobClient.explanation`. Raises as `members` does."""
        query = {"do": "explanation", "key": key, "process": process}
        text = self._query("explanation()", query, timeout_s)["text"]
        return None if text is None else str(text)

    def give_notice(self, given: ReceivedNotice) -> bool:
        """See `JobClient.give_notice`."""
        is_new = self.stop.offers(given)
        if is_new:
            self.send({"do": "notice", **notice_header(given)})
        return is_new

    def report_stop(self, report: StopReport) -> None:
        """See `JobClient.report_stop`."""
        self.send(stop_report_header(report), step_text(report.highest))

    def report_save(self, report: SaveReport) -> None:
        """See `JobClient.report_save`."""
        self.send(save_report_header(report))

    def awaited(self, *, timeout_s: float) -> tuple[int, ...]:
        """See `JobClient.awaited`. Raises as `members` does."""
        return tuple(self._query("awaited()", {"do": "awaited"}, timeout_s)["awaited"])

    def members(self, *, timeout_s: float) -> tuple[Member, ...]:
        """See `JobClient.members`.

        Raises:
          DeadlineError: the coordinator did not answer within `timeout_s`.
          ProcessLostError: the coordinator is gone.
        """
        return tuple(self.job_state(timeout_s=timeout_s).members)

    def job_state(self, *, timeout_s: float) -> MembersKnown:
        """See `JobClient.job_state`. Raises as `members` does."""
        answer = self._query("members()", {"do": "members"}, timeout_s)
        members = tuple(Member(*row) for row in answer["members"])
        return MembersKnown(members, answer["services"], differences_of(answer["programs"]))

    def stacks(
        self, processes: Iterable[int] | None = None, *, timeout_s: float
    ) -> Mapping[int, str]:
        """See `JobClient.stacks`. Raises as `members` does."""
        targets = checked_processes("stacks()", processes, self.num_processes)
        answer = self._query("stacks()", {"do": "stacks", "processes": targets}, timeout_s)
        return {int(process): text for process, text in answer["stacks"].items()}

    def end(self) -> list[Found]:
        """Report that the program has ended in order; return the differences in its calls, and in
        those of the others.

        Waits until all have ended, or a process is gone, and a second at most. Raises as `members`.
        """
        call_records = json.dumps(self.call_records.all_compared()).encode()
        answer = self._query(AT_END, {"do": "ended"}, WAIT_S + _MARGIN_AT_END_S, call_records)
        return [
            Found(group and tuple(group), lane, base, [RecordVersion(*row) for row in rows])
            for group, lane, base, rows in answer["differences"]
        ]

    def close(self, words: str = "") -> None:
        """See `JobClient.close`. Calls that still wait, in other threads, raise a UsageError."""
        if self._calls.closed is None:
            progress = self.progress
            header = {"do": "bye", "place": progress.place, "step": progress.step}
            if progress.exited_at:
                header["exited_at"] = progress.exited_at
            self.send(header, words.encode(errors="replace"))
            self._calls.close_all(Closed(UsageError, "this process has left the job"))
            self.stop.wake()
        self._watcher.stop()
        self._close_claim()

    def abandon_in_forked_children(self) -> None:
        """Let forked children give up their copies of the connections."""
        here = weakref.ref(self)

        def abandon() -> None:
            client = here()
            if client is not None:
                client._abandon()

        os.register_at_fork(after_in_child=abandon)

    def watch_main_line(self, look: Callable[[float], None]) -> None:
        """Make the watcher call `look` with the time, periodically, after a loss."""
        self._watcher.look = look

    def watch_idle(self, stall: StallLook) -> None:
        """Make the watcher look whether this process is idle."""
        self._watcher.stall = stall

    def end_stalled(self, reason: str) -> None:
        """See `JobClient.end_stalled`."""
        if self._calls.closed is None:
            self.peer_losses.receive(self.process, "", Departure(reason, "stalled"))
            self._calls.close_all(Closed(StalledError, reason))
            self.stop.wake()

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send one way, on the process's lifetime connection."""
        frame = pack_frame(header, body)
        with self._lock, contextlib.suppress(LinkError):  # closed meanwhile
            self._life.send(frame, time.monotonic() + _TELL_S)

    def lose(self, reason: str) -> None:
        """Handle the loss of the coordinator. Does nothing if this process has left."""
        where = f"the coordinator at {self.address}"
        closed = Closed(ProcessLostError, f"{where} is lost ({reason})")
        if self._calls.closed is None:
            self.peer_losses.receive(None, where, Departure(reason, "lost", why=reason))
            self._calls.close_all(closed)
            self.stop.wake()
            self._life.shut()

    def on_declared_lost(self, departure: Departure) -> None:
        """Handle the declaration that this process is lost, which is final."""
        if self._calls.closed is None:
            self.peer_losses.receive(self.process, "", departure)
            reason = f"this process was declared lost: {departure.words}; "
            reason += "others have continued without it; it must end"
            self._calls.close_all(Closed(ProcessLostError, reason, {self.process: departure}))
            self.stop.wake()

    def _send_abandoned(self, left: Abandoned) -> None:
        """Send it on the lifetime connection. The next arrival carries how many of these were sent,
        and is not processed before they have arrived."""
        if self._calls.closed is not None:
            return
        frame = pack_frame(abandoned_header(left), left.words.encode(errors="replace"))
        try:
            with self._lock:
                self._life.send(frame, time.monotonic() + _MUST_TELL_S)
        except LinkError as error:
            self.lose(f"an abandoned call cannot be sent: {error}")

    def _meet(
        self, point: Point, payload: bytes, timeout_s: float, started: float, after: int
    ) -> Outcome:
        limit = started + timeout_s + _MARGIN_S
        arrival = pack_text(arrival_header(point, timeout_s, self.progress.step, after), payload)

        def exchange(channel: Channel) -> Frame:
            channel.send(arrival, limit)
            try:
                return receive(channel, min(started + self._warn_after_s, limit))
            except LinkTimeoutError:
                pass  # ask, once, which processes are missing
            ticket = next(self._tickets)
            channel.send(pack_frame({"do": "who", "ticket": ticket, "lane": point.lane}), limit)
            frame = receive(channel, limit, ticket)  # the answer to that, or to the arrival
            if frame.header.get("is") == "waiting":
                waiting = StillMissing.of(body_value(frame))
                waited_s = time.monotonic() - started
                _LOG.warning("%s", waiting_line(waiting, self._me, point, waited_s))
                frame = receive(channel, limit)
            return frame

        frame = self._calls.run(point.place, limit, exchange)
        return answer_of(frame, point.group or range(self.num_processes))

    def _query(
        self, caller: str, question: Mapping[str, Any], timeout_s: float, body: bytes = b""
    ) -> Any:
        """Return the answer to a query, which the server gives by then."""
        limit = time.monotonic() + timeout_s
        reason = f"the coordinator did not answer within {timeout_s:g} s"
        late = DeadlineError(f"{self._me}: {caller}: {reason}", waited_s=timeout_s)

        def exchange(channel: Channel) -> Frame:
            ticket = next(self._tickets)
            channel.send(pack_frame({**question, "ticket": ticket}, body), limit)
            return receive(channel, limit, ticket)

        return json.loads(self._calls.run(caller, limit, exchange, late=late).body)

    def _abandon(self) -> None:
        """In a forked child: close the copies of the sockets, which would hide the parent's death,
        without shutting down the parent's connections."""
        self._lock = threading.RLock()  # the inherited one may be held
        reason = f"this is a forked child of process {self.process}, no member of the job"
        self._calls.abandon(Closed(UsageError, reason))
        self._life.close()
        self._close_claim()

    def _close_claim(self) -> None:
        if self.claim is not None:
            self.claim.close()
            self.claim = None


# ---- Encode arrivals and decode their answers.


def arrival_header(point: Point, timeout_s: float, step: int | None, after: int) -> bytes:
    """Return the header of an arrival. It has no ticket, because the answer is the next frame; so
    a loop sends equal headers, which both sides can cache.

    Args:
      after: the number of calls of the lane that were abandoned before.
    """
    label = b"null" if step is None else b"%d" % step
    if after:
        label += b',"after":%d' % after
    return b'{"step":%b,%b' % (label, _place_and_limit(point, timeout_s, given_s(timeout_s)))


@lru_cache(maxsize=256)
def _place_and_limit(point: Point, timeout_s: float, given: float) -> bytes:
    limit_s = None if timeout_s == math.inf else timeout_s
    arrival = {"do": "arrive", "timeout_s": limit_s, "point": point}
    if given != timeout_s:
        arrival["given_s"] = given
    return json.dumps(arrival)[1:].encode()


def answer_of(frame: Frame, group: Sequence[int]) -> Outcome:
    """Return the answer to an arrival of this group."""
    kind = text_field(frame.header, "is")
    if kind == "ok":
        if not frame.body:
            return AllMet(dict.fromkeys(group, b""))
        payloads = split_payloads(frame.body, len(group))
        return AllMet(dict(zip(group, payloads, strict=True)))
    return outcome_of(kind, json.loads(frame.body))
