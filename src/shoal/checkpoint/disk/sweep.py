"""Recover, collect and delete in the directory of a step. See `disk`."""

from __future__ import annotations

import contextlib
import logging

from shoal.checkpoint.disk.committing import (
    abandon,
    commit,
    give_back,
    is_standing,
    left_over,
    remove_attempt,
    rename_back,
    tidy,
)
from shoal.checkpoint.disk.step_folder import (
    committed,
    folder_state,
    listing,
    read_commit,
    standing_commit,
)
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format.records import Commit, index_name
from shoal.checkpoint.store.step_names import (
    COMMIT,
    KEEP,
    new_attempt,
    pending_name,
    tombstone_name,
)
from shoal.errors import (
    CorruptCheckpointError,
    SaveAbortedError,
    StepAlreadyCommittedError,
    UnsupportedCheckpointError,
)
from shoal.runtime.system import fault_points

_LOG = logging.getLogger("shoal")


def recover_step(folder: Folder) -> Commit | None:
    """Commit a complete attempt of a step that has no COMMIT; finish deletions and tidying.

    One that replaces what is committed is committed, too, unless its committer died just before
    that: what it replaces is then no longer known, and stays. Of several complete attempts the one
    touched last is committed.

    Returns the resulting commit, None if there is none.

    Raises:
      CorruptCheckpointError: as `committed`; nothing is changed then.
    """
    _finish_deletions(folder)
    done = committed(folder)
    if done and left_over(folder, done):  # its linker may have died before it was durable
        folder.sync()
        tidy(folder, done)
    if done and listing(folder).attempts.keys() == {done.attempt}:
        return done
    attempts = [
        attempt
        for attempt in folder_state(folder).attempts
        if attempt.is_live and attempt.is_complete
        and (done is None or attempt.owner.get("replaces") == done.attempt)
    ]  # fmt: skip
    for attempt in sorted(attempts, key=lambda attempt: (attempt.is_ahead, attempt.idle_s)):
        # One that cannot be committed is left to `collect_garbage`; the next may succeed.
        with contextlib.suppress(
            SaveAbortedError, CorruptCheckpointError, UnsupportedCheckpointError
        ):
            try:
                return commit(folder, attempt.id, attempt.owner.get("replaces", ""))
            except StepAlreadyCommittedError:
                break
    return committed(folder)


def collect_garbage(folder: Folder, *, idle_s: float) -> list[str]:
    """End attempts that were not touched for `idle_s`, and remove orphaned files.

    Spares committed files, live attempts, and names that are not of a checkpoint. A complete
    attempt is recovered rather than ended. A directory that was already empty is removed only if
    `idle_s` is 0: another process may be about to begin in it. Returns the names removed.

    An attempt with a time in the future has an unknown age: it is counted from now on.
    """
    recover_step(folder)
    removed: list[str] = []
    for attempt in folder_state(folder).attempts:
        if attempt.is_ahead and idle_s:
            _LOG.warning(
                "%s: attempt %s: its time is %.0f s in the future; it is set to now",
                folder.path, attempt.id, attempt.ahead_s,
            )  # fmt: skip
            with contextlib.suppress(FileNotFoundError):  # committed or ended concurrently
                folder.touch(pending_name(attempt.id))
            continue
        # Without PENDING it has been idle for ever.
        if attempt.idle_s >= idle_s and abandon(folder, attempt.id) is None:
            removed += attempt.names
    if removed or not idle_s:
        folder.remove_folder()
    return removed


def delete_committed(folder: Folder, attempt: str) -> bool:
    """Delete a committed step: rename COMMIT to DELETING-<attempt>, remove its files, then that.

    A crash in between leaves the step deleted; `recover_step` and `collect_garbage` finish the
    job. Deleting a step that is gone, or that by now belongs to another attempt, does nothing. If
    the step is a link, only the link is removed.

    Returns False if the step is pinned, perhaps concurrently: it stays. `pin` writes KEEP before it
    looks for COMMIT, and here it is the other way round, so at least one of the two sees the other.
    """
    if folder.is_link():
        folder.remove_link()
        return True
    standing = standing_commit(folder)
    if standing and standing.file == COMMIT and standing.commit.attempt == attempt:
        if KEEP in folder.names():
            return False
        # Without COMMIT, a PENDING left behind by a crash could be committed again.
        folder.remove(pending_name(attempt))
        with contextlib.suppress(FileNotFoundError):  # deleted concurrently
            folder.rename(COMMIT, tombstone_name(attempt))
            if KEEP in folder.names():
                rename_back(folder, tombstone_name(attempt))
                return not is_standing(folder, attempt)
    _finish_deletions(folder)
    return True


def delete_damaged(folder: Folder) -> bool:
    """Delete a step whose COMMIT may be missing or say anything; as safe as `delete_committed`.

    Attempts that other processes are writing are spared. Returns as `delete_committed`.
    """
    if folder.is_link():
        folder.remove_link()
        return True
    try:
        standing = standing_commit(folder)
    except CorruptCheckpointError:
        _delete_unreadable(folder)
        return True
    return delete_committed(folder, standing.commit.attempt) if standing else True


def _delete_unreadable(folder: Folder) -> None:
    owned = listing(folder).attempts
    # A committed attempt has an index; one with PENDING and no index may still be written.
    gone = [
        attempt
        for attempt, names in owned.items()
        if index_name(attempt) in names or pending_name(attempt) not in names
    ]
    for attempt in gone:
        folder.remove(pending_name(attempt))
    with contextlib.suppress(FileNotFoundError):  # deleted concurrently
        folder.rename(COMMIT, tombstone_name(gone[0] if gone else new_attempt()))
    _finish_deletions(folder)
    for attempt in gone[1:]:
        remove_attempt(folder, attempt)


def _finish_deletions(folder: Folder) -> None:
    give_back(folder)
    tombstones = listing(folder).tombstones
    for attempt in tombstones:
        _finish_deletion(folder, attempt)
    if tombstones:
        if folder.names() == [KEEP]:  # the pin of a deleted step
            folder.remove(KEEP)
        folder.remove_folder()


def _finish_deletion(folder: Folder, attempt: str) -> None:
    name = tombstone_name(attempt)
    folder.remove(pending_name(attempt))
    # COMMIT and PENDING are durably gone before anything else is removed.
    folder.sync()
    with contextlib.suppress(CorruptCheckpointError):  # damaged since; its name says whose it is
        marked = read_commit(folder, name)
        if marked is None or marked.attempt != attempt:
            return  # finished by another process, or about to be renamed back
    standing = standing_commit(folder)
    # COMMIT takes precedence over any tombstone.
    if standing is None or standing.commit.attempt != attempt:
        fault_points.reach("delete.marked", None)
        _remove_files(folder, attempt)
    folder.remove(name)


def _remove_files(folder: Folder, attempt: str) -> None:
    for index, file in enumerate(listing(folder).attempts.get(attempt, ())):
        folder.remove(file)
        if index == 0:
            fault_points.reach("delete.half", None)
