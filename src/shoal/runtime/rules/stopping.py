"""The rules by which all processes of a job stop at one step.

::

    notice        a process learns that it will be ended: `ReceivedNotice`
    place         numbers it and pushes it to all
    each process  answers at once with the highest step at which it has returned "go on"; from now
                  on it returns that only after an agreement
    place         when all living processes have answered: step = highest + 1; pushed to all

So every step at which any process went on lies below the agreed one, and no process waits for one
that computes: its watcher answers. A *round* goes from one `rearm` to the next; answers of earlier
rounds do not count. Notices are numbered over all rounds, and reach every process in order; a rearm
closes those that all processes knew of, and a remaining one opens the next round at once.

`Rounds` is the meeting place's side, `Stop` that of a process. Neither sends anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

REQUEUE = 75  # EX_TEMPFAIL: the exit code of a process that was preempted and has saved


class ReceivedNotice(NamedTuple):
    """A preemption notice, as a process received it."""

    reason: str  # "Terminated", or the text of the file or the cloud
    source: str  # "SIGTERM", "file /run/leave", "gce"
    deadline_s: float | None = None  # seconds left; clocks differ between hosts, so no time of day


class Notice(NamedTuple):
    """An open notice, as `shoal.notice()` returns it."""

    reason: str  # "Terminated", or the text of the file or the cloud
    source: str  # "SIGTERM", "file /run/leave", "gce"
    process: int  # that received it
    deadline_s: float | None  # seconds left at the time of the call, by the earliest known
    step: int | None  # from which on `preempted` is true everywhere; None: not agreed yet
    others: tuple[Notice, ...] = ()  # later notices, each with its own deadline


class StopReport(NamedTuple):
    """The answer of a process to notices."""

    round: int
    highest: int | None  # the highest step it went on at, -1: none; None: no notice known
    has_saved: bool = False  # since a notice of this round


class StopAgreement(NamedTuple):
    """The agreement of all living processes."""

    round: int
    step: int


class Rounds:
    """The meeting place's record of the answers.

    >>> rounds = Rounds(2)
    >>> rounds.give()
    1
    >>> rounds.receive(0, StopReport(0, 12))
    >>> rounds.receive(1, StopReport(0, 10))
    StopAgreement(round=0, step=13)
    """

    def __init__(self, num_processes: int) -> None:
        self._living = set(range(num_processes))
        self._awaited = set(self._living)
        self._count = 0
        self._round = 0
        self._highest = -1
        self._step: int | None = None
        self.is_open = False  # whether there is a notice that no rearm has closed
        self.has_saved = False  # whether any process has saved after it

    @property
    def awaited(self) -> tuple[int, ...]:
        """The processes that have not answered, in order; none unless a notice is open."""
        return tuple(sorted(self._awaited)) if self.is_open and self._step is None else ()

    def give(self) -> int:
        """Take a notice; return its number, from 1."""
        self._count += 1
        self.is_open = True
        return self._count

    def receive(self, process: int, report: StopReport) -> StopAgreement | None:
        """Take an answer; return the agreement, once."""
        if report.round < self._round or process not in self._living:
            return None  # sent before its rearm, by a different thread
        if report.round > self._round:
            self._begin(report.round)
        self.has_saved |= report.has_saved
        if report.highest is None:
            return None
        self.is_open = True
        self._highest = max(self._highest, report.highest)
        self._awaited.discard(process)
        return self._settle()

    def depart(self, process: int) -> StopAgreement | None:
        """Stop waiting for a process that is gone."""
        self._living.discard(process)
        self._awaited.discard(process)
        return self._settle()

    def _begin(self, number: int) -> None:
        self._round = number
        self._awaited = set(self._living)
        self._highest = -1
        self._step = None
        self.is_open = self.has_saved = False

    def _settle(self) -> StopAgreement | None:
        if self._awaited or not self.is_open or self._step is not None:
            return None
        self._step = self._highest + 1
        return StopAgreement(self._round, self._step)


class _OpenNotice(NamedTuple):
    number: int
    process: int
    given: ReceivedNotice
    due: float | None  # on this process's clock


class Stop:
    """The notices known to one process, and its answers.

    Its lock is held only for moments, and never while sending: so the watcher waits for no other
    thread. A signal handler that interrupts the lock's owner may take it again.
    """

    def __init__(self, process: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = process
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # entering either acquires the lock
        self._round = 0
        self._highest = -1
        self._step: int | None = None
        self._open: list[_OpenNotice] = []
        self._has_saved = False
        self._own: dict[tuple[str, str], int] = {}  # its own notices: the number, 0: none yet
        self.known = 0  # number of the last notice received
        self.changes = 0  # count of events that a thread may wait for

    # ---- the main line

    def should_stop(self, step: int) -> bool | None:
        """Return whether to stop at `step`; None: not agreed yet."""
        with self._lock:
            if not self._open:
                if step > self._highest:
                    self._highest = step
                return False
            return None if self._step is None else step >= self._step

    def wait(self, changes: int, timeout_s: float) -> None:
        """Wait for an event after `changes` was read, at most `timeout_s`."""
        with self._changed:
            if self.changes == changes:
                self._changed.wait(timeout_s)

    def rearm(self, closed: int) -> StopReport:
        """Begin the next round, which closes the notices up to number `closed`."""
        with self._changed:
            self._round += 1
            self._highest = -1
            self._step = None
            self._has_saved = False
            self._open = [heard for heard in self._open if heard.number > closed]
            self._own = {key: n for key, n in self._own.items() if not 0 < n <= closed}
            self._notify()
            return StopReport(self._round, -1 if self._open else None)

    def save(self) -> StopReport | None:
        """Record a save; return the answer to send, None if no notice is open."""
        with self._lock:
            if not self._open:
                return None
            self._has_saved = True
            return StopReport(self._round, self._highest, has_saved=True)

    @property
    def has_saved(self) -> bool:
        """Return whether state was saved after a notice that is still open."""
        return self._has_saved

    def notice(self) -> Notice | None:
        """Return the first open notice, with the others."""
        with self._lock:
            heard, step = list(self._open), self._step
        if not heard:
            return None
        now = self._clock()
        notices = [
            Notice(
                one.given.reason,
                one.given.source,
                one.process,
                None if one.due is None else max(0.0, one.due - now),
                step,
            )
            for one in heard
        ]
        left_s = [notice.deadline_s for notice in notices if notice.deadline_s is not None]
        first = notices[0]._replace(deadline_s=min(left_s, default=None))
        return first._replace(others=tuple(notices[1:]))

    # ---- the threads beside it

    def offers(self, given: ReceivedNotice) -> bool:
        """Return whether to send this process's own notice: not while the same one is open."""
        key = given.source, given.reason
        with self._lock:
            is_new = key not in self._own
            self._own.setdefault(key, 0)
        return is_new

    def receive(self, number: int, process: int, given: ReceivedNotice) -> StopReport | None:
        """Take a notice; return this process's answer, the first time in a round."""
        due = None if given.deadline_s is None else self._clock() + given.deadline_s
        with self._changed:
            self.known = number
            if process == self._process:
                self._own[given.source, given.reason] = number
            is_first = not self._open
            self._open.append(_OpenNotice(number, process, given, due))
            self._notify()
            return StopReport(self._round, self._highest) if is_first else None

    def settle(self, settled: StopAgreement) -> None:
        """Take the agreement."""
        with self._changed:
            if settled.round == self._round:
                self._step = settled.step
                self._notify()

    def wake(self) -> None:
        """Wake waiting threads after another event."""
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        self.changes += 1
        self._changed.notify_all()
