"""Settle a save after a loss of communication: the state of the storage decides, for all."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from shoal import settings
from shoal.checkpoint.disk import committing, step_folder
from shoal.checkpoint.disk.step_folder import missing_parts
from shoal.checkpoint.format.records import Commit
from shoal.checkpoint.saving.request import Request
from shoal.errors import (
    CheckpointError,
    DeadlineError,
    DivergenceError,
    SaveAbortedError,
    ShoalError,
    StorageError,
)
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.system.failure_words import listed

_LOG = logging.getLogger("shoal")
_LOOK_S = 0.05


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
    folder, problem = scene.request.folder, None
    if has_part:
        if not isinstance(cause, DeadlineError | DivergenceError):
            _wait_for_parts(scene, cause)
        try:
            if step_folder.is_complete(folder, scene.attempt):
                return committing.commit(folder, scene.attempt)
        except (CheckpointError, OSError) as error:
            problem = error
    commit = ended_by(scene, problem)
    if commit is None:
        raise aborted(scene, phase, cause) from cause
    return commit


def ended_by(scene: SaveScene, problem: Exception | None) -> Commit | None:
    """End the attempt because of this process's error; return the commit if already committed.

    Raises:
      StorageError: it is committed, and the error may concern its durability. It is neither ended
        nor retried: an fsync may succeed after one that failed.
    """
    doubt = problem if isinstance(problem, StorageError) else None
    if doubt is None or not committing.is_standing(scene.request.folder, scene.attempt):
        commit = try_abandon(scene)
        if doubt is None or commit is None:
            return commit
    raise committing.in_doubt(doubt) from doubt.__cause__


def _wait_for_parts(scene: SaveScene, cause: ShoalError) -> None:
    """Wait until the survivors have written their parts, as far as the storage shows.

    The part of a process that died after writing it counts; others may still be writing theirs.
    """
    coordinator, request, attempt, members = scene
    patience_s = min(request.waits.left_s, settings.seconds("SHOAL_LOST_AFTER_S"))
    limit = time.monotonic() + patience_s
    pause = threading.Event()  # never set
    while time.monotonic() < limit and step_folder.see(request.folder, attempt):
        try:
            places = missing_parts(request.folder, attempt, request.folder.names())
            missing = [members[place] for place in places]
        except (FileNotFoundError, CheckpointError):
            return
        if {*missing} <= {*_blamed(cause), *(one.process for one in coordinator.troubles.open())}:
            return
        pause.wait(_LOOK_S)


def try_abandon(scene: SaveScene) -> Commit | None:
    """End the attempt, if the storage permits; return the commit if it was committed already.

    Raises:
      StorageError: it is committed, but may not survive a crash.
    """
    try:
        return committing.abandon(scene.request.folder, scene.attempt)
    except (ShoalError, OSError) as error:
        if isinstance(error, StorageError):
            if committing.is_standing(scene.request.folder, scene.attempt):
                raise committing.in_doubt(error) from error.__cause__
        _LOG.warning("%s: attempt %s: %s", scene.request.operation, scene.attempt, error)
        return None


def aborted(scene: SaveScene, phase: str, cause: ShoalError) -> SaveAbortedError:
    """Return the SaveAbortedError error."""
    coordinator, request = scene.coordinator, scene.request
    me = ThisProcess(coordinator.process, coordinator.hosts)
    blamed = _blamed(cause)
    who = f" because of {listed(blamed)}" if blamed else ""
    return SaveAbortedError(
        f"{me}: {request.operation} was ended{who}: nothing of it is kept, and earlier saves "
        f"are unaffected\n{cause}",
        path=request.folder.path,
        phase=phase,
        processes=blamed,
        exit_code=cause.exit_code,
    )


def _blamed(cause: ShoalError) -> tuple[int, ...]:
    """Return the processes that caused an error."""
    for field in ("lost", "failed", "missing"):
        if found := getattr(cause, field, ()):
            return tuple(sorted(found))
    return ()
