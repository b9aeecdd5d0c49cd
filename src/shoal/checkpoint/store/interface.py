"""The operations of a store, and the errors that all stores have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from shoal.checkpoint.format.records import Commit, Manifest, Part
from shoal.checkpoint.store.step_names import step_at
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    SaveAbortedError,
    StepAlreadyCommittedError,
    StorageError,
)

Value = TypeVar("Value")

_SLACK_S = 1.0  # tolerated skew between clocks that stamp files


Left = Callable[[], float]  # the seconds that are left


class OpenFile(Protocol):
    """A new file being written."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Thread-safe.

        It need not be copied: the memory stays as it is until the file is finished or discarded.
        """

    def finish(self, num_bytes: int) -> None:
        """Truncate the file to its length, make it durable and close it."""

    def discard(self) -> None:
        """Close it in any state."""


@dataclass(frozen=True)
class Attempt:
    """The files of one uncommitted attempt."""

    id: str
    is_live: bool  # it may still be committed
    is_complete: bool  # manifest and all parts exist
    idle_s: float  # since its lease was last refreshed; inf: it cannot be committed any more
    owner: Mapping[str, Any]  # see `Store.begin`
    names: tuple[str, ...]  # its files
    ahead_s: float = 0.0  # by which that time is in the future; then `idle_s` is 0 (unknown)

    @property
    def is_ahead(self) -> bool:
        """Is its time so far in the future that it is meaningless?"""
        return self.ahead_s > _SLACK_S


class StoreState(NamedTuple):
    """What is in the place of one checkpoint."""

    commit: Commit | None
    attempts: Sequence[Attempt]
    deleting: Sequence[str]  # attempts being deleted
    is_pinned: bool
    others: Sequence[str]  # files that are not of a checkpoint


class Pace(NamedTuple):
    """How a store is asked: a request costs microseconds, or tenths of a second and some money."""

    lease_s: float  # a save that was not refreshed for this long is stale, unless users say else
    beat_s: float  # least time between refreshes
    look_s: float  # time between looks for a file of another process
    sizes_first: bool  # sizes of files are asked for before they are read
    writes_whole: bool  # large files appear whole, and may be written again
    gap_bytes: int  # read through, rather than begin another request
    request_bytes: int  # most of one read
    reads: int | None  # at a time; None: as many as there are cores
    looks: int  # small files that are read at a time


class Got(NamedTuple):
    """What a read has found."""

    num_bytes: int  # fewer than asked for: the file ends there
    size: int | None  # of the whole file, if the answer says it


class Files(Protocol):
    """A place with files. Names are those of its own files."""

    @property
    def path(self) -> str:
        """The path or address, as messages show it."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; FileNotFoundError if there is none."""

    def read(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        """Return the contents of a file; FileNotFoundError if there is none."""


class Store(Files, Protocol):
    """The place of one checkpoint, or of the steps of a run.

    Any failure of the storage is a `StorageError`. Any process may call anything, concurrently and
    repeatedly: what has been done already is not an error.
    """

    # ---- where

    def step(self, step: int) -> Store:
        """Return the place of a step of a run, which may not exist yet."""

    def steps(self, first: int = 0) -> list[tuple[int, Store]]:
        """Return the places of all steps of a run from `first` on, in order, without reading them.

        A bucket lists the register of each deleted step, too: this may take long from 0 on.
        """

    def unsettled(self) -> list[tuple[int, Store]]:
        """Return those of `steps` where something may be left to do, or that cannot be read.

        For `recover` and `collect_garbage`.
        """

    def names(self) -> list[str]:
        """Return the names of what is in it, sorted; of a place that does not exist, none."""

    def why_absent(self, name: str = "") -> str:
        """Return why a file, or the place, is not there, if that is known: a dangling link."""

    @property
    def is_link(self) -> bool:
        """Is this another name of a place that lies elsewhere?"""

    @property
    def pace(self) -> Pace:
        """How it is asked."""

    def limited(self, left: Left) -> Store:
        """Return the same place, whose requests fail once no time is left, where they can.

        Each request has a few seconds all the same: what was begun is to be ended.
        """

    # ---- files

    def read_at(self, name: str, offset: int, parts: Sequence[memoryview]) -> Got:
        """Fill buffers, one after the other, from `offset`. Thread-safe.

        Raises:
          FileNotFoundError: there is no such file.
        """

    def leave(self, name: str) -> None:
        """Create an empty file, and the place."""

    def remove(self, name: str) -> None:
        """Remove a file; it need not exist."""

    # ---- one save

    def check_writable(self) -> int | None:
        """Return how many bytes may be written; None: unknown. Writes nothing.

        Raises:
          StorageError: this process cannot save here.
        """

    def begin(self, manifest: Manifest, owner: Mapping[str, Any]) -> None:
        """Begin an attempt, durably: from now on it may be committed.

        Args:
          owner: host, pid, start time; and the committed attempt that this one is to replace, if
            any, as "replaces".

        Raises:
          StepAlreadyCommittedError: something is committed here that it does not replace.
          SaveAbortedError: another process ended the attempt at once.
        """

    def is_open(self, attempt: str) -> bool:
        """Is the attempt alive, as this host sees the storage?"""

    def refresh(self, attempt: str) -> None:
        """Refresh the lease of an attempt: it is being written."""

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """Create a large file for writing. FileExistsError if it exists."""

    def write_part(self, part: Part) -> None:
        """Vouch for the data of one process, durably, after all of it is written.

        Raises:
          SaveAbortedError: another process ended the attempt.
        """

    def missing_parts(self, attempt: str) -> list[int]:
        """Return the processes that have not vouched for their data.

        Raises:
          FileNotFoundError: there is no manifest.
          CorruptCheckpointError, UnsupportedCheckpointError: it cannot be read.
        """

    def commit(self, attempt: str, replaced: str = "") -> Commit:
        """Commit an attempt of which all parts exist, durably; tidy afterwards.

        Args:
          replaced: the committed attempt that this one replaces, in one change, unless it is
            pinned: at any moment one of the two is committed, and its files are there.

        Raises:
          StepAlreadyCommittedError: another attempt is committed.
          SaveAbortedError: another process ended the attempt, or parts are missing.
          CorruptCheckpointError: the parts contradict the manifest or the files.
          StorageError: the storage failed; the attempt may be committed all the same.
        """

    def is_standing(self, attempt: str) -> bool:
        """Is this attempt the committed one? False also where that cannot be read."""

    def commit_despite(self, error: StorageError, attempt: str) -> Commit:
        """Return the commit of an attempt that is standing, although its commit raised an error.

        Raises:
          StorageError: what is standing may not survive a crash.
        """

    def abandon(self, attempt: str) -> Commit | None:
        """End an attempt: it can no longer be committed; then remove its files.

        Returns the commit if the attempt was committed already: nothing is removed then.
        """

    # ---- upkeep

    def committed(self) -> Commit | None:
        """Return what is committed here; None if nothing is.

        Raises:
          CorruptCheckpointError: that contradicts itself, its files, or the step of this place.
        """

    def standing(self) -> Commit | None:
        """As `committed`, but the files may be gone, and the step may be of another place."""

    def state(self) -> StoreState:
        """Return what is here. Raises as `committed`."""

    def recover(self) -> Commit | None:
        """Commit a complete attempt if nothing is committed; finish interrupted deletions.

        One that replaces what is committed is committed, too. Of several complete attempts the one
        refreshed last is committed. Returns the commit.

        Raises:
          CorruptCheckpointError: as `committed`; nothing is changed then.
        """

    def collect_garbage(self, *, idle_s: float) -> list[str]:
        """End attempts that were not refreshed for `idle_s`; return the names removed.

        Spares what is committed, live attempts, and names that are not of a checkpoint. A complete
        attempt is recovered rather than ended.
        """

    def delete(self, attempt: str) -> bool:
        """Delete what is committed, if that is `attempt`; return False if it is pinned: it stays.

        A crash in between leaves it deleted; `recover` finishes the job.
        """

    def delete_damaged(self) -> bool:
        """As `delete`, whatever is committed, and even if that cannot be read."""

    @property
    def is_pinned(self) -> bool:
        """Is it protected from deletion?"""

    def pin(self) -> bool:
        """Protect what is committed from deletion; return False if nothing is."""

    def unpin(self) -> None:
        """Undo `pin`."""


def confirmed(look: Callable[[], Value]) -> Value:
    """Return what `look` finds; damage or absence counts only if it finds the same twice.

    Each look must send requests of its own: one answer of a bucket, or of a proxy before it, may be
    a page of HTML, a 404, or have a bit flipped, and the checkpoint is intact.
    """
    try:
        return look()
    except (FileNotFoundError, CorruptCheckpointError) as error:
        first = type(error)
    try:
        return look()
    except (FileNotFoundError, CorruptCheckpointError) as second:
        if isinstance(second, first):
            raise
    return look()  # it was damaged in one answer, and absent in the other


@contextmanager
def located(path: str) -> Iterator[None]:
    """Name the place in errors about the contents of its files."""
    try:
        yield
    except CheckpointError as error:
        if not error.path:
            error.path = path
            error.args = (f"{path}: {error}",)
        raise


def already_committed(path: str, commit: Commit, replaced: str = "") -> StepAlreadyCommittedError:
    """Return the error for a place where something is saved; `replaced`: as in `Store.commit`."""
    message = f"{path} is already saved, by attempt {commit.attempt}; nothing is overwritten"
    hint = "save to another path, pass overwrite=True to replace it, or delete it"
    if step_at(path) is not None:
        hint = "save another step, or delete this one first"
    if replaced:
        message = (
            f"{path}: attempt {commit.attempt} was committed or pinned there while this save ran; "
            "it stays"
        )
        hint = "save again to replace it, or unpin it first"
    return StepAlreadyCommittedError(
        f"{message}\n{hint}",
        path=path,
        attempt=commit.attempt,
    )


def incomplete_error(path: str, attempt: str, missing: Sequence[int] | None) -> SaveAbortedError:
    """Return the error that names the processes whose parts are missing; None: the manifest is."""
    problem = "its manifest is missing"
    if missing is not None:
        problem = f"process {', '.join(map(str, missing[:20]))} has not finished writing its data"
    return SaveAbortedError(
        f"{path}: attempt {attempt} is not complete: {problem}",
        path=path,
        phase="commit",
        processes=list(missing or ()),
    )


def ended_error(path: str, attempt: str, phase: str) -> SaveAbortedError:
    """Return the error for an attempt ended by another process, because it looked stale."""
    return SaveAbortedError(
        f"{path}: attempt {attempt} was ended by another process: its PENDING is gone\n"
        "it was collected as stale or abandoned; save again",
        path=path,
        phase=phase,
    )
