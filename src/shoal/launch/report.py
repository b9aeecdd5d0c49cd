"""Find the process that failed first, and the exit code of the job."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable
from typing import NamedTuple

from shoal.errors import (
    CorruptCheckpointError,
    DeadlineError,
    DivergenceError,
    InitializeError,
    PeerFailedError,
    ProcessLostError,
    StalledError,
)
from shoal.launch.news import Gone, KeeperNews
from shoal.runtime.failures.facts import Memory, StackFrame
from shoal.runtime.failures.last_record import LastRecord
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.failure_words import is_of_runtime, raised_at

# Exit codes for failures of other processes: never the root if a process failed by itself.
_CONSEQUENCE_CODES = (
    DivergenceError.exit_code,
    ProcessLostError.exit_code,
    PeerFailedError.exit_code,
    DeadlineError.exit_code,
    InitializeError.exit_code,
    StalledError.exit_code,
)
# Exit codes of a program that died of an exception of its own. Not of those that another process,
# host or service may have caused; others are of programs that chose their code, after an exception
# that they may have survived.
_RAISED = (1, DivergenceError.exit_code, CorruptCheckpointError.exit_code)
# A program that ends itself by a fault gets others: SIGSEGV, SIGABRT, SIGBUS, …
_FROM_OUTSIDE = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip
# Ranks of failures, the likeliest root first: of its own; known only from what the process recorded
# or reported before its end; the consequence of another failure.
_OWN, _TOLD, _CONSEQUENCE = range(3)


class Ending(NamedTuple):
    """How one process ended."""

    process: int
    code: int  # as in subprocess: negative for a signal
    failed_s: float | None  # when it failed by itself; None: it did not, or was ended first
    sent: tuple[signal.Signals, ...] = ()  # the signals sent to end it
    output: str = ""  # the end of its log
    log: str = ""
    was_frozen: bool = False  # it was stopped by a signal when the first one was sent
    gone: Gone | None = None  # the meeting place's report before any signal was sent; not "left"
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

    @property
    def is_oom(self) -> bool:
        """Whether it was killed while the cgroup counted a kill for want of memory."""
        is_killed = self.code == -signal.SIGKILL and signal.SIGKILL not in self.sent
        return is_killed and self.memory is not None and bool(self.memory.cgroup_oom_kills)

    def with_report(self, gone: Gone | None) -> Ending:
        """Return it with the meeting place's report.

        A report after the first signal is ignored: the launcher was the cause.
        """
        if gone is not None and (gone.state == "left" or gone.at_s >= self.sent_s):
            gone = None
        is_lost = gone is not None and gone.is_dismissed and gone.is_missed and self.code != 0
        is_lost |= self.is_lost
        return self._replace(gone=gone, is_lost=is_lost)

    @property
    def known_failed_s(self) -> float | None:
        """When it failed, by the best available source: its report to the others, if there is one.

        Then its own record, which it writes before.
        """
        if self.gone is not None and self.gone.state == "failed":
            return self.gone.at_s
        times_s = [self.gone.at_s] if self.gone else []
        return min([*times_s, *([] if self.failed_s is None else [self.failed_s])], default=None)


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """Return the root: the earliest failure that is neither the launcher's nor a consequence.

    The meeting place determines the order: a process that learns of a failure may exit before the
    one that failed, and one that has reported an exception of its own has failed then, however it
    ended. A process that the others lost while it was alive has failed whatever its exit code. If
    all other failures are consequences, the root is a process that failed before and had to be
    ended by the launcher, or ended with 0 before it left the job; or else one that was frozen.
    """
    endings = list(endings)
    claims = [
        (_rank(e), e.known_failed_s, e)
        for e in endings
        if _failed(e) and e.known_failed_s is not None
    ]
    ended_s = [known_failed_s for rank, known_failed_s, _ in claims if rank != _TOLD]
    if not ended_s:
        return None  # all were ended by the launcher, on request
    claims = [claim for claim in claims if claim[2].code or claim[1] <= min(ended_s)]
    rank, _, root = min(claims, key=lambda claim: claim[:2])
    frozen = [ending for ending in endings if ending.was_frozen]
    return frozen[0] if rank == _CONSEQUENCE and frozen else root


def exit_code(root: Ending) -> int:
    """Return the exit code of the root as in a shell: 128 + n for signal n.

    A process that raised and had to be ended by the launcher counts as an exception; one that was
    frozen or lost, or ended with 0 before it left the job, as a loss.
    """
    if root.was_frozen or root.is_lost or root.code == 0:
        return ProcessLostError.exit_code
    if root.code == REQUEUE:  # without a notice: it would be started again for ever
        return PeerFailedError.exit_code
    if -root.code in root.sent:
        return 1
    return shell_code(root.code)


def shell_code(code: int) -> int:
    """Return an exit code of subprocess as a shell does."""
    return code if code >= 0 else 128 - code


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_from_outside(root: Ending) -> bool:
    """Return whether something outside of the program ended or stopped it: it may do well again.

    An out-of-memory kill is the program's own; so are the signals of its own faults.
    """
    by_signal = is_signal_from_outside(root.code) and not root.sent
    return root.was_frozen or root.is_lost or (by_signal and not root.is_oom)


def is_signal_from_outside(code: int) -> bool:
    """Return whether a process ended by a signal that is not one of its own faults."""
    return -code in _FROM_OUTSIDE


def cause_of(root: Ending) -> str:
    """Return the exception of a failure and its place in the program, "" if unknown.

    Losses, late processes and jobs that could not be joined have their cause elsewhere.
    """
    if not (root.sent or root.code in _RAISED):
        return ""
    if root.record is None:  # its disk was full: what it has reported
        words = root.gone.words if root.gone is not None and root.gone.state == "failed" else ""
        kind, place = raised_at(words)
        return kind and f"{kind} at {os.path.basename(place)}"
    cause = root.record.cause
    if cause.kind == "exit" or cause.error is None or not cause.frames:
        return ""
    frame = cause.frames[-1]
    return f"{cause.error.type} at {os.path.basename(frame.file)}:{frame.line}"


def fails_by_itself(ending: Ending) -> bool:
    """Return whether its failure is its own: not of another process, nor by the launcher."""
    return _rank(ending) == _OWN


def dead_host_keeper(root: Ending, keepers: Iterable[KeeperNews]) -> KeeperNews | None:
    """Return the keeper whose death made JAX abort the root, or None."""
    if root.code != -signal.SIGABRT or root.sent:
        return None
    for keeper in keepers:
        died_first = keeper.gone_s is not None and keeper.gone_s <= (root.known_failed_s or 0.0)
        is_dead = keeper.code != 0 if keeper.code is not None else died_first
        if root.process in keeper.processes and is_dead:
            return keeper
    return None


def _failed(ending: Ending) -> bool:
    return bool(ending.code or ending.is_lost or ending.gone)


def _rank(ending: Ending) -> int:
    if ending.is_lost:
        return _OWN
    words = ending.gone.words if ending.gone is not None and ending.gone.state == "failed" else ""
    if ending.gone is not None and ending.gone.follows:
        return _TOLD if ending.sent or not ending.code else _CONSEQUENCE
    if ending.sent or not ending.code:
        return _OWN if words and ending.code and not is_of_runtime(words) else _TOLD
    # With initialize(hooks=False) Python ends it with 1, whatever the error.
    if ending.code == 1 and ending.record is not None:
        if ending.record.cause.exit_code in _CONSEQUENCE_CODES:
            return _CONSEQUENCE
    if ending.code in _CONSEQUENCE_CODES:
        return _OWN if words.startswith(f"exited with code {ending.code}") else _CONSEQUENCE
    return _OWN
