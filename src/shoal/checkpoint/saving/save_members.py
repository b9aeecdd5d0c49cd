"""The processes of one save, their messages, and how it ends after a loss."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal import settings
from shoal.checkpoint.coordination.lead import decode_error, encode_error, failed_processes
from shoal.checkpoint.coordination.one_folder import different_folders
from shoal.checkpoint.format.records import Commit
from shoal.checkpoint.saving.request import Request
from shoal.checkpoint.store.interface import Store
from shoal.errors import (
    CheckpointError,
    DeadlineError,
    DivergenceError,
    NotSharedError,
    PeerFailedError,
    ProcessLostError,
    SaveAbortedError,
    ShoalError,
    StorageError,
    UsageError,
)
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.exception_text import peers_named
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.point import Fingerprint, Point

_SHOWN_HOSTS = 8


class Exchange:
    """What this process sends at the end of a phase, and then what all of them sent."""

    payload: bytes = b""
    answers: Mapping[int, bytes]


@dataclass(frozen=True)
class SaveMembers:
    """The processes of one save, as seen by one of them."""

    client: JobClient
    request: Request
    group: Group

    @property
    def process(self) -> int:
        """The number of this process."""
        return self.client.process

    @property
    def is_lead(self) -> bool:
        """Is this the process that begins and commits the attempt?"""
        return self.process == self.group.lead

    def agree(self, lines: tuple[str, ...], payload: bytes) -> Mapping[int, bytes]:
        """Exchange payloads with all processes, provided that their lines are equal.

        Raises:
          DivergenceError: the lines differ.
          SaveAbortedError: a process was lost, failed or late.
        """
        request = self.request
        call = Call("save", request.name, request.site, lines)
        try:
            return agree(
                self.client,
                call,
                payload,
                timeout_s=request.waits.left_s,
                group=self.group.named,
                lane=request.lane,
            )
        except (ProcessLostError, PeerFailedError, DeadlineError) as error:
            raise self.aborted("agree", error) from error

    @contextlib.contextmanager
    def agreement(self, lines: tuple[str, ...]) -> Iterator[Exchange]:
        """Run the block on each process, then `agree`; if it raised on one, raise on all.

        Raises:
          The error of the lowest failed process, and what `agree` raises.
        """
        exchange = Exchange()
        problem: Exception | None = None
        try:
            yield exchange
        except (CheckpointError, UsageError) as error:  # any other ends the call on the others
            problem, exchange.payload = error, encode_error(error)
        exchange.answers = self.agree(lines, exchange.payload)
        self.raise_failure("agree", exchange.answers, problem)

    def raise_failure(
        self, phase: str, answers: Mapping[int, bytes], problem: Exception | None
    ) -> None:
        """Raise, on all alike, the error of the lowest failed process.

        Args:
          problem: this process's error.
        """
        who = failed_processes(answers)
        if not who:
            return
        me = ThisProcess(self.process, self.client.hosts)
        error = decode_error(answers[who[0]], who[0], me)
        if problem is not None and who[0] == self.process:
            if len(answers) == 1 or isinstance(error, PeerFailedError):
                raise problem
        if isinstance(error, PeerFailedError):
            raise self.aborted(phase, error) from error
        raise error from problem

    def aborted(
        self, phase: str, cause: ShoalError, doubt: Exception | None = None
    ) -> SaveAbortedError:
        """Return the SaveAbortedError; `doubt`: why the attempt is not known to have ended."""
        client, request = self.client, self.request
        me = ThisProcess(client.process, client.hosts)
        blamed = _blamed(cause)
        who = ": "
        if blamed:
            who = f" because of {listed(blamed)}: "
        if phase == "agree":
            absent = _absent(cause, me.process)
            if absent:
                every = "every process" if self.group.is_all else "each of processes="
                who = f" because {listed(absent)} did not call it: {every} must call save\n"
        kept = "nothing of it is kept"
        if doubt is not None:
            kept = f"whether it was committed is not known, since the storage fails ({doubt})"
        return SaveAbortedError(
            f"{me}: {request.operation} was ended{who}{kept}, and earlier "
            f"saves are unaffected\n{cause}",
            path=request.store.path,
            phase=phase,
            processes=blamed,
            exit_code=cause.exit_code,
        )


def _absent(cause: ShoalError, me: int) -> tuple[int, ...]:
    """Return the processes that are late for the first synchronization, or have left the job."""
    if isinstance(cause, DeadlineError) and me not in cause.missing:
        return tuple(sorted(cause.missing))
    if not isinstance(cause, PeerFailedError):
        return ()
    peers = peers_named(cause) or {}
    return tuple(sorted(who for who, departure in peers.items() if departure.is_in_order))


def _blamed(cause: ShoalError) -> tuple[int, ...]:
    """Return the processes that caused an error."""
    for name in ("lost", "failed", "missing"):
        processes = getattr(cause, name, ())
        if processes:
            return tuple(sorted(processes))
    return ()


class MeetingFailed(Exception):
    """The rendezvous at the end of a phase failed. `problem`: what this process met with before."""

    def __init__(self, phase: str, cause: ShoalError, problem: Exception | None) -> None:
        super().__init__(str(cause))
        self.phase = phase
        self.cause = cause
        self.problem = problem


@dataclass(frozen=True)
class SaveAttempt:
    """The attempt that the processes of a save have agreed on."""

    members: SaveMembers
    id: str  # 12 hex digits, chosen by the lead
    replaces: str  # the committed attempt that this one replaces, if any
    paths: Mapping[int, str]  # the directory's path on each process
    lane: str  # of the phases after the agreement

    @property
    def store(self) -> Store:
        """Where it is saved."""
        return self.members.request.store

    @contextlib.contextmanager
    def phase(self, phase: str, point: str) -> Iterator[Exchange]:
        """Run the block on each process, then synchronize; if it raised on one, raise on all.

        Raises:
          MeetingFailed: the rendezvous failed. Otherwise the error of the lowest failed process.
        """
        members, exchange = self.members, Exchange()
        problem: Exception | None = None
        try:
            yield exchange
        except Exception as error:  # noqa: BLE001 - raised below, on all
            problem, exchange.payload = error, encode_error(error)
        # Reports show the user's call; its part is compared, and not shown.
        part = Fingerprint(site="", digest="", text=f"{self.id} {point}")
        rendezvous = Point(
            name="save",
            group=members.group.named,
            lane=self.lane,
            operation="save",
            site=members.request.site,
            fingerprint=part,
        )
        try:
            exchange.answers = members.client.arrive(
                rendezvous, exchange.payload, timeout_s=members.request.waits.left_s
            )
        except ShoalError as error:
            raise MeetingFailed(phase, error, problem) from problem
        if failed_processes(exchange.answers) and members.is_lead and phase != "commit":
            try_abandon(self)
        try:
            members.raise_failure(phase, exchange.answers, problem)
        except NotSharedError:
            if len({*self.paths.values()}) > 1:
                raise different_folders(
                    members.client, members.request.operation, self.paths
                ) from problem
            raise self.not_shared(failed_processes(exchange.answers)) from problem

    def not_shared(self, who: Sequence[int]) -> NotSharedError:
        """Return the error that names the processes that do not see the lead's files."""
        path, hosts, lead = self.store.path, self.members.client.hosts, self.members.group.lead
        on = ", ".join(sorted({hosts[process] for process in who})[:_SHOWN_HOSTS])
        return NotSharedError(
            f"{path}: what process {lead} ({hosts[lead]}) wrote there is not seen by "
            f"{listed(who)} ({on})\n"
            "save to a path that all processes share",
            path=path,
            processes=who,
        )


# ---- Settle a save after a loss of communication: the state of the storage decides, for all.


_LOG = logging.getLogger("shoal")


def settle(attempt: SaveAttempt, failed: MeetingFailed, *, has_part: bool) -> Commit:
    """Commit the attempt if all parts are there, else end it; all processes may call it at once.

    Args:
      has_part: this process's part exists. If not, it never will.

    Raises:
      SaveAbortedError: it was not committed, and can no longer be.
      StorageError: it is committed, but may not survive a crash.
    """
    store, cause, problem = attempt.store, failed.cause, failed.problem
    if has_part and not isinstance(problem, StorageError):  # an fsync that failed is not repeated
        if not isinstance(cause, DeadlineError | DivergenceError):
            _wait_for_parts(attempt, cause)
        try:
            if not store.missing_parts(attempt.id):
                return store.commit(attempt.id, attempt.replaces)
        except (CheckpointError, OSError) as error:
            problem = error
    end = ended_by(attempt, problem)
    if end.commit is None:
        raise attempt.members.aborted(failed.phase, cause, doubt=end.doubt) from cause
    return end.commit


class End(NamedTuple):
    """How an attempt ended."""

    commit: Commit | None
    doubt: Exception | None = None  # why it is not known to have ended


def ended_by(attempt: SaveAttempt, problem: Exception | None) -> End:
    """End the attempt because of this process's error, unless it is committed already.

    Raises:
      StorageError: it is committed, and the error may concern its durability. It is neither ended
        nor retried: an fsync may succeed after one that failed.
    """
    if not isinstance(problem, StorageError):
        return try_abandon(attempt)
    if not attempt.store.is_standing(attempt.id):
        end = try_abandon(attempt)
        if end.commit is None:
            return end
    return End(attempt.store.commit_despite(problem, attempt.id))


def _wait_for_parts(attempt: SaveAttempt, cause: ShoalError) -> None:
    """Wait until the survivors have written their parts, as far as the storage shows.

    The part of a process that died after writing it counts; others may still be writing theirs.
    """
    store, members = attempt.store, attempt.members
    patience_s = min(members.request.waits.left_s, settings.seconds("SHOAL_LOST_AFTER_S"))
    limit = time.monotonic() + patience_s
    pause = threading.Event()  # never set
    while time.monotonic() < limit:
        try:
            if not store.is_open(attempt.id):
                return
            missing = [members.group.members[place] for place in store.missing_parts(attempt.id)]
        except (CheckpointError, OSError):
            return  # what fails here fails where the parts are counted
        lost = (loss.process for loss in members.client.peer_losses.open())
        if {*missing} <= {*_blamed(cause), *lost}:
            return
        pause.wait(store.pace.look_s * (1 + random.random()))


def try_abandon(attempt: SaveAttempt) -> End:
    """End the attempt, if the storage permits, unless it was committed already.

    Raises:
      StorageError: it is committed, but may not survive a crash.
    """
    try:
        return End(attempt.store.abandon(attempt.id))
    except (ShoalError, OSError) as error:
        if isinstance(error, StorageError):
            if attempt.store.is_standing(attempt.id):
                return End(attempt.store.commit_despite(error, attempt.id))
        _LOG.warning("%s: attempt %s: %s", attempt.members.request.operation, attempt.id, error)
        return End(None, error)
