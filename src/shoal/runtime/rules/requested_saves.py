"""The rules by which all processes of a job save at one step, because `shoal save` requests it.

::

    observer      requests a save
    place         numbers the request and pushes it to all
    each process  answers at once with the highest step that it has passed: at which a call that
                  saves has returned without a save for a request; from now on it passes none before
                  an agreement
    place         when all living processes have answered: step = highest + 1; pushed to all
    each process  saves at its first call from that step on, which closes the request there; reports
                  the commit

This is the agreement of `stopping`, for calls that save instead of calls of `preempted`. It needs
no rounds: one request is open at a time. One that comes before the step is agreed joins it, a later
one is opened after it.

A preemption notice overtakes a request without a step: the request is *withdrawn*. All processes
have its frames and those of notices in one order, so all withdraw the same ones. No step is agreed
for it any more: the next save of any kind answers it, which is that of the notice.

`SaveRequests` is the meeting place's side, `RequestedSave` that of a process. Neither sends
anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias

from shoal.runtime.rules.gathering import Reply, To
from shoal.runtime.rules.meeting_answers import SaveState

ANSWERED, COMMITTED, FAILED = "answered", "committed", "failed"  # what a process reports
NO_CHECKPOINTS, EACH_CALL, BY_STEPS = range(3)  # what its `Checkpoints` save: see `SaveReport`
_CLOSED, _ASKED, _AGREED, _WITHDRAWN = range(4)  # the stages of a request


class SaveOrder(NamedTuple):
    """A request, or the agreement on its step, as it is pushed to all processes."""

    number: int
    step: int | None = None  # None: not agreed
    is_withdrawn: bool = False  # no step will be agreed


class SaveReport(NamedTuple):
    """The answer of a process to a request; later, what has become of its save."""

    number: int
    state: str  # ANSWERED, COMMITTED or FAILED
    step: int  # the highest that it has passed, -1: none; or that of the save
    pace: int = NO_CHECKPOINTS  # EACH_CALL: each call of `save` saves; BY_STEPS: `every=` selects


Sent: TypeAlias = "list[SaveOrder | Reply[To]]"


class SaveRequests(Generic[To]):
    """The meeting place's record of requests; its methods return what is to be sent.

    >>> requests = SaveRequests[str](2, lambda: False)
    >>> requests.request("cli", 1)
    [SaveOrder(number=1, step=None, is_withdrawn=False)]
    >>> requests.receive(0, SaveReport(1, ANSWERED, 12, BY_STEPS))
    []
    >>> order, reply = requests.receive(1, SaveReport(1, ANSWERED, 10, BY_STEPS))
    >>> order.step, reply.answer.state
    (13, 'agreed')
    >>> requests.receive(1, SaveReport(1, COMMITTED, 13))[0].answer.step
    13
    """

    def __init__(self, num_processes: int, has_notice: Callable[[], bool]) -> None:
        """`has_notice`: whether a preemption notice is open."""
        self._has_notice = has_notice
        self._living = set(range(num_processes))
        self._number = 0
        self._stage = _CLOSED
        self._awaited: set[int] = set()
        self._highest = -1
        self._pace = NO_CHECKPOINTS
        self._waiting: list[tuple[To, int]] = []  # the observers that the open request answers
        self._later: list[tuple[To, int]] = []  # those that the next one answers

    @property
    def awaited(self) -> tuple[int, ...]:
        """The processes that have not answered, in order; none unless a step is to be agreed."""
        return tuple(sorted(self._awaited)) if self._stage == _ASKED else ()

    def request(self, to: To, ticket: int) -> Sent[To]:
        """Take the request of an observer."""
        if self._stage == _AGREED:
            self._later.append((to, ticket))
            return [Reply(to, ticket, SaveState("queued"))]
        self._waiting.append((to, ticket))
        if self._stage == _ASKED:
            return []
        if self._stage == _WITHDRAWN and self._has_notice():
            return [Reply(to, ticket, SaveState("preempted"))]
        return self._open()

    def receive(self, process: int, report: SaveReport) -> Sent[To]:
        """Take a report of a process."""
        is_open = report.number == self._number and self._stage != _CLOSED
        if not is_open or process not in self._living:
            return []
        if report.state != ANSWERED:
            return self._close(SaveState(report.state, report.step))
        self._highest = max(self._highest, report.step)
        self._pace = max(self._pace, report.pace)
        self._awaited.discard(process)
        return self._settle()

    def overtake(self) -> Sent[To]:
        """Withdraw the open request if it has no step: a preemption notice is pushed to all."""
        if self._stage != _ASKED:
            return []
        self._stage = _WITHDRAWN
        return self._replies(SaveState("preempted"))

    def depart(self, process: int) -> Sent[To]:
        """Stop waiting for a process that is gone."""
        self._living.discard(process)
        self._awaited.discard(process)
        return self._settle()

    def _open(self) -> Sent[To]:
        is_withdrawn = self._has_notice()
        self._number += 1
        self._stage = _WITHDRAWN if is_withdrawn else _ASKED
        self._awaited = set(self._living)
        self._highest, self._pace = -1, NO_CHECKPOINTS
        told = self._replies(SaveState("preempted")) if is_withdrawn else []
        return [SaveOrder(self._number, None, is_withdrawn), *told, *self._settle()]

    def _settle(self) -> Sent[To]:
        if not self._living:
            self._waiting += self._later
            self._stage, self._later = _CLOSED, []
            told, self._waiting = self._replies(SaveState("over")), []
            return told
        if self._stage != _ASKED or self._awaited:
            return []
        if self._pace == NO_CHECKPOINTS:
            return [SaveOrder(self._number, None, True), *self._close(SaveState("no checkpoints"))]
        self._stage, step = _AGREED, self._highest + 1
        state = SaveState("agreed", step, self._pace == BY_STEPS)
        return [SaveOrder(self._number, step), *self._replies(state)]

    def _close(self, state: SaveState) -> Sent[To]:
        self._stage = _CLOSED
        told = self._replies(state)
        self._waiting, self._later = self._later, []
        return [*told, *self._open()] if self._waiting else told

    def _replies(self, state: SaveState) -> Sent[To]:
        return [Reply(to, ticket, state) for to, ticket in self._waiting]


class RequestedSave:
    """The request that is known to one process, and its answers. See `stopping.Stop`."""

    def __init__(self, changed: threading.Condition, notify: Callable[[], None]) -> None:
        """`notify` wakes the threads that wait for a change; the lock is held meanwhile."""
        self._lock = changed
        self._notify = notify
        self._number = 0
        self._stage = _CLOSED
        self._due: list[tuple[int, int]] = []  # numbers and agreed steps that are not saved yet
        self._passed = -1
        self._served: int | None = None  # the step that was saved, until a call for another one
        self._answers: tuple[int, int] | None = None  # the number and the step of a running save
        self._histories: list[int] = []  # the pace of each open `Checkpoints`

    # ---- the main line

    def begin_history(self, pace: int, *, is_all: bool) -> None:
        """Record that all processes (or some) have opened `Checkpoints`; `pace`: EACH_CALL or
        BY_STEPS.

        The steps of a second one may begin at 0 again. No process has a call of an earlier step
        ahead of it once all have opened this one.
        """
        with self._lock:
            self._histories.append(pace)
            if is_all:
                self._passed = -1

    def end_history(self, pace: int) -> None:
        """Record that `Checkpoints` are closed."""
        with self._lock:
            self._histories.remove(pace)

    def is_due(self, step: int) -> bool | None:
        """Return whether a call that may save this step saves it for a request; None: not agreed.

        Each call counts, also one that saves the step anyway: so all processes save for a request
        at the same call. All `Checkpoints` of the program save the step.
        """
        with self._lock:
            if step == self._served:
                return True
            if any(step >= agreed for _, agreed in self._due):
                return True
            if self._stage == _ASKED:
                return None
            self._served = None
            self._passed = max(self._passed, step)
            return False

    def begin(self, step: int) -> None:
        """Record that a save begins: it answers the request if that may be answered here."""
        with self._lock:
            self._passed = max(self._passed, step)
            if done := [number for number, agreed in self._due if step >= agreed]:
                self._answers, self._served = (max(done), step), step
                self._due = [one for one in self._due if step < one[1]]
            elif self._stage == _WITHDRAWN:
                self._answers, self._stage = (self._number, step), _CLOSED

    def end(self, step: int, state: str) -> SaveReport | None:
        """Record that a save is COMMITTED or has FAILED; return the report to send, if any."""
        with self._lock:
            if self._answers is None or self._answers[1] != step:
                return None
            number, self._answers = self._answers[0], None
            return SaveReport(number, state, step)

    def restart(self) -> None:
        """Compare steps anew: see `Stop.rearm`."""
        with self._lock:
            self._passed = -1

    # ---- the threads beside it

    def receive(self, order: SaveOrder) -> SaveReport | None:
        """Take a request, or its step; return this process's answer to a request."""
        with self._lock:
            is_new = order.number > self._number
            if is_new:
                self._number, self._stage = order.number, _ASKED
            if self._stage != _ASKED:
                return None
            if order.is_withdrawn:
                self._stage = _WITHDRAWN
            elif order.step is not None:
                self._stage = _CLOSED
                self._due.append((order.number, order.step))
            self._notify()
            pace = max(self._histories, default=NO_CHECKPOINTS)
            return SaveReport(self._number, ANSWERED, self._passed, pace) if is_new else None

    def overtake(self) -> None:
        """Withdraw a request without a step: a preemption notice has come after it."""
        with self._lock:
            if self._stage == _ASKED:
                self._stage = _WITHDRAWN
