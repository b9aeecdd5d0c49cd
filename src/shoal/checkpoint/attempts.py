"""What happens to files between the beginning of a save and its end, and after a crash.

::

    begin   PENDING-<attempt>, manifest        an attempt lives as long as its PENDING is there
    part    part-<attempt>-00003               process 3 has written all of its data
    commit  index, PENDING → link → COMMIT     the one moment from which on the step is saved
    tidy    PENDING and parts go

Everything here is a pure function of a folder; nobody asks other processes. Any process may do
any of it, at the same time as others, as often as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.format import Commit, Manifest, Part
from shoal.checkpoint.storage import Folder

__all__ = [
    "Attempt",
    "State",
    "abandon",
    "begin",
    "collect",
    "commit",
    "committed",
    "delete",
    "is_complete",
    "new_attempt",
    "recover",
    "see",
    "state_of",
    "tidy",
    "write_part",
]


def new_attempt() -> str:
    """Return 12 hex digits that no other attempt has."""
    raise NotImplementedError


@dataclass(frozen=True)
class Attempt:
    """Files of one attempt that is not committed."""

    id: str
    is_live: bool  # its PENDING is there: it may still be committed
    is_complete: bool  # manifest and all parts are there
    idle_s: float  # since its PENDING was last touched; inf if there is none
    owner: Mapping[str, Any]  # what its PENDING says: host, pid, when it began
    names: tuple[str, ...]  # its files


@dataclass(frozen=True)
class State:
    """What is in the folder of one step."""

    commit: Commit | None
    attempts: tuple[Attempt, ...]
    tombstones: tuple[str, ...]  # attempts whose deletion began
    is_pinned: bool  # the file KEEP is there
    others: tuple[str, ...]  # names that are nobody's


def committed(folder: Folder) -> Commit | None:
    """Return what COMMIT says, None if there is none.

    Raises:
      CorruptCheckpoint: it contradicts itself, or the names and sizes that it vouches for.
    """
    raise NotImplementedError


def state_of(folder: Folder) -> State:
    """Return what is there. Raises as `committed`."""
    raise NotImplementedError


def begin(folder: Folder, manifest: Manifest, owner: Mapping[str, Any]) -> None:
    """Make the folder, PENDING and the manifest, durably.

    Raises:
      StepAlreadyCommitted: there is a COMMIT.
    """
    raise NotImplementedError


def see(folder: Folder, attempt: str) -> bool:
    """Is the attempt alive, as this host sees the storage?"""
    raise NotImplementedError


def write_part(folder: Folder, part: Part) -> None:
    """Write a part under another name, durably, then give it its own."""
    raise NotImplementedError


def is_complete(folder: Folder, attempt: str) -> bool:
    """Are manifest and all parts there?"""
    raise NotImplementedError


def commit(folder: Folder, attempt: str, metrics: Mapping[str, float]) -> Commit:
    """Check that the parts tile every leaf, write the index, and commit; tidy afterwards.

    Raises:
      StepAlreadyCommitted: another attempt is committed.
      SaveAborted: the attempt was ended by somebody (its PENDING is gone), or parts are missing.
      CorruptCheckpoint: the parts contradict the manifest or the files.
    """
    raise NotImplementedError


def tidy(folder: Folder, commit: Commit) -> None:
    """Remove what a committed attempt no longer needs."""
    raise NotImplementedError


def abandon(folder: Folder, attempt: str) -> Commit | None:
    """End an attempt: PENDING goes first, so that nobody can commit it any more; then its files.

    Returns what COMMIT says if that attempt was committed in the last moment: nothing is removed.
    """
    raise NotImplementedError


def recover(folder: Folder) -> Commit | None:
    """Commit a complete attempt of a step that has no COMMIT; finish deletions and tidying.

    Returns the commit that stands afterwards, None if there is none.
    """
    raise NotImplementedError


def collect(folder: Folder, *, idle_s: float) -> list[str]:
    """End attempts that nobody has touched for `idle_s`, remove what nobody owns.

    Spares committed files and attempts that are alive. Returns the names removed.
    """
    raise NotImplementedError


def delete(folder: Folder, attempt: str) -> None:
    """Delete a committed step: COMMIT becomes DELETING-<attempt>, then its files go, then that.

    A crash in between leaves a step that is gone; `recover` and `collect` finish the deletion.
    """
    raise NotImplementedError
