"""Find the process that failed first, and the exit code of the job."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.errors import (
    CorruptCheckpointError,
    DeadlineError,
    DivergenceError,
    InitializeError,
    PeerFailedError,
    ProcessLostError,
    StalledError,
    inflected,
)
from shoal.runtime.failures.facts import (
    CallPlace,
    Cause,
    Difference,
    Memory,
    ProcessSet,
    StackFrame,
    Wait,
    Waiting,
)
from shoal.runtime.failures.headline import place_words
from shoal.runtime.failures.last_record import LastRecord, place_at
from shoal.runtime.failures.process_text import listed
from shoal.runtime.failures.stall_text import waiting_of
from shoal.runtime.rules.stalls import Stall
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.callsite import line_of

# Kinds of errors that all processes of a meeting share.
SHARED = ("diverged", "deadline", "stalled", "not_joined", "checkpoint")
# The errors that report another failure.
LEARNED = (PeerFailedError.__name__, ProcessLostError.__name__)
# Exit codes of a program that died of an exception of its own. Not of those that another process,
# host or service may have caused; others are of programs that chose their code, after an exception
# that they may have survived.
_RAISED = (
    1, 128 + signal.SIGINT, DivergenceError.exit_code, CorruptCheckpointError.exit_code,
)  # fmt: skip
# A program that ends itself by a fault gets others: SIGSEGV, SIGABRT, SIGBUS, …
_FROM_OUTSIDE = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip


class _Rank(enum.IntEnum):
    """Kinds of failures, the likeliest root first."""

    OWN = enum.auto()
    # Its own, and known only from what it recorded or reported before its end.
    REPORTED = enum.auto()
    FOUND = enum.auto()  # by processes together: a difference, a deadline, a stall
    TORN = enum.auto()  # an error of JAX's runtime, which the end of another process may cause
    CONSEQUENCE = enum.auto()  # of the end of another process, as its error says


# Other exit codes are of failures of its own.
_RANK_OF_CODE = {
    DivergenceError.exit_code: _Rank.FOUND,
    DeadlineError.exit_code: _Rank.FOUND,
    StalledError.exit_code: _Rank.FOUND,
    ProcessLostError.exit_code: _Rank.CONSEQUENCE,
    PeerFailedError.exit_code: _Rank.CONSEQUENCE,
    InitializeError.exit_code: _Rank.CONSEQUENCE,
}


# Of programs that are asked to end: their handlers may return, or raise KeyboardInterrupt.
_AS_ASKED = (
    0, REQUEUE, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT,
)  # fmt: skip


class LastCall(NamedTuple):
    """The last call of a process."""

    step: int | None
    place: CallPlace | None
    is_waiting: bool  # for others, there


def last_call_of(row: Mapping[str, Any] | None) -> LastCall | None:
    """Parse the last call of a process, as the coordinator sends it."""
    if row is None:
        return None
    call, name, site = (str(row[key]) for key in ("call", "name", "site"))
    # This process has other modules than that one: it would find another file of that name.
    place = dataclasses.replace(place_at(call, name, site), age_s=float(row["age_s"]), source="")
    is_known = bool(place.call or place.file)
    return LastCall(row["step"], place if is_known else None, bool(row["waits"]))


class Gone(NamedTuple):
    """How a process left the job; it may still be running."""

    state: str  # "left" | "failed" | "lost"
    words: str  # the headline of its exception, or why it is lost
    at_s: float  # on the monotonic clock, which all processes of a host share
    is_dismissed: bool = False  # declared lost for its silence, while its connection stood
    follows: bool = False  # it failed because of others, as it reported
    at: LastCall | None = None
    is_missed: bool = True  # other processes were in the job then, or had not left it in order
    why: str = ""  # it is lost, without a guess of the reason
    record: LastRecord | None = None  # of its failure, as it sent it


class ProcessExit(NamedTuple):
    """How one process ended."""

    process: int
    code: int  # as in subprocess: negative for a signal
    failed_s: float | None  # when it failed by itself; None: it did not, or was ended first
    sent: tuple[signal.Signals, ...] = ()  # the signals sent to end it
    output: str = ""  # the end of its log
    log: str = ""
    was_frozen: bool = False  # it was stopped by a signal when the first one was sent
    gone: Gone | None = None  # the coordinator's report before any signal was sent; not "left"
    is_lost: bool = False  # lost to the others while alive
    joined_by_jax: bool = False  # alone
    sent_s: float = math.inf  # the time of the first signal
    host: str = ""  # in a job on several hosts
    threads: tuple[LastRecord, ...] = ()  # of threads that exceptions have ended
    memory: Memory | None = None  # of it and of its host's cgroup
    step: int = -1  # the highest that it began
    record: LastRecord | None = None  # of its failure, as it wrote it
    ended_s: float = math.inf
    crashed_at: tuple[StackFrame, ...] = ()  # the program's lines when a fault of its own ended it
    asked_s: float = math.inf  # when the launcher passed on a SIGTERM, as a request to end
    left: Gone | None = None  # the coordinator's report that it left the job in order
    has_input: bool = True  # standard input; else /dev/null
    is_python: bool = True  # started by this launcher's Python, which records how it ends
    ran_loaded: bool = False  # code from the compile cache, and finished no step

    @property
    def is_oom(self) -> bool:
        """Whether it was killed while the cgroup counted a kill for want of memory."""
        is_killed = self.code == -signal.SIGKILL and signal.SIGKILL not in self.sent
        return is_killed and self.memory is not None and bool(self.memory.cgroup_oom_kills)

    def with_report(self, gone: Gone | None) -> ProcessExit:
        """Return it with the coordinator's report.

        A report after the first signal is ignored: the launcher was the cause.
        """
        left = None
        if gone is not None and gone.state == "left":
            left, gone = gone, None
        elif gone is not None and gone.at_s >= self.sent_s:
            gone = None
        is_lost = self.is_lost
        if gone is not None and gone.state == "lost" and gone.is_missed and self.code != 0:
            # Declared so, or without its connection, as after an exec, until it had to be ended.
            is_lost |= gone.is_dismissed or -self.code in self.sent
        return self._replace(gone=gone, is_lost=is_lost, left=left)

    @property
    def has_left(self) -> bool:
        """Whether it left the job in order, and was at most ended in its teardown."""
        return self.left is not None and (self.code == 0 or -self.code in self.sent)

    @property
    def own_threads(self) -> list[LastRecord]:
        """The exceptions of its threads that are its own."""
        return [
            record
            for record in self.threads
            if record.because_of is None
            and record.cause.error
            and record.cause.error.type not in LEARNED
        ]

    @property
    def was_ended(self) -> bool:
        """Whether a signal of the launcher, or one that it passed on, may have ended it."""
        return bool(self.sent) or (self.asked_s < math.inf and self.code == -signal.SIGTERM)

    @property
    def has_obeyed(self) -> bool:
        """Whether it ended as a program does that is asked to, and had not failed before."""
        if self.code not in _AS_ASKED or self.asked_s == math.inf:
            return False
        return self.known_failed_s is None or self.asked_s <= self.known_failed_s

    @property
    def known_failed_s(self) -> float | None:
        """When it failed, by the best available source: its report to the others, if there is one.

        Then its own record, which it writes before.
        """
        if self.gone is not None and self.gone.state == "failed":
            return self.gone.at_s
        if self.gone is None:
            return self.failed_s
        if self.failed_s is None:
            return self.gone.at_s
        return min(self.gone.at_s, self.failed_s)


def first_failures(exits: Iterable[ProcessExit]) -> list[ProcessExit]:
    """Return the root: the earliest failure not caused by the launcher or by another failure.

    The coordinator determines the order: a process that learns of a failure may exit before the
    one that failed, and one that has reported an exception of its own has failed then, however it
    ended. A process that the others lost while it was alive has failed whatever its exit code. If
    all other failures are consequences, the root is a process that failed before and had to be
    ended by the launcher, or ended with 0 before it left the job; or else one that was frozen; or
    else those that left in order, and that the others missed: these may be several.

    Empty: all ended on request, or because others did.
    """
    exits = list(exits)
    claims = [
        (_rank(e), e.known_failed_s, e)
        for e in exits
        if _failed(e) and e.known_failed_s is not None and not e.has_obeyed
    ]
    ended_s = [
        known_failed_s
        for rank, known_failed_s, process_exit in claims
        if rank == _Rank.OWN or not (rank == _Rank.REPORTED or process_exit.sent)
    ]
    if not ended_s:
        return []  # all were ended by the launcher, on request
    claims = [claim for claim in claims if claim[2].code or claim[1] <= min(ended_s)]
    rank, _, root = min(claims, key=lambda claim: claim[:2])
    if rank <= _Rank.REPORTED:
        return [root]
    frozen = [process_exit for process_exit in exits if process_exit.was_frozen]
    if frozen:
        return frozen[:1]
    if rank == _Rank.FOUND or (rank == _Rank.TORN and not _has_gone_before(root, exits)):
        return [root]
    if min(process_exit.asked_s for process_exit in exits) <= (root.known_failed_s or 0.0):
        return []
    return _missed_by(root, exits) or _failed_in_threads(exits) or [root]


def _missed_by(root: ProcessExit, exits: Iterable[ProcessExit]) -> list[ProcessExit]:
    """Return the processes that had left the job in order, and without which a process failed, the
    first one first."""
    named = None
    if root.record is not None:
        named = root.record.because_of
    failed_s = root.known_failed_s or 0.0
    missed = [
        (process_exit.left.at_s, process_exit.process, process_exit)
        for process_exit in exits
        if process_exit.left is not None
        and process_exit.has_left
        and process_exit.left.at_s <= failed_s
        # An error of JAX's runtime names no process.
        if named is None or process_exit.process in named
    ]
    return [process_exit for _, _, process_exit in sorted(missed, key=lambda row: row[:2])]


def _has_gone_before(root: ProcessExit, exits: Iterable[ProcessExit]) -> bool:
    """Return whether another process had ended, or left the job, when one failed."""
    failed_s = root.known_failed_s or 0.0
    return any(
        process_exit.ended_s <= failed_s
        or (process_exit.left is not None and process_exit.left.at_s <= failed_s)
        for process_exit in exits
        if process_exit.process != root.process
    )


def _failed_in_threads(exits: Sequence[ProcessExit]) -> list[ProcessExit]:
    """Return the process that others name, and in which a thread has failed, as failed by that: it
    may have computed until it was ended, and never have known."""
    peers = [
        process_exit.record.because_of for process_exit in exits if process_exit.record is not None
    ]
    named = {process for of in peers for process in of or ()}
    return [
        process_exit._replace(
            record=process_exit.own_threads[0], failed_s=process_exit.own_threads[0].at_s
        )
        for process_exit in exits
        if process_exit.process in named and process_exit.own_threads
    ][:1]


def left_cause(left: Gone | None) -> Cause:
    """Return the failure of a process that had left the job in order, and that others missed."""
    place = None
    if left is not None and left.at is not None:
        place = left.at.place
    where = ""
    if left is not None and left.why:
        where = f", by sys.exit() at {line_of(left.why)}"
    elif place is not None and not place.call:  # else the last call, which it has returned from
        where = f", by {place_words(place)}"
    text = f"It had left the job in order{where}, and others waited for it."
    return Cause(processes=ProcessSet(), kind="exit", exit_code=0, words=(text,))


def has_only_learned(record: LastRecord) -> bool:
    """Return whether a process failed only with the error that reports another failure."""
    error = record.cause.error
    if record.cause.kind in (*SHARED, "exit"):
        return record.cause.kind != "exit" or record.because_of is not None
    return record.because_of is not None and error is not None and error.type in LEARNED


def shared_cause(first: Cause, causes: Sequence[Cause]) -> Cause:
    """Return a failure that all who met have been given, as one.

    Args:
      first: as the first of them recorded it.
      causes: as all of them did.
    """
    processes = ProcessSet(process for cause in causes for process in cause.processes)
    bare = dataclasses.replace(first, error=None, frames=(), left_out={})
    if first.wait is not None:
        missing = ProcessSet(p for group in first.wait.missing for p in group.processes)
        wait = _joined_wait(first, first.wait, missing, causes)
        return dataclasses.replace(bare, wait=wait, processes=missing or processes)
    if first.difference is not None:
        difference = _joined(first.difference, [cause.difference for cause in causes])
        of_sides = [process for side in difference.sides for process in side.processes]
        involved = ProcessSet([*processes, *of_sides])
        return dataclasses.replace(bare, difference=difference, processes=involved)
    if first.kind == "checkpoint" and first.checkpoint is not None and first.checkpoint.file:
        return dataclasses.replace(bare, processes=processes)
    return dataclasses.replace(first, processes=processes)


def _joined_wait(first: Cause, wait: Wait, missing: ProcessSet, causes: Sequence[Cause]) -> Wait:
    """Return a wait with all processes that arrived, by place."""
    arrived: dict[CallPlace | None, list[int]] = {}
    for cause in causes:  # those that came later have the error, too
        if not set(cause.processes) <= set(missing):
            arrived.setdefault(cause.place or line_at(cause), []).extend(cause.processes)
    groups = [Waiting(processes=ProcessSet(of), place=place) for place, of in arrived.items()]
    call = wait.call
    if first.place is not None:
        call = first.place.call
    return dataclasses.replace(wait, call=call, arrived=tuple(groups))


def _joined(first: Difference, all_known: Iterable[Difference | None]) -> Difference:
    """Return a difference with the processes that arrived after it was found, each on its side."""
    first = dataclasses.replace(first, late=None)
    sides = {
        dataclasses.replace(side, processes=ProcessSet()): side.processes for side in first.sides
    }
    for known in all_known:
        if known is None or known.late is None or dataclasses.replace(known, late=None) != first:
            continue
        side = dataclasses.replace(known.late, processes=ProcessSet())
        sides[side] = ProcessSet([*sides.get(side, ()), *known.late.processes])
    rows = [dataclasses.replace(side, processes=of) for side, of in sides.items()]
    rows.sort(key=lambda side: (len(side.processes), side.processes))
    return dataclasses.replace(first, sides=tuple(rows))


def line_at(cause: Cause) -> CallPlace | None:
    """Return the program's line at which a process stood."""
    if not cause.frames:
        return cause.place
    frame = cause.frames[-1]
    return CallPlace(file=frame.file, line=frame.line, source=frame.source)


def stalled_cause(stall: Stall) -> tuple[Cause, str]:
    """Return the failure of a job in which no process has moved, and its headline."""
    odd, *others = map(waiting_of, stall.groups)
    headline = f"no process has moved for {stall.idle_s:.0f} s"
    are_fewer = sum(len(other.processes) for other in others) > len(odd.processes)
    waits_for, differs = "", False
    if len(others) == 1:
        waits_for = others[0].waits_for
        first, second = stall.groups
        differs = (first.stance, bool(first.site)) != (second.stance, bool(second.site))
    if odd.waits_for == "reader":
        headline += f"; {_wait(odd.processes)} for a reader"
    elif waits_for in ("others", "reader") and odd.waits_for in ("", "left"):
        headline += f"; {_wait(others[0].processes)} for {listed(odd.processes)}"
    elif len(others) == 1 and (are_fewer or differs):
        are = inflected(len(odd.processes), "is elsewhere", "are elsewhere")
        if odd.waits_for == "left":
            are = "left the job"
        headline += f"; {listed(odd.processes)} {are}"
    wait = Wait(call="", arrived=tuple(others), missing=(odd,))
    return Cause(processes=odd.processes, kind="stalled", wait=wait), headline


def _wait(processes: ProcessSet) -> str:
    return f"{listed(processes)} {inflected(len(processes), 'waits', 'wait')}"


def exit_code(root: ProcessExit) -> int:
    """Return the exit code of the root as in a shell: 128 + n for signal n.

    A process that raised or exited, and had to be ended by the launcher, has the code of that; one
    that was frozen or lost, or ended with 0 before it left the job, counts as a loss.
    """
    if root.has_left:  # and the others missed it
        return PeerFailedError.exit_code
    cause = None
    if root.record is not None:
        cause = root.record.cause
    has_exited = cause is not None and cause.kind == "exit"
    if root.was_frozen or root.is_lost or (root.code == 0 and not has_exited):
        return ProcessLostError.exit_code
    if root.code == REQUEUE:  # without a notice: it would be started again for ever
        return PeerFailedError.exit_code
    # Without our hooks, as before `initialize`, Python ends with 1 after any exception.
    is_plain = root.code in (0, 1) or (root.was_ended and root.code < 0)
    if cause is not None and (is_plain or cause.thread):
        return cause.exit_code or PeerFailedError.exit_code  # sys.exit(256) ends with 0
    if is_plain:
        return 1
    return shell_code(root.code)


def shell_code(code: int) -> int:
    """Return an exit code of subprocess as a shell does."""
    if code < 0:
        return 128 - code
    return code


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_from_outside(root: ProcessExit) -> bool:
    """Return whether something outside of the program ended or stopped it: it may do well again.

    An out-of-memory kill is the program's own; so are the signals of its own faults.
    """
    by_signal = is_signal_from_outside(root.code) and not root.sent
    return root.was_frozen or root.is_lost or (by_signal and not root.is_oom)


def is_signal_from_outside(code: int) -> bool:
    """Return whether a process ended by a signal that is not one of its own faults."""
    return -code in _FROM_OUTSIDE


def cause_of(root: ProcessExit) -> str:
    """Return the exception of a failure and its place in the program, "" if unknown.

    Losses, late processes and jobs that could not be joined have their cause elsewhere.
    """
    if not (root.sent or root.code in _RAISED):
        return ""
    record = root.record
    if record is None and root.gone is not None:  # its disk was full: what it has reported
        record = root.gone.record
    if record is None:
        return ""
    cause = record.cause
    if cause.kind == "exit" or cause.error is None or not cause.frames:
        return ""
    frame = cause.frames[-1]
    return f"{cause.error.type} at {os.path.basename(frame.file)}:{frame.line}"


def fails_by_itself(process_exit: ProcessExit) -> bool:
    """Return whether its failure is its own: not of another process, nor by the launcher."""
    return _rank(process_exit) == _Rank.OWN


def names_no_process(root: ProcessExit) -> bool:
    """Return whether a process failed because a service was lost, not another process."""
    is_lost = root.code == ProcessLostError.exit_code and not root.is_lost
    return is_lost and root.record is not None and root.record.because_of == ()


def _failed(process_exit: ProcessExit) -> bool:
    return bool(process_exit.code or process_exit.is_lost or process_exit.gone)


def _rank(process_exit: ProcessExit) -> _Rank:
    """Return the kind of a failure: the first that applies."""
    gone = process_exit.gone
    if process_exit.is_lost:
        return _Rank.OWN
    if gone is not None and gone.follows:
        return _Rank.CONSEQUENCE
    was_ended = bool(process_exit.sent) or not process_exit.code  # or it has chosen code 0
    if not was_ended:
        by_code = _rank_of_code(process_exit)
        if by_code is not None:
            return by_code
    if _is_torn(process_exit):
        return _Rank.TORN
    if not was_ended:
        return _Rank.OWN
    if gone is not None and gone.state == "failed" and process_exit.code:
        return _Rank.OWN
    return _Rank.REPORTED


def _rank_of_code(process_exit: ProcessExit) -> _Rank | None:
    """Return the kind of a failure by its exit code. None: its own, or the program chose it."""
    code = process_exit.code
    if process_exit.record is not None:
        cause = process_exit.record.cause
        if cause.kind == "exit" and process_exit.gone is not None:
            return None
        if code == 1:  # without our hooks Python ends it with 1, whatever the error
            code = cause.exit_code or 1
    return _RANK_OF_CODE.get(code)


def _is_torn(process_exit: ProcessExit) -> bool:
    """Return whether an error of JAX's runtime ended it, which another's end may have caused."""
    if process_exit.record is not None:
        return process_exit.record.is_torn
    if process_exit.gone is None or process_exit.gone.record is None:
        return False
    return process_exit.gone.record.is_torn
