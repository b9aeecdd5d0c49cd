"""Job clients within one process: a job of one process, or N threads of a test.

The rules are those of `meeting.Meeting`, as for real processes; no frames are sent.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from shoal import settings
from shoal.errors import ProcessLostError, UsageError
from shoal.runtime.client.base import BaseJobClient, conclude
from shoal.runtime.client.outcomes import ThisProcess, waiting_line
from shoal.runtime.client.record_search import compares_records
from shoal.runtime.failures.last_record import LastRecord, how_of
from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting import Meeting
from shoal.runtime.rules.meeting_answers import MembersKnown, Outcome
from shoal.runtime.rules.messages import Abandoned, beat_of
from shoal.runtime.rules.point import Departure, Member, Point, checked, checked_processes
from shoal.runtime.rules.programs import Differences, ProgramSets
from shoal.runtime.rules.record_marks import LatestMarks
from shoal.runtime.rules.requested_saves import (
    SaveOrder,
    SaveReport,
    SaveRequests,
    SaveState,
    Sent,
)
from shoal.runtime.rules.stopping import PreemptionRounds, ReceivedNotice, StopAgreement, StopReport
from shoal.runtime.system.stacks import stacks

_LOG = logging.getLogger("shoal")


class _Mailbox:
    """The slot in which a waiting thread finds its answer."""

    def __init__(self) -> None:
        self.answer: Outcome | None = None
        self.has_mail = threading.Event()


class LocalJob:
    """N processes that are threads of this one; each takes its `LocalJobClient`.

    >>> first, second = LocalJob(2).clients
    >>> first.num_processes
    2
    """

    def __init__(
        self,
        num_processes: int,
        *,
        hosts: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        warn_after_s: float | None = None,
    ) -> None:
        hosts = list(hosts or [socket.gethostname()] * num_processes)
        if len(hosts) != num_processes or num_processes < 1:
            raise UsageError(f"LocalJob({num_processes}) with {len(hosts)} hosts")
        self.hosts = hosts
        self.warn_after_s = warn_after_s
        self.clock = clock
        self._lock = threading.Lock()
        self._meeting: Meeting[_Mailbox] = Meeting(hosts, clock())
        self._rounds = PreemptionRounds(num_processes)
        self._requests: SaveRequests[Callable[[SaveState], object]] = SaveRequests(
            num_processes, lambda: self._rounds.is_open
        )
        self._marks = LatestMarks()
        self._programs = ProgramSets(num_processes)
        self.report_to_launcher: Callable[[ReceivedNotice | StopReport], None] = lambda said: None
        self.clients = tuple(LocalJobClient(self, i) for i in range(num_processes))

    def lose(self, process: int, reason: str = "its connection closed") -> None:
        """Mark a process as lost, as if it had been killed."""
        self.depart(process, Departure(reason, "lost", why=reason))

    def depart(self, process: int, departure: Departure) -> None:
        """Mark a process as gone."""
        with self._lock:
            self._deliver(self._meeting.depart(self.clock(), process, departure))
            departure = self._meeting.departure(process)
        if departure.state != "left":
            for client in self.clients:
                client.peer_losses.receive(process, "", departure)
                client.stop.wake()
        with self._lock:
            self._push_stop(self._rounds.depart(process))
            self._carry(self._requests.depart(process))

    def give_notice(self, process: int, given: ReceivedNotice) -> None:
        """Pass a preemption notice of one process on to all."""
        self.report_to_launcher(given)
        with self._lock:
            number = self._rounds.give()
            self._carry(self._requests.overtake())
            for client in self.clients:
                report = client.stop.receive(number, process, given)
                if report is not None:
                    self._push_stop(self._rounds.receive(client.process, report))

    def take_stop_report(self, process: int, report: StopReport) -> None:
        """Take a process's answer about stopping, or its report of a save."""
        self.report_to_launcher(report)
        with self._lock:
            self._push_stop(self._rounds.receive(process, report))

    def request_save(self, tell: Callable[[SaveState], object]) -> None:
        """Request a save as `shoal save` does; `tell` is called with what becomes of it."""
        with self._lock:
            self._carry(self._requests.request(tell, 0))

    def take_save_report(self, process: int, report: SaveReport) -> None:
        """Take a process's answer to a request to save, or the end of that save."""
        with self._lock:
            self._carry(self._requests.receive(process, report))

    def _carry(self, sent: Sent[Callable[[SaveState], object]]) -> None:
        for message in sent:
            if isinstance(message, SaveOrder):
                for client in self.clients:
                    report = client.stop.saves.receive(message)
                    if report is not None:
                        self._carry(self._requests.receive(client.process, report))
            else:
                message.to(message.answer)

    def awaited(self) -> tuple[int, ...]:
        """Return the processes that have not answered the open notice or request to save."""
        with self._lock:
            return self._rounds.awaited or self._requests.awaited

    def _push_stop(self, settled: StopAgreement | None) -> None:
        if settled is not None:
            for client in self.clients:
                client.stop.settle(settled)

    def explain(self, key: str, text: str) -> None:
        """Keep what is known of a difference."""
        with self._lock:
            self._meeting.explain(key, text)

    def explanation(self, key: str, process: int) -> str | None:
        """Return what is known of a difference."""
        with self._lock:
            return self._meeting.explanation(key, process).text

    def record_activity(self, process: int, words: str, *, is_ending: bool) -> None:
        """Record a process's activity."""
        with self._lock:
            self._meeting.record_activity(self.clock(), process, words, is_ending=is_ending)

    def members(self) -> tuple[Member, ...]:
        """Return the state of each process."""
        with self._lock:
            self._beat()
            return self._meeting.members(self.clock())

    def programs(self) -> Differences:
        """Return the programs that only some have compiled."""
        with self._lock:
            return self._programs.differences()

    def tick(self) -> None:
        """End waits whose deadline has passed; for clocks that tests advance."""
        with self._lock:
            self._deliver(self._meeting.tick(self.clock()))

    def meet(
        self, process: int, point: Point, payload: bytes, timeout_s: float, step: int | None
    ) -> Outcome:
        """Arrive, and wait for the answer."""
        box = _Mailbox()
        with self._lock:
            now = self.clock()
            self._deliver(
                self._meeting.arrive(
                    now, process, point, payload, timeout_s=timeout_s, to=box, ticket=0, step=step
                )
            )
        return self._wait(box, process, point, now)

    def abandon(self, process: int, left: Abandoned) -> None:
        """Record that a process left a call by an exception."""
        with self._lock:
            self._deliver(self._meeting.abandon(self.clock(), process, left))

    def end_lane(self, process: int, lane: str) -> None:
        """Record that a process makes no more calls in a lane."""
        with self._lock:
            self._meeting.end_lane(process, lane)

    def _wait(self, box: _Mailbox, process: int, point: Point, since: float) -> Outcome:
        warn_at = since + (self.warn_after_s or settings.seconds("SHOAL_WARN_AFTER_S"))
        while (answer := box.answer) is None:
            with self._lock:
                pause_s = min(self._meeting.next_deadline, warn_at) - self.clock()
            # The waiting threads drive the clock. A wait over a day would overflow a lock's.
            if box.has_mail.wait(max(0.0, min(pause_s, 86_400.0))):
                continue
            self.tick()
            if self.clock() >= warn_at and box.answer is None:
                warn_at = float("inf")
                self._warn(process, point, since)
        return answer

    def _beat(self) -> None:
        """Report each process's progress to the meeting, as heartbeats do for real processes."""
        for client in self.clients:
            beat = beat_of(client.progress.beat())
            self._meeting.beat(self.clock(), client.process, beat)
            self._programs.receive(client.process, client.programs.beat())
            differences = [
                self._marks.receive(client.process, t) for t in client.call_records.beat()
            ]
            for difference in filter(None, differences):
                for process in difference.group or range(len(self.hosts)):
                    self.clients[process].call_records.receive(difference)

    def _warn(self, process: int, point: Point, since: float) -> None:
        with self._lock:
            now = self.clock()
            waiting = self._meeting.waiting_for(now, process, point.lane)
        if waiting is not None:
            _LOG.warning(
                "%s", waiting_line(waiting, ThisProcess(process, self.hosts), point, now - since)
            )

    def _deliver(self, replies: list[Reply[_Mailbox]]) -> None:
        for reply in replies:
            reply.to.answer = cast("Outcome", reply.answer)  # `request_stacks` is not called here
            reply.to.has_mail.set()


class LocalJobClient(BaseJobClient):
    """One process of a `LocalJob`. A `JobClient`."""

    def __init__(self, job: LocalJob, process: int) -> None:
        super().__init__(
            ThisProcess(process, job.hosts),
            lambda left: job.abandon(process, left),
            lambda lane: job.end_lane(process, lane),
            job.clock,
        )
        self._job = job
        self._has_left = False

    @property
    def jax_service(self) -> str:
        """A local job has no JAX service: always empty."""
        return ""

    @compares_records
    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """See `JobClient.arrive`."""
        point = checked(
            point, payload, timeout_s, process=self.process, num_processes=self.num_processes
        )
        self._refuse_if_over(point.place)
        started = self._job.clock()
        with self._lanes.arrival(point) as call:
            point, _ = call.enter(point)
            try:
                if point.lane == "main":
                    self.progress.begin_wait(point, started)
                step = self.progress.step
                answer = self._job.meet(
                    self.process, point, payload=bytes(payload), timeout_s=timeout_s, step=step
                )
                call.has_failed = not answer.is_success
                if point.lane == "main" and answer.is_success:
                    self.programs.meet(point.group)
            finally:
                if point.lane == "main":
                    self.progress.end_wait(point)
                call.leave()
        return conclude(
            answer, point, self._me, self.peer_losses, waited_s=self._job.clock() - started
        )

    def check(self, caller: str = "") -> None:
        """See `JobClient.check`."""
        self._refuse_if_over(caller)
        self.peer_losses.check(caller)

    def _refuse_if_over(self, caller: str) -> None:
        if self._has_left:
            raise UsageError(f"{self._me}: {caller}: this process has left the job")
        for loss in self.peer_losses.open():
            if loss.process == self.process and loss.state == "lost":
                self.peer_losses.mark_all_reported()
                raise ProcessLostError(
                    f"{self._me}: {caller}: this process was declared lost: {loss.words}; "
                    "others have continued without it; it must end",
                    lost={self.process: loss.words},
                )

    def stacks(
        self, processes: Iterable[int] | None = None, *, timeout_s: float
    ) -> Mapping[int, str]:
        """See `JobClient.stacks`. Each text shows the threads of all processes."""
        targets = checked_processes("stacks()", processes, self.num_processes)
        alive = [m.process for m in self._job.members() if m.state == "here"]
        return dict.fromkeys((process for process in targets if process in alive), stacks())

    def end_stalled(self, reason: str) -> None:
        """See `JobClient.end_stalled`."""
        self.peer_losses.receive(self.process, "", Departure(reason, "stalled"))

    def report(self, kind: str, words: str, end: LastRecord | None = None) -> None:
        """See `JobClient.report`."""
        if kind in ("failed", "followed"):
            departure = Departure(words, how=how_of(end), follows=kind == "followed")
            self._job.depart(self.process, departure)
        elif kind in ("doing", "ending"):
            self._job.record_activity(self.process, words, is_ending=kind == "ending")
        else:
            kinds = "'failed', 'followed', 'doing' and 'ending'"
            raise UsageError(f"report({kind!r}): the kinds are {kinds}")

    def ask_report(
        self, sharing: Iterable[int], *, waits: bool, timeout_s: float
    ) -> Mapping[str, Any] | None:
        """See `JobClient.ask_report`. A thread does not end as a process does: always None."""
        return None

    def explain(self, key: str, text: str) -> None:
        """See `JobClient.explain`."""
        self._job.explain(key, text)

    def explanation(self, key: str, process: int, *, timeout_s: float) -> str | None:
        """See `JobClient.explanation`."""
        return self._job.explanation(key, process)

    def give_notice(self, given: ReceivedNotice) -> bool:
        """See `JobClient.give_notice`."""
        is_new = self.stop.offers(given)
        if is_new:
            self._job.give_notice(self.process, given)
        return is_new

    def report_stop(self, report: StopReport) -> None:
        """See `JobClient.report_stop`."""
        self._job.take_stop_report(self.process, report)

    def report_save(self, report: SaveReport) -> None:
        """See `JobClient.report_save`."""
        self._job.take_save_report(self.process, report)

    def awaited(self, *, timeout_s: float) -> tuple[int, ...]:
        """See `JobClient.awaited`."""
        return self._job.awaited()

    def members(self, *, timeout_s: float) -> tuple[Member, ...]:
        """See `JobClient.members`."""
        return self._job.members()

    def job_state(self, *, timeout_s: float) -> MembersKnown:
        """See `JobClient.job_state`."""
        return MembersKnown(self._job.members(), (), self._job.programs())

    def close(self, words: str = "") -> None:
        """See `JobClient.close`."""
        self._has_left, self.progress.is_watched = True, False
        how = "exited" if words else ""
        self._job.depart(self.process, Departure(words or "left the job", "left", how))
        self.stop.wake()
