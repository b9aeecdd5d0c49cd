"""The directory of one step: file names, the attempts they belong to, and what is committed."""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal import settings
from shoal.checkpoint.disk.refusal import absent
from shoal.checkpoint.disk.step_names import check_place
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format.json_files import decode_commit, decode_manifest
from shoal.checkpoint.format.records import COMMIT_BYTES, Commit, manifest_name, part_name
from shoal.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from shoal.paths import dangling_link

COMMIT, KEEP = "COMMIT", "KEEP"
_SLACK_S = 1.0  # tolerated skew between clocks that stamp files
_ATTEMPT = "[0-9a-f]{12}"
_OWNED = re.compile(
    rf"(?:PENDING-|manifest-|part-|index-|data-|tmp-)({_ATTEMPT})"
    r"(?:\.json|\.safetensors|-[0-9a-z-]+(?:\.safetensors)?)?"
)
_TOMBSTONE = re.compile(f"DELETING-({_ATTEMPT})")


def new_attempt() -> str:
    """Return a unique attempt id of 12 hex digits."""
    return secrets.token_hex(6)


def pending_name(attempt: str) -> str:
    """Return the name of an attempt's PENDING file, its fence and lease."""
    return f"PENDING-{attempt}"


def tombstone_name(attempt: str) -> str:
    """Return the name that COMMIT is renamed to when the step is deleted."""
    return f"DELETING-{attempt}"


def temporary_name(attempt: str) -> str:
    """Return a unique name for a file that is renamed once complete."""
    return f"tmp-{attempt}-{secrets.token_hex(4)}"


class Listing(NamedTuple):
    """The names in a directory, grouped by attempt."""

    attempts: Mapping[str, tuple[str, ...]]
    tombstones: tuple[str, ...]  # attempt ids, not names
    is_pinned: bool
    others: tuple[str, ...]


def listing(folder: Folder) -> Listing:
    """List a directory."""
    attempts: dict[str, list[str]] = {}
    tombstones, others = [], []
    names = folder.names()
    for name in names:
        if match := _OWNED.fullmatch(name):
            attempts.setdefault(match[1], []).append(name)
        elif match := _TOMBSTONE.fullmatch(name):
            tombstones.append(match[1])
        elif name not in (COMMIT, KEEP):
            others.append(name)
    return Listing(
        {attempt: tuple(owned) for attempt, owned in attempts.items()},
        tuple(tombstones), KEEP in names, tuple(others),
    )  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """The files of one uncommitted attempt."""

    id: str
    is_live: bool  # PENDING exists: it may still be committed
    is_complete: bool  # manifest and all parts exist
    idle_s: float  # since PENDING was last touched; inf without PENDING
    owner: Mapping[str, Any]  # contents of PENDING: host, pid, start time
    names: tuple[str, ...]  # its files
    ahead_s: float = 0.0  # by which that time is in the future; then `idle_s` is 0 (unknown)

    @property
    def is_ahead(self) -> bool:
        """Is its time so far in the future that it is meaningless?"""
        return self.ahead_s > _SLACK_S


@dataclass(frozen=True)
class FolderState:
    """The contents of one step's directory."""

    commit: Commit | None
    attempts: tuple[Attempt, ...]
    tombstones: tuple[str, ...]  # attempts being deleted
    is_pinned: bool  # the file KEEP exists
    others: tuple[str, ...]  # files that are not of a checkpoint


@contextlib.contextmanager
def in_folder(folder: Folder) -> Iterator[None]:
    """Name the directory in errors about the contents of its files."""
    try:
        yield
    except CheckpointError as error:
        if not error.path:
            error.path = folder.path
            error.args = (f"{folder.path}: {error}",)
        raise


def read_commit(folder: Folder, name: str) -> Commit | None:
    """Return the contents of COMMIT, or of a tombstone; None if there is none.

    Raises:
      CorruptCheckpointError: it contradicts itself.
    """
    try:
        size = folder.size(name)
        if size > COMMIT_BYTES:
            raise CorruptCheckpointError(
                f"{folder.path}: {name} has {size:,} bytes, at most {COMMIT_BYTES:,} are possible",
                path=folder.path,
                file=name,
            )
        with in_folder(folder):
            return decode_commit(folder.read(name), name)
    except FileNotFoundError:
        return None


def standing_commit(folder: Folder) -> tuple[str, Commit] | None:
    """Return what is committed and the file that says so; the files it names may be gone.

    That file is COMMIT, unless it was renamed to delete another attempt that is gone by now, and
    has not been renamed back yet.

    Raises:
      CorruptCheckpointError: COMMIT contradicts itself.
    """
    if commit := read_commit(folder, COMMIT):
        return COMMIT, commit
    tombstones = listing(folder).tombstones
    for attempt in tombstones:
        name = tombstone_name(attempt)
        with contextlib.suppress(CorruptCheckpointError):
            commit = read_commit(folder, name)
            if commit and commit.attempt != attempt:
                return name, commit
    # It may have been renamed back since it was looked for.
    if commit := read_commit(folder, COMMIT):
        return COMMIT, commit
    return None


def committed(folder: Folder) -> Commit | None:
    """Return the contents of COMMIT; None if there is none.

    Raises:
      CorruptCheckpointError: it contradicts itself, the names and sizes of files it vouches for, or
        the name of the directory, which belongs to another step.
    """
    standing = standing_commit(folder)
    while standing:
        name, commit = standing
        check_place(folder.path, commit.step, name)
        wrong = _missing_or_cut(folder, commit)
        if wrong is None:
            return commit
        before, standing = standing, standing_commit(folder)
        if standing and standing[1] == before[1]:  # otherwise it was deleted concurrently
            raise wrong
    return None


def _missing_or_cut(folder: Folder, commit: Commit) -> CorruptCheckpointError | None:
    for blob in (commit.manifest, commit.index):
        try:
            size = folder.size(blob.name)
        except FileNotFoundError:
            words = absent(folder.path, blob.name)
        else:
            if size == blob.bytes:
                continue
            words = f"has {size:,} bytes, {blob.bytes:,} were written"
        return CorruptCheckpointError(
            f"{folder.path}: {blob.name} {words}; COMMIT vouches for it\n"
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


def is_complete(folder: Folder, attempt: str) -> bool:
    """Do manifest and all parts exist?"""
    return _is_complete(folder, attempt, folder.names())


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
    with in_folder(folder):
        num_processes = decode_manifest(folder.read(name), name).num_processes
    there = set(names)
    return [process for process in range(num_processes) if part_name(attempt, process) not in there]


def folder_state(folder: Folder) -> FolderState:
    """Return the state of a directory. Raises as `committed`."""
    there = listing(folder)
    commit = committed(folder)  # after the listing: an attempt may be committed meanwhile
    own = commit.attempt if commit else ""
    attempts = [
        _look_at(folder, attempt, names)
        for attempt, names in there.attempts.items()
        if attempt != own
    ]
    return FolderState(commit, tuple(attempts), there.tombstones, there.is_pinned, there.others)


def unfinished(folder: Folder) -> str:
    """Return what is known of a step that is not committed: "its save still runs (…)"; or "".

    Which of several attempts will be committed is open: the one touched last is described.
    """
    if link := dangling_link(folder.path):
        return link
    found = [
        _look_at(folder, attempt, names) for attempt, names in listing(folder).attempts.items()
    ]
    live = [one for one in found if one.is_live]
    if not live:
        return ""
    last = min(live, key=lambda one: one.idle_s)
    by = f"by {last.owner.get('host', '?')}, pid {last.owner.get('pid', '?')}"
    who = f"({by}, touched {last.idle_s:.0f} s ago)"
    if last.idle_s < settings.seconds("SHOAL_LEASE_S"):
        return f"its save still runs {who}"
    if last.is_complete:
        return f"its save is complete, but not committed {who}: `shoal ckpt recover` commits it"
    return f"its save ended before it was complete {who}"


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
    return Attempt(attempt, is_live, whole, max(0.0, age_s), owner, names, ahead_s=max(0.0, -age_s))
