"""A directory as a store: the operations of `disk` on one `Folder`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shoal import settings
from shoal.checkpoint.disk import committing, step_folder, sweep
from shoal.checkpoint.disk.os_errors import storage_error
from shoal.checkpoint.disk.storage import Folder, LocalFolder
from shoal.checkpoint.format.records import Commit, Manifest, Part
from shoal.checkpoint.planning.read_plan import GAP_BYTES, REQUEST_BYTES
from shoal.checkpoint.store.interface import Got, Left, OpenFile, Pace, Store, StoreState
from shoal.checkpoint.store.step_names import KEEP, pending_name, step_name, step_of
from shoal.errors import StorageError
from shoal.paths import dangling_link

_LOOK_S = 0.05

_LOG = logging.getLogger("shoal")


class LocalStore:
    """See `store.interface.Store`."""

    def __init__(self, folder: Folder | str | os.PathLike[str]) -> None:
        self._folder = LocalFolder(folder) if isinstance(folder, str | os.PathLike) else folder
        self._ignored: set[int] = set()  # files that a warning has named

    def __repr__(self) -> str:
        return f"LocalStore({self.path!r})"

    def __str__(self) -> str:
        return self.path

    # ---- where

    @property
    def path(self) -> str:
        """See `Store.path`."""
        return self._folder.path

    def step(self, step: int) -> Store:
        """See `Store.step`."""
        return LocalStore(self._folder.folder(step_name(step)))

    def steps(self, first: int = 0) -> list[tuple[int, Store]]:
        """See `Store.steps`."""
        numbers = sorted(step for name in self.names() if (step := step_of(name)) is not None)
        return [
            (step, self.step(step))
            for step in numbers
            if step >= first and not self._is_ignored(step)
        ]

    def _is_ignored(self, step: int) -> bool:
        """Return whether a file has the name of a step; warn of it, once."""
        place = self._folder.folder(step_name(step))
        if not place.is_file():
            return False
        if step not in self._ignored:
            self._ignored.add(step)
            _LOG.warning("%s is a file, not the directory of a step: it is ignored", place.path)
        return True

    def unsettled(self) -> list[tuple[int, Store]]:
        """See `Store.unsettled`. To look at a step costs as much as `recover`."""
        return self.steps()

    def names(self) -> list[str]:
        """See `Store.names`."""
        return self._folder.names()

    def why_absent(self, name: str = "") -> str:
        """See `Store.why_absent`."""
        return dangling_link(os.path.join(self.path, name))

    @property
    def is_link(self) -> bool:
        """See `Store.is_link`."""
        return self._folder.is_link()

    @property
    def pace(self) -> Pace:
        """See `Store.pace`."""
        return Pace(
            lease_s=settings.seconds("SHOAL_SAVE_LEASE_S"),
            beat_s=0.0,
            look_s=_LOOK_S,
            sizes_first=True,
            writes_whole=False,
            gap_bytes=GAP_BYTES,
            request_bytes=REQUEST_BYTES,
            reads=None,
            looks=1,
        )

    def limited(self, left: Left) -> Store:
        """See `Store.limited`. A call of the system cannot be ended."""
        return self

    # ---- files

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return self._folder.size(name)

    def read(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        """See `Store.read`."""
        return self._folder.read(name, most_bytes)

    def read_at(self, name: str, offset: int, parts: Sequence[memoryview]) -> Got:
        """See `Store.read_at`."""
        done = 0
        for part in parts:
            got = self._folder.read_at(name, offset + done, part)
            done += got
            if got < len(part):
                break
        return Got(done, None)

    def leave(self, name: str) -> None:
        """See `Store.leave`."""
        self._folder.make()
        self._folder.write_new(name, b"")

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        self._folder.remove(name)

    # ---- one save

    def check_writable(self) -> int | None:
        """See `Store.check_writable`."""
        there = path = self.path
        while not os.path.lexists(there) and os.path.dirname(there) != there:
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            why = errno.ENOTDIR
        elif os.access(there, os.W_OK | os.X_OK):
            return self._folder.free_bytes()
        else:
            is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
            why = errno.EROFS if is_read_only else errno.EACCES
        doing = "write to" if there == path else "make a directory in"
        raise storage_error(OSError(why, os.strerror(why)), there, doing)

    def begin(self, manifest: Manifest, owner: Mapping[str, Any]) -> None:
        """See `Store.begin`."""
        committing.begin_attempt(self._folder, manifest, owner)

    def is_open(self, attempt: str) -> bool:
        """See `Store.is_open`."""
        return step_folder.see(self._folder, attempt)

    def refresh(self, attempt: str) -> None:
        """See `Store.refresh`."""
        with contextlib.suppress(FileNotFoundError):  # committed or ended by now
            self._folder.touch(pending_name(attempt))

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """See `Store.open_new`."""
        return self._folder.open_new(name, num_bytes)

    def write_part(self, part: Part) -> None:
        """See `Store.write_part`."""
        committing.write_part(self._folder, part)

    def missing_parts(self, attempt: str) -> list[int]:
        """See `Store.missing_parts`."""
        return step_folder.missing_parts(self._folder, attempt, self.names())

    def commit(self, attempt: str, replaced: str = "") -> Commit:
        """See `Store.commit`."""
        return committing.commit(self._folder, attempt, replaced)

    def is_standing(self, attempt: str) -> bool:
        """See `Store.is_standing`."""
        return committing.is_standing(self._folder, attempt)

    def commit_despite(self, error: StorageError, attempt: str) -> Commit:
        """See `Store.commit_despite`. An fsync may succeed after one that failed: not retried."""
        raise committing.in_doubt(error) from error.__cause__

    def abandon(self, attempt: str) -> Commit | None:
        """See `Store.abandon`."""
        return committing.abandon(self._folder, attempt)

    # ---- upkeep

    def committed(self) -> Commit | None:
        """See `Store.committed`."""
        return step_folder.committed(self._folder)

    def standing(self) -> Commit | None:
        """See `Store.standing`."""
        standing = step_folder.standing_commit(self._folder)
        return None if standing is None else standing.commit

    def state(self) -> StoreState:
        """See `Store.state`."""
        return step_folder.folder_state(self._folder)

    def recover(self) -> Commit | None:
        """See `Store.recover`."""
        return sweep.recover_step(self._folder)

    def collect_garbage(self, *, idle_s: float) -> list[str]:
        """See `Store.collect_garbage`."""
        return sweep.collect_garbage(self._folder, idle_s=idle_s)

    def delete(self, attempt: str) -> bool:
        """See `Store.delete`."""
        return sweep.delete_committed(self._folder, attempt)

    def delete_damaged(self) -> bool:
        """See `Store.delete_damaged`."""
        return not self.is_pinned and sweep.delete_damaged(self._folder)

    @property
    def is_pinned(self) -> bool:
        """See `Store.is_pinned`."""
        return KEEP in self.names()

    def pin(self) -> bool:
        """See `Store.pin`."""
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            self._folder.write_new(KEEP, b"")
        self._folder.sync()
        if self.committed() is not None:  # after KEEP is there: see `sweep.delete_committed`
            return True
        self._folder.remove(KEEP)
        self._folder.remove_folder()
        return False

    def unpin(self) -> None:
        """See `Store.unpin`."""
        self._folder.remove(KEEP)
        if self.names():
            self._folder.sync()
