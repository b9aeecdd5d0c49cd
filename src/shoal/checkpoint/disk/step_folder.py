"""The directory of one step: file names, the attempts they belong to, and what is committed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.checkpoint.disk.os_errors import absent
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format.json_files import decode_commit, decode_manifest
from shoal.checkpoint.format.records import COMMIT_BYTES, Commit, manifest_name, part_name
from shoal.checkpoint.store.interface import Attempt, StoreState, located
from shoal.checkpoint.store.step_names import (
    COMMIT,
    Listing,
    check_place,
    pending_name,
    tombstone_name,
)
from shoal.errors import CorruptCheckpointError, UnsupportedCheckpointError


class StandingCommit(NamedTuple):
    """What is committed in a directory."""

    file: str  # COMMIT, or a tombstone that is about to be renamed back
    commit: Commit


def listing(folder: Folder) -> Listing:
    """List a directory."""
    return Listing.of(folder.names())


def read_commit(folder: Folder, name: str) -> Commit | None:
    """Return the contents of COMMIT, or of a tombstone; None if there is none.

    Raises:
      CorruptCheckpointError: it contradicts itself, or is a link that leads nowhere.
    """
    try:
        size = folder.size(name)
        if size > COMMIT_BYTES:
            raise CorruptCheckpointError(
                f"{folder.path}: {name} has {size:,} bytes, at most {COMMIT_BYTES:,} are possible",
                path=folder.path,
                file=name,
            )
        with located(folder.path):
            return decode_commit(folder.read(name), name)
    except FileNotFoundError:
        if not os.path.islink(os.path.join(folder.path, name)):
            return None
        raise CorruptCheckpointError(
            f"{folder.path}: {name} {absent(folder.path, name)}", path=folder.path, file=name
        ) from None


def standing_commit(folder: Folder) -> StandingCommit | None:
    """Return what is committed and the file that says so; None if nothing is.

    The files that the commit names may be gone.

    That file is COMMIT, unless it was renamed to delete another attempt that is gone by now, and
    has not been renamed back yet.

    Raises:
      CorruptCheckpointError: COMMIT contradicts itself.
    """
    commit = read_commit(folder, COMMIT)
    if commit:
        return StandingCommit(COMMIT, commit)
    tombstones = listing(folder).tombstones
    for attempt in tombstones:
        name = tombstone_name(attempt)
        with contextlib.suppress(CorruptCheckpointError):
            commit = read_commit(folder, name)
            if commit and commit.attempt != attempt:
                return StandingCommit(name, commit)
    # It may have been renamed back since it was looked for.
    commit = read_commit(folder, COMMIT)
    if commit:
        return StandingCommit(COMMIT, commit)
    return None


def committed(folder: Folder) -> Commit | None:
    """Return the contents of COMMIT; None if there is none.

    Raises:
      CorruptCheckpointError: it contradicts itself, the names and sizes of files it vouches for, or
        the name of the directory, which belongs to another step.
    """
    standing = standing_commit(folder)
    while standing:
        commit = standing.commit
        check_place(folder.path, commit.step, standing.file)
        wrong = _missing_or_cut(folder, commit)
        if wrong is None:
            return commit
        before, standing = standing, standing_commit(folder)
        if standing and standing.commit == before.commit:  # otherwise it was deleted concurrently
            raise wrong
    return None


def _missing_or_cut(folder: Folder, commit: Commit) -> CorruptCheckpointError | None:
    for blob in (commit.manifest, commit.index):
        try:
            size = folder.size(blob.name)
        except FileNotFoundError:
            problem = absent(folder.path, blob.name)
        else:
            if size == blob.bytes:
                continue
            problem = f"has {size:,} bytes, {blob.bytes:,} were written"
        return CorruptCheckpointError(
            f"{folder.path}: {blob.name} {problem}; COMMIT vouches for it\n"
            "the checkpoint is damaged: restore another step",
            path=folder.path,
            file=blob.name,
        )
    return None


def see(folder: Folder, attempt: str) -> bool:
    """Is the attempt alive, as this host sees the storage?"""
    try:
        folder.size(pending_name(attempt))  # opens the file: listings may be cached by the host
    except FileNotFoundError:
        return False
    return True


def _is_complete(folder: Folder, attempt: str, names: Sequence[str]) -> bool:
    try:
        return not missing_parts(folder, attempt, names)
    except (FileNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError):
        return False


def missing_parts(folder: Folder, attempt: str, names: Sequence[str]) -> list[int]:
    """Return the processes whose parts are not among `names`.

    Raises:
      FileNotFoundError: there is no manifest.
      CorruptCheckpointError, UnsupportedCheckpointError: it cannot be read.
    """
    name = manifest_name(attempt)
    with located(folder.path):
        num_processes = decode_manifest(folder.read(name), name).num_processes
    there = set(names)
    return [process for process in range(num_processes) if part_name(attempt, process) not in there]


def folder_state(folder: Folder) -> StoreState:
    """Return the state of a directory. Raises as `committed`."""
    there = listing(folder)
    commit = committed(folder)  # after the listing: an attempt may be committed meanwhile
    own = commit.attempt if commit else ""
    attempts = [
        _look_at(folder, attempt, names)
        for attempt, names in there.attempts.items()
        if attempt != own
    ]
    return StoreState(commit, attempts, there.tombstones, there.is_pinned, there.others)


def _look_at(folder: Folder, attempt: str, names: tuple[str, ...]) -> Attempt:
    owner: Mapping[str, Any] = {}
    try:
        age_s = folder.age_s(pending_name(attempt))
        with contextlib.suppress(ValueError):  # half written, or already COMMIT's text
            pending = json.loads(folder.read(pending_name(attempt)))
            owner = pending if isinstance(pending, dict) else {}
        is_live = True
    except FileNotFoundError:
        age_s, is_live = math.inf, False
    whole = _is_complete(folder, attempt, names)
    return Attempt(
        id=attempt,
        is_live=is_live,
        is_complete=whole,
        idle_s=max(0.0, age_s),
        owner=owner,
        names=names,
        ahead_s=max(0.0, -age_s),
    )
