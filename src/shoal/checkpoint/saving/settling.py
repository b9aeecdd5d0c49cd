"""How a save ends when the others can be asked no more: what lies in storage decides, for all."""

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
    SaveAborted,
    ShoalError,
    StorageError,
)
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.outcomes import ThisProcess, listed

_LOG = logging.getLogger("shoal")
_LOOK_S = 0.05


class SaveScene(NamedTuple):
    """Which attempt of which save this is about."""

    coordinator: Coordinator
    request: Request
    attempt: str
    members: tuple[int, ...]  # the processes that save; files count them by their places


def settle(scene: SaveScene, phase: str, cause: ShoalError, *, has_part: bool) -> Commit:
    """Commit the attempt if all parts are there, else end it; every process may do so at once.

    Args:
      has_part: this process's own part is there. If not, it never will be.

    Raises:
      SaveAborted: it was not committed, and cannot be any more.
      StorageError: it is committed, but that may not survive a crash.
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
    """End the attempt for what this process met with; return the commit if it was one already.

    Raises:
      StorageError: it is committed, and what failed here may be what should have kept it. It is
        neither ended then nor looked at again: an fsync succeeds after one that failed.
    """
    doubt = problem if isinstance(problem, StorageError) else None
    if doubt is None or not committing.is_standing(scene.request.folder, scene.attempt):
        commit = abandon(scene)
        if doubt is None or commit is None:
            return commit
    raise committing.in_doubt(doubt) from doubt.__cause__


def _wait_for_parts(scene: SaveScene, cause: ShoalError) -> None:
    """Wait until those who live have written what they have, as far as the storage shows.

    Who died after its part takes nothing away, and others may still be writing theirs.
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


def abandon(scene: SaveScene) -> Commit | None:
    """End the attempt, if the storage lets us; return the commit if it was one already.

    Raises:
      StorageError: it is committed, but that may not survive a crash.
    """
    try:
        return committing.abandon(scene.request.folder, scene.attempt)
    except (ShoalError, OSError) as error:
        if isinstance(error, StorageError):
            if committing.is_standing(scene.request.folder, scene.attempt):
                raise committing.in_doubt(error) from error.__cause__
        _LOG.warning("%s: attempt %s: %s", scene.request.asked, scene.attempt, error)
        return None


def aborted(scene: SaveScene, phase: str, cause: ShoalError) -> SaveAborted:
    """Return the error that says so."""
    coordinator, request = scene.coordinator, scene.request
    me = ThisProcess(coordinator.process, coordinator.hosts)
    blamed = _blamed(cause)
    who = f" on account of {listed(blamed)}" if blamed else ""
    return SaveAborted(
        f"{me}: {request.asked} was ended{who}: nothing of it is kept, and what was saved before "
        f"stands\n{cause}",
        path=request.folder.path,
        phase=phase,
        processes=blamed,
        exit_code=cause.exit_code,
    )


def _blamed(cause: ShoalError) -> tuple[int, ...]:
    """Return on whose account an error was raised."""
    for field in ("lost", "failed", "missing"):
        if found := getattr(cause, field, ()):
            return tuple(sorted(found))
    return ()
