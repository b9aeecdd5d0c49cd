"""Begin, commit or abandon an attempt. See `disk`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from shoal.checkpoint.disk.step_folder import (
    listing,
    missing_parts,
    read_commit,
    see,
    standing_commit,
)
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format.json_files import encode_commit, encode_manifest
from shoal.checkpoint.format.records import (
    Commit,
    Manifest,
    Part,
    index_name,
    manifest_name,
    part_name,
)
from shoal.checkpoint.format.table_files import encode_index, encode_part
from shoal.checkpoint.store.assemble import assemble, blob_record, commit_of
from shoal.checkpoint.store.interface import already_committed, ended_error, incomplete_error
from shoal.checkpoint.store.step_names import (
    COMMIT,
    KEEP,
    new_attempt,
    pending_name,
    temporary_name,
    tombstone_name,
)
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    SaveAbortedError,
    ShoalError,
    StorageError,
)
from shoal.runtime.system import fault_points

_DOUBT = "\nit is committed, but a crash of this host may undo that"
_TRIES = 100  # to begin in a folder that other processes remove concurrently


def begin_attempt(folder: Folder, manifest: Manifest, owner: Mapping[str, Any]) -> None:
    """Create the directory, PENDING and the manifest, durably.

    Raises:
      StepAlreadyCommittedError: there is a COMMIT of an attempt that this one does not replace.
      SaveAbortedError: another process ended the attempt at once.
    """
    attempt = manifest.attempt
    standing, replaced = standing_commit(folder), owner.get("replaces", "")
    if standing and standing.commit.attempt not in (attempt, replaced):
        raise already_committed(folder.path, standing.commit, replaced)
    try:
        _write_pending(folder, attempt, json.dumps(dict(owner), sort_keys=True).encode())
        # From here on the folder is not empty and stays. It may not be the one made above, and
        # the process that made this one may not have reached the fsync of its parent.
        folder.make()
        _write_whole(folder, manifest_name(attempt), attempt, encode_manifest(manifest))
        folder.sync()
    except BaseException as error:
        with contextlib.suppress(ShoalError, OSError):
            abandon(folder, attempt)
        if isinstance(error, FileNotFoundError):
            raise ended_error(folder.path, attempt, "begin") from error
        raise


def _write_pending(folder: Folder, attempt: str, content: bytes) -> None:
    """Create PENDING by a link: a lack of hard links is then found before any data is written."""
    for left in reversed(range(_TRIES)):
        folder.make()
        temporary = temporary_name(new_attempt())  # PENDING is the first file of its own attempt
        try:
            folder.write_new(temporary, content)
            with contextlib.suppress(FileExistsError):  # already begun
                folder.link(temporary, pending_name(attempt))
            return
        except FileNotFoundError:  # the empty folder, or this file, was removed by another process
            if not left:
                raise
        finally:
            folder.remove(temporary)


def _write_whole(folder: Folder, name: str, attempt: str, data: bytes) -> None:
    """Write a file atomically: it is complete whenever it has its name."""
    temporary = temporary_name(attempt)
    folder.write_new(temporary, data)
    folder.rename(temporary, name)


def write_part(folder: Folder, part: Part) -> None:
    """Write a part under a temporary name, durably, then rename it.

    Raises:
      SaveAbortedError: another process ended the attempt and removed the directory.
    """
    try:
        name = part_name(part.attempt, part.process)
        _write_whole(folder, name, part.attempt, encode_part(part))
    except FileNotFoundError as error:
        raise ended_error(folder.path, part.attempt, "part") from error
    folder.sync()  # also makes the names of the data files durable


def commit(folder: Folder, attempt: str, replaced: str = "") -> Commit:
    """Check that the parts tile every leaf, write the index, and commit; tidy afterwards.

    If the attempt is committed already, it is made durable, tidied and returned.

    Args:
      replaced: the committed attempt that this one replaces, unless it is pinned.

    Raises:
      StepAlreadyCommittedError: another attempt is committed.
      SaveAbortedError: another process ended the attempt (its PENDING is gone), or parts are
        missing.
      CorruptCheckpointError: the parts contradict the manifest or the files.
      StorageError: the file system failed. If COMMIT is there, it may not survive a crash: after
        a failed fsync, a second one that succeeds proves nothing.
    """
    fault_points.reach("save.assemble", None)
    give_back(folder)
    done = _settled(folder, attempt, replaced)
    if done:
        return done
    try:
        _link(folder, attempt, replaced)
    except (FileNotFoundError, FileExistsError, CorruptCheckpointError, StorageError) as error:
        # Other processes may commit, tidy or end it concurrently; the current state counts.
        is_open = see(folder, attempt)  # read before COMMIT, which appears before PENDING goes
        if isinstance(error, StorageError):  # a second fsync would prove nothing
            if is_standing(folder, attempt):
                raise in_doubt(error) from error.__cause__
            if is_open:
                raise
        done = _settled(folder, attempt, replaced)
        if done:
            return done
        if not is_open:
            remove_attempt(folder, attempt)  # including files written after its end
            raise ended_error(folder.path, attempt, "commit") from error
        if isinstance(error, CheckpointError):
            raise
        raise _incomplete(folder, attempt) from error
    done = _settled(folder, attempt, replaced)
    if done is None:  # deleted as soon as it was committed
        raise ended_error(folder.path, attempt, "commit")
    return done


def _link(folder: Folder, attempt: str, replaced: str = "") -> None:
    """Write the index and COMMIT's contents, and link it; or rename it, in place of `replaced`."""
    manifest, manifest_blob, index = assemble(folder, attempt)
    name = index_name(attempt)
    data = encode_index(index)
    _write_index(folder, name, attempt, data)
    # Everything COMMIT vouches for, names included, is durable before COMMIT is.
    folder.sync()
    fault_points.reach("save.indexed", None)
    content = commit_of(manifest, manifest_blob, index, blob_record(name, data))
    folder.rewrite(pending_name(attempt), encode_commit(content))
    fault_points.reach("save.link", None)
    # COMMIT is a link to PENDING, and `abandon` removes PENDING first: whichever comes first wins,
    # so that an attempt is never both committed and given up. Of two attempts one link succeeds.
    # A rename takes PENDING away, so the same holds; and there is a COMMIT at every moment.
    standing = standing_commit(folder) if replaced else None
    if standing and standing.commit.attempt == replaced:
        # A PENDING left behind by a crash could be committed again, once this attempt is deleted.
        folder.remove(pending_name(replaced))
        folder.rename(pending_name(attempt), COMMIT)
    else:
        folder.link(pending_name(attempt), COMMIT)


def _write_index(folder: Folder, name: str, attempt: str, data: bytes) -> None:
    temporary = temporary_name(attempt)
    folder.write_new(temporary, data)
    try:
        folder.link(temporary, name)
    except FileExistsError:  # another process commits the same, or died at this point
        if folder.read(name) != data:
            raise CorruptCheckpointError(
                f"{folder.path}: {name} contradicts the parts",
                path=folder.path,
                file=name,
            ) from None
    folder.remove(temporary)


def _settled(folder: Folder, attempt: str, replaced: str = "") -> Commit | None:
    """Return this attempt's commit, durable and tidied; None if it can still be committed.

    That is, if there is no COMMIT at all, or that of the attempt to be replaced, not pinned.
    """
    standing = standing_commit(folder)
    if standing is None:
        return None
    if standing.commit.attempt != attempt:
        if standing.commit.attempt == replaced and KEEP not in folder.names():
            return None
        raise already_committed(folder.path, standing.commit, replaced)
    try:
        folder.sync()  # the process that linked it may have died before this
    except StorageError as error:  # PENDING stays: if a crash loses COMMIT, it is committed again
        raise in_doubt(error) from error.__cause__
    with contextlib.suppress(CheckpointError, OSError):  # it is saved; a later call tidies
        fault_points.reach("save.committed", None)
        tidy(folder, standing.commit)
        if replaced:
            # Only now that the new COMMIT is durable. A deletion may have renamed the old one just
            # before it was replaced: under that name it would count once the new one is deleted.
            give_back(folder)
            remove_attempt(folder, replaced)
        fault_points.reach("save.tidied", None)
    return standing.commit


def is_standing(folder: Folder, attempt: str) -> bool:
    """Is this attempt the committed one? False also where COMMIT cannot be read."""
    with contextlib.suppress(CheckpointError, OSError):
        standing = standing_commit(folder)
        return standing is not None and standing.commit.attempt == attempt
    return False


def in_doubt(error: StorageError) -> StorageError:
    """Add to a failed fsync's error that COMMIT exists nevertheless."""
    if _DOUBT not in str(error):
        error.args = (f"{error}{_DOUBT}",)
    return error


def _incomplete(folder: Folder, attempt: str) -> SaveAbortedError:
    """Return the error that names what is missing."""
    missing = None
    with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
        missing = missing_parts(folder, attempt, listing(folder).attempts.get(attempt, ()))
    return incomplete_error(folder.path, attempt, missing)


def give_back(folder: Folder) -> None:
    """Rename COMMIT back if it was renamed to delete an attempt that it does not name."""
    for attempt in listing(folder).tombstones:
        name = tombstone_name(attempt)
        with contextlib.suppress(CorruptCheckpointError):
            content = read_commit(folder, name)
            if content and content.attempt != attempt:
                rename_back(folder, name)


def rename_back(folder: Folder, tombstone: str) -> None:
    """Undo the renaming of COMMIT, which takes precedence over its tombstone at once."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # others do the same
        folder.link(tombstone, COMMIT)
    folder.sync()
    folder.remove(tombstone)


def tidy(folder: Folder, commit: Commit) -> None:
    """Remove the files that a committed attempt no longer needs; COMMIT is durable."""
    for name in left_over(folder, commit):
        folder.remove(name)


def left_over(folder: Folder, commit: Commit) -> list[str]:
    """Return the files that a committed attempt no longer needs."""
    keep = (commit.manifest.name, commit.index.name)
    names = listing(folder).attempts.get(commit.attempt, ())
    return [name for name in names if name not in keep and not name.startswith("data-")]


def abandon(folder: Folder, attempt: str) -> Commit | None:
    """End an attempt: remove PENDING first, so that it can no longer be committed, then its files.

    Returns the contents of COMMIT if the attempt was committed concurrently, and then removes only
    leftover files. Otherwise None.
    """
    folder.remove(pending_name(attempt))
    # A process on another host must not see PENDING again once files of the attempt are gone.
    folder.sync()
    standing = standing_commit(folder)
    if standing and standing.commit.attempt == attempt:
        return _settled(folder, attempt)
    remove_attempt(folder, attempt)
    return None


def remove_attempt(folder: Folder, attempt: str) -> None:
    """Remove the files of a dead attempt, and the directory if it is then empty."""
    for name in listing(folder).attempts.get(attempt, ()):
        folder.remove(name)
    folder.remove_folder()
