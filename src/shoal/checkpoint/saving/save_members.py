"""The processes of one save, their messages, and how it ends after a loss."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal import settings
from shoal.checkpoint.format.records import Commit
from shoal.checkpoint.saving.request import Request
from shoal.checkpoint.together.lead import decode_error, encode_error, failed_processes
from shoal.checkpoint.together.one_folder import different_folders
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
)
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.rules.point import Point
from shoal.runtime.system.failure_words import listed, peers_named

_SHOWN_HOSTS = 8


@dataclass(frozen=True)
class SaveMembers:
    """The processes of one save, as seen by one of them."""

    coordinator: Coordinator
    request: Request
    group: Group
    attempt: str  # once agreed, the lead's
    # The folder's path on each process; known once agreed.
    paths: Mapping[int, str] = field(default_factory=dict)
    lane: str = "main"

    @property
    def scene(self) -> SaveScene:
        """The attempt, for settling it."""
        return SaveScene(self.coordinator, self.request, self.attempt, self.group.members)

    @property
    def process(self) -> int:
        """The number of this process."""
        return self.coordinator.process

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
                self.coordinator,
                call,
                payload,
                timeout_s=request.waits.left_s,
                group=self.group.named,
                lane=self.lane,
            )
        except (ProcessLostError, PeerFailedError, DeadlineError) as error:
            raise aborted(self.scene, "agree", error) from error

    def meet(self, phase: str, name: str, brought: bytes | Exception | None) -> Mapping[int, bytes]:
        """Exchange payloads with all processes; raise, on all, the error of any that failed.

        Raises:
          MeetingFailed: the rendezvous failed.
        """
        problem = brought if isinstance(brought, Exception) else None
        payload = encode_error(brought) if isinstance(brought, Exception) else brought or b""
        # Reports show the user's call; its part is compared, and not shown.
        mark, group = f"save: {self.attempt} {name}", self.group.named
        point = Point("save", group, self.lane, mark, self.request.site)
        try:
            answers = self.coordinator.arrive(point, payload, timeout_s=self.request.waits.left_s)
        except ShoalError as error:
            raise MeetingFailed(error) from problem
        if failed_processes(answers) and self.is_lead and phase != "commit":
            try_abandon(self.scene)
        self.raise_failure(phase, answers, problem)
        return answers

    def raise_failure(
        self, phase: str, answers: Mapping[int, bytes], problem: Exception | None
    ) -> None:
        """Raise, on all alike, the error of the lowest failed process."""
        who = failed_processes(answers)
        if not who:
            return
        me = ThisProcess(self.process, self.coordinator.hosts)
        error = decode_error(answers[who[0]], who[0], me)
        if isinstance(error, NotSharedError):
            is_one = len({*self.paths.values()}) == 1
            paths = (self.coordinator, self.request.operation, self.paths)
            error = self.not_shared(who) if is_one else different_folders(*paths)
        if problem is not None and who[0] == self.process:
            if len(answers) == 1 or isinstance(error, PeerFailedError):
                raise problem
        if isinstance(error, PeerFailedError):
            raise aborted(self.scene, phase, error) from error
        raise error from problem

    def not_shared(self, who: Sequence[int]) -> NotSharedError:
        """Return the error that names the processes that do not see the lead's files."""
        path, hosts, lead = self.request.store.path, self.coordinator.hosts, self.group.lead
        on = ", ".join(sorted({hosts[process] for process in who})[:_SHOWN_HOSTS])
        return NotSharedError(
            f"{path}: what process {lead} ({hosts[lead]}) wrote there is not seen by "
            f"{listed(who)} ({on})\n"
            "save to a path that all processes share",
            path=path,
            processes=who,
        )


class MeetingFailed(Exception):
    """A rendezvous failed."""

    def __init__(self, cause: ShoalError) -> None:
        super().__init__(str(cause))
        self.cause = cause


# ---- Settle a save after a loss of communication: the state of the storage decides, for all.


_LOG = logging.getLogger("shoal")


class SaveScene(NamedTuple):
    """The attempt to settle."""

    coordinator: Coordinator
    request: Request
    attempt: str
    members: tuple[int, ...]  # the processes that save; files number them by index here


def settle(scene: SaveScene, phase: str, cause: ShoalError, *, has_part: bool) -> Commit:
    """Commit the attempt if all parts are there, else end it; all processes may call it at once.

    Args:
      has_part: this process's part exists. If not, it never will.

    Raises:
      SaveAbortedError: it was not committed, and can no longer be.
      StorageError: it is committed, but may not survive a crash.
    """
    store, problem = scene.request.store, None
    if has_part:
        if not isinstance(cause, DeadlineError | DivergenceError):
            _wait_for_parts(scene, cause)
        try:
            if not store.missing_parts(scene.attempt):
                return store.commit(scene.attempt, scene.request.replaces)
        except (CheckpointError, OSError) as error:
            problem = error
    end = ended_by(scene, problem)
    if end.commit is None:
        raise aborted(scene, phase, cause, doubt=end.doubt) from cause
    return end.commit


class End(NamedTuple):
    """How an attempt ended."""

    commit: Commit | None
    doubt: Exception | None = None  # why it is not known to have ended


def ended_by(scene: SaveScene, problem: Exception | None) -> End:
    """End the attempt because of this process's error, unless it is committed already.

    Raises:
      StorageError: it is committed, and the error may concern its durability. It is neither ended
        nor retried: an fsync may succeed after one that failed.
    """
    store, attempt = scene.request.store, scene.attempt
    doubt = problem if isinstance(problem, StorageError) else None
    if doubt is None or not store.is_standing(attempt):
        end = try_abandon(scene)
        if doubt is None or end.commit is None:
            return end
    return End(store.commit_despite(doubt, attempt))


def _wait_for_parts(scene: SaveScene, cause: ShoalError) -> None:
    """Wait until the survivors have written their parts, as far as the storage shows.

    The part of a process that died after writing it counts; others may still be writing theirs.
    """
    coordinator, request, attempt, members = scene
    patience_s = min(request.waits.left_s, settings.seconds("SHOAL_LOST_AFTER_S"))
    limit = time.monotonic() + patience_s
    pause = threading.Event()  # never set
    while time.monotonic() < limit:
        try:
            if not request.store.is_open(attempt):
                return
            missing = [members[place] for place in request.store.missing_parts(attempt)]
        except (CheckpointError, OSError):
            return  # what fails here fails where the parts are counted
        if {*missing} <= {*_blamed(cause), *(one.process for one in coordinator.troubles.open())}:
            return
        pause.wait(request.store.pace.look_s * (1 + random.random()))


def try_abandon(scene: SaveScene) -> End:
    """End the attempt, if the storage permits, unless it was committed already.

    Raises:
      StorageError: it is committed, but may not survive a crash.
    """
    try:
        return End(scene.request.store.abandon(scene.attempt))
    except (ShoalError, OSError) as error:
        if isinstance(error, StorageError):
            if scene.request.store.is_standing(scene.attempt):
                return End(scene.request.store.commit_despite(error, scene.attempt))
        _LOG.warning("%s: attempt %s: %s", scene.request.operation, scene.attempt, error)
        return End(None, error)


def aborted(
    scene: SaveScene, phase: str, cause: ShoalError, doubt: Exception | None = None
) -> SaveAbortedError:
    """Return the SaveAbortedError error; `doubt`: why the attempt is not known to have ended."""
    coordinator, request = scene.coordinator, scene.request
    me = ThisProcess(coordinator.process, coordinator.hosts)
    blamed = _blamed(cause)
    who = f" because of {listed(blamed)}: " if blamed else ": "
    if phase == "agree" and (absent := _absent(cause, me.process)):
        is_all = len(scene.members) == coordinator.num_processes
        every = "every process" if is_all else "each of processes="
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
    peers = (peers_named(cause) or {}) if isinstance(cause, PeerFailedError) else {}
    return tuple(sorted(who for who, departure in peers.items() if departure.is_in_order))


def _blamed(cause: ShoalError) -> tuple[int, ...]:
    """Return the processes that caused an error."""
    for name in ("lost", "failed", "missing"):
        if found := getattr(cause, name, ()):
            return tuple(sorted(found))
    return ()
