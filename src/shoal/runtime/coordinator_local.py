"""The coordinator inside one process: a job of one, or N threads of a test.

The rules are those of `meeting.Meeting`, as for real processes; only the words need not travel.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from shoal import settings
from shoal.errors import UsageError
from shoal.runtime.coordinator import Member, Point, checked
from shoal.runtime.lanes import Lanes
from shoal.runtime.meeting import Answer, Meeting, Reply
from shoal.runtime.verdicts import Self, error_of, waiting_line

__all__ = ["LocalCoordinator", "LocalJob", "alone"]

_LOG = logging.getLogger("shoal")


class _Mailbox:
    """Where one waiting thread finds its answer."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.has_mail = threading.Event()


class LocalJob:
    """N processes that are threads of this one; each takes its `LocalCoordinator`.

    >>> first, second = LocalJob(2).coordinators
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
        self.coordinators = tuple(LocalCoordinator(self, i) for i in range(num_processes))

    def lose(self, process: int, reason: str = "its connection closed") -> None:
        """Let a process be lost, as if it had been killed."""
        self.depart(process, "lost", reason)

    def depart(self, process: int, state: str, words: str) -> None:
        """Let a process be gone: "left", "failed" or "lost"."""
        with self._lock:
            self._deliver(self._meeting.depart(self.clock(), process, state, words))

    def say(self, process: int, words: str) -> None:
        """Remember what a process is doing."""
        with self._lock:
            self._meeting.say(self.clock(), process, words)

    def members(self) -> tuple[Member, ...]:
        """Return what is known of each process."""
        with self._lock:
            return self._meeting.members(self.clock())

    def tick(self) -> None:
        """End the waits whose deadline has passed by `clock`: for a clock that tests advance."""
        with self._lock:
            self._deliver(self._meeting.tick(self.clock()))

    def meet(self, process: int, point: Point, payload: bytes, timeout_s: float) -> Answer:
        """Arrive, and wait for the answer."""
        box = _Mailbox()
        with self._lock:
            now = self.clock()
            self._deliver(
                self._meeting.arrive(
                    now, process, point, payload, timeout_s=timeout_s, to=box, ticket=0
                )
            )
        return self._wait(box, process, point, now)

    def _wait(self, box: _Mailbox, process: int, point: Point, since: float) -> Answer:
        warn_at = since + (self.warn_after_s or settings.seconds("SHOAL_WARN_AFTER_S"))
        while (answer := box.answer) is None:
            with self._lock:
                pause_s = min(self._meeting.next_deadline, warn_at) - self.clock()
            # Whoever waits drives the clock. A wait longer than a day would overflow a lock's.
            if box.has_mail.wait(max(0.0, min(pause_s, 86_400.0))):
                continue
            self.tick()
            if self.clock() >= warn_at and box.answer is None:
                warn_at = float("inf")
                self._warn(process, point, since)
        return answer

    def _warn(self, process: int, point: Point, since: float) -> None:
        with self._lock:
            now = self.clock()
            facts = self._meeting.waiting_for(now, process, point.lane)
        if facts is not None:
            _LOG.warning("%s", waiting_line(facts, Self(process, self.hosts), point, now - since))

    def _deliver(self, replies: list[Reply[_Mailbox]]) -> None:
        for reply in replies:
            reply.to.answer = reply.answer
            reply.to.has_mail.set()


class LocalCoordinator:
    """One process of a `LocalJob`. A `Coordinator`."""

    def __init__(self, job: LocalJob, process: int) -> None:
        self._job = job
        self._process = process
        self._has_left = False
        self._me = Self(process, job.hosts)
        self._lanes = Lanes(self._me)

    @property
    def process(self) -> int:
        """This process's index."""
        return self._process

    @property
    def num_processes(self) -> int:
        """How many processes the job has."""
        return len(self._job.hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each process."""
        return tuple(self._job.hosts)

    @property
    def jax_service(self) -> str:
        """A local job has no JAX service: always empty."""
        return ""

    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """See `Coordinator.arrive`."""
        point = checked(
            point, payload, timeout_s, process=self.process, num_processes=self.num_processes
        )
        if self._has_left:
            raise UsageError(f"{self._me}: {point.name!r}: this process has left the job")
        started = self._job.clock()
        self._lanes.enter(point)
        try:
            answer = self._job.meet(self.process, point, bytes(payload), timeout_s)
        finally:
            self._lanes.leave(point)
        if answer.kind == "ok":
            return answer.payloads
        raise error_of(answer.kind, answer.facts, self._me, point, self._job.clock() - started)

    def tell(self, kind: str, words: str) -> None:
        """See `Coordinator.tell`."""
        if kind == "failed":
            self._job.depart(self.process, "failed", words)
        elif kind == "doing":
            self._job.say(self.process, words)
        else:
            raise UsageError(f"tell({kind!r}): the kinds are 'failed' and 'doing'")

    def members(self, *, timeout_s: float) -> tuple[Member, ...]:
        """See `Coordinator.members`."""
        return self._job.members()

    def close(self) -> None:
        """See `Coordinator.close`."""
        self._has_left = True
        self._job.depart(self.process, "left", "left the job")


def alone() -> LocalCoordinator:
    """Return the coordinator of a job of one process.

    >>> alone().arrive(Point("start"), b"hello", timeout_s=1)
    {0: b'hello'}
    """
    return LocalJob(1).coordinators[0]
