"""The rules by which all processes of a job save at one step, because `shoal save` requests it.

::

    observer      requests a save
    coordinator   numbers the request and pushes it to all
    each process  answers at once with the highest step that it has passed: at which a call that
                  saves has returned without a save for a request; from now on it passes none before
                  an agreement
    coordinator   when all living processes have answered: step = highest + 1; pushed to all
    each process  saves at its first call from that step on, which closes the request there; reports
                  the commit

This is the agreement of `stopping`, for calls that save instead of calls of `preempted`. It needs
no rounds: one agreement is sought at a time. A request that comes meanwhile joins it; one that
comes later has the next number, even while the save of the earlier one runs. A save that answers a
request answers all earlier ones.

A preemption notice overtakes a request without a step: the request is *withdrawn*. All processes
have its frames and those of notices in one order, so all withdraw the same ones. No step is agreed
for it any more: the next save of any kind answers it, which is that of the notice.

`SaveRequests` is the coordinator's side, `RequestedSave` that of a process. Neither sends anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

ANSWERED, COMMITTED, FAILED = "answered", "committed", "failed"  # what a process reports
NO_CHECKPOINTS, EACH_CALL, BY_STEPS = range(3)  # what its `Checkpoints` save: see `SaveReport`
_IDLE, _ASKED, _WITHDRAWN = range(3)  # whether the newest request waits for a step, or for any save


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


class SaveState(NamedTuple):
    """What has become of a save that `shoal save` requested.

    ``state`` is one of: "agreed", with the step; "preempted": the save of a preemption notice
    answers it; "committed" or "failed", with the step; "no checkpoints": no process has
    `Checkpoints`; "not joined": not all processes have joined yet; "over": all have left.
    """

    state: str
    step: int | None = None
    is_by_steps: bool = False  # "agreed": `every=` selects steps, so that this one is saved

    kind: Literal["save"] = "save"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts as sent."""
        return {"state": self.state, "step": self.step, "is_by_steps": self.is_by_steps}


To = TypeVar("To", bound=Hashable)


class SaveReply(NamedTuple, Generic[To]):
    """A state for an observer, and the ticket of its request."""

    to: To
    ticket: int
    answer: SaveState


Sent: TypeAlias = "list[SaveOrder | SaveReply[To]]"


class SaveRequests(Generic[To]):
    """The coordinator's record of requests; its methods return what is to be sent.

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
        self._number = 0  # of the newest request
        self._stage = _IDLE
        self._awaited: set[int] = set()
        self._highest = -1
        self._pace = NO_CHECKPOINTS
        self._waiting: dict[int, list[tuple[To, int]]] = {}  # the observers, by their requests

    @property
    def awaited(self) -> tuple[int, ...]:
        """The processes that have not answered, in order; none unless a step is to be agreed."""
        return tuple(sorted(self._awaited)) if self._stage == _ASKED else ()

    def request(self, to: To, ticket: int) -> Sent[To]:
        """Take the request of an observer."""
        if self._stage == _ASKED:
            self._waiting[self._number].append((to, ticket))
            return []
        if self._stage == _WITHDRAWN and self._has_notice():
            self._waiting[self._number].append((to, ticket))
            return [SaveReply(to, ticket, SaveState("preempted"))]
        self._number += 1
        self._stage, self._awaited = _ASKED, set(self._living)
        self._highest, self._pace = -1, NO_CHECKPOINTS
        self._waiting[self._number] = [(to, ticket)]
        replies = self.overtake() if self._has_notice() else []
        is_withdrawn = self._stage == _WITHDRAWN
        return [SaveOrder(self._number, None, is_withdrawn), *replies, *self._settle()]

    def receive(self, process: int, report: SaveReport) -> Sent[To]:
        """Take a report of a process."""
        if process not in self._living:
            return []
        if report.state != ANSWERED:
            return self._close(report.number, SaveState(report.state, report.step))
        if report.number != self._number or self._stage != _ASKED:
            return []
        self._highest = max(self._highest, report.step)
        self._pace = max(self._pace, report.pace)
        self._awaited.discard(process)
        return self._settle()

    def overtake(self) -> Sent[To]:
        """Withdraw a request that has no step: a preemption notice is pushed to all."""
        if self._stage != _ASKED:
            return []
        self._stage = _WITHDRAWN
        return self._replies(self._number, SaveState("preempted"))

    def depart(self, process: int) -> Sent[To]:
        """Stop waiting for a process that is gone."""
        self._living.discard(process)
        self._awaited.discard(process)
        return self._settle()

    def _settle(self) -> Sent[To]:
        if not self._living:
            return self._close(self._number, SaveState("over"))
        if self._stage != _ASKED or self._awaited:
            return []
        if self._pace == NO_CHECKPOINTS:
            replies = self._close(self._number, SaveState("no checkpoints"))
            return [SaveOrder(self._number, None, True), *replies]
        self._stage, step = _IDLE, self._highest + 1
        state = SaveState("agreed", step, self._pace == BY_STEPS)
        return [SaveOrder(self._number, step), *self._replies(self._number, state)]

    def _close(self, number: int, state: SaveState) -> Sent[To]:
        """Answer a request, and all earlier ones."""
        if number == self._number:
            self._stage = _IDLE
        replies: Sent[To] = []
        for earlier in [waiting for waiting in self._waiting if waiting <= number]:
            replies += self._replies(earlier, state)
            del self._waiting[earlier]
        return replies

    def _replies(self, number: int, state: SaveState) -> Sent[To]:
        return [SaveReply(to, ticket, state) for to, ticket in self._waiting.get(number, ())]


class RequestedSave:
    """The requests known to one process, and its answers. See `stopping.PreemptionState`."""

    def __init__(self, changed: threading.Condition, notify: Callable[[], None]) -> None:
        """`notify` wakes the threads that wait for a change; the lock is held meanwhile."""
        self._lock = changed
        self._notify = notify
        self._number = 0  # of the newest request
        self._stage = _IDLE
        self._due: list[tuple[int, int]] = []  # numbers and agreed steps that are not saved yet
        self._passed = -1
        self._served: int | None = None  # the step that was saved, until a call for another one
        self._answers: dict[int, int] = {}  # by the step of a save: the newest request it answers
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
            is_due = any(step >= agreed for _, agreed in self._due)
            if self._stage == _ASKED and not is_due:
                return None
            self._served = None
            self._passed = max(self._passed, step)
            return is_due

    def begin(self, step: int) -> None:
        """Record that a save begins: it answers the request if that may be answered here."""
        with self._lock:
            self._passed = max(self._passed, step)
            answered = [number for number, agreed in self._due if step >= agreed]
            if answered:
                self._served = step
                self._due = [due for due in self._due if step < due[1]]
            if self._stage == _WITHDRAWN:
                self._stage = _IDLE
                answered.append(self._number)
            if answered:
                self._answers[step] = max(answered)

    def has_served(self, step: int) -> bool:
        """Return whether this step was saved for a request, and no call for another one came."""
        with self._lock:
            return step == self._served

    def end(self, step: int, state: str) -> SaveReport | None:
        """Record that a save is COMMITTED or has FAILED; return the report to send, if any."""
        with self._lock:
            number = self._answers.pop(step, None)
            return None if number is None else SaveReport(number, state, step)

    def restart(self) -> None:
        """Compare steps anew: see `PreemptionState.rearm`."""
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
                self._stage = _IDLE
                self._due.append((order.number, order.step))
            self._notify()
            pace = max(self._histories, default=NO_CHECKPOINTS)
            return SaveReport(self._number, ANSWERED, self._passed, pace) if is_new else None

    def overtake(self) -> None:
        """Withdraw a request without a step: a preemption notice has come after it."""
        with self._lock:
            if self._stage == _ASKED:
                self._stage = _WITHDRAWN
