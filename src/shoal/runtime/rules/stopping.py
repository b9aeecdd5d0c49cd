"""The rules by which all processes of a job stop at one step.

::

    notice        a process learns that it will be ended: `ReceivedNotice`
    coordinator   numbers it and pushes it to all
    each process  answers at once with the highest step at which it has returned "go on"; from now
                  on it returns that only after an agreement
    coordinator   when all living processes have answered: step = highest + 1; pushed to all

The agreed step is therefore later than any step that a process has started, and no process waits
for one that computes: its watcher answers. A *round* goes from one `preemption.clear` to the next;
answers of earlier rounds do not count. Notices are numbered over all rounds, and reach every
process in order; it closes those that all processes knew of, and a remaining one opens the next
round at once.

A program has *stopped* for a notice once `preempted` was True. What it has saved by then is judged
by the order of its calls, never by the clock: each save, and each failure of a save, is numbered
as if `preempted` had been called at that moment. So all processes judge alike, no matter how long a
save takes, and when a process learns of a notice.

`PreemptionRounds` is the coordinator's side, `PreemptionState` the side of a process. Neither sends
anything.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shoal.runtime.rules.requested_saves import RequestedSave

REQUEUE = 75  # EX_TEMPFAIL: the exit code of a process that was preempted, and asks to start again
NOTHING, EARLIER, LAST = range(3)  # what is saved: nothing of the attempt; not its last step; that
SAVED = "preempted, and saved"
SAVE_FAILED = "a save failed after the preemption notice: the job does not ask to start again"


class ReceivedNotice(NamedTuple):
    """A preemption notice, as a process received it."""

    reason: str  # "Terminated", or the text of the file or the cloud
    source: str  # "SIGTERM", "file /run/leave", "gce"
    deadline_s: float | None = None  # seconds left; clocks differ between hosts, so no time of day


class Notice(NamedTuple):
    """An open notice, as `shoal.preemption.notice()` returns it."""

    reason: str  # "Terminated", or the text of the file or the cloud
    source: str  # "SIGTERM", "file /run/leave", "gce"
    process: int  # that received it
    deadline_s: float | None  # seconds left at the time of the call, by the earliest known
    step: int | None  # from which on `preempted` is true everywhere; None: not agreed yet
    others: tuple[Notice, ...] = ()  # later notices, each with its own deadline


class Stopped(NamedTuple):
    """What a program that has stopped for a notice leaves behind."""

    kept: int  # NOTHING, EARLIER or LAST
    words: str  # the same, as a sentence without its end
    has_failed: bool = False  # a save failed at the agreed step or after it


class StopReport(NamedTuple):
    """The answer of a process to notices."""

    round: int
    highest: int | None  # the highest step it went on at, -1: none; None: no notice known
    has_saved: bool = False  # since a notice of this round
    stopped: Stopped | None = None  # None: its program has not stopped for it
    highest_save: int = -1  # the same as `highest`, of saves before its first call of `preempted`


class StopAgreement(NamedTuple):
    """The agreement of all living processes."""

    round: int
    step: int
    save_step: int = 0  # for saves before the first call of `preempted`


class PreemptionRounds:
    """The coordinator's record of the answers.

    >>> rounds = PreemptionRounds(2)
    >>> rounds.give()
    1
    >>> rounds.receive(0, StopReport(0, 12))
    >>> rounds.receive(1, StopReport(0, 10))
    StopAgreement(round=0, step=13, save_step=0)
    """

    def __init__(self, num_processes: int) -> None:
        self._living = set(range(num_processes))
        self._awaited = set(self._living)
        self._count = 0
        self._round = 0
        self._highest = self._highest_save = -1
        self._step: int | None = None
        self.is_open = False  # whether there is a notice that no rearm has closed
        self.has_saved = False  # whether any process has saved after it
        self._stopped: Stopped | None = None  # of the process that has kept most
        self._failed: set[int] = set()  # processes in which a save has failed

    @property
    def awaited(self) -> tuple[int, ...]:
        """The processes that have not answered, in order; none unless a notice is open."""
        if not self.is_open or self._step is not None:
            return ()
        return tuple(sorted(self._awaited))

    @property
    def stopped(self) -> Stopped | None:
        """What the job leaves behind; None: no program of it has stopped for a notice.

        One save is enough, as when only some processes share the checkpoints. So is one failure.
        """
        return self._stopped and self._stopped._replace(has_failed=bool(self._failed))

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
        stopped = report.stopped
        if stopped is not None:
            (self._failed.add if stopped.has_failed else self._failed.discard)(process)
            if self._stopped is None or stopped.kept > self._stopped.kept:
                self._stopped = stopped
        if report.highest is None:
            return None
        self.is_open = True
        self._highest = max(self._highest, report.highest)
        self._highest_save = max(self._highest_save, report.highest_save)
        self._awaited.discard(process)
        return self._settle()

    def depart(self, process: int) -> StopAgreement | None:
        """Stop waiting for a process that is gone."""
        self._living.discard(process)
        self._awaited.discard(process)
        return self._settle()

    def _begin(self, round_number: int) -> None:
        self._round = round_number
        self._awaited = set(self._living)
        self._highest = self._highest_save = -1
        self._step = None
        self.is_open = self.has_saved = False
        self._stopped = None
        self._failed = set()

    def _settle(self) -> StopAgreement | None:
        if self._awaited or not self.is_open or self._step is not None:
            return None
        self._step = self._highest + 1
        return StopAgreement(self._round, self._step, self._highest_save + 1)


class _OpenNotice(NamedTuple):
    number: int
    process: int
    given: ReceivedNotice
    due: float | None  # on this process's clock


class _LoopCalls:
    """What the program's loop has asked in a round, by `preempted` and by its saves."""

    def __init__(self) -> None:
        # The three highest steps that `preempted` was called with in turn: a phase with lower ones
        # (an evaluation within a step, the next epoch) leaves them as they are.
        self.top: int | None = None
        self._before: int | None = None
        self._earlier: int | None = None
        self.highest = -1  # at which it went on
        self.highest_save = -1  # the same, of saves before the first call of `preempted`
        self.has_asked = False  # `preempted` was called since the notice
        self.is_informed = False  # the program has seen the notice
        self.has_stopped = False
        self.stopped_at: int | None = None  # where `preempted` was True first

    def call(self, step: int) -> None:
        """Take the step of a call of `preempted`."""
        if self.top is None or step > self.top:
            self._earlier, self._before, self.top = self._before, self.top, step

    def number_of(self, step: int | None) -> int | None:
        """Return the number of a save: that of the highest step of `preempted`, or the next one's.

        Saves may be numbered otherwise, by epochs or by tokens. So a save's own number counts only
        where it can be one of `preempted`: a greater one would put off the agreed step as far, and
        a lower one would never reach it. The next step is as far as the smaller of the last two
        strides, since one of them may lead from warm-up to where the run resumed.

        None: `preempted` was not called yet.
        """
        top, before, earlier, stride = self.top, self._before, self._earlier, 1
        if top is None:
            return None
        if before is not None and earlier is not None:
            stride = min(top - before, before - earlier)
        following = top + stride
        if step is not None and top <= step <= following:
            return step
        return following

    @property
    def stops_by_saves(self) -> bool:
        """Whether the program looks at its notices itself, without `preempted`.

        One call of `preempted` may have been there to watch for the signal; two are a loop's.
        """
        is_loop = self._before is not None
        return not (self.has_asked or is_loop or (self.top is not None and not self.is_informed))


class _Saved:
    """What the program has saved, in this round and before."""

    def __init__(self) -> None:
        self.has_any = False  # in any round
        self.newest: int | None = None  # the highest step, in any round
        self.has_saved = False  # since a notice of this round
        self.kept: float = -1  # the highest number of a save
        self.failed: dict[str, float] = {}  # the numbers of saves that failed, by their paths

    def restart(self) -> None:
        """Begin the next round."""
        self.has_saved, self.kept, self.failed = False, -1, {}

    def keep(self, path: str | None, number: float) -> None:
        """Record that a save is whole."""
        self.kept = max(self.kept, number)
        if path is None:
            self.failed = {}
        elif self.failed.get(path, -1) <= number:
            self.failed.pop(path, None)

    def left_by(self, stopped_at: int | None, agreed: int) -> Stopped:
        """Return what a program leaves behind that has stopped."""
        has_failed = any(number >= agreed for number in self.failed.values())
        if stopped_at is None or self.kept >= stopped_at:
            return Stopped(LAST, SAVED, has_failed)
        summary = f"preempted at step {shown_step(stopped_at)}: "
        if not self.has_any:
            summary += "nothing of this attempt is saved, so it starts over where it began"
            return Stopped(NOTHING, summary, has_failed)
        if self.newest is None:
            summary += "what was done after the last save will be repeated"
        else:
            newest = shown_step(self.newest)
            summary += f"step {newest} is the newest saved, and work done after it is repeated"
        return Stopped(EARLIER, summary, has_failed)


class PreemptionState:
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
        self._loop = _LoopCalls()  # of this round
        self._saved = _Saved()
        self._step: int | None = None
        self._save_step = 0
        self._open: list[_OpenNotice] = []
        self._own: dict[tuple[str, str], int] = {}  # its own notices: the number, 0: none yet
        self._verdict_of_job = 0
        self.known = 0  # number of the last notice received
        self.explained = ""  # the line that `exit_code` has logged
        self.changes = 0  # count of events that a thread may wait for
        self.saves = RequestedSave(self._changed, self._notify)

    # ---- the main line

    def should_stop(self, step: int) -> bool | None:
        """Return whether to stop at `step`; None: not agreed yet."""
        with self._lock:
            loop = self._loop
            loop.call(step)
            if not self._open:  # nearly always
                if step > loop.highest:
                    loop.highest = step
                return False
            loop.has_asked = True
            return None if self._step is None else step >= self._step

    def should_save(self, step: int) -> bool | None:
        """Return whether the program stops at this save, or has stopped; None: not agreed yet.

        A save that comes before `preempted` in its step is a question like it: if it is answered
        with False, so is `preempted` after it, and the next step's save will be True. Before the
        first call of `preempted` saves have an agreed step of their own, by their own numbers.
        """
        with self._lock:
            loop = self._loop
            if loop.stopped_at is not None:
                return True
            number = loop.number_of(step)
            if not self._open:
                if number is None:
                    loop.highest_save = max(loop.highest_save, step)
                else:
                    loop.highest = max(loop.highest, number)
                return False
            if self._step is None:
                return None
            return step >= self._save_step if number is None else number >= self._step

    def number_of(self, step: int | None) -> float:
        """Return with which step `preempted` would be called in place of a save now.

        Args:
          step: of the save; None: it has none.
        """
        with self._lock:
            number = self._loop.number_of(step)
            if self._loop.stopped_at is not None or (number is None and self._open):
                return math.inf
            if number is None:
                return -1 if step is None else step
            # The program stops at this save, even if its next step is farther than was known.
            is_last = self._open and self._step is not None and number >= self._step
            return math.inf if is_last else number

    def wait(self, changes: int, timeout_s: float) -> None:
        """Wait for an event after `changes` was read, at most `timeout_s`."""
        with self._changed:
            if self.changes == changes:
                self._changed.wait(timeout_s)

    def rearm(self, closed: int) -> StopReport:
        """Begin the next round, which closes the notices up to number `closed`."""
        with self._changed:
            self._round += 1
            self._loop, self._step = _LoopCalls(), None
            self._saved.restart()
            self._verdict_of_job = 0
            self.saves.restart()
            self._open = [heard for heard in self._open if heard.number > closed]
            self._own = {key: n for key, n in self._own.items() if not 0 < n <= closed}
            self._notify()
            return StopReport(self._round, -1 if self._open else None)

    def save(self, step: int | None = None) -> StopReport | None:
        """Record a save; return the answer to send, None if no notice is open.

        It stops a program that looks at its notices itself.
        """
        with self._lock:
            saved = self._saved
            saved.has_any = True
            if step is not None:
                saved.newest = max(step, saved.newest or 0)
            if not self._open:
                return None
            saved.has_saved = True
            self._loop.has_stopped |= self._loop.stops_by_saves
            return self._report()

    def keep(self, path: str | None, number: float) -> StopReport | None:
        """Record that a save is whole, with its number; return the answer to send, if any.

        Args:
          path: where its failures would be known by; None: the program vouches for all.
        """
        with self._lock:
            self._saved.keep(path, number)
            return self._report() if self._loop.has_stopped else None

    def fail(self, path: str, number: float) -> StopReport | None:
        """Record that a save failed; return the answer to send, if any."""
        with self._lock:
            self._saved.failed[path] = number
            return self._report() if self._loop.has_stopped else None

    def stop_at(self, step: int) -> StopReport | None:
        """Record that `preempted` is True; return the answer to send, the first time."""
        with self._lock:
            if self._loop.stopped_at is not None:
                return None
            self._loop.has_stopped, self._loop.stopped_at = True, step
            return self._report()

    @property
    def is_unasked(self) -> bool:
        """Return whether a notice is open that the program, as far as is known, has not seen."""
        loop = self._loop
        return bool(self._open) and not (loop.has_asked or loop.is_informed or self.has_saved)

    @property
    def has_saved(self) -> bool:
        """Return whether state was saved after a notice that is still open."""
        return self._saved.has_saved

    @property
    def stopped(self) -> Stopped | None:
        """What the program leaves behind; None: it has not stopped for a notice."""
        with self._lock:
            if not self._loop.has_stopped:
                return None
            return self._saved.left_by(self._loop.stopped_at, self._step or 0)

    @property
    def verdict(self) -> int:
        """Return 1: the program has stopped for a notice; 2: and a save has failed; 0: neither."""
        stopped = self.stopped
        return max(self._verdict_of_job, 0 if stopped is None else 1 + stopped.has_failed)

    @property
    def exit_code(self) -> int:
        """75 (requeue) if all processes stopped and no save failed; else 0."""
        return REQUEUE if self.verdict == 1 else 0

    def join_verdicts(self, verdicts: Iterable[int]) -> None:
        """Take the verdicts of all processes, which then have the same one."""
        with self._lock:
            self._verdict_of_job = max(verdicts, default=0)

    def _report(self) -> StopReport:
        return StopReport(
            self._round,
            self._loop.highest,
            has_saved=self.has_saved,
            stopped=self.stopped,
            highest_save=self._loop.highest_save,
        )

    def inform(self) -> Notice | None:
        """Return the first open notice, which the program now knows of."""
        notice = self.notice()
        self._loop.is_informed |= notice is not None
        return notice

    def notice(self) -> Notice | None:
        """Return the first open notice, with the others."""
        with self._lock:
            heard, step = list(self._open), self._step
        if not heard:
            return None
        now = self._clock()
        notices = [
            Notice(
                entry.given.reason,
                entry.given.source,
                entry.process,
                deadline_s=None if entry.due is None else max(0.0, entry.due - now),
                step=step,
            )
            for entry in heard
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
            if is_first and self._loop.top is None:  # no step says what came before the notice
                self._saved.failed = {}
            self._open.append(_OpenNotice(number, process, given, due))
            self.saves.overtake()
            self._notify()
            return self._report() if is_first else None

    def settle(self, settled: StopAgreement) -> None:
        """Take the agreement."""
        with self._changed:
            if settled.round == self._round:
                self._step, self._save_step = settled.step, settled.save_step
                self._notify()

    def wake(self) -> None:
        """Wake waiting threads after another event."""
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        self.changes += 1
        self._changed.notify_all()


def shown_step(step: int) -> str:
    """Return a step for messages. Python refuses to print numbers of thousands of digits.

    >>> shown_step(13)
    '13'
    """
    return str(step) if step.bit_length() <= 512 else f"a number of {step.bit_length()} bits"
